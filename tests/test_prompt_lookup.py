"""Prompt lookup: what is found, what trees are made of it, and that no token changes."""

import math
import random

import pytest
import torch
from helpers.families import FAMILIES, VOCAB_SIZE, first_implementation, make_model
from helpers.generator_grid import CALLS, GRID, check_case
from helpers.random_drafter import make_drafter
from helpers.same_output import assert_same_cache, assert_same_details
from helpers.side_by_side import make_prompt
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_ddtree
from hf_ddtree import DDTreeConfig, DraftContext, DraftTree, TreeCandidateGenerator
from hf_ddtree.candidate_generators import (
    CombinedTreeCandidateGenerator,
    PromptLookupTreeCandidateGenerator,
    combined,
    prompt_lookup,
)
from hf_ddtree.candidate_generators.context import VerifiedRound
from hf_ddtree.candidate_generators.prompt_lookup import contexts_of, most_probable
from hf_ddtree.draft_memory.ngram_index import NgramIndex
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.testing import OracleTreeCandidateGenerator

PHRASE = [7, 3, 9, 4, 8, 1, 5, 2, 6, 11, 13, 12, 10, 14, 17, 16, 15, 18]


def make_generator(end_tokens=None, **knobs):
    model = make_model("llama", "sdpa")
    generator = PromptLookupTreeCandidateGenerator(model, DDTreeConfig(**knobs))
    generator.end_tokens = frozenset(end_tokens or ())
    return generator


def propose(generator, *rows, budget=16):
    """Trees for rows of any length, the shorter ones padded at the left with 0."""
    longest = max(map(len, rows))
    token_ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
    return generator.propose(DraftContext(token_ids, [len(row) - 1 for row in rows]), budget)


def paths(tree):
    """The tokens of all paths from below the root to a leaf."""
    parents = tree.parents.tolist()
    return sorted(tree.tokens_of(tree.path(node))[1:] for node in range(1, len(tree)) if node not in parents)


# --- the index ------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("seed", range(30))
def test_occurrences_are_those_of_a_search_through_all(seed):
    draw = random.Random(seed)
    lengths = draw.choice([(1,), (1, 2), (1, 2, 4, 8, 16), (3, 5), (4, 16, 32)])
    sequence = [draw.randrange(draw.choice([2, 3, 9])) for _ in range(draw.randint(1, 70))]
    index = NgramIndex(lengths)
    rest = list(sequence)
    while rest:
        count = draw.choice([1, 1, 2, 5, 30])
        index.extend(rest[:count])
        del rest[:count]
    expected = []
    for end in range(len(sequence) - 1):
        matches = [n for n in lengths if end + 1 >= n and sequence[end + 1 - n : end + 1] == sequence[-n:]]
        if matches:
            expected.append((end, max(matches)))
    expected.sort(key=lambda found: (-found[1], -found[0]))
    assert index.tokens == sequence
    assert [tuple(found) for found in index.occurrences(most=1000)] == expected
    of_other = index.occurrences_of([99, *sequence], most=1000)
    assert [tuple(found) for found in of_other if found.end < len(sequence) - 1] == expected
    assert len(of_other) == len(expected) + (len(sequence) >= min(lengths))


def test_the_most_recent_occurrences_are_looked_at():
    index = NgramIndex((1, 2))
    index.extend([5, 6, 7] + [5, 1] * 50 + [6, 7])
    assert [tuple(found) for found in index.occurrences(most=3)] == [(2, 2)]
    index.extend([5])
    assert [found.end for found in index.occurrences(most=3)][-2:] == [101 - 2, 101 - 4]


def test_an_index_tells_which_matches_were_right():
    index = NgramIndex((1, 2))
    index.extend([1, 2, 3, 1, 2, 4, 1, 2])
    assert index.predictions(0) == [(0, False)] * 3 + [(1, True), (2, False), (0, False), (1, True)]
    assert index.predictions(5) == [(0, False), (1, True)]


# --- trees ----------------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_what_follows_the_longest_match_is_drafted():
    (tree,) = propose(make_generator(), PHRASE + [30, 31] + PHRASE[:8])
    assert tree.token_ids[0] == PHRASE[7]
    chain = tree.best_chain()
    assert chain.tokens_of(list(range(1, len(chain)))) == (PHRASE[8:] + [30, 31] + PHRASE)[: len(chain) - 1]
    assert len(chain) > 4


@pytest.mark.core
def test_continuations_share_their_prefixes():
    """The most recent match comes first, then the others."""
    head = PHRASE[:8]
    text = head + [20, 21, 22, 40] + head + [23, 24, 25, 41] + head + [20, 21, 26, 42] + head
    (tree,) = propose(make_generator(), text, budget=48)
    starts = {tuple(path[:3]) for path in paths(tree)}
    assert {(20, 21, 22), (20, 21, 26), (23, 24, 25)} <= starts
    by_token = {int(tree.token_ids[node]): node for node in tree.children(0)}
    assert tree.log_probs[by_token[20]] > tree.log_probs[by_token[23]]
    assert by_token[20] == 1
    at_fork = tree.child_with_token(tree.child_with_token(0, 20), 21)
    assert [int(tree.token_ids[node]) for node in tree.children(at_fork)][:2] == [26, 22]


@pytest.mark.core
@pytest.mark.parametrize("lookup", [True, "text", "target"])
def test_log_probs_are_those_of_paths(lookup):
    draw = random.Random(3)
    generator = make_generator(tree_lookup=lookup)
    text = [draw.randrange(4) for _ in range(40)]
    for _ in range(60):
        (tree,) = propose(generator, text)
        text.append(draw.choice(text[-8:]))
        # `from_parents` checks order, siblings, and that no node is more probable than its parent.
        checked = DraftTree.from_parents(tree.token_ids, tree.parents, tree.log_probs)
        children = [float(checked.log_probs[checked.children(node)].exp().sum()) for node in range(len(tree))]
        assert all(total <= math.exp(tree.log_probs[node]) + 1e-5 for node, total in enumerate(children) if total)
        assert tree.num_drafted == 16


def test_a_fixed_budget_is_spent_before_anything_repeats():
    (tree,) = propose(make_generator(), list(range(30)))
    assert tree.num_drafted == 16


@pytest.mark.core
def test_the_first_round_is_drafted_for():
    model = make_model("llama", "sdpa")
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(
        torch.tensor([PHRASE * 2]), **options, generation_strategy="ddtree", tree_lookup=True, tree_budget=4
    )
    assert out.ddtree_stats.tree_sizes[0] == 4


def test_nothing_is_drafted_where_nothing_is_known():
    (tree,) = propose(make_generator(), [29])
    assert len(tree) == 1 and tree.token_ids.tolist() == [29]


def test_a_loop_is_drafted_round_and_round():
    (tree,) = propose(make_generator(), [1, 2, 3, 4, 5, 6, 30, 31, 32, 33, 30, 31, 32, 33])
    assert tree.best_chain().token_ids.tolist()[1:7] == [30, 31, 32, 33, 30, 31]


@pytest.mark.core
def test_nothing_is_drafted_beyond_an_end_token():
    text = PHRASE + [30] + PHRASE[:8]
    (tree,) = propose(make_generator(end_tokens=[PHRASE[9]]), text)
    end = tree.child_with_token(tree.child_with_token(0, PHRASE[8]), PHRASE[9])
    assert tree.children(end) == []


@pytest.mark.parametrize("budget", [1, 3, 9])
def test_budget_and_depth(budget):
    text = PHRASE * 2 + [30] + PHRASE[:8]
    assert propose(make_generator(), text, budget=budget)[0].num_drafted == budget
    (tree,) = propose(make_generator(draft_length=2), text, budget=budget)
    assert int(tree.depths.max()) == min(2, budget)


def test_shapes_and_width():
    head = PHRASE[:8]
    text = [token for other in (20, 23, 26) for token in [*head, other, other + 1, other + 2, other + 20]] + head
    (tree,) = propose(make_generator(), text, budget=32)
    assert {20, 23, 26} <= {int(tree.token_ids[node]) for node in tree.children(0)}
    assert len(propose(make_generator(tree_top_k=2), text)[0].children(0)) == 2
    (chain,) = propose(make_generator(tree_shape="chain"), text)
    assert chain.is_chain and chain.token_ids[1] == 26 and chain.num_drafted == 16
    (spine,) = propose(make_generator(tree_shape="spine_first"), text, budget=3)
    assert spine.is_chain and spine.tokens_of([1, 2, 3]) == [26, 27, 28]


def test_the_longest_match_can_be_limited():
    """The recent occurrence of two tokens counts as much as the earlier one of eight."""
    text = PHRASE + [50, 51] + PHRASE[6:8] + [40, 41, 42] + PHRASE[:8]
    assert propose(make_generator(), text)[0].token_ids[1] == PHRASE[8]
    assert propose(make_generator(max_matching_ngram_size=1), text)[0].log_probs[1] < math.log(0.7)


def test_rows_of_different_lengths():
    """Padding is no text, and each row draws on its own."""
    rows = [PHRASE + [30] + PHRASE[:8], PHRASE[::-1] + PHRASE[::-1][:5], list(range(20, 40)) * 2]
    generator = make_generator()
    for _ in range(3):
        for row, tree in zip(rows, propose(generator, *rows)):
            after = row[: len(row) - 4].index(row[-1]) + 1
            assert tree.best_chain().token_ids.tolist()[1:4] == row[after : after + 3]
            row += row[after : after + 2]


@pytest.mark.core
def test_another_sequence_starts_afresh():
    draw = random.Random(5)
    text = [draw.randrange(5) for _ in range(80)]
    generator = make_generator()
    for length in range(1, len(text)):
        propose(generator, text[:length])
    other = PHRASE * 2
    assert propose(generator, other)[0].token_ids[1] == PHRASE[0]
    assert generator._indices[0].tokens == other


def test_matches_that_mislead_are_trusted_less():
    """Each time the same 4 tokens come up, another one follows, and then the same one again and again."""
    generator, text = make_generator(tree_lookup="text"), [1, 2, 3, 4]
    best = []
    for novel in range(100, 160):
        text += [novel, 1, 2, 3, 4]
        best.append(float(propose(generator, text)[0].log_probs[1].exp()))
    assert best[0] > 0.5 and max(best[-20:]) < 0.3
    for _ in range(80):
        text += [5, 1, 2, 3, 4]
        tree = propose(generator, text)[0]
    assert tree.log_probs[1].exp() > 0.8


def test_trust_is_learned_from_the_prompt():
    """A prompt whose repetitions mislead is believed less than one whose repetitions are right."""
    believed = []
    for followed in (range(100, 140), [100] * 40):
        text = [token for novel in followed for token in (novel, 1, 2, 3, 4)]
        believed.append(float(propose(make_generator(tree_lookup="text"), text)[0].log_probs[1].exp()))
    assert believed[0] < 0.3 and believed[1] > 0.8


def said(trees, answers, vocab_size=64, paths=None):
    """A verified round in which the target predicts `answers[row][node]`."""
    longest = max(map(len, trees))
    logits = torch.zeros(len(trees), longest, vocab_size)
    for row, of_row in enumerate(answers):
        for node, token in enumerate(of_row):
            logits[row, node, token] = 12.0
    return VerifiedRound(trees, logits, paths or [[0] for _ in trees])


@pytest.mark.core
def test_what_the_target_said_of_rejected_nodes_is_drafted():
    generator = make_generator()
    prompt = [10, 11, 12]
    propose(generator, prompt)
    # After 12 came 20, not 40; but had it been 40, then 41 and 42 would have followed.
    tree = DraftTree.from_parents([12, 40, 41], [-1, 0, 1])
    generator.observe(said([tree], [[20, 41, 42]]))
    assert propose(generator, [*prompt, 20])[0].num_drafted > 0
    generator.observe(said([DraftTree.root_only(20)], [[40]]))
    (drafted,) = propose(generator, [*prompt, 20, 40])
    assert drafted.best_chain().token_ids.tolist()[1:3] == [41, 42]
    text = make_generator(tree_lookup="text")
    propose(text, prompt)
    text.observe(said([tree], [[20, 41, 42]]))
    assert 41 not in propose(text, [*prompt, 20, 40])[0].token_ids


def test_rounds_are_placed_behind_their_own_tokens():
    """Two rounds before the next draft, one of which accepted two nodes."""
    generator = make_generator()
    propose(generator, [10, 11])
    generator.observe(said([DraftTree.from_parents([11, 20, 21], [-1, 0, 1])], [[20, 21, 22]], paths=[[0, 1, 2]]))
    generator.observe(said([DraftTree.root_only(22)], [[23]]))
    contexts = []
    generator._tables.teach = lambda taught, *_: contexts.append(taught.tolist())
    propose(generator, [10, 11, 20, 21, 22, 23])
    assert contexts == [[[20, 21, 22], [-1, 10, 11], [10, 11, 20], [11, 20, 21]]]


def test_contexts_of_a_tree():
    tree = DraftTree.from_parents([3, 4, 5, 6], [-1, 0, 0, 2])
    assert contexts_of(tree, [1, 2]).tolist() == [[1, 2, 3], [2, 3, 4], [2, 3, 5], [3, 5, 6]]
    assert contexts_of(tree, []).tolist() == [[-1, -1, 3], [-1, 3, 4], [-1, 3, 5], [3, 5, 6]]


@pytest.mark.parametrize("vocab_size", [5, 64, 4096, 4100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_most_probable_tokens(vocab_size, dtype):
    logits = torch.randn(2, 3, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 1, :3] = -math.inf
    logits[1, 2] = math.nan
    probs, token_ids = most_probable(logits, 8)
    expected = logits.float().softmax(dim=-1).nan_to_num(0.0)
    best = expected.topk(min(8, vocab_size)).values
    assert torch.allclose(probs, best, atol=1e-6)
    assert torch.allclose(expected.gather(-1, token_ids), best, atol=1e-6)


# --- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in GRID if case[0] != "qwen3_5"], ids=" - ".join)
def test_grid(case):
    check_case(case, lambda model: {"tree_lookup": True, "tree_budget": 16})


@pytest.mark.core
@pytest.mark.parametrize("call", CALLS)
def test_grid_of_a_hybrid(call):
    check_case(("qwen3_5", call), lambda model: {"tree_lookup": True, "tree_budget": 9})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lookup", ["text", "target"])
def test_grid_of_one_source(lookup, call):
    check_case(("llama", call), lambda model: {"tree_lookup": lookup, "tree_budget": 12})


@pytest.mark.parametrize("call", CALLS)
def test_grid_with_a_drafter(call):
    check_case(
        ("qwen3_5", call),
        lambda model: {"tree_lookup": True, "assistant_model": make_drafter(model), "tree_budget": 7},
    )


class NowAndThen(OracleTreeCandidateGenerator):
    """Drafts nothing in two of three rounds."""

    def propose(self, context, budget):
        trees = super().propose(context, budget)
        if self._random.random() < 1 / 3:
            return trees
        return [DraftTree.root_only(int(tree.token_ids[0])) for tree in trees]


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_without_drafts(family):
    """They take the forward of standard decoding and leave what it leaves, for the rounds with drafts around them."""
    model = make_model(family, first_implementation(family))
    # Gemma 3n has hidden states of another form.
    options = {"max_new_tokens": 40, "return_dict_in_generate": True, "output_hidden_states": family != "gemma3n"}
    plain = model.generate(make_prompt(), **options)
    generator = NowAndThen(plain.sequences, VOCAB_SIZE)
    tree = model.generate(make_prompt(), **options, generation_strategy="ddtree", candidate_generator=generator)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert 0 in tree.ddtree_stats.tree_sizes and max(tree.ddtree_stats.tree_sizes) > 2
    assert_same_details(tree.hidden_states, plain.hidden_states)
    assert_same_cache(tree[CACHE_KEY], plain[CACHE_KEY])


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("through", ["keyword", "config", "model"])
def test_the_argument_of_transformers(family, through, monkeypatch):
    """It looks up as many tokens, on hybrids and in batches as well, which Transformers refuses."""
    model = make_model(family, "sdpa")
    prompt = torch.tensor([PHRASE * 2, PHRASE[::-1] * 2])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(prompt, **options)
    lookup = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 4, "tree_budget": 12}
    own = {"generation_strategy": "ddtree", "return_trees": True, "return_dict_in_generate": True}
    if through == "keyword":
        out = model.generate(prompt, **options, **own, **lookup)
    elif through == "config":
        config = GenerationConfig(**options, **own, **lookup)
        out = model.generate(prompt, generation_config=config)
        assert config.prompt_lookup_num_tokens == 3
    else:
        monkeypatch.setattr(model, "generation_config", GenerationConfig(**options, **own, **lookup))
        out = model.generate(prompt)
        assert model.generation_config.prompt_lookup_num_tokens == 3
    assert out.sequences.tolist() == plain.tolist()
    depths = [int(tree.depths.max()) for trees in out.ddtree_stats.trees for tree in trees]
    assert max(depths) == 3


@pytest.mark.core
def test_transformers_own_lookup_is_left_alone():
    model = make_model("llama", "sdpa")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(make_prompt(), **options)
    own = model.generate(make_prompt(), **options, prompt_lookup_num_tokens=3, max_matching_ngram_size=2)
    assert own.tolist() == plain.tolist()
    decoding = hf_ddtree.ddtree(tree_lookup=True, draft_length=3, max_matching_ngram_size=2)
    assert model.generate(make_prompt(), **options, custom_generate=decoding).tolist() == plain.tolist()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt_lookup_num_tokens": 3, "draft_length": 4}, ("`draft_length` is 4", "3")),
        ({"prompt_lookup_num_tokens": 3, "tree_lookup": False}, ("`tree_lookup` is False", "3")),
        ({"prompt_lookup_num_tokens": 0}, ("`prompt_lookup_num_tokens`", "0", "at least 1")),
        ({"prompt_lookup_num_tokens": float("nan")}, ("`prompt_lookup_num_tokens`", "nan", "at least 1")),
        ({"tree_lookup": "yes"}, ("`tree_lookup`", "'yes'", "True, False")),
        ({"tree_lookup": True, "max_matching_ngram_size": 0}, ("`max_matching_ngram_size`", "0", "at least 1")),
        ({"tree_lookup": False}, ("`assistant_model`", "`tree_lookup=True`")),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(ValueError) as raised:
        make_model("llama", "sdpa").generate(make_prompt(), generation_strategy="ddtree", **arguments)
    for word in words:
        assert word in str(raised.value)


def test_no_strategy():
    with pytest.raises(ValueError, match="`tree_lookup` is for tree decoding"):
        make_model("llama", "sdpa").generate(make_prompt(), tree_lookup=True)


def test_inside_assisted_decoding():
    """`get_candidates` returns the best chain, with nothing told before."""
    token_ids = torch.tensor([PHRASE + [30] + PHRASE[:8]])
    candidates, logits = make_generator().get_candidates(token_ids)
    assert logits is None
    assert candidates[0, token_ids.shape[1] :].tolist()[:5] == PHRASE[8:13]


# --- together with a drafter ----------------------------------------------------------------------------------------


class Fixed(TreeCandidateGenerator):
    """Proposes the same paths below whatever the root is."""

    def __init__(self, tokens, parents, log_probs):
        super().__init__()
        self._parts = tokens, parents, log_probs

    def propose(self, context, budget):
        tokens, parents, log_probs = self._parts
        return [
            DraftTree.from_parents([root, *tokens], [-1, *parents], [0.0, *log_probs]).truncate(budget)
            for root in context.input_ids[:, -1].tolist()
        ]


class FixedLookup(Fixed):
    """The same in place of a lookup."""

    repeats = False

    def build(self, context, budget, least_probability):
        return self.propose(context, budget)

    def take_in(self, context):
        pass


def test_a_budget_is_shared_by_probability():
    drafter = Fixed([50, 51, 52], [0, 1, 0], [-0.1, -3.0, -0.5])
    lookup = FixedLookup([50, 53, 54], [0, 1, 2], [-0.4, -0.6, -0.7])
    context = DraftContext(torch.tensor([[1, 2]]), [1])
    (tree,) = CombinedTreeCandidateGenerator(drafter, lookup).propose(context, 4)
    assert paths(tree) == [[50, 53, 54], [52]]
    assert tree.log_probs.tolist() == pytest.approx([0.0, -0.1, -0.5, -0.6, -0.7])
    chain = CombinedTreeCandidateGenerator(drafter, lookup, DDTreeConfig(tree_shape="chain"))
    assert paths(chain.propose(context, 4)[0]) == [[50, 53, 54]]


@pytest.mark.parametrize("seed", range(30))
def test_a_merged_tree_holds_the_paths_of_both(seed):
    one, other = random_tree(2 * seed), random_tree(2 * seed + 1)
    merged = one.merge(other)
    DraftTree.from_parents(merged.token_ids, merged.parents, merged.log_probs)
    expected = {}
    for tree in (one, other):
        for node in range(len(tree)):
            path = tuple(tree.tokens_of(tree.path(node)))
            expected[path] = max(expected.get(path, -math.inf), float(tree.log_probs[node]))
    got = {tuple(merged.tokens_of(merged.path(n))): float(merged.log_probs[n]) for n in range(len(merged))}
    assert got == expected


def random_tree(seed):
    draw = random.Random(seed)
    tokens, parents, log_probs = [0], [-1], [0.0]
    while len(tokens) < 14:
        parent, token = draw.randrange(len(tokens)), draw.randrange(1, 5)
        if (parent, token) not in zip(parents, tokens):
            tokens.append(token)
            parents.append(parent)
            log_probs.append(log_probs[parent] - draw.random())
    return DraftTree.from_parents(tokens, parents, log_probs)


@pytest.mark.core
def test_the_drafter_keeps_its_state_between_turns(monkeypatch):
    def propose_nothing(generator, context, budget, least_probability=0.0):
        return [DraftTree.root_only(root) for root in context.roots]

    monkeypatch.setattr(PromptLookupTreeCandidateGenerator, "build", propose_nothing)
    model = make_model("qwen3_5", "sdpa")
    drafter = make_drafter(model)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    trees = []
    for lookup in (False, True):
        ddtree = {"generation_strategy": "ddtree", "assistant_model": drafter, "tree_lookup": lookup}
        ddtree |= {"tree_budget": 8, "calibrate": False}
        first = model.generate(make_prompt(), **options, **ddtree)
        history = torch.cat((first.sequences, make_prompt(seed=1)), dim=1)
        state = {CACHE_KEY: first[CACHE_KEY], "draft_state": first.draft_state}
        second = model.generate(history, **options, **ddtree, **state, return_trees=True)
        trees.append(second.ddtree_stats.trees[0][0])
    # Where nothing is looked up, the drafts of the drafter tell what it knew.
    assert trees[0].token_ids.tolist() == trees[1].token_ids.tolist()
    assert trees[0].log_probs.tolist() == trees[1].log_probs.tolist()


class Dictated(LogitsProcessor):
    """Makes the target write a given text after its prompt."""

    def __init__(self, tokens, first):
        self._tokens, self._first = tokens, first

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -math.inf)
        forced[:, self._tokens[input_ids.shape[1] - self._first]] = 0.0
        return forced


def dictate(text, num_rows=1, **arguments):
    """Standard decoding and tree decoding of a dictated text, by a drafter and a lookup under 12 nodes."""
    model = make_model("qwen3_5", "sdpa")
    prompt = torch.cat([make_prompt(seed) for seed in range(num_rows)])
    options = {
        "max_new_tokens": len(text),
        "logits_processor": LogitsProcessorList([Dictated(text, prompt.shape[1])]),
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "eos_token_id": None,
    }
    plain = model.generate(prompt, **options)
    arguments = {"tree_lookup": True, "tree_budget": 12, "generation_strategy": "ddtree", **arguments}
    return plain, model.generate(prompt, **options, **arguments)


def text_of(length, seed=0):
    return random.Random(seed).choices(range(2, VOCAB_SIZE), k=length)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_the_drafter_is_not_asked_where_a_long_match_is_followed(num_rows):
    text = text_of(40)
    model = make_model("qwen3_5", "sdpa")
    plain, tree = dictate(text * 4, num_rows, assistant_model=make_drafter(model))
    assert tree.sequences.tolist() == plain.sequences.tolist()
    stats = tree.ddtree_stats
    assert stats.accepted_lengths[-2 * num_rows - 1] == 13
    skipped = stats.target_forwards - 1 - stats.draft_forwards
    assert 5 <= skipped <= 120 / 13 + 3, (skipped, stats.accepted_lengths)
    # Where the text repeats itself no more, the drafter has seen all of it.
    plain, tree = dictate(text * 3 + text_of(30, seed=1), num_rows, assistant_model=make_drafter(model))
    assert tree.sequences.tolist() == plain.sequences.tolist()
    stats = tree.ddtree_stats
    assert 5 <= stats.target_forwards - 1 - stats.draft_forwards < stats.target_forwards - 60


@pytest.mark.core
def test_a_later_branch_wins_where_the_drafter_is_not_asked(monkeypatch):
    """What follows a long repetition alternates, so the most recent match is wrong and an older one right."""
    monkeypatch.setattr(CombinedTreeCandidateGenerator, "_suffices", lambda *_: True)
    same, one, other = text_of(14), text_of(9, seed=1), text_of(9, seed=2)
    model = make_model("qwen3_5", "sdpa")
    text = (same + one + same + other) * 4
    plain, tree = dictate(text, assistant_model=make_drafter(model), return_trees=True, tree_budget=24)
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert_same_cache(tree[CACHE_KEY], plain[CACHE_KEY])
    stats = tree.ddtree_stats
    assert stats.draft_forwards < stats.rounds - 3
    branched = [
        number for number, [path] in enumerate(stats.accepted_paths) if number and path != list(range(len(path)))
    ]
    assert len(branched) >= 2, stats.accepted_paths


def test_a_drafter_of_the_users_is_always_asked():
    text = text_of(40)
    asked = []

    class Users(Fixed):
        def propose(self, context, budget):
            asked.append(context)
            return super().propose(context, budget)

    plain, tree = dictate(text * 3, candidate_generator=Users([5], [0], [-1.0]))
    assert tree.sequences.tolist() == plain.sequences.tolist()
    assert len(asked) == len(tree.ddtree_stats.accepted_lengths)


def test_a_lookup_that_adds_nothing_pauses(monkeypatch):
    """It learns in half of the rounds at most, what the target said where it said it, and resumes in time."""
    monkeypatch.setattr(combined, "LEAST_GAIN", 0.5)
    observed, roots = [], []
    observe, contexts = PromptLookupTreeCandidateGenerator.observe, prompt_lookup.contexts_of
    monkeypatch.setattr(
        PromptLookupTreeCandidateGenerator,
        "observe",
        lambda self, verified: observed.append(None) or observe(self, verified),
    )
    monkeypatch.setattr(
        prompt_lookup,
        "contexts_of",
        lambda tree, before: roots.append((*before[-2:], int(tree.token_ids[0]))) or contexts(tree, before),
    )
    text = text_of(150)
    plain, tree = dictate(text + text[:60], candidate_generator=Fixed([1], [0], [-0.1]))
    assert tree.sequences.tolist() == plain.sequences.tolist()
    lengths = tree.ddtree_stats.accepted_lengths
    assert len(observed) < 0.55 * len(lengths)
    whole = tree.sequences[0].tolist()
    assert set(roots) <= set(zip(whole, whole[1:], whole[2:]))
    assert lengths[-2] > 8, lengths
