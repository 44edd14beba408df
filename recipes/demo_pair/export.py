"""Step 5: puts the pair into the package: both models, the tokenizer, and prompts from held-out modules.

The drafter has the layout of published DFlash checkpoints, so that loading the pair exercises the loader that users'
drafters go through.
"""

import argparse
import ast
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from prepare import is_held_out, stdlib_modules
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, Qwen3_5ForCausalLM

PACKAGE = Path(__file__).resolve().parents[2] / "hf_ddtree" / "demo_pair"
PROMPT_TOKENS = (64, 160)
PROMPTS_PER_MODULE = 8


def replace_folder(new: Path, folder: Path) -> None:
    """Moves a finished folder into place; a reader sees the old one or the new one."""
    for path in new.iterdir():
        path.chmod(0o644)
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def export_target(work_dir: Path, folder: Path) -> None:
    """Weights in bfloat16, tokenizer, and a generation config that decodes greedily."""
    model = Qwen3_5ForCausalLM.from_pretrained(work_dir / "target", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(work_dir / "tokenizer")
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def function_starts(source: str) -> list[int]:
    """Line numbers, from 0, of the first statement behind the docstring of every function of at least 6 lines."""
    starts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 6:
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if body:
                starts.append(body[0].lineno - 1)
    return sorted(set(starts))


def held_out_prompts(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Text that ends where the body of a function begins, taken back to the start of a line, from every held-out
    module in turn."""
    per_module = []
    for name, source in stdlib_modules().items():
        if not is_held_out(name):
            continue
        lines, prompts = source.splitlines(keepends=True), []
        for start in function_starts(source):
            begin, length = start, 0
            while begin > 0:
                longer = len(tokenizer.encode("".join(lines[begin - 1 : start]), add_special_tokens=False))
                if longer > PROMPT_TOKENS[1]:
                    break
                begin, length = begin - 1, longer
            if length >= PROMPT_TOKENS[0]:
                prompts.append({"prompt": "".join(lines[begin:start]), "module": name})
        step = max(len(prompts) // PROMPTS_PER_MODULE, 1)
        per_module.append(prompts[::step][:PROMPTS_PER_MODULE])
    return [prompts[i] for i in range(PROMPTS_PER_MODULE) for prompts in per_module if i < len(prompts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo_pair"))
    parser.add_argument("--output", type=Path, default=PACKAGE)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent) as scratch:
        staged = Path(scratch)
        export_target(args.work_dir, staged / "target")
        replace_folder(staged / "target", args.output / "target")
        if (args.work_dir / "drafter").exists():
            shutil.copytree(args.work_dir / "drafter", staged / "drafter")
            replace_folder(staged / "drafter", args.output / "drafter")
        prompts = held_out_prompts(AutoTokenizer.from_pretrained(args.output / "target"))
        (staged / "prompts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in prompts))
        os.replace(staged / "prompts.jsonl", args.output / "prompts.jsonl")
    size = sum(path.stat().st_size for path in args.output.rglob("*") if path.is_file())
    print(f"{args.output}: {size / 1e6:.1f} MB, {len(prompts)} prompts")


if __name__ == "__main__":
    main()
