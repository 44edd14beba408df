"""Random token trees and random paths through them."""

from __future__ import annotations

import random

from hf_ddtree.tree.draft_tree import DraftTree

SHAPES = ("single", "chain", "star", "bushy", "deep", "straggling")


def random_parents(rng: random.Random, shape: str, num_nodes: int) -> list[int]:
    """Parents of a tree: `bushy` is shallow and wide, `straggling` a few long branches in turn, `deep` in between."""
    if shape == "single":
        return [-1]
    if shape == "chain":
        return list(range(-1, num_nodes - 1))
    if shape == "star":
        return [-1] + [0] * (num_nodes - 1)
    parents = [-1]
    for node in range(1, num_nodes):
        if shape == "bushy":
            parents.append(rng.randrange(node))
        elif shape == "deep":
            parents.append(rng.randrange(max(0, node - 3), node))
        else:
            parents.append(max(0, node - rng.choice((2, 3))))
    return parents


def random_tree(rng: random.Random, shape: str, root: int, vocab_size: int, num_nodes: int) -> DraftTree:
    """A tree of random tokens, distinct among siblings."""
    parents = random_parents(rng, shape, num_nodes)
    tokens = [root]
    for node in range(1, len(parents)):
        siblings = {tokens[other] for other in range(1, node) if parents[other] == parents[node]}
        tokens.append(rng.choice([token for token in range(vocab_size) if token not in siblings]))
    return DraftTree.from_parents(tokens, parents)


def random_path(rng: random.Random, tree: DraftTree) -> list[int]:
    """From the root down to any node; long paths are as likely as short ones."""
    depths = tree.depths.tolist()
    depth = rng.randint(0, max(depths))
    return tree.path(rng.choice([node for node in range(len(tree)) if depths[node] == depth]))


def is_prefix(path: list[int]) -> bool:
    """Whether the path's nodes are the tree's first ones."""
    return path == list(range(len(path)))
