"""Step 3: what the drafter learns from: the target's own continuations of corpus prompts, and its features.

Writes into the work folder, for `--split train` and `--split heldout`:
`<split>_text.bin`, uint16 `(rows, 512)`, prompt and continuation;
`<split>_features.bin`, float16 `(rows, 512, len(TARGET_LAYER_IDS) * hidden_size)`, the outputs of the target's layers;
`<split>_rows.json`, how many rows are done, and the length of each row's prompt.
The drafter may train on the rows that are done while more are being written. An interrupted run goes on where it was.
"""

import argparse
import json
import os
import time
from pathlib import Path

import cpu_kernels
import numpy as np
import torch
from common import SEED, TARGET_LAYER_IDS, device, load_tokens
from rich.progress import Progress
from transformers import Qwen3_5ForCausalLM

LENGTH = 512
PROMPT_LENGTHS = (32, 128)
GREEDY_SHARE = 0.75
TEMPERATURES = (0.5, 1.0)


class FeatureRecorder:
    """Collects the outputs of some decoder layers over all forwards of one `generate()`."""

    def __init__(self, model: Qwen3_5ForCausalLM, layer_ids: list[int]) -> None:
        self.outputs: dict[int, list[torch.Tensor]] = {layer: [] for layer in layer_ids}
        for layer in layer_ids:
            model.model.layers[layer].register_forward_hook(
                lambda module, args, output, layer=layer: self.outputs[layer].append(output.half())
            )

    def take(self) -> torch.Tensor:
        """`(batch, tokens, len(layer_ids) * hidden_size)` float16, of everything since the last call."""
        features = torch.cat([torch.cat(parts, dim=1) for parts in self.outputs.values()], dim=-1)
        for parts in self.outputs.values():
            parts.clear()
        return features


def open_rows(work_dir: Path, split: str, rows: int, feature_size: int, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """The memory-mapped texts and features."""
    text = np.memmap(work_dir / f"{split}_text.bin", np.uint16, mode, shape=(rows, LENGTH))
    features = np.memmap(work_dir / f"{split}_features.bin", np.float16, mode, shape=(rows, LENGTH, feature_size))
    return text, features


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo_pair"))
    parser.add_argument("--split", choices=["train", "heldout"], default="train")
    parser.add_argument("--rows", type=int, default=4096, help="texts of 512 tokens")
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()

    model = Qwen3_5ForCausalLM.from_pretrained(args.work_dir / "target", dtype=torch.float32).to(device()).eval()
    if model.device.type == "cpu":
        cpu_kernels.install_for_decoding()
    recorder = FeatureRecorder(model, TARGET_LAYER_IDS)
    corpus = load_tokens(args.work_dir / f"{args.split}.bin")
    progress_file = args.work_dir / f"{args.split}_rows.json"
    progress = {"rows": args.rows, "done": 0, "prompt_lengths": []}
    if progress_file.exists():
        progress = json.loads(progress_file.read_text())
    mode = "r+" if progress["done"] else "w+"
    text, features = open_rows(
        args.work_dir, args.split, progress["rows"], len(TARGET_LAYER_IDS) * model.config.hidden_size, mode
    )

    with Progress() as bar:
        task = bar.add_task(f"{args.split} text", total=progress["rows"], completed=progress["done"])
        while (done := progress["done"]) < progress["rows"]:
            started = time.monotonic()
            torch.manual_seed(SEED + done)
            generator = np.random.default_rng([SEED, done])
            batch = min(args.batch_size, progress["rows"] - done)
            greedy = args.split == "heldout" or generator.random() < GREEDY_SHARE
            sampling = {} if greedy else {"temperature": generator.uniform(*TEMPERATURES), "top_k": 0}
            prompt_length = int(generator.integers(*PROMPT_LENGTHS, endpoint=True))
            starts = generator.integers(len(corpus) - prompt_length, size=(batch, 1))
            prompts = torch.from_numpy(corpus[starts + np.arange(prompt_length)].astype(np.int64)).to(model.device)
            output = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_length=LENGTH,
                do_sample=not greedy,
                eos_token_id=-1,  # an end-of-text token is followed by the start of another module
                **sampling,
            )
            text[done : done + batch] = output.cpu().numpy()
            features[done : done + batch, : LENGTH - 1] = recorder.take().cpu().numpy()
            progress["done"] += batch
            progress["prompt_lengths"] += [prompt_length] * batch
            partial = progress_file.with_suffix(".partial")
            partial.write_text(json.dumps(progress))
            os.replace(partial, progress_file)
            speed = batch * (LENGTH - prompt_length) / (time.monotonic() - started)
            bar.update(task, completed=progress["done"], description=f"{args.split} text, {speed:.0f} tokens/s")


if __name__ == "__main__":
    main()
