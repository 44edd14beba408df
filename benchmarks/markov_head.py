"""What conditional trees gain over a Markov head's own chain: tokens per forward on the target that ships.

    python benchmarks/markov_head.py --output benchmarks/results/markov_head.json

A vanilla Markov head is trained for a minute on the shipped drafter's layers: on what the target greedily writes
after some of the held-out prompts, with the written token in front of each slot. Other prompts measure. Every output
is compared with that of standard decoding.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import hf_ddtree
from hf_ddtree.demo import demo_prompts
from hf_ddtree.drafters import DFlash2DraftModel, DSparkConfig, DSparkDraftModel
from hf_ddtree.drafters.dflash2.model import DFlash2Layer
from hf_ddtree.target.features import FeatureRecorder

RANK, STEPS, EVERY = 32, 200, 2
METHODS: dict[str, dict[str, Any]] = {
    "chain by marginals": {"tree_shape": "chain", "tree_probabilities": "marginal"},
    "chain of the head": {"tree_shape": "chain"},
    "tree by marginals": {"tree_probabilities": "marginal"},
    "tree of the head": {},
}


class MarkovOnDFlash2(DSparkDraftModel):
    """DSpark's head on the layers of the second version of DFlash."""

    layer_class = DFlash2Layer


def with_markov_head(shipped: DFlash2DraftModel) -> DSparkDraftModel:
    """The shipped drafter's layers, with a new Markov head in place of its selector."""
    own = {"model_type", "selector_rank", "selector_top_k"}
    settings = {key: value for key, value in shipped.config.to_dict().items() if key not in own}
    config = DSparkConfig(
        **settings | {"markov_rank": RANK, "enable_confidence_head": False, "confidence_head_with_markov": False}
    )
    drafter = MarkovOnDFlash2(config).to(shipped.dtype).eval()
    drafter.load_state_dict(shipped.state_dict(), strict=False)
    torch.nn.init.zeros_(drafter.markov_head.markov_w2.weight)
    return drafter


@torch.no_grad()
def examples(target: PreTrainedModel, drafter: DSparkDraftModel, sequences: list[Tensor]) -> tuple[Tensor, ...]:
    """`logits (n, depth, vocab)`, `before (n, depth)` and `right (n, depth)` of blocks along what the target wrote."""
    first, length = drafter.config.first_slot, drafter.config.draft_length
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    recorder = FeatureRecorder(target, drafter.config.target_layer_ids)
    for sequence in sequences:
        with recorder.recording():
            target(sequence[None])
        features = recorder.take()
        assert features is not None
        for root in range(8, len(sequence) - length, EVERY):
            block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
            block[0, 0] = sequence[root]
            embedded = drafter.embed(block, target.get_input_embeddings())
            hidden = drafter(embedded, features[:, :root])[:, first : first + length]
            logits = drafter.compute_logits(hidden, target.get_output_embeddings())
            before = sequence[root : root + length][None]
            parts.append((logits, before, sequence[root + 1 : root + 1 + length][None]))
    recorder.close()
    return tuple(torch.cat(part) for part in zip(*parts))


def train(drafter: DSparkDraftModel, logits: Tensor, before: Tensor, right: Tensor) -> list[float]:
    """Trains the head by cross-entropy on the tokens that the target wrote; returns the first and the last loss."""
    weights = list(drafter.markov_head.parameters())
    optimizer = torch.optim.AdamW(weights, lr=3e-3, weight_decay=0.3)
    losses = []
    for _ in range(STEPS):
        chosen = torch.randint(len(logits), (256,))
        bias = drafter.markov_head.markov_w2(drafter.markov_head.markov_w1(before[chosen]))
        loss = F.cross_entropy((logits[chosen] + bias).flatten(0, 1), right[chosen].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
    return [losses[0], losses[-1]]


def main(
    train_prompts: Annotated[int, typer.Option(help="Prompts to train the head on.")] = 100,
    prompts: Annotated[int, typer.Option(help="Other prompts, which measure.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 96,
    output: Annotated[Path | None, typer.Option(help="A JSON file for the result.")] = None,
) -> None:
    """Trains and measures."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    target, shipped, tokenizer = hf_ddtree.load_demo()
    target, shipped = target.float(), shipped.float()
    drafter = with_markov_head(shipped)
    texts = [entry["prompt"] for entry in demo_prompts()]
    arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}

    def write(text: str, **drafts: Any) -> Any:
        inputs = tokenizer(text, return_tensors="pt")
        return target.generate(**inputs, **arguments, **drafts, return_dict_in_generate=True)

    start = time.perf_counter()
    fast = {"assistant_model": shipped, "generation_strategy": "ddtree", "tree_budget": 16}
    written = [write(text, **fast).sequences[0] for text in texts[prompts : prompts + train_prompts]]
    losses = train(drafter, *examples(target, drafter, written))
    seconds = time.perf_counter() - start
    drafter.requires_grad_(False)

    rows = []
    plain = [write(text).sequences.tolist() for text in texts[:prompts]]
    for budget in (8, 16, 32):
        for name, knobs in METHODS.items():
            new_tokens = rounds = 0
            for text, expected in zip(texts, plain):
                drafts = {"assistant_model": drafter, "generation_strategy": "ddtree", "tree_budget": budget}
                found = write(text, **drafts, calibrate=False, **knobs)
                assert found.sequences.tolist() == expected, (name, budget)
                new_tokens += sum(found.ddtree_stats.accepted_lengths)
                rounds += len(found.ddtree_stats.accepted_lengths)
            rows.append({"method": name, "budget": budget, "tokens_per_forward": round(new_tokens / rounds, 3)})
            print(rows[-1], flush=True)
    result = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "train_prompts": train_prompts,
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "seconds_to_write_and_train": round(seconds, 1),
        "loss": losses,
        "results": rows,
    }
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
