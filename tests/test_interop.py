"""Private names of Transformers: used in `hf_ddtree/interop/` alone, and one that is missing costs what needs it."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

import hf_ddtree
from hf_ddtree.interop.generation import is_callers_cache, padding_token
from hf_ddtree.interop.private import MissingPrivateName
from hf_ddtree.interop.sharding import tensor_parallel_group

PACKAGE = Path(hf_ddtree.__file__).parent
TRANSFORMERS = (PreTrainedModel, GenerationMixin, GenerationConfig, PreTrainedConfig, DynamicCache) + (
    DynamicLayer,
    LinearAttentionLayer,
)
# Modules of Transformers that other packages are meant to import from.
PUBLIC_MODULES = re.compile(
    r"transformers(\.(utils|activations|cache_utils|modeling_layers|generation|models)(\.[a-z]\w*)*)?"
)
# Private to PyTorch.
OF_PYTORCH = {"_foreach_mul_", "_foreach_add_", "_forward_hooks", "_cdata", "_dynamo"}
# What a subclass of `PreTrainedModel` is asked for.
OF_SUBCLASSES = {"_init_weights"}
PRIVATE = re.compile(r"_[a-z]\w*")

# Everything that needs one of these names is refused, and nothing else.
EVERY_TREE = ("a drafter", "lookup", "a causal language model", "custom_generate", "level cache", "static cache")
NEEDED = {
    "_prefill": EVERY_TREE,
    "_update_model_kwargs_for_generation": EVERY_TREE,
    "_attn_implementation": (*EVERY_TREE, "checking a model", "checking a folder"),
    "_prepare_position_ids_for_generation": ("a causal language model",),
    "_from_config": ("checking a model",),
    "_raise_exceptions_for_missing_entries": ("MTP layers",),
}
# Without these all works, if not as well.
HELPFUL = (
    "_default_compile_config",
    "_get_default_generation_params",
    "_is_fsdp_managed_module",
    "_is_stateful",
    "_is_user_defined",
    "_local_mapping",
    "_mask_length",
    "_prepare_cache_for_generation",
    "_previous_max_cache_length",
    "_supports_default_dynamic_cache",
    "_valid_auto_compile_criteria",
)
# Tested below, as they need several processes or another library.
TESTED_ALONE = {"_device_mesh", "_hf_hook"}


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each use of a name that seems private to Transformers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and node.attr not in OF_PYTORCH:
            if ast.unparse(node.value) in ("self", "cls", "super()"):
                if node.attr not in ALL_OWN | OF_SUBCLASSES:
                    yield node.lineno, node.attr
            elif is_foreign(node.attr):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call):
            texts = [part.value for part in node.args if isinstance(part, ast.Constant)]
            if ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr", "vars", "attrgetter"):
                yield from ((node.lineno, text) for text in texts if is_foreign(str(text)))
            yield from ((node.lineno, word.arg) for word in node.keywords if PRIVATE.fullmatch(word.arg or ""))
        elif isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            yield from ((node.lineno, key) for key in keys if PRIVATE.fullmatch(str(key)))
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("transformers"):
            if not PUBLIC_MODULES.fullmatch(node.module or ""):
                yield node.lineno, str(node.module)
            yield from ((node.lineno, alias.name) for alias in node.names if PRIVATE.fullmatch(alias.name))


def is_foreign(name: str) -> bool:
    """Whether a private name is none of this package's, or one that Transformers has as well."""
    is_own = name in ALL_OWN and not any(hasattr(owner, name) for owner in TRANSFORMERS)
    return PRIVATE.fullmatch(name) is not None and not is_own


def _defined(tree: ast.Module) -> set[str]:
    """The names that a module defines: functions, classes, fields, and attributes that its methods set."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


ALL_OWN = {name for path in PACKAGE.rglob("*.py") for name in _defined(ast.parse(path.read_text(encoding="utf-8")))}


def found_outside(package: Path) -> list[str]:
    paths = (path for path in sorted(package.rglob("*.py")) if path.parent.name != "interop")
    return [f"{path.relative_to(package)}:{line} {name}" for path in paths for line, name in private_names(path)]


def test_private_names_are_used_in_interop_alone():
    found = found_outside(PACKAGE)
    assert not found, "Private to Transformers; put a small function into hf_ddtree/interop/:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "def f(model): return model._prefill()",
        "class A:\n    def _prefill(self): ...\n    def f(self, drafter): return drafter._prefill()",
        "def f(model): return getattr(model, '_tp_size', None)",
        "def f(config): config._attn_implementation = None",
        "def f(path): return cached_file(path, _raise_exceptions_for_missing_entries=False)",
        "OPTIONS = {'_raise_exceptions_for_missing_entries': False}",
        "from transformers.distributed.utils import gather_full_state_dict",
        "def f():\n    from transformers.generation.utils import _some_helper",
    ],
)
def test_a_planted_use_is_found(tmp_path, planted):
    shutil.copytree(PACKAGE / "decoding", tmp_path / "decoding")
    (tmp_path / "decoding" / "planted.py").write_text(planted + "\n")
    assert [line.partition(":")[0] for line in found_outside(tmp_path)] == ["decoding/planted.py"]


def test_every_name_that_interop_uses_is_tried_without():
    """A name that is added to `interop/` must be added to one of the tables above."""
    used = {name for path in (PACKAGE / "interop").glob("*.py") for _, name in private_names(path) if name[0] == "_"}
    used |= {
        node.args[1].value
        for path in (PACKAGE / "interop").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "private"
    }
    assert used == {*NEEDED, *HELPFUL, *TESTED_ALONE}


def without(*names: str) -> dict[str, str | None]:
    """What becomes of each feature where Transformers calls these names otherwise."""
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "helpers.renamed_transformers", *names],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.core
@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_name_costs_what_needs_it(name):
    outcomes = without(name)
    refused = {feature for feature, message in outcomes.items() if message is not None}
    assert refused == set(NEEDED[name]), outcomes
    for feature in refused:
        assert name in outcomes[feature] and "pip install" in outcomes[feature]


@pytest.mark.core
def test_helpful_names_may_all_be_missing():
    assert set(without(*HELPFUL).values()) == {None}


@pytest.mark.core
def test_whose_cache_it_is(monkeypatch):
    cache = DynamicCache()
    assert not is_callers_cache(cache)
    cache._is_user_defined = True
    assert is_callers_cache(cache)
    monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", lambda self: None)
    assert is_callers_cache(DynamicCache())


def test_tensor_parallelism_without_a_mesh():
    with pytest.raises(MissingPrivateName, match="tensor parallelism.*_device_mesh"):
        tensor_parallel_group(SimpleNamespace(tp_size=2))


@pytest.mark.parametrize(
    "settings, token",
    [
        ({}, 0),
        ({"pad_token_id": 7, "eos_token_id": 3}, 7),
        ({"eos_token_id": 3}, 3),
        ({"eos_token_id": [5, 3]}, 5),
    ],
)
def test_the_padding_token(settings, token):
    config = GenerationConfig(**settings)
    assert padding_token(config) == token
    model = SimpleNamespace(device="cpu", config=SimpleNamespace(is_encoder_decoder=False))
    GenerationMixin._prepare_special_tokens(model, config, device="cpu")
    prepared = config._pad_token_tensor
    assert (0 if prepared is None else int(prepared)) == token
