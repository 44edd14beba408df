"""What `check` found out, for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .suggestions import Suggestion
from .tree_memory import TreeMemory


@dataclass(frozen=True)
class LayerKind:
    """Decoder layers that are alike.

    Attributes:
        kind: Its entry in the configuration's `layer_types`, or what Transformers infers where there is no such list;
            None if that is not known.
        modules: Classes of the modules that mix its tokens.
        count: How many there are.
    """

    kind: str | None
    modules: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class CheckReport:
    """What `check` found out.

    Attributes:
        model: Name of the target, or its class.
        family: Its `model_type`.
        model_class: The class that Transformers loads it with; None if there is none.
        layers: Its decoder layers, by kind.
        supported: Whether it can be decoded with trees.
        reason: Why not.
        attn_implementation: What to load it with.
        memory: What a tree needs; None if it is not supported or could not be found out.
        drafter: Name of the drafter, or its class; None if none was given.
        drafter_fits: Whether it fits the target; None if no drafter was given, or only loading it can tell.
        drafter_reason: Why not.
        drafter_kind: What kind of drafter it is; None if that is not known.
        drafter_tree: What its trees are like.
        feature_size: Numbers per token that it reads of the target; None if that is not known.
        notes: What else to know.
        call: Code that decodes a prompt with trees and prints the text; None if the target is not supported or the
            drafter does not fit. Without a drafter it drafts by prompt lookup. What was passed as an object, and what
            cannot be named, is taken for `model`, `tokenizer` and `drafter`.
        suggestions: What else can draft, if no drafter was given.
    """

    model: str
    family: str
    model_class: str | None = None
    layers: tuple[LayerKind, ...] = ()
    supported: bool = False
    reason: str | None = None
    attn_implementation: str | None = None
    memory: TreeMemory | None = None
    drafter: str | None = None
    drafter_fits: bool | None = None
    drafter_reason: str | None = None
    drafter_kind: str | None = None
    drafter_tree: str | None = None
    feature_size: int | None = None
    notes: list[str] = field(default_factory=list)
    call: str | None = None
    suggestions: tuple[Suggestion, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report in types that JSON knows."""
        memory = None if self.memory is None else {"total": self.memory.total, "per_node": self.memory.per_node}
        report = asdict(self)
        report["layers"] = [{**layer, "modules": list(layer["modules"])} for layer in report["layers"]]
        report["suggestions"] = list(report["suggestions"])
        if memory is not None:
            report["memory"] |= memory
        return report
