"""What else a report says of a target: its layers by kind, and notes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..interop.models import is_stateful
from ..target.layers import first_changing_position, layer_types
from .report import LayerKind

# What the modules that mix tokens are called.
MIXER_NAMES = re.compile("attention|mixer|mamba|deltanet|conv|lstm|recurrent", re.IGNORECASE)
# Widths that bitsandbytes' 4-bit kernel for CPUs with AVX512-BF16 divides.
OUTPUTS_IN_4_BIT, INPUTS_IN_4_BIT = 32, 64


def layer_kinds(model: PreTrainedModel) -> tuple[LayerKind, ...]:
    config = model.config.get_text_config()
    depth = config.num_hidden_layers
    lists = [module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    layers: list[nn.Module] = next((list(found) for found in lists if len(found) == depth), [])
    is_told = getattr(config, "layer_types", None) is not None or not is_stateful(model)
    kinds: Sequence[str | None] = layer_types(config) if is_told else [None] * depth
    counts: Counter[tuple[str | None, tuple[str, ...]]] = Counter()
    for kind, layer in zip(kinds, layers):
        modules = tuple(name for child in layer.children() if MIXER_NAMES.search(name := type(child).__name__))
        counts[kind, modules or (type(layer).__name__,)] += 1
    return tuple(LayerKind(kind, modules, count) for (kind, modules), count in counts.items())


def notes_on(model: PreTrainedModel, config: PreTrainedConfig) -> list[str]:
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


def note_cost(drafter: PreTrainedModel | PreTrainedConfig, target: PreTrainedModel, notes: list[str]) -> None:
    """Notes if a language model that drafts is as large as its target."""
    if isinstance(drafter, PreTrainedConfig):
        if type(drafter) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            return
        with torch.device("meta"):
            drafter = AutoModelForCausalLM.from_config(drafter)
    own, others = drafter.num_parameters(), target.num_parameters()
    if own >= others:
        notes.append(
            f"The drafter has {own / 1e9:.3g} billion parameters, its target {others / 1e9:.3g}. It runs for every "
            "level of a tree, so it makes decoding slower, however well it drafts. Choose one several times smaller."
        )
