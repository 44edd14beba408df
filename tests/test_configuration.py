"""Knobs: defaults, what is refused and how the refusal reads."""

import dataclasses

import pytest

from hf_ddtree.configuration import DDTreeConfig
from hf_ddtree.tree.shape import TREE_SHAPES

pytestmark = pytest.mark.core


def test_defaults():
    assert DDTreeConfig().to_dict() == {
        "drafter": None,
        "tree_budget": "auto",
        "tree_shape": None,
        "tree_probabilities": "conditional",
        "tree_top_k": None,
        "draft_length": None,
        "tree_lookup": False,
        "max_matching_ngram_size": None,
        "calibrate": True,
        "return_trees": False,
    }


@pytest.mark.parametrize("name", ["tree_budget", "tree_top_k", "draft_length"])
@pytest.mark.parametrize("value", [0, -1, 1.0, 16.5, True, False, "16", [16]])
def test_refuses_what_is_no_positive_integer(name, value):
    with pytest.raises(ValueError) as error:
        DDTreeConfig(**{name: value})
    assert f"`{name}` must be an integer of at least 1" in str(error.value)
    assert repr(value) in str(error.value)


def test_budget_cannot_be_left_to_a_default_by_none():
    with pytest.raises(ValueError, match=r'`tree_budget` must be an integer of at least 1, "auto" or .* but is None'):
        DDTreeConfig(tree_budget=None)


@pytest.mark.parametrize("name", ["tree_top_k", "draft_length"])
def test_optional_knobs_take_none_and_say_so(name):
    assert getattr(DDTreeConfig(**{name: None}), name) is None
    with pytest.raises(ValueError, match="or None for the default"):
        DDTreeConfig(**{name: 0})


@pytest.mark.parametrize("shape", TREE_SHAPES)
def test_takes_every_shape(shape):
    assert DDTreeConfig(tree_shape=shape).tree_shape == shape


@pytest.mark.parametrize("value", ["bushy", 3, ["chain"]])
def test_refuses_unknown_shapes_and_lists_the_known(value):
    with pytest.raises(ValueError) as error:
        DDTreeConfig(tree_shape=value)
    assert all(repr(shape) in str(error.value) for shape in TREE_SHAPES)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_refuses_a_return_trees_that_is_no_bool(value):
    with pytest.raises(ValueError, match=r"`return_trees` must be True or False"):
        DDTreeConfig(return_trees=value)


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DDTreeConfig().tree_budget = 3


def test_from_kwargs_splits_knobs_from_the_rest():
    kwargs = {"tree_budget": 8, "max_new_tokens": 5, "draft_length": 4, "do_sample": True}
    config, rest = DDTreeConfig.from_kwargs(kwargs)
    assert config == DDTreeConfig(tree_budget=8, draft_length=4)
    assert rest == {"max_new_tokens": 5, "do_sample": True}
    assert set(kwargs) == {"tree_budget", "max_new_tokens", "draft_length", "do_sample"}


def test_from_kwargs_validates():
    with pytest.raises(ValueError, match="tree_budget"):
        DDTreeConfig.from_kwargs({"tree_budget": 0})


@pytest.mark.parametrize("value", ["joint", "", None, 1])
def test_refuses_unknown_probabilities(value):
    with pytest.raises(ValueError, match="`tree_probabilities` must be one of 'conditional', 'marginal', but is"):
        DDTreeConfig(tree_probabilities=value)


def test_knobs_are_the_fields_in_order():
    shape = ("drafter", "tree_budget", "tree_shape", "tree_probabilities", "tree_top_k", "draft_length")
    assert DDTreeConfig.knobs() == (*shape, "tree_lookup", "max_matching_ngram_size", "calibrate", "return_trees")
