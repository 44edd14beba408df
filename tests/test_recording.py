"""Recording what calls decode: what is written, what is never disturbed by it, and training on it."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from helpers.families import VOCAB_SIZE, make_model
from helpers.random_drafter import make_drafter
from helpers.side_by_side import make_oracle, make_prompt
from safetensors.torch import save_file
from transformers import GenerationConfig, TextStreamer

import hf_ddtree
from hf_ddtree.interop.versions import CACHE_KEY
from hf_ddtree.process_defaults import VARIABLE, to_variable
from hf_ddtree.recording import RecordingFolder, folder, record
from hf_ddtree.recording.folder import recorded_files, recording_folder
from hf_ddtree.recording.identity import fingerprint_of
from hf_ddtree.recording.record import Record, StoredRecord
from hf_ddtree.training import DrafterTrainer, Evaluator, PackedDocuments, TrainingConfig, new_drafter
from hf_ddtree.training.data import read_recorded
from hf_ddtree.training.target_features import TargetFeatures

NEW_TOKENS = 24


@pytest.fixture
def warned(monkeypatch):
    texts = []
    monkeypatch.setattr(folder, "logger", SimpleNamespace(warning=texts.append))
    return texts


def padded_prompts():
    """Two prompts, the first of them shorter."""
    prompts = torch.cat((make_prompt(1), make_prompt(2)))
    prompts[0, :4] = 0
    return {"input_ids": prompts, "attention_mask": (torch.arange(10) >= torch.tensor([[4], [0]])).long()}


def generate(model, **arguments):
    torch.manual_seed(0)
    return model.generate(**{"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | arguments)


def recorded(path):
    return [StoredRecord(file) for file in recorded_files(path)]


# --- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_output_and_record_are_those_of_standard_decoding(family, do_sample, tmp_path):
    model = make_model(family, "sdpa")
    drafter = make_drafter(model)
    plain = generate(model, inputs=make_prompt(), do_sample=do_sample)
    arguments = {"assistant_model": drafter, "generation_strategy": "ddtree", "do_sample": do_sample}
    to = RecordingFolder(tmp_path / "r", features=True)
    output = generate(model, inputs=make_prompt(), record_to=to, **arguments)
    assert output.tolist() == plain.tolist()
    (text,) = recorded(tmp_path / "r")
    assert text.token_ids.tolist() == plain[0].tolist() and text.prompt_length == 10
    assert (tmp_path / "r").stat().st_mode & 0o077 == 0


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "bamba"])
def test_features_are_the_target_s_own(family, tmp_path):
    """Of rows of several lengths, behind padding and along accepted branches, but for the rounding to bfloat16."""
    model = make_model(family, "sdpa")
    drafter = make_drafter(model)
    plain = generate(model, **padded_prompts())
    to = RecordingFolder(tmp_path, features=True)
    arguments = {"assistant_model": drafter, "generation_strategy": "ddtree", "return_dict_in_generate": True}
    output = generate(model, record_to=to, **padded_prompts(), **arguments)
    assert output.sequences.tolist() == plain.tolist()
    documents = read_recorded(tmp_path, model, drafter.config.target_layer_ids)
    assert [len(one) for one in documents] == [6 + NEW_TOKENS, 10 + NEW_TOKENS]
    with_features = TargetFeatures(model, drafter.config.target_layer_ids)
    for document in documents:
        document_alone = document.piece(0, len(document))
        document_alone.features = None
        own, _ = with_features(PackedDocuments([document_alone], len(document)).rows([0]))
        given = document.features(0, len(document))
        assert given.dtype == torch.bfloat16 and not given[-1].any()
        torch.testing.assert_close(given[:-1].float(), own[0, :-1], rtol=2**-8, atol=1e-5)
    with_features.close()


def test_features_of_accepted_branches(tmp_path):
    """An oracle hides the right tokens among others, so accepted paths are no prefixes of their trees."""
    model = make_model("qwen3_5", "sdpa")
    plain = generate(model, inputs=make_prompt())
    oracle = make_oracle(plain)
    oracle.feature_layers = (1, 2)
    to = RecordingFolder(tmp_path, features=True)
    output = generate(
        model,
        inputs=make_prompt(),
        candidate_generator=oracle,
        generation_strategy="ddtree",
        record_to=to,
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == plain.tolist() and output.ddtree_stats.tokens_per_forward > 1.5
    (document,) = read_recorded(tmp_path, model, (1, 2))
    given = document.features(0, len(document))
    document.features = None
    with closing(TargetFeatures(model, (1, 2))) as features:
        own, _ = features(PackedDocuments([document], len(document)).rows([0]))
    torch.testing.assert_close(given[:-1].float(), own[0, :-1], rtol=2**-8, atol=1e-5)


def test_rows_end_where_they_end(tmp_path):
    """In lockstep, as behind a streamer of one row, or independent: without the padding that follows a row's end."""
    model = make_model("llama", "sdpa")
    prompts = torch.cat((make_prompt(1), make_prompt(2), make_prompt(3)))
    plain = generate(model, inputs=prompts)
    end = int(plain[0, 16])
    plain = generate(model, inputs=prompts, eos_token_id=end)
    expected = [row[:10].tolist() + row[10:].tolist()[: _length(row[10:].tolist(), end)] for row in plain]
    for name, arguments in {"independent": {}, "lockstep": {"output_scores": True}}.items():
        generate(
            model,
            inputs=prompts,
            eos_token_id=end,
            tree_lookup=True,
            generation_strategy="ddtree",
            return_dict_in_generate=True,
            record_to=tmp_path / name,
            **arguments,
        )
        assert sorted(one.token_ids.tolist() for one in recorded(tmp_path / name)) == sorted(expected)


def _length(answer, end):
    return answer.index(end) + 1 if end in answer else len(answer)


def test_after_a_cache(tmp_path):
    """The features of an earlier call are not there; its tokens are if they are passed again."""
    model = make_model("llama", "sdpa")
    drafter = make_drafter(model)
    arguments = {"assistant_model": drafter, "generation_strategy": "ddtree", "return_dict_in_generate": True}
    first = generate(model, inputs=make_prompt(), **arguments)
    whole = torch.cat((first.sequences, make_prompt(5, 3)), dim=1)
    to = RecordingFolder(tmp_path / "whole", features=True)
    second = generate(model, inputs=whole, record_to=to, **{CACHE_KEY: first[CACHE_KEY]}, **arguments)
    (text,) = recorded(tmp_path / "whole")
    assert text.token_ids.tolist() == second.sequences[0].tolist() and text.feature_size == 0
    embeddings = model.get_input_embeddings()(make_prompt())
    generate(model, inputs_embeds=embeddings, record_to=tmp_path / "embeddings", **arguments)
    assert not (tmp_path / "embeddings").exists()


def test_without_a_drafter_tokens_alone(tmp_path):
    model = make_model("llama", "sdpa")
    to = RecordingFolder(tmp_path, features=True)
    out = generate(model, inputs=make_prompt(), tree_lookup=True, generation_strategy="ddtree", record_to=to)
    (document,) = read_recorded(tmp_path, model, (0, 2))
    assert document.features is None and document.token_ids.tolist() == out[0].tolist()
    assert document.is_counted.tolist() == [False] * 10 + [True] * NEW_TOKENS


def test_without_the_patch(tmp_path):
    model = make_model("llama", "sdpa")
    decoding = hf_ddtree.ddtree(tree_lookup=True, record_to=str(tmp_path))
    generate(model, inputs=make_prompt(), custom_generate=decoding)
    assert len(recorded(tmp_path)) == 1


# --- bounded --------------------------------------------------------------------------------------------------------


def text_of(number, length=20_000):
    return Record([number % VOCAB_SIZE] * length, 3, "f" * 64, f"text {number}")


def bytes_in(path):
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in path.iterdir() if file.suffix != ".lock")


MOST = 1 << 20


def write_texts(path, first):
    """By two threads, with a folder object each."""

    def write(start):
        to = RecordingFolder(path, MOST)
        for number in range(start, start + 8):
            to.add([text_of(number)])
            assert not to.is_off

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, (first, first + 100)))


def test_the_bound_holds_with_threads_and_processes(tmp_path):
    processes = [get_context("fork").Process(target=write_texts, args=(tmp_path, 1000 * place)) for place in range(2)]
    for process in processes:
        process.start()
    largest = 0
    while any(process.is_alive() for process in processes):
        with suppress(FileNotFoundError):  # went while it was looked at
            largest = max(largest, bytes_in(tmp_path))
    assert [process.exitcode for process in processes] == [0, 0]
    assert MOST // 2 < bytes_in(tmp_path) <= MOST and largest <= MOST
    assert not list(tmp_path.glob("*.partial"))
    assert {file.name for file in tmp_path.iterdir() if file.suffix != ".safetensors"} == {".lock", "size.json"}


def test_the_oldest_go(tmp_path):
    to = RecordingFolder(tmp_path, 1 << 20)
    for number in range(30):
        to.add([text_of(number)])
    names = [one.name for one in recorded(tmp_path)]
    assert names == [f"text {number}" for number in range(30 - len(names), 30)] and 9 < len(names) < 13
    (tmp_path / "size.json").write_text("?")  # counted anew
    (tmp_path / "1.safetensors.partial").write_bytes(bytes(1000))  # of a process that was killed
    to.add([text_of(30)])
    assert recorded(tmp_path)[-1].name == "text 30" and bytes_in(tmp_path) <= 1 << 20
    assert not list(tmp_path.glob("*.partial"))


def test_what_does_not_fit_at_all(tmp_path):
    """Features go first."""
    to = RecordingFolder(tmp_path, 1 << 20)
    features = torch.zeros(999, 1000, dtype=torch.bfloat16)
    to.add([Record([1] * 1000, 3, "f" * 64, "a", (0,), features)])
    (text,) = recorded(tmp_path)
    assert text.feature_size == 0 and len(text.token_ids) == 1000
    to.add([text_of(0, length=1 << 20)])
    assert len(recorded(tmp_path)) == 1


def test_a_file_takes_what_is_told(tmp_path):
    features = torch.zeros(99, 64, dtype=torch.bfloat16)
    text = Record([1] * 100, 3, "f" * 64, "\0" * 300, tuple(range(40)), features)
    text.write(tmp_path / "a.safetensors")
    size = (tmp_path / "a.safetensors").stat().st_size
    assert text.num_bytes - 2048 < size <= text.num_bytes


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("fault", ["a file in its place", "full", "locked"])
def test_a_disk_that_fails_costs_the_recording_alone(fault, tmp_path, warned, monkeypatch):
    model = make_model("llama", "sdpa")
    plain = generate(model, inputs=make_prompt())
    path = tmp_path / "r"
    if fault == "a file in its place":
        path.write_text("")
    elif fault == "full":

        def fail(tensors, path, metadata):
            path.write_bytes(bytes(10))
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(record, "save_file", fail)
    else:
        path.mkdir()
        monkeypatch.setattr(folder, "PATIENCE", 0.01)
        held = folder.FileLock(path / folder.LOCK)
        held.acquire()
    for _ in range(2):
        arguments = {"tree_lookup": True, "generation_strategy": "ddtree", "record_to": path}
        assert generate(model, inputs=make_prompt(), **arguments).tolist() == plain.tolist()
    assert len(warned) == 1 and "Nothing more is recorded to" in warned[0]
    assert path.is_file() or not recorded_files(path) and not list(path.glob("*.safetensors*"))


def test_an_offloaded_target_is_not_recorded(tmp_path, warned):
    model = make_model("llama", "sdpa")
    assert len(fingerprint_of(model)) == 64
    model.lm_head.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
    try:
        assert fingerprint_of(model) is None
    finally:
        make_model.cache_clear()


def test_a_call_that_fails_is_not_recorded(tmp_path):
    model = make_model("llama", "sdpa")

    class Leaves(TextStreamer):
        def __init__(self):
            self.left = 5

        def put(self, value):
            self.left -= 1
            if not self.left:
                raise ConnectionError

    arguments = {"tree_lookup": True, "generation_strategy": "ddtree", "record_to": tmp_path / "r"}
    with pytest.raises(ConnectionError):
        generate(model, inputs=make_prompt(), streamer=Leaves(), **arguments)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "given, message",
    [
        (3, "must be a folder or a `RecordingFolder`, but is a `int`"),
        ("", "must be a folder or a `RecordingFolder`, but is ''"),
        ({"path": "a", "max_bytes": 5}, "at least 1048576"),
        ({"path": "a", "features": 1}, "`features` must be True or False"),
        ({"folder": "a"}, "does not take"),
    ],
)
def test_wrong_values(given, message):
    with pytest.raises(ValueError, match=message):
        recording_folder(given)
    with pytest.raises(ValueError, match=message):
        to_variable(drafter="lookup", record_to=given)


# --- who may ask for it ---------------------------------------------------------------------------------------------


def test_the_process_s_default_and_no_request(tmp_path, monkeypatch):
    model = make_model("llama", "sdpa")
    monkeypatch.setenv(VARIABLE, to_variable(drafter="lookup", record_to={"path": str(tmp_path / "own")}))
    plain = generate(model, inputs=make_prompt(), generation_strategy="standard")
    assert not (tmp_path / "own").exists()
    assert generate(model, inputs=make_prompt()).tolist() == plain.tolist()
    assert recorded(tmp_path / "own")[0].token_ids.tolist() == plain[0].tolist()
    request = GenerationConfig(max_new_tokens=4, record_to=str(tmp_path / "theirs"))
    with pytest.raises(ValueError, match="`record_to` is set in a generation config"):
        model.generate(make_prompt(), generation_config=request)
    assert not (tmp_path / "theirs").exists()


# --- reading --------------------------------------------------------------------------------------------------------


def record_some(path, model, count=3, features=True, drafter=None, new_tokens=NEW_TOKENS):
    drafter = drafter or make_drafter(model)
    to = RecordingFolder(path, features=features)
    arguments = {"assistant_model": drafter, "generation_strategy": "ddtree", "max_new_tokens": new_tokens}
    for seed in range(count):
        generate(model, inputs=make_prompt(seed), record_to=to, **arguments)
    return drafter


def test_another_target_is_refused(tmp_path):
    model = make_model("llama", "sdpa")
    record_some(tmp_path, model)
    assert len(read_recorded(tmp_path, model)) == 3
    weight = model.model.layers[1].mlp.up_proj.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight *= 1.02
        with pytest.raises(ValueError, match="recorded with a target of other weights"):
            read_recorded(tmp_path, model)
        left_out = []
        with pytest.raises(ValueError, match="holds nothing that can be used"):
            read_recorded(tmp_path, model, on_bad_line="skip", on_skip=left_out.append)
        assert len(left_out) == 3
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    with pytest.raises(ValueError, match="recorded with a target of other weights"):
        read_recorded(tmp_path, make_model("qwen3_5", "sdpa"))


def test_features_that_do_not_fit_are_left(tmp_path):
    model = make_model("llama", "sdpa")
    drafter = record_some(tmp_path, model)
    fits = drafter.config.target_layer_ids
    assert all(one.features is not None for one in read_recorded(tmp_path, model, fits))
    assert all(one.features is None for one in read_recorded(tmp_path, model, [1, 2]))


HOSTILE = {
    "no format": ({}, {"format": "other"}),
    "no tokens": ({"token_ids": None}, {}),
    "negative tokens": ({"token_ids": torch.tensor([-1, 2], dtype=torch.int32)}, {}),
    "floats": ({"token_ids": torch.tensor([1.0, 2.0])}, {}),
    "unknown tokens": ({"token_ids": torch.tensor([1, VOCAB_SIZE], dtype=torch.int32)}, {}),
    "a longer prompt": ({}, {"prompt_length": "9"}),
    "a prompt of words": ({}, {"prompt_length": "many"}),
    "layers of words": ({}, {"layer_ids": '["a"]'}),
    "layers that are none": ({}, {"layer_ids": "3"}),
    "features of another type": ({"features": torch.zeros(1, 4)}, {}),
    "features of another length": ({"features": torch.zeros(5, 4, dtype=torch.bfloat16)}, {}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_that_nobody_recorded_are_named(name, tmp_path):
    model = make_model("llama", "sdpa")
    tensors, about = HOSTILE[name]
    tensors = {"token_ids": torch.tensor([1, 2], dtype=torch.int32)} | tensors
    usual = {
        "format": record.FORMAT,
        "prompt_length": "1",
        "target": fingerprint_of(model),
        "name": "",
        "layer_ids": "[]",
    }
    tensors = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    save_file(tensors, tmp_path / "a.safetensors", metadata=usual | about)
    with pytest.raises(ValueError, match=r"a\.safetensors: it holds"):
        read_recorded(tmp_path, model)
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"a\.safetensors: it holds no recorded text"):
        read_recorded(tmp_path, model)


def test_no_folder_and_nothing_in_it(tmp_path):
    model = make_model("llama", "sdpa")
    with pytest.raises(ValueError, match="There is no folder"):
        read_recorded(tmp_path / "none", model)
    with pytest.raises(ValueError, match="holds nothing that can be used"):
        read_recorded(tmp_path, model)


# --- training -------------------------------------------------------------------------------------------------------


def test_rows_of_known_and_unknown_features_are_the_target_s(tmp_path):
    """Texts without features, with them, and with a file that has gone meanwhile, packed together."""
    model = make_model("qwen3_5", "sdpa")
    drafter = record_some(tmp_path, model, 4)
    record_some(tmp_path, model, 2, features=False, drafter=drafter)
    layer_ids = drafter.config.target_layer_ids
    documents = read_recorded(tmp_path, model, layer_ids)
    assert [one.features is not None for one in documents] == [True] * 4 + [False] * 2
    os.unlink(recorded_files(tmp_path)[0])
    rows = PackedDocuments(documents, 50).rows(range(4))
    with closing(TargetFeatures(model, layer_ids)) as features:
        given, _ = features(rows)
        for document in documents:
            document.features = None
        expected, _ = features(PackedDocuments(documents, 50).rows(range(4)))
        by_target, logits = features(rows, with_logits=True)
    ends = torch.ones_like(rows.is_counted)  # the last token of a text is never read
    ends[:, :-1] = rows.documents[:, 1:] != rows.documents[:, :-1]
    torch.testing.assert_close(given[~ends], expected[~ends], rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(by_target, expected)
    assert logits is not None
    assert rows.is_known.any() and not rows.is_known.all()


@pytest.mark.parametrize("features", [True, False])
def test_training_on_what_was_recorded_lowers_the_held_out_loss(features, tmp_path, monkeypatch):
    target = make_model("qwen3_5", "sdpa")
    torch.manual_seed(0)
    drafter = new_drafter(target, VOCAB_SIZE - 1, "dflash", layers=1, block_size=4, window=40)
    record_some(tmp_path, target, 12, features, drafter)
    documents = read_recorded(tmp_path, target, drafter.config.target_layer_ids)
    evaluator = Evaluator(target, documents[:3], (8,))
    before = evaluator(drafter).negative_log_likelihood
    forwards = []
    counted = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    config = TrainingConfig(steps=30, rows=2, anchors=8, learning_rate=1e-2)
    DrafterTrainer(
        target, drafter, PackedDocuments(documents[3:], 40), config, accelerator=Accelerator(cpu=True)
    ).train()
    counted.remove()
    assert bool(forwards) is not features
    assert evaluator(drafter).negative_log_likelihood < before - 0.05


def test_the_settings_of_a_folder_are_shared_by_its_path(tmp_path):
    assert recording_folder(str(tmp_path)) is recording_folder(tmp_path)
    assert recording_folder({"path": str(tmp_path), "features": True}) is not recording_folder(tmp_path)
    assert json.loads(to_variable(record_to={"path": "a"}))["record_to"] == {"path": "a"}
    assert repr(RecordingFolder("/a")) == "RecordingFolder('/a', max_bytes=1073741824, features=False)"
