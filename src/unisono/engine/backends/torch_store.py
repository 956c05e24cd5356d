"""Unisono's store as a store of PyTorch, so that its process groups use the rendezvous of Unisono's ranks.

No further port is opened, and a process that may not use the store cannot join.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono.engine.store import Store

__all__ = ["TorchStoreAdapter"]


class TorchStoreAdapter(dist.Store):  # type: ignore[misc,name-defined,unused-ignore]
    """Translates operations; closing it does not close the store."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self._inner.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return bytes(self._inner.get(key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return self._inner.check(list(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._inner.wait(list(keys), timeout_s=None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """Delete a key; returns whether it existed."""
        return bool(self._inner.delete_key(key))

    def has_extended_api(self) -> bool:
        """No."""
        return False
