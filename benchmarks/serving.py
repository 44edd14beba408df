"""Transformers' server with and without drafting, under load: equal answers, and the time that they take.

    pip install '.[serve]'
    python benchmarks/serving.py --seconds 180

Clients send the same requests to both servers, one after the other: completions, streamed and whole, of short and long
prompts, some of which the client gives up, and bad requests in between. The memory, threads and health of each server
are looked at before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx2 as httpx
import typer
from measure import RESULTS, rounded_quartiles, save
from rich.console import Console
from rich.table import Table

from hf_ddtree.demo import demo_folders, demo_prompts

KINDS = ("whole", "streamed", "whole", "long", "streamed", "given up", "whole", "bad model", "streamed", "bad field")
BAD = {"bad model": {"model": "nobody/nothing"}, "bad field": {"no_such_field": 1}}


def requests_of(model: str, new_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The kind and the body of each request, without end."""
    prompts, number = [entry["prompt"] for entry in demo_prompts()], 0
    while True:
        kind, prompt = KINDS[number % len(KINDS)], prompts[number % len(prompts)]
        prompt = "".join(prompts[number % len(prompts) :][:6]) if kind == "long" else prompt
        body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
        yield kind, body | {"stream": kind in ("streamed", "given up")} | BAD.get(kind, {})
        number += 1


async def ask(client: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends one request; what came back, and when."""
    start = time.perf_counter()
    if not body["stream"]:
        response = await client.post("/v1/completions", json=body)
        text = response.json()["choices"][0]["text"] if response.status_code == 200 else None
        return {"kind": kind, "status": response.status_code, "text": text, "seconds": time.perf_counter() - start}
    pieces, first = [], None
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                first = first or time.perf_counter() - start
                if kind == "given up" and len(pieces) > 3:
                    break
    text = None if kind == "given up" else "".join(pieces)
    seconds = time.perf_counter() - start
    return {"kind": kind, "status": response.status_code, "text": text, "seconds": seconds, "first": first}


async def load(url: str, model: str, clients: int, new_tokens: int, count: int | None, seconds: float) -> list[Any]:
    """Sends requests from several clients at once: `count` of them, or as many as begin within some seconds."""
    source, found, end = enumerate(requests_of(model, new_tokens)), {}, time.perf_counter() + seconds

    async def work(client: httpx.AsyncClient) -> None:
        while len(found) < count if count else time.perf_counter() < end:
            number, (kind, body) = next(source)
            found[number] = {}
            found[number] = await ask(client, kind, body)

    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        await asyncio.gather(*(work(client) for _ in range(clients)))
    return [found[number] for number in sorted(found)]


@contextlib.contextmanager
def server(kind: str, model: str, drafter: str) -> Iterator[tuple[str, int]]:
    """A server of a kind: its address and its process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    module = ["hf_ddtree"] if kind == "ddtree" else ["transformers.cli.transformers"]
    options = ["--drafter", drafter, "--no-log"] if kind == "ddtree" else []
    command = [
        sys.executable,
        "-m",
        *module,
        "serve",
        model,
        *options,
        "--port",
        port,
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://localhost:{port}"
    try:
        for _ in range(240):
            with contextlib.suppress(httpx.TransportError):
                httpx.get(url + "/health").raise_for_status()
                break
            if process.poll() is not None:
                raise SystemExit(f"The server ended: {' '.join(command)}")
            time.sleep(0.5)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


def state_of(pid: int) -> dict[str, int]:
    """Memory in KiB and number of threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in status)
    return {"memory_kib": int(values["VmRSS"].split()[0]), "threads": int(values["Threads"])}


def main(
    seconds: Annotated[float, typer.Option(help="How long the drafting server is under load.")] = 180,
    clients: Annotated[int, typer.Option(help="How many clients send requests at once.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 48,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS / "serving.json",
) -> None:
    model, drafter = demo_folders()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs: list[dict[str, Any]] = []
    states, answers, count = {}, {}, None
    for kind in ("ddtree", "standard"):
        with server(kind, model, drafter) as (url, pid):
            asyncio.run(load(url, model, clients, new_tokens, count=40, seconds=0))  # warms up
            before, start = state_of(pid), time.perf_counter()
            answers[kind] = asyncio.run(load(url, model, clients, new_tokens, count, seconds))
            spent = time.perf_counter() - start
            count = len(answers[kind])
            healthy = httpx.get(url + "/health").status_code == 200
            states[kind] = {"seconds": spent, "before": before, "after": state_of(pid), "healthy": healthy}
        runs += [{"server": kind, "request": number, **answer} for number, answer in enumerate(answers[kind])]
    if dead := [kind for kind, state in states.items() if not state["healthy"]]:
        raise SystemExit(f"These servers no longer answered at the end: {', '.join(dead)}.")
    different = [
        number
        for number, (one, other) in enumerate(zip(answers["ddtree"], answers["standard"]))
        if (one["status"], one["text"]) != (other["status"], other["text"])
    ]
    if different:
        for kind, found in answers.items():
            Console().print(kind, found[different[0]])
        raise SystemExit(f"{len(different)} of {count} answers differ, the first of them request {different[0]}.")
    summary, table = (
        {"requests": count, "states": states},
        Table("server", "seconds", "first token, s", "MiB", "threads"),
    )
    for kind, found in answers.items():
        first = rounded_quartiles(answer["first"] for answer in found if answer.get("first"))
        summary[kind] = {"seconds": round(states[kind]["seconds"], 1), "first": first}
        memory = [f"{states[kind][when]['memory_kib'] / 1024:.0f}" for when in ("before", "after")]
        threads = [str(states[kind][when]["threads"]) for when in ("before", "after")]
        table.add_row(
            kind, f"{states[kind]['seconds']:.1f}", f"{first[1]:.2f}", " to ".join(memory), " to ".join(threads)
        )
    Console(width=120).print(f"{count} requests, all answers equal", table)
    save(output, summary, runs, clients=clients, new_tokens=new_tokens)


if __name__ == "__main__":
    typer.run(main)
