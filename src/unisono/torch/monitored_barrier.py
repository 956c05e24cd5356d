"""`monitored_barrier`: which ranks are missing. It uses the store, so a failure leaves the group usable.

Rank 0 checks which ranks have arrived and writes the verdict; the other ranks wait for it. The errors have
Gloo's texts: programs and PyTorch's own tests search for them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from unisono.errors import Timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from unisono.torch_internals import c10d

__all__ = ["MonitoredBarrier"]

PASSED = "passed"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.02


class MonitoredBarrier:
    """The monitored barriers of one group. `last_seen(rank)` says where a rank is, for the error."""

    def __init__(self, store: c10d.Store, rank: int, size: int, last_seen: Callable[[int], str]) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._last_seen = last_seen
        self._count = 0

    def wait(self, timeout_s: float, wait_all_ranks: bool) -> None:
        """Wait until every rank has called it.

        Args:
            wait_all_ranks: report all ranks that do not arrive, not only the first.
        Raises:
            Timeout: on rank 0, with the missing ranks; on the others, that rank 0 did not pass.
        """
        self._count += 1
        deadline = time.monotonic() + timeout_s
        if self._rank:
            self._store.set(self._key(self._rank), "here")
            self._await_verdict(deadline, timeout_s)
            return
        text = self._check(deadline, timeout_s, wait_all_ranks)
        self._store.set(self._key(0), text or PASSED)
        if text:
            raise Timeout(text)
        self._forget(self._count - 1)  # every rank that arrives here has read that verdict

    def _check(self, deadline: float, timeout_s: float, wait_all_ranks: bool) -> str:
        """The error; empty if all ranks have arrived."""
        if timeout_s <= 0:
            return f"Rank 0 timed out in monitoredBarrier after {timeout_s * 1000:.0f} ms."
        missing = [r for r in range(1, self._size) if not self._wait_for_key(self._key(r), deadline)]
        if not missing:
            return ""
        named = missing if wait_all_ranks else missing[:1]
        who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
        seen = "; ".join(f"rank {rank} was last seen {self._last_seen(rank)}" for rank in named)
        return f"{who} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms ({seen})"

    def _await_verdict(self, deadline: float, timeout_s: float) -> None:
        verdict = "it did not arrive, or did not answer"
        grace_s = min(1.0, timeout_s / 4)  # rank 0's time began when it arrived
        if self._wait_for_key(self._key(0), deadline + grace_s):
            verdict = self._store.get(self._key(0)).decode()
        if verdict != PASSED:
            raise Timeout(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank 0: {verdict}. Please check rank 0 logs for faulty rank."
            )

    def _wait_for_key(self, key: str, deadline: float) -> bool:
        """Wait for a key, in short pauses, so that Ctrl-C works."""
        pause_s = FIRST_PAUSE_S
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True

    def _forget(self, count: int) -> None:
        for rank in range(self._size) if count else ():
            self._store.delete_key(self._key(rank, count))

    def _key(self, rank: int, count: int | None = None) -> str:
        return f"monitored/{self._count if count is None else count}/{rank}"
