"""The pair that ships, quantized by bitsandbytes and in half precision, against standard decoding of the same target.

    python benchmarks/quantized.py

Greedy. For every way to run the target: on how many prompts its output by tree is its plain output, tokens per target
forward, and, where an output differs, whether standard decoding's two candidates there are a near tie. Needs
bitsandbytes and accelerate: pip install accelerate bitsandbytes.
"""

from __future__ import annotations

import logging
import statistics
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from measure import RESULTS, save
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import hf_ddtree
from hf_ddtree.demo import demo_prompts
from hf_ddtree.testing import compare

try:
    from bitsandbytes.functional import has_avx512bf16
except ModuleNotFoundError as error:
    raise SystemExit("This benchmark needs bitsandbytes: pip install accelerate bitsandbytes") from error


PAIR = files("hf_ddtree") / "demo_pair"
# The projections whose width the 4-bit kernels do not divide. A list of one's own replaces the default one, which is
# the output head.
NOT_IN_4_BIT = ["in_proj_a", "in_proj_b", "kernel_projection", "lm_head"]


def in_4_bit(quant_type: str, compute_dtype: torch.dtype = torch.float32, **options: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=NOT_IN_4_BIT,
        **options,
    )


INT8 = BitsAndBytesConfig(load_in_8bit=True)
INT8_ALONE = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
# The target's dtype and quantization, and the drafter's dtype and quantization.
METHODS: dict[str, tuple[torch.dtype, Any, torch.dtype, Any]] = {
    "float32": (torch.float32, None, torch.float32, None),
    "bfloat16": (torch.bfloat16, None, torch.bfloat16, None),
    "float16": (torch.float16, None, torch.float16, None),
    "nf4": (torch.float32, in_4_bit("nf4"), torch.float32, None),
    "nf4, double": (torch.float32, in_4_bit("nf4", bnb_4bit_use_double_quant=True), torch.float32, None),
    "fp4": (torch.float32, in_4_bit("fp4"), torch.float32, None),
    "int8": (torch.float32, INT8, torch.float32, None),
    "int8, threshold 0": (torch.float32, INT8_ALONE, torch.float32, None),
    "nf4, bfloat16 drafter": (torch.float32, in_4_bit("nf4"), torch.bfloat16, None),
    "int8, bfloat16 drafter": (torch.float32, INT8, torch.bfloat16, None),
    "nf4, nf4 drafter": (torch.float32, in_4_bit("nf4"), torch.float32, in_4_bit("nf4")),
    "int8, int8 drafter": (torch.float32, INT8, torch.float32, INT8),
}


def load_pair(
    dtype: torch.dtype, quantization: Any, drafter_dtype: torch.dtype, drafter_quantization: Any, dequantize: bool
) -> tuple[PreTrainedModel, PreTrainedModel]:
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=dtype, quantization_config=quantization)
    drafter = hf_ddtree.load_drafter(
        PAIR / "drafter", target_model=model, dtype=drafter_dtype, quantization_config=drafter_quantization
    )
    for module in [*model.modules(), *drafter.modules()]:
        if dequantize and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model, drafter


def main(
    prompts: Annotated[int, typer.Option(help="Number of held-out prompts.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 96,
    budget: Annotated[int, typer.Option(help="Tree budget.")] = 16,
    methods: Annotated[list[str] | None, typer.Option(help=f"Of: {'; '.join(METHODS)}.")] = None,
    dequantize: Annotated[
        bool,
        typer.Option(help="Multiply 4-bit weights in float32, not in the kernel for CPUs with AVX512-BF16."),
    ] = False,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "quantized.json",
) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    _, _, tokenizer = hf_ddtree.load_demo()
    options = {"max_new_tokens": max_new_tokens, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    about = {"bitsandbytes": version("bitsandbytes"), "avx512_bf16": bool(has_avx512bf16()), "dequantize": dequantize}
    about |= {"prompts": prompts, "tokens": max_new_tokens, "budget": budget}
    summary, runs = {}, []
    for name in methods or METHODS:
        model, drafter = load_pair(*METHODS[name], dequantize)
        of_method = []
        for index, entry in enumerate(track(demo_prompts()[:prompts], name, console=Console(stderr=True))):
            inputs = tokenizer(entry["prompt"], return_tensors="pt")
            plain = model.generate(**inputs, **options)
            tree = model.generate(
                **inputs, **options, assistant_model=drafter, generation_strategy="ddtree", tree_budget=budget
            )
            found = vars(compare(model, plain, tree)) | {"accepted_lengths": tree.ddtree_stats.accepted_lengths}
            of_method.append({"prompt": index, "method": name, **found})
        summary[name] = summarise(of_method)
        runs += of_method
    save(output, summary, runs, **about)
    show(summary)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    noise = max(row["noise"] for row in rows)
    gaps = [row["gap"] for row in rows if row["gap"] is not None]
    return {
        "prompts": len(rows),
        "identical": len(rows) - len(gaps),
        "near_ties": sum(gap <= 2 * noise for gap in gaps),
        "largest_gap": max(gaps, default=None),
        "noise": noise,
        "deviation": max(row["deviation"] for row in rows),
        "tokens_per_forward": statistics.mean(length for row in rows for length in row["accepted_lengths"]),
    }


def show(summary: dict[str, Any]) -> None:
    columns = "target", "identical", "near ties", "largest gap", "noise", "deviation", "tokens/forward"
    table = Table(*columns, caption="gap, noise, deviation: differences of logits, see hf_ddtree.testing.Comparison")
    for name, entry in summary.items():
        gap = entry["largest_gap"]
        counts = [f"{entry['identical']} of {entry['prompts']}", str(entry["near_ties"])]
        figures = "" if gap is None else f"{gap:.1g}", f"{entry['noise']:.1g}", f"{entry['deviation']:.1g}"
        table.add_row(name, *counts, *figures, f"{entry['tokens_per_forward']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
