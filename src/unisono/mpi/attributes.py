"""Attributes: values that a program keeps with a communicator, a datatype or a window, by key."""

from __future__ import annotations

import builtins
import itertools
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.handle import Handle


class _Key(NamedTuple):
    """family: the class of its objects; None: it was freed while some had values of it."""

    family: type | None
    copy: Any
    delete: Any
    nopython: bool


_keys: dict[int, _Key] = {}
_numbers = itertools.count(0x68000001)


class HasAttributes(Handle):
    """The methods of an object that has attributes."""

    @classmethod
    def Create_keyval(
        cls, copy_fn: Callable[..., Any] | bool | None = None,
        delete_fn: Callable[..., None] | None = None, nopython: bool = False,
    ) -> int:  # fmt: skip
        """A new key. copy_fn(object, key, value): the value in a duplicate; None or False: it has none."""
        number = next(_numbers)
        _keys[number] = _Key(cls._family(), copy_fn, delete_fn, nopython)
        return number

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Release a key; values that are set stay."""
        _keys[keyval] = cls._known(keyval)._replace(family=None)
        return constants.KEYVAL_INVALID

    def Get_attr(self, keyval: int) -> Any:
        """The value of a key, or None."""
        state = self._alive()
        if keyval in self._predefined():
            return self._predefined()[keyval]
        self._known(keyval)
        return state.attributes.get(keyval)

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Set the value of a key; an old one is deleted first."""
        state = self._alive()
        key = self._known(keyval)
        if keyval in state.attributes:
            self._delete(keyval)
        state.attributes[keyval] = int(attrval) if key.nopython else attrval

    def Delete_attr(self, keyval: int) -> None:
        """Delete the value of a key."""
        state = self._alive()
        self._known(keyval)
        if keyval not in state.attributes:
            raise Exception(constants.ERR_KEYVAL, f"key {keyval} has no value here")
        self._delete(keyval)

    def _predefined(self) -> dict[int, Any]:
        return {}

    @classmethod
    def _known(cls, keyval: int) -> _Key:
        if keyval not in _keys or _keys[keyval].family is not cls._family():
            raise Exception(constants.ERR_KEYVAL, f"there is no key {keyval}")
        return _keys[keyval]

    def _delete(self, keyval: int) -> None:
        delete = _keys[keyval].delete
        try:
            if callable(delete):
                _called(delete, self, keyval, self._state.attributes[keyval])
        finally:
            del self._state.attributes[keyval]

    def _delete_all(self) -> None:
        for keyval in reversed(list(self._state.attributes)):
            self._delete(keyval)

    def _copy_all(self, state: Any) -> None:
        """Give a duplicate the attributes that its keys copy."""
        for keyval, value in self._state.attributes.items():
            copy = _keys[keyval].copy
            if copy is True:
                state.attributes[keyval] = value
            elif callable(copy):
                found = _called(copy, self, keyval, value)
                if found is not NotImplemented:
                    state.attributes[keyval] = found


def _called(function: Callable[..., Any], *args: Any) -> Any:
    """What a key's function returns. As in other libraries, the error of the call is ERR_OTHER."""
    try:
        return function(*args)
    except builtins.Exception as error:
        traceback.print_exc()
        raise Exception(constants.ERR_OTHER, f"the function of an attribute raised {error!r}") from error
