"""What `import hf_ddtree` does: it registers the strategies, and imports no other package."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hf_ddtree

PACKAGE = Path(hf_ddtree.__file__).parent
IS_PATCHED = "GenerationMixin.generate.__code__.co_filename.endswith('registration.py')"


def run(*lines: str) -> list:
    """What Python prints as JSON after these lines."""
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join(("import json, sys", *lines))],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout)


def test_no_other_package_is_imported():
    before = "before = set(sys.modules)"
    imported = run(
        before, "import hf_ddtree", "dir(hf_ddtree)", "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    packages = {name.partition(".")[0] for name in imported}
    assert packages - sys.stdlib_module_names == {"hf_ddtree"}


@pytest.mark.core
@pytest.mark.parametrize(
    "lines, is_patched",
    [
        (["import hf_ddtree"], True),
        (["import hf_ddtree", "hf_ddtree.register()"], True),
        (["import hf_ddtree", "hf_ddtree.unregister()"], False),
        (["import hf_ddtree", "hf_ddtree.unregister()", "hf_ddtree.register()"], True),
    ],
)
def test_transformers_is_patched_once_it_is_imported(lines, is_patched):
    """And is as if it had been imported alone: its source is found, and nothing watches it any longer."""
    assert run(
        *lines,
        "import inspect",
        "from transformers import GenerationMixin",
        "from transformers.generation import utils",
        "has_source = 'class GenerationMixin' in inspect.getsource(utils)",
        "is_watched = any(type(finder).__name__ == '_Watcher' for finder in sys.meta_path)",
        f"before = {IS_PATCHED}",
        "hf_ddtree.unregister()",
        f"print(json.dumps([before, {IS_PATCHED}, has_source, is_watched]))",
    ) == [is_patched, False, True, False]


@pytest.mark.core
def test_a_transformers_that_is_there_already_is_patched_at_once():
    lines = ["from transformers import GenerationMixin", "before = list(sys.meta_path)", "import hf_ddtree"]
    assert run(*lines, f"print(json.dumps([{IS_PATCHED}, before == sys.meta_path]))") == [True, True]


def test_every_public_name_is_found():
    for name in hf_ddtree.__all__:
        value = getattr(hf_ddtree, name)
        assert value.__module__.startswith("hf_ddtree."), name
        assert name in dir(hf_ddtree)
    with pytest.raises(AttributeError, match="'hf_ddtree' has no attribute 'nothing'"):
        hf_ddtree.nothing  # noqa: B018
    assert hf_ddtree.budget.RoundCost is not None and hf_ddtree.drafters.load_drafter is hf_ddtree.load_drafter


def test_type_checkers_are_told_what_is_imported_later():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (for_types,) = (node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name: node.module for node in for_types.body for alias in node.names}
    assert told == hf_ddtree._HOMES
    assert {*told, "register", "unregister"} == set(hf_ddtree.__all__)


def test_no_module_is_called_like_a_public_name():
    """Importing it would put the module in the name's place."""
    modules = {module.name for module in pkgutil.iter_modules([str(PACKAGE)])}
    assert not modules & set(hf_ddtree.__all__)
    assert set(hf_ddtree._PUBLIC_MODULES) <= modules
