"""Streamers of Transformers: the pieces of standard decoding, once they are known, whatever a consumer does."""

import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from helpers.side_by_side import NEW_TOKENS, make_oracle, make_prompt
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer

import hf_ddtree
from hf_ddtree.testing import OracleTreeCandidateGenerator


@pytest.fixture(scope="module")
def pair():
    return hf_ddtree.load_demo()


@pytest.fixture(scope="module", params=["def read(path):\n", "# Grüße, 你好\nclass A:\n"])
def call(request, pair):
    """Makes the arguments of a call, by tree or not; its text has letters, symbols, line ends and other scripts."""
    model, drafter, tokenizer = pair
    inputs = tokenizer(request.param, return_tensors="pt")
    plain = {**inputs, "max_new_tokens": 40, "do_sample": False}
    by_tree = {"generation_strategy": "ddtree", "assistant_model": drafter}
    return lambda is_by_tree: plain | by_tree if is_by_tree else plain


def in_thread(function, **kwargs):
    """Starts a thread; its result or error is appended to the returned list."""
    results = []

    def run():
        try:
            results.append(function(**kwargs))
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


# --- the same pieces ------------------------------------------------------------------------------------------------


class Pieces(TextStreamer):
    """Keeps what the streamer would print."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pieces = []

    def on_finalized_text(self, text, stream_end=False):
        self.pieces.append((text, stream_end))


@pytest.mark.core
@pytest.mark.parametrize("options", [{}, {"skip_prompt": True}, {"skip_prompt": True, "skip_special_tokens": True}])
def test_text_streamer(pair, call, options):
    model, _, tokenizer = pair
    streamers = [Pieces(tokenizer, **options) for _ in range(2)]
    for by_tree, streamer in enumerate(streamers):
        output = model.generate(**call(bool(by_tree)), streamer=streamer)
    assert streamers[1].pieces == streamers[0].pieces
    text = "".join(piece for piece, _ in streamers[1].pieces)
    start = call(False)["input_ids"].shape[1] if "skip_prompt" in options else 0
    assert text == tokenizer.decode(output[0, start:], skip_special_tokens="skip_special_tokens" in options)
    assert [end for _, end in streamers[1].pieces].count(True) == 1


def test_printed_text(pair, call, capsys):
    model, _, tokenizer = pair
    printed = []
    for by_tree in (False, True):
        model.generate(**call(by_tree), streamer=TextStreamer(tokenizer))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != ""


@pytest.mark.core
@pytest.mark.parametrize("skip_prompt", [False, True])
def test_iterator_in_a_thread(pair, call, skip_prompt):
    model, _, tokenizer = pair
    pieces = []
    for by_tree in (False, True):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=60)
        thread, results = in_thread(model.generate, **call(by_tree), streamer=streamer)
        pieces.append(list(streamer))
        thread.join(60)
        assert torch.is_tensor(results[0])
    assert pieces[0] == pieces[1] and len(pieces[1]) > 10


def test_async_iterator(pair, call):
    model, _, tokenizer = pair

    async def consume(by_tree):
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        thread, _ = in_thread(model.generate, **call(by_tree), streamer=streamer)
        pieces = [piece async for piece in streamer]
        await asyncio.to_thread(thread.join, 60)
        return pieces

    pieces = [asyncio.run(consume(by_tree)) for by_tree in (False, True)]
    assert pieces[0] == pieces[1] and len(pieces[1]) > 10


# --- when they come -------------------------------------------------------------------------------------------------


class Log:
    """A streamer that notes what came when."""

    def __init__(self, events):
        self.events = events

    def put(self, value):
        self.events.append(("put", tuple(value.shape), value.flatten().tolist()))

    def end(self):
        self.events.append(("end",))


class Logging(hf_ddtree.TreeCandidateGenerator):
    """Drafts what an oracle drafts, and notes it."""

    def __init__(self, oracle, events):
        super().__init__()
        self.oracle, self.events = oracle, events

    def propose(self, context, budget):
        self.events.append(("draft",))
        return self.oracle.propose(context, budget)


@pytest.mark.core
def test_the_first_piece_comes_before_anything_is_drafted():
    model = make_model("qwen3_5", "sdpa")
    plain = model.generate(make_prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)
    events = []
    model.generate(
        make_prompt(),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        generation_strategy="ddtree",
        candidate_generator=Logging(make_oracle(plain), events),
        streamer=Log(events),
    )
    kinds = [event[0] for event in events]
    assert kinds[:3] == ["put", "put", "draft"]  # the prompt, the prefill's token
    # Each round's tokens come before the next is drafted; some rounds have several.
    assert kinds.count("put") == 1 + NEW_TOKENS and 3 < kinds.count("draft") < NEW_TOKENS - 5
    assert kinds[-2:] == ["put", "end"] and kinds.count("end") == 1
    assert [token for event in events if event[0] == "put" for token in event[2]] == plain[0].tolist()


@pytest.mark.core
def test_a_streamer_of_a_batch():
    """Rows finish at different times and are padded from then on."""
    model = make_model("qwen3_5", "sdpa")
    prompts = torch.cat([make_prompt(seed) for seed in range(3)])
    arguments = {"inputs": prompts, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    free = model.generate(**arguments)
    arguments["eos_token_id"] = [int(free[0, prompts.shape[1] + 3]), int(free[1, prompts.shape[1] + 7])]
    logs = [[], []]
    plain = model.generate(**arguments, streamer=Log(logs[0]))
    oracle = OracleTreeCandidateGenerator(plain, VOCAB_SIZE)
    tree = model.generate(**arguments, streamer=Log(logs[1]), generation_strategy="ddtree", candidate_generator=oracle)
    assert tree.tolist() == plain.tolist()
    assert logs[1] == logs[0] and logs[1][1][1] == (3,)


# --- consumers that give up -----------------------------------------------------------------------------------------


def test_an_abandoned_iterator_does_not_hang_the_producer(pair, call):
    model, _, tokenizer = pair
    expected = model.generate(**call(False))
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    thread, results = in_thread(model.generate, **call(True), streamer=streamer)
    next(streamer)
    thread.join(60)
    assert not thread.is_alive() and results[0].tolist() == expected.tolist()


def test_an_event_loop_that_is_gone_is_an_error_and_not_a_hang(pair, call):
    model, _, tokenizer = pair

    async def give_up():
        return AsyncTextIteratorStreamer(tokenizer)

    streamer = asyncio.run(give_up())
    for by_tree in (False, True):
        thread, results = in_thread(model.generate, **call(by_tree), streamer=streamer)
        thread.join(60)
        assert not thread.is_alive() and isinstance(results[0], RuntimeError)


def test_a_full_queue_times_out_and_leaves_no_trace(pair, call):
    model, drafter, tokenizer = pair
    expected = model.generate(**call(False))
    streamer = TextIteratorStreamer(tokenizer, timeout=0.2)
    streamer.text_queue = queue.Queue(maxsize=6)
    thread, results = in_thread(model.generate, **call(True), streamer=streamer)
    thread.join(60)
    assert not thread.is_alive() and isinstance(results[0], queue.Full)
    assert not any(module._forward_hooks for module in model.modules())
    assert model.generate(**call(True)).tolist() == expected.tolist()


@pytest.mark.parametrize("by_tree", [False, True])
def test_a_call_that_fails_in_a_thread_can_end_its_stream(pair, call, by_tree):
    """As the page on troubles says."""
    model, _, tokenizer = pair
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    wrong = {"tree_budget": 0} if by_tree else {"max_new_tokens": 0}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(model.generate, **call(by_tree) | wrong, streamer=streamer)
        running.add_done_callback(lambda running: running.exception() and streamer.end())
        assert "".join(streamer).strip() == ""
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be"):
            running.result()


def test_a_consumer_that_waits_in_vain_times_out(pair, call):
    model, _, tokenizer = pair
    streamer = TextIteratorStreamer(tokenizer, timeout=0.2)
    go_on = threading.Event()

    class Slow(hf_ddtree.TreeCandidateGenerator):
        def propose(self, context, budget):
            go_on.wait(60)
            return [hf_ddtree.DraftTree.root_only(int(context.input_ids[0, -1]))]

    arguments = call(True) | {"assistant_model": None, "candidate_generator": Slow()}
    thread, results = in_thread(model.generate, **arguments, streamer=streamer)
    with pytest.raises(queue.Empty):
        list(streamer)
    go_on.set()
    thread.join(60)
    assert not thread.is_alive() and torch.is_tensor(results[0])
