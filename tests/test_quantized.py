"""Targets and drafters that bitsandbytes has quantized, against standard decoding of the same quantized target."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from helpers.families import make_config
from helpers.near_ties import assert_equal_up_to_near_ties
from helpers.side_by_side import make_oracle, make_prompt
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import hf_ddtree
from hf_ddtree.demo import demo_prompts

pytest.importorskip("bitsandbytes")

PAIR = Path(hf_ddtree.__file__).parent / "demo_pair"
# Narrow layers of the target and of the drafter.
SKIPPED = ["in_proj_a", "in_proj_b", "kernel_projection", "lm_head"]


def in_4_bit(**options):
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=SKIPPED, **options
    )


QUANTIZATIONS = {
    "nf4": in_4_bit(bnb_4bit_quant_type="nf4"),
    "nf4, double": in_4_bit(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": in_4_bit(bnb_4bit_quant_type="fp4"),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
    "int8, threshold 0": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
}
# Of the target, and the keywords that the drafter is loaded with.
PAIRS = [(name, {}) for name in QUANTIZATIONS] + [
    ("nf4", {"dtype": torch.bfloat16}),
    ("int8", {"dtype": torch.bfloat16}),
    ("nf4", {"quantization_config": QUANTIZATIONS["nf4"]}),
    ("int8", {"quantization_config": QUANTIZATIONS["int8"]}),
]


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """8-bit layers warn of every forward that its inputs are rounded."""
    logger = logging.getLogger("bitsandbytes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def prompts():
    """The ends of two prompts that ship with the pair."""
    _, _, tokenizer = hf_ddtree.load_demo()
    return [tokenizer(entry["prompt"], return_tensors="pt").input_ids[:, -48:] for entry in demo_prompts()[:2]]


def load_target(name, folder=PAIR / "target"):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=QUANTIZATIONS[name])


@pytest.mark.parametrize("name, drafter_kwargs", PAIRS)
def test_the_shipped_pair(name, drafter_kwargs, prompts):
    model = load_target(name)
    drafter = hf_ddtree.load_drafter(PAIR / "drafter", target_model=model, **drafter_kwargs)
    assert drafter.dtype == drafter_kwargs.get("dtype", torch.float32)
    outputs = assert_equal_up_to_near_ties(model, prompts, lambda _: {"assistant_model": drafter})
    lengths = [length for output in outputs for length in output.ddtree_stats.accepted_lengths]
    assert sum(lengths) / len(lengths) > 1.5


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_no_drafter(name, prompts):
    model = load_target(name)
    outputs = assert_equal_up_to_near_ties(model, prompts, lambda _: {"tree_lookup": True, "tree_budget": 16})
    assert all(output.ddtree_stats.tokens_per_forward > 1.2 for output in outputs)


@pytest.mark.parametrize("family, name", [("qwen3", "nf4"), ("gemma3", "int8"), ("olmo_hybrid", "nf4")])
def test_families(family, name, tmp_path):
    """Widths that the 4-bit kernels divide."""
    config = make_config(family)
    for setting, value in {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "vocab_size": 64}.items():
        setattr(config, setting, value)
    if family == "olmo_hybrid":
        config.linear_num_key_heads = config.linear_num_value_heads = 2
        config.linear_key_head_dim = config.linear_value_head_dim = 32
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            **{f"load_in_{'4' if name == 'nf4' else '8'}bit": True},
            bnb_4bit_quant_type="nf4",
            llm_int8_skip_modules=["a_proj", "b_proj", "lm_head"],
        ),
    )
    assert any(type(module).__module__.startswith("bitsandbytes") for module in model.modules())
    outputs = assert_equal_up_to_near_ties(
        model, [make_prompt(seed) for seed in range(2)], lambda plain: {"candidate_generator": make_oracle(plain)}
    )
    assert all(output.ddtree_stats.tokens_per_forward > 1.2 for output in outputs)


def test_a_drafter_takes_no_integer_dtype_from_a_quantized_head(tmp_path, prompts):
    """A list of one's own replaces the default one, which holds the output head."""
    model, _, _ = hf_ddtree.load_demo()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["in_proj_a"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=quantization)
    assert model.lm_head.weight.dtype == torch.int8
    drafter = hf_ddtree.load_drafter(PAIR / "drafter", target_model=model)
    assert drafter.dtype == torch.float32
    (output,) = assert_equal_up_to_near_ties(model, prompts[:1], lambda _: {"assistant_model": drafter})
    assert output.ddtree_stats.tokens_per_forward > 1.5
