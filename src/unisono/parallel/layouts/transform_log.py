"""The moves between operators: place, kind, reason, bytes, predicted and measured seconds."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .cost import LayoutTransform

__all__ = ["Record", "TransformRecord", "note", "record"]


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
