"""Step 2: the target, a small gated-delta-net hybrid (`Qwen3_5ForCausalLM`) trained on the corpus from scratch.

Writes `target/` (weights rounded to bfloat16: everything after this step sees the rounded model) and
`target_log.jsonl` into the work folder. An interrupted run goes on from its last checkpoint.
"""

import argparse
import json
import math
import time
from pathlib import Path

import cpu_kernels
import torch
from common import (
    TimeBudget,
    device,
    load_tokens,
    save_atomically,
    seed_everything,
)
from rich.progress import Progress
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from hf_ddtree.training.optimizers import build_optimizers, linear_schedule, set_learning_rate

WARMUP = 0.03
# (sequences, length) of a batch and its share of the steps: all have the same number of tokens, some are long, so that
# the model also works beyond a few hundred tokens.
BATCH_SHAPES = [((4, 512), 0.8), ((1, 2048), 0.2)]


def target_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3_5TextConfig:
    """Deep and thin: 12 layers, every fourth with full attention, about 2.6 M parameters."""
    return Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=4,
        linear_key_head_dim=32,
        linear_num_value_heads=4,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        tie_word_embeddings=True,
        max_position_embeddings=16384,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
        },
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def sample_batch(tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random windows of the corpus, `(sequences, length)`; the shape is drawn from `BATCH_SHAPES`."""
    shares = torch.tensor([share for _, share in BATCH_SHAPES])
    (sequences, length), _ = BATCH_SHAPES[int(torch.multinomial(shares, 1, generator=generator))]
    starts = torch.randint(len(tokens) - length, (sequences, 1), generator=generator)
    return tokens[starts + torch.arange(length)].long()


@torch.no_grad()
def held_out_loss(model: Qwen3_5ForCausalLM, tokens: torch.Tensor, length: int = 1024, sequences: int = 16) -> float:
    """Mean negative log-likelihood (nats a token) over windows spread evenly over the held-out stream."""
    starts = torch.linspace(0, len(tokens) - length - 1, sequences).long()
    losses = []
    for start in starts.split(8):
        batch = tokens[start[:, None] + torch.arange(length)].long().to(model.device)
        losses.append(model(batch, labels=batch, use_cache=False).loss * len(batch))
    return float(sum(losses) / sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo_pair"))
    parser.add_argument("--minutes", type=float, default=25.0, help="the learning rate has decayed to zero by then")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--autocast", action="store_true", help="bfloat16 matrix products")
    args = parser.parse_args()

    generator = seed_everything()
    tokenizer = AutoTokenizer.from_pretrained(args.work_dir / "tokenizer")
    train = torch.from_numpy(load_tokens(args.work_dir / "train.bin").astype("int32"))
    held_out = torch.from_numpy(load_tokens(args.work_dir / "heldout.bin").astype("int32"))
    model = Qwen3_5ForCausalLM(target_config(tokenizer)).to(device())
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {model.device}")
    optimizers = build_optimizers(model.named_parameters(), args.lr, args.weight_decay)
    if model.device.type == "cpu":
        cpu_kernels.install_for_training()
    for (sequences, length), _ in BATCH_SHAPES:  # kernels compile before the clock starts
        batch = train[: sequences * length].long().view(sequences, length).to(model.device)
        model(batch, labels=batch, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
    budget, step = TimeBudget(args.minutes * 60), 0

    checkpoint = args.work_dir / "target_checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"])
        budget.spent, step = state["spent"], state["step"]
        print(f"going on from step {step}, {budget.spent:.0f} s spent")

    log = (args.work_dir / "target_log.jsonl").open("a", buffering=1)
    last_report, last_save, seen, running = time.monotonic(), time.monotonic(), 0, []
    with Progress() as bar:
        task = bar.add_task("target", total=args.minutes * 60, completed=budget.spent)
        while not budget.exhausted:
            set_learning_rate(optimizers, linear_schedule(budget.progress, WARMUP))
            batch = sample_batch(train, generator).to(model.device)
            with torch.autocast(model.device.type, torch.bfloat16, enabled=args.autocast):
                loss = model(batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step, seen = step + 1, seen + batch.numel()
            running.append(loss.item())
            bar.update(task, completed=budget.elapsed, description=f"target, step {step}, loss {running[-1]:.3f}")
            if (now := time.monotonic()) - last_report > 60:
                record = {
                    "step": step,
                    "seconds": round(budget.elapsed),
                    "train_loss": round(sum(running) / len(running), 4),
                    "tokens_per_second": round(seen / (now - last_report)),
                }
                if step % 3 == 0:
                    record["held_out_loss"] = round(held_out_loss(model, held_out), 4)
                log.write(json.dumps(record) + "\n")
                last_report, seen, running = time.monotonic(), 0, []
            if time.monotonic() - last_save > 180:
                state = {
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "generator": generator.get_state(),
                    "spent": budget.elapsed,
                    "step": step,
                }
                save_atomically(state, checkpoint)
                last_save = time.monotonic()

    exact = held_out_loss(model, held_out)
    model.to(torch.bfloat16).save_pretrained(args.work_dir / "target")
    tokenizer.save_pretrained(args.work_dir / "target")
    rounded = held_out_loss(model.float(), held_out)
    characters_per_token = len(tokenizer.decode(held_out)) / len(held_out)
    record = {
        "final": True,
        "steps": step,
        "held_out_loss": round(exact, 4),
        "held_out_loss_rounded": round(rounded, 4),
        "bits_per_character": round(rounded / math.log(2) / characters_per_token, 4),
    }
    log.write(json.dumps(record) + "\n")
    print(record)


if __name__ == "__main__":
    main()
