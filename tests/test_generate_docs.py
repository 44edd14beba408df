"""`docs/generate.md` leaves nothing out, and the tests that it names exist."""

import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process, stopping_criteria, streamers

import hf_ddtree
from hf_ddtree.arguments import OTHER_DRAFTERS, OTHER_DRAFTERS_KNOBS

DOCS = Path(__file__).parents[1] / "docs"
INTERNAL = {"_from_model_config"}


@cache
def documented():
    """Rows of the tables: every name in their first cells, with behaviour and test."""
    rows = {}
    for line in (DOCS / "generate.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            names, behaviour, test = re.split(r" \| ", line.strip("| "))
            for name in re.findall(r"`(\w+)`", names):
                assert name not in rows, f"{name} stands in two rows"
                rows[name] = behaviour, test
    return rows


def classes(module, base):
    return {
        name
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and kind.__module__ == module.__name__
    }


def test_every_argument_of_generate():
    names = set(inspect.signature(inspect.unwrap(GenerationMixin.generate)).parameters) - {"self", "kwargs"}
    # What `generate()` takes out of its other keyword arguments.
    source = inspect.getsource(inspect.unwrap(GenerationMixin.generate))
    source += inspect.getsource(GenerationMixin._extract_generation_mode_kwargs)
    names |= set(re.findall(r"""kwargs\.(?:pop|get)\("(\w+)\"""", source)) - {
        "attention_mask",
        "cache",
        "encoder_outputs",
        "mm_encoder_outputs",
    }
    assert "tokenizer" in names and "trust_remote_code" in names
    assert names - set(documented()) == set()


def test_every_attribute_of_the_configuration():
    assert set(vars(GenerationConfig())) - INTERNAL - set(documented()) == set()


def test_every_argument_of_the_package():
    names = {*hf_ddtree.DDTreeConfig.knobs(), *inspect.signature(hf_ddtree.ddtree).parameters} - {"knobs"}
    assert names - set(documented()) == set()


def test_every_processor_criterion_and_streamer():
    names = classes(logits_process, LogitsProcessor) | classes(stopping_criteria, StoppingCriteria)
    names |= classes(streamers, streamers.BaseStreamer)
    assert names - set(documented()) == set()


def test_what_is_refused_is_said_to_be_refused():
    for name in (*OTHER_DRAFTERS, *OTHER_DRAFTERS_KNOBS):
        assert documented()[name][0].startswith("Refused"), name


def named_tests():
    text = (DOCS / "generate.md").read_text(encoding="utf-8")
    return sorted(set(re.findall(r"(test_\w+\.py)::(test_\w+)", text)))


def test_every_row_names_a_test():
    assert len(documented()) > 130
    names = r"`test_\w+\.py::test_\w+`"
    assert all(re.fullmatch(rf"{names}(, {names})*", tests) for _, tests in documented().values())


@pytest.mark.parametrize(("file", "test"), named_tests())
def test_named_tests_exist(file, test):
    source = (Path(__file__).parent / file).read_text(encoding="utf-8")
    assert re.search(rf"^(?:async )?def {test}\(", source, re.MULTILINE)
