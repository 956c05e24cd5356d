"""GOAL, the textual schedules of LogGOPSim and ATLAHS.

    num_ranks 2
    rank 0 {
    l1: calc 100
    l2: send 8b to 1 tag 5 cpu 0 nic 0
    l2 requires l1
    }

`requires` waits until the other action has ended, `irequires` until it has begun. A calc is in nanoseconds.
Source: Hoefler, Siebert, Lumsdaine, "Group Operation Assembly Language", ICPP 2009; LogGOPSim's README.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from unisono.plans.plan import Plan
from unisono.schedules.actions import Rates, TraceAction, actions

__all__ = ["goal", "parse_goal", "read_goal"]

MOST_BYTES = 256 << 20
MOST_RANKS = 1 << 17
MOST_ACTIONS = 1 << 22

_HEAD = re.compile(r"num_ranks\s+(\d{1,7})")
_RANK = re.compile(r"rank\s+(\d{1,7})\s*\{")
_ACTION = re.compile(
    r"(\w{1,120})\s*:\s*(?:(calc)\s+(\d{1,18})|(send|recv)\s+(\d{1,18})b\s+(to|from)\s+(\d{1,7}))(.*)"
)
_DEPENDS = re.compile(r"(\w{1,120})\s+(i?requires)\s+(\w{1,120})")
_OPTION = re.compile(r"\s*(tag|cpu|nic)\s+(\d{1,9})")


def goal(plan: Plan, nbytes: int, rates: Rates = Rates()) -> str:  # noqa: B008  # frozen
    """A plan as GOAL, for a buffer of `nbytes`; `rates` give the computations."""
    return "\n".join(_lines(actions(plan, nbytes, rates))) + "\n"


def _lines(ranks: list[list[TraceAction]]) -> Iterator[str]:
    yield f"num_ranks {len(ranks)}"
    for rank, listed in enumerate(ranks):
        yield f"\nrank {rank} {{"
        for action in listed:
            if action.kind == "calc":
                yield f"{action.label}: calc {action.size}"
            else:
                way = "to" if action.kind == "send" else "from"
                yield f"{action.label}: {action.kind} {action.size}b {way} {action.peer} tag {action.tag}"
        for action in listed:
            for word, others in (("requires", action.requires), ("irequires", action.irequires)):
                for other in others:
                    yield f"{action.label} {word} {listed[other].label}"
        yield "}"


def read_goal(file: str | Path) -> list[list[TraceAction]]:
    """The actions of all ranks.

    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong; the message names the file and the line.
    """
    with Path(file).open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{file}: is larger than {MOST_BYTES >> 20} MiB")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{file}:{line}: is no text in ASCII") from None
    return parse_goal(text, str(file))


def parse_goal(text: str, file: str = "schedule.goal") -> list[list[TraceAction]]:
    """As `read_goal`, from the text.

    Raises:
        ValueError: it is wrong; the message names the file and the line.
    """
    return _Parser(file).run(text)


class _Parser:
    def __init__(self, file: str) -> None:
        self.file = file
        self.line = 0
        self.size = 0
        self.count = 0
        self.rank = -1
        self.ranks: dict[int, list[TraceAction]] = {}
        self.labels: dict[str, int] = {}
        self.before: list[list[int]] = []
        self.begun: list[list[int]] = []

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self.file}:{self.line}: {text}")

    def run(self, text: str) -> list[list[TraceAction]]:
        for self.line, line in enumerate(text.splitlines(), 1):
            line = line.partition("//")[0].partition("#")[0].strip()
            if line:
                self.read(line)
        if not self.size:
            raise self.error("is empty, expected num_ranks N")
        if self.rank >= 0:
            raise self.error(f"rank {self.rank} lacks its closing brace")
        return [self.ranks.get(rank, []) for rank in range(self.size)]

    def read(self, line: str) -> None:
        if not self.size:
            head = _HEAD.fullmatch(line)
            if not head or not 1 <= int(head[1]) <= MOST_RANKS:
                raise self.error(f"is {line[:60]!r}, expected num_ranks 1..{MOST_RANKS}")
            self.size = int(head[1])
        elif self.rank < 0:
            begin = _RANK.fullmatch(line)
            if not begin or int(begin[1]) >= self.size or int(begin[1]) in self.ranks:
                raise self.error(
                    f"is {line[:60]!r}, expected a new rank below {self.size}, such as: rank 0 {{"
                )
            self.rank = int(begin[1])
            self.ranks[self.rank] = []
            self.labels, self.before, self.begun = {}, [], []
        elif line == "}":
            self.close()
        elif found := _ACTION.fullmatch(line):
            self.action(found)
        elif depends := _DEPENDS.fullmatch(line):
            self.depends(*depends.groups())
        else:
            raise self.error(f"{line[:60]!r} is neither an action nor a dependency")

    def action(self, found: re.Match[str]) -> None:
        label, calc, time, kind, size, way, peer, rest = found.groups()
        self.count += 1
        if self.count > MOST_ACTIONS:
            raise self.error(f"there are more than {MOST_ACTIONS} actions")
        if label in self.labels:
            raise self.error(f"label {label!r} stands there twice")
        options = dict.fromkeys(("tag", "cpu", "nic"), 0)
        at = 0
        while option := _OPTION.match(rest, at):
            options[option[1]], at = int(option[2]), option.end()
        if rest[at:].strip():
            raise self.error(f"{rest[at:].strip()[:40]!r} is no option, expected tag, cpu or nic")
        if kind and (kind == "send") != (way == "to"):
            raise self.error(f"{kind} {way}: expected send ... to, or recv ... from")
        if kind and (int(peer) >= self.size or int(peer) == self.rank):
            raise self.error(f"peer is {peer}, expected another rank below {self.size}")
        self.labels[label] = len(self.before)
        self.before.append([])
        self.begun.append([])
        action = (
            TraceAction(kind, label, int(size), int(peer), options["tag"], line=self.line)
            if kind
            else TraceAction(calc, label, int(time), line=self.line)
        )
        self.ranks[self.rank].append(action._replace(cpu=options["cpu"], nic=options["nic"]))

    def depends(self, label: str, word: str, other: str) -> None:
        for each in (label, other):
            if each not in self.labels:
                raise self.error(f"there is no label {each!r} above in rank {self.rank}")
        if label == other:
            raise self.error(f"{label!r} waits for itself")
        side = self.before if word == "requires" else self.begun
        side[self.labels[label]].append(self.labels[other])

    def close(self) -> None:
        listed = [
            action._replace(requires=tuple(before), irequires=tuple(begun))
            for action, before, begun in zip(self.ranks[self.rank], self.before, self.begun, strict=True)
        ]
        left = [len(action.requires) + len(action.irequires) for action in listed]
        after: list[list[int]] = [[] for _ in listed]
        for number, action in enumerate(listed):
            for other in (*action.requires, *action.irequires):
                after[other].append(number)
        ready = [number for number, count in enumerate(left) if not count]
        for number in ready:
            for then in after[number]:
                left[then] -= 1
                if not left[then]:
                    ready.append(then)
        if len(ready) < len(listed):
            stuck = next(action for action, count in zip(listed, left, strict=True) if count)
            raise ValueError(
                f"{self.file}:{stuck.line}: rank {self.rank}: {stuck.label!r} waits for itself in a cycle"
            )
        self.ranks[self.rank] = listed
        self.rank = -1
