"""A plan: for every rank a short list of steps over chunks of a buffer.

A plan does not depend on bytes, dtypes, segments or transports. A function that reads like its paper builds
it, `proof.prove` proves it, `lowering.lower` flattens it, and the engine runs it. This module only defines
the steps.

Chunks live in three spaces:

    Out(i)   what the collective produces; for in-place ones (all_reduce, broadcast, reduce, scans)
             also the initial data
    In(i)    the caller's input, if that is another buffer; never written
    Tmp(i)   scratch memory, as long as the In or Out chunk of the same number
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from unisono.engine.base.validation import listed, whole

__all__ = [
    "Chunk",
    "Copy",
    "In",
    "Out",
    "Plan",
    "Recv",
    "Reduce",
    "Send",
    "Step",
    "StepFunction",
    "Tmp",
    "build",
    "by_host",
    "exchange",
    "others",
]

MOST_RANKS = 1 << 20
"""A plan holds steps for each of them."""

EDGE_CAPACITY = 16
"""Messages an edge of the engine holds (FIFO_SLOTS; a test compares the two)."""


class Chunk(NamedTuple):
    """A part of a buffer: `space` is "out", "in" or "tmp"."""

    space: str
    index: int  # type: ignore[assignment]  # not the tuple's method

    def __str__(self) -> str:
        return f"{self.space.capitalize()}({self.index})"


def Out(index: int) -> Chunk:  # noqa: N802
    """Chunk `index` of the result (in place: also of the initial data)."""
    return Chunk("out", index)


def In(index: int) -> Chunk:  # noqa: N802
    """Chunk `index` of the caller's input."""
    return Chunk("in", index)


def Tmp(index: int) -> Chunk:  # noqa: N802
    """Scratch chunk `index`."""
    return Chunk("tmp", index)


class Send(NamedTuple):
    """Send a chunk to one or several ranks."""

    chunk: Chunk
    to: tuple[int, ...]

    def __str__(self) -> str:
        return f"Send({self.chunk}, to={self.to})"


class Recv(NamedTuple):
    """Receive a chunk from a rank."""

    chunk: Chunk
    frm: int

    def __str__(self) -> str:
        return f"Recv({self.chunk}, frm={self.frm})"


class Reduce(NamedTuple):
    """Combine the contributions of `frm` in the written order into `chunk`.

    This rank's own number in `frm` means its own contribution: `own`, or `chunk` itself when `own` is None.
    If it is not in `frm`, only the contributions of other ranks are combined.
    """

    chunk: Chunk
    frm: tuple[int, ...]
    own: Chunk | None = None

    def __str__(self) -> str:
        own = "" if self.own is None else f", own={self.own}"
        return f"Reduce({self.chunk}, frm={self.frm}{own})"


class Copy(NamedTuple):
    """Copy a chunk within this rank."""

    dst: Chunk
    src: Chunk

    def __str__(self) -> str:
        return f"Copy({self.dst}, {self.src})"


Step = Send | Recv | Reduce | Copy

StepFunction = Callable[[int, int, int], Iterable[Step]]
"""An algorithm: (rank, size, root) -> the steps of that rank. Rootless ones ignore root."""


class _PlanFields(NamedTuple):
    collective: str
    algorithm: str
    size: int
    root: int
    steps: tuple[tuple[Step, ...], ...]
    hosts: tuple[int, ...] = ()
    coding: str = ""


class Plan(_PlanFields):
    """The steps of all ranks for one collective.

    Attributes:
        collective: one of `contracts.CONTRACTS`.  algorithm: its name in `catalog.ALGORITHMS`.
        size: the number of ranks.  root: the root rank; 0 for collectives without a root.
        steps: steps[rank] is that rank's list, run in order.
        hosts: the number of the host of each rank; (): one host.
        coding: which edges carry codes, see `coded`: "" none, "between" those between hosts, "all" all.
    """

    def __str__(self) -> str:
        root = f" root={self.root}" if self.root else ""
        coding = f" coding={self.coding}" if self.coding else ""
        return f"{self.collective}/{self.algorithm} p={self.size}{root}{coding}"

    def chunks(self, space: str) -> int:
        """How many chunks of a space the plan uses."""
        return self._chunks.get(space, 0)

    @cached_property
    def _chunks(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for chunk in self._mentioned():
            counts[chunk.space] = max(counts.get(chunk.space, 0), chunk.index + 1)
        return counts

    def _mentioned(self) -> Iterator[Chunk]:
        for steps in self.steps:
            for step in steps:
                yield step.dst if isinstance(step, Copy) else step.chunk
                if isinstance(step, Copy):
                    yield step.src
                elif isinstance(step, Reduce) and step.own is not None:
                    yield step.own


def build(
    collective: str,
    algorithm: str,
    steps: StepFunction,
    size: int,
    root: int = 0,
    hosts: tuple[int, ...] = (),
    coding: str = "",
) -> Plan:
    """Build the plan: an algorithm's steps for every rank of a group of `size`."""
    size = whole(size, "size", 1, MOST_RANKS)
    if not callable(steps):
        raise TypeError(f"steps is a {type(steps).__name__}, expected a function of rank, size and root")
    written = tuple(tuple(steps(rank, size, root)) for rank in range(size))
    return Plan(collective, algorithm, size, root, written, hosts, coding)


def others(rank: int, size: int) -> tuple[int, ...]:
    """All other ranks, the right-hand neighbour first, so that ranks begin with different peers.

    Example (size=4): others(1, 4) == (2, 3, 0)
    """
    rank = whole(rank, "rank")
    size = whole(size, "size", 0, MOST_RANKS)
    return tuple((rank + distance) % size for distance in range(1, size))


def by_host(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host; hosts in the order of their lowest ranks.

    Example: by_host((7, 4, 7, 4, 4)) == ((0, 2), (1, 3, 4))
    """
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(listed(hosts, "hosts")):
        ranks.setdefault(host, []).append(rank)
    return tuple(map(tuple, ranks.values()))


def exchange(rank: int, sends: Iterable[Send], takes: Iterable[Recv | Reduce]) -> Iterator[Step]:
    """All sends, then all receives, but in turns where an edge would hold more messages than it can.

    Successive sends to the same ranks overlap: together they cost one latency. Message n on an edge belongs
    to turn n // 8. When all ranks take turns, a sender is at most two turns ahead of its receivers, so an
    edge holds at most 16 messages.
    """
    given, taken = _turns(rank, sends), _turns(rank, takes)
    for turn in range(max(len(given), len(taken)) + 1):
        if turn < len(given):
            yield from given[turn]
        if 0 < turn <= len(taken):
            yield from taken[turn - 1]


def _turns(rank: int, steps: Iterable[Send | Recv | Reduce]) -> list[list[Step]]:
    turns: list[list[Step]] = [[]]
    seen: Counter[int] = Counter()
    latest: dict[int, int] = {}  # messages on one edge stay in order
    for step in steps:
        named = step.to if isinstance(step, Send) else (step.frm,) if isinstance(step, Recv) else step.frm
        turn = 0
        for peer in named:
            if peer != rank:
                turn = max(turn, latest.get(peer, 0), seen[peer] // (EDGE_CAPACITY // 2))
        for peer in named:
            seen[peer] += 1
            latest[peer] = turn
        while turn >= len(turns):
            turns.append([])
        turns[turn].append(step)
    return turns
