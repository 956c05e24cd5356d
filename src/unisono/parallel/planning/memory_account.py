"""What is in memory at a time, by cause, and where the peak of a step is; with PyTorch's caching allocator.

Of CUDA memory a block is a multiple of 512 bytes, cut from a segment; segments are 2 MiB for blocks of up to
1 MiB, 20 MiB below 10 MiB, and a multiple of 2 MiB from there on. A freed block joins its free
neighbours and stays in its segment. Where the limit is reached, segments without blocks are given back first.
Host memory has neither. Source: c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "CAUSES",
    "AllocatorBlock",
    "CachingAllocator",
    "Charge",
    "MemoryPeak",
    "MemoryTracker",
    "ProgramLocation",
    "allowed",
]

MIB = 1 << 20
SMALLEST, SMALL = 512, MIB
SPARE = 0.05  # of the memory, for fragmentation
SMALL_SEGMENT, LARGE_SEGMENT, LARGE, LARGE_UNIT = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


def allowed(limit: int) -> int:
    """What the segments of a dry run may take of a limit: a run may cut them in another order.

    Example: 1 GiB -> 970.8 MiB.
    """
    return max(0, int(limit * (1 - SPARE)) - SMALL_SEGMENT)


@dataclass(eq=False, slots=True)
class AllocatorBlock:
    """A part of a segment. `stream`: of the work that it was made for; others do not reuse it."""

    size: int
    address: int
    stream: int
    free: bool = False
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None


@dataclass
class CachingAllocator:
    """Blocks and segments of one device.

    Args:
        limit: bytes of all segments; None: no limit.
    Attributes:
        reserved, peak: bytes of segments, now and at most.
        exceeded: the most bytes that were missing under the limit; 0: all fitted.
    """

    limit: int | None = None
    reserved: int = 0
    peak: int = 0
    exceeded: int = 0
    _free: dict[tuple[int, bool], list[tuple[int, int, AllocatorBlock]]] = field(default_factory=dict)
    _next: int = 0

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Bytes of the block that a tensor of so many gets."""
        return max(SMALLEST, (nbytes + SMALLEST - 1) // SMALLEST * SMALLEST)

    def allocate(self, nbytes: int, stream: int = 0) -> AllocatorBlock:
        """Take a block."""
        size = self.rounded(nbytes)
        small = size <= SMALL
        free = self._free.setdefault((stream, small), [])
        place = bisect.bisect_left(free, (size, 0))
        block = free.pop(place)[2] if place < len(free) else self._segment(size, stream)
        block.free = False
        left = block.size - size
        if left >= SMALLEST if small else left > SMALL:
            rest = AllocatorBlock(left, block.address + size, stream, False, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._keep(rest, small)
        return block

    def release(self, block: AllocatorBlock, *, small: bool) -> None:
        """Give a block back. `small`: as it was taken."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other, small)
                first, second = (other, block) if other is block.before else (block, other)
                block.address, block.size = first.address, first.size + second.size
                block.before, block.after = first.before, second.after
                if block.before is not None:
                    block.before.after = block
                if block.after is not None:
                    block.after.before = block
        self._keep(block, small)

    def _keep(self, block: AllocatorBlock, small: bool) -> None:
        block.free = True
        bisect.insort(self._free.setdefault((block.stream, small), []), self._key(block))

    def _take(self, block: AllocatorBlock, small: bool) -> None:
        free = self._free[block.stream, small]
        free.pop(bisect.bisect_left(free, self._key(block)[:2]))

    @staticmethod
    def _key(block: AllocatorBlock) -> tuple[int, int, AllocatorBlock]:
        return block.size, block.address, block  # addresses differ, so blocks are never compared

    def _segment(self, size: int, stream: int) -> AllocatorBlock:
        unit = (size + LARGE_UNIT - 1) // LARGE_UNIT * LARGE_UNIT
        nbytes = SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT if size < LARGE else unit
        if self.limit is not None and self.reserved + nbytes > self.limit:
            self._drop()
            self.exceeded = max(self.exceeded, self.reserved + nbytes - self.limit)
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        self._next += nbytes + LARGE_UNIT
        return AllocatorBlock(nbytes, self._next - nbytes, stream)

    def _drop(self) -> None:
        """Give back segments that are one free block."""
        for key, free in self._free.items():
            kept = [each for each in free if each[2].before is not None or each[2].after is not None]
            self.reserved -= sum(size for size, *_ in free) - sum(size for size, *_ in kept)
            self._free[key] = kept


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
