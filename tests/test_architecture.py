"""The package is built as `docs/architecture.md` says: its rooms, what each imports, and no circle of imports."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Documented import paths that lead up the house; looked up when asked for, so that they close no circle.
ALIASES = {("drafters", "drafter_kinds")}


class House:
    """The modules of a package and their imports.

    Counted is every import in the source, inside functions and for type checkers as well, and modules that
    `import_module` gets as a text. What a package's `__init__` hands on, its own modules import from where it is.

    Args:
        package: The folder `hf_ddtree`.
    """

    def __init__(self, package: Path) -> None:
        self._package = package
        self.paths = {self._name(path): path for path in sorted(package.rglob("*.py"))}
        self.imports = {name: set(self._imported(path)) - {name} for name, path in self.paths.items()}

    def rooms(self) -> dict[str, set[str]]:
        """What each room imports of the others. The package's own `__init__` is `hf_ddtree`."""
        rooms: dict[str, set[str]] = {}
        for name, imports in self.imports.items():
            room = room_of(name)
            others = {room_of(other) for other in imports} - {room}
            rooms[room] = rooms.get(room, set()) | {other for other in others if (room, other) not in ALIASES}
        return rooms

    def modules(self) -> dict[str, set[str]]:
        """The modules of each room that is a folder, as the page calls them."""
        modules: dict[str, set[str]] = {}
        for name, path in self.paths.items():
            room, _, module = name.partition(".")
            if module and path.name != "__init__.py":
                modules.setdefault(room, set()).add(module.replace(".", "/"))
        return modules

    def circle(self) -> list[str]:
        """Modules that import each other, in order, the first one again at the end; empty if there are none."""
        done: set[str] = set()

        def search(name: str, path: list[str]) -> list[str]:
            if name in path:
                return [*path[path.index(name) :], name]
            for other in [] if name in done else sorted(self.imports[name]):
                if (name, other) not in ALIASES and (found := search(other, [*path, name])):
                    return found
            done.add(name)
            return []

        return next((found for name in self.imports if (found := search(name, []))), [])

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self._package).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _imported(self, path: Path) -> Iterator[str]:
        folder = path.relative_to(self._package).parent.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                module = (node.module or "").split(".") if node.module else []
                if node.level == 0 and module[:1] != ["hf_ddtree"]:
                    continue
                start = [*folder[: len(folder) - node.level + 1], *module] if node.level else module[1:]
                for alias in node.names:
                    yield self._module(".".join([*start, alias.name]), ".".join(start))
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "hf_ddtree"]
                yield from (self._module(name.partition(".")[2]) for name in names)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
                name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                if isinstance(name, str) and name.startswith("hf_ddtree"):
                    yield self._module(name.partition(".")[2])

    def _module(self, *names: str) -> str:
        return next(name for name in names if name in self.paths)


def room_of(name: str) -> str:
    return name.partition(".")[0] or "hf_ddtree"


def rooms_on(page: str) -> dict[str, set[str]]:
    """The rows of the page's table: each room with the rooms that it imports."""
    rows = re.findall(r"^\| `(\w+)/?` \| [^|]+ \| ([^|]*) \|$", page, re.MULTILINE)
    return {room: set(re.findall(r"`(\w+)`", imports)) for room, imports in rows}


def modules_on(page: str) -> dict[str, set[str]]:
    """The rows of the page's table of modules: those of each room that is a folder."""
    modules: dict[str, set[str]] = {}
    for room, module in re.findall(r"^\| `(\w+)/([\w/]+)` \| [^|]+ \|$", page, re.MULTILINE):
        modules.setdefault(room, set()).add(module)
    return modules


def faults(package: Path, page: str = PAGE) -> list[str]:
    """Where code and page differ, and what to write."""
    house, told, modules = House(package), rooms_on(page), modules_on(page)
    found, rooms = [], list(told)
    for room, imports in house.rooms().items():
        row = ", ".join(f"`{other}`" for other in sorted(imports, key=lambda name: (rooms + [name]).index(name)))
        if room not in told:
            found.append(f"The table of rooms lacks a row: | `{room}` | its one job | {row} |")
        elif imports != told[room]:
            found.append(f"The last column of the row of `{room}` in the table of rooms should be: {row or 'nothing'}")
        elif above := [other for other in rooms[rooms.index(room) :] if other in imports]:
            found.append(f"`{room}` imports {above}, which stand below it in the table of rooms")
    found += [f"The table of rooms has a row of `{room}`, which is no room" for room in told.keys() - house.rooms()]
    actual = house.modules()
    for room in sorted({*actual, *modules}):
        missing = sorted(actual.get(room, set()) - modules.get(room, set()))
        surplus = sorted(modules.get(room, set()) - actual.get(room, set()))
        found += [f"The table of modules lacks a row: | `{room}/{module}` | what it has |" for module in missing]
        found += [f"The table of modules has a row of `{room}/{module}`, which is none" for module in surplus]
    if circle := house.circle():
        found.append("Modules import each other in a circle: " + " -> ".join(circle))
    return found


def test_the_package_is_as_the_page_says():
    found = faults(ROOT / "hf_ddtree")
    assert not found, "docs/architecture.md and the code differ.\n" + "\n".join(found)


@pytest.mark.parametrize(
    "module, line, fault",
    [
        ("attention/path_state.py", "from .dispatch import install", "attention.path_state"),  # inside a folder
        ("target/cache_rows.py", "def f():\n    from .model import CachedModel", "target.cache_rows"),  # in a function
        ("drafters/dflash/config.py", "from .model import DFlashDraftModel", "drafters.dflash.config"),  # deeper
        ("drafters/checkpoint.py", "from .native import checkpoint", "drafters.checkpoint"),  # by its folder
        (
            "devices.py",
            "if TYPE_CHECKING:\n    from .tree.tree_batch import TreeBatch",
            "devices",
        ),  # for type checkers
        ("validation.py", "from .tree import build", "validation"),  # between rooms
    ],
)
def test_a_planted_circle_is_found(tmp_path, module, line, fault):
    package = copy_of_package(tmp_path)
    path = package / module
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    (circle,) = (text for text in faults(package) if "circle" in text)
    assert fault in re.split(" -> |: ", circle)


@pytest.mark.parametrize(
    "module, line, room",
    [
        ("tree/shape.py", "from ..output import DDTreeStats", "tree"),
        ("validation.py", "import hf_ddtree.visualize", "validation"),
        ("demo.py", "from importlib import import_module\nimport_module('hf_ddtree.testing')", "demo"),
    ],
)
def test_a_planted_import_from_another_room_is_found(tmp_path, module, line, room):
    package = copy_of_package(tmp_path)
    path = package / module
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    assert any(f"row of `{room}`" in text for text in faults(package))


def test_rooms_import_those_above_them_alone():
    first, *_, tree = (
        line for line in PAGE.splitlines() if re.match(r"\| `(validation|devices|interop/|tree/)`", line)
    )
    swapped = PAGE.replace(tree + "\n", "").replace(first, f"{tree}\n{first}")
    (fault,) = faults(ROOT / "hf_ddtree", swapped)
    assert fault.startswith("`tree` imports") and "stand below it" in fault
    (fault,) = faults(ROOT / "hf_ddtree", PAGE.replace(tree + "\n", ""))
    assert fault.startswith("The table of rooms lacks a row: | `tree`")


def test_a_new_module_and_a_row_too_many_are_found(tmp_path):
    package = copy_of_package(tmp_path)
    (package / "tree" / "forest.py").write_text("")
    (package / "weather.py").write_text("")
    page = PAGE.replace("| `validation` |", "| `cellar` | keeps wine |  |\n| `validation` |")
    found = faults(package, page)
    assert any("`tree/forest`" in text for text in found) and any("| `weather` |" in text for text in found)
    assert any("`cellar`, which is no room" in text for text in found)


def copy_of_package(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("demo_pair", "__pycache__")
    return Path(shutil.copytree(ROOT / "hf_ddtree", folder / "hf_ddtree", ignore=ignored))
