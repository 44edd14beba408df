"""A drafter's checkpoint, and how its weights are loaded."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..target.weights import execution_device
from .weight_files import check_declared_size, check_finite, find_weight_files

# Keywords of `from_pretrained` that say where the files are.
LOCATION_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


@contextmanager
def config_errors(name: str, *others: type[Exception]) -> Iterator[None]:
    """Makes one `ValueError` of what values that a config.json must not have raise inside.

    Args:
        name: The checkpoint, for the message.
        *others: Further errors that can come of nothing else inside.
    """
    kinds: tuple[type[Exception], ...] = (KeyError, RecursionError, StrictDataclassError, ZeroDivisionError, *others)
    try:
        yield
    except kinds as error:
        reason = str(error) if isinstance(error, StrictDataclassError) else repr(error)
        raise ValueError(
            f"The checkpoint {name!r} has a config.json that cannot be read as a drafter's: "
            f"{textwrap.shorten(reason, 300)}. Download it again, or use another drafter."
        ) from error


def names_a_folder(path: str | os.PathLike[str]) -> bool:
    """Whether it can be nothing but a folder: no repository of the Hub has such a name."""
    name = str(path)
    return not isinstance(path, str) or Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1


class Checkpoint:
    """A folder or a repository of the Hub, and how to load from it.

    Args:
        path: The folder or repository.
        options: Keywords of `from_pretrained`.
        raw_config: The contents of its `config.json`, which is read when first asked for if they are not given.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: dict[str, Any] | None = None,
        raw_config: dict[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.options = options or {}
        if raw_config is not None:
            self.raw_config = raw_config

    @property
    def name(self) -> str:
        """The path, for messages."""
        return str(self.path)

    @property
    def location(self) -> dict[str, Any]:
        """Those of the options that say where the files are."""
        return {key: self.options[key] for key in LOCATION_KEYWORDS if key in self.options}

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        """The contents of `config.json`.

        Raises:
            OSError: If there is no such folder or repository.
            ValueError: If it is a file, or its `config.json` holds something else than an object.
        """
        if Path(self.path).is_file():
            raise ValueError(f"{self.name!r} is a file. Name the folder of the drafter's checkpoint.")
        if names_a_folder(self.path) and not Path(self.path).exists():
            raise OSError(f"The folder {self.name!r} does not exist, so no drafter can be loaded from it.")
        try:
            raw_config = PreTrainedConfig.get_config_dict(self.path, **self.location)[0]
        except OSError as error:
            if Path(self.path).is_dir():
                raise
            raise OSError(f"{self.name!r} is no folder, nor could it be had from the Hub: {error}") from error
        if not isinstance(raw_config, dict):
            raise ValueError(f"The checkpoint {self.name!r} has a config.json that holds no object.")
        return raw_config

    @property
    def model_type(self) -> str | None:
        """`model_type` of the config."""
        return self.raw_config.get("model_type")

    @property
    def speculators_type(self) -> str | None:
        """`speculators_model_type` of the config, which the speculators library writes."""
        return self.raw_config.get("speculators_model_type")

    @property
    def architectures(self) -> list[str]:
        """`architectures` of the config; empty if there are none."""
        return self.raw_config.get("architectures") or []

    def read_config(self) -> PreTrainedConfig:
        """The configuration as the class that Transformers has for its `model_type`."""
        config = CONFIG_MAPPING[self.model_type].from_dict(self.raw_config)
        config.name_or_path = self.name
        return config

    def load(
        self, model_class: Any, target_model: PreTrainedModel | None, refuse_unknown: bool = False, **kwargs: Any
    ) -> PreTrainedModel:
        """Loads a drafter with `from_pretrained`; by default in the target's dtype, next to the target's output head.

        Args:
            model_class: A model class, or one of Transformers' auto classes.
            target_model: The target; None leaves dtype and device as `from_pretrained` chooses them.
            refuse_unknown: Whether weights that the class does not know are refused, as they belong to a drafter that
                computes something else.
            **kwargs: Passed to `from_pretrained`.

        Raises:
            ValueError: If the checkpoint lacks weights, holds some of another size than its config says, some that are
                not finite, or unknown ones that are refused; or if its files are no safetensors.
        """
        options = self.options | kwargs
        self._check_files(model_class, options)
        if target_model is not None:
            options.setdefault("dtype", target_model.dtype)
        # Sizes that do not match are in the information, where Transformers would say only that there are some.
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
        drafter, info = model_class.from_pretrained(self.path, **options)
        if mismatched := sorted((name, tuple(given), tuple(size)) for name, given, size in info["mismatched_keys"]):
            name, given, size = mismatched[0]
            raise ValueError(
                f"The checkpoint {self.name!r} holds {len(mismatched)} weights of another size than its config.json "
                f"says, e.g. {name!r} of {given} instead of {size}. Download it again, or check that its config.json "
                "belongs to its weights."
            )
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"The checkpoint {self.name!r} lacks {len(missing)} of the drafter's weights, e.g. {missing[0]!r}. "
                "Download it again, or check that its config.json belongs to its weights."
            )
        if refuse_unknown and (unknown := sorted(info["unexpected_keys"])):
            raise ValueError(
                f"The checkpoint {self.name!r} holds {len(unknown)} weights that a {type(drafter).__name__} does not "
                f"have, e.g. {unknown[0]!r}, so it is a drafter of another kind. Use another drafter."
            )
        check_finite(self.path, drafter)
        if target_model is not None and "device_map" not in options:
            drafter.to(execution_device(target_model.get_output_embeddings()))
        return drafter

    def _check_files(self, model_class: Any, options: dict[str, Any]) -> None:
        """Looks at the files before any weights are loaded; not at those of a GGUF file or a variant."""
        if "gguf_file" in options or options.get("variant") is not None:
            return
        files = find_weight_files(self.path, self.location)
        is_packed = "quantization_config" in self.raw_config or options.get("quantization_config") is not None
        if files and not is_packed:
            check_declared_size(self.path, files, model_class, options.get("config") or self.read_config())
