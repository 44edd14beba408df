"""The Python blocks of the pages in docs/, run in their order, with the pair that ships in place of what they name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, pipeline

import hf_ddtree
from hf_ddtree.demo import demo_folders
from hf_ddtree.training import new_drafter

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TARGET, DRAFTER = demo_folders()
MASK_TOKEN = 3
REPLACED = {
    r"\"Qwen/[\w.-]+\"": repr(TARGET),
    r"\"z-lab/[\w.-]+\"": repr(DRAFTER),
    r"dtype=\"auto\"": "dtype=torch.float32",
    r", device_map=\"auto\"": "",
    r"steps=5000": "steps=1",
    r"window=2048": "window=64",
    r"length=2048": "length=64",
    r"documents\[20:\]": "documents[1:]",
    r"documents\[:20\]": "documents[:1]",
}
# Blocks that other tests run, by what only they have.
ELSEWHERE = {
    "_compile_all_devices": "test_static.py compiles",
    "DistributedConfig": "test_distributed.py starts processes",
}


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def names(page: Path) -> dict[str, Any]:
    """What a page takes for granted."""
    model, drafter, tokenizer = hf_ddtree.load_demo()
    inputs = tokenizer("def read_lines(path):\n", return_tensors="pt")
    if page.stem == "trees":  # which is about drafters that do not know their branches
        drafter = new_drafter(model, MASK_TOKEN, "dflash", window=64)
        model.generate(**inputs, assistant_model=drafter, generation_strategy="ddtree", max_new_tokens=8)
    ids = inputs.input_ids[0].tolist()
    return {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "AutoTokenizer": AutoTokenizer,
        "BitsAndBytesConfig": BitsAndBytesConfig,
        "ddtree": {"generation_strategy": "ddtree", "assistant_model": drafter, "max_new_tokens": 8},
        "drafter": drafter,
        "drafter_name": DRAFTER,
        "hf_ddtree": hf_ddtree,
        "inputs": inputs,
        "model": model,
        "name": TARGET,
        "pipeline": pipeline,
        "texts": [(ids, 4 * ids)] * 3,
        "tokenizer": tokenizer,
        "torch": torch,
        "turn_1": {"inputs": inputs.input_ids},
        "turn_2": {"inputs": tokenizer("def read_lines(path):\n" * 8, return_tensors="pt").input_ids},
    }


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_the_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known, run = names(page), 0
    for block in blocks(page):
        if any(mark in block for mark in ELSEWHERE):
            continue
        if "BitsAndBytesConfig" in block:
            pytest.importorskip("bitsandbytes")
        if "hf_ddtree.training" in block:
            pytest.importorskip("accelerate")
        for pattern, text in REPLACED.items():
            block = re.sub(pattern, lambda _, text=text: text, block)
        exec(compile(block, page.name, "exec"), known)
        run += 1
    assert run


def test_no_block_is_excused_without_need() -> None:
    text = "".join(block for page in PAGES for block in blocks(page))
    assert all(mark in text for mark in ELSEWHERE)


def test_versions_are_the_same_everywhere() -> None:
    version = hf_ddtree.__version__
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
