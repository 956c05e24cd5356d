"""`HashStore`: a store for the threads of one process. Share the one object."""

from __future__ import annotations

import os
import threading
import time

from unisono.engine.store.base import Store
from unisono.engine.store.operations import KeyValueTable, Op, Reply

__all__ = ["HashStore"]


class HashStore(Store):
    """Keys and values in this process's memory.

    Args:
        timeout_s: seconds for a call without a timeout of its own.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        super().__init__(timeout_s)
        self._table = KeyValueTable()
        self._changed = threading.Condition()

    def describe(self) -> str:
        return "HashStore"

    def close(self) -> None:
        if os.getpid() == self._pid:
            with self._changed:
                super().close()
                self._changed.notify_all()

    def _call(self, op: Op, payload: bytes, timeout_s: float) -> Reply:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._check_usable()  # under the lock, so that `close` sees this thread wait and wakes it
                missing = self._table.missing(op)
                left = deadline - time.monotonic()
                if not missing or left <= 0:
                    break
                self._changed.wait(left)
            if missing:
                return Reply(missing=missing)
            reply = self._table.apply(op, payload)
            self._changed.notify_all()
            return reply
