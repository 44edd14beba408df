"""The multi-token-prediction (MTP) layers that come with a target, as a drafter.

An MTP layer gets, for a token, its embedding and a hidden state of the token before it: the target's final-normalised
one or, for a drafted token, an MTP layer's own output. Both are normalised, concatenated, projected, and go through
one decoder layer of the target's family. Embeddings and output head are the target's (DeepSeek-V3, arXiv:2412.19437,
section 2.2).

Transformers loads these layers for families whose config has `num_mtp_layers`. Qwen3-Next and Qwen3.5 checkpoints hold
one such layer as `mtp.*`, which Transformers throws away: it is read from the checkpoint here.
"""

from __future__ import annotations

import copy
import json
import os
import re
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.utils import cached_file

from ..target.layers import decoder_layers
from ..target.weights import execution_device

# The families whose checkpoints hold `mtp.*` tensors that Transformers does not load.
MTP_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention")
# Names in those checkpoints, and in Transformers' `MtpLayer`.
_RENAMED = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "post_norm",
    "layers.0": "mtp_block",
}
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


class MTPDrafter(PreTrainedModel):
    """MTP layers without the embeddings and the head, which are the target's.

    Args:
        config: Of the layers, which are numbered from 0.
        layers: The first predicts what follows the next token, each other one a token further. A single one predicts
            further tokens from its own outputs.
        shared_post_norm: A norm on the output of every layer, if they have none of their own.
    """

    _supports_sdpa = True

    def __init__(
        self, config: PreTrainedConfig, layers: nn.ModuleList, shared_post_norm: nn.Module | None = None
    ) -> None:
        super().__init__(config)
        self.layers = layers
        self.shared_post_norm = shared_post_norm

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # The layers are the target's own kind.
        return True

    def forward(self, layer: int, **inputs: Any) -> Tensor:
        """The output of one layer, `(batch, length, hidden_size)`; the inputs are those of `MtpLayer`."""
        hidden_states = self.layers[layer](**inputs)
        return hidden_states if self.shared_post_norm is None else self.shared_post_norm(hidden_states)


def load_mtp(
    path_or_repo_id: str | os.PathLike[str] | None, target_model: PreTrainedModel | None, options: dict[str, Any]
) -> MTPDrafter:
    """Loads the MTP layers of a target, next to its last layer.

    Args:
        path_or_repo_id: The checkpoint; the one that the target was loaded from if None.
        target_model: The target.
        options: Keywords of `from_pretrained`. Those that say where the files are and `dtype` are used.

    Raises:
        ValueError: If there is no target, or it has no MTP layers that can be loaded.
    """
    if target_model is None:
        raise ValueError(
            "MTP layers share the target's embeddings and head, but no target is given. Pass the loaded target as "
            "`target_model`."
        )
    name = type(target_model).__name__
    config = target_model.config.get_text_config()
    path = path_or_repo_id or target_model.config.name_or_path
    if not path:
        raise ValueError(
            f"The target, a {name}, was not loaded from a checkpoint, so there are no MTP layers to load. Pass the "
            "folder or repository that holds its `mtp.*` tensors instead of 'mtp'."
        )
    device = execution_device(decoder_layers(target_model)[-1])
    if config.model_type in MTP_FAMILIES:
        drafter = _from_mtp_tensors(path, target_model, options)
    elif getattr(config, "num_mtp_layers", None):
        drafter = _from_transformers(path, target_model)
    else:
        raise ValueError(
            f"The target, a {name}, has no MTP layers that are known: its config has no `num_mtp_layers`, and its "
            f"family is none of {', '.join(MTP_FAMILIES)}. Use another drafter."
        )
    return drafter.to(device).eval()


def holds_mtp_of(
    target_model: PreTrainedModel,
    path_or_repo_id: str | os.PathLike[str],
    raw_config: dict[str, Any],
    location: dict[str, Any],
) -> bool:
    """Whether a checkpoint is one of the target, or of its like, that holds MTP layers."""
    config = target_model.config.get_text_config()
    if str(path_or_repo_id) == target_model.config.name_or_path and getattr(config, "num_mtp_layers", None):
        return True
    theirs = raw_config.get("text_config") or raw_config
    same = ("hidden_size", "num_hidden_layers", "vocab_size")
    return (
        config.model_type in MTP_FAMILIES
        and theirs.get("model_type") in (config.model_type, config.model_type.removesuffix("_text"))
        and all(theirs.get(name) == getattr(config, name) for name in same)
        and bool(_mtp_files(path_or_repo_id, location))
    )


def wrap_mtp_model(model: MtpModel) -> MTPDrafter:
    """The drafter of layers that Transformers has loaded.

    Raises:
        ValueError: If a layer is of a kind that the package does not know.
    """
    unknown = sorted(set(getattr(model.config, "layer_types", None) or ()) - set(ATTENTION_LAYER_TYPES))
    if unknown or hasattr(model.config, "logits_mup_width_multiplier"):
        raise ValueError(
            f"The target's MTP layers are of a kind that cannot draft trees ({', '.join(unknown) or 'scaled logits'}; "
            f"known are {', '.join(ATTENTION_LAYER_TYPES)}). Use another drafter."
        )
    return MTPDrafter(model.config, model.layers, getattr(model, "shared_post_norm", None))


def _from_transformers(path: str | os.PathLike[str], target_model: PreTrainedModel) -> MTPDrafter:
    if str(path) != target_model.config.name_or_path:
        raise ValueError(
            f"The MTP layers of a {type(target_model).__name__} are loaded from its own checkpoint, "
            f"{target_model.config.name_or_path!r}, but {str(path)!r} is asked for. Pass 'mtp'."
        )
    device = execution_device(decoder_layers(target_model)[-1])
    return wrap_mtp_model(MtpModel.from_pretrained(target_model, device_map={"": device}))


def _from_mtp_tensors(
    path: str | os.PathLike[str], target_model: PreTrainedModel, options: dict[str, Any]
) -> MTPDrafter:
    tensors = read_mtp_tensors(path, options)
    if not tensors:
        raise ValueError(
            f"The checkpoint {str(path)!r} holds no `mtp.*` tensors, so there are no MTP layers to load. Quantized "
            "copies often lack them: pass the original checkpoint, or use another drafter."
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
            f"The `mtp.*` tensors of the checkpoint {str(path)!r} do not fit the target, a "
            f"{type(target_model).__name__}: the checkpoint {what} ({len(missing)} missing, {len(unknown)} unknown, "
            f"{len(wrong)} of another shape). Pass the target's own checkpoint, not a quantized copy of it."
        )
    dtype = options.get("dtype", target_model.dtype)
    dtype = dtype if isinstance(dtype, torch.dtype) else target_model.dtype
    layer.load_state_dict({name: tensor.to(dtype) for name, tensor in renamed.items()}, assign=True)
    return MTPDrafter(config, nn.ModuleList([layer]))


def read_mtp_tensors(path: str | os.PathLike[str], options: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose names start with `mtp.`; no other part of it is read.

    Args:
        path: A folder or a repository of the Hub, with one safetensors file or an index of several.
        options: Keywords of `from_pretrained` that say where the files are.
    """
    tensors: dict[str, Tensor] = {}
    for file_name, names in _mtp_files(path, options).items():
        with safe_open(file_name, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors


def _mtp_files(path: str | os.PathLike[str], options: dict[Any, Any]) -> dict[str, list[str]]:
    """The files that hold `mtp.*` tensors, fetched if need be, and the names of these tensors in each."""
    where = {key: options[key] for key in ("cache_dir", "revision", "subfolder", "token") if key in options}
    where |= {"_raise_exceptions_for_missing_entries": False}
    index = cached_file(path, "model.safetensors.index.json", **where)
    if index is None:
        files = {cached_file(path, "model.safetensors", **where)} - {None}
    else:
        with open(index, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
        files = {cached_file(path, file, **where) for name, file in weight_map.items() if name.startswith("mtp.")}
    held = {}
    for file_name in sorted(files):
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
