"""What algorithms cost between hosts, for `choose`: constants, because all ranks have to choose alike."""

from __future__ import annotations

from unisono.cost import Edge, busiest, seconds
from unisono.plans import make

__all__ = ["Price"]

SEGMENT_BYTES = 256 * 1024
"""What the engine takes through a plan at once (kSegmentBytes)."""

INSIDE = Edge(1e-6, 1 / 6e9)
"""A message within a host."""

BETWEEN = Edge(30e-6, 1 / 2e9)
"""A message between hosts, over a socket."""

REDUCING_S_PER_BYTE = 1 / 10e9


class Price:
    """Seconds that an algorithm takes for any number of bytes, from three points of the model."""

    def __init__(self, collective: str, algorithm: str, size: int, hosts: tuple[int, ...]) -> None:
        plan = make(collective, algorithm, size, 0, hosts)
        a, b, g = INSIDE.a, INSIDE.b, REDUCING_S_PER_BYTE
        self._empty = seconds(plan, 0, a=a, b=b, g=g, between=BETWEEN)
        self._first = seconds(plan, SEGMENT_BYTES, a=a, b=b, g=g, between=BETWEEN)
        self._further = busiest(plan, SEGMENT_BYTES, inside=INSIDE, between=BETWEEN, g=g)

    def __call__(self, nbytes: float) -> float:
        """Seconds for a whole buffer of `nbytes`: the first segment's way, and what the others add."""
        first = min(nbytes / SEGMENT_BYTES, 1)
        further = nbytes / SEGMENT_BYTES - first
        return self._empty + (self._first - self._empty) * first + self._further * further
