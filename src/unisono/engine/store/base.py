"""`Store`: the interface of every key-value store. The subclasses store the bytes."""

from __future__ import annotations

import contextlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from unisono.engine.base import timeouts
from unisono.engine.base.closing import Closing
from unisono.engine.base.limits import is_limit, limit_text
from unisono.engine.base.validation import listed, text
from unisono.engine.store import operations
from unisono.engine.store.operations import Op, Reply
from unisono.errors import StoreError, StoreTimeout, message

BytesLike = bytes | bytearray | memoryview | str
_Self = TypeVar("_Self", bound="Store")


class Store(Closing, ABC):
    """Keys are text, values bytes (text is stored as UTF-8). Safe to use from several threads.

    Dict-like view: `s[key]`, `s[key] = value`, `del s[key]`, `key in s`, `len(s)`,
    `list(s)`, `dict(s)`. Unlike `get`,
    `s[key]` never waits: an absent key is a `KeyError`.

    A store belongs to the process that opened it: after a fork the child gets a `StoreError`
    and opens its own.

    Args:
        timeout_s: seconds for a call without a timeout of its own.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = _seconds(timeout_s)
        self._pid = os.getpid()
        self._closed = False

    # What a subclass implements: one operation, one reply.

    @abstractmethod
    def _call(self, op: Op, payload: bytes, timeout_s: float) -> Reply:
        """Run `op`, waiting at most `timeout_s` for its keys; `Reply.missing`: those that did not appear."""

    @abstractmethod
    def describe(self) -> str:
        """Which store this is, for error texts: "TCPStore 127.0.0.1:29500"."""

    def close(self) -> None:
        """Release all resources. A second call does nothing; waiting threads get a `StoreError`."""
        self._closed = True

    # The public operations.

    @property
    def timeout_s(self) -> float:
        """Seconds for a call without a timeout of its own."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = _seconds(seconds)

    def set(self, key: str, value: BytesLike, timeout_s: float | None = None) -> None:
        """Store `value` under `key`; replaces an earlier value."""
        self._ask(operations.Set(_key(key)), _value(value), timeout_s)

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """The value of `key`, waiting until it exists.

        Raises:
            StoreTimeout: it did not appear in time.
        """
        return bytes(self._ask(operations.Get(_key(key)), b"", timeout_s).value)

    def peek(self, key: str, timeout_s: float | None = None) -> bytes | None:
        """The value of `key`, or None at once when it does not exist."""
        reply = self._ask(operations.Peek(_key(key)), b"", timeout_s)
        return None if reply.missing else bytes(reply.value)

    def wait(self, keys: Iterable[str], timeout_s: float | None = None) -> None:
        """Wait until every key exists.

        Raises:
            StoreTimeout: some did not appear in time; the text names them.
        """
        self._ask(operations.Wait(_keys(keys)), b"", timeout_s)

    def add(self, key: str, amount: int, timeout_s: float | None = None) -> int:
        """Add `amount` to the decimal number under `key` (absent counts as 0); returns the sum.

        Example: add("n", 2) -> 2, add("n", 3) -> 5, get("n") -> b"5"
        """
        if isinstance(amount, bool) or not isinstance(amount, int):
            raise TypeError(f"add takes an int, got {amount!r}")
        if not -(2**63) <= amount < 2**63:
            raise ValueError(f"add takes a 64-bit integer, got {amount}")
        return self._ask(operations.Add(_key(key), amount), b"", timeout_s).number

    def compare_set(
        self, key: str, expected: BytesLike, desired: BytesLike, timeout_s: float | None = None
    ) -> bytes:
        """Replace the value of `key` by `desired` if it equals `expected`; returns the value after that.

        An absent key equals an empty `expected`. An absent key with another `expected` changes nothing and
        returns `expected` (PyTorch's rule).
        """
        op = operations.CompareSet(_key(key), _value(expected))
        return bytes(self._ask(op, _value(desired), timeout_s).value)

    def delete_key(self, key: str, timeout_s: float | None = None) -> bool:
        """Remove `key`; returns whether it existed."""
        return bool(self._ask(operations.Delete(_key(key)), b"", timeout_s).number)

    def num_keys(self) -> int:
        """How many keys there are (in a `PrefixStore`: with its prefix)."""
        return self._ask(operations.Count(), b"", None).number

    def keys(self, prefix: str = "") -> list[str]:
        """The keys that begin with `prefix`, in no order: a snapshot."""
        return operations.keys_in(self._ask(operations.Keys(text(prefix, "prefix")), b"", None))

    def check(self, keys: Iterable[str], timeout_s: float | None = None) -> bool:
        """Whether all keys exist now."""
        return bool(self._ask(operations.Check(_keys(keys)), b"", timeout_s).number)

    def __getitem__(self, key: str) -> bytes:
        value = self.peek(key)
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: BytesLike) -> None:
        self.set(key, value)

    def __delitem__(self, key: str) -> None:
        if not self.delete_key(key):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.check([key])

    def __len__(self) -> int:
        return self.num_keys()

    def __bool__(self) -> bool:
        return True  # also when empty, so that `store or default` keeps it

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __repr__(self) -> str:
        return f"<{self.describe()}{' closed' if self._closed else ''}>"

    def _ask(self, op: Op, payload: bytes, timeout_s: float | None) -> Reply:
        self._check_usable()
        seconds = self._timeout_s if timeout_s is None else _seconds(timeout_s)
        try:
            reply = self._call(op, payload, seconds)
        except (OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, StoreError) or not is_limit(error):
                raise
            raise StoreError(message(limit_text(error), where=self.describe())) from error
        if reply.error:
            raise StoreError(message(reply.error, where=self.describe()))
        if reply.missing and isinstance(op, (operations.Get, operations.Wait)):
            raise StoreTimeout(self._not_there(reply.missing, seconds))
        return reply

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                message(
                    f"this store was opened by process {self._pid} and forked into process {os.getpid()}",
                    where=self.describe(),
                    remedy="Open a store of its own in the child process.",
                )
            )
        if self._closed:
            raise StoreError(message("the store is closed", where=self.describe()))

    def _not_there(self, missing: tuple[str, ...], timeout_s: float) -> str:
        listed = ", ".join(repr(key) for key in missing[:8]) + (", ..." if len(missing) > 8 else "")
        what = f"key {listed} did" if len(missing) == 1 else f"{len(missing)} keys ({listed}) did"
        return message(
            f"{what} not appear within {timeout_s:g} s",
            where=self.describe(),
            remedy="See whether the rank that sets it is alive, or raise timeout_s.",
        )


_forgets: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
"""Global, because the functions that run at a fork are the process's, and Python removes none of them."""


def close_in_children(forget: Callable[[], None]) -> None:
    """Call the bound method `forget` in every forked child, so that it keeps no copy of a descriptor open.

    Otherwise an orphaned child (a data loader's worker) would hold a port or a lock of its dead parent.
    """
    method: Any = forget
    _forgets[method.__self__] = method.__func__


def _forget_all() -> None:
    with contextlib.ExitStack() as each:  # an error of one does not stop the others
        for owner, forget in list(_forgets.items()):
            each.callback(forget, owner)


os.register_at_fork(after_in_child=_forget_all)


def _seconds(timeout_s: float) -> float:
    return timeouts.seconds(timeout_s, name="timeout_s", or_none=True)


def _key(key: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a store's key is a str, got {key!r}")
    key.encode()  # a lone surrogate has no UTF-8: refuse it here, before a byte moves
    return key


def _keys(keys: Iterable[str]) -> tuple[str, ...]:
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"expected a list of keys, got the single key {keys!r}")
    return tuple(_key(key) for key in listed(keys, "keys"))


def _value(value: BytesLike) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a store's value is bytes or str, got {type(value).__name__}")
