"""What still works where a later Transformers calls private names otherwise.

Run with the names as arguments, before anything is imported: Transformers is then loaded as if its authors had renamed
them everywhere. Prints as JSON what became of each feature: None, or the message it is refused with.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import re
import sys
from collections.abc import Callable
from typing import Any


class RenamingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module with names replaced in its source."""

    names: tuple[str, ...] = ()

    def get_code(self, fullname: str) -> Any:
        source = self.get_data(self.path).decode("utf-8")
        changed = re.sub(rf"\b({'|'.join(self.names)})\b", r"\1_renamed", source)
        return super().get_code(fullname) if changed == source else self.source_to_code(changed.encode(), self.path)


class RenamingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of Transformers."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "transformers":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = RenamingLoader(spec.loader.name, spec.loader.path)
        return spec


def features() -> dict[str, Callable[[], None]]:
    """What is tried, by name; each raises if it does not work."""
    import torch
    from transformers import StaticCache

    import hf_ddtree
    from helpers.families import make_model
    from hf_ddtree.demo import demo_folders
    from hf_ddtree.drafters.checkpoint import Checkpoint
    from hf_ddtree.drafters.mtp.checkpoint import read_mtp_tensors
    from hf_ddtree.interop.versions import CACHE_KEY

    model, drafter, tokenizer = hf_ddtree.load_demo()
    llama = make_model("llama", "sdpa")
    prompt = tokenizer("import os\nimport os\nimport", return_tensors="pt").input_ids
    pair = torch.arange(1, 17).view(2, 8) % 7

    def same(target: Any, input_ids: Any, arguments: Callable[[], dict[str, Any]] = dict, **tree: Any) -> None:
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        plain = target.generate(input_ids, **options, **arguments())
        by_tree = target.generate(input_ids, **options, **arguments(), generation_strategy="ddtree", **tree)
        assert torch.equal(plain, by_tree)

    def custom_generate() -> None:
        plain = llama.generate(pair, max_new_tokens=4, pad_token_id=0)
        decoding = hf_ddtree.ddtree(tree_lookup=True)
        assert torch.equal(plain, llama.generate(pair, max_new_tokens=4, pad_token_id=0, custom_generate=decoding))

    def level_cache() -> None:
        outputs = llama.generate(
            pair,
            max_new_tokens=12,
            eos_token_id=list(range(0, 64, 3)),
            pad_token_id=0,
            tree_lookup=True,
            generation_strategy="ddtree",
            return_dict_in_generate=True,
        )
        assert outputs[CACHE_KEY].get_seq_length() == outputs.sequences.shape[1] - 1

    def static_cache() -> None:
        same(
            llama, pair[:1], lambda: {CACHE_KEY: StaticCache(config=llama.config, max_cache_len=64)}, tree_lookup=True
        )
        same(llama, pair[:1], lambda: {"cache_implementation": "static"}, tree_lookup=True)

    def checked(target: Any) -> None:
        report = hf_ddtree.check(target)
        assert report.supported, report.reason

    def reading_no_mtp_layers() -> None:
        assert read_mtp_tensors(Checkpoint(demo_folders()[0])) == {}

    return {
        "standard decoding": lambda: llama.generate(pair, max_new_tokens=4, pad_token_id=0),
        "a drafter": lambda: same(model, prompt, assistant_model=drafter, tree_budget=8),
        "lookup": lambda: same(model, prompt, tree_lookup=True, tree_budget=8),
        "a causal language model": lambda: same(llama, pair, assistant_model=make_model("llama", "sdpa")),
        "custom_generate": custom_generate,
        "level cache": level_cache,
        "static cache": static_cache,
        "checking a model": lambda: checked(llama),
        "checking a folder": lambda: checked(demo_folders()[0]),
        "MTP layers": reading_no_mtp_layers,
    }


def main(names: list[str]) -> None:
    """Tries all features."""
    if names:
        RenamingLoader.names = tuple(names)
        sys.meta_path.insert(0, RenamingFinder())
    outcomes: dict[str, str | None] = {}
    for feature, attempt in features().items():
        try:
            attempt()
            outcomes[feature] = None
        except Exception as error:
            outcomes[feature] = f"{type(error).__name__}: {error}"
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
