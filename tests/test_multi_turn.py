"""Chats whose turns continue from the cache, whoever filled it, with and without what the drafter knew."""

import contextlib
import copy
import itertools

import pytest
import torch
from helpers.families import VOCAB_SIZE, first_implementation, make_model
from helpers.random_drafter import make_drafter

from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.registration import register

FAMILIES = ["llama", "gemma3", "qwen3_5", "falcon_h1"]
NUM_TURNS = 5
NEW_TOKENS = 8
BUDGET = 24


@pytest.fixture(autouse=True, scope="module")
def registered():
    register()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return make_model(request.param, first_implementation(request.param))


def make_turns(batch_size=1, seed=0, lengths=(7, 1, 4, 11, 2)):
    """What the user says, as tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB_SIZE, (batch_size, length), generator=generator) for length in lengths]


def answer(model, input_ids, **kwargs):
    kwargs.setdefault("attention_mask", torch.ones_like(input_ids))
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return model.generate(input_ids, **arguments)


def by_tree(drafter, **kwargs):
    """What a drafter learns from a call is off, as drafts of different calls are compared."""
    arguments = {
        "generation_strategy": "ddtree",
        "assistant_model": drafter,
        "tree_budget": BUDGET,
        "calibrate": False,
    }
    return arguments | kwargs


def chat(model, turns, drafter, how, keeps_state=True, forms=("full",) * NUM_TURNS, pads=None):
    """Outputs and inputs of every turn. `how` and `forms` say, for each turn, who answers it and what it is given."""
    history = turns[0][:, :0]
    pads = torch.zeros(len(history), dtype=torch.long) if pads is None else pads
    cache, state, outputs = None, None, []
    for said, who, form in zip(turns, how, forms):
        history = torch.cat((history, said), dim=1)
        mask = (torch.arange(history.shape[1]) >= pads[:, None]).long()
        history = history * mask
        uncached = history.shape[1] - (0 if cache is None else cache.get_seq_length())
        inputs = history if form == "full" else history[:, -uncached:]
        kwargs = {"attention_mask": mask} | ({} if cache is None else {CACHE_KEY: cache})
        if who == "ddtree":
            kwargs |= by_tree(drafter, draft_state=state if keeps_state else None, return_trees=True)
        output = answer(model, inputs, **kwargs)
        history = torch.cat((history, output.sequences[:, inputs.shape[1] :]), dim=1)
        cache = output[CACHE_KEY]
        state = output.draft_state if who == "ddtree" else state
        outputs.append(output)
    return history, outputs


def without_cache(model, turns, pads=None):
    """The same chat by standard decoding of everything, from the start in every turn."""
    history = turns[0][:, :0]
    pads = torch.zeros(len(history), dtype=torch.long) if pads is None else pads
    for said in turns:
        history = torch.cat((history, said), dim=1)
        mask = (torch.arange(history.shape[1]) >= pads[:, None]).long()
        history = answer(model, history * mask, attention_mask=mask).sequences
    return history


@contextlib.contextmanager
def counting(model, drafter):
    """Counts what enters: the tokens of each of the target's forwards, and the context tokens of the drafter's."""
    entered = {"target": [], "drafter": []}

    def counter(name):
        return lambda module, args: entered[name].append(args[0].shape[1])

    hooks = [
        model.get_decoder().layers[0].register_forward_pre_hook(counter("target")),
        drafter.fc.register_forward_pre_hook(counter("drafter")),
    ]
    try:
        yield entered
    finally:
        for hook in hooks:
            hook.remove()


# --- the same tokens ------------------------------------------------------------------------------------------------

MIXES = {
    "all by tree": ["ddtree"] * 5,
    "plain first": ["plain", "ddtree", "ddtree", "plain", "ddtree"],
    "tree first": ["ddtree", "plain", "ddtree", "plain", "plain"],
}
FORMS = {
    "full": ["full"] * 5,
    "new": ["new"] * 5,
    "full and new": ["full", "new", "full", "full", "new"],
    "new and full": ["new", "full", "new", "new", "full"],
}
CHATS = [
    ("all by tree", "full"),
    ("all by tree", "new"),
    ("plain first", "full and new"),
    ("plain first", "new"),
    ("tree first", "full"),
    ("tree first", "new and full"),
]


@pytest.fixture(scope="module")
def expected(model):
    return without_cache(model, make_turns()).tolist()


@pytest.mark.core
@pytest.mark.parametrize("mix, form", CHATS)
def test_five_turns(model, expected, mix, form):
    """The tokens of standard decoding, and what is cached does not enter the target again."""
    drafter, turns = make_drafter(model), make_turns()
    for keeps_state in (True, False):
        with counting(model, drafter) as entered:
            history, outputs = chat(model, turns, drafter, MIXES[mix], keeps_state, FORMS[form])
        assert history.tolist() == expected
        stats = [output.ddtree_stats for output in outputs if "ddtree_stats" in output]
        assert sum(len(each.accepted_lengths) for each in stats) < len(stats) * (NEW_TOKENS - 1)

        prefills, forwards = [], iter(entered["target"])
        for output in outputs:
            rounds = output.ddtree_stats.target_forwards - 1 if "ddtree_stats" in output else NEW_TOKENS - 1
            prefills.append(next(forwards))
            assert max(itertools.islice(forwards, rounds)) <= BUDGET + 1
        assert next(forwards, None) is None
        # What the user said, and from the second turn on the answer's last token, which was not cached.
        assert prefills == [said.shape[1] + (turn > 0) for turn, said in enumerate(turns)]


@pytest.mark.core
@pytest.mark.parametrize("mix", ["all by tree", "plain first"])
def test_a_batch_padded_at_the_left(model, mix):
    drafter, turns, pads = make_drafter(model), make_turns(batch_size=3), torch.tensor([0, 5, 2])
    history, _ = chat(model, turns, drafter, MIXES[mix], pads=pads)
    assert history.tolist() == without_cache(model, turns, pads).tolist()


def test_every_mix_of_three_turns():
    """Who fills the cache makes no difference to who continues from it."""
    model = make_model("qwen3_5", "sdpa")
    drafter, turns = make_drafter(model), make_turns()[:3]
    expected = without_cache(model, turns)
    for how in itertools.product(("plain", "ddtree"), repeat=3):
        assert chat(model, turns, drafter, how)[0].tolist() == expected.tolist(), how


def test_seeded_sampling_through_a_chat(model):
    drafter, turns = make_drafter(model), make_turns()[:3]
    histories = []
    for who in ("plain", "ddtree"):
        torch.manual_seed(3)
        cache, history = None, turns[0][:, :0]
        for said in turns:
            history = torch.cat((history, said), dim=1)
            kwargs = {"do_sample": True, "temperature": 0.8} | ({} if cache is None else {CACHE_KEY: cache})
            output = answer(model, history, **kwargs, **(by_tree(drafter) if who == "ddtree" else {}))
            history, cache = output.sequences, output[CACHE_KEY]
        histories.append(history.tolist())
    assert histories[0] == histories[1]


# --- what the drafter knows -----------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("form", ["full", "new and full"])
def test_every_token_enters_the_drafter_once(model, form):
    drafter, turns = make_drafter(model), make_turns()
    with counting(model, drafter) as entered:
        history, outputs = chat(model, turns, drafter, ["ddtree"] * 5, forms=FORMS[form])
    state = outputs[-1].draft_state
    assert sum(entered["drafter"]) == state.cache.get_seq_length() + sum(state.num_features)
    assert sum(entered["drafter"]) == history.shape[1] - 1


def test_without_the_state_the_drafter_sees_the_turn_alone(model):
    drafter, turns = make_drafter(model), make_turns()
    with counting(model, drafter) as entered:
        chat(model, turns, drafter, ["ddtree"] * 5, keeps_state=False)
    assert sum(entered["drafter"]) == sum(said.shape[1] for said in turns) + 5 * NEW_TOKENS - 1


def same_trees(trees, others):
    """Whether two runs drafted the same in every round."""
    return len(trees) == len(others) and all(
        tree.token_ids.tolist() == other.token_ids.tolist() and tree.parents.tolist() == other.parents.tolist()
        for [tree], [other] in zip(trees, others)
    )


@pytest.mark.parametrize("kind, form", [("full_attention", "full"), ("sliding_attention", "full and new")])
def test_with_the_state_drafts_are_those_of_one_call_over_everything(model, kind, form):
    drafter, turns = make_drafter(model, kind), make_turns()
    history, outputs = chat(model, turns, drafter, ["ddtree"] * 5, forms=FORMS[form])
    prompt = history[:, :-NEW_TOKENS]
    at_once = answer(model, prompt, **by_tree(drafter, return_trees=True))
    assert at_once.sequences.tolist() == history.tolist()
    assert same_trees(outputs[-1].ddtree_stats.trees, at_once.ddtree_stats.trees)
    _, cold = chat(model, turns, drafter, ["ddtree"] * 5, keeps_state=False, forms=FORMS[form])
    assert not same_trees(cold[-1].ddtree_stats.trees, at_once.ddtree_stats.trees)


def test_a_long_new_turn_without_the_short_past():
    """There are more new tokens than cached ones, so their number alone does not tell what was passed."""
    model = make_model("llama", "sdpa")
    drafter, turns = make_drafter(model), make_turns(lengths=(3, 40))
    with counting(model, drafter) as entered:
        history, _ = chat(model, turns, drafter, ["ddtree"] * 2, forms=["new"] * 2)
    assert history.tolist() == without_cache(model, turns).tolist()
    assert sum(entered["drafter"]) == history.shape[1] - 1


def test_the_state_of_other_sequences_is_noticed(model):
    drafter = make_drafter(model)
    turns, others = make_turns()[:2], make_turns(seed=1)[:2]
    _, [first, second] = chat(model, turns, drafter, ["ddtree"] * 2)
    wrong = {
        "other tokens, as many": chat(model, others, drafter, ["ddtree"] * 2)[1][0].draft_state,
        "an earlier turn": answer(model, turns[0], max_new_tokens=5, **by_tree(drafter)).draft_state,
        "another batch size": answer(model, turns[0].repeat(2, 1), **by_tree(drafter)).draft_state,
    }
    prompt = torch.cat((first.sequences, turns[1]), dim=1)
    cached = answer(model, turns[0])[CACHE_KEY]
    for name, state in wrong.items():
        before = copy.deepcopy(state)
        kwargs = {CACHE_KEY: copy.deepcopy(cached)} | by_tree(drafter, draft_state=state, return_trees=True)
        with counting(model, drafter) as entered:
            got = answer(model, prompt, **kwargs)
        assert got.sequences.tolist() == second.sequences.tolist(), name
        assert sum(entered["drafter"]) <= turns[1].shape[1] + NEW_TOKENS, name
        assert got.draft_state is not state, name
        # It still belongs to its own sequences.
        assert state.root_positions == before.root_positions
        assert state.cache.get_seq_length() == before.cache.get_seq_length()
    kwargs = {CACHE_KEY: copy.deepcopy(cached)} | by_tree(drafter, return_trees=True)
    cold = answer(model, prompt, **kwargs)
    assert same_trees(got.ddtree_stats.trees, cold.ddtree_stats.trees)


def test_a_state_that_missed_a_plain_turn(model):
    """It knows less than the cache holds, so drafting starts cold."""
    drafter, turns = make_drafter(model), make_turns()
    with counting(model, drafter) as entered:
        history, outputs = chat(model, turns, drafter, ["ddtree", "plain", "ddtree"] + ["ddtree"] * 2)
    assert history.tolist() == without_cache(model, turns).tolist()
    last_context = outputs[-1].draft_state.cache.get_seq_length()
    seen = sum(said.shape[1] for said in turns[2:]) + 3 * NEW_TOKENS
    assert last_context + sum(outputs[-1].draft_state.num_features) == seen
    assert sum(entered["drafter"]) > last_context


def test_two_branches_from_copies_of_one_turn(model):
    """A copied cache with a copied state goes on like the original; the state alone is not enough to go wrong."""
    drafter, turns = make_drafter(model), make_turns()[:2]
    _, [first] = chat(model, turns[:1], drafter, ["ddtree"])
    prompt = torch.cat((first.sequences, turns[1]), dim=1)
    expected = answer(model, prompt).sequences.tolist()
    copies = [copy.deepcopy((first[CACHE_KEY], first.draft_state)) for _ in range(2)]
    used_up = copy.deepcopy(first[CACHE_KEY])
    runs = [answer(model, prompt, **{CACHE_KEY: cache}, **by_tree(drafter, draft_state=state, return_trees=True))
            for cache, state in copies]  # fmt: skip
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist() == expected
    assert same_trees(runs[0].ddtree_stats.trees, runs[1].ddtree_stats.trees)
    again = answer(model, prompt, **{CACHE_KEY: used_up}, **by_tree(drafter, draft_state=copies[0][1]))
    assert again.sequences.tolist() == expected
