"""Texts and prompts from files, or from datasets of the Hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..recording.folder import recorded_files
from ..recording.identity import fingerprint_of
from ..recording.record import StoredRecord
from ..validation import reason_of, shortened
from .documents import Document

# Files of a folder.
SUFFIXES = (".jsonl", ".txt")
# Wrong lines that an error shows.
MOST_SHOWN = 5
Made = TypeVar("Made")
OnBadLine = Literal["raise", "skip"]


def read_documents(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    template_options: Mapping[str, Any] | None = None,
    on_bad_line: OnBadLine = "raise",
    on_skip: Callable[[str], None] | None = None,
) -> list[Document]:
    """Texts to train on as they are.

    Args:
        source: A JSONL file with an object per line: `text`, all of which counts; `prompt` and `response`, or
            `messages` with `role` and `content`, of which what the model says counts, in its chat template. Any other
            file is one text. Or a folder of `.jsonl` and `.txt` files, or a dataset of the Hub, `NAME` or
            `NAME:SPLIT`, which needs the package `datasets`.
        tokenizer: The target's.
        template_options: Arguments of its chat template, such as `{"enable_thinking": False}`.
        on_bad_line: Whether a line that cannot be used is an error, or is left out.
        on_skip: Called with what is wrong with each line that is left out.

    Raises:
        ValueError: If there is no such file, no text in it, or a line that cannot be used; the message names file and
            line.
        ImportError: If `datasets` is needed and not installed.
    """

    def made_of(entry: Any) -> list[Document]:
        if isinstance(entry, str):
            return [Document(_ids(tokenizer, entry))]
        return _documents_of(entry, tokenizer, template_options or {})

    found = _read(source, made_of, whole_files=True, on_bad_line=on_bad_line, on_skip=on_skip)
    return [document for documents in found for document in documents]


def read_prompts(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    template_options: Mapping[str, Any] | None = None,
    on_bad_line: OnBadLine = "raise",
    on_skip: Callable[[str], None] | None = None,
) -> list[list[int]]:
    """Prompts for the target to answer, as tokens, in its chat template if it has one.

    Args:
        source: As of `read_documents`; an object holds `prompt`, `text` or `messages`, of which what the model says
            last is left out. In any other file than JSONL, each line that is not blank is a prompt.
        tokenizer, template_options, on_bad_line, on_skip: As of `read_documents`.

    Raises:
        ValueError, ImportError: As `read_documents`.
    """

    def made_of(entry: Any) -> list[int]:
        if isinstance(entry, str):
            entry = {"prompt": entry}
        return _prompt_of(entry, tokenizer, template_options or {})

    return _read(source, made_of, whole_files=False, on_bad_line=on_bad_line, on_skip=on_skip)


def read_recorded(
    folder: str | Path,
    target_model: PreTrainedModel,
    layer_ids: Sequence[int] = (),
    on_bad_line: OnBadLine = "raise",
    on_skip: Callable[[str], None] | None = None,
) -> list[Document]:
    """What `generate(..., record_to=folder)` or a server has recorded: prompts with their answers, which alone count.

    Args:
        folder: The folder. Others may go on writing into it.
        target_model: The target, with the weights that it was recorded with; other weights mean other answers.
        layer_ids: The layers that the drafter reads. Where their outputs were recorded, documents have them as
            `features`, which are read when they are needed.
        on_bad_line: Whether a file that cannot be used, of another target among them, is an error, or is left out.
        on_skip: Called with what is wrong with each file that is left out.

    Raises:
        ValueError: If there is no such folder, nothing in it, or a file that cannot be used.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"There is no folder {str(folder)!r}.")
    fingerprint = fingerprint_of(target_model)
    config = target_model.config.get_text_config()

    def made_of(path: Path) -> Document | None:
        try:
            record = StoredRecord(path)
        except FileNotFoundError:  # the oldest make room for others
            return None
        _check_target(record, fingerprint, config.vocab_size)
        fits = record.layer_ids == tuple(layer_ids) and record.feature_size == len(layer_ids) * config.hidden_size
        document = Document.answer(record.token_ids, record.prompt_length)
        document.features = record.features if fits and record.feature_size else None
        return document

    entries = ((str(path), partial(Path, path)) for path in recorded_files(folder))
    made = _made_of_all(folder, entries, made_of, on_bad_line, on_skip)
    return [document for document in made if document is not None]


def _check_target(record: StoredRecord, fingerprint: str | None, vocab_size: int) -> None:
    if fingerprint is None or record.target != fingerprint:
        raise ValueError(
            f"it was recorded with a target of other weights, {record.name!r}, whose answers are others. Record with "
            "this target, in a folder of its own."
        )
    if record.token_ids.max(initial=0) >= vocab_size:
        raise ValueError(f"it holds the token {record.token_ids.max()}, but the vocabulary has {vocab_size}.")


def _read(
    source: str | Path,
    made_of: Callable[[Any], Made],
    whole_files: bool,
    on_bad_line: OnBadLine,
    on_skip: Callable[[str], None] | None,
) -> list[Made]:
    """What is made of every entry of a file, folder or dataset."""
    return _made_of_all(source, _entries(source, whole_files), made_of, on_bad_line, on_skip)


def _made_of_all(
    source: str | Path,
    entries: Iterable[tuple[str, Callable[[], Any]]],
    made_of: Callable[[Any], Made],
    on_bad_line: OnBadLine,
    on_skip: Callable[[str], None] | None,
) -> list[Made]:
    """What is made of entries, each with where it is and what reads it."""
    made, wrong = [], []
    for where, read in entries:
        try:
            made.append(made_of(read()))
        except ValueError as error:
            wrong.append(f"{where}: {reason_of(error)}")
            if on_bad_line == "skip" and on_skip is not None:
                on_skip(wrong[-1])
    if wrong and on_bad_line == "raise":
        more = [f"and {len(wrong) - MOST_SHOWN} more."] if len(wrong) > MOST_SHOWN else []
        raise ValueError("\n".join([*wrong[:MOST_SHOWN], *more]))
    if not made:
        raise ValueError(f"{str(source)!r} holds nothing that can be used.")
    return made


def _entries(source: str | Path, whole_files: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Where each entry is, and what reads it: texts, or objects."""
    path = Path(source)
    if path.is_dir():
        paths = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not paths:
            raise ValueError(f"The folder {str(path)!r} has no files {' or '.join(SUFFIXES)}.")
    elif path.is_file():
        paths = [path]
    elif path.suffix in SUFFIXES or path.is_absolute() or str(source).count("/") > 1:
        raise ValueError(f"There is no file or folder {str(source)!r}.")
    else:
        yield from _of_hub(str(source))
        return
    for file in paths:
        if whole_files and file.suffix != ".jsonl":
            yield str(file), partial(_text_in, file)
            continue
        read: Callable[[bytes], Any] = json.loads if file.suffix == ".jsonl" else _text
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                    yield f"{file}, line {number}", partial(read, line)


def _of_hub(source: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no file, and datasets of the Hub need the package `datasets`: pip install datasets."
        ) from error
    name, _, split = source.partition(":")
    for number, entry in enumerate(load_dataset(name, split=split or "train", streaming=True), start=1):
        yield f"{source}, entry {number}", partial(dict, entry)


def _text_in(file: Path) -> str:
    return _text(file.read_bytes())


def _text(content: bytes) -> str:
    text = content.decode("utf-8")
    if not text.strip():
        raise ValueError("there is no text.")
    return text.rstrip("\r\n")


def _documents_of(
    entry: Any, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]
) -> list[Document]:
    fields = _fields_of(entry, "text", "response", "messages")
    if "text" in fields:
        return [Document(_ids(tokenizer, _string(fields, "text")))]
    if "messages" in fields:
        messages = _messages(fields)
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError("`messages` has nothing that the assistant says.")
        return _conversation(messages, tokenizer, template_options)
    prompt, response = _string(fields, "prompt"), _string(fields, "response")
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        return _conversation(messages, tokenizer, template_options)
    head = _ids(tokenizer, prompt)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [Document.answer([*head, *_ids(tokenizer, response, add_special_tokens=False), *end], len(head))]


def _conversation(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]
) -> list[Document]:
    """A chat, of which the assistant's words count.

    If the template changes what was said before, such as when it leaves out earlier thoughts, then each answer is a
    document of its own, after what the model saw when it gave it.
    """
    answers = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            head = _templated(messages[:number], tokenizer, template_options, add_generation_prompt=True)
            whole = _templated(messages[: number + 1], tokenizer, template_options)
            if not whole.startswith(head):
                raise ValueError(
                    "the chat template does not continue its own prompt with the answer, so it is not known what the "
                    "model would say. Set the template's options, or give `text`."
                )
            answers.append((len(head), whole))
    _, last = answers[-1]
    if any(not last.startswith(whole) for _, whole in answers):
        return [_marked(whole, [(start, len(whole))], tokenizer) for start, whole in answers]
    return [_marked(last, [(start, len(whole)) for start, whole in answers], tokenizer)]


def _marked(text: str, answers: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase) -> Document:
    """A text of which the parts between some places count, up to their end token.

    The parts become tokens each by itself, as a model's words follow a prompt that is tokens already.
    """
    token_ids: list[int] = []
    is_counted: list[bool] = []
    at = 0
    for start, end in answers:
        before = _ids(tokenizer, text[at:start], add_special_tokens=False)
        answer = _ids(tokenizer, text[start:end], add_special_tokens=False)
        ends = [place for place, token in enumerate(answer) if token == tokenizer.eos_token_id]
        said = ends[-1] + 1 if ends else len(answer)
        token_ids += [*before, *answer]
        is_counted += [False] * len(before) + [True] * said + [False] * (len(answer) - said)
        at = end
    length = len(is_counted) - is_counted[::-1].index(True) if any(is_counted) else 0
    return Document(token_ids[:length], is_counted[:length])


def _prompt_of(entry: Any, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> list[int]:
    fields = _fields_of(entry, "prompt", "text", "messages")
    if "messages" in fields:
        messages = _messages(fields)
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise ValueError("`messages` has nothing that the model could answer.")
        text = _templated(messages, tokenizer, template_options, add_generation_prompt=True)
        return _ids(tokenizer, text, add_special_tokens=False)
    text = _string(fields, "prompt" if "prompt" in fields else "text")
    if not tokenizer.chat_template:
        return _ids(tokenizer, text)
    message = {"role": "user", "content": text}
    text = _templated([message], tokenizer, template_options, add_generation_prompt=True)
    return _ids(tokenizer, text, add_special_tokens=False)


def _templated(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template_options: Mapping[str, Any],
    add_generation_prompt: bool = False,
) -> str:
    if not tokenizer.chat_template:
        raise ValueError("there are `messages`, but the target's tokenizer has no chat template.")
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **template_options,
    )
    return str(text)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def _fields_of(entry: Any, *needed: str) -> Mapping[str, Any]:
    """The entry, if it is an object with one of some fields."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"{shortened(entry)} is no object.")
    if not any(entry.get(name) is not None for name in needed):
        names = ", ".join(f"`{name}`" for name in needed)
        raise ValueError(f"the object has none of {names}, but {', '.join(map(repr, entry)) or 'nothing'}.")
    return {name: value for name, value in entry.items() if value is not None}


def _string(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{name}` must be a text that is not empty, but is {shortened(value)}.")
    return value


def _messages(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = fields["messages"]
    is_list = isinstance(messages, list) and messages
    if not is_list or not all(isinstance(one, Mapping) and "role" in one and "content" in one for one in messages):
        raise ValueError(f"`messages` must be a list of objects with `role` and `content`, not {shortened(messages)}.")
    return messages
