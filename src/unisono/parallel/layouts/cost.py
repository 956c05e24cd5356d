"""The cost of moving a tensor between layouts, in seconds, by the alpha-beta model of the collectives."""

from __future__ import annotations

import math
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class LayoutTransform:
    """One step from a layout to the next.

    Args:
        kind: slice, all_gather, all_to_all, all_reduce or reduce_scatter.
        axes: the mesh axes of the group.
        source: the tensor dim that was cut; None for partial sums and whole values.
        target: the tensor dim that is cut afterwards.
    """

    kind: str
    axes: tuple[int, ...]
    source: int | None
    target: int | None


@dataclass(frozen=True)
class Link:
    """A network: seconds for a message, seconds for a byte, seconds to copy a byte locally."""

    latency_s: float = 5e-6
    byte_s: float = 2.5e-10
    copy_s: float = 1e-10

    def received(self, kind: str, ranks: int, nbytes: float) -> float:
        """The bytes that a rank receives. `nbytes`: of its part before the move.

        Example: all_gather on 4 ranks of 100 bytes each: 300.
        """
        share = (ranks - 1) / ranks
        return {
            "slice": 0.0,
            "all_gather": (ranks - 1) * nbytes,
            "all_to_all": share * nbytes,
            "reduce_scatter": share * nbytes,
            "all_reduce": 2 * share * nbytes,
        }[kind]

    def seconds(self, kind: str, ranks: int, nbytes: float) -> float:
        """Predict the time of one move. The copies of packing and unpacking are counted, too."""
        if kind == "slice":
            return self.copy_s * nbytes / ranks
        rounds = math.ceil(math.log2(ranks)) * (2 if kind == "all_reduce" else 1)
        received = self.received(kind, ranks, nbytes)
        return rounds * self.latency_s + self.byte_s * received + self.copy_s * (nbytes + received)


# ---- the moves that were made ----


class TransformRecord(NamedTuple):
    """One move. `nbytes`: received by this rank."""

    where: str
    move: LayoutTransform
    ranks: int
    start: str
    goal: str
    nbytes: float
    predicted_s: float
    measured_s: float


class Record(list[TransformRecord]):
    """The moves inside `with record() as moves:`; as text, a table."""

    def __str__(self) -> str:
        head = f"{'where':36} {'move':15} {'ranks':>5} {'bytes':>10} {'predicted':>10} {'measured':>10}  why"
        rows = [
            f"{e.where:36} {e.move.kind:15} {e.ranks:5} {e.nbytes:10.0f} {e.predicted_s * 1e6:8.1f}us "
            f"{e.measured_s * 1e6:8.1f}us  {e.start} -> {e.goal}"
            for e in self
        ]
        return "\n".join([head, *rows])


_current: ContextVar[Record | None] = ContextVar("moves", default=None)


@contextmanager
def record() -> Iterator[Record]:
    """Collect the moves that `up.shard`'s operators insert, forward and backward."""
    moves = Record()
    token = _current.set(moves)
    try:
        yield moves
    finally:
        _current.reset(token)


def note(entry: TransformRecord) -> None:
    """Add to the record that is open, if any."""
    moves = _current.get()
    if moves is not None:
        moves.append(entry)
