"""Finds out, without weights, everything that a report says of a target and a drafter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from transformers import PreTrainedConfig, PreTrainedModel

from ..budget.auto import AutoBudget
from ..configuration import DDTreeConfig
from ..drafter_kinds import GENERATORS, check_checkpoint_fits, checkpoint_kind, drafter_kind
from ..drafters.mtp.checkpoint import OWN_CHECKPOINT, check_mtp_fits, holds_mtp_layers
from ..interop.models import attention_implementation
from ..interop.wrappers import unwrapped
from ..target.requirements import check_target
from .facts import layer_kinds, note_cost, notes_on
from .meta_model import NotBuilt, build_without_weights, config_of
from .report import CheckReport
from .suggestions import drafter_loading_of, generate_call, loading_of, suggestions_for
from .tree_memory import measure_tree_memory


def check(
    model: str | os.PathLike[str] | PreTrainedConfig | PreTrainedModel,
    drafter: str | os.PathLike[str] | PreTrainedModel | None = None,
    *,
    tree_budget: int | Literal["auto"] = "auto",
    context_length: int = 4096,
) -> CheckReport:
    """Says whether a target can be decoded with trees, what that needs, and whether a drafter fits it.

    Of a model or drafter that is not loaded, only `config.json` is read. The target is built from it without weights,
    and one tree is verified on it without computing anything, which tells what memory the tree needs.

    Args:
        model: A repository of the Hub, a folder, a configuration, or a loaded model.
        drafter: A repository of the Hub, a folder, or a loaded drafter.
        tree_budget: Most nodes drafted in a round, which the memory is for; `"auto"` stands for the most that
            it drafts.
        context_length: Tokens in the cache, which the memory is for.

    Raises:
        ValueError: If `tree_budget` or `context_length` is out of range.
        TypeError: If `model` is nothing of the above.
        OSError: If there is no such folder or repository.
    """
    DDTreeConfig(tree_budget=tree_budget)
    model, drafter = unwrapped(model, "model"), unwrapped(drafter, "drafter")
    if not isinstance(context_length, int) or context_length < 1:
        raise ValueError(f"`context_length` must be an integer of at least 1, but is {context_length!r}.")
    found: dict[str, Any] = {"model": _name_of(model), "family": "unknown", "drafter_fits": None}
    found["drafter"] = None if drafter is None else _name_of(drafter)
    try:
        config = config_of(model)
        found["family"] = config.model_type
        twin, auto_class = build_without_weights(model, config)
    except NotBuilt as error:
        return CheckReport(**found, reason=str(error))

    found |= {
        "model_class": type(twin).__name__,
        "layers": layer_kinds(twin),
        "attn_implementation": attention_implementation(twin.config.get_text_config()),
        "notes": notes_on(twin, config),
    }
    path = str(model) if isinstance(model, str | os.PathLike) else model.name_or_path or None
    layer_ids: Sequence[int] = ()
    if drafter is not None:
        found |= _kind_of(drafter)
        fit = _fit(drafter, twin, path, found["notes"])
        layer_ids, found["drafter_fits"], found["drafter_reason"] = fit
        found["feature_size"] = len(layer_ids) * config.get_text_config().hidden_size if layer_ids else None
    try:
        check_target(model if isinstance(model, PreTrainedModel) else twin)
        most_nodes = AutoBudget().most_nodes if tree_budget == "auto" else tree_budget
        weights = _num_bytes(model if isinstance(model, PreTrainedModel) else twin, isinstance(model, PreTrainedModel))
        found["memory"] = measure_tree_memory(twin, most_nodes + 1, context_length, layer_ids, weights)
    except ValueError as error:
        return CheckReport(**found, reason=str(error))
    except Exception as error:  # what modelling code asks of tensors without values is not foreseeable
        found["notes"].append(f"The memory is not known: without weights the model fails with {error!r}.")
    if found["drafter_fits"] is False:
        return CheckReport(**found, supported=True)
    if drafter is None:
        found["suggestions"] = tuple(suggestions_for(twin, holds_mtp_layers(path, twin)))
    lines = ["import hf_ddtree"]
    if not isinstance(model, PreTrainedModel) and auto_class is not None and path is not None:
        lines += loading_of(path, found["attn_implementation"], auto_class)
    if drafter is not None and not isinstance(drafter, PreTrainedModel):
        lines.append(drafter_loading_of(found["drafter"]))
    lines += generate_call(drafter is not None, tree_budget)
    return CheckReport(**found, supported=True, call="\n".join(lines))


def _num_bytes(model: PreTrainedModel, is_loaded: bool) -> int | None:
    """Bytes of a target's weights and buffers; None of a quantized one that is not loaded."""
    if not is_loaded and getattr(model.config, "quantization_config", None) is not None:
        return None
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def _name_of(given: Any) -> str:
    """What a report calls a target or drafter: where it comes from, or its class."""
    if isinstance(given, str | os.PathLike):
        return str(given)
    return getattr(given, "name_or_path", None) or type(given).__name__


def _kind_of(drafter: Any) -> dict[str, str]:
    """The kind of a drafter and what its trees are like; nothing if the kind is not known."""
    try:
        kind = checkpoint_kind(drafter) if isinstance(drafter, str | os.PathLike) else drafter_kind(drafter)
    except ValueError:
        return {}
    return {"drafter_kind": kind.name, "drafter_tree": kind.tree}


def _fit(
    drafter: Any, target: PreTrainedModel, path: str | None, notes: list[str]
) -> tuple[Sequence[int], bool | None, str | None]:
    """The target's layers that the drafter reads, whether it fits, and why not; what else to know goes into the notes.

    Args:
        drafter: As of `check`.
        target: The target without weights.
        path: Where the target comes from, if that is known.
        notes: The notes of the report.
    """
    try:
        if not isinstance(drafter, str | os.PathLike):
            note_cost(drafter, target, notes)
            # Weights are not asked for, of the drafter either.
            generator = GENERATORS[drafter_kind(drafter)](drafter, target, DDTreeConfig(), None)
            return generator.feature_layers, True, None
        if str(drafter) in (OWN_CHECKPOINT, path) and (verdict := _mtp_verdict(str(drafter), path, target)):
            return (), *verdict
        config = check_checkpoint_fits(drafter, target)
    except ValueError as error:
        return (), False, str(error)
    if config is None:
        return (), None, "Only loading it can tell."
    note_cost(config, target, notes)
    return getattr(config, "target_layer_ids", None) or (), True, None


def _mtp_verdict(drafter: str, path: str | None, target: PreTrainedModel) -> tuple[bool | None, str | None] | None:
    """Whether the target's own layers can draft, and why not; None if its checkpoint is meant as a language model."""
    holds = holds_mtp_layers(path, target)
    if holds:
        return True, None
    if holds is None:
        return None, "Whether the checkpoint holds multi-token-prediction layers, as its family does, is not known."
    if drafter != OWN_CHECKPOINT:
        return None
    check_mtp_fits(None, target)
    return False, (
        f"The checkpoint {path!r} holds no `mtp.*` tensors, so there are no multi-token-prediction layers to load. "
        "Quantized copies often lack them: name the original checkpoint, or use another drafter."
    )
