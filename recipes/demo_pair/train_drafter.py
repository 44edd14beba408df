"""Step 4: the drafter, DFlash 2 by default, trained on the target's own texts with the target frozen.

Every step takes a few texts, puts many blocks at random roots into each, and asks for the tokens behind the roots.
Writes `drafter_checkpoint.pt` (to go on from), `drafter/` (weights rounded to bfloat16) and `drafter_log.jsonl`.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from common import (
    MASK,
    TARGET_LAYER_IDS,
    TimeBudget,
    build_optimizers,
    device,
    save_atomically,
    seed_everything,
    set_lr,
)
from evaluate import POLICIES, draft_hidden, load_held_out, replay
from rich.progress import Progress
from self_text import LENGTH, open_rows
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from hf_ddtree.drafters import DFlash2Config, DFlash2DraftModel, DFlashConfig, DFlashDraftModel

REPORTED = ("chain", "selector_chain", "marginal_16", "conditional_16", "marginal_64", "conditional_64")


def new_drafter(
    target: Qwen3_5ForCausalLM, mask_token_id: int, version: int, layers: int, block_size: int
) -> DFlashDraftModel:
    settings = {
        "vocab_size": target.config.vocab_size,
        "hidden_size": target.config.hidden_size,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": target.config.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "block_size": block_size,
        "target_layer_ids": TARGET_LAYER_IDS,
        "mask_token_id": mask_token_id,
        "num_target_layers": target.config.num_hidden_layers,
        # Where it sees more than the texts that it learns from are long, a drafter is right less often.
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": LENGTH,
        "use_sliding_window": True,
        "is_causal": False,
    }
    if version == 1:
        return DFlashDraftModel(DFlashConfig(**settings))
    return DFlash2DraftModel(DFlash2Config(**settings, selector_rank=128, selector_top_k=32))


class SelfText:
    """Batches of the texts that are done so far; more may be written meanwhile."""

    def __init__(self, work_dir: Path, feature_size: int) -> None:
        self.progress_file = work_dir / "train_rows.json"
        self.refresh()
        self.text, self.features = open_rows(work_dir, "train", self.progress["rows"], feature_size, "r")

    def refresh(self) -> None:
        self.progress = json.loads(self.progress_file.read_text())

    def batch(
        self, rows: int, anchors: int, horizon: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens `(rows, 512)`, features `(rows, 512, ...)` and sorted random roots `(rows, anchors)` in the
        generated part."""
        chosen = torch.randint(self.progress["done"], (rows,), generator=generator)
        first = torch.tensor(self.progress["prompt_lengths"])[chosen]
        last = LENGTH - 1 - horizon // 2
        roots = first[:, None] + (torch.rand(rows, anchors, generator=generator) * (last - first)[:, None]).long()
        tokens = torch.from_numpy(self.text[chosen.numpy()].astype("int64"))
        features = torch.from_numpy(self.features[chosen.numpy()]).float()
        return tokens.to(device()), features.to(device()), roots.sort(dim=1).values.to(device())


def block_loss(
    drafter: DFlashDraftModel,
    target: Qwen3_5ForCausalLM,
    tokens: Tensor,
    features: Tensor,
    roots: Tensor,
    gamma: float,
    soft: float,
    selector_share: float,
) -> tuple[Tensor, Tensor]:
    """Weighted cross entropy over all slots, and how often slot 1 is right.

    A share `soft` of it is against the target's own distribution, which its last layer's features give. Slot `k`
    weighs `exp(-(k - 1) / gamma)`: a late slot matters only when all before it are right. If the drafter has a
    selector, `selector_share` of the loss is that of the slots given the token before.
    """
    hidden = draft_hidden(drafter, target, tokens, features, roots)
    logits = drafter.compute_logits(hidden, target.lm_head)
    offsets = torch.arange(1, logits.shape[2] + 1, device=tokens.device)
    places = roots[..., None] + offsets
    inside = places < LENGTH
    places = places.clamp(max=LENGTH - 1).flatten(1)
    labels = tokens.gather(1, places)
    with torch.no_grad():
        last = features[..., -target.config.hidden_size :]
        truth = target.lm_head(target.model.norm(last)).softmax(-1)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        truth = truth[rows, places - 1].flatten(0, 1)
    weights = (torch.exp(-(offsets - 1) / gamma) * inside).flatten()

    def cross_entropy(scores: Tensor) -> Tensor:
        scores = scores.flatten(0, 2)
        hard = F.cross_entropy(scores, labels.flatten(), reduction="none")
        against_target = F.cross_entropy(scores, truth, reduction="none")
        return ((1 - soft) * hard + soft * against_target) @ weights / weights.sum()

    loss = cross_entropy(logits)
    if isinstance(drafter, DFlash2DraftModel):
        conditional = logits_after(drafter, hidden, logits, tokens.gather(1, places - 1).view(inside.shape))
        loss = (1 - selector_share) * loss + selector_share * cross_entropy(conditional)
    first = logits[:, :, 0].argmax(-1) == labels.view(inside.shape)[:, :, 0]
    return loss, first.float().mean()


def logits_after(drafter: DFlash2DraftModel, hidden: Tensor, logits: Tensor, predecessors: Tensor) -> Tensor:
    """The slots' logits given the tokens before them: the selector's scores added to the best candidates."""
    selector = drafter.candidate_selector
    before = F.embedding(predecessors, selector.predecessor_codebook) * selector.hidden_projection(hidden)
    scores = before @ selector.successor_codebook.mT
    candidates = logits.detach().topk(drafter.config.selector_top_k, dim=-1).indices
    return logits + scores * torch.zeros_like(scores).scatter_(-1, candidates, 1.0)


def export(drafter: DFlashDraftModel, folder: Path) -> None:
    """Saves a copy with weights rounded to bfloat16."""
    rounded = type(drafter)(drafter.config)
    rounded.load_state_dict(drafter.state_dict())
    rounded.to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo_pair"))
    parser.add_argument("--minutes", type=float, default=60.0, help="the learning rate has decayed to zero by then")
    parser.add_argument("--stop-after-minutes", type=float, help="stop there, on the schedule of --minutes")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--version", type=int, choices=[1, 2], default=2, help="of DFlash")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=12)
    parser.add_argument("--gamma", type=float, default=3.0)
    parser.add_argument("--soft", type=float, default=0.0, help="share of the loss against the target's distribution")
    parser.add_argument("--selector-share", type=float, default=0.5, help="share of the loss given the token before")
    parser.add_argument("--rows", type=int, default=4, help="texts a step")
    parser.add_argument("--anchors", type=int, default=40, help="blocks a text")
    args = parser.parse_args()

    generator = seed_everything(1)
    target = Qwen3_5ForCausalLM.from_pretrained(args.work_dir / "target", dtype=torch.float32).to(device()).eval()
    target.requires_grad_(False)
    mask = AutoTokenizer.from_pretrained(args.work_dir / "target").convert_tokens_to_ids(MASK)
    drafter = new_drafter(target, mask, args.version, args.layers, args.block_size).to(device())
    print(f"{sum(p.numel() for p in drafter.parameters()):,} parameters on {drafter.device}")
    optimizers = build_optimizers(list(drafter.named_parameters()), args.lr, args.weight_decay)
    feature_size = len(TARGET_LAYER_IDS) * target.config.hidden_size
    texts = SelfText(args.work_dir, feature_size)
    held_out = load_held_out(args.work_dir, feature_size, rows=8)
    budget, step = TimeBudget(args.minutes * 60), 0
    reported = {name: POLICIES[name] for name in REPORTED}
    stop_after = 60 * (args.stop_after_minutes or args.minutes)

    checkpoint = args.work_dir / "drafter_checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu")
        drafter.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"])
        budget.spent, step = state["spent"], state["step"]
        print(f"going on from step {step}, {budget.spent:.0f} s spent")

    log = (args.work_dir / "drafter_log.jsonl").open("a", buffering=1)
    reports, saves, losses, hits = time.monotonic(), time.monotonic(), [], []
    with Progress() as bar:
        task = bar.add_task("drafter", total=stop_after, completed=budget.spent)
        while not budget.exhausted and budget.elapsed < stop_after:
            set_lr(optimizers, budget.lr_factor())
            batch = texts.batch(args.rows, args.anchors, args.block_size - 1, generator)
            loss, first_right = block_loss(drafter, target, *batch, args.gamma, args.soft, args.selector_share)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            losses.append(loss.item())
            hits.append(first_right.item())
            bar.update(task, completed=budget.elapsed, description=f"drafter, step {step}, loss {losses[-1]:.3f}")
            if time.monotonic() - reports > 60:
                record = {
                    "step": step,
                    "seconds": round(budget.elapsed),
                    "loss": round(sum(losses) / len(losses), 4),
                    "first_right": round(sum(hits) / len(hits), 4),
                    "texts": texts.progress["done"],
                }
                log.write(json.dumps(record) + "\n")
                texts.refresh()
                reports, losses, hits = time.monotonic(), [], []
            if time.monotonic() - saves > 400:
                state = {
                    "model": drafter.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "generator": generator.get_state(),
                    "spent": budget.elapsed,
                    "step": step,
                }
                save_atomically(state, checkpoint)
                export(drafter, args.work_dir / "drafter")
                log.write(json.dumps(replay(drafter, target, *held_out, reported)) + "\n")
                saves = time.monotonic()
    export(drafter, args.work_dir / "drafter")
    print(json.dumps(replay(drafter, target, *held_out, reported)))


if __name__ == "__main__":
    main()
