"""What decides which program a model runs: the shapes of its inputs, the settings of its modules, and what
their methods read by other ways than attributes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
import os
import sys
import sysconfig
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

from .graph.capture import STATE
from .graph.shapes import Shapes

T = TypeVar("T")
PLAIN = (bool, int, float, str, bytes, type(None), numpy.generic)
FUNCTIONS = (FunctionType, BuiltinFunctionType)
OBJECTS = 256  # that are followed, in attributes of modules, in lists and dicts there, and in each other
FAR = 999_999, 1_000_000  # what a counter may reach; before and after the next count a multiple of 2, 10, 100
PROGRAMS = 256  # that are kept; each belongs to inputs of other shapes, or other settings of modules
COUNTS = 8  # changes after which a number is a counter, which no longer tells one program from another
ADVANCING = (Iterator, deque, numpy.ndarray)
UNSEEN = STATE - {"training"} | {"forward"}


def kinds_of(inputs: Any, floats: torch.dtype | None = None) -> Any:
    """What tells one program from another: names, shapes and types. It can be a key of a dict.

    Args:
        floats: what floating inputs are cast to; None: they are not.
    """
    if isinstance(inputs, Tensor):
        cast = floats is not None and inputs.is_floating_point()
        return tuple(inputs.shape), floats if cast else inputs.dtype
    if isinstance(inputs, Mapping):
        return tuple((str(key), kinds_of(value, floats)) for key, value in inputs.items())
    if dataclasses.is_dataclass(inputs) and not isinstance(inputs, type):
        return kinds_of({one.name: getattr(inputs, one.name) for one in dataclasses.fields(inputs)}, floats)
    if isinstance(inputs, (tuple, list)):
        return tuple(kinds_of(value, floats) for value in inputs)
    return inputs if isinstance(inputs, PLAIN) else type(inputs).__name__


class ProgramCache(dict[Any, T]):
    """What was found of programs, by their keys. The least recently used goes where there are `PROGRAMS`.

    Ranks that look the same keys up in the same order have the same ones.
    """

    def __setitem__(self, key: Any, value: T) -> None:
        """Keep it as the newest."""
        self.pop(key, None)
        while len(self) >= PROGRAMS:
            del self[next(iter(self))]
        super().__setitem__(key, value)

    def use(self, key: Any) -> bool:
        """Whether it is there; then it is the newest."""
        if key in self:
            self[key] = self[key]
        return key in self


class ModuleSettings:
    """The plain attributes of the modules of a model, such as `training` and flags of the program's own.

    Those of a configuration count, too: of objects that are attributes of a module, and are no modules. So do
    attributes of their classes, and what their methods read by global names, closures and defaults.

    Args:
        leave_out: attributes (path, name) that are no settings.
        counters: a number that changes again and again counts something, and is left out from then on.
    Attributes:
        fresh: counters that the last call of `now` left out for the first time. See `check_counters`.
    """

    def __init__(
        self, model: nn.Module, leave_out: Iterable[tuple[str, str]] = (), *, counters: bool = False
    ) -> None:
        self._left_out, self._counters = frozenset(leave_out), counters
        self._seen = [(path, vars(module)) for path, module in model.named_modules()]
        self._kinds = {path: type(module) for path, module in model.named_modules()}
        self._names = OutsideNames({*self._kinds.values()})
        self.fresh: set[tuple[str, str]] = set()
        self._counted: set[tuple[str, str]] = set()
        self._kept: set[tuple[str, str]] = set()
        self._last: dict[tuple[str, str], Any] = {}
        self._changes: dict[tuple[str, str], int] = {}
        self._sizes = Counter[tuple[str, str]]()  # how often the length of a long list or dict changed
        self._inside: list[_Snapshot] = []
        self._beyond: list[_Snapshot] = []
        self._key: frozenset[Any] | None = None
        each = ((path, leaf, value) for path, held in self._seen for leaf, value in held.items())
        self._functions = {(path, leaf): it for path, leaf, it in each if isinstance(it, FUNCTIONS)}
        self._follow()
        self._follow_outside()

    def _follow(self) -> None:
        """Find the objects that attributes are now."""
        self._objects = [*_objects_in(self._seen)]
        every = [*self._seen, *self._objects]
        self._inside = [_Snapshot(held, logs=self._logs_of(where)) for where, held in every]

    def _follow_outside(self) -> None:
        """Find what names lead to now."""
        self._outside = [*self._names.values()]
        self._beyond = [
            _Snapshot(held, names, logs=self._logs_of(where)) for where, held, names in self._outside
        ]

    def _logs_of(self, where: str) -> set[str]:
        return {leaf for (at, leaf), count in self._sizes.items() if at == where and count > COUNTS}

    def now(self) -> frozenset[Any]:
        """The settings as a key."""
        self.fresh = set()
        for snapshots, follow in ((self._inside, self._follow), (self._beyond, self._follow_outside)):
            if any(snapshot.changed for snapshot in snapshots):
                follow()
                self._key = None
        if self._key is None:
            self._key = self._found()
        return self._key

    def _found(self) -> frozenset[Any]:
        found = dict(self._all())
        for at, value in found.items() if self._last else ():
            if isinstance(value, tuple) and len(value) > SMALL:
                before = self._last.get(at)
                self._sizes[at] += not isinstance(before, tuple) or len(before) != len(value)
        found = {at: value for at, value in found.items() if self._sizes[at] <= COUNTS}
        if self._last:
            for at, value in found.items():
                if type(value) in (int, float) and self._last.get(at, value) != value:
                    self._changes[at] = self._changes.get(at, 0) + 1
        self._last = found
        if not self._counters:
            return frozenset(found.items())
        counted = {at for at, count in self._changes.items() if count > COUNTS} - self._kept
        self.fresh, self._counted = counted - self._counted, counted
        return frozenset(item for item in found.items() if item[0] not in counted)

    def advancing(self) -> set[tuple[str, str]]:
        """Attributes whose state no key shows, and a run may change: iterators, queues, arrays of NumPy."""
        held = [*self._seen, *self._objects]
        found = {(path, leaf) for path, each in held for leaf in each if isinstance(each[leaf], ADVANCING)}
        outside = (
            (where, leaf)
            for where, each, names in self._outside
            for leaf in names
            if isinstance(each.get(leaf), Iterator)
        )
        return found.union(outside)

    def check_counters(self, shapes: Shapes, problem: Callable[[], object]) -> None:
        """Leave fresh counters out only where other numbers change nothing that matters.

        Args:
            shapes: a copy of the model, which gets other numbers.
            problem: what is wrong with such a copy; nothing: it is as it was.
        """
        for at in sorted(self.fresh, key=str):
            for value in FAR:
                self.give(shapes)
                with self._counting(shapes.model, at, value) as there:
                    wrong = problem() if there else ""
                if wrong or (not there and at[0] in {where for where, _, _ in self._outside}):
                    self._kept.add(at)  # it decides what the model runs
                    self._key = None
                    _warn_counter(at, type(shapes.model).__name__, wrong or "")
                    break

    @contextlib.contextmanager
    def _counting(self, model: nn.Module, at: tuple[str, Any], value: int) -> Iterator[bool]:
        """Meanwhile a counter is another number, in a copy of the model or outside; False: none was set."""
        outside = [held for where, held, _ in self._outside if where == at[0]]
        if not outside:
            yield set_counter(model, at, value)
            return
        held = outside[0] if isinstance(outside[0], dict) else {}
        before = held.get(at[1])
        try:
            yield _set(held, at[1], value)
        finally:
            held.update({at[1]: before} if held else {})

    def _all(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for path, held in [*self._seen, *self._objects]:
            for leaf, value in [*held.items()]:
                if leaf not in UNSEEN and (path, leaf) not in self._left_out:
                    yield (path, leaf), _in_key(value)
        for where, held, names in self._outside:
            for leaf in names:
                if (where, leaf) not in self._left_out:
                    value = held.get(leaf)
                    yield (where, leaf), _Itself(value) if isinstance(value, Tensor) else _in_key(value)

    def give(self, shapes: Shapes) -> None:
        """Set the attributes of a copy without values to those of this model."""
        copies = dict(shapes.model.named_modules())
        for where, held in self._objects:  # configurations
            plain = {key: copy.deepcopy(it) for key, it in held.items() if is_plain(it) or is_long(it)}
            _parts_of(_thing_at(copies, where)).update(plain)
        for path, held in self._seen:
            module = copies.get(path)
            another = not issubclass(self._kinds[path], type(module))  # it stands for a fused one
            for leaf, value in [*held.items()] if module is not None else ():
                if leaf in UNSEEN or (another and leaf.startswith("_")):
                    continue
                if is_plain(value) or is_long(value) or self._is_another((path, leaf), value):
                    vars(module)[leaf] = copy.deepcopy(value)
                elif isinstance(value, Tensor) and leaf in vars(module):
                    vars(module)[leaf] = shapes.blank(value)

    def _is_another(self, at: tuple[str, str], value: Any) -> bool:
        """Whether an attribute is, or was, another function than at first, of which copies have their own."""
        if isinstance(value, FUNCTIONS) and self._functions.get(at) is not value:
            self._functions.pop(at, None)
            return True
        return False


class _Itself:
    """Equal to what stands for the same object only."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


class _Snapshot:
    """The attributes of an object, or what a list or dict has, at some time: a change is seen fast.

    Args:
        logs: names of lists and dicts whose contents do not count.
    """

    def __init__(self, held: Any, chosen: Sequence[str] | None = None, logs: Iterable[str] = ()) -> None:
        self._held, self._chosen = held, chosen
        self._names, self._values = self._named(), [*self._now()]
        names = self._names if isinstance(self._names, list) else range(self._names)
        unseen = UNSEEN.union(logs)
        seen = [value for name, value in zip(names, self._values, strict=True) if name not in unseen]
        count = (value for value in seen if isinstance(value, (tuple, list, dict)))
        self._within = [_Snapshot(value) for value in count if is_small(value) or is_long(value)]
        self._tensors = [(value, _plain(value)) for value in seen if isinstance(value, Tensor)]

    def _named(self) -> Any:
        """The names; of a list their number."""
        if self._chosen is None:
            return [*self._held] if isinstance(self._held, dict) else len(self._held)
        return self._chosen

    def _now(self) -> Iterable[Any]:
        if self._chosen is None:
            return self._held.values() if isinstance(self._held, dict) else self._held
        return map(self._held.get, self._chosen)

    @property
    def changed(self) -> bool:
        """Whether there are other attributes or values, or contents of a list, a dict or a tensor's shape."""
        if self._named() != self._names or not all(map(operator.is_, self._now(), self._values)):
            return True
        within = bool(self._within) and any(one.changed for one in self._within)
        return within or (
            bool(self._tensors) and any(_plain(value) != before for value, before in self._tensors)
        )


def _objects_in(seen: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, attributes) of each object in attributes of modules, once: also of a part of one."""
    left = deque(seen)
    known, most = {id(held) for _, held in left}, len(left) + OBJECTS
    while left:
        where, held = left.popleft()
        for leaf, value in [*held.items()]:
            for name, thing in _things(leaf, value) if leaf not in UNSEEN else ():
                parts = _parts_of(thing)
                if id(parts) not in known and len(known) < most:
                    known.add(id(parts))
                    left.append((f"{where}.{name}", parts))
                    yield left[-1]


def _things(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The object with attributes, or the dict, that a value is, and those in a list or tuple."""
    if isinstance(value, (list, tuple)):
        for number, entry in enumerate(value) if is_small(value) else ():
            yield from _things(f"{name}.{number}", entry)
    elif isinstance(value, dict):
        yield from [(name, value)] if is_small(value) else ()
    elif has_parts(value):
        yield name, value


def _parts_of(thing: Any) -> dict[Any, Any]:
    """The entries of a dict, or the attributes of an object."""
    return thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})


def _warn_counter(at: tuple[str, str], model: str, why: object) -> None:
    """Tell the user that a number costs a recording in each step."""
    name = ".".join(map(str, filter(None, at)))
    warnings.warn(
        f'"{name}" changes again and again, and decides what {model} runs: its program is recorded anew for '
        f"each value, which takes seconds. Leave it out of the forward, or make it a buffer. {why}",
        stacklevel=2,
    )


def set_counter(model: nn.Module, at: tuple[str, str], value: int) -> bool:
    """Give a number that changes in a copy of a model another value; False: there is none.

    Args:
        value: a millionth of it, if the number is a float: which may be a share or a temperature.
    """
    where, leaf = at
    return _set(_parts_of(_thing_at(dict(model.named_modules()), where)), leaf, value)


def _set(held: dict[Any, Any], leaf: Any, value: int) -> bool:
    kind = type(held.get(leaf))
    if kind in (int, float):
        held[leaf] = value if kind is int else value * 1e-6
    return kind in (int, float)


def _thing_at(modules: Mapping[str, nn.Module], where: str) -> Any:
    """A module, or an object in an attribute of one; None: there is none."""
    path, names = where, list[str]()
    while path and path not in modules:
        path, _, name = path.rpartition(".")
        names.insert(0, name)
    thing: Any = modules.get(path)
    for name in names:
        if isinstance(thing, (list, tuple, dict)):
            pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
            thing = {str(key): entry for key, entry in pairs}.get(name)
        else:
            thing = getattr(thing, name, None)
    return thing


def _in_key(value: Any) -> Any:
    """What a key has of an attribute; entries of a small dict are attributes of their own."""
    if is_long(value):
        return tuple(value.items() if isinstance(value, dict) else value)
    return "dict" if isinstance(value, dict) else _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return "Parameter"  # others stand for it while it is gathered: an LSTM has a list of its own
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)) and is_small(value):
        return tuple(map(_plain, value))
    if isinstance(value, dict) and is_small(value):
        return tuple((str(key), _plain(part)) for key, part in value.items())
    return value if isinstance(value, (*PLAIN, *FUNCTIONS)) else type(value).__name__


# ---- names of other objects ----


PACKAGES = ("torch.", f"{__name__.partition('.')[0]}.")
LIBRARY = sysconfig.get_path("stdlib") + os.sep
AROUND: tuple[tuple[Any, str], ...] = (
    ((staticmethod, classmethod), "__func__"),
    (property, "fget"),
    ((functools.cached_property, functools.partial), "func"),
    ((FunctionType, type(functools.cache(len))), "__wrapped__"),
)  # what has a function, and where; others, such as modules that load others, are not asked
SMALL, MOST = 32, 128  # entries of a list, and of a dict, whose contents count
LONG = 4096  # numbers and texts in an attribute that is a list or dict; they count unless it is a log


def is_small(value: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> bool:
    """Whether its contents count, of whatever kind they are, also while it grows."""
    return len(value) <= (MOST if isinstance(value, dict) else SMALL)


def is_long(value: Any) -> bool:
    """Whether it has more entries, all of them numbers or texts. What grows again and again is a log."""
    if not isinstance(value, (tuple, list, dict)) or is_small(value) or len(value) > LONG:
        return False
    entries = value.values() if isinstance(value, dict) else value
    return all(isinstance(one, PLAIN) for one in entries)


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
            names, closure = [*_names_in(one.__code__)], _Closure(one)
            at = f"{one.__qualname__} ({id(one):x})"
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
        return bool(value) and (is_plain(value) or is_long(value))
    flag = isinstance(value, (*PLAIN, Iterator, Tensor)) and not isinstance(value, nn.Parameter)
    return flag or is_long(value)
