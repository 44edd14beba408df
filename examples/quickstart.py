"""Completes a function with the pair that ships, by standard decoding and by ddtree, and compares the tokens."""

import time

import torch
from transformers.utils import logging

import hf_ddtree

logging.set_verbosity_error()
logging.disable_progress_bar()

model, drafter, tokenizer = hf_ddtree.load_demo()
inputs = tokenizer("def read_lines(path):\n", return_tensors="pt")
options = {"max_new_tokens": 128, "do_sample": False, "return_dict_in_generate": True}
with_tree = {"assistant_model": drafter, "generation_strategy": "ddtree", "tree_budget": 16}

for method in ({}, with_tree):  # the first calls take longer, so they are not timed
    model.generate(**inputs, **options | {"max_new_tokens": 8}, **method)

start = time.perf_counter()
plain = model.generate(**inputs, **options)
plain_seconds = time.perf_counter() - start

start = time.perf_counter()
tree = model.generate(**inputs, **options, **with_tree)
tree_seconds = time.perf_counter() - start

print(tokenizer.decode(tree.sequences[0], skip_special_tokens=True))
print()
new_tokens = plain.sequences.shape[1] - inputs.input_ids.shape[1]
lengths = tree.ddtree_stats.accepted_lengths
print(f"standard: {new_tokens / plain_seconds:6.1f} tokens/s, 1 token per forward of the target")
print(
    f"ddtree:   {new_tokens / tree_seconds:6.1f} tokens/s, "
    f"{sum(lengths) / len(lengths):.2f} tokens per forward of the target"
)

assert torch.equal(plain.sequences, tree.sequences)
print("The tokens are identical.")
