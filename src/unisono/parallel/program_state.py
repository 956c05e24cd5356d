"""What decides which program a model runs: the shapes of its inputs, and the settings of its modules."""

from __future__ import annotations

import copy
import dataclasses
import operator
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

from .graph.capture import STATE

if TYPE_CHECKING:
    from .graph.capture import Shapes

__all__ = ["FAR", "ModuleSettings", "ProgramCache", "kinds_of", "outside_of", "set_counter", "warn_counter"]

T = TypeVar("T")
PLAIN = (bool, int, float, str, bytes, type(None))
SMALL = 32  # entries of a list whose contents count
FAR = (
    999_999,
    1_000_000,
)  # what a counter may reach; before and after the next count a multiple of 2, 10, 100 ...
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
    attributes of their classes, and global names and closures of their methods.

    Args:
        leave_out: attributes (path, name) that are no settings.
        counters: a number that changes again and again counts something, and is left out from then on.
    Attributes:
        fresh: counters that the last call of `now` left out for the first time. See `keep`.
    """

    def __init__(
        self, model: nn.Module, leave_out: Iterable[tuple[str, str]] = (), *, counters: bool = False
    ) -> None:
        self._left_out, self._counters = frozenset(leave_out), counters
        self._seen = [(path, vars(module)) for path, module in model.named_modules()]
        self._kinds = {path: type(module) for path, module in model.named_modules()}
        objects = {
            id(value): (f"{path}.{leaf}", vars(value))
            for path, held in self._seen
            for leaf, value in held.items()
            if leaf not in UNSEEN and hasattr(value, "__dict__") and not isinstance(value, (Tensor, type))
        }
        for where, held in [*objects.values()]:  # and a configuration of a part within one of the whole
            for leaf, value in held.items():
                if hasattr(value, "__dict__") and not isinstance(value, (Tensor, type, nn.Module)):
                    objects.setdefault(id(value), (f"{where}.{leaf}", vars(value)))
        self._objects = [*objects.values()]
        self._outside = [*outside_of({*self._kinds.values()})]
        self.fresh: set[tuple[str, str]] = set()
        self._counted: set[tuple[str, str]] = set()
        self._kept: set[tuple[str, str]] = set()
        self._last: dict[tuple[str, str], Any] = {}
        self._changes: dict[tuple[str, str], int] = {}
        self._snapshots: list[_Snapshot] = []
        self._read: list[Any] = []  # of what is outside
        self._key: frozenset[Any] = frozenset()

    def now(self) -> frozenset[Any]:
        """The settings as a key."""
        self.fresh = set()
        read = [held.get(leaf) for _, held, leaf in self._outside]
        same = bool(self._snapshots) and all(map(operator.is_, read, self._read))
        if not same or any(snapshot.changed for snapshot in self._snapshots):
            self._read, self._snapshots = read, [_Snapshot(held) for _, held in [*self._seen, *self._objects]]
            self._key = self._found()
        return self._key

    def _found(self) -> frozenset[Any]:
        found = dict(self._all())
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
            (where, leaf) for where, each, leaf in self._outside if isinstance(each.get(leaf), Iterator)
        )
        return found.union(outside)

    def keep(self, at: tuple[str, str]) -> None:
        """Count an attribute as a setting, however often it changes: it decides what the model runs."""
        self._kept.add(at)
        self._snapshots = []

    def _all(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for path, held in [*self._seen, *self._objects]:
            for leaf, value in [*held.items()]:
                if leaf not in UNSEEN and (path, leaf) not in self._left_out:
                    yield (path, leaf), _plain(value)
        for where, held, leaf in self._outside:
            yield (where, leaf), _plain(held.get(leaf))

    def give(self, shapes: Shapes) -> None:
        """Set the attributes of a copy without values to those of this model."""
        copies = dict(shapes.model.named_modules())
        for where, held in self._objects:  # configurations
            thing = _thing_at(copies, where)
            if hasattr(thing, "__dict__"):
                vars(thing).update({key: copy.deepcopy(it) for key, it in held.items() if _is_plain(it)})
        for path, held in self._seen:
            module = copies.get(path)
            another = not issubclass(self._kinds[path], type(module))  # it stands for a fused one
            for leaf, value in [*held.items()] if module is not None else ():
                if leaf in UNSEEN or (another and leaf.startswith("_")):
                    continue
                if _is_plain(value):
                    vars(module)[leaf] = copy.deepcopy(value)
                elif isinstance(value, Tensor) and leaf in vars(module):
                    vars(module)[leaf] = shapes.blank(value)


class _Snapshot:
    """The attributes of an object at some time: whether they are others now is seen fast."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._held, self._names, self._values = held, [*held], [*held.values()]
        self._contents = [
            (value, _plain(value))
            for name, value in held.items()
            if name not in UNSEEN and isinstance(value, (Tensor, tuple, list, dict))
        ]

    @property
    def changed(self) -> bool:
        """Whether there are other attributes or values, or contents of a list, a dict or a tensor's shape."""
        held = self._held
        same = [*held] == self._names and all(map(operator.is_, held.values(), self._values))
        return not same or any(_plain(value) != before for value, before in self._contents)


def warn_counter(at: tuple[str, str], model: str, why: object = "") -> None:
    """Tell the user that a number costs a recording in each step."""
    name = ".".join(filter(None, at))
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
    held = _thing_at(dict(model.named_modules()), where)
    kind = type(getattr(held, "__dict__", {}).get(leaf))
    if kind in (int, float):
        vars(held)[leaf] = value if kind is int else value * 1e-6
    return kind in (int, float)


def _thing_at(modules: Mapping[str, nn.Module], where: str) -> Any:
    """A module, or an object in an attribute of one; None: there is none."""
    path, names = where, list[str]()
    while path and path not in modules:
        path, _, name = path.rpartition(".")
        names.insert(0, name)
    thing: Any = modules.get(path)
    for name in names:
        thing = getattr(thing, name, None)
    return thing


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) <= SMALL and all(map(_is_plain, value))
    if isinstance(value, dict):
        return len(value) <= SMALL and all(map(_is_plain, value.values()))
    return isinstance(value, PLAIN)


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return "Parameter"  # others stand for it while it is gathered: an LSTM has a list of its own
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)) and len(value) <= SMALL:
        return tuple(map(_plain, value))
    if isinstance(value, dict) and len(value) <= SMALL:
        return tuple((str(key), _plain(part)) for key, part in value.items())
    return value if isinstance(value, PLAIN) else type(value).__name__


# ---- names outside the model ----


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
