"""The operations of a store, and the one table that runs them.

Every store is this table with its own access: `HashStore` adds a condition variable, `StoreServer` a socket,
`FileStore` a locked file. So the semantics are defined once, here. They are those of PyTorch's stores:

    add          on decimal text: absent counts as 0, b"12" plus 3 leaves b"15"
    compare_set  absent and `expected` empty: takes `desired`. Absent and `expected` not empty: nothing
                 changes, and it returns `expected`. Present: replaced if equal; it returns the value after
                 that.

Values are sent beside the operation, not inside it, so that an encoder never copies large ones.
This module does no input or output and never waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

_INT64 = range(-(2**63), 2**63)


class Set(msgspec.Struct, frozen=True, array_like=True, tag="set"):
    """Store the payload under `key`."""

    key: str


class Get(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Wait until `key` exists; its value."""

    key: str


class Peek(msgspec.Struct, frozen=True, array_like=True, tag="peek"):
    """The value of `key`, or `missing`, at once."""

    key: str


class Wait(msgspec.Struct, frozen=True, array_like=True, tag="wait"):
    """Wait until all `keys` exist."""

    keys: tuple[str, ...]


class Check(msgspec.Struct, frozen=True, array_like=True, tag="check"):
    """1 when all `keys` exist, otherwise 0."""

    keys: tuple[str, ...]


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Add `amount` to the decimal text under `key`; the sum."""

    key: str
    amount: int


class CompareSet(msgspec.Struct, frozen=True, array_like=True, tag="compare_set"):
    """Replace the value of `key` by the payload when it equals `expected`."""

    key: str
    expected: bytes


class Delete(msgspec.Struct, frozen=True, array_like=True, tag="delete"):
    """Remove `key`; 1 when it existed."""

    key: str


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """How many keys begin with `prefix`."""

    prefix: str = ""


class Keys(msgspec.Struct, frozen=True, array_like=True, tag="keys"):
    """The keys that begin with `prefix`, see `listed`."""

    prefix: str = ""


Op = Set | Get | Peek | Wait | Check | Add | CompareSet | Delete | Count | Keys
Value = bytes | bytearray


class Reply(NamedTuple):
    """The reply to an `Op`; `missing` lists keys that do not exist, `error` says why nothing was done."""

    number: int = 0
    value: Value = b""
    missing: tuple[str, ...] = ()
    error: str = ""


_decode_keys = msgspec.msgpack.Decoder(list[str]).decode


def listed(keys: Iterable[str]) -> Reply:
    """The reply to `Keys`: they are its value, encoded."""
    return Reply(value=msgspec.msgpack.encode(list(keys)))


def keys_in(reply: Reply) -> list[str]:
    """The keys of a reply to `Keys`."""
    return _decode_keys(reply.value)


class KeyValueTable(msgspec.Struct):
    """The key-value table. A stored value is never modified in place, only replaced."""

    values: dict[str, Value] = {}

    def missing(self, op: Op) -> tuple[str, ...]:
        """Keys `op` has to wait for; empty when it can be applied now."""
        if isinstance(op, Get):
            return () if op.key in self.values else (op.key,)
        if isinstance(op, Wait):
            return tuple(key for key in op.keys if key not in self.values)
        return ()

    def apply(self, op: Op, payload: Value = b"") -> Reply:
        """Do `op` now."""
        if isinstance(op, Set):
            self.values[op.key] = payload
            return Reply()
        if isinstance(op, (Get, Peek)):
            value = self.values.get(op.key)
            return Reply(missing=(op.key,)) if value is None else Reply(value=value)
        if isinstance(op, Add):
            return self._add(op)
        if isinstance(op, CompareSet):
            return self._compare_set(op, payload)
        if isinstance(op, Delete):
            return Reply(number=int(self.values.pop(op.key, None) is not None))
        if isinstance(op, Count):
            return Reply(number=self._count(op.prefix))
        if isinstance(op, Keys):
            return listed(key for key in self.values if key.startswith(op.prefix))
        if isinstance(op, (Wait, Check)):
            missing = tuple(key for key in op.keys if key not in self.values)
            return Reply(number=int(not missing), missing=missing if isinstance(op, Wait) else ())
        raise TypeError(f"not a store operation: {op!r}")

    def _add(self, op: Add) -> Reply:
        held = self.values.get(op.key, b"0")
        try:
            total = int(held[:40]) + op.amount
        except ValueError:
            return Reply(error=f"add({op.key!r}) needs a decimal number, found {bytes(held[:40])!r}")
        if total not in _INT64:
            return Reply(error=f"add({op.key!r}) leaves the 64-bit range: {total}")
        self.values[op.key] = str(total).encode()
        return Reply(number=total)

    def _compare_set(self, op: CompareSet, desired: Value) -> Reply:
        held = self.values.get(op.key)
        if held is None and op.expected:
            return Reply(value=op.expected)
        if held is None or held == op.expected:
            self.values[op.key] = desired
        return Reply(value=self.values[op.key])

    def _count(self, prefix: str) -> int:
        return sum(key.startswith(prefix) for key in self.values) if prefix else len(self.values)
