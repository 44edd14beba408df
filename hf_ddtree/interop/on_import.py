"""Acting on a module of another package as soon as it is imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Calls `act` with a module: now if it is imported already, else right after it is imported.

    Args:
        name: The module's full name.
        act: What to do; it may be called more than once.
    """
    watcher = _Watcher(name, act)
    if watcher not in sys.meta_path:
        sys.meta_path.insert(0, watcher)
    if name in sys.modules:
        module = import_module(name)  # waits for a thread that is importing it
        watcher.call(module)


class _Watcher(MetaPathFinder):
    """Finds one module as the other finders do, and calls a function once that is executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.act = act

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Watcher) and (other.name, other.act) == (self.name, self.act)

    __hash__ = None  # type: ignore[assignment]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder != self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self.call)
        return spec

    def call(self, module: ModuleType) -> None:
        """Calls the function, and watches no longer."""
        self.act(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _CallingLoader(Loader):
    """Another loader that calls a function with the module that it has executed."""

    def __init__(self, loader: Loader, call: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._call = call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._call(module)
