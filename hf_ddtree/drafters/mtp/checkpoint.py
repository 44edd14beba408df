"""Loading the multi-token-prediction layers of a target's checkpoint.

Transformers loads these layers for families whose config has `num_mtp_layers`. Qwen3-Next and Qwen3.5 checkpoints hold
one such layer as `mtp.*`, which Transformers drops on load: it is read from the checkpoint here.
"""

from __future__ import annotations

import copy
import json
import re

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer, MtpModel

from ...interop.models import cached_file_if_any
from ...interop.private import MissingPrivateName
from ...target.layers import decoder_layers
from ...target.weights import execution_device
from ..checkpoint import Checkpoint
from ..kind import LEVELWISE, DrafterKind, Format
from ..weight_files import check_finite, names_in_index
from .model import MTPDrafter, wrap_mtp_model

# The path that stands for the checkpoint which the target was loaded from.
OWN_CHECKPOINT = "mtp"
# The families whose checkpoints hold `mtp.*` tensors that Transformers does not load.
MTP_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Names in those checkpoints, and in Transformers' `MtpLayer`.
_RENAMED = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "post_norm",
    "layers.0": "mtp_block",
}
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def is_mtp(checkpoint: Checkpoint, target_model: PreTrainedModel | None) -> bool:
    """Whether MTP layers of a target are asked for: by `"mtp"`, or by a checkpoint of the target that holds some.

    Args:
        checkpoint: The checkpoint.
        target_model: The target; None if weights must not be looked at.
    """
    if checkpoint.path == OWN_CHECKPOINT:
        return True
    if target_model is None:
        return False
    config = target_model.config.get_text_config()
    if checkpoint.name == target_model.config.name_or_path and getattr(config, "num_mtp_layers", None):
        return True
    theirs = checkpoint.raw_config.get("text_config") or checkpoint.raw_config
    same = ("hidden_size", "num_hidden_layers", "vocab_size")
    return (
        config.model_type in MTP_FAMILIES
        and theirs.get("model_type") in (config.model_type, config.model_type.removesuffix("_text"))
        and all(theirs.get(name) == getattr(config, name) for name in same)
        and bool(_mtp_files(checkpoint))
    )


def load_mtp(checkpoint: Checkpoint, config: None, target_model: PreTrainedModel | None) -> MTPDrafter:
    """Loads the MTP layers of a target, next to its last layer.

    Args:
        checkpoint: Of its options, those that say where the files are and `dtype` are used.
        config: Not needed: the layers are configured as the target is.
        target_model: The target.

    Raises:
        ValueError: If there is no target, or it has no MTP layers that can be loaded.
    """
    if target_model is None:
        raise ValueError(
            "MTP layers share the target's embeddings and head, but no target is given. Pass the loaded target as "
            "`target_model`."
        )
    check_mtp_fits(config, target_model)
    name = type(target_model).__name__
    target_config = target_model.config.get_text_config()
    if checkpoint.path == OWN_CHECKPOINT:
        checkpoint = Checkpoint(target_model.config.name_or_path, checkpoint.options)
    if not checkpoint.path:
        raise ValueError(
            f"The target, a {name}, was not loaded from a checkpoint, so there are no MTP layers to load. Pass the "
            "folder or repository that holds its `mtp.*` tensors instead of 'mtp'."
        )
    device = execution_device(decoder_layers(target_model)[-1])
    if target_config.model_type in MTP_FAMILIES:
        drafter = _from_mtp_tensors(checkpoint, target_model)
    else:
        drafter = _from_transformers(checkpoint, target_model)
    return drafter.to(device).eval()


def check_mtp_fits(config: None, target_model: PreTrainedModel) -> None:
    """Refuses a target whose configuration says that it has no MTP layers that can be loaded.

    Args:
        config: Not needed: the layers are configured as the target is.
        target_model: The target, whose weights may be on the meta device.

    Raises:
        ValueError: If its family holds no MTP layers, as far as is known.
    """
    target_config = target_model.config.get_text_config()
    if target_config.model_type not in MTP_FAMILIES and not getattr(target_config, "num_mtp_layers", None):
        raise ValueError(
            f"The target, a {type(target_model).__name__}, has no MTP layers that are known: its config has no "
            f"`num_mtp_layers`, and its family is none of {', '.join(MTP_FAMILIES)}. Use another drafter."
        )


def holds_mtp_layers(path: str | None, target_model: PreTrainedModel) -> bool | None:
    """Whether a target's checkpoint holds MTP layers, as far as its config and the index of its weights tell.

    No weights are read or fetched.

    Args:
        path: The folder or repository; None if it is not known.
        target_model: The target, whose weights may be on the meta device.

    Returns:
        None if only the weights can tell.
    """
    try:
        check_mtp_fits(None, target_model)
    except ValueError:
        return False
    if target_model.config.get_text_config().model_type not in MTP_FAMILIES:
        return True
    if not path:
        return None
    try:
        if index := cached_file_if_any(path, "model.safetensors.index.json"):
            with open(index, encoding="utf-8") as file:
                return any(name.startswith("mtp.") for name in json.load(file)["weight_map"])
        weights = cached_file_if_any(path, "model.safetensors", local_files_only=True)
    except (OSError, MissingPrivateName):
        return None
    if weights is None:
        return None
    with safe_open(weights, framework="pt") as file:
        return any(name.startswith("mtp.") for name in file.keys())


def _from_transformers(checkpoint: Checkpoint, target_model: PreTrainedModel) -> MTPDrafter:
    if checkpoint.name != target_model.config.name_or_path:
        raise ValueError(
            f"The MTP layers of a {type(target_model).__name__} are loaded from its own checkpoint, "
            f"{target_model.config.name_or_path!r}, but {checkpoint.name!r} is asked for. Pass 'mtp'."
        )
    device = execution_device(decoder_layers(target_model)[-1])
    return wrap_mtp_model(MtpModel.from_pretrained(target_model, device_map={"": device}))


def _from_mtp_tensors(checkpoint: Checkpoint, target_model: PreTrainedModel) -> MTPDrafter:
    tensors = read_mtp_tensors(checkpoint)
    if not tensors:
        raise ValueError(
            f"The checkpoint {checkpoint.name!r} holds no `mtp.*` tensors, so there are no MTP layers to load. "
            "Quantized copies often lack them: pass the original checkpoint, or use another drafter."
        )
    is_moe = any(".experts." in name for name in tensors)
    config = copy.deepcopy(target_model.config.get_text_config())
    config.layer_types, config.num_hidden_layers = ["full_attention"], 1
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers, config.decoder_sparse_step = ([] if is_moe else [0]), 1
    decoder = target_model.get_decoder()
    with torch.device("meta"):
        layer = MtpLayer(config, type(decoder_layers(target_model)[0]), type(decoder.norm), 0)
    renamed = _stack_experts({_rename(name.removeprefix("mtp.")): tensor for name, tensor in tensors.items()})
    expected = layer.state_dict()
    missing, unknown = sorted(expected.keys() - renamed), sorted(renamed.keys() - expected)
    wrong = sorted(name for name in expected.keys() & renamed if expected[name].shape != renamed[name].shape)
    if missing or unknown or wrong:
        wrongs = (("lacks", missing), ("holds", unknown), ("has another", wrong))
        what = next(f"{verb} {names[0]!r}" for verb, names in wrongs if names)
        raise ValueError(
            f"The `mtp.*` tensors of the checkpoint {checkpoint.name!r} do not fit the target, a "
            f"{type(target_model).__name__}: the checkpoint {what} ({len(missing)} missing, {len(unknown)} unknown, "
            f"{len(wrong)} of another shape). Pass the target's own checkpoint, not a quantized copy of it."
        )
    dtype = checkpoint.options.get("dtype", target_model.dtype)
    dtype = dtype if isinstance(dtype, torch.dtype) else target_model.dtype
    layer.load_state_dict({name: tensor.to(dtype) for name, tensor in renamed.items()}, assign=True)
    check_finite(checkpoint.path, layer)
    return MTPDrafter(config, nn.ModuleList([layer]))


def read_mtp_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with `mtp.`; no other part of it is read."""
    tensors: dict[str, Tensor] = {}
    for file_name, names in _mtp_files(checkpoint).items():
        with safe_open(file_name, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors


def _mtp_files(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """The files that hold `mtp.*` tensors, fetched if need be, and the names of these tensors in each."""
    path = checkpoint.path
    index = cached_file_if_any(path, "model.safetensors.index.json", **checkpoint.location)
    holders = ["model.safetensors"] if index is None else names_in_index(path, index, of_tensors="mtp.")
    files = (cached_file_if_any(path, holder, **checkpoint.location) for holder in holders)
    held = {}
    for file_name in filter(None, files):
        with safe_open(file_name, framework="pt") as file:
            if names := [name for name in file.keys() if name.startswith("mtp.")]:
                held[file_name] = names
    return held


def _rename(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs + "."):
            return ours + name.removeprefix(theirs)
    return name


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts' matrices, which checkpoints hold one by one, as the stacks that Transformers computes with."""
    stacked = {name: tensor for name, tensor in tensors.items() if not _EXPERT.match(name)}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.match(name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
    for prefix, parts in experts.items():
        stacks = {part: torch.stack([of_part[index] for index in sorted(of_part)]) for part, of_part in parts.items()}
        if {"gate_proj", "up_proj"} <= stacks.keys():
            stacked[f"{prefix}.gate_up_proj"] = torch.cat((stacks["gate_proj"], stacks["up_proj"]), dim=1)
        if "down_proj" in stacks:
            stacked[f"{prefix}.down_proj"] = stacks["down_proj"]
    return stacked


MTP = DrafterKind(
    name="multi-token-prediction layers",
    tree=LEVELWISE,
    formats=(
        Format(
            "Qwen3-Next, Qwen3.5, Qwen3.5-MoE",
            '`"mtp"`, or tensors `mtp.*` in a checkpoint of the target',
            "all tensors of one such layer, not quantized",
            "test_mtp_drafter.py::test_the_tree_against_a_plain_step",
        ),
        Format(
            "families whose layers Transformers loads",
            '`"mtp"`, and `num_mtp_layers` in the target\'s config',
            "the target's own checkpoint",
            "test_mtp_drafter.py::test_what_transformers_drafts",
        ),
    ),
    recognises=is_mtp,
    read_config=lambda checkpoint: None,
    check_fits=check_mtp_fits,
    load=load_mtp,
    matches=lambda drafter: isinstance(drafter, MTPDrafter | MtpModel),
    is_never_a_target=False,
)
