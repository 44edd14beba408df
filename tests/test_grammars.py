"""Logits processors of other packages that hold a state: the same valid output as in standard decoding, by tree."""

import json
import re

import pytest
import torch
from transformers import PreTrainedTokenizerBase, tokenization_utils

import hf_ddtree

NEW_TOKENS = 70
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["module", "class", "function"]},
        "name": {"type": "string", "pattern": "^[a-z]{1,10}$"},
        "line": {"type": "integer", "minimum": 0, "maximum": 999},
        "public": {"type": "boolean"},
    },
    "required": ["kind", "name", "line", "public"],
    "additionalProperties": False,
}
CALL = r"[a-z][a-z_]{1,4}\([a-z0-9](, [a-z0-9]){0,2}\)"


@pytest.fixture(scope="module")
def pair():
    return hf_ddtree.load_demo()


@pytest.fixture(scope="module")
def make_json(pair):
    """Makes processors that let through nothing but JSON of the schema."""
    xgrammar = pytest.importorskip("xgrammar", reason="`pip install --no-deps xgrammar apache-tvm-ffi`")
    from xgrammar.contrib.hf import LogitsProcessor

    model, _, tokenizer = pair
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    return lambda: {"logits_processor": [LogitsProcessor(grammar)]}


@pytest.fixture
def allowed_tokens(pair, monkeypatch):
    """What tells the tokens that continue a regular expression, for `prefix_allowed_tokens_fn`."""
    lmformatenforcer = pytest.importorskip("lmformatenforcer")
    # The package looks for the class where Transformers 4 had it.
    monkeypatch.setattr(tokenization_utils, "PreTrainedTokenizerBase", PreTrainedTokenizerBase, raising=False)
    from lmformatenforcer.integrations.transformers import build_transformers_prefix_allowed_tokens_fn

    def make():
        return build_transformers_prefix_allowed_tokens_fn(pair[2], lmformatenforcer.RegexParser(CALL))

    return make


def generate(pair, make_arguments, prompts, **kwargs):
    """The texts after the prompts, by standard decoding and by tree, which must be of the same tokens."""
    model, drafter, tokenizer = pair
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    arguments = {**inputs, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **kwargs}
    torch.manual_seed(0)
    plain = model.generate(**arguments, **make_arguments())
    torch.manual_seed(0)
    output = model.generate(
        **arguments,
        **make_arguments(),
        generation_strategy="ddtree",
        assistant_model=drafter,
        tree_budget=24,
    )
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert max(output.ddtree_stats.tree_sizes) > 1
    assert output.ddtree_stats.target_forwards < plain.sequences.shape[1] - inputs.input_ids.shape[1]
    return tokenizer.batch_decode(output.sequences[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 1.2}], ids=["greedy", "sampled"])
def test_json_schema(pair, make_json, how):
    for text in generate(pair, make_json, ["import json\n\nENTRY = "], **how):
        entry = json.loads(text)
        assert set(entry) == set(SCHEMA["required"]) and re.fullmatch("[a-z]{1,10}", entry["name"])


def test_json_schema_in_a_batch(pair, make_json):
    prompts = ["import json\n\nENTRY = ", "def describe(node):\n    return ", "x = "]
    for text in generate(pair, make_json, prompts):
        assert set(json.loads(text)) == set(SCHEMA["required"])


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 1.2}], ids=["greedy", "sampled"])
def test_regular_expression(pair, allowed_tokens, how):
    prompt = ["def main(argv):\n    return "]
    for text in generate(pair, lambda: {"prefix_allowed_tokens_fn": allowed_tokens()}, prompt, **how):
        assert re.fullmatch(CALL, text)


def test_other_stateful_processors(pair):
    """A phrase that is forced once after a trigger, and an end that becomes likelier with each token."""
    zoo = pytest.importorskip("logits_processor_zoo.transformers")
    tokenizer = pair[2]
    prompt = ["def area(width, height):\n"]

    def trigger():
        return zoo.TriggerPhraseLogitsProcessor(tokenizer, 1, "# checked", "\n", trigger_after=True)

    def length():
        return zoo.GenLengthLogitsProcessor(tokenizer, boost_factor=1.0, p=2)

    (text,) = generate(pair, lambda: {"logits_processor": [trigger()]}, prompt)
    assert text.count("# checked") == 1
    (text,) = generate(pair, lambda: {"logits_processor": [length()]}, prompt)
    assert len(tokenizer(text).input_ids) < NEW_TOKENS
