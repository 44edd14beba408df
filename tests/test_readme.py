"""The code in README.md, as it stands there, with the pair that ships in place of the repositories that it names."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_ddtree.demo import demo_folders

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TARGET, DRAFTER = "Qwen/Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash"


@pytest.fixture
def chat_pair(tmp_path):
    """Folders with the pair that ships, in float32 and with a chat template."""
    target, drafter = demo_folders()
    AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).save_pretrained(tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "target")
    shutil.copytree(drafter, tmp_path / "drafter")
    return tmp_path / "target", tmp_path / "drafter"


def test_the_blocks_run_and_give_the_tokens_of_standard_decoding(chat_pair, capsys):
    pytest.importorskip("accelerate")
    target, drafter = map(str, chat_pair)
    assert [marked in block for marked, block in zip((DRAFTER, "tree_lookup", "streamer"), BLOCKS)] == [True] * 3
    names = {}
    texts = []
    for block in BLOCKS:
        code = (
            block.replace(DRAFTER, drafter).replace(TARGET, target).replace("max_new_tokens=256", "max_new_tokens=48")
        )
        exec(code, names)
        texts.append(capsys.readouterr().out.strip("\n"))
        model, inputs, out = names["model"], names["inputs"], names["out"]
        assert torch.equal(out, model.generate(**inputs, max_new_tokens=48))
    assert texts[0] == texts[2] != "" == texts[1]


def test_every_command_and_example_of_the_readme_is_there():
    for name in re.findall(r"\]\(((?:docs|examples|recipes|hub)/[\w/.]*)", README):
        assert (Path(__file__).parents[1] / name).exists(), name
