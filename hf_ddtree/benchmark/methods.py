"""Methods of decoding that are measured against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMES = (
    "plain, assisted, assisted:lookup, chain, auto, tree:NODES, spine:NODES, lookup, lookup+auto, lookup+tree:NODES"
)
# Those that draft from the text alone.
WITHOUT_DRAFTER = ("lookup", "assisted:lookup")
DEFAULTS, DEFAULTS_WITHOUT_DRAFTER = ("chain", "tree:16", "auto"), WITHOUT_DRAFTER
# Tokens that Transformers' own prompt lookup drafts, as many as its documentation takes.
LOOKUP_TOKENS = 10


@dataclass(frozen=True)
class Method:
    """A method of decoding.

    Attributes:
        name: What it is called in reports.
        arguments: What it adds to a call of `generate()`.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether this is standard decoding, which the others are compared with."""
        return not self.arguments

    @property
    def keeps_draws(self) -> bool:
        """Whether a seed gives standard decoding's tokens if a single row samples; Transformers' own assisted
        decoding draws in another order."""
        return self.is_plain or not {"generation_strategy", "custom_generate"}.isdisjoint(self.arguments)


def make_methods(names: Sequence[str], drafters: Mapping[str, PreTrainedModel]) -> list[Method]:
    """The methods of these names; those with a drafter, once for each. Standard decoding always comes first.

    Args:
        names: `plain`, standard decoding; `assisted`, Transformers' own assisted decoding, and `assisted:lookup`, its
            own prompt lookup; `chain`; `tree:NODES` with a fixed budget; `spine:NODES`, which keeps the whole chain;
            `auto`; `lookup`, prompt lookup alone; and `lookup+` in front of `tree:NODES`, `spine:NODES` and `auto`,
            prompt lookup beside the drafter.
        drafters: By a name for the report; the name is left out if there is only one.

    Raises:
        ValueError: If a name is unknown, or needs a drafter and there is none.
    """
    check_methods(names, bool(drafters))
    methods = [Method("plain")]
    for name in dict.fromkeys(names):
        if name == "plain":
            continue
        arguments = _arguments(name)
        if name in WITHOUT_DRAFTER:
            methods.append(Method(name, arguments))
            continue
        for label, drafter in drafters.items():
            full_name = name if len(drafters) == 1 else f"{name} {label}"
            of_drafter = _assisted(drafter) if name == "assisted" else arguments
            methods.append(Method(full_name, {**of_drafter, "assistant_model": drafter}))
    return methods


def check_methods(names: Sequence[str], has_drafter: bool) -> None:
    """Checks names of methods before any drafter is loaded.

    Raises:
        ValueError: If a name is unknown, or needs a drafter and there is none.
    """
    for name in names:
        _arguments(name)
        if not has_drafter and name not in ("plain", *WITHOUT_DRAFTER):
            raise ValueError(
                f"`methods` has {name!r}, which needs a drafter, but `drafters` is empty. Without one there are "
                f"{', '.join(WITHOUT_DRAFTER)}."
            )


def _assisted(drafter: PreTrainedModel) -> dict[str, Any]:
    """Arguments with which Transformers itself drafts with a drafter."""
    from ..drafters import is_native

    if is_native(drafter):
        return {"speculation_type": "dflash"}
    if not drafter.can_generate():
        raise ValueError(
            f"`methods` has 'assisted', Transformers' own assisted decoding, which cannot draft with a "
            f"`{type(drafter).__name__}`. Leave it out."
        )
    return {}


def _arguments(name: str) -> dict[str, Any]:
    kind, _, nodes = name.partition(":")
    if kind.startswith("lookup+"):
        return {**_arguments(name.removeprefix("lookup+")), "tree_lookup": True}
    if nodes.isdecimal() and int(nodes) > 0 and kind in ("tree", "spine"):
        shape = {"tree": "best_first", "spine": "spine_first"}[kind]
        return {"generation_strategy": "ddtree", "tree_budget": int(nodes), "tree_shape": shape}
    known: dict[str, dict[str, Any]] = {
        "plain": {},
        "assisted": {},
        "assisted:lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        "chain": {"generation_strategy": "dflash", "tree_budget": 64},
        "auto": {"generation_strategy": "ddtree", "tree_budget": "auto"},
        "lookup": {"generation_strategy": "ddtree", "tree_lookup": True},
    }
    if kind in ("tree", "spine"):
        raise ValueError(f"`methods` has {name!r}, but its NODES must be an integer of at least 1, as in '{kind}:16'.")
    if name not in known:
        raise ValueError(f"`methods` has {name!r}, but must hold names from: {NAMES}.")
    return known[name]
