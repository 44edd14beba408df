"""Finding out what format a drafter's checkpoint has, loading it, and checking that it fits its target."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel

from ..target.weights import execution_device
from .causal_lm import check_causal_lm, is_causal_lm, load_causal_lm
from .dflash import DFlashConfig, DFlashDraftModel
from .dflash2 import DFlash2Config, DFlash2DraftModel
from .mtp import holds_mtp_of, load_mtp
from .native import NATIVE_MODEL_TYPES, read_native_config
from .speculators import check_vocabulary, is_speculators, read_speculators_config

# Keywords of `from_pretrained` that say where the files are.
_HUB_KWARGS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
# Settings that z-lab keeps in `dflash_config` or, in other files, at the top level.
_DFLASH_SETTINGS = (
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "is_causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
# Those that the second version has besides, and cannot do without.
_DFLASH2_SETTINGS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SUPPORTED = (
    "Supported are DFlash checkpoints as z-lab publishes them (DFlash 2 included), as the speculators library writes "
    "them and as Transformers has a model class for, drafters saved by this package, and causal language models."
)


def load_drafter(
    path_or_repo_id: str | os.PathLike[str], target_model: PreTrainedModel | None = None, **from_pretrained_kwargs: Any
) -> PreTrainedModel:
    """Loads a drafter from a local folder or the Hugging Face Hub, and checks that it fits its target.

    No code from the checkpoint is run: `trust_remote_code` is neither needed nor passed on.

    Args:
        path_or_repo_id: A folder, or a repository of the Hub such as `"z-lab/Qwen3.5-4B-DFlash"`. `"mtp"` stands for
            the multi-token-prediction layers in the target's own checkpoint, and so does the name of a checkpoint of
            the target that holds them.
        target_model: The model that the drafter will draft for. Its dtype, and the device of its output head, are the
            defaults for the drafter's.
        from_pretrained_kwargs: Passed on to `from_pretrained`, e.g. `dtype`, `device_map`, `revision`, `token`.

    Returns:
        The drafter, in evaluation mode.

    Raises:
        ValueError: If the checkpoint has a format that is not supported, lacks weights, or does not fit the target.
        TypeError: If `target_model` is no model.
        OSError: If there is no such folder or repository.
    """
    if target_model is not None and not isinstance(target_model, PreTrainedModel):
        raise TypeError(f"`target_model` must be the loaded target model, but is a `{type(target_model).__name__}`.")
    options = {"trust_remote_code": None, **from_pretrained_kwargs}
    options.pop("trust_remote_code")
    if path_or_repo_id == "mtp":
        return load_mtp(None, target_model, options)
    location = {key: options[key] for key in _HUB_KWARGS if key in options}
    raw_config, _ = PreTrainedConfig.get_config_dict(path_or_repo_id, **location)
    if target_model is not None and holds_mtp_of(target_model, path_or_repo_id, raw_config, location):
        return load_mtp(path_or_repo_id, target_model, options)
    return format_of(path_or_repo_id, raw_config).load(path_or_repo_id, raw_config, target_model, options).eval()


def check_checkpoint_fits(
    path_or_repo_id: str | os.PathLike[str], target_model: PreTrainedModel
) -> PreTrainedConfig | None:
    """Checks that a drafter fits a target, from the drafter's `config.json` alone.

    Args:
        path_or_repo_id: As of `load_drafter`.
        target_model: The target, whose weights may be on the meta device.

    Returns:
        The drafter's configuration; None if only its weights can tell.

    Raises:
        ValueError: If the format is not supported, or the drafter does not fit.
        OSError: If there is no such folder or repository.
    """
    if path_or_repo_id == "mtp":
        return None
    raw_config, _ = PreTrainedConfig.get_config_dict(path_or_repo_id)
    check = format_of(path_or_repo_id, raw_config).check
    return None if check is None else check(path_or_repo_id, raw_config, target_model)


def format_of(path_or_repo_id: str | os.PathLike[str], raw_config: dict[str, Any]) -> CheckpointFormat:
    """The format of a checkpoint with this `config.json`.

    Raises:
        ValueError: If it has none that is known.
    """
    for checkpoint_format in FORMATS:
        if checkpoint_format.matches(raw_config):
            return checkpoint_format
    architectures, model_type = raw_config.get("architectures") or [], raw_config.get("model_type")
    raise ValueError(
        f"The checkpoint {str(path_or_repo_id)!r} is no drafter that can be loaded: it has `architectures` "
        f"{architectures} and `model_type` {model_type!r}. {_SUPPORTED}"
    )


def is_drafter_alone(raw_config: dict[str, Any]) -> bool:
    """Whether a checkpoint with this `config.json` is a drafter and can be nothing else, such as a target."""
    return raw_config.get("model_type") in NATIVE_MODEL_TYPES or _is_dflash(raw_config)


class CheckpointFormat(NamedTuple):
    """A format that drafters come in.

    Attributes:
        matches: Whether the contents of a `config.json` are of this format.
        load: Loads the drafter from its folder or repository, given the contents of `config.json`, the target (or
            None), and keywords of `from_pretrained`.
        check: Checks that it fits a target, given the same without keywords, and returns its configuration; None if
            only the weights can tell.
    """

    matches: Callable[[dict[str, Any]], bool]
    load: Callable[[str | os.PathLike[str], dict[str, Any], PreTrainedModel | None, dict[str, Any]], PreTrainedModel]
    check: Callable[[str | os.PathLike[str], dict[str, Any], PreTrainedModel], PreTrainedConfig] | None = None


def load_dflash(
    path_or_repo_id: str | os.PathLike[str],
    raw_config: dict[str, Any],
    target_model: PreTrainedModel | None,
    options: dict[str, Any],
) -> DFlashDraftModel:
    """Loads a DFlash drafter of either version, whoever wrote it."""
    config = _read_config(raw_config, path_or_repo_id)
    move_to = None
    if target_model is not None:
        _check_config_fits(config, target_model)
        options.setdefault("dtype", target_model.dtype)
        if "device_map" not in options:
            move_to = execution_device(target_model.get_output_embeddings())
    model_class = DFlash2DraftModel if isinstance(config, DFlash2Config) else DFlashDraftModel
    loaded = model_class.from_pretrained(path_or_repo_id, config=config, output_loading_info=True, **options)
    drafter, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"The checkpoint {str(path_or_repo_id)!r} lacks {len(missing)} of the drafter's weights, e.g. "
            f"{missing[0]!r}. Download it again, or check that its config.json belongs to its weights."
        )
    if drafter.target_token_ids is not None:
        check_vocabulary(drafter.target_token_ids, config, path_or_repo_id)
    return drafter if move_to is None else drafter.to(move_to)


def check_dflash(
    path_or_repo_id: str | os.PathLike[str], raw_config: dict[str, Any], target_model: PreTrainedModel
) -> DFlashConfig:
    """Checks that a DFlash drafter fits a target."""
    config = _read_config(raw_config, path_or_repo_id)
    _check_config_fits(config, target_model)
    return config


def load_native(
    path_or_repo_id: str | os.PathLike[str],
    raw_config: dict[str, Any],
    target_model: PreTrainedModel | None,
    options: dict[str, Any],
) -> PreTrainedModel:
    """Loads a drafter of a class that Transformers has."""
    if target_model is None:
        return AutoModel.from_pretrained(path_or_repo_id, **options)
    check_native(path_or_repo_id, raw_config, target_model)
    options.setdefault("dtype", target_model.dtype)
    drafter = AutoModel.from_pretrained(path_or_repo_id, **options)
    return drafter if "device_map" in options else drafter.to(execution_device(target_model.get_output_embeddings()))


def check_native(
    path_or_repo_id: str | os.PathLike[str], raw_config: dict[str, Any], target_model: PreTrainedModel
) -> PreTrainedConfig:
    """Checks that a drafter of a class that Transformers has fits a target."""
    config = CONFIG_MAPPING[raw_config["model_type"]].from_dict(raw_config)
    _check_config_fits(read_native_config(config, target_model.config.get_text_config()), target_model)
    return config


def _read_config(raw_config: dict[str, Any], path_or_repo_id: str | os.PathLike[str]) -> DFlashConfig:
    if is_speculators(raw_config):
        return read_speculators_config(raw_config, path_or_repo_id)
    return read_drafter_config(raw_config, path_or_repo_id)


def _is_dflash(raw_config: dict[str, Any]) -> bool:
    own_types = (DFlashConfig.model_type, DFlash2Config.model_type)
    if is_speculators(raw_config) or raw_config.get("model_type") in own_types:
        return True
    return bool({"DFlashDraftModel", "DFlash2DraftModel"}.intersection(raw_config.get("architectures") or []))


# The first that matches is taken.
FORMATS = [
    CheckpointFormat(lambda raw_config: raw_config.get("model_type") in NATIVE_MODEL_TYPES, load_native, check_native),
    CheckpointFormat(_is_dflash, load_dflash, check_dflash),
    CheckpointFormat(is_causal_lm, load_causal_lm, check_causal_lm),
]


def read_drafter_config(raw_config: dict[str, Any], path_or_repo_id: str | os.PathLike[str]) -> DFlashConfig:
    """Turns the contents of a DFlash drafter's `config.json` into a config, whichever version and layout it has.

    Raises:
        ValueError: If a setting is missing or out of range.
    """
    nested = raw_config.get("dflash_config") or {}
    for config_class in (DFlashConfig, DFlash2Config):
        if raw_config.get("model_type") == config_class.model_type:
            return config_class.from_dict(raw_config)
    is_second = "DFlash2DraftModel" in raw_config["architectures"] or "selector_rank" in {*nested, *raw_config}
    names = _DFLASH_SETTINGS + (_DFLASH2_SETTINGS if is_second else ())
    settings = {key: raw_config[key] for key in names if raw_config.get(key) is not None}
    settings |= {key: nested[key] for key in names if nested.get(key) is not None}
    if missing := [key for key in names if key in _DFLASH2_SETTINGS and key not in settings]:
        raise ValueError(
            f"The checkpoint {str(path_or_repo_id)!r} is a DFlash 2 drafter, but its config.json has no {missing}. "
            "Download it again, or set them, in `dflash_config` or beside it, to what it was trained with."
        )
    dropped = {"architectures", "auto_map", "dflash_config", "model_type", "transformers_version", *names}
    kept = {key: value for key, value in raw_config.items() if key not in dropped}
    return (DFlash2Config if is_second else DFlashConfig).from_dict({**kept, **settings})


def check_drafter_fits(drafter: DFlashDraftModel, target_model: PreTrainedModel) -> None:
    """Checks that a drafter can draft for a target.

    Raises:
        ValueError: If hidden size, vocabulary or layers disagree, or the target has no output head; the message says
            what disagrees.
    """
    _check_config_fits(drafter.config, target_model)


def _check_config_fits(config: DFlashConfig, target_model: PreTrainedModel) -> None:
    target = target_model.config.get_text_config()
    kind = type(target_model).__name__
    advice = "Choose a drafter that was trained for this target."
    if target_model.get_output_embeddings() is None:
        raise ValueError(
            f"The target, a {kind}, has no output head, which the drafter needs. Load it with `AutoModelForCausalLM`."
        )
    for setting, target_setting in (
        ("hidden_size", "hidden_size"),
        ("vocab_size", "vocab_size"),
        ("num_target_layers", "num_hidden_layers"),
    ):
        given, allowed = getattr(config, setting), getattr(target, target_setting)
        if given is not None and given != allowed:
            raise ValueError(
                f"The drafter does not fit the target: the drafter has `{setting}` {given}, but the target, a {kind}, "
                f"has `{target_setting}` {allowed}. {advice}"
            )
    if config.mask_token_id is None:
        raise ValueError(
            "The drafter's config has no `mask_token_id`, so it cannot say what fills the slots to predict. Set "
            "`drafter.config.mask_token_id` to the token that it was trained with."
        )
    if wrong := [layer for layer in config.target_layer_ids or [] if layer >= target.num_hidden_layers]:
        raise ValueError(
            f"The drafter does not fit the target: its `target_layer_ids` hold {wrong}, but the target, a {kind}, has "
            f"layers 0 to {target.num_hidden_layers - 1}. {advice}"
        )
