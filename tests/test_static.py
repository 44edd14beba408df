"""Static caches: the same tokens, from a buffer of fixed length and trees of few sizes; compiled forwards."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from helpers.families import VOCAB_SIZE, first_implementation, make_model
from helpers.random_drafter import make_drafter
from helpers.side_by_side import make_oracle, make_prompt
from torch import Tensor
from transformers import CompileConfig, MaxTimeCriteria, PreTrainedModel, StaticCache, StoppingCriteriaList

import hf_ddtree
from hf_ddtree.attention import active_pass
from hf_ddtree.attention.tree_pass import TreePass
from hf_ddtree.budget.policy import FixedBudget
from hf_ddtree.decoding import loop
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.target import compiled
from hf_ddtree.target import model as target_model
from hf_ddtree.target.commit_in_graph import GreedyCommit, commit_greedy
from hf_ddtree.target.static_cache import buffer_length, padded_size
from hf_ddtree.testing import OracleTreeCandidateGenerator

GREEDY = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
# Full attention, windows in all layers, in some, chunks, latent attention, and states beside attention or with it.
FAMILIES = ["qwen3", "llama", "mistral", "gemma3", "llama4", "deepseek_v3", "qwen3_5", "falcon_h1", "lfm2"]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    hf_ddtree.register()


def get_model(family: str) -> PreTrainedModel:
    return make_model(family, first_implementation(family))


def by_tree(model: PreTrainedModel, inputs: Any, plain: Tensor, seed: int = 0, **arguments: Any) -> Any:
    defaults = {"cache_implementation": "static", "tree_budget": 10, "return_trees": True}
    return model.generate(
        **(inputs if isinstance(inputs, dict) else {"inputs": inputs}),
        **GREEDY | defaults | arguments,
        generation_strategy="ddtree",
        candidate_generator=OracleTreeCandidateGenerator(plain, VOCAB_SIZE, seed=seed),
    )


def went_into_branches(out: Any) -> bool:
    """Whether paths were taken that are no prefix of their tree, in several rounds."""
    paths = [path for of_round in out.ddtree_stats.accepted_paths for path in of_round]
    return sum(path != list(range(len(path))) for path in paths) > 3 and len(paths) > 5


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_plain_decoding(family: str) -> None:
    """With a dynamic cache and with a static one, where that Transformers can; and the cache can be gone on with."""
    model, prompt = get_model(family), make_prompt()
    plain = model.generate(prompt, **GREEDY, output_logits=True)
    try:
        static = model.generate(prompt, **GREEDY, cache_implementation="static")
    except TypeError:
        if family != "llama4":
            raise
        pytest.skip("This Transformers makes no mask for chunks of a static cache.")
    assert static.sequences.tolist() == plain.sequences.tolist()
    tree = by_tree(model, prompt, plain.sequences, output_logits=True)
    assert tree.sequences.tolist() == plain.sequences.tolist() and went_into_branches(tree)
    torch.testing.assert_close(torch.stack(tree.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)
    cache = tree[CACHE_KEY]
    assert type(cache) is StaticCache and int(cache.get_seq_length()) == plain.sequences.shape[1] - 1
    for layer, expected in zip(cache.layers, plain[CACHE_KEY].layers, strict=True):
        for states in ("conv_states", "recurrent_states"):
            if getattr(expected, states, {}).get(0) is not None:
                torch.testing.assert_close(
                    getattr(layer, states)[0], getattr(expected, states)[0], rtol=1e-4, atol=1e-4
                )
        if getattr(expected, "keys", None) is not None:
            kept = expected.keys.shape[-2]
            torch.testing.assert_close(
                layer.keys[..., int(cache.get_seq_length()) - kept : int(cache.get_seq_length()), :],
                expected.keys,
                rtol=1e-4,
                atol=1e-4,
            )


def uneven_rows(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, list[int]], Tensor]:
    """Prompts padded at the left, tokens that end their rows apart, and what standard decoding makes of them."""
    mask = (torch.arange(12) >= torch.tensor([[0], [5], [8]])).long()
    ids = torch.randint(1, VOCAB_SIZE, mask.shape, generator=torch.Generator().manual_seed(3)) * mask
    inputs = {"input_ids": ids, "attention_mask": mask}
    answers = model.generate(**inputs, **GREEDY).sequences[:, 12:]
    ends = {"eos_token_id": [int(answers[0, 22]), int(answers[1, 9])]}
    plain = model.generate(**inputs, **GREEDY | ends).sequences
    return inputs, ends, plain


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "lfm2"])
def test_rows_of_different_lengths(family: str) -> None:
    """Padded at the left, accepting different lengths, some ending early."""
    model = get_model(family)
    inputs, ends, plain = uneven_rows(model)
    for seed in range(2):
        tree = by_tree(model, inputs, plain, seed, **ends)
        assert tree.sequences.tolist() == plain.tolist() and went_into_branches(tree)
        assert int(tree[CACHE_KEY].get_seq_length()) == plain.shape[1] - 1


@pytest.mark.core
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_going_on_with_the_cache(family: str) -> None:
    """Its buffer is long enough for the second call's tokens: the first call said so."""
    model, prompt = get_model(family), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    first = by_tree(model, prompt, plain, max_new_tokens=15, max_cache_len=plain.shape[1])
    for strategy in (None, "ddtree"):
        arguments = (
            {} if strategy is None else {"generation_strategy": strategy, "candidate_generator": make_oracle(plain)}
        )
        cache = copy.deepcopy(first[CACHE_KEY])
        rest = model.generate(first.sequences, **GREEDY | {"max_new_tokens": 25, CACHE_KEY: cache}, **arguments)
        assert rest.sequences.tolist() == plain.tolist()


def test_sampling_with_a_seed() -> None:
    model, prompt = get_model("qwen3"), make_prompt()
    arguments = GREEDY | {"do_sample": True, "temperature": 1.3, "top_k": 20}
    torch.manual_seed(1)
    plain = model.generate(prompt, **arguments).sequences
    torch.manual_seed(1)
    assert by_tree(model, prompt, plain, **arguments).sequences.tolist() == plain.tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_branch_of_nan(family: str) -> None:
    """What it left in the buffer must not come back, not even times zero."""
    model, prompt = copy.deepcopy(get_model(family)), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    unused = next(token for token in range(1, VOCAB_SIZE) if token not in plain)
    model.get_input_embeddings().weight.data[unused] = math.nan

    class Spoiled(hf_ddtree.TreeCandidateGenerator):
        def propose(self, context: hf_ddtree.DraftContext, budget: int) -> list[hf_ddtree.DraftTree]:
            root = int(context.input_ids[0, -1])
            following = plain[0, context.input_ids.shape[1] :].tolist()[:3]
            spoils = [unused] * 4 if context.input_ids.shape[1] % 5 == 0 else []
            tree = hf_ddtree.DraftTree.chain([root] + (spoils or following))
            return [tree]

    arguments = {"generation_strategy": "ddtree", "cache_implementation": "static"}
    tree = model.generate(prompt, **GREEDY, **arguments, candidate_generator=Spoiled())
    assert tree.sequences.tolist() == plain.tolist()
    assert {1, 4} <= set(tree.ddtree_stats.accepted_lengths)


# --- shapes and room ------------------------------------------------------------------------------------------------


def test_padded_sizes() -> None:
    assert [padded_size(nodes) for nodes in (1, 2, 5, 6, 9, 10, 17, 18, 64, 65, 66)] == [
        *(1, 5, 5, 9, 9, 17, 17, 33, 65, 65, 129)
    ]


class Changing(FixedBudget):
    """Another number of nodes each round."""

    def nodes_to_verify(self, trees: Sequence[hf_ddtree.DraftTree], num_cached: int) -> int:
        return 1 + num_cached % self.num_nodes


@pytest.mark.core
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
def test_forwards_have_few_shapes(family: str) -> None:
    """Whatever the trees' sizes, and however long the context: a compiled forward has few graphs."""
    model, prompt = get_model(family), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    shapes = set()

    def record(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        masks = kwargs["attention_mask"]
        masks = masks.values() if isinstance(masks, dict) else [masks]
        shapes.add((kwargs["input_ids"].shape[1], *{mask.shape[1:] for mask in masks if mask is not None}))

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        tree = by_tree(model, prompt, plain, tree_budget=Changing(12))
    finally:
        hook.remove()
    length = buffer_length(tree[CACHE_KEY])
    assert tree.sequences.tolist() == plain.tolist()
    assert len({len(tree) for of_round in tree.ddtree_stats.trees for tree in of_round}) > 5
    of_rounds = {shape for shape in shapes if shape[0] not in (1, prompt.shape[1])}
    assert of_rounds == {(size, (1, size, length)) for size in (5, 9, 17)}


def test_a_tree_is_cut_to_the_room_that_is_left() -> None:
    """In a cache that the caller made just long enough for the tokens."""
    model, prompt = get_model("qwen3"), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    cache = StaticCache(config=model.config, max_cache_len=plain.shape[1] - 1)
    tree = by_tree(model, prompt, plain, **{"cache_implementation": None, CACHE_KEY: cache})
    assert tree.sequences.tolist() == plain.tolist() and tree[CACHE_KEY] is cache
    last = [max(map(len, of_round)) for of_round in tree.ddtree_stats.trees[-3:]]
    assert max(last) <= 5 and max(len(of_round[0]) for of_round in tree.ddtree_stats.trees) > 8


def test_a_policy_that_asks_for_more_than_it_said() -> None:
    class Greedy(FixedBudget):
        def __init__(self) -> None:
            super().__init__(32)
            self.most_nodes = 8

    model, prompt = get_model("qwen3"), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    tree = by_tree(model, prompt, plain, tree_budget=Greedy())
    assert tree.sequences.tolist() == plain.tolist()


def test_chunks_of_the_prompt() -> None:
    model, prompt = get_model("qwen3"), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    assert by_tree(model, prompt, plain, prefill_chunk_size=4).sequences.tolist() == plain.tolist()


@pytest.mark.core
@pytest.mark.parametrize("room", [1, 2, 5, 6])
def test_rows_that_reach_the_end_of_the_buffer_at_different_times(room: int) -> None:
    """Those that are behind go on with forwards that write behind the longest."""
    model, inputs = get_model("qwen3"), torch.cat([make_prompt(seed) for seed in range(3)])
    plain = model.generate(inputs, **GREEDY).sequences
    for seed in range(3):
        cache = StaticCache(config=model.config, max_cache_len=plain.shape[1] - 1 + room)
        passed = {CACHE_KEY: cache, "cache_implementation": None}
        assert by_tree(model, inputs, plain, seed, **passed).sequences.tolist() == plain.tolist()
        assert int(cache.get_seq_length()) == plain.shape[1] - 1


@pytest.mark.core
def test_refusals() -> None:
    model, prompt = get_model("qwen3"), make_prompt()

    def short_cache(model: PreTrainedModel, length: int) -> dict[str, Any]:
        return {CACHE_KEY: StaticCache(config=model.config, max_cache_len=length), "cache_implementation": None}

    with pytest.raises(ValueError, match="room for 30 tokens, but this call may need 49.*max_cache_len=60"):
        by_tree(model, prompt, prompt, **short_cache(model, 30))
    for length, num_rows in ((48, 1), (49, 3)):
        with pytest.raises(ValueError, match=f"room for {length} tokens, but this call may need {length + 1}"):
            by_tree(model, prompt.repeat(num_rows, 1), prompt, **short_cache(model, length))
    with pytest.raises(ValueError, match="`output_attentions` is True"):
        by_tree(model, prompt, prompt, output_attentions=True)
    with pytest.raises(ValueError, match="keeps the last 8 keys alone.*pass no cache"):
        by_tree(get_model("gemma3"), prompt, prompt, **short_cache(get_model("gemma3"), 90))
    with pytest.raises(ValueError, match="offload"):
        by_tree(model, prompt, prompt, cache_implementation="offloaded_static")


# --- compiled forwards ----------------------------------------------------------------------------------------------


class CountingBackend:
    """Runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.num_graphs += 1
        return graph.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> CountingBackend:
        return self


def compiling(**settings: Any) -> dict[str, Any]:
    """What makes `generate()` compile on the CPU as well."""
    config = CompileConfig(mode=None, **settings)
    config._compile_all_devices = True
    return {"compile_config": config, "cache_implementation": "static"}


def tokens_of_trees(out: Any) -> list[list[list[int]]]:
    return [[tree.token_ids.tolist() for tree in trees] for trees in out.ddtree_stats.trees]


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.core
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_graph_a_size_serves_all_calls(family: str) -> None:
    """Recurrent layers and a drafter that reads layers of the target included."""
    model, prompt = get_model(family), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    hooks = [set(layer._forward_hooks) for layer in model.model.layers]  # Transformers may have put some there
    backend = CountingBackend()
    for drafter, most_graphs in ((make_drafter(model), 2), (make_drafter(model, target_layer_ids=[1]), 4)):
        strategy = {
            "generation_strategy": "ddtree",
            "assistant_model": drafter,
            "tree_budget": 4,
            "return_trees": True,
            "calibrate": False,
        }
        eager = model.generate(prompt, **GREEDY, **strategy, cache_implementation="static")
        for _ in range(2):
            tree = model.generate(prompt, **GREEDY, **strategy, **compiling(backend=backend, dynamic=False))
            assert tree.sequences.tolist() == plain.tolist()
            assert tokens_of_trees(tree) == tokens_of_trees(eager)  # so the features were the same
            assert most_graphs - 1 <= backend.num_graphs <= most_graphs
        if family == "qwen3_5":
            break
    assert [set(layer._forward_hooks) for layer in model.model.layers] == hooks


@pytest.mark.core
@pytest.mark.usefixtures("dynamo")
def test_compiled_recurrences_go_into_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are committed in the graph."""
    monkeypatch.setattr(target_model, "commit", None)
    model, prompt = get_model("qwen3_5"), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    backend = CountingBackend()
    tree = by_tree(model, prompt, plain, **compiling(backend=backend, dynamic=False), tree_budget=8)
    assert tree.sequences.tolist() == plain.tolist() and went_into_branches(tree)
    assert 0 < backend.num_graphs <= 3


class Uncompiled:
    """A forward that commits what greedy search accepts, as its graph does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.num_committed = self.num_refused = 0

    def __call__(
        self,
        model_inputs: dict[str, Any],
        tree_pass: TreePass | None,
        layer_ids: Sequence[int],
        greedy: GreedyCommit | None,
    ) -> tuple[Any, list[Tensor]] | None:
        if tree_pass is None or greedy is None:
            return None
        with active_pass.active(tree_pass):
            outputs = self.model(**model_inputs)
        tree_pass.accepted = commit_greedy(model_inputs[CACHE_KEY], tree_pass, outputs.logits, greedy)
        self.num_committed += 1
        self.num_refused += not (tree_pass.accepted >= 0).any()
        return outputs, []

    def in_parts(self, tree_pass: TreePass | None) -> PreTrainedModel:
        return self.model


@pytest.fixture
def committing(monkeypatch: pytest.MonkeyPatch) -> list[Uncompiled]:
    """The forwards of all calls, the last one's last."""
    made: list[Uncompiled] = []

    def make(model: PreTrainedModel, *prepared: Any) -> Uncompiled:
        made.append(Uncompiled(model))
        return made[-1]

    monkeypatch.setattr(loop, "compiled_forward", make)
    return made


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "lfm2", "falcon_h1"])
def test_commits_in_a_graph(family: str, committing: list[Uncompiled]) -> None:
    """The cache is then as if the tokens had been fed one by one: what is decoded next is right."""
    model, prompt = get_model(family), make_prompt()
    plain = model.generate(prompt, **GREEDY, output_logits=True)
    for seed in range(3):
        tree = by_tree(model, prompt, plain.sequences, seed, output_logits=True)
        assert tree.sequences.tolist() == plain.sequences.tolist() and went_into_branches(tree)
        torch.testing.assert_close(torch.stack(tree.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)
        assert committing[-1].num_committed > 3
    cache = tree[CACHE_KEY]
    assert int(cache.get_seq_length()) == plain.sequences.shape[1] - 1


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "lfm2"])
def test_commits_of_rows_in_a_graph(family: str, committing: list[Uncompiled]) -> None:
    """Of different lengths, that end one after the other in the middle of their paths."""
    model = get_model(family)
    inputs, ends, plain = uneven_rows(model)
    for seed in range(4):
        tree = by_tree(model, inputs, plain, seed, **ends)
        assert tree.sequences.tolist() == plain.tolist() and went_into_branches(tree)
        assert int(tree[CACHE_KEY].get_seq_length()) == plain.shape[1] - 1
        assert committing[-1].num_committed > 3


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_graph_commits_nothing_of_a_tree_with_nan(family: str, committing: list[Uncompiled]) -> None:
    test_a_branch_of_nan(family)
    assert committing[-1].num_committed > committing[-1].num_refused > 0


@pytest.mark.parametrize("case", ["sampled", "processor", "criterion", "callers cache"])
def test_what_a_graph_cannot_know_is_committed_outside(case: str, committing: list[Uncompiled]) -> None:
    model, prompt = get_model("qwen3"), make_prompt()
    arguments: dict[str, Any] = {
        "sampled": {"do_sample": True, "top_k": 1},
        "processor": {"repetition_penalty": 1.2},
        "criterion": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1e6)])},
        "callers cache": {},
    }[case]
    plain = model.generate(prompt, **GREEDY | arguments).sequences
    if case == "callers cache":
        arguments = {CACHE_KEY: StaticCache(config=model.config, max_cache_len=80), "cache_implementation": None}
    tree = by_tree(model, prompt, plain, **arguments)
    assert tree.sequences.tolist() == plain.tolist()
    assert committing[-1].num_committed == 0


@pytest.mark.usefixtures("dynamo")
def test_inductor() -> None:
    model, prompt = copy.deepcopy(get_model("qwen3")), make_prompt()
    del model.model.layers[1:]
    model.config.num_hidden_layers, model.config.layer_types = 1, ["full_attention"]
    plain = model.generate(prompt, **GREEDY, output_logits=True)
    tree = by_tree(model, prompt, plain.sequences, **compiling(), tree_budget=4, output_logits=True)
    assert tree.sequences.tolist() == plain.sequences.tolist() and went_into_branches(tree)
    torch.testing.assert_close(torch.stack(tree.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("dynamo")
def test_a_forward_that_the_user_compiled() -> None:
    """Recurrences break its graph, and are right all the same."""
    model, prompt = copy.deepcopy(get_model("qwen3_5")), make_prompt()
    plain = model.generate(prompt, **GREEDY | {"max_new_tokens": 8}).sequences
    backend = CountingBackend()
    model.forward = torch.compile(model.forward, backend=backend)
    tree = by_tree(model, prompt, plain, max_new_tokens=8, tree_budget=4)
    assert tree.sequences.tolist() == plain.tolist() and backend.num_graphs > 0


@pytest.mark.usefixtures("dynamo")
def test_a_model_whose_graph_breaks_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = copy.deepcopy(get_model("qwen3")), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    hook = model.model.layers[1].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    messages = []
    monkeypatch.setattr(compiled.logger, "warning", messages.append)
    try:
        for _ in range(2):
            tree = by_tree(model, prompt, plain, **compiling(backend=CountingBackend()), tree_budget=8)
    finally:
        hook.remove()
    assert tree.sequences.tolist() == plain.tolist() and went_into_branches(tree)
    assert [message for message in messages if "over trees" in message] == [messages[0]]
    assert "without `torch.compile`" in messages[0]


class EveryThirdRound(FixedBudget):
    """Drafts in two rounds of three."""

    num_rounds = 0

    def nodes_to_draft(self, num_cached: int, num_rows: int) -> int:
        self.num_rounds += 1
        return 0 if self.num_rounds % 3 == 0 else super().nodes_to_draft(num_cached, num_rows)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("breaks_over", ["trees", "single tokens"])
def test_a_break_over_roots_leaves_trees_compiled_and_the_other_way_round(
    breaks_over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = copy.deepcopy(get_model("qwen3")), make_prompt()
    drafter = make_drafter(model, target_layer_ids=[1])
    plain = model.generate(prompt, **GREEDY).sequences

    def break_some(module: torch.nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        if (args[0].shape[1] > 1) == (breaks_over == "trees"):
            torch._dynamo.graph_break()

    model.model.layers[1].register_forward_hook(break_some)
    messages: list[str] = []
    monkeypatch.setattr(compiled.logger, "warning", messages.append)
    strategy = {"generation_strategy": "ddtree", "assistant_model": drafter, "return_trees": True, "calibrate": False}
    eager = model.generate(prompt, **GREEDY, **strategy, cache_implementation="static", tree_budget=EveryThirdRound(4))
    backend = CountingBackend()
    for _ in range(2):
        tree = model.generate(
            prompt,
            **GREEDY,
            **strategy,
            **compiling(backend=backend, dynamic=False),
            tree_budget=EveryThirdRound(4),
        )
        assert tree.sequences.tolist() == plain.tolist()
        assert tokens_of_trees(tree) == tokens_of_trees(eager)  # so the features were the same
    assert len(messages) == 1 and f"over {breaks_over} " in messages[0]
    # The one graph of the other kind, and with a break over single tokens at least one part more.
    assert backend.num_graphs == 1 if breaks_over == "trees" else backend.num_graphs > 1


@pytest.mark.usefixtures("dynamo")
def test_a_policy_is_not_told_of_rounds_that_compile() -> None:
    class Told(FixedBudget):
        num_rounds = 0

        def observe(self, cost: hf_ddtree.RoundCost) -> None:
            self.num_rounds += 1

    model, prompt = get_model("qwen3"), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    policy, backend = Told(4), CountingBackend()
    tree = by_tree(model, prompt, plain, **compiling(backend=backend, dynamic=False), tree_budget=policy)
    assert policy.num_rounds == len(tree.ddtree_stats.trees) - backend.num_graphs > 0
    assert backend.num_graphs > 0


@pytest.mark.usefixtures("dynamo")
def test_plain_decoding_still_compiles_to_one_graph() -> None:
    """Of a model whose functions were wrapped."""
    model, prompt = get_model("qwen3_5"), make_prompt()
    plain = model.generate(prompt, **GREEDY).sequences
    by_tree(model, prompt, plain, max_new_tokens=4)
    arguments = GREEDY | compiling(backend=CountingBackend(), fullgraph=True)
    assert model.generate(prompt, **arguments).sequences.tolist() == plain.tolist()
