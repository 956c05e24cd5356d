"""What the program of a model reads by other ways than the attributes of its modules."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy
from torch import Tensor, nn

__all__ = ["PLAIN", "OutsideNames", "has_parts", "is_plain", "is_small"]

PLAIN = (bool, int, float, str, bytes, type(None), numpy.generic)
PACKAGES = ("torch.", f"{__name__.partition('.')[0]}.")
LIBRARY = sysconfig.get_path("stdlib") + os.sep
AROUND: tuple[tuple[Any, str], ...] = (
    ((staticmethod, classmethod), "__func__"),
    (property, "fget"),
    ((functools.cached_property, functools.partial), "func"),
    ((FunctionType, type(functools.cache(len))), "__wrapped__"),
)  # what has a function, and where; others, such as modules that load others, are not asked
SMALL, MOST = 32, 128  # entries of a list, and of a dict, whose contents count


def is_small(value: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> bool:
    """Whether its contents count: it is no log or table that grows."""
    return len(value) <= (MOST if isinstance(value, dict) else SMALL)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a text, or few of them in lists and dicts."""
    if isinstance(value, (tuple, list, dict)):
        return is_small(value) and all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, PLAIN)


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


class OutsideNames:
    """What methods of classes read by other ways than `self`: global names, closures, defaults of arguments,
    attributes of classes; also in modules, classes, objects and dicts that these names are.

    Functions that methods call count, too, if they are in the same file, or in one of no library. Of what a
    library reads, plain values count: it has many names, and a program changes few of them.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._places: list[tuple[str, Any, Iterable[str]]] = []  # what has it, where it is read, the names
        self._read: dict[int, FunctionType] = {}
        self._names = set[str]()  # that functions of no library read
        self._libraries = set[int]()  # where libraries read, by id
        for kind in dict.fromkeys(each for one in classes for each in one.__mro__):
            if not issubclass(nn.Module, kind) and not _is_of_torch(kind):
                file = str(getattr(sys.modules.get(kind.__module__), "__file__", ""))
                self._add(f"class {kind.__qualname__}", kind, [*vars(kind)], library=_is_library(file))
                for method in [*vars(kind).values()]:
                    self._follow(method)

    def _add(self, where: str, owner: Any, names: Iterable[str], *, library: bool) -> None:
        self._places.append((where, owner, names))
        if library:
            self._libraries.add(id(owner))

    def _follow(self, value: Any, within: str | None = None) -> None:
        """Note what a function reads, or that of a property, a static method or a decorated function.

        Args:
            within: the file (module) that names it; None: it is a method.
        """
        for one in value, *(getattr(value, name, None) for kind, name in AROUND if isinstance(value, kind)):
            if not isinstance(one, FunctionType) or id(one) in self._read:
                continue
            library = _is_of_torch(one) or _is_library(one.__code__.co_filename)
            if library and within not in (None, one.__module__):
                continue
            self._read[id(one)] = one
            names, closure, at = (
                [*_names_in(one.__code__)],
                _Closure(one),
                f"{one.__qualname__} ({id(one):x})",
            )
            self._names.update(() if library else names)
            self._add(f"module {one.__module__}", one.__globals__, names, library=library)
            self._add(f"closure of {at}", closure, closure, library=library)
            defaults: dict[Any, Any] = {
                **dict(enumerate(one.__defaults__ or ())),
                **(one.__kwdefaults__ or {}),
            }
            self._add(f"defaults of {at}", defaults, defaults, library=library)
            found = [*map(one.__globals__.get, names), *map(closure.get, closure)]
            files = [vars(it) for it in found if isinstance(it, ModuleType) and not library]
            found += [file[name] for file in files for name in names if name in file]
            for it in found:
                self._follow(it, one.__module__)

    def values(self) -> Iterator[tuple[str, Mapping[str, Any], list[str]]]:
        """Yield (what has it, what it is read from, names) of plain values, and of what leads to them now."""
        left, known = [*self._places], set[tuple[int, str]]()
        while left:
            where, owner, names = left.pop()
            held: Mapping[str, Any] = owner if isinstance(owner, Mapping) else vars(owner)
            there = [name for name in [*held] if name in self._names] if names is self._names else names
            chosen: list[str] = []
            for name in there:
                if (id(owner), name) in known or name not in held or str(name).startswith("__"):
                    continue
                known.add((id(owner), name))
                value = held[name]
                leads = id(owner) not in self._libraries and _leads(value)
                if leads:
                    inside = [*value] if isinstance(value, dict) else self._names
                    left.append((f"{where}.{name}", value, inside))
                if leads or _is_flag(value):
                    chosen.append(name)
            if chosen:
                yield where, held, chosen


def _names_in(code: CodeType) -> Iterator[str]:
    """The global names and attributes that code reads, with that of the functions in it."""
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names_in(one)


def _is_library(file: str) -> bool:
    return file.startswith(LIBRARY) or f"{os.sep}site-packages{os.sep}" in file


def _is_of_torch(thing: Any) -> bool:
    """Whether it is code of PyTorch's, or of this package."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None)
    return f"{name}.".startswith(PACKAGES)


def has_parts(value: Any) -> bool:
    """Whether a value is an object with attributes, which are plain as far as is known."""
    other = not isinstance(value, (Tensor, ModuleType, type, FunctionType)) and hasattr(value, "__dict__")
    return other and not _is_of_torch(type(value))


def _leads(value: Any) -> bool:
    """Whether parts of a value may be read: of a module (file), a class, an object of one, or a dict.

    What is empty may be a cache, which the first run fills.
    """
    if isinstance(value, dict):
        return bool(value) and is_plain(value)
    if isinstance(value, (ModuleType, type)):
        return not (_is_of_torch(value) or (isinstance(value, type) and issubclass(value, nn.Module)))
    return has_parts(value) and not isinstance(value, nn.Module)


def _is_flag(value: Any) -> bool:
    """Whether a change of it shows in a key."""
    if isinstance(value, (tuple, list)):
        return bool(value) and is_plain(value)
    return isinstance(value, (*PLAIN, Iterator, Tensor)) and not isinstance(value, nn.Parameter)
