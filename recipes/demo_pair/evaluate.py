"""How well a drafter drafts: decoding rounds replayed on the target's own held-out continuations.

In greedy decoding the tokens are known beforehand, so every round can be replayed without the target: draft at the
root, build the tree, follow the true tokens into it, go on behind the last one found. The figures are those of real
decoding with the same target and prompts.
"""

import argparse
import json
from pathlib import Path

import torch
from common import TARGET_LAYER_IDS, device
from self_text import open_rows
from torch import Tensor
from transformers import Qwen3_5ForCausalLM

from hf_ddtree.drafters import DFlash2DraftModel, DFlashDraftModel, load_drafter
from hf_ddtree.drafters.calibration import Calibration
from hf_ddtree.training import Rows, TrainingConfig
from hf_ddtree.training.block_loss import BlockLoss
from hf_ddtree.tree.build import build_tree
from hf_ddtree.tree.candidates import best_tokens, conditional_candidates, top_candidates

CANDIDATES = 64


def draft_hidden(
    drafter: DFlashDraftModel, target: Qwen3_5ForCausalLM, tokens: Tensor, features: Tensor, anchors: Tensor
) -> Tensor:
    """Hidden states of the slots to predict, `(batch, blocks, block_size - 1, hidden_size)`."""
    rows = Rows(tokens, torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool))
    return BlockLoss(drafter, target, TrainingConfig()).draft(rows, features, anchors)


@torch.no_grad()
def candidates_at(
    drafter: DFlashDraftModel, target: Qwen3_5ForCausalLM, tokens: Tensor, features: Tensor, anchors: Tensor
) -> dict[str, tuple[Tensor, ...]]:
    """What `build_tree` takes at each root of a text: "marginal" and, if the drafter has a selector, "conditional"."""
    hidden = draft_hidden(drafter, target, tokens[None], features[None], anchors[None])[0]
    logits = drafter.compute_logits(hidden, target.lm_head)
    candidates: dict[str, tuple[Tensor, ...]] = {"marginal": top_candidates(logits, CANDIDATES)}
    if isinstance(drafter, DFlash2DraftModel):
        log_probs, token_ids = best_tokens(logits, drafter.config.selector_top_k)
        pair_scores = drafter.pair_scores(hidden, tokens[anchors], token_ids)
        candidates["conditional"] = conditional_candidates(log_probs, token_ids, pair_scores)
    return candidates


def replay(
    drafter: DFlashDraftModel,
    target: Qwen3_5ForCausalLM,
    tokens: Tensor,
    features: Tensor,
    prompt_lengths: list[int],
    policies: dict[str, tuple[str, str, int]],
) -> dict[str, float]:
    """Tokens per target forward of each policy, and how often each slot is right when all before it are.

    Args:
        tokens: `(rows, length)` int64.
        features: `(rows, length, len(target_layer_ids) * hidden_size)`.
        prompt_lengths: The first generated token of a row is its first root.
        policies: Name -> probabilities, tree shape and node budget. Conditional ones need a drafter with a selector,
            and are left out otherwise. Calibrated ones are marginal ones that learn on the way, from nothing at first.
    """
    horizon = drafter.config.block_size - 1
    end = tokens.shape[1] - horizon - 1
    emitted, rounds = dict.fromkeys(policies, 0), dict.fromkeys(policies, 0)
    calibrations = {name: Calibration() for name, policy in policies.items() if policy[0] == "calibrated"}
    reached, right = torch.zeros(horizon), torch.zeros(horizon)
    for row, first in enumerate(prompt_lengths):
        anchors = torch.arange(first, end, device=tokens.device)
        drafts = [candidates_at(drafter, target, tokens[row], features[row], chunk) for chunk in anchors.split(48)]
        candidates = {name: tuple(map(torch.cat, zip(*(d[name] for d in drafts), strict=True))) for name in drafts[0]}
        truth = tokens[row, anchors[:, None] + torch.arange(1, horizon + 1, device=tokens.device)].cpu()
        prefix_right = (candidates["marginal"][1][..., 0] == truth).int().cumprod(-1)
        right += prefix_right.sum(0)
        reached += torch.cat((torch.full((1,), len(anchors)), prefix_right.sum(0)[:-1]))
        for name, (probabilities, shape, budget) in policies.items():
            calibration = calibrations.get(name)
            if calibration is None and probabilities not in candidates:
                continue
            log_probs, token_ids, *next_state = candidates["marginal" if calibration else probabilities]
            at = 0
            while at < len(anchors):
                probs, of_root, state = log_probs[at], token_ids[at], next_state[0][at] if next_state else None
                if calibration is not None:
                    probs, of_root, state = calibration.calibrate(probs, of_root)
                tree = build_tree(probs, of_root, 0, budget, shape, next_state=state)
                node, depth = 0, 0
                while depth < horizon and (child := tree.child_with_token(node, int(truth[at, depth]))) is not None:
                    node, depth = child, depth + 1
                if calibration is not None:
                    calibration.learn(log_probs[at], token_ids[at], truth[at, : depth + 1].tolist())
                at, emitted[name], rounds[name] = at + depth + 1, emitted[name] + depth + 1, rounds[name] + 1
    figures = {name: round(emitted[name] / rounds[name], 3) for name in policies if rounds[name]}
    return figures | {f"right_{i + 1}": round(float(right[i] / reached[i].clamp(min=1)), 3) for i in range(horizon)}


BUDGETS = (8, 16, 32, 64)
POLICIES = {
    "chain": ("marginal", "chain", 11),
    "selector_chain": ("conditional", "chain", 11),
    **{f"marginal_{budget}": ("marginal", "best_first", budget) for budget in BUDGETS},
    **{f"conditional_{budget}": ("conditional", "best_first", budget) for budget in BUDGETS},
    **{f"calibrated_{budget}": ("calibrated", "best_first", budget) for budget in BUDGETS},
    **{f"marginal_spine_{budget}": ("marginal", "spine_first", budget) for budget in BUDGETS},
    **{f"conditional_spine_{budget}": ("conditional", "spine_first", budget) for budget in BUDGETS},
}


def load_held_out(work_dir: Path, feature_size: int, rows: int) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens, features and prompt lengths of the first held-out rows."""
    progress = json.loads((work_dir / "heldout_rows.json").read_text())
    text, features = open_rows(work_dir, "heldout", progress["rows"], feature_size, "r")
    tokens = torch.from_numpy(text[:rows].astype("int64")).to(device())
    return tokens, torch.from_numpy(features[:rows]).float().to(device()), progress["prompt_lengths"][:rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo_pair"))
    parser.add_argument("--drafter", type=Path, help="folder; the exported one by default")
    parser.add_argument("--rows", type=int, default=48)
    args = parser.parse_args()
    target = Qwen3_5ForCausalLM.from_pretrained(args.work_dir / "target", dtype=torch.float32).to(device()).eval()
    drafter = load_drafter(args.drafter or args.work_dir / "drafter", target_model=target)
    held_out = load_held_out(args.work_dir, len(TARGET_LAYER_IDS) * target.config.hidden_size, args.rows)
    print(json.dumps(replay(drafter, target, *held_out, POLICIES), indent=1))


if __name__ == "__main__":
    main()
