"""Small configurations for scripts/model_table.py."""

from __future__ import annotations

from typing import Any

WINDOW = 8

# What the sizes of language models are called, whichever of these a configuration has.
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "embedding_size", "lru_width", "word_embed_proj_dim"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "ff_dim"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 4),
    **dict.fromkeys(["decoder_layers", "encoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["attention_heads", "decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads"], 2),
    **dict.fromkeys(["head_dim", "global_head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"], 8),
    **dict.fromkeys(["rotary_dim", "query_pre_attn_scalar", "laurel_rank", "hidden_size_per_layer_input"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"], 512),
    **dict.fromkeys(["sliding_window", "attention_window_size", "window_size", "local_attention"], WINDOW),
    "attention_chunk_size": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_top_k", "moe_k", "moe_topk"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 24),
    **dict.fromkeys(["n_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"], 1),
    "first_k_dense_replace": 1,
    **dict.fromkeys(["linear_num_key_heads", "linear_conv_kernel_dim"], 2),
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    **dict.fromkeys(["index_n_heads", "index_topk"], 2),
    "index_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Parts of a configuration that are language models.
TEXT_PARTS = ("text_config", "decoder", "llm_config", "thinker_config", "language_config")
# The same for all other parts, which no prompt of text reaches.
VISION: dict[str, Any] = {
    **dict.fromkeys(
        ["hidden_size", "embed_dim", "d_model", "out_hidden_size", "projection_dim", "mm_hidden_size"], 32
    ),
    **dict.fromkeys(["intermediate_size", "encoder_ffn_dim", "ffn_dim"], 48),
    **dict.fromkeys(["depth", "num_hidden_layers", "encoder_layers", "num_layers", "n_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "num_heads", "encoder_attention_heads"], 4),
    "image_size": 28,
    "patch_size": 14,
    **dict.fromkeys(["deepstack_visual_indexes", "fullatt_block_indexes"], [0]),
    "vocab_size": 64,
}
SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_chunk_size": 8}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
# What a model type needs besides, or instead.
SIZES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LINEAR_AND_FULL,
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "cohere2": SLIDING_AND_FULL,
    "cohere_compass_text": {
        **SLIDING_AND_FULL,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {**SLIDING_AND_FULL, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "exaone4": SLIDING_AND_FULL,
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3_text": SLIDING_AND_FULL,
    "gemma3n_text": SLIDING_AND_FULL,
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_text": SLIDING_AND_FULL,
    "gemma4_unified_text": SLIDING_AND_FULL,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**MAMBA, **LINEAR_AND_FULL},
    "glm4v_moe_text": {
        "rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    },
    "glm4v_text": MROPE,
    "glm_ocr_text": MROPE,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": LINEAR_AND_FULL,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0] * 2,
        "floor_scale": 4,
        "attn_scale": 0.5,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "minimax": LINEAR_AND_FULL,
    "ministral": SLIDING_AND_FULL,
    "modernbert-decoder": SLIDING_AND_FULL,
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 12,
        "chunk_size": 8,
        "layers_block_type": ["moe", "linear_attention", "mlp", "full_attention"],
        "moe_shared_expert_intermediate_size": 24,
    },
    "paddleocr_vl_text": MROPE,
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    "qwen2_vl_text": MROPE,
    "qwen3_5_moe_text": LINEAR_AND_FULL,
    "qwen3_5_text": LINEAR_AND_FULL,
    "qwen3_next": LINEAR_AND_FULL,
    "qwen4_exp_text": {
        **LINEAR_AND_FULL,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "hc_lowrank": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * 2, "feed_forward_size": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "num_key_value_heads": 4,
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "mamba_d_state": 12,
        "mamba_expand": 2,
        "chunk_size": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}
