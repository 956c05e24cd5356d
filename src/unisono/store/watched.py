"""`WatchedStore`: another store, for a caller that must not wait for a key that can no longer appear."""

from __future__ import annotations

from collections.abc import Callable

from unisono.store.base import Store
from unisono.store.ops import Op, Reply

__all__ = ["WatchedStore"]


class WatchedStore(Store):
    """The keys of `store`. Whenever one asked for is not there, `check` is called, which may raise.

    A wait calls it at its end only, so it should be short and repeated. What has come meanwhile counts: then
    `check` has raised in vain. Closing it leaves `store` open.
    """

    def __init__(self, store: Store, check: Callable[[], None]) -> None:
        super().__init__(store.timeout_s)
        self._store = store
        self._check = check

    def describe(self) -> str:
        return self._store.describe()

    def _call(self, op: Op, payload: bytes, timeout_s: float) -> Reply:
        self._store._check_usable()
        reply = self._store._call(op, payload, timeout_s)
        if reply.missing:
            try:
                self._check()
            except Exception:
                reply = self._store._call(op, payload, 0.0)
                if reply.missing:
                    raise
        return reply
