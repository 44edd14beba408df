"""What Transformers' server keeps from request to request, with and without drafting.

    pip install '.[serve]'
    python benchmarks/serving_memory.py

Sends completions, streamed and whole, of short and long prompts, and wrong requests in between to the server's
application, and looks at the process's memory and at the objects that Python tracks after each part of them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import httpx2 as httpx
import typer
from measure import RESULTS, save

import hf_ddtree
from hf_ddtree.demo import demo_folders, demo_prompts
from hf_ddtree.process_defaults import VARIABLE, to_variable
from hf_ddtree.serving import refuse_wrong_requests

OUTPUT = RESULTS / "serving_memory.json"
PAGE = os.sysconf("SC_PAGE_SIZE")


def application(model: str, drafter: str | None) -> Any:
    """What the server runs; plainly if there is no drafter."""
    if drafter is None:
        hf_ddtree.unregister()
    else:
        os.environ[VARIABLE] = to_variable(drafter=drafter, tree_budget="auto")
        refuse_wrong_requests()
    import uvicorn
    from transformers.cli.serve import Serve

    uvicorn.Server.run = lambda self: None
    logging.disable(logging.ERROR)
    return Serve(model, device="cpu", dtype="float32", log_level="error").server.config.app


def body(model: str, number: int, new_tokens: int) -> dict[str, Any]:
    """The request of a number."""
    prompts = [entry["prompt"] for entry in demo_prompts()]
    first = number % len(prompts)
    prompt = "".join(prompts[first : first + (3 if number % 10 == 3 else 1)])
    request = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": number % 3 == 1}
    return request | ({"generation_config": json.dumps({"num_beams": 0})} if number % 10 == 9 else {})


def kept() -> dict[str, int]:
    """Resident memory in KiB, and how many objects there are that garbage collection tracks."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"memory_kib": pages * PAGE // 1024, "objects": len(gc.get_objects())}


def after_each_part(
    model: str, drafter: str | None, parts: int, requests: int, clients: int, new_tokens: int
) -> list[dict[str, int]]:
    """What is kept before the first request and after each part, of so many requests from several clients at once."""
    transport = httpx.ASGITransport(application(model, drafter), raise_app_exceptions=False)

    async def ask(client: httpx.AsyncClient, numbers: Any) -> None:
        for number in numbers:
            await client.post("/v1/completions", json=body(model, number, new_tokens))

    async def run() -> list[dict[str, int]]:
        found = [kept()]
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=None) as client:
            for part in range(parts):
                numbers = iter(range(part * requests, (part + 1) * requests))
                await asyncio.gather(*(ask(client, numbers) for _ in range(clients)))
                found.append(kept())
        return found

    return asyncio.run(run())


def main(
    parts: Annotated[int, typer.Option(help="How often to look.")] = 3,
    requests: Annotated[int, typer.Option(help="Requests from one look to the next.")] = 300,
    clients: Annotated[int, typer.Option(help="How many clients send requests at once.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 8,
    output: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = RESULTS
    / "serving_memory.json",
) -> None:
    model, drafter = demo_folders()
    runs = []
    for name, own in (("ddtree", drafter), ("standard", None)):
        # A process of its own for each.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(after_each_part, model, own, parts, requests, clients, new_tokens).result()
        runs += [{"server": name, "requests": part * requests, **state} for part, state in enumerate(found)]
        print(*runs[-len(found) :], sep="\n")
    save(output, {"requests": parts * requests}, runs, clients=clients, new_tokens=new_tokens)


if __name__ == "__main__":
    typer.run(main)
