"""Where decoding stops, what it returns, and what streamers get: as in standard decoding, token by token."""

import string
import threading
from types import SimpleNamespace

import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.side_by_side import NEW_TOKENS, PROMPT_LENGTH, assert_equal, make_oracle, make_prompt, plain_and_tree
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import stopping_criteria

import hf_ddtree
from hf_ddtree.interop.versions import CACHE_KEY

FAMILIES = ["llama", "qwen3_5"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return make_model(request.param, "sdpa")


@pytest.fixture(scope="module")
def continuation(model):
    """What greedy decoding gives when nothing stops it."""
    return model.generate(make_prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)[0, PROMPT_LENGTH:].tolist()


@pytest.fixture(scope="module")
def tokenizer():
    """A letter a token, and tokens of two letters."""
    merges = [tuple(pair) for pair in ("XY", "Zx", "yZ", "TU", "tu", "vw", "Vw", "uT", "ij", "JI", "oP", "Qr")]
    words = [*string.ascii_letters, *map("".join, merges)]
    backend = Tokenizer(models.BPE({word: token for token, word in enumerate(words)}, merges))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def check_end(model, make_arguments, length=None):
    """Same output; and its `length` tokens end inside a path in one run at least, by 12 differently drafted ones."""
    plain, tree = plain_and_tree(model, make_arguments)
    assert_equal(plain, tree)
    if length is not None:
        assert plain.sequences.shape[1] == PROMPT_LENGTH + length
    # The cache holds every token but the last, as in standard decoding.
    assert getattr(tree, CACHE_KEY).get_seq_length() == getattr(plain, CACHE_KEY).get_seq_length()
    ends_inside = False
    for seed in range(12):
        output = model.generate(
            **{"inputs": make_prompt(), "max_new_tokens": NEW_TOKENS, "do_sample": False} | make_arguments(),
            generation_strategy="ddtree",
            candidate_generator=make_oracle(torch.cat((plain.sequences, make_prompt(seed)), dim=1), seed=seed),
            return_dict_in_generate=True,
            return_trees=True,
        )
        assert output.sequences.tolist() == plain.sequences.tolist()
        stats = output.ddtree_stats
        if stats.trees:
            tree, path = stats.trees[-1][0], stats.accepted_paths[-1][0]
            ends_inside |= tree.child_with_token(path[-1], int(output.sequences[0, -1])) is not None
    return ends_inside


# --- criteria -------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("at", [0, 1, 2, 5, 11, 20])
def test_end_token(model, continuation, at):
    eos = continuation[at]
    length = continuation.index(eos) + 1
    ends_inside = check_end(model, lambda: {"eos_token_id": eos, "pad_token_id": 0}, length)
    assert ends_inside or length == 1


@pytest.mark.parametrize("at", [(9, 4), (30, 14, 7)])
def test_several_end_tokens(model, continuation, at):
    eos = [continuation[index] for index in at]
    length = min(continuation.index(token) for token in eos) + 1
    assert check_end(model, lambda: {"eos_token_id": eos, "pad_token_id": 0}, length) or length == 1


def test_no_end_token(model):
    check_end(model, lambda: {"eos_token_id": None}, NEW_TOKENS)


@pytest.mark.core
@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 31])
def test_max_new_tokens(model, length):
    check_end(model, lambda: {"max_new_tokens": length}, length)


@pytest.mark.parametrize("length", [1, 4, 19])
def test_max_length(model, length):
    check_end(model, lambda: {"max_new_tokens": None, "max_length": PROMPT_LENGTH + length}, length)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
def test_default_length(model):
    plain = model.generate(make_prompt(), do_sample=False)
    tree = model.generate(
        make_prompt(), do_sample=False, generation_strategy="ddtree", candidate_generator=make_oracle(plain)
    )
    assert tree.tolist() == plain.tolist()


class StopsAtLength(StoppingCriteria):
    """Keeps what it saw."""

    def __init__(self, length):
        self.length, self.seen = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids[0].tolist(), None if scores is None else len(scores)))
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.core
@pytest.mark.parametrize("output_scores", [False, True])
def test_criteria_see_each_token_once_and_in_order(model, output_scores):
    criteria = []

    def arguments():
        criteria.append(StopsAtLength(PROMPT_LENGTH + 13))
        return {"stopping_criteria": [criteria[-1]], "output_scores": output_scores}

    plain, _ = plain_and_tree(model, arguments)
    sequence = plain.sequences[0].tolist()
    assert criteria[0].seen == criteria[1].seen
    assert criteria[1].seen == [
        (sequence[: PROMPT_LENGTH + count], count if output_scores else None) for count in range(1, 14)
    ]


class StopsWhenUnsure(StoppingCriteria):
    """Stops when the scores of the last token are flat, or those of the last three tokens together."""

    def __call__(self, input_ids, scores, **kwargs):
        top = torch.stack([step[0].softmax(-1).max() for step in scores])
        return torch.tensor([bool(len(top) > 5 and (top[-1] < 0.15 or top[-3:].sum() < 0.6))])


def test_criteria_that_look_at_scores():
    lengths = set()
    for family in FAMILIES:
        for seed in range(3):
            plain, tree = plain_and_tree(
                make_model(family, "sdpa"),
                lambda: {"stopping_criteria": [StopsWhenUnsure()], "do_sample": True, "top_k": 0},
                seed=seed,
                input_ids=make_prompt(seed),
            )
            assert_equal(plain, tree)
            lengths.add(plain.sequences.shape[1] - PROMPT_LENGTH)
    assert any(5 < length < NEW_TOKENS for length in lengths)


@pytest.mark.parametrize("seconds", [0.5, 4.5, 11.5])
def test_max_time(model, seconds, monkeypatch):
    """On a clock that advances one second each time that somebody looks."""
    clock = SimpleNamespace(now=0)

    def tick():
        clock.now += 1
        return clock.now

    monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=tick))
    plain, tree = plain_and_tree(model, lambda: {"max_time": seconds})
    assert_equal(plain, tree)
    assert plain.sequences.shape[1] == PROMPT_LENGTH + int(seconds) + 1


# --- stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["keyword", "generation_config", "model.generation_config"])
@pytest.mark.parametrize("at", [1, 6, 17])
def test_stop_strings(model, continuation, tokenizer, at, where, monkeypatch):
    # The string begins with the last letter of one token and ends with the first letter of the next.
    first, second = tokenizer.convert_ids_to_tokens(continuation[at : at + 2])
    stop_string = first[-1] + second[0]
    arguments = {"tokenizer": tokenizer}
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, stop_strings=[stop_string], pad_token_id=0)
    if where == "keyword":
        arguments["stop_strings"] = stop_string
    elif where == "generation_config":
        arguments["generation_config"] = config
    else:
        monkeypatch.setattr(model, "generation_config", config)
    plain, tree = plain_and_tree(model, lambda: arguments)
    assert_equal(plain, tree)
    assert plain.sequences.shape[1] <= PROMPT_LENGTH + at + 2
    assert config.stop_strings == [stop_string]


def test_stop_strings_and_other_criteria(model, continuation, tokenizer):
    late, early = tokenizer.decode(continuation[-3:-1]), StopsAtLength(PROMPT_LENGTH + 2)
    arguments = {"tokenizer": tokenizer, "stop_strings": late, "stopping_criteria": [early]}
    plain, tree = plain_and_tree(model, lambda: arguments)
    assert_equal(plain, tree)
    assert arguments["stopping_criteria"] == [early]


def test_stop_strings_with_custom_generate(model, continuation, tokenizer):
    arguments = {
        "tokenizer": tokenizer,
        "stop_strings": [tokenizer.decode(continuation[6:8])],
        "max_new_tokens": NEW_TOKENS,
    }
    plain = model.generate(make_prompt(), **arguments)
    decoding = hf_ddtree.ddtree(candidate_generator=make_oracle(plain))
    assert model.generate(make_prompt(), custom_generate=decoding, **arguments).tolist() == plain.tolist()


def test_stop_strings_without_tokenizer(model):
    """Transformers says what is missing."""
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(
            make_prompt(),
            max_new_tokens=4,
            stop_strings="a5",
            generation_strategy="ddtree",
            candidate_generator=make_oracle(make_prompt()),
        )


def test_a_tokenizer_that_nothing_needs(model, tokenizer):
    assert_equal(*plain_and_tree(model, lambda: {"tokenizer": tokenizer}))


# --- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("asked", [(), ("output_scores",), ("output_logits",), ("output_scores", "output_logits")])
def test_scores_and_logits(model, do_sample, asked):
    names = ("output_scores", "output_logits")
    arguments = {name: name in asked for name in names} | {
        "do_sample": do_sample,
        "eos_token_id": 5,
        "pad_token_id": 0,
        "repetition_penalty": 1.3,
    }
    plain, tree = plain_and_tree(model, lambda: arguments)
    assert_equal(plain, tree)
    for name in names:
        steps = getattr(tree, name.removeprefix("output_"))
        assert (steps is not None) == (name in asked)
        if steps is not None:
            assert isinstance(steps, tuple) and len(steps) == tree.sequences.shape[1] - PROMPT_LENGTH
            assert all(step.shape == (1, VOCAB_SIZE) for step in steps)


def test_transition_scores(model):
    plain, tree = plain_and_tree(model, dict)
    expected, got = (
        model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
        for output in (plain, tree)
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.core
def test_output_without_dict(model):
    plain = model.generate(make_prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)
    tree = model.generate(
        make_prompt(),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        generation_strategy="ddtree",
        candidate_generator=make_oracle(plain),
    )
    assert type(tree) is torch.Tensor and tree.dtype == plain.dtype and tree.tolist() == plain.tolist()


@pytest.mark.core
def test_statistics(model):
    plain, tree = plain_and_tree(model, lambda: {"output_scores": False})
    stats = tree.ddtree_stats
    assert stats.target_forwards == 1 + len(stats.accepted_lengths) < NEW_TOKENS
    # The prefill's token, and those of the rounds, the last of which may have been cut short.
    assert 1 + sum(stats.accepted_lengths) == NEW_TOKENS
    assert len(stats.tree_sizes) == len(stats.accepted_lengths) and max(stats.tree_sizes) <= 16
    assert set(stats.stage_seconds) == {"draft", "build", "verify", "accept", "commit"}
    assert stats.trees is stats.accepted_paths is None
    assert "ddtree_stats" not in plain


def test_returned_trees_tell_what_was_emitted(model):
    plain = model.generate(make_prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)
    output = model.generate(
        make_prompt(),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        generation_strategy="ddtree",
        candidate_generator=make_oracle(plain),
        return_trees=True,
        return_dict_in_generate=True,
    )
    emitted = []
    for (tree,), (path,) in zip(output.ddtree_stats.trees, output.ddtree_stats.accepted_paths):
        assert path == tree.path(path[-1])
        emitted += tree.tokens_of(path)
    assert emitted == plain[0, PROMPT_LENGTH:-1].tolist()


def test_the_prompt_is_left_alone(model):
    prompt = make_prompt()
    plain, tree = plain_and_tree(model, dict, input_ids=prompt)
    assert prompt.tolist() == make_prompt().tolist()
    assert tree.sequences.data_ptr() != prompt.data_ptr()


# --- streamers ------------------------------------------------------------------------------------------------------


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append((tuple(value.shape), value.dtype, value.flatten().tolist()))

    def end(self):
        self.pieces.append("end")


@pytest.mark.core
@pytest.mark.parametrize("eos_at", [None, 7])
def test_streamers_get_the_pieces_of_plain_decoding(model, continuation, eos_at):
    recorders = []

    def arguments():
        recorders.append(Recorder())
        eos = None if eos_at is None else continuation[eos_at]
        return {"streamer": recorders[-1], "eos_token_id": eos, "pad_token_id": 0}

    plain_and_tree(model, arguments)
    assert recorders[0].pieces == recorders[1].pieces
    assert recorders[1].pieces[-1] == "end" and len(recorders[1].pieces) > 3


def test_streamers_with_custom_generate(model):
    """Given to `generate()`, or to `ddtree`, or to both."""
    expected = Recorder()
    plain = model.generate(make_prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, streamer=expected)
    for to_ddtree in (False, True):
        streamer = Recorder()
        decoding = hf_ddtree.ddtree(candidate_generator=make_oracle(plain), streamer=streamer if to_ddtree else None)
        model.generate(
            make_prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, streamer=streamer, custom_generate=decoding
        )
        assert streamer.pieces == expected.pieces


def test_text_streamer(model, tokenizer, capsys):
    printed = []

    def arguments():
        printed.append(capsys.readouterr().out)
        return {"streamer": TextStreamer(tokenizer, skip_prompt=True)}

    plain_and_tree(model, arguments)
    assert printed[1] == capsys.readouterr().out != ""


def test_iterator_streamer_in_a_thread(model, tokenizer):
    texts = []
    plain = None
    for strategy in (None, "ddtree"):
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        kwargs = {"inputs": make_prompt(), "max_new_tokens": NEW_TOKENS, "do_sample": False, "streamer": streamer}
        if strategy is not None:
            kwargs |= {"generation_strategy": strategy, "candidate_generator": make_oracle(plain)}
        result = []
        thread = threading.Thread(target=lambda kwargs=kwargs, result=result: result.append(model.generate(**kwargs)))
        thread.start()
        texts.append(list(streamer))
        thread.join()
        plain = result[0]
    assert texts[0] == texts[1]
