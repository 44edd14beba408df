"""Builds the wheel and the source distribution, and runs the demo from each in an environment of its own.

Such an environment has what the package says it needs and nothing else, linked from the environment that runs this, so
that a dependency that is not declared is missed there, and nothing large is installed again. It also fails if a file
of the package is missing, or the wheel is large.

    python scripts/try_packages.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
MOST_BYTES = 30 * 2**20
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
# Settings of the caller that could let its own modules in.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
DEMO = ("-m", "hf_ddtree", "demo", "--prompts", "1", "--max-new-tokens", "16")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for package in build(folder):
            size = package.stat().st_size
            print(f"{package.name}: {size / 2**20:.1f} MiB", flush=True)
            if size > MOST_BYTES:
                sys.exit(f"{package.name} is larger than {MOST_BYTES / 2**20:.0f} MiB.")
            site_packages, python = clean_environment(folder / package.suffix.lstrip("."))
            run(*PIP, "--python", str(python), "install", str(package), cwd=folder)
            if missing := files_of(ROOT / "hf_ddtree") - files_of(site_packages / "hf_ddtree"):
                sys.exit(f"{package.name} lacks {', '.join(sorted(missing))}.")
            run(str(python), *DEMO, cwd=folder)


def build(folder: Path) -> list[Path]:
    """Makes both distributions with the backend of `pyproject.toml`."""
    backend, built = folder / "backend", folder / "built"
    run(*PIP, "install", "--target", str(backend), "hatchling", cwd=ROOT)
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(built))
    run(*command, cwd=ROOT, PYTHONPATH=str(backend))
    return sorted(built.iterdir())


def clean_environment(folder: Path) -> tuple[Path, Path]:
    """An environment with the dependencies alone; returns where its packages are, and its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=ROOT)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for needed in dependencies("hf-ddtree", {"hf-ddtree"}):
        for top in {Path(str(file)).parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
            link = site_packages / top
            if not link.exists():
                link.symlink_to(Path(str(needed.locate_file(top))))
    return site_packages, folder / "bin" / "python"


def files_of(folder: Path) -> set[str]:
    """The files below a folder, without what Python has compiled."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in files if "__pycache__" not in path.parts}


def dependencies(name: str, seen: set[str]) -> Iterator[Distribution]:
    """What a distribution needs without extras, and what that needs, each once."""
    for requirement in map(Requirement, distribution(name).requires or ()):
        key = requirement.name.lower().replace("_", "-")
        if key in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        try:
            yield distribution(key)
        except PackageNotFoundError:
            continue  # pip says so if it is needed
        yield from dependencies(key, seen)


def run(*command: str, cwd: Path, **variables: str) -> None:
    subprocess.run(command, cwd=cwd, env=ENVIRONMENT | variables, check=True)


if __name__ == "__main__":
    main()
