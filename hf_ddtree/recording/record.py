"""A recorded text in a file: its tokens, and the features of a drafter's layers if they are kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "hf_ddtree recording 1"
SUFFIX = ".safetensors"
TOKEN_BYTES, FEATURE_BYTES = 4, 2
# Most of the header, and of the target's name in it.
HEADER_BYTES, NAME_LENGTH = 2048, 200


@dataclass(frozen=True)
class Record:
    """A prompt and what a target said after it.

    Attributes:
        token_ids: All tokens.
        prompt_length: How many of them are the prompt's.
        target: The target's `fingerprint_of`.
        name: What the target is called, for messages.
        layer_ids: The layers whose outputs are the features; empty without features.
        features: `(length - 1, size)` bfloat16, of all tokens but the last, which the target has not been fed.
    """

    token_ids: list[int]
    prompt_length: int
    target: str
    name: str
    layer_ids: tuple[int, ...] = ()
    features: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Most bytes of its file."""
        features = 0 if self.features is None else self.features.numel() * FEATURE_BYTES
        return HEADER_BYTES + len(self.token_ids) * TOKEN_BYTES + features

    def without_features(self) -> Record:
        """The same, tokens alone."""
        return Record(self.token_ids, self.prompt_length, self.target, self.name)

    def write(self, path: Path) -> None:
        """Writes the file.

        Raises:
            OSError: If it cannot be written.
        """
        tensors = {"token_ids": torch.tensor(self.token_ids, dtype=torch.int32, device="cpu")}
        if self.features is not None:
            tensors["features"] = self.features.contiguous()
        about = {
            "format": FORMAT,
            "prompt_length": str(self.prompt_length),
            "target": self.target,
            "name": self.name[:NAME_LENGTH],
            "layer_ids": json.dumps(self.layer_ids),
        }
        try:
            save_file(tensors, path, metadata=about)
        except SafetensorError as error:
            raise OSError(str(error)) from error


class StoredRecord:
    """A record on disk, whose features are read when they are asked for.

    Args:
        path: The file.

    Attributes:
        token_ids: `(length,)` int32.
        prompt_length, target, name, layer_ids: As of `Record`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("format") != FORMAT:
                    raise ValueError(f"its format is {about.get('format')!r}, not {FORMAT!r}")
                tokens = file.get_tensor("token_ids")
                if tokens.ndim != 1 or tokens.dtype != torch.int32 or bool((tokens < 0).any()):
                    raise ValueError("`token_ids` are no tokens")
                self.token_ids: np.ndarray = tokens.numpy()
                self.prompt_length = int(about["prompt_length"])
                if not 0 <= self.prompt_length <= len(tokens):
                    raise ValueError(f"`prompt_length` is {self.prompt_length} of {len(tokens)} tokens")
                self.target, self.name = about["target"], about["name"]
                self.layer_ids = tuple(map(int, json.loads(about["layer_ids"])))
                self.feature_size = self._feature_size(file)
        except FileNotFoundError:
            raise
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"it holds no recorded text: {error}.") from error

    def _feature_size(self, file: safe_open) -> int:
        """Numbers per token; 0 without features."""
        if "features" not in file.keys():  # noqa: SIM118
            return 0
        part = file.get_slice("features")
        shape = part.get_shape()
        if part.get_dtype() != "BF16" or len(shape) != 2 or shape[0] != len(self.token_ids) - 1:
            raise ValueError(f"`features` are {part.get_dtype()} of the shape {tuple(shape)}")
        return int(shape[1])

    def features(self, start: int, end: int) -> Tensor | None:
        """`(end - start, size)` bfloat16 of some tokens, 0 for the last one of the text; None if they are not there
        any more."""
        try:
            with safe_open(self.path, framework="pt") as file:
                part: Tensor = file.get_slice("features")[start:end]
        except (FileNotFoundError, SafetensorError):
            return None
        return torch.nn.functional.pad(part, (0, 0, 0, end - start - len(part)))


def bytes_per_token(feature_size: int) -> int:
    """What a recorded token takes on disk.

    Args:
        feature_size: Layers whose outputs are kept times the target's hidden size; 0 for tokens alone.
    """
    return TOKEN_BYTES + FEATURE_BYTES * feature_size
