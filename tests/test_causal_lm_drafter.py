"""Causal language models as drafters: the same tokens, the best tree, and a cache that is kept right."""

from __future__ import annotations

import copy
import functools
import heapq

import pytest
import torch
import transformers
from helpers.families import FAMILIES, SIZES, VOCAB_SIZE, first_implementation, make_config, make_model
from helpers.generator_grid import GRID, check_case, random_tokens
from helpers.noised import make_noised
from helpers.same_output import assert_same_cache
from helpers.side_by_side import make_prompt

import hf_ddtree
from hf_ddtree import CausalLMTreeCandidateGenerator, DDTreeConfig, DraftContext
from hf_ddtree.candidate_generators import causal_lm
from hf_ddtree.drafters.causal_lm.checkpoint import _check_vocab_size
from hf_ddtree.interop.versions import CACHE_KEY

SHAPES = ("best_first", "spine_first", "chain")


def model_of(family):
    return make_model(family, first_implementation(family))


@functools.cache
def drafter_of(family, noise=0.15):
    return make_noised(model_of(family), noise)


def generate(model, drafter, ids=None, **kwargs):
    arguments = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    arguments |= {"generation_strategy": "ddtree", "assistant_model": drafter, "tree_budget": 16}
    return model.generate(make_prompt() if ids is None else ids, **arguments | kwargs)


@pytest.mark.core
@pytest.mark.parametrize("case", GRID, ids=" - ".join)
def test_same_tokens(case):
    """With drafters of the same family, of another one, and of one that knows nothing."""
    index = GRID.index(case)
    family = (case[0], "qwen3_5", "gemma3")[index % 3]

    def make_drafts(model):
        drafter = drafter_of(family, noise=(0.15, 3.0)[index % 2])
        return {"assistant_model": drafter, "tree_budget": 8, "tree_shape": SHAPES[index // 3 % 3], "draft_length": 2}

    check_case(case, make_drafts)


# --- the drafter's cache --------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_that_is_the_target_is_always_right(family):
    """Any flaw in the drafter's cache would make it wrong at some point. The chain takes a forward per token."""
    model = model_of(family)
    out = generate(model, model, max_new_tokens=41, tree_shape="chain", draft_length=4)
    assert out.ddtree_stats.accepted_lengths == [5] * 8
    assert out.ddtree_stats.draft_forwards == 1 + 8 * 4


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("hole", [slice(0, 4), slice(3, 5)])
def test_rows_apart_with_padding(family, hole):
    """Padding in the middle is left out for the drafter, which is not quite what it is for the target."""
    model = model_of(family)
    ids = random_tokens(3, (3, 12), VOCAB_SIZE)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, hole] = 0, 0
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=31, do_sample=False, pad_token_id=0)
    out = generate(model, model, ids, attention_mask=mask, max_new_tokens=31, tree_shape="chain")
    assert out.sequences.tolist() == plain.tolist()
    if hole.start == 0:
        assert out.ddtree_stats.accepted_lengths == [6] * 15


@pytest.mark.core
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_the_cache_holds_what_was_accepted(family, shape):
    """After many rounds, other paths than the first child's among them: what a plain forward leaves."""
    model, drafter = model_of(family), copy.deepcopy(drafter_of(family))
    drafter.lm_head.weight.data *= 2  # surer of itself, for deeper trees
    generator = CausalLMTreeCandidateGenerator(drafter, model, DDTreeConfig(tree_shape=shape))
    kwargs = {"generation_strategy": "ddtree", "candidate_generator": generator, "return_dict_in_generate": True}
    kwargs["tree_budget"] = 16
    out = model.generate(make_prompt(), max_new_tokens=60, do_sample=False, return_trees=True, **kwargs)
    assert any(path != list(range(len(path))) for (path,) in out.ddtree_stats.accepted_paths)
    state = generator.state
    (cached,), (sequence,) = state.num_cached, state.sequences
    assert sequence.tolist() == out.sequences[0].tolist() and cached > 60
    with torch.no_grad():
        fresh = drafter(sequence[None, :cached], use_cache=True)[CACHE_KEY]
    assert_same_cache(state.model_kwargs[CACHE_KEY], fresh)


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("new_only", [False, True])
def test_a_chat_goes_on(family, new_only, monkeypatch):
    """The next turn's tokens enter the drafter in pieces, and nothing that it has seen enters it again."""
    monkeypatch.setattr(causal_lm, "TOKENS_AT_ONCE", 3)
    model = model_of(family)
    ids = random_tokens(1, (2, 9), VOCAB_SIZE)
    first = generate(model, model, ids, max_new_tokens=12, tree_shape="chain", eos_token_id=None)
    longer = torch.cat((first.sequences, random_tokens(2, (2, 8), VOCAB_SIZE)), dim=1)
    kwargs = {"max_new_tokens": 19, "eos_token_id": None, "attention_mask": torch.ones_like(longer)}
    plain = model.generate(longer, do_sample=False, **kwargs)[:, longer.shape[1] :]
    ids = longer[:, -9:] if new_only else longer
    state = {CACHE_KEY: first[CACHE_KEY], "draft_state": first.draft_state}
    with_state = generate(model, model, ids, tree_shape="chain", **kwargs, **copy.deepcopy(state))
    assert with_state.sequences[:, ids.shape[1] :].tolist() == plain.tolist()
    assert with_state.ddtree_stats.accepted_lengths == [6] * 6
    # Nine tokens and the root: three forwards of three, of which the last leads to the first level.
    assert 15 <= with_state.ddtree_stats.draft_forwards <= 19
    cold = generate(model, model, ids, tree_shape="chain", **kwargs, **copy.deepcopy(state) | {"draft_state": None})
    assert cold.sequences[:, ids.shape[1] :].tolist() == plain.tolist()
    other = generate(model, model, random_tokens(9, (2, 9), VOCAB_SIZE), max_new_tokens=20, tree_shape="chain")
    state["draft_state"] = other.draft_state
    foreign = generate(model, model, ids, tree_shape="chain", **kwargs, **copy.deepcopy(state))
    assert foreign.sequences[:, ids.shape[1] :].tolist() == plain.tolist()


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_the_cache_grows_in_place(family, monkeypatch):
    """What layers without a window hold is not copied from round to round."""
    model, places = model_of(family), []
    propose = CausalLMTreeCandidateGenerator.propose

    def watched(self, context, budget):
        trees = propose(self, context, budget)
        layers = self.state.model_kwargs[CACHE_KEY].layers
        places.append([layer.keys.data_ptr() for layer in layers if "update" in vars(layer)])
        return trees

    monkeypatch.setattr(CausalLMTreeCandidateGenerator, "propose", watched)
    generate(model, drafter_of(family), max_new_tokens=60, eos_token_id=None)
    assert len(places) > 15 and places[0] and all(now == places[0] for now in places)
    assert len(places[0]) == {"llama": 3, "gemma3": 1, "qwen3_5": 1}[family]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_an_ordinary_turn_after_inference_mode(family, is_interrupted):
    """Whatever its drafter's layers keep, which may not be written to any more."""
    model, drafter = model_of("llama"), drafter_of(family)
    with torch.inference_mode():
        first = generate(model, drafter, max_new_tokens=20, eos_token_id=None)
        if is_interrupted:
            context = DraftContext(first.sequences, [first.sequences.shape[1] - 1])
            generator = CausalLMTreeCandidateGenerator(drafter, model, state=first.draft_state)
            generator.propose(context, 8)
            assert generator.state.fed is not None
    seen = torch.cat((first.sequences.clone(), make_prompt(1)), dim=1)
    plain = model.generate(seen, do_sample=False, pad_token_id=0, max_new_tokens=20, eos_token_id=None)
    kwargs = {"max_new_tokens": 20, "eos_token_id": None, "attention_mask": torch.ones_like(seen)}
    state = {CACHE_KEY: first[CACHE_KEY], "draft_state": first.draft_state}
    second = generate(model, drafter, seen, **kwargs, **state)
    assert second.sequences.tolist() == plain.tolist()


# --- the tree -------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next", "olmo_hybrid"])
def test_the_tree_is_the_best_under_the_drafters_probabilities(family):
    """Against a search with a heap that runs the drafter anew on every prefix."""
    model, drafter = model_of(family), copy.deepcopy(drafter_of(family))
    drafter.lm_head.weight.data *= 2  # surer of itself, for deeper trees
    generator = CausalLMTreeCandidateGenerator(drafter, model, DDTreeConfig(tree_shape="best_first", draft_length=3))
    ids = random_tokens(5, (2, 14), VOCAB_SIZE)
    depths: list[int] = []
    for length in (10, 11, 14):
        trees = generator.propose(DraftContext(ids[:, :length], [length - 1] * 2), 12)
        for tree, row in zip(trees, ids[:, :length].tolist()):
            expected = best_prefixes(drafter, row, 12, 3)
            got = {tuple(tree.tokens_of(tree.path(node))[1:]): float(tree.log_probs[node]) for node in range(1, 13)}
            assert got == pytest.approx(expected, abs=1e-4)
            depths.append(int(tree.depths.max()))
    assert max(depths) == 3 or sum(depths) > 9


@torch.no_grad()
def best_prefixes(drafter, tokens, budget, depth):
    heap, taken = [(0.0, ())], {}
    while len(taken) <= budget:
        cost, prefix = heapq.heappop(heap)
        taken[prefix] = -cost
        if len(prefix) < depth:
            log_probs = drafter(torch.tensor([[*tokens, *prefix]])).logits[0, -1].log_softmax(dim=-1)
            for token, log_prob in enumerate(log_probs.tolist()):
                heapq.heappush(heap, (cost - log_prob, (*prefix, token)))
    del taken[()]
    return taken


# The oldest Transformers' own assisted decoding fails on sliding windows.
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.core), "gemma3"])
def test_no_fewer_tokens_a_forward_than_assisted_decoding(family):
    """The chain is Transformers' own, forward for forward; what has it as its spine accepts at least as much."""
    model, drafter = model_of(family), drafter_of(family, noise=0.05)
    drafter.generation_config.update(
        num_assistant_tokens=5, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    rounds = {"assisted": 0, "chain": 0, "spine_first": 0}
    drafts = dict(rounds)
    for seed in range(2):
        ids = make_prompt(seed)
        calls = {model: [], drafter: []}
        hooks = [
            module.register_forward_hook(lambda *_, of_module=of_module: of_module.append(1))
            for module, of_module in calls.items()
        ]
        assisted = model.generate(ids, max_new_tokens=32, do_sample=False, assistant_model=drafter)
        for hook in hooks:
            hook.remove()
        rounds["assisted"] += len(calls[model])
        drafts["assisted"] += len(calls[drafter])
        for shape in ("chain", "spine_first"):
            out = generate(model, drafter, ids, max_new_tokens=32, tree_shape=shape, draft_length=5)
            assert out.sequences.tolist() == assisted.tolist()
            # Both models take a forward for the prompt, which assisted decoding does together with the first round.
            rounds[shape] += out.ddtree_stats.target_forwards - 1
            drafts[shape] += out.ddtree_stats.draft_forwards - 1
    assert rounds["spine_first"] <= rounds["chain"] <= rounds["assisted"]
    # Five a round, and near the end no more than can still be emitted.
    assert drafts["spine_first"] <= drafts["chain"] <= 5 * rounds["chain"]
    if rounds["chain"] == rounds["assisted"]:
        assert drafts["chain"] == drafts["assisted"]


# --- what fits ------------------------------------------------------------------------------------------------------


def test_nothing_is_drawn():
    model = model_of("llama")
    generator = CausalLMTreeCandidateGenerator(drafter_of("qwen3_5"), model)
    before = torch.get_rng_state()
    generator.propose(DraftContext(make_prompt(), [9]), 8)
    assert torch.equal(torch.get_rng_state(), before)


def with_vocabulary(size):
    config = make_config("llama")
    config.vocab_size = size
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("size", [VOCAB_SIZE - 4, VOCAB_SIZE + 4])
def test_padded_vocabularies(size):
    """Tokens that the target does not have are never drafted, and those that the drafter lacks do no harm."""
    model, drafter = model_of("llama"), with_vocabulary(size)
    if size > VOCAB_SIZE:
        drafter.lm_head.weight.data[VOCAB_SIZE:] *= 100
    plain = model.generate(make_prompt(), max_new_tokens=40, do_sample=False)
    out = generate(model, drafter, return_trees=True)
    assert out.sequences.tolist() == plain.tolist()
    assert max(int(tree.token_ids.max()) for (tree,) in out.ddtree_stats.trees) < VOCAB_SIZE
    assert all(tree.num_drafted == 16 for (tree,) in out.ddtree_stats.trees[:10])


@pytest.mark.parametrize(("own", "others"), [(151643, 151936), (151936, 152064), (50304, 50688), (32000, 32001)])
def test_tables_of_one_tokenizer(own, others):
    """As they are published: padded to different sizes, or with a token added."""
    configs = [transformers.LlamaConfig(vocab_size=size) for size in (own, others)]
    _check_vocab_size(*configs, "drafter")
    _check_vocab_size(*configs[::-1], "drafter")


def test_drafter_in_another_dtype():
    model = model_of("qwen3")
    drafter = copy.deepcopy(model).to(torch.bfloat16)
    plain = model.generate(make_prompt(), max_new_tokens=40, do_sample=False)
    out = generate(model, drafter, tree_shape="chain")
    assert out.sequences.tolist() == plain.tolist()
    assert out.ddtree_stats.tokens_per_forward > 1.5


def test_a_drafter_for_shorter_sequences_drafts_as_long_as_it_can():
    """Learned positions end where the table ends."""
    model = model_of("llama")
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_positions=24, n_embd=16, n_layer=1, n_head=2)
    drafter = transformers.GPT2LMHeadModel(config).eval()
    plain = model.generate(make_prompt(), max_new_tokens=40, do_sample=False)
    out = generate(model, drafter, return_trees=True)
    assert out.sequences.tolist() == plain.tolist()
    drafted = [tree.num_drafted for (tree,) in out.ddtree_stats.trees]
    assert drafted[0] > 0 and drafted[-1] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_vocabulary(VOCAB_SIZE - 5), "`vocab_size` 59, the target 64, more apart than padding explains"),
        (lambda: with_vocabulary(VOCAB_SIZE + 5), "`vocab_size` 69, the target 64, more apart than padding explains"),
        (lambda: with_vocabulary(4000), "`vocab_size` 4000, the target 64.*universal assisted decoding"),
        (lambda: transformers.LlamaModel(make_config("llama")).eval(), "a LlamaModel, which has no output head"),
        (lambda: model_of("llama").train(False) and with_vocabulary(VOCAB_SIZE).train(), "is in training mode"),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=VOCAB_SIZE, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
            ).eval(),
            "must run on trees.*encoder-decoder",
        ),
        (
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4)
            ).eval(),
            "must run on trees.*MambaForCausalLM",
        ),
    ],
)
def test_drafters_that_do_not_fit(make, message):
    drafter = make()
    with pytest.raises(ValueError, match=message):
        generate(model_of("llama"), drafter)


def test_state_of_another_kind():
    model = model_of("llama")
    with pytest.raises(TypeError, match="`draft_state` must be .* but is a `list`"):
        generate(model, drafter_of("llama"), draft_state=[1])


def test_another_drafters_state_starts_anew():
    model = model_of("llama")
    first = generate(model, drafter_of("llama"), max_new_tokens=8)
    plain = model.generate(first.sequences, max_new_tokens=20, do_sample=False)
    state = {CACHE_KEY: first[CACHE_KEY], "draft_state": first.draft_state}
    out = generate(model, drafter_of("qwen3_5"), first.sequences, max_new_tokens=20, **state)
    assert out.sequences.tolist() == plain.tolist()


# --- loading --------------------------------------------------------------------------------------------------------


def test_load(tmp_path):
    model = model_of("llama")
    drafter_of("qwen3_5").save_pretrained(tmp_path)
    loaded = hf_ddtree.load_drafter(tmp_path, target_model=model)
    assert type(loaded) is type(model_of("qwen3_5")) and not loaded.training
    assert (loaded.dtype, loaded.device) == (model.dtype, model.device)
    plain = model.generate(make_prompt(), max_new_tokens=20, do_sample=False)
    assert generate(model, loaded, max_new_tokens=20).sequences.tolist() == plain.tolist()
    assert hf_ddtree.load_drafter(tmp_path, target_model=model, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_load_with_another_vocabulary(tmp_path):
    with_vocabulary(4000).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the checkpoint .* has `vocab_size` 4000, the target 64"):
        hf_ddtree.load_drafter(tmp_path, target_model=model_of("llama"))
    assert hf_ddtree.load_drafter(tmp_path).config.vocab_size == SIZES["vocab_size"] - VOCAB_SIZE + 4000


# --- inside Transformers' assisted decoding -------------------------------------------------------------------------


@pytest.mark.core
def test_get_candidates(monkeypatch):
    """What it knows of one sequence must not reach the next."""
    model = model_of("qwen3")
    generator = CausalLMTreeCandidateGenerator(drafter_of("qwen3_5"), model)
    monkeypatch.setattr(type(model), "_get_candidate_generator", lambda self, **_: generator, raising=False)
    for seed in range(2):
        arguments = {"max_new_tokens": 20, "do_sample": False}
        plain = model.generate(make_prompt(seed), **arguments)
        output = model.generate(make_prompt(seed), **arguments, prompt_lookup_num_tokens=1)
        assert output.tolist() == plain.tolist()
