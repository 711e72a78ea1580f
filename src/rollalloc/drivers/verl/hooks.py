"""Calls a function after a module has been imported, without importing the module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def after_import(name: str, run: Callable[[ModuleType], None]) -> None:
    """Call `run` with the module of this name: now if the module is already imported, otherwise right after its import.

    verl loads plug-ins in each of its processes. Most processes never need the trainer, and importing it takes seconds.
    """
    if name in sys.modules:
        run(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watcher(name, run))


class _Watcher(MetaPathFinder):
    def __init__(self, name: str, run: Callable[[ModuleType], None]) -> None:
        self._name, self._run = name, run

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == fullname:  # a loader may serve several modules, such as that of a zip archive
                    self._run(module)

            spec.loader.exec_module = exec_module
        return spec
