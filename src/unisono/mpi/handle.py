"""Handles: an object of MPI is a handle, and several handles may be of one state; a null handle has none."""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from unisono.mpi import constants
from unisono.mpi.errors import Exception, wrong_class

_numbers = itertools.count(1)
_states: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
names: dict[tuple[type, int], str] = {}
"""The names of predefined handles, by family and number."""


class State:
    """What handles refer to: it has a number, its attributes, and a name. kind: the class of handles."""

    name = ""
    kind: Any = None
    _number = 0
    _attributes: dict[int, Any] | None = None

    @property
    def number(self) -> int:
        """A number of its own, from when it is asked for."""
        if self._number == 0:
            self._number = next(_numbers)
            _states[self._number] = self
        return self._number

    @property
    def attributes(self) -> dict[int, Any]:
        """Values of a program, by key."""
        if self._attributes is None:
            self._attributes = {}
        return self._attributes


class Handle:
    """A handle. `Handle(other)` is another one of the same state."""

    _state: Any = None
    _null = constants.ERR_ARG
    """The error class of the null handle."""

    def __new__(cls, other: Any = None) -> Any:
        self = super().__new__(cls)
        if other is not None:
            if not isinstance(other, cls._family()):
                raise TypeError(f"expected {cls._family().__name__}, got {type(other).__name__}")
            self._adopt(other)
        return self

    @classmethod
    @functools.cache
    def _family(cls) -> type:
        """The class of all handles of this kind, as `Comm` of `Intracomm`."""
        return next(one for one in cls.__mro__ if "_null" in vars(one))

    def _adopt(self, other: Any) -> None:
        self._state = other._state

    @classmethod
    def _of(cls, state: Any) -> Any:
        self = cls.__new__(cls)
        self._refer(state)
        return self

    def _refer(self, state: Any) -> None:
        self._state = state
        if state is not None and state.kind is None:
            state.kind = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("unisono."))

    def _alive(self) -> Any:
        """The state.

        Raises:
            Exception: the handle is null.
        """
        if self._state is None:
            raise Exception(self._null, f"this {type(self).__name__} is null")
        return self._state

    def _free(self) -> None:
        """Release it."""
        self._alive()
        self._state = None

    def _refuse_constant(self, done: str) -> None:
        name = self._constant()
        if name is not None:
            raise Exception(self._null, f"{name} cannot be {done}")

    def __bool__(self) -> bool:
        return self._state is not None

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, self._family()):
            return NotImplemented
        return self._state is other._state

    def __ne__(self, other: object) -> Any:
        if not isinstance(other, self._family()):
            return NotImplemented
        return self._state is not other._state

    __hash__ = None  # type: ignore[assignment]

    @property
    def handle(self) -> int:
        """A number for this state; 0: null."""
        return 0 if self._state is None else self._state.number

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """A handle of the state with this number."""
        handle = int(handle)
        if handle and handle not in _states:
            raise ValueError(f"no {cls.__name__} has the handle {handle}")
        return (_states[handle].kind or cls)._of(_states[handle]) if handle else cls()

    def toint(self) -> int:
        """See `handle`."""
        return self.handle

    py2f = toint
    fromint = f2py = fromhandle

    def free(self) -> None:
        """Make this handle null, unless it is a constant."""
        name = self._constant()
        if name is None and self._state is not None:
            self._release()
        elif name is None or getattr(sys.modules["unisono.mpi"], name) is not self:
            self._state = None

    def _release(self) -> None:
        """Free what it refers to."""
        self._state = None

    def _constant(self) -> str | None:
        return names.get((self._family(), self.handle))

    def __reduce__(self) -> Any:
        name = self._constant()
        if name is None:
            raise ValueError(f"cannot pickle this {type(self).__name__}: it belongs to one process")
        if getattr(sys.modules["unisono.mpi"], name) is self:
            return name
        return _named, (type(self), name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._constant() or self.handle}>"


def method(doc: str, body: Callable[..., Any]) -> Any:
    """A method of one expression; `name_methods` gives it its name."""
    body.__doc__ = doc
    return body


def getter(doc: str, read: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A method `Get_...` and its property: what `read` finds in the state of a handle."""
    get = method(doc, lambda self: read(self._alive()))
    return get, property(get)


def name_methods(cls: type) -> None:
    """Give what `method` and `getter` have made the names that they have in their class."""
    for name, body in vars(cls).items():
        if getattr(body, "__name__", "") == "<lambda>":
            body.__name__, body.__qualname__ = name, f"{cls.__name__}.{name}"


class HasName(Handle):
    """The methods of a handle whose state has a name that programs set."""

    def Get_name(self) -> str:
        """Its name."""
        if self._state is None:
            return f"MPI_{self._family().__name__.upper()}_NULL"
        return str(self._state.name)

    def Set_name(self, name: str) -> None:
        """Set its name."""
        if not isinstance(name, str | bytes):
            raise wrong_class("name", "str", name)
        self._alive().name = name

    name = property(Get_name, Set_name)


def _named(cls: Any, name: str) -> Any:
    """Another handle of a constant, after it was pickled."""
    return cls(getattr(sys.modules["unisono.mpi"], name))
