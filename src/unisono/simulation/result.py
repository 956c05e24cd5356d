"""What a simulated run has shown: how long it takes, what limits it, what each link and rank did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

__all__ = ["Breakdown", "Limit", "LinkUse", "Result", "Span"]


class Breakdown(NamedTuple):
    """How the seconds of the longest chain divide: each message waits for one, which waited for another ...

    Attributes:
        latency_s: of links.  transfer_s: bytes on links, and waiting for messages before them on an edge.
        overhead_s: of sending and receiving.  compute_s: reducing, copying and computing.
    """

    latency_s: float
    transfer_s: float
    overhead_s: float
    compute_s: float


class LinkUse(NamedTuple):
    """What a link has done. Under a symmetry one link stands for `links` equal ones.

    Attributes:
        busy_s: for how long it carried something.
        limiting_s: for how long it was full, or the slowest link of a message.
        nbytes: that crossed it.
    """

    link: int
    name: str
    busy_s: float
    limiting_s: float
    nbytes: float


class Limit(NamedTuple):
    """What the run waits for most, and for how long.

    Attributes:
        kind: "link", "latency", "overhead" or "compute".
        where: the link or the rank.  seconds: of the longest chain, by kind.
    """

    kind: str
    where: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


class Span(NamedTuple):
    """What a rank did from start to end, in seconds. kind: "send", "recv", "reduce", "copy", "compute" ..."""

    rank: int
    stream: int
    kind: str
    step: int
    start: float
    end: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run.

    Attributes:
        name: what ran.  network: its name.  size: the number of ranks.
        seconds: until the last rank was done.
        messages: between ranks, of all ranks.  simulated: those that were simulated, see `folding`.
        slowest: the rank that ended last.
        limit: what the run waits for most.  breakdown: of the longest chain.
        links: those that carried something, the longest limiting ones first.
        spans: what ranks did, if a timeline was asked for.
    """

    name: str
    network: str
    size: int
    seconds: float
    messages: int
    simulated: int
    slowest: int
    limit: Limit
    breakdown: Breakdown
    links: Sequence[LinkUse]
    spans: Sequence[Span]
    end_of: Callable[[int], float]
    busy_of: Callable[[int], float]

    @property
    def ends(self) -> list[float]:
        """When each rank was done, in seconds."""
        return [self.end_of(rank) for rank in range(self.size)]

    @property
    def busy(self) -> list[float]:
        """For how long each rank worked itself, in seconds: its overheads, reducing, copying, computing."""
        return [self.busy_of(rank) for rank in range(self.size)]

    def trace(self, path: str | Path) -> None:
        """Write the spans as a trace that ui.perfetto.dev draws: a row per rank and stream.

        Raises:
            ValueError: there is no timeline.  OSError: the file cannot be written.
        """
        if not self.spans:
            raise ValueError("the run has no timeline: simulate it with timeline=100000")
        rows = [
            {
                "name": span.kind,
                "cat": self.name,
                "ph": "X",
                "pid": span.rank,
                "tid": span.stream,
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"step": span.step},
            }
            for span in self.spans
        ]
        names = [
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
            for rank in sorted({span.rank for span in self.spans})
        ]
        Path(path).write_bytes(msgspec.json.encode({"displayTimeUnit": "ns", "traceEvents": names + rows}))

    def __str__(self) -> str:
        return (
            f"{self.name} on {self.network}, {self.size} ranks: {self.seconds:.6g} s, "
            f"{self.messages} messages, limit: {self.limit} ({self.limit.seconds:.3g} s)"
        )
