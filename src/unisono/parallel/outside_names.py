"""What the methods of modules read outside them: attributes of their classes, global names, closures.

Only plain values: a flag or a number that a training script changes decides what the model runs. Iterators,
too: what comes next may decide it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["outside_of"]

FLAGS = (bool, int, float, str, type(None), Iterator)
PYTORCH = "torch."


class _Closure(Mapping[str, Any]):
    """The variables of a closure by name."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # nothing yet
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


def outside_of(classes: Iterable[type]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield (what has it, what it is read from, its name) of each plain value, once.

    Functions that methods call count, too, if they are in the same file.
    """
    seen = set[tuple[int, str]]()
    for kind in dict.fromkeys(each for one in classes for each in one.__mro__):
        if issubclass(nn.Module, kind) or f"{kind.__module__}.".startswith(PYTORCH):
            continue
        where = f"class {kind.__qualname__}"
        yield from ((where, vars(kind), name) for name in [*vars(kind)] if _is_flag(name, vars(kind)[name]))
        for method in [*vars(kind).values()]:
            if isinstance(method, FunctionType):
                yield from _read_by(method, seen)


def _read_by(
    function: FunctionType, seen: set[tuple[int, str]]
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    places: list[tuple[str, Mapping[str, Any], Iterable[str]]] = [
        (f"module {function.__module__}", function.__globals__, function.__code__.co_names),
    ]
    if function.__closure__:
        closure = _Closure(function)
        places.append((f"closure of {function.__qualname__}", closure, closure))
    for where, held, names in places:
        for name in names:
            key = id(function.__globals__ if held is function.__globals__ else function), name
            if name not in held or key in seen:
                continue
            seen.add(key)
            value = held[name]
            if _is_flag(name, value):
                yield where, held, name
            elif isinstance(value, FunctionType) and value.__module__ == function.__module__:
                yield from _read_by(value, seen)


def _is_flag(name: str, value: Any) -> bool:
    return isinstance(value, FLAGS) and not name.startswith("__")
