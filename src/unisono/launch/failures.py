"""What the supervisor knows of failures: it takes errors from the ranks, shows them, and gives the account.

`summary` makes the texts. Nothing here ends a process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.diagnosis.report import Uncaught
from unisono.launch.board import Inbox
from unisono.launch.console import RankStream, Screen
from unisono.launch.job import STDERR, Job
from unisono.launch.summary import (
    RankEnd,
    blocks,
    first_failure,
    follow_up,
    json_record,
    last_lines,
    report,
    together,
)

__all__ = ["Failures", "Rank"]

FOLD_S = 2.0  # an error that was handed over is shown after so long, though not all ranks have ended yet


@dataclass
class Rank:
    """A rank as its supervisor knows it.

    Attributes:
        asked: the launcher has signalled it.
        end: (order, code, signaled) when it has ended.
        error: what it has handed over.  told: that is on the console.
    """

    local_rank: int
    rank: int
    pid: int
    stderr: RankStream
    asked: bool = False
    ended_at: float = 0.0
    end: tuple[int, int, bool] | None = None
    error: Uncaught | None = None
    told: bool = False

    def ending(self) -> RankEnd:
        """How it ended; of one that lives yet, what it has handed over."""
        order, code, signaled = self.end or (-1, 0, False)
        handed = self.error is not None and not signaled
        return RankEnd(
            rank=self.rank,
            pid=self.pid,
            code=code,
            order=order,
            signaled=signaled,
            asked=self.asked,
            ended_at=self.ended_at,
            error=self.error,
            stderr=() if handed else last_lines(self.stderr.tail, self.rank, fatal=signaled),
        )


class Failures:
    """The failures of one job.

    Args:
        ranks: all that were started, by pid; the supervisor adds to it.
    """

    def __init__(self, job: Job, screen: Screen, ranks: Mapping[int, Rank]) -> None:
        self.inbox = Inbox()
        self.due: float | None = None  # when to show what was handed over (monotonic seconds)
        self._job = job
        self._screen = screen
        self._ranks = ranks

    def take(self) -> None:
        """Keep what ranks have handed over, to show together what is alike."""
        ranks = {rank.rank: rank for rank in self._ranks.values()}
        for error in self.inbox.read():
            rank = ranks.get(error.rank)
            if rank is None:
                continue
            rank.error, rank.told = error, error.printed
            if not error.printed:
                rank.stderr.log_only((error.all_frames + error.message).encode(errors="replace"))
                self.due = self.due or time.monotonic() + FOLD_S

    def show_overdue(self, now: float) -> None:
        """Show what has waited long enough for the errors of other ranks."""
        if self.due is not None and now >= self.due:
            self._show(set())

    def _show(self, left_out: set[int]) -> None:
        """Show what ranks have handed over and is not shown yet, each fault once."""
        self.due = None
        picked = [
            rank
            for rank in self._ranks.values()
            if rank.error is not None and not rank.told and rank.rank not in left_out and self._shows(rank)
        ]
        for block in blocks((rank.ending() for rank in picked), full=self._job.full_tracebacks):
            self._screen.say(block)
        for rank in picked:
            rank.told = True

    def _shows(self, rank: Rank) -> bool:
        return bool(self._job.shown[rank.local_rank] & STDERR)

    def _ends(self) -> list[RankEnd]:
        return [rank.ending() for rank in self._ranks.values() if rank.end is not None]

    @property
    def first(self) -> RankEnd | None:
        """The failure that started it all."""
        return first_failure(self._ends())

    def report(self) -> str:
        """Show what is left to show; then the summary, "" when nobody failed."""
        self.take()
        ends = self._ends()
        first = first_failure(ends)
        self._show(set() if first is None else {end.rank for end in together(first, ends)})
        if first is None:
            return ""
        rank = self._ranks[first.pid]
        full, log_dir = self._job.full_tracebacks, self._job.log_dir
        return report(first, ends, log_dir=log_dir, shown=self._shows(rank), told=rank.told, full=full)

    def follow_up(self) -> str:
        """What happened on this node, for a job that failed first on another one."""
        return follow_up(self._ends())

    def write_record(self, status: int) -> None:
        """Write the file of `--json-errors`, if there is to be one."""
        path = self._job.json_errors
        if not path:
            return
        try:
            with open(path, "wb") as out:
                out.write(json_record(self._ends(), status))
        except OSError as error:
            self._screen.say(f"unisono run: --json-errors {path} cannot be written: {error.strerror}")
