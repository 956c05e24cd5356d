"""All private names that Unisono uses, and which of them this PyTorch does not have."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import unisono.torch_internals as package

from .probe import PrivateName, find

__all__ = ["missing", "names"]


def names() -> dict[str, list[PrivateName]]:
    """Return the private names by the module that uses them."""
    return {module.__name__.rpartition(".")[2]: found for module in _modules() if (found := [*_in(module)])}


def missing() -> list[PrivateName]:
    """Return the names that this PyTorch lacks though every version up to it has them.

    A name with `until` or `since` may be missing: another one does its work there.
    So may a name with `build`.
    """
    everything = [name for found in names().values() for name in found]
    return [
        name for name in everything if not (name.since or name.until or name.build) and find(name) is None
    ]


def _modules() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(package.__path__):
        if found.name not in ("catalog", "probe"):
            yield importlib.import_module(f"{package.__name__}.{found.name}")


def _in(module: ModuleType) -> Iterator[PrivateName]:
    for thing in vars(module).values():
        if isinstance(thing, PrivateName):
            yield thing
        elif isinstance(thing, dict):
            yield from (name for name in thing.values() if isinstance(name, PrivateName))
