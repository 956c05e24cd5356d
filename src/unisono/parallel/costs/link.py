"""What a collective takes by a latency and a time for each byte: the alpha-beta model."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
