"""Targets and drafters that PEFT, `torch.compile` or data parallelism has wrapped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import make_model
from helpers.random_drafter import make_drafter
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_ddtree
from hf_ddtree.interop.wrappers import unwrapped

PROMPT = torch.arange(1, 12)[None]
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


class Adapter(nn.Module):
    """What PEFT's models have that tells them apart."""

    def __init__(self, model: nn.Module, is_prompt_learning: bool = False) -> None:
        super().__init__()
        self.base_model = model
        self.peft_config = {"default": type("Config", (), {"is_prompt_learning": is_prompt_learning})()}

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def generate(self, **arguments: Any) -> Tensor:
        return self.base_model.generate(**arguments)


WRAPPERS = {
    "adapter": Adapter,
    "compiled": torch.compile,
    "data parallel": nn.DataParallel,
    "compiled adapter": lambda model: torch.compile(Adapter(model)),
}


def decode(target: Any, drafter: Any) -> list[list[int]]:
    arguments = {"assistant_model": drafter, "generation_strategy": "ddtree", "tree_budget": 9}
    return target.generate(input_ids=PROMPT, **ARGUMENTS, **arguments).tolist()


@pytest.mark.parametrize("kind", ["dflash", "causal language model"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_drafters(name: str, kind: str) -> None:
    target = make_model("llama", "sdpa")
    plain = target.generate(PROMPT, **ARGUMENTS).tolist()
    drafter: Any = make_drafter(target) if kind == "dflash" else copy.deepcopy(target)
    wrapped = WRAPPERS[name](drafter)
    assert decode(target, wrapped) == plain
    by_hand = hf_ddtree.ddtree(assistant_model=wrapped, tree_budget=9)
    assert target.generate(PROMPT, **ARGUMENTS, custom_generate=by_hand).tolist() == plain
    report = hf_ddtree.check(target, wrapped)
    assert report.drafter_fits


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_targets(name: str, tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    plain = target.generate(PROMPT, **ARGUMENTS).tolist()
    make_drafter(target).save_pretrained(tmp_path)
    wrapped = WRAPPERS[name](target)
    drafter = hf_ddtree.load_drafter(tmp_path, target_model=wrapped)
    assert hf_ddtree.check(wrapped, drafter).supported
    if name != "data parallel":  # which has no `generate`
        assert decode(wrapped, drafter) == plain


def test_learnt_prompts_are_refused(tmp_path: Path) -> None:
    target = make_model("llama", "sdpa")
    wrapped = Adapter(target, is_prompt_learning=True)
    for call in (
        lambda: decode(target, wrapped),
        lambda: hf_ddtree.load_drafter(tmp_path, target_model=wrapped),  # type: ignore[arg-type]
        lambda: hf_ddtree.check(wrapped),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"with learnt prompts, .*\.get_base_model\(\)`"):
            call()


def test_what_is_not_wrapped_stays() -> None:
    target = make_model("llama", "sdpa")
    assert unwrapped(target, "model") is target
    assert unwrapped("a name", "model") == "a name"


def test_lora(tmp_path: Path) -> None:
    """With PEFT itself, on the target and on the drafter: what it has learnt counts."""
    peft = pytest.importorskip("peft")
    target: PreTrainedModel = copy.deepcopy(make_model("llama", "sdpa"))
    without = target.generate(PROMPT, **ARGUMENTS).tolist()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(target, config).eval()
    plain = wrapped.generate(input_ids=PROMPT, **ARGUMENTS).tolist()
    assert plain != without
    make_drafter(make_model("llama", "sdpa")).save_pretrained(tmp_path)
    drafter = hf_ddtree.load_drafter(tmp_path, target_model=wrapped)
    assert decode(wrapped, drafter) == plain
    assert decode(wrapped, wrapped) == plain
