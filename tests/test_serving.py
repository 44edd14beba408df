"""Transformers' server with drafting: what it answers to wrong requests, and to the right ones beside them."""

import asyncio
import json

import pytest

import hf_ddtree
from hf_ddtree import serving
from hf_ddtree.demo import demo_folders
from hf_ddtree.interop import serving as changes
from hf_ddtree.process_defaults import VARIABLE, to_variable

pytest.importorskip("fastapi")
pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")
uvicorn = pytest.importorskip("uvicorn")

TARGET, DRAFTER = demo_folders()
PROMPTS = ["def load(path):\n    ", "import os\n\n", "class Node:\n", "x = [1, 2, "]


def make_app(patch):
    """The application that `transformers serve` would run, as `hf-ddtree serve` changes it."""
    from transformers.cli import serve
    from transformers.cli.serving import server, utils

    # Put back what is changed.
    patch.setattr(server, "build_server", server.build_server)
    patch.setattr(utils.GenerateManager, "generate_streaming", utils.GenerateManager.generate_streaming)
    patch.setattr(uvicorn.Server, "run", lambda self: None)
    serving.refuse_wrong_requests()
    return serve.Serve(TARGET, device="cpu", dtype="float32", log_level="error").server.config.app


@pytest.fixture(scope="module")
def app():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, to_variable(drafter=DRAFTER, tree_budget=12))
        yield make_app(patch)


def send(app, *bodies, path="/v1/completions"):
    """The responses to requests that are sent at once; each asks for a few tokens by greedy decoding."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def main():
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            return await asyncio.gather(*(client.post(path, json={"temperature": 0, **body}) for body in bodies))

    return asyncio.run(main())


def config(**settings):
    return {"generation_config": json.dumps({"max_new_tokens": 3, **settings})}


@pytest.fixture(scope="module")
def answers():
    """The right answers: by standard decoding, without a server."""
    model, _, tokenizer = hf_ddtree.load_demo()
    texts = {}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False, generation_strategy="standard")
        texts[prompt] = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return texts


def text_of(response):
    """What was answered, whole or in pieces."""
    assert response.status_code == 200, response.text
    if not response.text.startswith("data:"):
        return response.json()["choices"][0]["text"]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line]
    return "".join(choice["text"] for event in events for choice in event["choices"])


WRONG = {
    "knob": (config(tree_budget=0), "`tree_budget` must be an integer of at least 1"),
    "quoted": (config(tree_budget="many"), '"auto"'),
    "misspelt": (config(tree_bugdet=3), "Did you mean `tree_budget`?"),
    "drafter": (config(drafter="evil/drafter"), "`drafter` is 'evil/drafter', but calls for this model may name no"),
    "list": (config(drafter=["evil/drafter"]), "`drafter` must be a folder"),
    "strategy": (config(generation_strategy="fast"), "`generation_strategy` is 'fast'"),
    "no JSON": ({"generation_config": "{"}, "Expecting property name"),
    "an object": ({"generation_config": {"max_new_tokens": 3}}, "the JSON object must be str"),
    "temperature": ({"temperature": "hot"}, "could not convert string to float"),
}
WRONG_LATER = {
    "no tokens": ({"max_tokens": 0}, "`max_new_tokens` must be greater than 0"),
    "empty": ({"prompt": ""}, "The prompt is empty"),
    "beams": (config(num_beams=2, tree_budget=4), "`num_beams` is 2"),
}


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_values_are_named(app, stream):
    wrong = WRONG if stream else WRONG | WRONG_LATER
    bodies = [{"model": TARGET, "prompt": PROMPTS[0], "stream": stream, **body} for body, _ in wrong.values()]
    for response, (_, words) in zip(send(app, *bodies), wrong.values()):
        assert response.status_code == 400 and words in response.json()["detail"]


def test_what_a_stream_learns_late_ends_it(app):
    """As in Transformers' server: the status is sent by then. Beams by default have nothing to stream either."""
    wrong = WRONG_LATER | {"beams by default": (config(num_beams=2), "`num_beams` is 2")}
    bodies = [{"model": TARGET, "prompt": PROMPTS[0], "stream": True, **body} for body, _ in wrong.values()]
    for response, (_, words) in zip(send(app, *bodies), wrong.values()):
        assert response.status_code == 200 and words in json.loads(response.text[6:])["error"]


def test_a_model_without_a_chat_template(app):
    (response,) = send(
        app, {"model": TARGET, "messages": [{"role": "user", "content": "x"}]}, path="/v1/chat/completions"
    )
    assert response.status_code == 400 and "chat_template is not set" in response.json()["detail"]


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_harm_no_other(app, answers, stream):
    """All are sent at once."""
    right = [{"prompt": prompt, "max_tokens": 12} for prompt in PROMPTS]
    wrong = [{"prompt": PROMPTS[0], **body} for body, _ in (WRONG | WRONG_LATER).values()]
    bodies = [body for pair in zip(wrong, right * 3) for body in pair]
    responses = send(app, *({"model": TARGET, "stream": stream, **body} for body in bodies))
    for body, response in zip(bodies, responses):
        if body.get("max_tokens") == 12:
            assert text_of(response) == answers[body["prompt"]]


def test_a_request_that_names_nothing_drafts(app, answers, caplog):
    caplog.set_level("INFO", logger="hf_ddtree")
    drafted, standard = {"max_tokens": 12}, config(generation_strategy="standard", max_new_tokens=12)
    for settings, is_drafted in ((drafted, True), (standard, False)):
        caplog.clear()
        (response,) = send(app, {"model": TARGET, "prompt": PROMPTS[0], **settings})
        assert text_of(response) == answers[PROMPTS[0]]
        assert ("forwards of the target" in caplog.text) == is_drafted


def test_other_errors_stay_as_they_are(monkeypatch):
    from transformers.cli.serving.completion import CompletionHandler

    app = make_app(monkeypatch)
    monkeypatch.setattr(CompletionHandler, "_validate_request", lambda self, body: {}["nothing"])
    (response,) = send(app, {"model": TARGET, "prompt": "x"})
    assert response.status_code == 500


def test_a_server_of_another_form_runs_as_it_is(monkeypatch):
    """Later versions may have other functions."""
    from transformers.cli.serving import server, utils

    warned = []
    monkeypatch.setattr("hf_ddtree.interop.private.logger.warning_once", lambda text, *_: warned.append(text))
    monkeypatch.delattr(server, "build_server")
    monkeypatch.delattr(utils, "GenerateManager")
    changes.answer_wrong_values()
    changes.check_streams(serving.check_drafting)
    assert ["build_server" in warned[0], "generate_streaming" in warned[1], len(warned)] == [True, True, 2]
