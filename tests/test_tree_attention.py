"""A tree through every family's layers, against plain forwards of each node's own path; and the commit of any path.

Everything expected comes from forwards of the unmodified model over whole sequences, without a cache and without a
tree.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from helpers.families import CASES, CONV_KERNEL, FAMILIES, RECURRENT_FAMILIES, VOCAB_SIZE, WINDOW, first_implementation
from helpers.families import make_model as model_of
from helpers.random_trees import SHAPES, is_prefix, random_path, random_tree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from hf_ddtree.attention import dispatch
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.target.cache_rows import CommittedRows
from hf_ddtree.target.model import CachedModel
from hf_ddtree.target.past_recording import recording_past
from hf_ddtree.tree.draft_tree import DraftTree

TOLERANCE = 1e-4
# Shorter and longer than the convolution's kernel and the sliding window, and around both.
CONTEXT_LENGTHS = (1, 2, 3, CONV_KERNEL, 6, WINDOW - 1, WINDOW, 13, 70)


class Decoding:
    """What a decoding loop keeps between rounds, for one row per sequence.

    Args:
        model: The target.
        contexts: Token ids that the cache shall hold, one list per row.
        padding: Number of positions at the left of each row that the attention mask hides.
    """

    def __init__(self, model: PreTrainedModel, contexts: list[list[int]], padding: list[int] | None = None) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.committed = [list(context) for context in contexts]
        self.padding = padding
        dispatch.install(model)
        tokens = torch.tensor(contexts)
        model(input_ids=tokens, **mask_and_positions(tokens, padding), use_cache=True, **{CACHE_KEY: self.cache})
        up_to_root = torch.nn.functional.pad(tokens, (0, 1))
        arguments = mask_and_positions(up_to_root, padding)
        self.rows = CommittedRows(tokens.shape[1], arguments, len(tokens), tokens.device)
        self.cached_model = CachedModel(model, {CACHE_KEY: self.cache}, self.rows)

    def verify(self, trees: list[DraftTree]) -> Tensor:
        """Logits `(batch, n, vocab)` of all nodes."""
        self.trees = trees
        self.verification = self.cached_model.verify(trees)
        return self.verification.logits

    def commit(self, paths: list[list[int]]) -> None:
        self.cached_model.commit(self.verification.tree_pass, paths)
        for committed, tree, path in zip(self.committed, self.trees, paths):
            committed += tree.tokens_of(path)

    def next_logits(self, following: list[list[int]]) -> Tensor:
        """Logits after each of the `following` tokens, fed one by one to the cache as standard decoding does."""
        tokens = torch.tensor([row + more for row, more in zip(self.committed, following)])
        length = len(self.committed[0])
        logits = []
        for end in range(length + 1, tokens.shape[1] + 1):
            arguments = mask_and_positions(tokens[:, :end], self.padding)
            arguments["position_ids"] = arguments["position_ids"][:, -1:]
            outputs = self.model(
                input_ids=tokens[:, end - 1 : end], **arguments, use_cache=True, **{CACHE_KEY: self.cache}
            )
            logits.append(outputs.logits[:, -1])
        return torch.stack(logits, dim=1)


def mask_and_positions(tokens: Tensor, padding: list[int] | None) -> dict[str, Tensor]:
    """As `generate()` makes them for a prompt that may be padded at the left."""
    if padding is None:
        return {"position_ids": torch.arange(tokens.shape[1])[None]}
    mask = torch.arange(tokens.shape[1])[None] >= torch.tensor(padding)[:, None]
    return {"attention_mask": mask.long(), "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}


def plain_logits(model: PreTrainedModel, sequences: list[list[int]], padding: int | None = None) -> list[Tensor]:
    """Logits `(length, vocab)` of each sequence, from one forward; shorter ones are filled up at the right."""
    longest = max(map(len, sequences))
    tokens = torch.tensor([sequence + [0] * (longest - len(sequence)) for sequence in sequences])
    arguments = mask_and_positions(tokens, None if padding is None else [padding] * len(sequences))
    logits = model(input_ids=tokens, **arguments, use_cache=False).logits
    return [row[: len(sequence)] for row, sequence in zip(logits, sequences)]


def plain_logits_of_tree(
    model: PreTrainedModel, context: list[int], tree: DraftTree, after: list[int], padding: int | None = None
) -> tuple[Tensor, Tensor]:
    """`(n, vocab)` and `(len(after), vocab)`: last logits of the sequence that leads to each node, and of `after`."""
    leaves = [node for node in range(len(tree)) if not tree.children(node)]
    sequences = [context + tree.tokens_of(tree.path(leaf)) for leaf in leaves]
    *rows, following = plain_logits(model, [*sequences, context + after], padding)
    by_node: dict[int, Tensor] = {}
    for leaf, logits in zip(leaves, rows):
        by_node |= dict(zip(tree.path(leaf), logits[len(context) :]))
    return torch.stack([by_node[node] for node in range(len(tree))]), following[len(context) :]


def assert_close(actual: Tensor, expected: Tensor, what: str, unit: float = 1.0) -> None:
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    error = (actual - expected).abs().max().item()
    assert error <= TOLERANCE * unit, f"{what}: off by {error:.1e}"


def assert_same_cache(model: PreTrainedModel, actual: DynamicCache, tokens: list[list[int]], padding=None) -> None:
    """Compares with the cache of one plain forward over all tokens."""
    plain = Decoding(model, tokens, padding).cache
    assert actual.get_seq_length() == plain.get_seq_length()
    for number, (layer, expected) in enumerate(zip(actual.layers, plain.layers)):
        if is_filled(expected, "conv_states"):
            assert_close(layer.conv_states[0], expected.conv_states[0], f"convolution inputs of layer {number}")
        if is_filled(expected, "recurrent_states"):
            state = expected.recurrent_states[0]
            assert layer.recurrent_states[0].dtype == torch.float32
            # Where no rule normalises the keys, a state has no scale of its own.
            unit = max(1.0, state.abs().max().item())
            assert_close(layer.recurrent_states[0], state, f"state of layer {number}", unit)
        if getattr(expected, "keys", None) is not None:
            # What padding holds depends on how much was computed at once, and nobody sees it.
            skipped = max(padding or [0]) - (len(tokens[0]) - expected.keys.shape[-2])
            real = slice(max(0, skipped), None)
            assert layer.keys.shape == expected.keys.shape
            assert_close(layer.keys[:, :, real], expected.keys[:, :, real], f"keys of layer {number}")
            assert_close(layer.values[:, :, real], expected.values[:, :, real], f"values of layer {number}")


def is_filled(layer: CacheLayerMixin, states: str) -> bool:
    """Whether a cache layer holds such states: some kinds never do, and layers without a recurrence never fill it."""
    return hasattr(layer, states) and getattr(layer, states)[0] is not None


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def check_round(
    model: PreTrainedModel, rng: random.Random, context_length: int, shape: str, padding: int | None = None
) -> None:
    """One round on a random context and tree: logits of all nodes, then the cache after a random path."""
    context = random_tokens(rng, context_length)
    tree = random_tree(rng, shape, rng.randrange(VOCAB_SIZE), VOCAB_SIZE, rng.randint(2, 26))
    path = random_path(rng, tree) if shape != "chain" or rng.random() < 0.5 else list(range(len(tree)))
    where = f"context {context_length}, padding {padding}, {shape} {tree.parents.tolist()}"

    following = random_tokens(rng, 2)
    taken = tree.tokens_of(path)
    expected, expected_next = plain_logits_of_tree(model, context, tree, taken + following, padding)

    decoding = Decoding(model, [context], None if padding is None else [padding])
    with recording_past(decoding.cache):
        assert_close(decoding.verify([tree])[0], expected, f"logits of {where}")
        decoding.commit([path])
    assert_same_cache(model, decoding.cache, [context + taken], decoding.padding)
    next_logits = decoding.next_logits([following])[0]
    assert_close(next_logits, expected_next[len(taken) :], f"logits after path {path} of {where}")


@torch.no_grad()
@pytest.mark.parametrize("family, attention", CASES)
def test_nodes_and_next_tokens_are_those_of_plain_forwards(family, attention):
    """54 trees: every shape on every context length."""
    rng = random.Random(f"{family} {attention}")
    for context_length in CONTEXT_LENGTHS:
        for shape in SHAPES:
            check_round(model_of(family, attention), rng, context_length, shape)


@pytest.mark.core
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_few_rounds_of_every_family(family):
    rng = random.Random(family)
    model = model_of(family, first_implementation(family))
    for context_length, shape in ((1, "deep"), (3, "bushy"), (13, "straggling"), (6, "chain"), (9, "single")):
        check_round(model, rng, context_length, shape)
    check_round(model, rng, 12, "deep", padding=5)


@torch.no_grad()
@pytest.mark.parametrize("family, attention", CASES)
def test_padding_at_the_left_stays_hidden(family, attention):
    """Less and more padding than the window and the convolution's kernel are wide."""
    rng = random.Random(f"{family} {attention} padded")
    for context_length, padding in ((2, 1), (5, 3), (9, 2), (15, 12), (26, 10)):
        for shape in ("deep", "bushy", "single"):
            check_round(model_of(family, attention), rng, context_length, shape, padding)


@torch.no_grad()
@pytest.mark.parametrize("family, attention", CASES)
def test_twenty_rounds_drift_nowhere(family, attention):
    model = model_of(family, attention)
    rng = random.Random(f"{family} {attention} rounds")
    prompt = random_tokens(rng, 5)
    decoding = Decoding(model, [prompt])
    seen, branches_won = [], 0
    with recording_past(decoding.cache):
        for number in range(20):
            shape = ("deep", "bushy", "straggling", "deep")[number % 4]
            tree = random_tree(rng, shape, rng.randrange(VOCAB_SIZE), VOCAB_SIZE, rng.randint(6, 20))
            path = random_path(rng, tree) if number % 3 == 0 else tree.path(rng.randrange(len(tree) - 3, len(tree)))
            seen.append(decoding.verify([tree])[0, path])
            decoding.commit([path])
            branches_won += not is_prefix(path)
    assert branches_won >= 10
    committed, following = decoding.committed[0], random_tokens(rng, 5)
    expected = plain_logits(model, [committed + following])[0]
    assert_close(torch.cat(seen), expected[len(prompt) : len(committed)], "logits of the committed nodes")
    assert_same_cache(model, decoding.cache, [committed])
    assert_close(decoding.next_logits([following])[0], expected[len(committed) :], "next logits")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_with_trees_and_paths_of_their_own(family):
    """Three rows with different padding, trees and paths; then the shorter rows catch up, and all go on plainly."""
    model = model_of(family, first_implementation(family))
    rng = random.Random(f"{family} rows")
    padding = [0, 3, 10]
    decoding = Decoding(model, [random_tokens(rng, 13) for _ in padding], padding)

    def one_round(trees: list[DraftTree], paths: list[list[int]]) -> None:
        logits = decoding.verify(trees)
        for row, tree in enumerate(trees):
            expected, _ = plain_logits_of_tree(model, decoding.committed[row], tree, [], padding[row])
            assert_close(logits[row, : len(tree)], expected, f"logits of row {row}")
        decoding.commit(paths)

    with recording_past(decoding.cache):
        for number in range(4):
            trees = [
                random_tree(rng, shape, rng.randrange(VOCAB_SIZE), VOCAB_SIZE, size)
                for shape, size in (("bushy", 9), ("deep", 21), ("straggling", 15))
            ]
            paths = [random_path(rng, tree) for tree in trees]
            paths[number % 3] = [] if number > 0 else paths[0]
            one_round(trees, paths)
        lengths = list(map(len, decoding.committed))
        assert not decoding.rows.are_equally_long
        missing = [max(lengths) - length for length in lengths]
        chains = [random_tree(rng, "chain", rng.randrange(VOCAB_SIZE), VOCAB_SIZE, max(1, count)) for count in missing]
        one_round(chains, [list(range(count)) for count in missing])
    assert decoding.rows.are_equally_long
    assert_same_cache(model, decoding.cache, decoding.committed, padding)
    following = [random_tokens(rng, 2) for _ in padding]
    next_logits = decoding.next_logits(following)
    for row, (committed, more) in enumerate(zip(decoding.committed, following)):
        assert_close(next_logits[row], plain_logits(model, [committed + more], padding[row])[0][-2:], f"row {row}")


@torch.no_grad()
@pytest.mark.core
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_lone_roots_are_committed_for_some_rows_alone(family):
    """Models have another code for single tokens, which writes over the states of all rows."""
    decoding = Decoding(model_of(family, first_implementation(family)), [random_tokens(random.Random(0), 6)] * 3)
    with recording_past(decoding.cache):
        for paths in ([[0], [], [0]], [[], [0], []], [[0], [0], [0]]):
            trees = [DraftTree.root_only(5 + row) for row in range(3)]
            logits = decoding.verify(trees)
            for row, tree in enumerate(trees):
                expected, _ = plain_logits_of_tree(decoding.model, decoding.committed[row], tree, [])
                assert_close(logits[row], expected, f"logits of row {row}")
            decoding.commit(paths)
    assert_same_cache(decoding.model, decoding.cache, decoding.committed)


@torch.no_grad()
@pytest.mark.core
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_plain_forwards_go_on_as_before_while_the_operators_are_installed(family):
    model = model_of(family, first_implementation(family))
    tokens = torch.tensor([random_tokens(random.Random(0), 20)])
    dispatch.uninstall()
    expected = model(input_ids=tokens).logits
    dispatch.install(model)
    assert torch.equal(model(input_ids=tokens).logits, expected)


@torch.no_grad()
@pytest.mark.core
def test_a_copied_model_scales_its_queries_once():
    """Llama 4's layers are hooked, and a copy of a model brings the hooks along."""
    model = copy.deepcopy(model_of("llama4", "sdpa"))
    dispatch.install(model)
    for _ in range(2):
        model = copy.deepcopy(model)
        check_round(model, random.Random(0), 13, "bushy")
    dispatch.uninstall()
    check_round(model, random.Random(0), 13, "bushy")


class Operations(TorchDispatchMode):
    """Names of the operations that are run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_first_nodes_are_committed_by_a_slice(family, rows):
    """Their keys are in their place already, and nothing is copied; nodes further on have to be moved."""
    model = model_of(family, first_implementation(family))
    tree = DraftTree.from_parents([3, 5, 7, 9, 2], [-1, 0, 1, 1, 3])
    context = list(range(1, 13))
    for path, is_slice in (([0, 1, 2], True), ([0], True), ([0, 1, 3, 4], False)):
        decoding = Decoding(model, [context] * rows)
        with recording_past(decoding.cache):
            decoding.verify([tree] * rows)
            with Operations() as operations:
                decoding.commit([path] * rows)
        copies = {"index_select", "gather", "copy_", "clone", "scatter_", "cat"}.intersection(operations.names)
        assert bool(copies) != is_slice, copies
        following = decoding.next_logits([[4]] * rows)
        expected = plain_logits(model, [context + tree.tokens_of(path) + [4]])[0][-1]
        for row in following:
            assert_close(row[-1], expected, f"after {path}")
