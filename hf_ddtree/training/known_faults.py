"""What makes drafters useless in practice, and how each is tried: what the drafter gives with it put right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..drafters.dflash import DFlashDraftModel
from ..interop.models import cached_file_if_any
from .from_scratch import find_mask_token

# Special tokens of the tokenizer that are tried as the mask token.
MOST_MASK_TOKENS = 24
# A checkpoint's vocabulary tensors.
HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class KnownFault:
    """A fault that a drafter may have.

    Attributes:
        name: What is wrong, if it has it.
        advice: What to do then.
        put_right: Within this context the drafter is as it would be without the fault.
        reads_other_layers: Whether the drafter reads other layers of the target then.
    """

    name: str
    advice: str
    put_right: Callable[[], AbstractContextManager[None]]
    reads_other_layers: bool = False


def known_faults(
    drafter: DFlashDraftModel, target_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[KnownFault]:
    """The faults that this drafter may have.

    Args:
        drafter: The drafter, as loaded: what it was loaded from is looked at as well.
        target_model: The target.
        tokenizer: The target's.
    """
    yield from _layer_faults(drafter, target_model)
    yield from _vocabulary_faults(drafter, target_model)
    yield from _position_faults(drafter)
    yield from _mask_faults(drafter, target_model, tokenizer)


def _layer_faults(drafter: DFlashDraftModel, target_model: PreTrainedModel) -> Iterator[KnownFault]:
    depth = target_model.config.get_text_config().num_hidden_layers
    for shift, word in ((1, "low"), (-1, "high")):
        layers = [layer + shift for layer in drafter.config.target_layer_ids]
        if 0 <= min(layers) and max(layers) < depth:
            yield KnownFault(
                f"`target_layer_ids` are one too {word}",
                f"Set `target_layer_ids` to {layers} in its config.json. Layers count from 0, and an entry of "
                "`hidden_states` is one higher, as the embeddings come first.",
                partial(_setting, drafter, "target_layer_ids", layers),
                reads_other_layers=True,
            )


def _position_faults(drafter: DFlashDraftModel) -> Iterator[KnownFault]:
    config = drafter.config
    for shift, word in ((1, "low"), (-1, "high")):
        yield KnownFault(
            f"positions of the block are one too {word}",
            "It was trained with other positions than published drafters, which no setting can say. Ask its "
            "publisher, or train it on with `hf-ddtree train --from`.",
            partial(_shifted_block, drafter, shift),
        )
    says = not config.sample_from_anchor
    yield KnownFault(
        f"slots predict the token {'after' if says else 'at'} their own place",
        f"Set `sample_from_anchor` (`shift_label` in some layouts) to {says} in its config.",
        partial(_setting, drafter, "sample_from_anchor", says),
    )
    for is_causal in {True, False} - {config.is_causal}:
        yield KnownFault(
            f"blocks are {'causal' if is_causal else 'not causal'}",
            f"Set `is_causal` to {is_causal} in its config.json.",
            partial(_setting, drafter, "is_causal", is_causal),
        )


def _mask_faults(
    drafter: DFlashDraftModel, target_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[KnownFault]:
    config = drafter.config
    tokens = [tokenizer.mask_token_id, *sorted(tokenizer.added_tokens_decoder)[:MOST_MASK_TOKENS]]
    tokens += [len(tokenizer), config.vocab_size - 1]
    try:
        tokens.insert(0, find_mask_token(tokenizer, config.vocab_size))
    except ValueError:
        pass
    usable = [token for token in tokens if token is not None and 0 <= token < config.vocab_size]
    for token in dict.fromkeys(usable):
        if token != config.mask_token_id:
            yield KnownFault(
                f"the mask token is {token} ({named(tokenizer, token)}), not {config.mask_token_id} "
                f"({named(tokenizer, config.mask_token_id)})",
                f"Set `mask_token_id` to {token} in its config.json.",
                partial(_setting, drafter, "mask_token_id", token),
            )
    embeddings = target_model.get_input_embeddings().weight
    mean = embeddings.float().mean(dim=0).to(embeddings.dtype)
    yield KnownFault(
        "a slot to predict is embedded as the mean of all embeddings",
        f"Write the mean of the target's embeddings into row {config.mask_token_id}, if no text holds that token.",
        partial(_embedded, drafter, lambda token_ids, embedded: _masked(token_ids, embedded, config, mean)),
    )


def _vocabulary_faults(drafter: DFlashDraftModel, target_model: PreTrainedModel) -> Iterator[KnownFault]:
    config = drafter.config
    for scale in dict.fromkeys((1.0, config.hidden_size**0.5)):
        if scale != config.input_embedding_scale:
            yield KnownFault(
                f"embeddings are scaled by {config.input_embedding_scale:.4g}, not by {scale:.4g}",
                f"Set `input_embedding_scale` to {scale:.6g} in `dflash_config` of its config.json.",
                partial(_setting, drafter, "input_embedding_scale", scale),
            )
    own = _own_vocabulary(config.name_or_path) if config.name_or_path else {}
    target_head = target_model.get_output_embeddings().weight
    if HEAD in own and own[HEAD].shape == target_head.shape:
        yield KnownFault(
            "its output head is not the target's",
            "It was trained with a head of its own, which its checkpoint holds and which published DFlash drafters "
            "do not have. Train it on with the target's head: `hf-ddtree train --from`.",
            partial(_own_head, drafter, own[HEAD]),
        )
    target_embeddings = target_model.get_input_embeddings().weight
    if EMBEDDINGS in own and own[EMBEDDINGS].shape == target_embeddings.shape:
        table = own[EMBEDDINGS].to(target_embeddings)
        yield KnownFault(
            "its embeddings are not the target's",
            "It was trained with the embeddings in its checkpoint, such as those of another version of the target. "
            "Use that target, or train it on with this one's: `hf-ddtree train --from`.",
            partial(_embedded, drafter, lambda token_ids, embedded: _looked_up(token_ids, embedded, config, table)),
        )


def named(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """A token as the tokenizer calls it."""
    name = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    return "no token of the tokenizer" if name is None else repr(name)


@contextmanager
def _setting(drafter: DFlashDraftModel, name: str, value: Any) -> Iterator[None]:
    before = getattr(drafter.config, name)
    setattr(drafter.config, name, value)
    try:
        yield
    finally:
        setattr(drafter.config, name, before)


@contextmanager
def _shifted_block(drafter: DFlashDraftModel, shift: int) -> Iterator[None]:
    """Adds to the positions of all blocks, but not to those of the context in front of them."""

    def shifted(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        block, features, positions = args
        positions = positions.clone()
        positions[:, -block.shape[1] :] += shift
        return (block, features, positions), kwargs

    hook = drafter.register_forward_pre_hook(shifted, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _embedded(drafter: DFlashDraftModel, change: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Changes what `drafter.embed` gives."""
    embed = drafter.embed
    drafter.__dict__["embed"] = lambda token_ids, table: change(token_ids, embed(token_ids, table))
    try:
        yield
    finally:
        del drafter.__dict__["embed"]


def _masked(token_ids: Tensor, embedded: Tensor, config: Any, vector: Tensor) -> Tensor:
    vector = vector.to(embedded) * config.input_embedding_scale
    return torch.where((token_ids == config.mask_token_id)[..., None].to(embedded.device), vector, embedded)


def _looked_up(token_ids: Tensor, embedded: Tensor, config: Any, table: Tensor) -> Tensor:
    return table[token_ids.to(table.device)].to(embedded) * config.input_embedding_scale


@contextmanager
def _own_head(drafter: DFlashDraftModel, weight: Tensor) -> Iterator[None]:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = nn.Parameter(weight.to(drafter.device, drafter.dtype), requires_grad=False)
    drafter.lm_head = head
    try:
        yield
    finally:
        del drafter.lm_head


def _own_vocabulary(path: str) -> dict[str, Tensor]:
    """The embeddings and the output head that a drafter's checkpoint holds, which a DFlash drafter does not load."""
    files: dict[str, str] = {}
    if index := cached_file_if_any(path, "model.safetensors.index.json"):
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        names = {name: shards[name] for name in (HEAD, EMBEDDINGS) if name in shards}
        files = {name: found for name, shard in names.items() if (found := cached_file_if_any(path, shard))}
    elif weights := cached_file_if_any(path, "model.safetensors"):
        files = dict.fromkeys((HEAD, EMBEDDINGS), weights)
    held: dict[str, Tensor] = {}
    for name, file in files.items():
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():
                held[name] = tensors.get_tensor(name)
    return held
