"""`docs/architecture.md` names every module, and modules import as it says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_ddtree"
# Names the type of a policy, without importing it when it runs.
KNOWN = {("configuration", "budget")}


def floors():
    """The floor of each module and folder, by its name."""
    found = {}
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| (\d) \| ([^|]+) \|", line):
            for name in re.findall(r"`(\w+)(?:\.py|/)`", row[2]):
                assert name not in found, f"{name} stands in two rows"
                found[name] = int(row[1])
    return found


def imported(path):
    """Modules and folders of the package that a file imports, the one that it is in left out."""
    folders = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == len(folders) + 1:
            yield from [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]


def test_every_module_stands_in_one_row():
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert set(floors()) == modules - {"__init__"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_imported_from_above(path):
    module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if module == "__init__":
        return
    known = floors()
    above = {other for other in imported(path) if known.get(other, 0) > known[module]}
    assert {(module, other) for other in above} <= KNOWN
