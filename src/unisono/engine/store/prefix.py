"""`PrefixStore`: its own set of keys inside another store."""

from __future__ import annotations

import msgspec

from unisono.engine.base.validation import instance, text
from unisono.engine.store import operations
from unisono.engine.store.base import Store
from unisono.engine.store.operations import Op, Reply


class PrefixStore(Store):
    """Every key is stored in `store` as `prefix/key`.

    It starts with the timeout of `store`. Closing it leaves `store` open: its opener closes it.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(instance(store, Store, "store").timeout_s)
        self._prefix = f"{text(prefix, 'prefix')}/"
        self._store = store

    @property
    def underlying(self) -> Store:
        """The store that has these keys."""
        return self._store

    def describe(self) -> str:
        return f"{self._store.describe()} under {self._prefix!r}"

    def _call(self, op: Op, payload: bytes, timeout_s: float) -> Reply:
        self._store._check_usable()
        reply = self._store._call(_moved(op, self._prefix), payload, timeout_s)
        cut = len(self._prefix)
        if isinstance(op, operations.Keys) and not reply.error:
            return operations.listed(key[cut:] for key in operations.keys_in(reply))
        return reply._replace(missing=tuple(key[cut:] for key in reply.missing))


def _moved(op: Op, prefix: str) -> Op:
    """`op` with `prefix` before each of its keys."""
    if isinstance(op, (operations.Wait, operations.Check)):
        return msgspec.structs.replace(op, keys=tuple(prefix + key for key in op.keys))
    if isinstance(op, (operations.Count, operations.Keys)):
        return msgspec.structs.replace(op, prefix=prefix + op.prefix)
    return msgspec.structs.replace(op, key=prefix + op.key)
