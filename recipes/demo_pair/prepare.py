"""Step 1: the corpus (the standard library of the running CPython) and its tokenizer.

Writes `train.bin`, `heldout.bin` (uint16 token streams, documents separated by the end-of-text token),
`heldout_modules.json` and `tokenizer/` into the work folder. Held-out modules are chosen by a hash of their path;
neither the tokenizer nor a model ever sees them.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import numpy as np
from common import END_OF_TEXT, MASK, PAD
from rich.progress import track
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Third-party code, tests, and files that are tables rather than code.
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
HELD_OUT_PERCENT = 5
VOCABULARY = 512


def stdlib_modules() -> dict[str, str]:
    """Path relative to the standard library -> source text, sorted by path; UTF-8 files only."""
    root = Path(os.path.dirname(os.__file__))
    modules = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            modules[relative.as_posix()] = text.replace("\r\n", "\n")
    return modules


def is_held_out(relative_path: str) -> bool:
    """The same modules on every machine that runs the same Python."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` words, three special tokens included; decoding gives back exactly the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_OF_TEXT, PAD, MASK],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=[MASK],
        clean_up_tokenization_spaces=False,
        model_max_length=16384,
        padding_side="left",
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: dict[str, str]) -> np.ndarray:
    """All documents in one stream, each followed by the end-of-text token."""
    stream: list[int] = []
    for name, text in track(texts.items(), description="encoding"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids) != text:
            raise ValueError(f"the tokenizer does not give back {name} exactly")
        stream += [*ids, tokenizer.eos_token_id]
    return np.array(stream, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("build/demo_pair"))
    work_dir = parser.parse_args().work_dir
    work_dir.mkdir(parents=True, exist_ok=True)

    modules = stdlib_modules()
    held_out = {name: text for name, text in modules.items() if is_held_out(name)}
    training = {name: text for name, text in modules.items() if name not in held_out}
    tokenizer = train_tokenizer(list(training.values()))
    tokenizer.save_pretrained(work_dir / "tokenizer")
    for name, texts in (("train", training), ("heldout", held_out)):
        stream = encode(tokenizer, texts)
        stream.tofile(work_dir / f"{name}.bin")
        size = sum(len(text) for text in texts.values())
        print(f"{name}: {len(texts)} modules, {size:,} characters, {len(stream):,} tokens")
    (work_dir / "heldout_modules.json").write_text(json.dumps(sorted(held_out), indent=1) + "\n")


if __name__ == "__main__":
    main()
