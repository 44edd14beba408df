"""What decoding allocates beside what standard decoding does: bounded in the prompt's length and in the nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.peak_memory import peak_of
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_ddtree.drafters import DFlashConfig, DFlashDraftModel

HIDDEN, DEPTH, VOCAB = 64, 6, 96
LENGTH = 3000


def make_target(**settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": DEPTH}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    sizes |= {"max_position_embeddings": 2 * LENGTH}
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | none | settings))).eval().requires_grad_(False)


def make_drafter() -> DFlashDraftModel:
    torch.manual_seed(1)
    config = DFlashConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        block_size=4,
        target_layer_ids=[0, 1, 2, 3, 4],
        mask_token_id=1,
        num_target_layers=DEPTH,
    )
    return DFlashDraftModel(config).eval().requires_grad_(False)


@pytest.mark.core
@pytest.mark.parametrize("chunk", [None, 256])
def test_features_of_a_prompt_are_not_kept(chunk: int | None) -> None:
    """Beside the target's own memory: the features of one forward, and what the drafter makes of all of them."""
    target, drafter = make_target(), make_drafter()
    prompt = torch.randint(2, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": chunk}
    plain = peak_of(lambda: target.generate(prompt, **call))
    tree = peak_of(
        lambda: target.generate(prompt, **call, assistant_model=drafter, generation_strategy="ddtree", tree_budget=3)
    )
    features = LENGTH * 5 * HIDDEN * 4
    assert tree - plain <= (0.7 if chunk is None else 0.35) * features
