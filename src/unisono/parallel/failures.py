"""Handles an exception in a call of a run: all ranks continue together, or no rank can use the run any more.

When a rank leaves a step, other ranks may wait for it, and its messages may reach the next step. So it
writes the error to the job's store, which other ranks read later.

    all ranks raised, and got equally far   -> each raises its own error; the next call starts anew
    some did not within RAISED_S            -> the run's groups are aborted: ranks that wait in them raise,
    a group of the run has failed           -> likewise, at once
    too pipeline messages may be left           -> likewise, at once
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from unisono.errors import Mismatch, Timeout
from unisono.torch.process_group import ProcessGroupUnisono
from unisono.torch_internals import c10d

RAISED_S = 5.0  # how long a rank that raised waits for the others to raise, too
PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.32
TOGETHER = "all ranks raised"


class RunFailures:
    """The calls of one run, and their outcome on all ranks."""

    def __init__(self, world: dist.ProcessGroup, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups: list[Any] = list(groups)
        self._rank, self._ranks = world.rank(), world.size()
        _, store = c10d.world()
        self._store: Any = c10d.PrefixStore(f"unisono.parallel/{world.group_name}", store)
        self._calls = 0
        self._ended: str | None = None  # why the run cannot be used

    @property
    def ended(self) -> bool:
        """Whether the run cannot be used any more."""
        return self._ended is not None

    def begin(self) -> None:
        """Count one more call that all ranks make."""
        if self._ended is not None:
            raise RuntimeError(self._ended)
        self._calls += 1

    def resolve(self, error: Exception, *, together: bool) -> None:
        """Decide what the error of this call means; returns if the caller has to raise it.

        Args:
            together: whether ranks may go on where all of them raised.
        Raises:
            RuntimeError: another rank has ended the run.
        """
        if self._ranks == 1:
            return
        mine = f"rank {self._rank} raised {type(error).__name__}: {error}"
        try:
            verdict = self._verdict(mine, together=together and not self._over())
        except RuntimeError as lost:  # the store: the process that served it has ended
            verdict = f"{mine} (and the store of the job failed: {lost})"
        if verdict == TOGETHER:
            return
        self._ended = (
            f"this run cannot be used any more: {verdict}. Make a new one with up.parallelize on all ranks, "
            "and load its last checkpoint"
        )
        self._abort(error)
        if not (verdict.startswith(mine) or isinstance(error, (Mismatch, Timeout))):
            raise RuntimeError(self._ended) from error

    def _abort(self, error: Exception) -> None:  # noqa: ARG002
        """End the groups of the run, because of this error."""
        for group in self._groups:
            with contextlib.suppress(RuntimeError):  # Gloo has no abort: there, ranks run into their timeout
                group.abort()

    def _verdict(self, mine: str, *, together: bool) -> str:
        """The verdict, the same on all ranks: TOGETHER, or which rank has ended the run, and why."""
        if self._store.check(["ended"]):
            return str(self._store.get("ended").decode())
        call = f"call {self._calls}"
        if together:
            self._await_others(call)
        verdict: str = self._store.compare_set(f"{call}/verdict", "", mine).decode()
        if verdict != TOGETHER:
            self._store.set("ended", verdict)
        return verdict

    def _await_others(self, call: str) -> None:
        """Wait for the verdict: the last rank that raises after as many collectives as the first writes it.

        How many requests a rank makes does not depend on the number of ranks.
        """
        mine, until, pause = self._place(), time.monotonic() + RAISED_S, PAUSE_S
        if self._store.compare_set(f"{call}/place", "", mine).decode() != mine:
            return
        if self._store.add(f"{call}/raised", 1) == self._ranks:
            self._store.compare_set(f"{call}/verdict", "", TOGETHER)
        while not (self._store.check([f"{call}/verdict"]) or self._store.check(["ended"])):
            if time.monotonic() > until:
                return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _over(self) -> bool:
        """Whether a group of this run has failed: it stays so. Groups of Gloo's do not tell."""
        ours = [group for group in self._groups if isinstance(group, ProcessGroupUnisono)]
        return any(group.get_error() != c10d.ErrorType.SUCCESS for group in ours)

    def _place(self) -> str:
        return str([group._get_sequence_number_for_group() for group in self._groups])
