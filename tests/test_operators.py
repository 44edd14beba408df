"""The tree operators by themselves, against loops over each node's own path."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers.random_trees import SHAPES, random_path, random_tree
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from hf_ddtree.attention import kimi_delta, path_state
from hf_ddtree.attention.causal_conv import ancestor_windows, tree_causal_conv
from hf_ddtree.attention.gated_delta_rule import tree_gated_delta_rule
from hf_ddtree.attention.kimi_delta import tree_kimi_delta
from hf_ddtree.attention.mamba2 import tree_mamba2
from hf_ddtree.attention.mask import chunk_windows, to_additive, tree_attention_mask
from hf_ddtree.attention.path_state import PathFactors, TreePaths, advance_states
from hf_ddtree.attention.query_scale import scale_correction
from hf_ddtree.attention.reference import delta_rule_step, mamba2_step, over_nodes
from hf_ddtree.tree.draft_tree import DraftTree
from hf_ddtree.tree.tree_batch import TreeBatch

pytestmark = pytest.mark.core
CPU = torch.device("cpu")


def state_after_path(
    initial_state: Tensor, factors: PathFactors, path: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """The state after a path, of two layers that are alike, committed at once and one after the other."""
    states = [initial_state.clone(), 2 * initial_state]
    advance_states(states, [factors, factors], path, lengths)
    apart = [initial_state.clone(), 2 * initial_state]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path_state, "MOST_STACKED", 1)
        advance_states(apart, [factors, factors], path, lengths)
    assert all(map(torch.equal, states, apart))
    return states[0]


def trees_of(rng: random.Random, *shapes_and_sizes: tuple[str, int]) -> list[DraftTree]:
    return [random_tree(rng, shape, rng.randrange(50), 50, size) for shape, size in shapes_and_sizes]


# --- recurrences ---------------------------------------------------------------------------------------------------


class Recurrence:
    """Random inputs of a layer with a recurrence, and what its definition makes of them."""

    initial_state: Tensor

    def __init__(self, num_nodes: int, batch_size: int = 1, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.dtype = dtype
        self._shape = batch_size, num_nodes
        self._generator = torch.Generator().manual_seed(seed)

    def by_tree(self, trees: list[DraftTree]) -> tuple[Tensor, PathFactors]:
        return self.operator(TreePaths.of(TreeBatch.from_trees(trees, CPU).ancestor_mask))

    def operator(self, paths: TreePaths) -> tuple[Tensor, PathFactors]:
        raise NotImplementedError

    def step(self, row: int, node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """The state `(heads, rows, columns)` behind a node, and the node's output, in double precision."""
        raise NotImplementedError

    def state_and_output(self, row: int, path: list[int]) -> tuple[Tensor, Tensor]:
        """State after the path, and the output of its last node."""
        state, output = self.initial_state[row].double(), torch.empty(0)
        for node in path:
            state, output = self.step(row, node, state)
        return state, output

    def normal(self, *shape: int) -> Tensor:
        return torch.randn((*self._shape, *shape), generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand((*self._shape, *shape), generator=self._generator)

    def decays(self, strength: float | str, *shape: int) -> Tensor:
        """Logarithms of decays from 0 down to -`strength`; "mixed" ones are either very strong or hardly any."""
        if strength == "mixed":
            return torch.where(self.uniform(*shape) < 0.3, -200.0, -0.01) * self.uniform(*shape)
        return -strength * self.uniform(*shape)


class DeltaRule(Recurrence):
    """The gated delta rule, or Kimi delta attention if each channel has a decay of its own."""

    def __init__(
        self,
        num_nodes: int,
        groups: int = 1,
        decay: float | str = 1.0,
        beta_range: tuple[float, float] = (0.0, 1.0),
        normalise: bool = True,
        channels: bool = False,
        **settings,
    ) -> None:
        super().__init__(num_nodes, **settings)
        key_heads, key_dim, value_dim = 2, 6, 5
        heads = key_heads * groups
        low, high = beta_range
        scale = 1.0 if normalise else 0.3
        self.normalise, self.channels, self.groups = normalise, channels, groups
        self.query = (self.normal(key_heads, key_dim) * scale).to(self.dtype)
        self.key = (self.normal(key_heads, key_dim) * scale).to(self.dtype)
        self.value = self.normal(heads, value_dim).to(self.dtype)
        self.g = self.decays(decay, heads, key_dim if channels else 1)
        self.beta = (low + (high - low) * self.uniform(heads)).to(self.dtype)
        self.initial_state = self.normal(heads, key_dim, value_dim)[:, 0]

    def operator(self, paths: TreePaths) -> tuple[Tensor, PathFactors]:
        operator, g = (tree_kimi_delta, self.g) if self.channels else (tree_gated_delta_rule, self.g[..., 0])
        inputs = self.query, self.key, self.value, g, self.beta
        return operator(*inputs, paths, self.initial_state, self.normalise)

    def step(self, row: int, node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (
            tensor[row, node].double().repeat_interleave(self.groups, dim=0) for tensor in (self.query, self.key)
        )
        if self.normalise:
            query, key = (vectors / (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt() for vectors in (query, key))
        value, g, beta = (tensor[row, node].double() for tensor in (self.value, self.g, self.beta))
        return delta_rule_step(state, query, key, value, g, beta)


class Mamba2(Recurrence):
    """A state space model whose step and decay follow from the input."""

    def __init__(
        self, num_nodes: int, groups: int = 1, decay: float | str = 1.0, skip: bool = True, **settings
    ) -> None:
        super().__init__(num_nodes, **settings)
        heads, rows, columns = 4, 5, 3
        self.inputs = self.normal(heads, rows).to(self.dtype)
        self.columns, self.query = (self.normal(groups, columns).to(self.dtype) for _ in range(2))
        self.rate = -torch.linspace(0.5, 2.0, heads)
        self.dt = (self.decays(decay, heads) / self.rate).to(self.dtype)
        self.skip = torch.linspace(-1.0, 2.0, heads) if skip else None
        self.initial_state = self.normal(heads, rows, columns)[:, 0]

    def operator(self, paths: TreePaths) -> tuple[Tensor, PathFactors]:
        inputs = self.inputs, self.dt, self.rate, self.columns, self.query
        return tree_mamba2(*inputs, paths, self.initial_state, self.skip)

    def step(self, row: int, node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        group = torch.arange(len(self.rate)) // (len(self.rate) // self.columns.shape[2])
        inputs, dt = self.inputs[row, node].double(), self.dt[row, node].double()
        columns, query = (tensor[row, node, group].double() for tensor in (self.columns, self.query))
        skip = None if self.skip is None else self.skip.double()
        return mamba2_step(state, inputs, dt, self.rate.double(), columns, query, skip)


RECURRENCES = {
    "gated delta rule": partial(DeltaRule),
    "not normalised": partial(DeltaRule, normalise=False),
    "hardly any decay": partial(DeltaRule, decay=1e-3),
    "strong decay": partial(DeltaRule, decay=30.0),
    "extreme decay": partial(DeltaRule, decay=400.0),
    "mixed decay": partial(DeltaRule, decay="mixed"),
    "negative eigenvalues": partial(DeltaRule, beta_range=(1.0, 2.0), decay=0.1),
    "grouped value heads": partial(DeltaRule, groups=3),
    "bfloat16": partial(DeltaRule, dtype=torch.bfloat16, groups=2),
    "float16": partial(DeltaRule, dtype=torch.float16),
    "kimi": partial(DeltaRule, channels=True),
    "kimi, not normalised": partial(DeltaRule, channels=True, normalise=False),
    "kimi, strong decay": partial(DeltaRule, channels=True, decay=30.0),
    "kimi, extreme decay": partial(DeltaRule, channels=True, decay=400.0),
    "kimi, mixed decay": partial(DeltaRule, channels=True, decay="mixed"),
    "kimi, bfloat16": partial(DeltaRule, channels=True, dtype=torch.bfloat16),
    "mamba-2": partial(Mamba2),
    "mamba-2, groups": partial(Mamba2, groups=2),
    "mamba-2, a group a head": partial(Mamba2, groups=4, skip=False),
    "mamba-2, strong decay": partial(Mamba2, groups=2, decay=30.0),
    "mamba-2, mixed decay": partial(Mamba2, decay="mixed"),
    "mamba-2, bfloat16": partial(Mamba2, groups=2, dtype=torch.bfloat16),
}
KINDS = {
    "gated delta rule": partial(DeltaRule, groups=2, beta_range=(0.0, 2.0)),
    "kimi": partial(DeltaRule, channels=True, beta_range=(0.0, 2.0)),
    "mamba-2": partial(Mamba2, groups=2),
}


def parametrize(recurrences: dict[str, Callable[..., Recurrence]]):
    return pytest.mark.parametrize("make", recurrences.values(), ids=recurrences.keys())


def assert_is_the_recurrence(layer: Recurrence, tree: DraftTree) -> None:
    """Outputs of all nodes, and the states behind their paths."""
    output, factors = layer.by_tree([tree])
    assert output.dtype == layer.dtype
    assert all(tensor.dtype == torch.float32 for tensor in vars(factors).values())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[layer.dtype]
    for node in range(len(tree)):
        path = tree.path(node)
        state, expected = layer.state_and_output(0, path)
        torch.testing.assert_close(output[0, node].double(), expected, atol=tolerance, rtol=tolerance)
        committed = state_after_path(layer.initial_state, factors, torch.tensor([path]))
        assert committed.dtype == torch.float32
        torch.testing.assert_close(committed[0].double(), state, atol=1e-5, rtol=1e-5)


@parametrize(RECURRENCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_recurrence_along_every_path(make, shape):
    [tree] = trees_of(random.Random(shape), (shape, 14))
    assert_is_the_recurrence(make(len(tree)), tree)


@parametrize({name: make for name, make in RECURRENCES.items() if "decay" in name})
def test_decay_of_a_deep_tree(make):
    """Over 300 tokens `exp(-G)` overflows and underflows by far, and `G` itself has few digits left."""
    tree = DraftTree.from_parents(list(range(300)), [-1, *range(298), 120])
    layer = make(len(tree))
    output, factors = layer.by_tree([tree])
    state = layer.initial_state[0].double()
    states = []
    for node in range(299):
        state, expected = layer.step(0, node, state)
        torch.testing.assert_close(output[0, node].double(), expected, atol=2e-5, rtol=2e-5)
        states.append(state)
    _, expected = layer.step(0, 299, states[120])
    torch.testing.assert_close(output[0, 299].double(), expected, atol=2e-5, rtol=2e-5)
    committed = state_after_path(layer.initial_state, factors, torch.arange(299)[None])
    torch.testing.assert_close(committed[0].double(), state, atol=2e-5, rtol=2e-5)


def test_kimi_delta_in_blocks_of_nodes(monkeypatch):
    """However little is held at once, down to one node's products."""
    [tree] = trees_of(random.Random(9), ("bushy", 21))
    layer = DeltaRule(21, channels=True)
    expected, _ = layer.by_tree([tree])
    for elements in (1, 2 * 6 * 21 * 4, 2 * 6 * 21 * 20):
        monkeypatch.setattr(kimi_delta, "BLOCK_ELEMENTS", elements)
        output, _ = layer.by_tree([tree])
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)


@parametrize(KINDS)
def test_recurrence_with_a_tree_and_a_path_a_row(make):
    """Rows have trees of different sizes, and paths of different lengths, empty ones among them."""
    rng = random.Random(0)
    trees = trees_of(rng, ("bushy", 12), ("deep", 17), ("single", 1), ("straggling", 9))
    layer = make(max(map(len, trees)), batch_size=len(trees))
    output, factors = layer.by_tree(trees)
    for row, tree in enumerate(trees):
        for node in range(len(tree)):
            _, expected = layer.state_and_output(row, tree.path(node))
            torch.testing.assert_close(output[row, node].double(), expected, atol=1e-5, rtol=1e-5)
    for _ in range(10):
        paths = [random_path(rng, tree) for tree in trees]
        paths[rng.randrange(len(trees))] = []
        longest = max(map(len, paths))
        padded = torch.tensor([path + (path[-1:] or [0]) * (longest - len(path)) for path in paths])
        lengths = torch.tensor(list(map(len, paths)))
        committed = state_after_path(layer.initial_state, factors, padded, lengths)
        for row, path in enumerate(paths):
            state, _ = layer.state_and_output(row, path)
            torch.testing.assert_close(committed[row].double(), state, atol=1e-5, rtol=1e-5)


@parametrize(KINDS)
def test_recurrence_leaves_its_inputs_alone(make):
    [tree] = trees_of(random.Random(1), ("deep", 10))
    layer = make(10)
    before = {name: value.clone() for name, value in vars(layer).items() if isinstance(value, Tensor)}
    _, factors = layer.by_tree([tree])
    state_after_path(layer.initial_state, factors, torch.tensor([tree.path(9)]))
    assert all(torch.equal(getattr(layer, name), value) for name, value in before.items())


def test_the_reference_is_what_transformers_computes():
    """Token by token, for a chain: what decoding without a tree runs."""
    layer, chain = DeltaRule(7, groups=2), range(-1, 6)
    outputs, states = over_nodes(
        lambda node, state: layer.step(0, node, state), layer.initial_state[0].double(), chain
    )
    query, key = (tensor.repeat_interleave(2, dim=2) for tensor in (layer.query, layer.key))
    expected, state = modeling_qwen3_5.torch_recurrent_gated_delta_rule(
        *(query, key, layer.value, layer.g[..., 0], layer.beta, layer.initial_state),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(outputs, expected[0].double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[-1], state[0].double(), rtol=1e-5, atol=1e-5)


@parametrize(KINDS)
def test_factors_are_no_states(make):
    """A layer keeps vectors for each node, no matrix."""
    _, factors = make(8).by_tree(trees_of(random.Random(8), ("deep", 8)))
    rows, columns = factors.left.shape[-1], factors.right.shape[-1]
    for values, width in ((factors.log_decay, rows), (factors.left, rows), (factors.right, columns)):
        assert values.shape[:1] + values.shape[2:3] == (1, 8)
        assert values.shape[-1] <= width
        assert values.untyped_storage().nbytes() <= 2 * values.nbytes


@parametrize(KINDS)
def test_states_of_hundreds_of_commits_stay_those_of_the_recurrence(make):
    """The state goes on from one commit to the next; rounding must not pile up."""
    rng = random.Random(2)
    state = expected = None
    for number in range(300):
        [tree] = trees_of(rng, ("deep", 8))
        layer = make(8, decay=0.2, seed=number)
        path = tree.path(rng.randrange(5, 8))
        layer.initial_state = layer.initial_state if state is None else state
        _, factors = layer.by_tree([tree])
        state = state_after_path(layer.initial_state, factors, torch.tensor([path]))
        if expected is not None:
            layer.initial_state = expected[None]
        expected, _ = layer.state_and_output(0, path)
    torch.testing.assert_close(state[0].double(), expected, atol=1e-5, rtol=1e-5)


# --- causal convolution --------------------------------------------------------------------------------------------


def plain_convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`(channels,)`: the last output of a causal convolution over `(channels, length)` inputs."""
    padded = torch.nn.functional.pad(inputs, (weight.shape[-1] - 1, 0))
    return torch.nn.functional.conv1d(padded[None], weight[:, None], bias, groups=len(weight))[0, :, -1]


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution_is_that_of_every_path(kernel_size, bias):
    """Kernels shorter and longer than paths; one row, and rows with trees of different sizes."""
    rng = random.Random(kernel_size)
    generator = torch.Generator().manual_seed(kernel_size)
    channels = 3
    for extra_cached in (0, 1, 5):
        num_cached = max(0, kernel_size - 1) + extra_cached
        for shapes in ([("deep", 16)], [("bushy", 9), ("chain", 12), ("single", 1), ("star", 5)]):
            trees = trees_of(rng, *shapes)
            batch = TreeBatch.from_trees(trees, CPU)
            inputs = torch.randn(len(trees), channels, num_cached + batch.num_nodes, generator=generator)
            weight = torch.randn(channels, kernel_size, generator=generator)
            offset = torch.randn(channels, generator=generator) if bias else None
            windows = ancestor_windows(batch, kernel_size, num_cached)
            output = tree_causal_conv(inputs, weight, windows, offset)
            activated = tree_causal_conv(inputs, weight, windows, offset, torch.nn.functional.silu)
            torch.testing.assert_close(activated, torch.nn.functional.silu(output))
            for row, tree in enumerate(trees):
                for node in range(len(tree)):
                    order = [*range(num_cached), *(num_cached + step for step in tree.path(node))]
                    expected = plain_convolution(inputs[row][:, order], weight, offset)
                    torch.testing.assert_close(output[row, :, node], expected)


def test_windows_list_ancestors_then_the_cache():
    tree = DraftTree.from_parents([0, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 2, 4])
    windows = ancestor_windows(TreeBatch.from_trees([tree], CPU), kernel_size=3, num_cached=7)
    assert windows[0].tolist() == [[5, 6, 7], [6, 7, 8], [6, 7, 9], [7, 8, 10], [7, 9, 11], [9, 11, 12]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_convolution_rounds_as_a_plain_one_does(dtype):
    """A rounding more in each of its terms, and half of a hybrid's near ties would go another way."""
    generator = torch.Generator().manual_seed(0)
    tree = DraftTree.from_parents(list(range(9)), list(range(-1, 8)))
    windows = ancestor_windows(TreeBatch.from_trees([tree], CPU), 4, 3)
    inputs = torch.randn(1, 64, 12, generator=generator).to(dtype)
    weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((64, 4), (64,)))
    output = tree_causal_conv(inputs, weight, windows, bias, torch.nn.functional.silu)
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=64))
    assert output.dtype == dtype
    assert (output == expected).float().mean() > 0.98
    torch.testing.assert_close(output, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


# --- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 20])
def test_mask_is_what_each_nodes_own_sequence_would_see(window):
    rng = random.Random(window or 0)
    for length in (1, 2, 4, 7, 8, 13):
        num_cached = length if window is None else min(length, window - 1)
        trees = trees_of(rng, ("deep", 15), ("straggling", 10), ("single", 1))
        cached_mask = torch.ones(3, num_cached, dtype=torch.bool)
        cached_mask[1, : rng.randint(0, num_cached)] = False
        batch = TreeBatch.from_trees(trees, CPU)
        mask = tree_attention_mask(batch, num_cached, cached_mask, window)
        assert mask.shape == (3, 1, 15, num_cached + 15)
        assert mask.dtype == torch.bool
        for row, tree in enumerate(trees):
            for node in range(len(tree)):
                keys = [*range(num_cached), *(num_cached + step for step in tree.path(node))]
                visible = set(keys if window is None else keys[-window:])
                visible -= set((~cached_mask[row]).nonzero().flatten().tolist())
                assert set(mask[row, 0, node].nonzero().flatten().tolist()) == visible


@pytest.mark.parametrize("window", [2, 5, 8])
def test_window_over_a_cache_that_keeps_every_key(window):
    """Rows of different lengths, each in the first entries of a cache as long as the longest."""
    rng = random.Random(window)
    trees = trees_of(rng, ("deep", 15), ("straggling", 10), ("bushy", 6))
    lengths = [12, 3, 7]
    entries = torch.arange(12).expand(3, -1)
    before_root = torch.tensor(lengths)[:, None] - entries
    mask = tree_attention_mask(TreeBatch.from_trees(trees, CPU), 12, before_root > 0, window, before_root)
    for row, (tree, length) in enumerate(zip(trees, lengths)):
        for node in range(len(tree)):
            visible = [*range(length), *(12 + step for step in tree.path(node))][-window:]
            assert mask[row, 0, node].nonzero().flatten().tolist() == visible


@pytest.mark.parametrize("chunk_size", [2, 5, 8, 30])
@pytest.mark.parametrize("keeps_all", [False, True])
def test_attention_in_chunks_sees_only_its_own_chunk(chunk_size, keeps_all):
    """Rows with and without padding at the left, which no chunk counts."""
    rng = random.Random(chunk_size)
    padding = [0, 3, 5]
    for length in (6, 8, 13):
        trees = trees_of(rng, ("deep", 15), ("straggling", 10), ("single", 1))
        batch = TreeBatch.from_trees(trees, CPU)
        indices = length - torch.tensor(padding)[:, None]
        num_cached = length if keeps_all else min(length, chunk_size - 1)
        before_root = torch.arange(num_cached, 0, -1).expand(3, -1)
        is_token = before_root <= indices
        mask = tree_attention_mask(
            batch, num_cached, is_token, chunk_windows(batch, indices, chunk_size), before_root if keeps_all else None
        )
        for row, tree in enumerate(trees):
            first = padding[row]
            for node in range(len(tree)):
                steps = tree.path(node)
                chunk = (length + len(steps) - 1 - first) // chunk_size
                visible = {
                    num_cached - length + index
                    for index in range(first, length)
                    if (index - first) // chunk_size == chunk
                }
                visible |= {
                    num_cached + step
                    for depth, step in enumerate(steps)
                    if (length + depth - first) // chunk_size == chunk
                }
                assert set(mask[row, 0, node].nonzero().flatten().tolist()) == visible


def test_query_scales_are_those_of_each_nodes_place():
    """What the layer applies times the correction is what the node's own path would get."""
    rng = random.Random(3)
    batch = TreeBatch.from_trees(trees_of(rng, ("deep", 15), ("bushy", 10), ("single", 1)), CPU)
    num_before = torch.tensor([[9], [4], [7]])
    correction = scale_correction(num_before, batch.depths, 0.5, 4)
    assert correction.shape == (3, 15, 1)

    def scale(place: Tensor) -> Tensor:
        return torch.log1p(torch.floor((place.float() + 1.0) / 4)) * 0.5 + 1.0

    torch.testing.assert_close(
        scale(9 + torch.arange(15))[:, None] * correction, scale(num_before + batch.depths)[..., None]
    )
    assert scale_correction(num_before, batch.depths, 0.5, 8192) is None
    assert scale_correction(num_before + 8192, batch.depths, 0.5, 8192) is None


def test_mask_of_a_full_cache_needs_no_cached_mask():
    batch = TreeBatch.from_trees(trees_of(random.Random(4), ("bushy", 9)), CPU)
    ones = torch.ones(1, 3, dtype=torch.bool)
    assert torch.equal(tree_attention_mask(batch, 3, None, 4), tree_attention_mask(batch, 3, ones, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_mask_hides_what_is_false(dtype):
    mask = torch.tensor([[True, False, True]])
    additive = to_additive(mask, dtype)
    assert additive.dtype == dtype
    assert additive.softmax(-1).tolist() == [[0.5, 0.0, 0.5]]


# --- batches -------------------------------------------------------------------------------------------------------


def test_one_tree_is_packed_as_it_is():
    [tree] = trees_of(random.Random(5), ("bushy", 11))
    batch = TreeBatch.from_trees([tree], CPU)
    assert batch.num_nodes == 11
    assert torch.equal(batch.token_ids[0], tree.token_ids)
    assert torch.equal(batch.depths[0], tree.depths)
    assert torch.equal(batch.ancestor_mask[0], tree.ancestor_mask)


def test_smaller_trees_are_padded_with_nodes_that_see_only_themselves():
    trees = trees_of(random.Random(6), ("single", 1), ("deep", 12), ("star", 4))
    batch = TreeBatch.from_trees(trees, CPU)
    assert batch.num_nodes == 12
    for row, tree in enumerate(trees):
        size = len(tree)
        assert batch.token_ids[row].tolist() == tree.token_ids.tolist() + [int(tree.token_ids[0])] * (12 - size)
        assert batch.depths[row].tolist() == tree.depths.tolist() + [0] * (12 - size)
        assert torch.equal(batch.ancestor_mask[row, :size, :size], tree.ancestor_mask)
        assert not batch.ancestor_mask[row, :size, size:].any()
        assert torch.equal(batch.ancestor_mask[row, size:], torch.eye(12, dtype=torch.bool)[size:])
