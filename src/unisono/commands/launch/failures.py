"""The failures of a job: receives errors from the ranks, decides which failed first, reports each once.

The decision uses exit codes, signals and the records of ranks (`diagnosis.report.UncaughtError`), never text
that ranks print. A rank without a record (it ended before it had a group, or is no Python program) counts by
its exit code and the time of its end. Nothing here ends a process.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from unisono.commands.launch.console import Console, RankStream
from unisono.commands.launch.job import STDERR, Job
from unisono.engine.diagnosis.fault_text import signal_name
from unisono.engine.diagnosis.report import MembershipNotice, UncaughtError

FOLD_S = 2.0  # a received error is shown after this time, even if some ranks have not ended yet
_LONGEST_RECORD_NBYTES = 1 << 18
_decode = msgspec.json.Decoder(UncaughtError).decode
_decode_notice = msgspec.json.Decoder(MembershipNotice).decode
_HEADER = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_MAX_LINES = 60
_MAX_LINE_CHARS = 2000
_MAX_PLACES = 4  # the most different tracebacks shown for one error


class RankExit(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank ended.

    Attributes:
        rank: -1 if unknown.
        code: exit code, or the signal's number when `signaled`.
        asked: the launcher had signalled it before; so its end is not a failure of its own.
        order: 0 for the rank that ended first.
        ended_at: seconds since the epoch; nodes' clocks agree well enough to order equal failures.
        error: the error that it sent.
        stderr: its last lines, if it sent no error.
        note: how it ended, if neither by an exit code nor by a signal.
        survived: the others of an elastic job went on without it.
    """

    rank: int
    pid: int
    code: int
    order: int
    signaled: bool = False
    asked: bool = False
    ended_at: float = 0.0
    error: UncaughtError | None = None
    stderr: tuple[str, ...] = ()
    note: str = ""
    survived: bool = False

    @property
    def failed(self) -> bool:
        """Whether it failed, not because the launcher ended it, and the job with it."""
        return (self.signaled or self.code != 0) and not (self.asked or self.survived)

    @property
    def consequence(self) -> bool:
        """Whether it failed because another rank was gone."""
        return not self.signaled and self.error is not None and self.error.lost

    @property
    def failed_at(self) -> float:
        """When it failed: the interpreter may end much later."""
        return self.error.at if self.error is not None and not self.signaled else self.ended_at

    def how(self) -> str:
        """Say how it ended: "exit code 3", "SIGKILL"."""
        return self.note or (signal_name(self.code) if self.signaled else f"exit code {self.code}")


@dataclass
class RankProcess:
    """A rank in the supervisor.

    Attributes:
        asked: the launcher has signalled it.
        end: (order, code, signaled) when it has ended.
        error: the error that it sent.  reported: that is on the console.
        member_since, out_since: when the launcher learned that it is in a group, and out of it (monotonic
            seconds).  survived: the others went on without it.
        listens, addresses: see `MembershipNotice`.
    """

    local_rank: int
    rank: int
    pid: int
    stderr: RankStream
    asked: bool = False
    ended_at: float = 0.0
    end: tuple[int, int, bool] | None = None
    error: UncaughtError | None = None
    reported: bool = False
    member_since: float | None = None
    out_since: float | None = None
    survived: bool = False
    listens: bool = False
    addresses: tuple[str, ...] = ()

    def ending(self) -> RankExit:
        """How it ended; for a rank that still runs, the error that it sent."""
        order, code, signaled = self.end or (-1, 0, False)
        handed = self.error is not None and not signaled
        return RankExit(
            rank=self.rank,
            pid=self.pid,
            code=code,
            order=order,
            signaled=signaled,
            asked=self.asked,
            ended_at=self.ended_at,
            error=self.error,
            stderr=() if handed else last_lines(self.stderr.tail, self.rank, fatal=signaled),
            survived=self.survived,
        )


class ErrorSocket:
    """The socket on which ranks send the errors that end them: one message each, whole or not at all.

    The ranks inherit `fd`. `name` contains the descriptor and its inode, by which a rank recognises it.
    """

    def __init__(self) -> None:
        self.socket, self._ranks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.fd = self._ranks.fileno()
        self.name = f"{self.fd}:{os.fstat(self.fd).st_ino}"

    def read(self) -> Iterator[UncaughtError | MembershipNotice]:
        """The records received since the last call. Other messages are ignored: exit codes tell, too."""
        while True:
            try:
                data = self.socket.recv(_LONGEST_RECORD_NBYTES)
            except BlockingIOError:
                return
            for decode in (_decode, _decode_notice):
                with contextlib.suppress(msgspec.DecodeError):
                    yield decode(data)
                    break


class JobFailures:
    """The failures of one job.

    Args:
        ranks: all that were started, by pid; the supervisor adds to it.
        on_notice: takes what the ranks of an elastic job tell about their group.
    """

    def __init__(
        self,
        job: Job,
        screen: Console,
        ranks: Mapping[int, RankProcess],
        on_notice: Callable[[MembershipNotice], None] | None = None,
    ) -> None:
        self.inbox = ErrorSocket()
        self.due: float | None = None  # when to show received errors (monotonic seconds)
        self._job = job
        self._screen = screen
        self._ranks = ranks
        self._on_notice = on_notice

    def take(self) -> None:
        """Receive the errors of ranks and keep them, to show equal ones together."""
        for error in self.inbox.read():
            if isinstance(error, MembershipNotice):
                if self._on_notice is not None:
                    self._on_notice(error)
                continue
            ranks = {rank.rank: rank for rank in self._ranks.values()}
            rank = self._ranks.get(error.pid, ranks.get(error.rank))
            if rank is None:
                continue
            rank.error, rank.reported = error, error.printed
            if not error.printed:
                rank.stderr.log_only((error.all_frames + error.message).encode(errors="replace"))
                self.due = self.due or time.monotonic() + FOLD_S

    def show_overdue(self, now: float) -> None:
        """Show errors that have waited long enough for equal ones of other ranks."""
        if self.due is not None and now >= self.due:
            self._show(set())

    def _show(self, left_out: set[int]) -> None:
        """Show the received errors that are not shown yet, each fault once."""
        self.due = None
        picked = [
            rank
            for rank in self._ranks.values()
            if rank.error is not None
            and not rank.reported
            and rank.rank not in left_out
            and self._shows(rank)
        ]
        for block in blocks((rank.ending() for rank in picked), full=self._job.full_tracebacks):
            self._screen.say(block)
        for rank in picked:
            rank.reported = True

    def _shows(self, rank: RankProcess) -> bool:
        return bool(self._job.shown[rank.local_rank] & STDERR)

    def _ends(self) -> list[RankExit]:
        return [rank.ending() for rank in self._ranks.values() if rank.end is not None]

    @property
    def first(self) -> RankExit | None:
        """The first failure."""
        return first_failure(self._ends())

    def report(self) -> str:
        """Show the remaining errors; returns the summary, "" when no rank failed."""
        self.take()
        ends = self._ends()
        first = first_failure(ends)
        self._show(set() if first is None else {end.rank for end in same_failure(first, ends)})
        if first is None:
            return ""
        rank = self._ranks[first.pid]
        full, log_dir = self._job.full_tracebacks, self._job.log_dir
        return report(
            first, ends, log_dir=log_dir, shown=self._shows(rank), reported=rank.reported, full=full
        )

    def follow_up(self) -> str:
        """What happened on this node, for a job that failed first on another one."""
        return follow_up(self._ends())

    def write_record(self, status: int) -> None:
        """Write the file of `--json-errors`, if asked for."""
        path = self._job.json_errors
        if not path:
            return
        try:
            with open(path, "wb") as out:
                out.write(json_record(self._ends(), status))
        except OSError as error:
            self._screen.say(f"unisono run: --json-errors {path} cannot be written: {error.strerror}")


# ---- which failed first, and the texts -------------------------------------------------------------------


def exit_status(end: RankExit) -> int:
    """Return the exit code for the shell: the rank's own, 128 + n for signal n."""
    return 128 + end.code if end.signaled else end.code


def first_failure(ends: Iterable[RankExit]) -> RankExit | None:
    """Return the first failure, None when no rank failed."""
    failed = [end for end in ends if end.failed]
    return min(failed, key=lambda end: (end.consequence, end.failed_at, end.order), default=None)


def same_failure(first: RankExit, ends: Iterable[RankExit]) -> list[RankExit]:
    """The ranks that failed with the same fault as `first`, including it."""
    if first.error is None or first.signaled:
        return [first]
    fault = _fault(first.error)
    absent = first.error.missing
    alike = [
        end
        for end in ends
        if end.failed and not end.signaled and end.error is not None and _fault(end.error) == fault
    ]
    return [end for end in alike if end.rank == first.rank or end.rank not in absent]


def _fault(error: UncaughtError) -> tuple[object, ...]:
    """A key that is equal for errors of one fault."""
    report = error.report
    if report is None:
        return error.type, error.message
    return error.type, report.group, report.kind, report.sequence, report.rank, report.pid


def last_lines(stderr: bytes, rank: int, *, fatal: bool) -> tuple[str, ...]:
    """The last traceback in a rank's stderr with its chained ones, otherwise its last lines.

    Args:
        fatal: a signal ended it: the traceback has another header.
    """
    own = f"[rank{rank}]: "  # PyTorch puts this before each line of a traceback
    text = _COLOR.sub("", stderr.decode(errors="replace"))
    lines = [line.removeprefix(own).rstrip("\r")[:_MAX_LINE_CHARS] for line in text.splitlines()]
    marker = _FATAL if fatal else _HEADER
    start = next((i for i in reversed(range(len(lines))) if lines[i].startswith(marker)), None)
    if start is None:
        return tuple(lines[-5:])
    return tuple(_shortened(lines[_chain_start(lines, start) :]))


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    half = _MAX_LINES // 2
    return [*lines[:half], f"  ... {len(lines) - _MAX_LINES} lines ...", *lines[-half:]]


def _chain_start(lines: Sequence[str], start: int) -> int:
    """The line of the first traceback in the "During handling of ..." chain of the last one."""
    while start >= 2 and any(lines[i] in _CHAINED for i in range(max(0, start - 2), start)):
        earlier = next((i for i in reversed(range(start - 2)) if lines[i].startswith(_HEADER)), None)
        if earlier is None:
            break
        start = earlier
    return start


def blocks(ends: Iterable[RankExit], *, full: bool) -> list[str]:
    """The errors that ranks sent and did not print, each fault once: "ranks 0-63:" and the error.

    Args:
        full: with Unisono's own frames.
    """
    faults: dict[tuple[object, ...], list[RankExit]] = {}
    for end in ends:
        if end.error is not None and not end.error.printed:
            faults.setdefault(_fault(end.error), []).append(end)
    return ["\n".join(_block(group, full=full)) for group in faults.values()]


def _block(group: Sequence[RankExit], *, full: bool) -> list[str]:
    """One fault of all ranks in `group`: the traceback of each, then the error."""
    places: dict[str, list[RankExit]] = {}
    for end in group:
        assert end.error is not None
        places.setdefault(end.error.all_frames if full else end.error.frames, []).append(end)
    lines: list[str] = []
    for frames, ranks in list(places.items())[:_MAX_PLACES]:
        lines += [f"{_ranks(ranks)}:", *_indented(_shortened(frames.splitlines()))]
    if len(places) > _MAX_PLACES:
        rest = [end for ranks in list(places.values())[_MAX_PLACES:] for end in ranks]
        lines.append(f"{_ranks(rest)}: at {len(places) - _MAX_PLACES} other places")
    error_lines = _message(group)
    return lines + (error_lines if len(places) > 1 else _indented(error_lines))


def _indented(lines: Iterable[str]) -> list[str]:
    return ["  " + line for line in lines]


def _message(group: Sequence[RankExit]) -> list[str]:
    """The error of a fault, from the rank that found it; for several ranks, without the reporter's rank."""
    errors = [end.error for end in group if end.error is not None]
    found = next(
        (e for e in errors if e.report is not None and e.report.found_by == e.report.reporter), errors[0]
    )
    fault_text = found.message
    if found.report is not None and len(group) > 1:
        from unisono.engine.diagnosis.fault_text import text  # imported late: needed only after a failure

        fault_text = fault_text.replace(text(found.report), text(found.report, for_all=True))
    return fault_text.splitlines()


def report(
    first: RankExit,
    ends: Iterable[RankExit],
    *,
    log_dir: str | None,
    shown: bool = False,
    reported: bool = False,
    full: bool = False,
) -> str:
    """Write the summary: the first failure and its error, then its consequences in one line.

    unisono run: rank 2 failed first: exit code 1 (pid 4121)
      ValueError: label 10 is out of range
    unisono run: then ranks 0-1 failed because rank 2 was gone (exit code 1); rank 3 was ended by the launcher

    Args:
        shown: the rank's standard error is already on the console, so its traceback is not repeated.
        reported: the block of its fault is already on the console.
        full: with Unisono's own frames.
    """
    ends = list(ends)
    group = same_failure(first, [first, *(end for end in ends if end.rank != first.rank)])
    lines = [_headline(first, group)]
    if first.error is None or first.signaled:
        lines += _indented(_error(first.stderr) if shown else first.stderr)
    elif first.error.printed and shown:
        lines += _indented(_message(group))
    elif not reported:
        lines += _indented(_block(group, full=full))
    alike = {end.rank for end in group}
    others = sorted((end for end in ends if end.rank not in alike), key=lambda end: end.rank)
    before = [end for end in others if end.order < first.order and end.code == 0 and not end.signaled]
    if before and first.consequence:
        lines.append(f"unisono run: {_ranks(before)} had ended before with exit code 0")
    if parts := _consequences(others, ends):
        lines.append("unisono run: then " + parts)
    if log_dir:
        lines.append(f"unisono run: full output in {log_dir}")
    return "\n".join(lines)


def _headline(first: RankExit, group: Sequence[RankExit]) -> str:
    """The cause in one line: the rank that failed, or did not arrive."""
    alone = len(group) == 1
    how = f"{first.how()} (pid {first.pid})" if alone else first.how()
    absent = sorted({rank for end in group if end.error is not None for rank in end.error.missing})
    if absent and not first.signaled:
        who = _named(absent)
        gave_up = f"rank {first.rank} gave up waiting first" if alone else f"{_ranks(group)} gave up waiting"
        return f"unisono run: {who} never arrived; {gave_up}: {how}"
    return f"unisono run: {_ranks(group)} failed {'first' if alone else 'together'}: {how}"


def _error(lines: Sequence[str]) -> Sequence[str]:
    """The error at the end of a traceback; other lines unchanged."""
    if not lines or not lines[0].startswith(_HEADER):
        return lines
    start = max(i for i, line in enumerate(lines) if line.startswith(_HEADER))
    body = [i for i in range(start + 1, len(lines)) if lines[i] and not lines[i].startswith((" ", "\t"))]
    return lines[body[0] :] if body else lines


def foreign_report(first: RankExit, node: int, host: str) -> str:
    """Write the summary of a job whose first failure was on another node."""
    who = f"rank {first.rank}" if first.rank >= 0 else "a process"
    lines = [f"unisono run: {who} on node {node} (host {host}) failed first: {first.how()}"]
    if first.error is not None and not first.signaled:
        return "\n".join(lines + _indented(_block([first], full=False)))
    return "\n".join(lines + _indented(first.stderr))


def follow_up(ends: Sequence[RankExit]) -> str:
    """Say in one line what happened on this node, if the first failure was elsewhere."""
    parts = _consequences(ends, ends)
    return f"unisono run: then on this node {parts}" if parts else ""


def _consequences(others: Sequence[RankExit], ends: Sequence[RankExit]) -> str:
    """What became of `others`: "ranks 0-1 failed because rank 2 was gone (exit code 1); rank 3 was ..."."""
    causes: dict[str, list[RankExit]] = {}
    for end in others:
        if end.failed:
            why = f"because {_lost(end, ends)} was gone" if end.consequence else "too"
            causes.setdefault(f"{why} ({end.how()})", []).append(end)
    parts = [f"{_ranks(group)} failed {cause}" for cause, group in causes.items()]
    lost = [end for end in others if end.survived]
    if lost:
        parts.insert(0, f"{_ranks(lost)} {'were' if len(lost) > 1 else 'was'} lost before")
    asked = [end for end in others if end.asked and not end.survived]
    if asked:
        parts.append(f"{_ranks(asked)} {'were' if len(asked) > 1 else 'was'} ended by the launcher")
    return "; ".join(parts)


def _lost(end: RankExit, ends: Iterable[RankExit]) -> str:
    """The lost process. It is identified by its pid, because a subgroup numbers its ranks itself."""
    report = end.error.report if end.error is not None else None
    pid = report.pid if report is not None else 0
    return next((f"rank {other.rank}" for other in ends if other.pid == pid), "a peer")


def _ranks(ends: Sequence[RankExit]) -> str:
    return _named([end.rank for end in ends])


def _named(numbers: Sequence[int]) -> str:
    """A short list of ranks: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    names = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {names}"


def json_record(ends: Iterable[RankExit], status: int) -> bytes:
    """The record of `--json-errors`: the exit code, the ranks that failed first, and how every rank ended."""
    ends = sorted(ends, key=lambda end: end.rank)
    first = first_failure(ends)
    ranks = [end.rank for end in same_failure(first, ends)] if first is not None else []
    record = {"status": status, "first": ranks, "ranks": [msgspec.to_builtins(end) for end in ends]}
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
