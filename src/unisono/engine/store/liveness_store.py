"""`LivenessStore`: another store, for a caller that must not wait for a key that can no longer appear."""

from __future__ import annotations

from collections.abc import Callable

from unisono.engine.store.base import Store
from unisono.engine.store.operations import Op, Reply

__all__ = ["LivenessStore"]


class LivenessStore(Store):
    """The keys of `store`. When a requested key is missing, `check` is called, which may raise.

    A wait calls it only at its end, so waits should be short and repeated. If the key has appeared meanwhile,
    the error of `check` is ignored. `close` leaves `store` open.
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
