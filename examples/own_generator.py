"""Drafts with a generator of one's own: trees of what followed each token so far in the text. Draws one of them."""

from collections import Counter, defaultdict

import rich
import torch
from transformers.utils import logging

import hf_ddtree
from hf_ddtree.visualize import draw_tree

logging.set_verbosity_error()
logging.disable_progress_bar()


class BigramTreeCandidateGenerator(hf_ddtree.TreeCandidateGenerator):
    """Expands the most frequent followers of each token, most probable path first."""

    def propose(self, context: hf_ddtree.DraftContext, budget: int) -> list[hf_ddtree.DraftTree]:
        return [self._propose(row.tolist(), budget) for row in context.input_ids]

    def _propose(self, emitted: list[int], budget: int) -> hf_ddtree.DraftTree:
        followers = defaultdict(Counter)
        for token, follower in zip(emitted, emitted[1:]):
            followers[token][follower] += 1
        tokens, parents, log_probs = [emitted[-1]], [-1], [0.0]
        node = 0
        while node < len(tokens) and len(tokens) <= budget:
            counts = followers[tokens[node]]
            for token, count in counts.most_common(min(2, budget + 1 - len(tokens))):
                tokens.append(token)
                parents.append(node)
                log_probs.append(log_probs[node] + torch.tensor(count / counts.total()).log().item())
            node += 1
        return hf_ddtree.DraftTree.from_parents(tokens, parents, log_probs)


model, _, tokenizer = hf_ddtree.load_demo()
inputs = tokenizer("def read_lines(path):\n", return_tensors="pt")
options = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}
plain = model.generate(**inputs, **options)
tree = model.generate(
    **inputs,
    **options,
    generation_strategy="ddtree",
    candidate_generator=BigramTreeCandidateGenerator(),
    tree_budget=16,
    return_trees=True,
)
stats = tree.ddtree_stats
rounds = [(trees[0], paths[0]) for trees, paths in zip(stats.trees, stats.accepted_paths)]
# A node with several children is several times among the parents.
branching = [(tree, path) for tree, path in rounds if len(tree.parents.unique()) < len(tree.parents)]
tree_of_round, accepted = max(branching or rounds, key=lambda entry: len(entry[1]))
rich.print(draw_tree(tree_of_round, tokenizer, accepted))
print(f"{stats.tokens_per_forward:.2f} tokens per forward of the target")
assert torch.equal(plain.sequences, tree.sequences)
