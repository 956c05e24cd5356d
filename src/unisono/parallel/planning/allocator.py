"""PyTorch's caching allocator of CUDA memory, without memory: blocks, segments, and what they come to.

A block is a multiple of 512 bytes, cut from a segment; segments are 2 MiB for blocks of up to 1 MiB, 20 MiB
below 10 MiB, and a multiple of 2 MiB from there on. A freed block joins its free neighbours and stays in its
segment. Where the limit is reached, segments without blocks are given back first. Host memory has neither.
Source: c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

__all__ = ["AllocatorBlock", "CachingAllocator", "allowed"]

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
