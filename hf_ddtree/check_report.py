"""What can be said of a target and a drafter before any weights are read."""

from __future__ import annotations

import copy
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .attention import dispatch
from .attention.tree_pass import TreePass
from .budget.auto import AutoBudget
from .candidate_generators import drafter_kind
from .configuration import DDTreeConfig
from .drafters import check_checkpoint_fits, is_drafter_alone
from .interop.versions import CACHE_KEY
from .target.cache_rows import CommittedRows
from .target.features import FeatureRecorder
from .target.forward import verify
from .target.layers import first_changing_position, layer_types
from .target.past_recording import recording_past
from .target.requirements import check_target
from .tree.draft_tree import DraftTree

AUTO_CLASSES = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, AutoModelForSeq2SeqLM),
)
# What the modules that mix tokens are called.
MIXER_NAMES = re.compile("attention|mixer|mamba|deltanet|conv|lstm|recurrent", re.IGNORECASE)
# Widths that bitsandbytes' 4-bit kernel for CPUs with AVX512-BF16 divides.
OUTPUTS_IN_4_BIT, INPUTS_IN_4_BIT = 32, 64


@dataclass(frozen=True)
class TreeMemory:
    """Bytes that one row's tree needs between its verification and the commit, beside what plain decoding holds.

    Counted are tensors as they are allocated, not what a forward needs on its way.

    Attributes:
        nodes: Nodes, the root included.
        context_length: Tokens in the cache, which the masks are as wide as.
        keys_and_values: What the nodes add to the cache of layers with attention.
        recurrent: What layers with a state keep of the nodes: inputs of convolutions, factors of recurrences.
        logits: In the dtype of the output head.
        features: What is recorded for the drafter; 0 if it is not known.
        masks: The attention masks, one for each kind of layer, and the ancestor mask in the forms that layers need.
    """

    nodes: int
    context_length: int
    keys_and_values: int
    recurrent: int
    logits: int
    features: int
    masks: int

    @property
    def total(self) -> int:
        """Sum of all."""
        return self.keys_and_values + self.recurrent + self.logits + self.features + self.masks

    @property
    def per_node(self) -> int:
        """The total's share of a node."""
        return self.total // self.nodes


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
        supported: Whether it can be decoded by tree.
        reason: Why not.
        attn_implementation: What to load it with.
        memory: What a tree needs; None if it is not supported or could not be found out.
        drafter: Name of the drafter, or its class; None if none was given.
        drafter_fits: Whether it fits the target; None if no drafter was given, or only loading it can tell.
        drafter_reason: Why not.
        notes: What else to know.
        call: Code that decodes by tree; None if the target is not supported or the drafter does not fit.
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
    notes: list[str] = field(default_factory=list)
    call: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report in types that JSON knows."""
        memory = None if self.memory is None else {"total": self.memory.total, "per_node": self.memory.per_node}
        report = asdict(self)
        report["layers"] = [{**layer, "modules": list(layer["modules"])} for layer in report["layers"]]
        if memory is not None:
            report["memory"] |= memory
        return report


def check(
    model: str | os.PathLike[str] | PreTrainedConfig | PreTrainedModel,
    drafter: str | os.PathLike[str] | PreTrainedModel | None = None,
    *,
    tree_budget: int | Literal["auto"] = "auto",
    context_length: int = 4096,
) -> CheckReport:
    """Says whether a target can be decoded by tree, what that needs, and whether a drafter fits it.

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
    if not isinstance(context_length, int) or context_length < 1:
        raise ValueError(f"`context_length` must be an integer of at least 1, but is {context_length!r}.")
    found: dict[str, Any] = {"model": _name_of(model), "family": "unknown", "drafter_fits": None}
    found["drafter"] = None if drafter is None else _name_of(drafter)
    try:
        config = _config_of(model)
        found["family"] = config.model_type
        twin, auto_class = _without_weights(model, config)
    except _NotBuilt as error:
        return CheckReport(**found, reason=str(error))

    found |= {
        "model_class": type(twin).__name__,
        "layers": _layer_kinds(twin),
        "attn_implementation": twin.config.get_text_config()._attn_implementation,
        "notes": _notes(twin, config),
    }
    layer_ids: Sequence[int] = ()
    if drafter is not None:
        layer_ids, found["drafter_fits"], found["drafter_reason"] = _fit(drafter, twin)
    try:
        check_target(model if isinstance(model, PreTrainedModel) else twin)
        most_nodes = AutoBudget().most_nodes if tree_budget == "auto" else tree_budget
        found["memory"] = _dry_run(twin, most_nodes + 1, context_length, layer_ids)
    except ValueError as error:
        return CheckReport(**found, reason=str(error))
    except Exception as error:  # what modelling code asks of tensors without values is not foreseeable
        found["notes"].append(f"The memory is not known: without weights the model fails with {error!r}.")
    if found["drafter_fits"] is False:
        return CheckReport(**found, supported=True)
    is_loaded = isinstance(model, PreTrainedModel)
    lines = [] if is_loaded or auto_class is None else _loading_of(found, auto_class)
    if not isinstance(drafter, PreTrainedModel):
        lines.append(f"drafter = hf_ddtree.load_drafter({found['drafter'] or 'DRAFTER'!r}, target_model=model)")
    knobs = f'generation_strategy="ddtree", tree_budget={json.dumps(tree_budget)}'
    lines.append(f"model.generate(**inputs, assistant_model=drafter, {knobs})")
    return CheckReport(**found, supported=True, call="\n".join(["import hf_ddtree", *lines]))


def _name_of(given: Any) -> str:
    """What a report calls a target or drafter: where it comes from, or its class."""
    if isinstance(given, str | os.PathLike):
        return str(given)
    return getattr(given, "name_or_path", None) or type(given).__name__


def _loading_of(found: dict[str, Any], auto_class: type) -> list[str]:
    """Code that loads the target."""
    name, attention = found["model"], found["attn_implementation"]
    options = f'dtype="auto", attn_implementation="{attention}"'
    return [
        f"from transformers import {auto_class.__name__}",
        "",
        f"model = {auto_class.__name__}.from_pretrained({name!r}, {options})",
    ]


class _NotBuilt(Exception):
    """Why a model cannot be built."""


def _config_of(model: Any) -> PreTrainedConfig:
    if not isinstance(model, str | os.PathLike | PreTrainedConfig | PreTrainedModel):
        raise TypeError(
            "`model` must be a repository of the Hub, a folder, a configuration or a loaded model, but is a "
            f"`{type(model).__name__}`."
        )
    if isinstance(model, str | os.PathLike):
        raw_config, _ = PreTrainedConfig.get_config_dict(model)
    else:
        raw_config = (model.config if isinstance(model, PreTrainedModel) else model).to_dict()
    if is_drafter_alone(raw_config):
        raise _NotBuilt("It is a drafter. Name its target as the model, and it as the drafter.")
    if isinstance(model, PreTrainedModel):
        return model.config
    if isinstance(model, PreTrainedConfig):
        return model
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        raise _NotBuilt(f"Transformers does not know the model: {error}") from error


def _without_weights(model: Any, config: PreTrainedConfig) -> tuple[PreTrainedModel, type | None]:
    """A model on the meta device with the attention that Transformers chooses for it, and how to load it."""
    config = copy.deepcopy(config)
    config._attn_implementation = None
    auto_class = next((auto for mapping, auto in AUTO_CLASSES if type(config) in mapping), None)
    try:
        with torch.device("meta"):
            if isinstance(model, PreTrainedModel):
                twin = type(model)._from_config(config, dtype=model.dtype)
            elif auto_class is None:
                raise _NotBuilt(f"Transformers has no class that generates text from a `{type(config).__name__}`.")
            else:
                twin = auto_class.from_config(config, dtype=config.dtype or config.get_text_config().dtype)
    except _NotBuilt:
        raise
    except Exception as error:  # modelling code checks its configuration in many ways
        raise _NotBuilt(f"Transformers cannot build the model from its configuration: {error!r}") from error
    # The other implementations ask the values which expert a token goes to.
    twin.set_experts_implementation("batched_mm")
    return twin.eval(), auto_class


def _layer_kinds(model: PreTrainedModel) -> tuple[LayerKind, ...]:
    config = model.config.get_text_config()
    depth = config.num_hidden_layers
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    layers: list[nn.Module] = next((list(found) for found in lists if len(found) == depth), [])
    is_told = getattr(config, "layer_types", None) is not None or not model._is_stateful
    kinds: Sequence[str | None] = layer_types(config) if is_told else [None] * depth
    counts: Counter[tuple[str | None, tuple[str, ...]]] = Counter()
    for kind, layer in zip(kinds, layers):
        modules = tuple(name for child in layer.children() if MIXER_NAMES.search(name := type(child).__name__))
        counts[kind, modules or (type(layer).__name__,)] += 1
    return tuple(LayerKind(kind, modules, count) for (kind, modules), count in counts.items())


def _notes(model: PreTrainedModel, config: PreTrainedConfig) -> list[str]:
    notes = []
    limit = first_changing_position(model)
    if limit is not None:
        notes.append(
            f"The rotary embedding changes with the length of the sequence beyond {limit} positions. Set "
            f"`max_new_tokens` so that prompt and output stay within them."
        )
    quantization = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    if quantization.get("load_in_8bit") and quantization.get("llm_int8_threshold", 6.0) > 0:
        notes.append(
            "8-bit layers choose their outlier columns by all tokens of a forward, so a tree rounds otherwise than a "
            "single token. With `llm_int8_threshold=0` each token is quantized by itself."
        )
    if quantization.get("load_in_4bit"):
        skipped = quantization.get("llm_int8_skip_modules") or []
        odd = {
            name.rsplit(".", 1)[-1]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and (module.out_features % OUTPUTS_IN_4_BIT or module.in_features % INPUTS_IN_4_BIT)
            and module is not model.get_output_embeddings()
            and not any(part in name for part in skipped)
        }
        if odd:
            notes.append(
                f"The 4-bit kernel for CPUs takes no layers with {', '.join(sorted(odd))}'s widths. Name them, and "
                "the output head, in `llm_int8_skip_modules`."
            )
    return notes


def _fit(drafter: Any, target: PreTrainedModel) -> tuple[Sequence[int], bool | None, str | None]:
    """The target's layers that the drafter reads, whether it fits, and why not."""
    try:
        if not isinstance(drafter, str | os.PathLike):
            # Weights are not asked for, of the drafter either.
            return drafter_kind(drafter).make(drafter, target, DDTreeConfig(), None).feature_layers, True, None
        config = check_checkpoint_fits(drafter, target)
    except ValueError as error:
        return (), False, str(error)
    if config is None:
        return (), None, "Only loading it can tell."
    return getattr(config, "target_layer_ids", None) or (), True, None


@torch.no_grad()
def _dry_run(model: PreTrainedModel, nodes: int, context_length: int, layer_ids: Sequence[int]) -> TreeMemory:
    """Verifies a tree on a model without weights and counts what that leaves."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    prompt = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
    tree = DraftTree(torch.arange(nodes, device="cpu") % 2, (torch.arange(nodes, device="cpu") - 1) // 2)
    masks: list[Tensor] = []
    recorder = FeatureRecorder(model, layer_ids)
    dispatch.install(model)
    try:
        model(prompt, use_cache=True, **{CACHE_KEY: cache})
        _lengthen(cache, context_length)
        before = _cache_bytes(cache)
        positions = torch.arange(context_length + 1, device=model.device)[None]
        rows = CommittedRows(context_length, {"position_ids": positions}, 1, model.device)
        model_kwargs = {CACHE_KEY: cache, "use_cache": True, "position_ids": positions, "attention_mask": None}
        hook = model.register_forward_pre_hook(
            lambda _, args, kwargs: masks.extend(_tensors(kwargs["attention_mask"])), with_kwargs=True
        )
        try:
            with recording_past(cache):
                verification = verify(model, [tree], rows, model_kwargs, recorder)
        finally:
            hook.remove()
        after = _cache_bytes(cache)
    finally:
        recorder.close()
    in_cache = {_storage(tensor) for layer in cache.layers for tensor in _tensors(vars(layer))}
    tree_pass = verification.tree_pass
    assert tree_pass is not None
    for_commit = {_storage(part) for part in _tensors([tree_pass.path_factors, tree_pass.conv_inputs])}
    kept = [part for part in _tensors(tree_pass) if _storage(part) not in in_cache]
    factors, of_tree = (
        [part for part in kept if (_storage(part) in for_commit) == wanted] for wanted in (True, False)
    )
    features = [] if verification.features is None else [verification.features]
    return TreeMemory(
        nodes=nodes,
        context_length=context_length,
        keys_and_values=after["attention"] - before["attention"],
        recurrent=after["state"] - before["state"] + _num_bytes(factors),
        logits=_num_bytes([verification.outputs.logits]),
        features=_num_bytes(features),
        masks=_num_bytes([*masks, *of_tree]),
    )


def _lengthen(cache: DynamicCache, length: int) -> None:
    """Makes a cache on the meta device as long as after that many tokens."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            kept = length
            if isinstance(layer, DynamicSlidingWindowLayer):
                kept = min(length, layer.sliding_window - 1)
                layer.cumulative_length = length
            layer.keys, layer.values = (
                part.new_empty((*part.shape[:-2], kept, part.shape[-1])) for part in (layer.keys, layer.values)
            )


def _cache_bytes(cache: DynamicCache) -> Counter[str]:
    """Bytes of the cache's keys and values, and of its other states."""
    count: Counter[str] = Counter()
    for layer in cache.layers:
        for name, value in vars(layer).items():
            kind = "attention" if name in ("keys", "values") else "state"
            count[kind] += sum(tensor.nbytes for tensor in _tensors(value))
    return count


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a value made of lists, dictionaries and objects of this package."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) or isinstance(value, TreePass):
        yield from _tensors(vars(value))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the memory that the tensors lie in, which several may share."""
    return sum({_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
