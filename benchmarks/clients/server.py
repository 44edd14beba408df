"""Transformers' server: chat and completions, whole and streamed, and `transformers chat` as one of its clients."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from openai import APIConnectionError, OpenAI

TRANSFORMERS = sys.executable, "-m", "transformers.cli.transformers"


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [*TRANSFORMERS, "serve", model, "--port", port, "--device", "cpu"]
    process = subprocess.Popen(command)
    try:
        yield f"http://localhost:{port}"
    finally:
        process.terminate()
        process.wait()


def ask(client: OpenAI, model: str, text: str) -> list[str]:
    settings = {"model": model, "temperature": 0}
    whole = client.completions.create(prompt=text, max_tokens=48, **settings).choices[0].text
    messages = [{"role": "user", "content": text}]
    stream = client.chat.completions.create(messages=messages, max_tokens=48, stream=True, **settings)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    stopped = client.completions.create(prompt=text, max_tokens=48, stop=["\n"], **settings).choices[0].text
    return [whole, "".join(pieces), stopped]


def chat(url: str, model: str, text: str) -> list[str]:
    """What `transformers chat` prints, without the line that tells its speed; it is not to go on at the limit."""
    command = [*TRANSFORMERS, "chat", model, url, "max_new_tokens=48", "do_sample=False"]
    said = subprocess.run(command, input=f"{text}\nn\n!exit\n", capture_output=True, text=True, check=True).stdout
    return [line for line in said.splitlines() if "tok/s" not in line]


model, prompts, output = sys.argv[1:]
with served(model) as url:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    for _ in range(240):
        with contextlib.suppress(APIConnectionError):
            client.models.list()
            break
        time.sleep(0.5)
    texts = json.loads(Path(prompts).read_text())
    answers = [ask(client, model, text) for text in texts]
    answers.append(chat(url, model, texts[0].splitlines()[0]))
Path(output).write_text(json.dumps(answers))
