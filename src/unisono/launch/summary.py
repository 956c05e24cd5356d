"""Which rank failed first, and how to say it.

The processes' order of death alone misleads: a rank that raised an error may still be shutting its
interpreter down while a peer has already noticed and gone. So a failure that speaks of a lost peer
is taken for a consequence whenever there is one that does not.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "Ending",
    "Failure",
    "exit_status",
    "failure_of",
    "first_failure",
    "follow_up",
    "foreign_report",
    "last_words",
    "report",
    "signal_name",
]

_HEADER = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_DECORATION = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|^\[rank\d+\]: ?", re.MULTILINE)  # colour; torch's own prefix
_CONSEQUENCE = re.compile(
    r"PeerLost|\bAborted\b|Connection (?:reset|closed|refused)|ConnectionResetError|BrokenPipeError"
    r"|DistNetworkError|remote process exited"
)
_ABSENT = re.compile(r"(ranks? [\d, -]+) never arrived|missing (ranks? \d[\d, .]*\d|rank \d+)")
_MAX_LINES = 60
_MAX_LINE_CHARS = 2000


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    Attributes:
        code: exit code, or the signal's number when `signaled`.
        asked: the launcher had signalled it before; its end says nothing about its own fate.
        order: 0 for the rank that ended first.
        stderr: the last bytes of its standard error.
        ended_at: seconds since the epoch; nodes' clocks agree well enough to choose between equals.
    """

    rank: int
    pid: int
    code: int
    signaled: bool
    asked: bool
    order: int
    stderr: bytes = b""
    ended_at: float = 0.0

    @property
    def failed(self) -> bool:
        """It ended badly, and not because the launcher told it to."""
        return (self.signaled or self.code != 0) and not self.asked

    def how(self) -> str:
        """Say how it ended: "exit code 3", "SIGKILL"."""
        return signal_name(self.code) if self.signaled else f"exit code {self.code}"


def signal_name(number: int) -> str:
    """Return "SIGSEGV" for 11; real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_status(ending: Ending) -> int:
    """Return the exit code for the shell: the rank's own, 128 + n for signal n."""
    return 128 + ending.code if ending.signaled else ending.code


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """Return the failure that started it all, None when nobody failed."""
    failed = [ending for ending in endings if ending.failed]
    return min(failed, key=lambda ending: (_is_consequence(ending), ending.order), default=None)


def _is_consequence(ending: Ending) -> bool:
    words = last_words(ending)
    final = [line for line in words if line and not line.startswith((" ", "\t"))]
    return not ending.signaled and bool(final) and bool(_CONSEQUENCE.search("\n".join(final[-3:])))


def last_words(ending: Ending) -> list[str]:
    """Return the last traceback in a rank's stderr with those it is chained to, else its last lines."""
    text = _DECORATION.sub("", ending.stderr.decode(errors="replace"))
    lines = [line.rstrip("\r")[:_MAX_LINE_CHARS] for line in text.splitlines()]
    marker = _FATAL if ending.signaled else _HEADER
    start = next((i for i in reversed(range(len(lines))) if lines[i].startswith(marker)), None)
    if start is None:
        return lines[-5:]
    start = _chain_start(lines, start)
    block = lines[start:]
    if len(block) > _MAX_LINES:
        block = [
            *block[: _MAX_LINES // 2],
            f"  ... {len(block) - _MAX_LINES} lines ...",
            *block[-_MAX_LINES // 2 :],
        ]
    return block


def _chain_start(lines: Sequence[str], start: int) -> int:
    """Go from the last traceback back to the first of its "During handling of ..." chain."""
    while start >= 2 and any(lines[i] in _CHAINED for i in range(max(0, start - 2), start)):
        earlier = next((i for i in reversed(range(start - 2)) if lines[i].startswith(_HEADER)), None)
        if earlier is None:
            break
        start = earlier
    return start


def report(first: Ending, endings: Iterable[Ending], *, log_dir: str | None, shown: bool = False) -> str:
    """Write the summary: the first failure and its error, then in one line what followed from it.

    unisono run: rank 2 failed first: exit code 1 (pid 4121)
      ValueError: label 10 is out of range
    unisono run: then ranks 0-1 failed because a peer was gone (exit code 1); rank 3 was ended by the launcher

    Args:
        shown: the rank's standard error is on the console already, so its traceback is not repeated.
    """
    lines = [headline(first)]
    lines += ["  " + line for line in (_error(last_words(first)) if shown else last_words(first))]
    others = sorted((e for e in endings if e.rank != first.rank), key=lambda e: e.rank)
    parts = [f"{_ranks(group)} failed {cause}" for cause, group in _by_cause(others).items()]
    asked = [e for e in others if e.asked]
    if asked:
        parts.append(f"{_ranks(asked)} {'were' if len(asked) > 1 else 'was'} ended by the launcher")
    before = [e for e in others if e.order < first.order and e.code == 0 and not e.signaled]
    if before and _is_consequence(first):
        lines.append(f"unisono run: {_ranks(before)} had ended before with exit code 0")
    if parts:
        lines.append("unisono run: then " + "; ".join(parts))
    if log_dir:
        lines.append(f"unisono run: full output in {log_dir}")
    return "\n".join(lines)


def headline(first: Ending) -> str:
    """The cause in one line: who failed, or who was waited for in vain."""
    how = f"{first.how()} (pid {first.pid})"
    absent = _ABSENT.search("\n".join(_error(last_words(first))))
    if absent is not None and not first.signaled:
        who = next(group for group in absent.groups() if group)
        return f"unisono run: {who} never came; rank {first.rank} gave up waiting first: {how}"
    return f"unisono run: rank {first.rank} failed first: {how}"


def _error(words: list[str]) -> list[str]:
    """Of a traceback, the error it ends with; everything else as it is."""
    if not words or not words[0].startswith(_HEADER):
        return words
    start = max(i for i, line in enumerate(words) if line.startswith(_HEADER))
    body = [i for i in range(start + 1, len(words)) if words[i] and not words[i].startswith((" ", "\t"))]
    return words[body[0] :] if body else words


class Failure(NamedTuple):
    """A node's first failure, as the other nodes are told of it. `rank` is -1 where it is not known."""

    rank: int
    how: str
    status: int
    consequence: bool
    ended_at: float
    words: list[str]


def failure_of(first: Ending) -> Failure:
    """What other nodes are told about `first`."""
    words = last_words(first)
    return Failure(first.rank, first.how(), exit_status(first), _is_consequence(first), first.ended_at, words)


def foreign_report(failure: Failure, node: int, host: str) -> str:
    """Write the summary of a job whose first failure was on another node."""
    who = f"rank {failure.rank}" if failure.rank >= 0 else "a process"
    lines = [f"unisono run: {who} on node {node} (host {host}) failed first: {failure.how}"]
    return "\n".join(lines + ["  " + line for line in failure.words])


def follow_up(endings: Sequence[Ending]) -> str:
    """Say in one line what happened on this node, where nothing began."""
    parts = [f"{_ranks(group)} failed {cause}" for cause, group in _by_cause(endings).items()]
    asked = [e for e in endings if e.asked]
    if asked:
        parts.append(f"{_ranks(asked)} {'were' if len(asked) > 1 else 'was'} ended by the launcher")
    return "unisono run: then on this node " + "; ".join(parts) if parts else ""


def _by_cause(endings: Iterable[Ending]) -> dict[str, list[Ending]]:
    groups: dict[str, list[Ending]] = {}
    for ending in endings:
        if ending.failed:
            cause = (
                f"because a peer was gone ({ending.how()})"
                if _is_consequence(ending)
                else f"too ({ending.how()})"
            )
            groups.setdefault(cause, []).append(ending)
    return groups


def _ranks(endings: Sequence[Ending]) -> str:
    """Name ranks shortly: "rank 3", "ranks 0-2, 5"."""
    numbers = sorted(ending.rank for ending in endings)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    names = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {names}"
