"""A `torch.distributed.Store` as a `unisono.engine.store.Store`, and the other way round.

PyTorch passes its store to a backend, and the group uses it for the rendezvous; so does a group of ours that
is given one. A group that is reconfigured, and those of PyTorch's libraries, use a store of Unisono's. This
module only translates operations, timeouts and errors. It opens no connection.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from unisono.engine.store import PrefixStore, Store, operations
from unisono.engine.store.operations import Op, Reply
from unisono.errors import StoreError, message

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

# mypy must pass with and without PyTorch installed.
# mypy: disallow-subclassing-any=False, warn-unused-ignores=False
# mypy: disable-error-code="name-defined,attr-defined"

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.1


class TorchStore(Store):
    """A store of PyTorch's. `close` leaves it open."""

    def __init__(self, inner: dist.Store, *, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._inner: Any = inner  # Any: PyTorch's stubs have str where it uses bytes

    def describe(self) -> str:
        """Return "PyTorch's PrefixStore"."""
        return f"PyTorch's {type(self._inner).__name__}"

    def _call(self, op: Op, payload: bytes, timeout_s: float) -> Reply:
        try:
            if isinstance(op, (operations.Get, operations.Wait)):
                return self._wait_and_apply(op, timeout_s)
            return self._now(op, payload)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            text = message("PyTorch's store failed", where=self.describe(), observed=first_line)
            raise StoreError(text) from error

    def _wait_and_apply(self, op: operations.Get | operations.Wait, timeout_s: float) -> Reply:
        """Wait for the keys of `op`; `Reply.missing` when they are not set in time."""
        keys = [op.key] if isinstance(op, operations.Get) else list(op.keys)
        if not self._wait_for_keys(keys, timeout_s):
            missing = tuple(key for key in keys if not self._inner.check([key]))
            if missing:
                return Reply(missing=missing)
        return Reply(value=self._inner.get(op.key)) if isinstance(op, operations.Get) else Reply()

    def _wait_for_keys(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Wait for `keys`; returns whether they were set in time.

        PyTorch's own wait ignores Ctrl-C until it ends, and its TCPStore prints a warning for each wait that
        ends without the keys. So this polls. The pauses grow to a tenth of the wait so far.
        """
        began = time.monotonic()
        while not self._inner.check(keys):
            waited_s = time.monotonic() - began
            if waited_s >= timeout_s:
                return False
            pause_s = min(max(waited_s / 10, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            time.sleep(min(pause_s, timeout_s - waited_s))
        return True

    def _now(self, op: Op, payload: bytes) -> Reply:
        """Run an operation that never waits."""
        if isinstance(op, operations.Set):
            self._inner.set(op.key, payload)
            return Reply()
        if isinstance(op, operations.Peek):
            there = self._inner.check([op.key])
            return Reply(value=self._inner.get(op.key)) if there else Reply(missing=(op.key,))
        if isinstance(op, operations.Add):
            return Reply(number=self._inner.add(op.key, op.amount))
        if isinstance(op, operations.CompareSet):
            return Reply(value=self._inner.compare_set(op.key, op.expected, payload))
        if isinstance(op, operations.Delete):
            return Reply(number=int(self._inner.delete_key(op.key)))
        if isinstance(op, operations.Check):
            return Reply(number=int(self._inner.check(list(op.keys))))
        if isinstance(op, operations.Count):  # PyTorch counts the whole store, whatever the prefix
            return Reply(number=self._inner.num_keys())
        if isinstance(op, operations.Keys):
            return self._keys(op.prefix)
        raise TypeError(f"not a store operation: {op!r}")

    def _keys(self, prefix: str) -> Reply:
        if not hasattr(self._inner, "list_keys"):
            return Reply(error="PyTorch's store does not list its keys in this version")
        return operations.listed(key for key in self._inner.list_keys() if key.startswith(prefix))


def part(store: dist.Store, prefix: str) -> dist.Store:
    """Return the keys of a store that begin with `prefix`.

    Not by PyTorch's PrefixStore where Python's code is below: at the end of the process a daemon thread in it
    is unwound through C++ frames, which free Python objects beside the main thread (SIGSEGV).
    """
    return store.part(prefix) if isinstance(store, EngineStore) else dist.PrefixStore(prefix, store)


class EngineStore(dist.Store):  # type: ignore[misc]
    """A store of Unisono, or its keys under `prefix`, as a `torch.distributed.Store`. Its owner closes it."""

    def __init__(self, inner: Store, prefix: str = "") -> None:
        super().__init__()
        self.inner = PrefixStore(prefix, inner) if prefix else inner

    def part(self, prefix: str) -> EngineStore:
        """Return the keys that begin with `prefix`."""
        return EngineStore(self.inner, prefix)

    def set(self, key: str, value: bytes | str) -> None:
        """Store the value under the key."""
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value, waiting until it exists."""
        return self.inner.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under the key; returns the sum."""
        return self.inner.add(key, amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Replace the value if it equals `expected`; returns the value after that."""
        return self.inner.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until every key exists."""
        self.inner.wait(keys, None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it existed."""
        return self.inner.delete_key(key)

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return self.inner.num_keys()

    def list_keys(self) -> list[str]:
        """Return all keys."""
        return self.inner.keys()

    def has_extended_api(self) -> bool:
        """Return False: there are no queues and no multi_get."""
        return False

    # The names by which PyTorch's C++ finds them.
    compareSet, deleteKey, getNumKeys = compare_set, delete_key, num_keys  # noqa: N815
