"""What drafters are trained on: files, and what the target writes itself."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch
from helpers.families import VOCAB_SIZE, make_model
from transformers import AutoTokenizer

from hf_ddtree.demo import demo_folders
from hf_ddtree.training.data import read_documents, read_prompts
from hf_ddtree.training.self_text import write_answers

CHAT = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and not loop.last and forgets is defined %}..."
    "{% else %}{{ m.content }}{% endif %}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_folders()[0])


def write(path, *entries):
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries))
    return path


def counted(document, tokenizer):
    """The text, and the pieces of it that count."""
    pieces, within = [], False
    for token, counts in zip(document.token_ids.tolist(), document.is_counted.tolist()):
        if counts and not within:
            pieces.append([])
        if counts:
            pieces[-1].append(token)
        within = counts
    return tokenizer.decode(document.token_ids), [tokenizer.decode(piece) for piece in pieces]


def test_texts_and_responses(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "def f():"}, "", {"prompt": "x = ", "response": "1"})
    first, second = read_documents(path, tokenizer)
    assert counted(first, tokenizer) == ("def f():", ["def f():"])
    assert counted(second, tokenizer) == ("x = 1<|endoftext|>", ["1<|endoftext|>"])
    assert [tokenizer.decode(prompt) for prompt in read_prompts(path, tokenizer)] == ["def f():", "x = "]
    text = write(tmp_path / "b.txt", "one", "", "two")
    assert [tokenizer.decode(prompt) for prompt in read_prompts(text, tokenizer)] == ["one", "two"]
    assert tokenizer.decode(read_documents(text, tokenizer)[0].token_ids) == "one\n\ntwo"
    assert len(read_documents(tmp_path, tokenizer)) == 3


def test_the_assistant_s_words_count_alone(tokenizer, tmp_path):
    tokenizer.chat_template = CHAT
    path = write(tmp_path / "a.jsonl", {"messages": MESSAGES}, {"prompt": "p", "response": "r"})
    whole, simple = read_documents(path, tokenizer)
    text = (
        "user: one<|endoftext|>\nassistant: two<|endoftext|>\nuser: three<|endoftext|>\nassistant: four<|endoftext|>"
    )
    assert counted(whole, tokenizer) == (text, ["two<|endoftext|>", "four<|endoftext|>"])
    assert counted(simple, tokenizer) == ("user: p<|endoftext|>\nassistant: r<|endoftext|>", ["r<|endoftext|>"])
    prompts = [tokenizer.decode(prompt) for prompt in read_prompts(path, tokenizer)]
    assert prompts == [text.removesuffix("four<|endoftext|>"), "user: p<|endoftext|>\nassistant: "]


def test_a_template_that_changes_earlier_answers_makes_a_document_of_each(tokenizer, tmp_path):
    tokenizer.chat_template = CHAT
    path = write(tmp_path / "a.jsonl", {"messages": MESSAGES})
    first, second = read_documents(path, tokenizer, {"forgets": True})
    assert counted(first, tokenizer) == ("user: one<|endoftext|>\nassistant: two<|endoftext|>", ["two<|endoftext|>"])
    text, pieces = counted(second, tokenizer)
    assert "assistant: ...<|endoftext|>" in text and pieces == ["four<|endoftext|>"]


def test_wrong_lines_are_named(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "good"}, "{", {"other": 1}, {"text": " "}, {"messages": MESSAGES}, "3")
    with pytest.raises(ValueError) as raised:
        read_documents(path, tokenizer)
    lines = str(raised.value).splitlines()
    for line, number, reason in zip(
        lines,
        (2, 3, 4, 5, 6),
        (
            "no JSON",
            "none of `text`, `response`, `messages`, but 'other'",
            "`text` must be",
            "no chat template",
            "no object",
        ),
    ):
        assert line.startswith(f"{path}, line {number}: ") and reason in line, line
    assert len(lines) == 5
    skipped = []
    (document,) = read_documents(path, tokenizer, on_bad_line="skip", on_skip=skipped.append)
    assert tokenizer.decode(document.token_ids) == "good" and skipped == lines
    (tmp_path / "b.txt").write_bytes(b"good\n\xff\n")
    with pytest.raises(ValueError, match=r"b.txt, line 2: no UTF-8 \(byte 0xff at place 1\)"):
        read_prompts(tmp_path / "b.txt", tokenizer)
    with pytest.raises(ValueError, match="There is no file or folder 'missing.jsonl'"):
        read_prompts("missing.jsonl", tokenizer)


def test_datasets(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        read_prompts("someone/prompts", tokenizer)
    module = ModuleType("datasets")
    module.load_dataset = lambda name, split, streaming: [{"prompt": f"{name} {split} {streaming}"}, {"prompt": ""}]
    monkeypatch.setitem(sys.modules, "datasets", module)
    with pytest.raises(ValueError, match="someone/prompts:test, entry 2: `prompt` must be a text"):
        read_prompts("someone/prompts:test", tokenizer)
    (prompt,) = read_prompts("someone/prompts:test", tokenizer, on_bad_line="skip")
    assert tokenizer.decode(prompt) == "someone/prompts test True"


def test_answers_are_the_target_s_own_and_go_on(tmp_path):
    target = make_model("qwen3_5", "sdpa")
    prompts = [[(7 * number + place) % VOCAB_SIZE for place in range(3 + number)] for number in range(6)]
    settings = {"max_new_tokens": 9, "batch_size": 2, "sampled_share": 0.34}
    documents = write_answers(target, prompts, tmp_path / "a", **settings)
    assert [document.is_counted.sum() for document in documents] == [9] * 6
    lines = [json.loads(line) for line in (tmp_path / "a" / "answers-0.jsonl").read_text().splitlines()]
    assert [line["sampled"] for line in lines[1:]] == [False] * 4 + [True] * 2
    for prompt, document in list(zip(prompts, documents))[:4]:
        ids = torch.tensor([prompt])
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        assert document.token_ids.tolist() == plain[0].tolist()
    # Cut off in the middle of a line.
    path = tmp_path / "b" / "answers-0.jsonl"
    path.parent.mkdir()
    content = (tmp_path / "a" / "answers-0.jsonl").read_bytes()
    path.write_bytes(content[: len(content) // 2])
    seen = []
    again = write_answers(target, prompts, tmp_path / "b", on_progress=seen.append, **settings)
    assert [document.token_ids.tolist() for document in again] == [one.token_ids.tolist() for one in documents]
    assert 0 < len(seen) < 3 and seen[-1].done == 6 and seen[-1].seconds_left == 0
    with pytest.raises(ValueError, match="answers with other `max_new_tokens`"):
        write_answers(target, prompts, tmp_path / "b", **{**settings, "max_new_tokens": 8})
    with pytest.raises(ValueError, match="`sampled_share` must be between 0 and 1"):
        write_answers(target, prompts, tmp_path / "c", sampled_share=2)
