"""Modules that have another name now: their old names still work, with a DeprecationWarning."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

__all__ = ["find_alias", "find_spec"]

_ROOMS = {
    "engine": "backends bootstrap costs diagnosis encoding group store",
    "engine.base": "authentication limits timeouts",
    "engine.environment": "env settings",
    "engine.memory": "arrays buffers",
    "engine.operations": "kinds reduction",
    "commands": "autoload bench calibrate cli demo doctor drawing launch",
}
_NAMES = {
    "checking": "engine.base.validation",
    "parallel.replicas": "parallel.replicated_parameters",
    "parallel.swapped": "parallel.swap",
    "parallel.tensor": "parallel.tensor_parallel",
    "parallel.units": "parallel.sharded_parameters",
    "parallel.watch": "parallel.step_trace",
    "parallel.compression.choices": "parallel.compression.comm_hooks",
    "parallel.layouts.price": "parallel.costs.collectives",
    "parallel.layouts.record": "parallel.layouts.redistribute",
    "plans.coded": "plans.coded_edges",
    "plans.exposure": "plans.zero_copy",
    "plans.origins": "plans.provenance",
}
_ALIASES = {
    f"unisono.{old}": f"unisono.{room}.{old}" for room, names in _ROOMS.items() for old in names.split()
} | {f"unisono.{old}": f"unisono.{new}" for old, new in _NAMES.items()}


def find_alias(name: str) -> ModuleSpec | None:
    """The spec of an old name of a room; None for any other. Example: "unisono.group" -> engine/group/."""
    if name not in _ALIASES:
        return None
    this = sys.modules[__name__]
    if this not in sys.meta_path:
        sys.meta_path.insert(0, this)
    warnings.warn(f"the module {name} is now {_ALIASES[name]}", DeprecationWarning, stacklevel=3)
    return _spec(name, _ALIASES[name])


def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG001
    """The spec of an old name inside a room. This module is a finder, the first: others would load a copy."""
    room = next((old for old in _ALIASES if name.startswith(f"{old}.")), None)
    return None if room is None else _spec(name, _ALIASES[room] + name.removeprefix(room))


def _spec(old: str, new: str) -> ModuleSpec | None:
    found = importlib.util.find_spec(new)
    if found is None:
        return None
    spec = ModuleSpec(old, _AliasLoader(found))
    spec.submodule_search_locations = found.submodule_search_locations
    return spec


class _AliasLoader(Loader):
    """Loads a module by its new name: both names are one module."""

    def __init__(self, new: ModuleSpec) -> None:
        self._new = new

    def create_module(self, old: ModuleSpec) -> ModuleType:  # noqa: ARG002
        module = importlib.import_module(self._new.name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has set the old one

    def get_code(self, old: str) -> CodeType | None:  # noqa: ARG002
        """For `python -m`."""
        loader: Any = self._new.loader
        code: CodeType | None = loader.get_code(self._new.name)
        return code
