"""Tiny random models of every supported family, whose layers do all that the family's layers can do."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 64
WINDOW = 8
CONV_KERNEL = 4

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
LINEAR_ATTENTION = {
    "rms_norm_eps": 1e-3,
    "linear_conv_kernel_dim": CONV_KERNEL,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
KIMI_DELTA = {
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": CONV_KERNEL,
    **LATENT_ATTENTION,
    "rms_norm_eps": 1e-3,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": CONV_KERNEL,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}

# For each family: the configuration class, and what sets it apart from SIZES.
CONFIGS = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "cohere2": (
        "Cohere2Config",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "logit_scale": 1.0,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **LATENT_ATTENTION,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "no_rope_layers": [1, 0, 1],
            "floor_scale": 4,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 16,
        },
    ),
    "qwen3_next": ("Qwen3NextConfig", {**EXPERTS, **LINEAR_ATTENTION}),
    "qwen3_5": ("Qwen3_5TextConfig", {**LINEAR_ATTENTION, "rope_parameters": MROPE}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**EXPERTS, **LINEAR_ATTENTION, "rope_parameters": MROPE}),
    "olmo_hybrid": ("OlmoHybridConfig", {**LINEAR_ATTENTION, "linear_num_key_heads": 4}),
    "lara_mini": (
        "LaraMiniConfig",
        {
            **EXPERTS,
            **LINEAR_ATTENTION,
            "sliding_window": WINDOW,
            "layer_types": ["linear_attention", "sliding_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 4,
        },
    ),
    "kimi_linear": ("KimiLinearConfig", KIMI_DELTA),
    "bailing_hybrid": ("BailingHybridConfig", {**KIMI_DELTA, "head_dim": 8, "num_attention_heads": 4}),
    "bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "falcon_h1": ("FalconH1Config", {**MAMBA2, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 12,
            "conv_kernel": CONV_KERNEL,
            "chunk_size": 8,
            "layers_block_type": ["moe", "linear_attention", "mlp", "full_attention", "linear_attention"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            "rms_norm_eps": 1e-3,
            "head_dim": 16,
            "num_key_value_heads": 4,
            "n_mamba_heads": 4,
            "mamba_ngroups": 2,
            "mamba_d_state": 12,
            "mamba_d_conv": CONV_KERNEL,
            "mamba_expand": 2,
            "chunk_size": 8,
            "use_mem_rope": True,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 4,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8, "conv_L_cache": CONV_KERNEL},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": CONV_KERNEL,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
        },
    ),
}
# Some families are newer than the oldest supported Transformers.
FAMILIES = tuple(family for family, (config_class, _) in CONFIGS.items() if hasattr(transformers, config_class))
# Those that stand behind the last family with nothing but attention.
RECURRENT_FAMILIES = FAMILIES[FAMILIES.index("qwen3_next") :]
# What needs weaker layers than its kind.
GAINS = {"gemma4": 1.2, "zamba2": 1.0}
# What softens its scores has no sdpa.
EAGER_ONLY = ("gpt_oss", "gemma2")
CASES = [(family, "sdpa") for family in FAMILIES if family not in EAGER_ONLY]
CASES += [(family, "eager") for family in FAMILIES]


def first_implementation(family: str) -> str:
    """The attention implementation that the family's models have by default."""
    return next(attention for name, attention in CASES if name == family)


def make_config(family: str, **variation: Any) -> PretrainedConfig:
    """The family's tiny configuration, with some values changed."""
    config_class, differences = CONFIGS[family]
    return getattr(transformers, config_class)(**{**SIZES, **differences, **variation})


@cache
def make_model(family: str, attention: str, **variation: Any) -> PreTrainedModel:
    """The family's tiny model in float32 with seeded random weights; made once, so tests must leave it as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(200 + list(CONFIGS).index(family))
        model = transformers.AutoModelForCausalLM.from_config(
            make_config(family, **variation), attn_implementation=attention, dtype=torch.float32
        ).eval()
        for name, parameter in model.named_parameters():
            # Stronger layers decode more varied text; in some families they would blow rounding errors up.
            gain = GAINS.get(family, 1.2 if family in RECURRENT_FAMILIES else 1.5)
            _randomise(name, parameter.data, gain)
    model.requires_grad_(False)
    return model


def _randomise(name: str, weight: torch.Tensor, gain: float) -> None:
    """Weights that keep activations and logits at unit scale, and make every gate matter."""
    if name.endswith("A_log"):
        weight.uniform_(math.log(0.02), math.log(4.0))
    elif name.endswith(("dt_bias", "sinks")):
        weight.normal_()
    elif weight.ndim == 1:
        weight.add_(torch.randn_like(weight), alpha=0.3)
    elif "embed_tokens" in name:
        weight.normal_(std=0.3)
    else:
        weight.normal_(std=gain / math.sqrt(weight.shape[-1]))
