"""What is in memory at a time, by cause, and where the peak of a step is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .allocator import SMALL, AllocatorBlock, CachingAllocator

__all__ = ["CAUSES", "Charge", "MemoryPeak", "MemoryTracker", "ProgramLocation"]

CAUSES = (
    "parameters", "gradients", "moments", "gathered", "buffers", "inputs", "activations", "temporary",
)  # fmt: skip


class ProgramLocation(NamedTuple):
    """Where a program is.

    Args:
        phase: forward, backward, update.
        module: the innermost one.    line: of the program, such as "model.py:17".
    """

    phase: str
    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        where = " in ".join(filter(None, (self.phase, f'"{self.module}"' if self.module else "")))
        return f"{where}, at {self.line}" if self.line else where


class MemoryPeak(NamedTuple):
    """The peak of one rank.

    Args:
        nbytes: of all blocks.    parts: by cause, whose sum it is.    place: where it is.
        reserved: bytes of all segments at their peak; on a host equal to nbytes.
        exceeded: bytes that are missing under the limit; 0: it fits.
    """

    nbytes: int
    parts: dict[str, int]
    place: ProgramLocation
    reserved: int
    exceeded: int


@dataclass(eq=False, slots=True)
class Charge:
    """Memory in use."""

    nbytes: int
    cause: str
    block: AllocatorBlock | None
    small: bool = False


@dataclass
class MemoryTracker:
    """The memory of one device.

    Args:
        allocator: PyTorch's for CUDA; None: that of the host, which keeps nothing.
        where: the place of the program, which is asked at each new peak.
    """

    allocator: CachingAllocator | None
    where: Callable[[], ProgramLocation]
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    total: int = 0
    _peak: int = 0
    _at: tuple[dict[str, int], ProgramLocation] | None = None

    def charge(self, nbytes: int, cause: str, stream: int = 0) -> Charge:
        """Take memory."""
        if nbytes <= 0:
            return Charge(0, cause, None)
        block = None
        if self.allocator is not None:
            nbytes = self.allocator.rounded(nbytes)
            block = self.allocator.allocate(nbytes, stream)
            charge = Charge(block.size, cause, block, nbytes <= SMALL)
        else:
            charge = Charge(nbytes, cause, None)
        self.parts[cause] += charge.nbytes
        self.total += charge.nbytes
        if self.total > self._peak:
            self._peak, self._at = self.total, None
            self._at = dict(self.parts), self.where()
        return charge

    def release(self, charge: Charge) -> None:
        """Give memory back."""
        self.parts[charge.cause] -= charge.nbytes
        self.total -= charge.nbytes
        if charge.block is not None and self.allocator is not None:
            self.allocator.release(charge.block, small=charge.small)
        charge.nbytes, charge.block = 0, None

    def relabel(self, charge: Charge, cause: str) -> None:
        """Count memory under another cause."""
        self.parts[charge.cause] -= charge.nbytes
        self.parts[cause] += charge.nbytes
        charge.cause = cause

    def forget_peak(self) -> None:
        """Look for the peak from here on."""
        self._peak = 0

    @property
    def peak(self) -> MemoryPeak:
        """The largest sum so far."""
        parts, place = self._at or (dict(self.parts), self.where())
        reserved = self.allocator.peak if self.allocator is not None else self._peak
        exceeded = self.allocator.exceeded if self.allocator is not None else 0
        return MemoryPeak(self._peak, parts, place, reserved, exceeded)
