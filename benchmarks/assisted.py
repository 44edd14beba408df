"""Chain and trees against Transformers' own assisted decoding, with the same drafter, on targets with full attention.

    python benchmarks/assisted.py

Float32, greedy, random weights. Drafters are as accurate as they are told to be: at each position the right token has
rank `r` with probability `a (1 - a)^r`, and they state just that. Ranks are drawn anew for each prompt, and are the
same for every method.

- `oracle`: a Qwen3 of 100 M parameters. Drafts cost nothing. Transformers verifies the chain that the package's
  generator gives it through `get_candidates`.
- `native`: a Muse Glimmer of 40 M parameters, and a DFlash drafter of Transformers' own class. The drafter's forward
  runs, and what its last norm gives is replaced by hidden states from which the target's head makes the drafts.

Transformers' loop does not draft before the prompt was read, nor does the package's. All methods run one after the
other on each prompt, in an order that rotates; every output is compared with standard decoding's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import transformers
import typer
from measure import RESULTS, Stopwatch, against, alternate, require_identical, save, summarise
from random_models import NO_TOKENS, make_qwen3, random_prompts, scale
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from hf_ddtree.testing import SetAccuracyGenerator
from hf_ddtree.tree.shape import TreeShape

LENGTH = 15
# With the root as many rows as the chain has, and twice as many.
NODES = 15, 31
PROMPT_LENGTH = 64
OURS, THEIRS = "chain", "Transformers' chain"


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
        inputs: Arguments of `generate()`.
        sequence: `(length,)`, its tokens and those that standard decoding makes of it.
        seed: Of its drafts.
    """

    inputs: dict[str, Tensor]
    sequence: Tensor
    seed: int


class AssistedGenerator(SetAccuracyGenerator):
    """Drafts for Transformers' loop, as its own generators do: no more than may be emitted, and nothing before the
    first forward."""

    def __init__(self, prompt_length: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompt_length = prompt_length

    def get_candidates(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if input_ids.shape[1] == self._prompt_length:
            return input_ids, None
        candidates, _ = super().get_candidates(input_ids, *args, **kwargs)
        return candidates[:, : len(self._sequence) - 1], None


@contextmanager
def assisting(model: PreTrainedModel, generator: SetAccuracyGenerator) -> Iterator[dict[str, Any]]:
    """Puts a generator into Transformers' assisted decoding, and gives the argument that asks for that."""
    with patch.object(type(model), "_get_candidate_generator", lambda self, **_: generator):
        yield {"prompt_lookup_num_tokens": 1}


class HiddenDrafts:
    """Makes a native drafter draft what a generator drafts, at the cost of its own forward.

    Args:
        drafter: The drafter. Its rotary embedding is told where the block stands, and its last norm gives the hidden
            states, in Transformers' loop as in the package's.
        head: Weight of the target's output head, `(vocab, hidden)`.
    """

    # Logit of a token of probability 1; those that are no candidates stay far below.
    LOGIT = 20.0

    def __init__(self, drafter: PreTrainedModel, head: Tensor) -> None:
        self.generator: SetAccuracyGenerator | None = None
        self._head = head
        self._block_size = drafter.config.block_size
        self._root = 0
        drafter.rotary_emb.register_forward_pre_hook(self._note_position)
        drafter.norm.register_forward_hook(self._replace)

    def _note_position(self, module: Any, args: tuple[Tensor, Tensor]) -> None:
        self._root = int(args[1][0, -self._block_size])

    def _replace(self, module: Any, args: Any, hidden_states: Tensor) -> Tensor:
        assert self.generator is not None
        log_probs, token_ids = self.generator.candidates(self._root + 1)
        rows = self._head[token_ids]
        # The hidden state in the span of the candidates' rows that gives them these logits.
        weights = torch.linalg.solve(rows @ rows.mT, (self.LOGIT + log_probs)[..., None])
        hidden_states = hidden_states.clone()
        hidden_states[0, 1 - self._block_size :] = (rows.mT @ weights)[..., 0]
        return hidden_states


def make_native_pair(is_small: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    shape = {"hidden_size": 512, "intermediate_size": 128 if is_small else 1536, "head_dim": 64}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 2}
    layers = 2 if is_small else 10
    text = transformers.MuseGlimmerTextConfig(
        vocab_size=8000,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        output_multiplier=1.0,
        final_logit_softcapping=1e4,
        **shape,
        **NO_TOKENS,
    )
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.MuseGlimmerConfig(text_config=text.to_dict(), vision_config=vision)
    model = scale(transformers.MuseGlimmerForConditionalGeneration(config))
    drafter = transformers.MuseGlimmerAssistantModel(
        transformers.MuseGlimmerAssistantConfig(
            num_hidden_layers=2,
            layer_types=["full_attention"] * 2,
            block_size=1 + LENGTH,
            mask_token_id=1,
            target_layer_ids=[0, layers - 1],
            **shape,
        )
    )
    return model, scale(drafter)


def measure_oracle(prompts: int, tokens: int, accuracy: float, is_small: bool) -> list[dict[str, Any]]:
    model = make_qwen3(64, 2) if is_small else make_qwen3(768, 12)
    stopwatch = Stopwatch(model)

    def run(method: str, prompt: Prompt) -> tuple[dict[str, Any], list[list[int]]]:
        if method == "plain":
            return stopwatch.run(prompt.inputs, tokens)
        settings = prompt.sequence, model.config.vocab_size, accuracy
        if method == THEIRS:
            generator = AssistedGenerator(PROMPT_LENGTH, *settings, "chain", horizon=LENGTH, seed=prompt.seed)
            with assisting(model, generator) as arguments:
                return stopwatch.run(prompt.inputs, tokens, **arguments)
        shape: TreeShape = "chain" if method == OURS else "best_first"
        generator = SetAccuracyGenerator(*settings, shape, horizon=LENGTH, seed=prompt.seed)
        return stopwatch.run(prompt.inputs, tokens, candidate_generator=generator, **ours(method))

    return measure("oracle", model, prompts, tokens, run)


def ours(method: str) -> dict[str, Any]:
    """The package's arguments of `generate()` for its chain or a tree."""
    if method == OURS:
        return {"generation_strategy": "dflash", "tree_budget": LENGTH}
    return {"generation_strategy": "ddtree", "tree_budget": int(method.split()[-1])}


def measure_native(prompts: int, tokens: int, accuracy: float, is_small: bool) -> list[dict[str, Any]]:
    model, drafter = make_native_pair(is_small)
    vocab_size = model.config.get_text_config().vocab_size
    stopwatch = Stopwatch(model)
    drafts = HiddenDrafts(drafter, model.get_output_embeddings().weight)

    def run(method: str, prompt: Prompt) -> tuple[dict[str, Any], list[list[int]]]:
        if method == "plain":
            return stopwatch.run(prompt.inputs, tokens)
        settings = prompt.sequence, vocab_size, accuracy
        drafts.generator = SetAccuracyGenerator(*settings, horizon=LENGTH, seed=prompt.seed)
        arguments = {"speculation_type": "dflash"} if method == THEIRS else ours(method)
        return stopwatch.run(prompt.inputs, tokens, assistant_model=drafter, **arguments)

    return measure("native", model, prompts, tokens, run)


def measure(pair: str, model: PreTrainedModel, count: int, tokens: int, run: Any) -> list[dict[str, Any]]:
    """Finds out what standard decoding makes of each of some random prompts, and then runs all methods."""
    prompts = [
        Prompt(inputs, model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0], seed)
        for seed, inputs in enumerate(random_prompts(model.config.get_text_config().vocab_size, count, PROMPT_LENGTH))
    ]
    methods = ["plain", THEIRS, OURS, *(f"tree of {nodes}" for nodes in NODES)]
    for method in methods:
        run(method, prompts[0])
    return [{"pair": pair, **one} for one in alternate(methods, prompts, run, pair)]


def conclude(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The methods' figures, and those of the chain and the trees against Transformers' chain."""
    methods = summarise(runs)
    others = [name for name in methods if name not in ("plain", THEIRS)]
    return {"methods": methods, "against_transformers": {name: against(runs, name, THEIRS) for name in others}}


def show(pair: str, entry: dict[str, Any]) -> None:
    table = Table("method", "tokens/s", "quartiles", "against plain", "tokens/forward", "round ms", title=pair)
    for method, figures in entry["methods"].items():
        low, median, high = figures["tokens_per_second"]
        cells = [method, f"{median:.1f}", f"{low:.1f}-{high:.1f}", f"{figures['against_plain'][1]:.2f}"]
        cells += [f"{figures['tokens_per_forward']:.2f}", f"{figures['round_ms']['whole']:.1f}"]
        table.add_row(*cells)
    console = Console(width=110)
    console.print(table)
    for name, (low, middle, high) in entry["against_transformers"].items():
        console.print(f"{name} against {THEIRS}: {middle:.3f} ({low:.3f}-{high:.3f})")


def main(
    prompts: Annotated[int, typer.Option(help="Prompts for each pair.")] = 10,
    tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 96,
    accuracy: Annotated[float, typer.Option(help="How often the first guess at a position is right.")] = 0.7,
    small: Annotated[bool, typer.Option(help="Small models, to see that the script works.")] = False,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "assisted.json",
) -> None:
    transformers.logging.set_verbosity_error()
    runs: list[dict[str, Any]] = []
    summary = {}
    for measure_pair in (measure_oracle, measure_native):
        of_pair = measure_pair(prompts, tokens, accuracy, small)
        runs += of_pair
        pair = of_pair[0]["pair"]
        summary[pair] = conclude(of_pair)
        show(pair, summary[pair])
    save(output, summary, runs, tokens=tokens, accuracy=accuracy)
    require_identical(runs)


if __name__ == "__main__":
    typer.run(main)
