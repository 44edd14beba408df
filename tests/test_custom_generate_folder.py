"""The folder `hub`, which can be pushed to the Hub as it is: `generate(custom_generate=...)` runs what is in it."""

import importlib.metadata
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.families import make_model
from helpers.side_by_side import NEW_TOKENS, make_oracle, make_prompt
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_ddtree
from hf_ddtree import DDTreeConfig, strategy
from hf_ddtree.demo import demo_folders

FOLDER = Path(__file__).parents[1] / "hub"
PLAIN = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """Transformers looks whether what `requirements.txt` names is installed; a source tree on the path is not."""
    try:
        importlib.metadata.version("hf-ddtree")
    except importlib.metadata.PackageNotFoundError:
        info = tmp_path / "hf_ddtree-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hf-ddtree\nVersion: {hf_ddtree.__version__}\n")
        monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3_5", "sdpa")


@pytest.fixture(scope="module")
def plain(model):
    return model.generate(make_prompt(), **PLAIN)


def generate(model, *args, **kwargs):
    return model.generate(*args, custom_generate=str(FOLDER), trust_remote_code=True, **PLAIN | kwargs)


@pytest.mark.core
def test_arguments_arrive(model, plain):
    seen = []

    class Criterion:
        def __call__(self, input_ids, scores):
            seen.append(input_ids.shape[1])
            return torch.tensor([input_ids.shape[1] >= make_prompt().shape[1] + 20])

    output = generate(
        model,
        make_prompt(),
        candidate_generator=make_oracle(plain),
        tree_budget=5,
        return_trees=True,
        return_dict_in_generate=True,
        stopping_criteria=[Criterion()],
    )
    assert isinstance(output, hf_ddtree.DDTreeOutput)
    assert output.sequences.tolist() == plain[:, : make_prompt().shape[1] + 20].tolist()
    assert len(seen) == 20
    assert max(output.ddtree_stats.tree_sizes) == 5 and output.ddtree_stats.trees


@pytest.mark.core
def test_with_a_drafter_and_a_batch():
    model, drafter, tokenizer = hf_ddtree.load_demo()
    inputs = tokenizer(["import os\n", "def f(x):\n"], return_tensors="pt", padding=True, padding_side="left")
    expected = model.generate(**inputs, max_new_tokens=20)
    output = generate(model, **inputs, assistant_model=drafter, max_new_tokens=20, tokenizer=tokenizer)
    assert output.tolist() == expected.tolist()


def test_chains(model, plain):
    oracle = make_oracle(plain)
    assert generate(model, make_prompt(), candidate_generator=oracle, tree_shape="chain").tolist() == plain.tolist()


def test_after_unregistering(model, plain):
    hf_ddtree.unregister()
    assert generate(model, make_prompt(), candidate_generator=make_oracle(plain)).tolist() == plain.tolist()


def test_refusals_arrive(model):
    with pytest.raises(ValueError, match="assistant_model"):
        generate(model, make_prompt())
    with pytest.raises(ValueError, match="num_beams"):
        generate(model, make_prompt(), num_beams=2, candidate_generator=make_oracle(make_prompt()))


def test_code_is_not_run_without_consent(model, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(make_prompt(), custom_generate=str(FOLDER), **PLAIN)


@pytest.fixture
def own_folder(tmp_path):
    """A model loaded from a folder with the method in it, and what it generates without."""
    model, _, tokenizer = hf_ddtree.load_demo()
    model.save_pretrained(tmp_path)
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "custom_generate")
    inputs = tokenizer("def read_lines(path):\n", return_tensors="pt")
    return (
        AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True),
        inputs,
        model.generate(**inputs, **PLAIN),
    )


def test_in_the_model_s_own_folder(own_folder):
    model, inputs, expected = own_folder
    for by_position in (False, True):
        args = (inputs["input_ids"],) if by_position else ()
        output = model.generate(
            *args, **({} if by_position else inputs), **PLAIN, tree_lookup=True, return_dict_in_generate=True
        )
        assert isinstance(output, hf_ddtree.DDTreeOutput) and output.sequences.tolist() == expected.tolist()
    drafter = hf_ddtree.load_drafter(demo_folders()[1], target_model=model)
    output = model.generate(**inputs, **PLAIN, assistant_model=drafter, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist() and output.ddtree_stats.target_forwards < 20


def test_the_folder_s_generation_config_names_the_drafter(own_folder):
    """So that a program that only loads the folder needs to know nothing of it."""
    model, inputs, expected = own_folder
    model.generation_config.drafter = demo_folders()[1]
    output = model.generate(**inputs, **PLAIN, return_dict_in_generate=True)
    assert isinstance(output, hf_ddtree.DDTreeOutput) and output.sequences.tolist() == expected.tolist()


def test_the_own_folder_s_strategy_is_a_default(own_folder, monkeypatch):
    model, inputs, expected = own_folder
    warned = []
    monkeypatch.setattr(strategy.logger, "warning_once", lambda text, *_: warned.append(text))
    assert model.generate(**inputs, **PLAIN).tolist() == expected.tolist()
    assert "needs a drafter" in warned.pop()
    model.generation_config.tree_lookup = True
    beams = type(model).generate(model, **inputs, **PLAIN, num_beams=2)
    assert model.generate(**inputs, **PLAIN, num_beams=2).tolist() == beams.tolist()
    assert "`num_beams` is 2" in warned.pop()
    for off in ("standard", None):
        assert model.generate(**inputs, **PLAIN, generation_strategy=off).tolist() == expected.tolist()
    config = GenerationConfig(**PLAIN, generation_strategy="standard")
    assert model.generate(**inputs, generation_config=config).tolist() == expected.tolist()
    assert not warned
    with pytest.raises(ValueError, match="`num_beams` is 2"):
        model.generate(**inputs, **PLAIN, num_beams=2, tree_lookup=True)


def test_what_the_hub_reads():
    requirements = (FOLDER / "custom_generate" / "requirements.txt").read_text().split()
    assert [re.split("[<>=]", requirement)[0] for requirement in requirements] == ["hf-ddtree", "transformers"]
    card = (FOLDER / "README.md").read_text()
    assert card.startswith("---\n") and "  - custom_generate\n" in card.split("---")[1]
    for knob in (*DDTreeConfig.knobs(), "assistant_model", "candidate_generator", "draft_state"):
        assert f"| `{knob}` |" in card
