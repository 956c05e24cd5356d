"""`Info`: keys and values that a call may use as hints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.handle import Handle, State


class _Pairs(State):
    def __init__(self, pairs: dict[str, str]) -> None:
        self.pairs = pairs


def _text(value: Any, name: str, longest: int) -> str:
    if isinstance(value, bytes):
        value = value.decode()
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected str, got {type(value).__name__}")
    if len(value) > longest:
        raise Exception(getattr(constants, f"ERR_INFO_{name.upper()}"), f"more than {longest} characters")
    return value


class Info(Handle, MutableMapping[str, str]):
    """Keys and values, in the order in which they were set; also a mapping."""

    _null = constants.ERR_INFO

    def _pairs(self) -> dict[str, str]:
        return self._alive().pairs

    @classmethod
    def Create(cls, items: Any = None) -> Info:
        """An info of these pairs."""
        info: Info = cls._of(_Pairs({}))
        if items is not None:
            info.update(items)
        return info

    @classmethod
    def Create_env(cls, args: Any = None) -> Info:
        """What is known about the start of the program."""
        command = list(args) if args is not None else sys.argv
        return cls.Create({"command": command[0] if command else "", "argv": " ".join(command[1:])})

    Free = Handle._free

    def Dup(self) -> Info:
        """A copy."""
        return type(self).Create(dict(self._pairs()))

    def Get(self, key: str) -> str | None:
        """The value of a key, or None."""
        return self._pairs().get(_text(key, "key", constants.MAX_INFO_KEY))

    def Set(self, key: str, value: str) -> None:
        """Set the value of a key."""
        key = _text(key, "key", constants.MAX_INFO_KEY)
        self._pairs()[key] = _text(value, "value", constants.MAX_INFO_VAL)

    def Delete(self, key: str) -> None:
        """Remove a key."""
        if self._pairs().pop(_text(key, "key", constants.MAX_INFO_KEY), None) is None:
            raise Exception(constants.ERR_INFO_NOKEY, key)

    def Get_nkeys(self) -> int:
        """The number of keys."""
        return len(self._pairs())

    def Get_nthkey(self, n: int) -> str:
        """The key with a number."""
        keys = list(self._pairs())
        if not 0 <= n < len(keys):
            raise Exception(constants.ERR_ARG, f"key {n} of {len(keys)}")
        return keys[n]

    def __reduce__(self) -> Any:
        return super().__reduce__() if self._constant() else (type(self).Create, (dict(self._pairs()),))

    # ---- a mapping; MutableMapping has the rest

    def __len__(self) -> int:
        return len(self._pairs()) if self else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def _filled(self, key: object) -> dict[str, str]:
        if not self:
            raise KeyError(key)
        return self._pairs()

    def __getitem__(self, key: str) -> str:
        return self._filled(key)[key]

    def __setitem__(self, key: str, value: str) -> None:
        self._filled(key)
        self.Set(key, value)

    def __delitem__(self, key: str) -> None:
        del self._filled(key)[key]

    def keys(self) -> list[str]:  # type: ignore[override]
        """All keys."""
        return list(self._pairs()) if self else []

    def values(self) -> list[str]:  # type: ignore[override]
        """All values."""
        return [self[key] for key in self]

    def items(self) -> list[tuple[str, str]]:  # type: ignore[override]
        """All pairs."""
        return [(key, self[key]) for key in self]

    def update(self, items: Any = (), **kwds: str) -> None:  # type: ignore[override]
        """Set several keys."""
        self._filled("the info is null")
        super().update(items, **kwds)

    def popitem(self) -> tuple[str, str]:
        """Remove the last pair and return it."""
        return self._filled("the info is null").popitem()

    def copy(self) -> Info:
        """A copy; of a null info, a null info."""
        return self.Dup() if self else type(self)()

    def clear(self) -> None:
        """Remove all keys."""
        if self:
            self._pairs().clear()


class HasInfo(Handle):
    """The methods of an object to which hints are given. None has an effect."""

    _hints = property(lambda self: self._alive().info)

    def Get_info(self) -> Info:
        """Its hints."""
        return Info.Create(self._hints)

    def Set_info(self, info: Info) -> None:
        """Set hints."""
        self._hints.update(dict(info.items()))

    info = property(Get_info, Set_info)


INFO_NULL = Info()
INFO_ENV = Info.Create_env()
