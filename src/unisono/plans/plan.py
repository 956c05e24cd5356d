"""What a plan is: for every rank a short list of steps over chunks of a buffer.

A plan says nothing of bytes, dtypes, segments or transports. It is built by a function that
reads like the paper it comes from, proved by `proof.prove`, flattened by `lowering.lower` and
run by the engine. This module only defines the words.

Chunks live in three spaces:

    Out(i)   what the collective produces; for in-place ones (all_reduce, broadcast, reduce, scans)
             also what it starts from
    In(i)    what the caller gives, where that is another buffer; never written
    Tmp(i)   scratch memory, as long as the chunk of the same number that it stands for
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

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
    "others",
]


@dataclass(frozen=True)
class Chunk:
    """A part of a buffer: `space` is "out", "in" or "tmp"."""

    space: str
    index: int

    def __str__(self) -> str:
        return f"{self.space.capitalize()}({self.index})"


def Out(index: int) -> Chunk:  # noqa: N802
    """Chunk `index` of the result (and, in place, of the start)."""
    return Chunk("out", index)


def In(index: int) -> Chunk:  # noqa: N802
    """Chunk `index` of the caller's input."""
    return Chunk("in", index)


def Tmp(index: int) -> Chunk:  # noqa: N802
    """Scratch chunk `index`."""
    return Chunk("tmp", index)


@dataclass(frozen=True)
class Send:
    """Hand a chunk to one or several ranks."""

    chunk: Chunk
    to: tuple[int, ...]

    def __str__(self) -> str:
        return f"Send({self.chunk}, to={self.to})"


@dataclass(frozen=True)
class Recv:
    """Take a chunk over from a rank."""

    chunk: Chunk
    frm: int

    def __str__(self) -> str:
        return f"Recv({self.chunk}, frm={self.frm})"


@dataclass(frozen=True)
class Reduce:
    """Combine the contributions of `frm` in the written order into `chunk`.

    This rank's own number among `frm` stands for its own contribution: `own`, or `chunk` itself
    when `own` is None. If it is not among them, only the others' contributions are combined.
    """

    chunk: Chunk
    frm: tuple[int, ...]
    own: Chunk | None = None

    def __str__(self) -> str:
        own = "" if self.own is None else f", own={self.own}"
        return f"Reduce({self.chunk}, frm={self.frm}{own})"


@dataclass(frozen=True)
class Copy:
    """Copy a chunk within this rank."""

    dst: Chunk
    src: Chunk

    def __str__(self) -> str:
        return f"Copy({self.dst}, {self.src})"


Step = Send | Recv | Reduce | Copy

StepFunction = Callable[[int, int, int], Iterable[Step]]
"""An algorithm: (rank, size, root) -> the steps of that rank. Rootless ones ignore root."""


@dataclass(frozen=True)
class Plan:
    """The steps of all ranks for one collective.

    Attributes:
        collective: one of `contracts.CONTRACTS`.  algorithm: its name in `catalog.ALGORITHMS`.
        size: the number of ranks.  root: the rank that is special, 0 where none is.
        steps: steps[rank] is that rank's list, run in order.
    """

    collective: str
    algorithm: str
    size: int
    root: int
    steps: tuple[tuple[Step, ...], ...]

    def __str__(self) -> str:
        return f"{self.collective}/{self.algorithm} p={self.size}"

    def chunks(self, space: str) -> int:
        """How many chunks of a space the plan speaks of."""
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


def build(collective: str, algorithm: str, steps: StepFunction, size: int, root: int = 0) -> Plan:
    """Write down an algorithm's steps for every rank of a group of `size`."""
    return Plan(
        collective, algorithm, size, root, tuple(tuple(steps(rank, size, root)) for rank in range(size))
    )


def others(rank: int, size: int) -> tuple[int, ...]:
    """All ranks but this one, its right-hand neighbour first: ranks differ in whom they ask first.

    Example (size=4): others(1, 4) == (2, 3, 0)
    """
    return tuple((rank + distance) % size for distance in range(1, size))
