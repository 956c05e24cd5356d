"""The steps of a rank as numbers, for csrc/simulator/simulation.hpp.

Steps that stand side by side and have the same peers are one code. Sends among them are one message; receives
and reductions are still done one by one.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from unisono.plans.plan import Chunk, Copy, Plan, Recv, Send, Step

__all__ = [
    "AWAIT",
    "CHUNK",
    "COMPUTE",
    "COPY",
    "RECV",
    "REDUCE",
    "RELEASE",
    "SEGMENT",
    "SEND",
    "SEND_IN_PLACE",
    "SIGNAL",
    "UNTIL",
    "Programs",
    "SendInPlace",
    "chunk_code",
    "compute_code",
    "encoded",
    "plan_codes",
    "translated",
    "until_code",
]

SEND, RECV, REDUCE, COPY, CHUNK, COMPUTE, SIGNAL, AWAIT, SEGMENT, UNTIL, SEND_IN_PLACE, RELEASE = range(12)
"""The codes, as `simulator::Code` has them."""

HEADS = {
    SEND: 3,
    RECV: 2,
    REDUCE: 4,
    COPY: 2,
    CHUNK: 3,
    COMPUTE: 3,
    SIGNAL: 2,
    AWAIT: 2,
    SEGMENT: 1,
    UNTIL: 3,
    SEND_IN_PLACE: 3,
    RELEASE: 1,
}
"""How many numbers a code has before its peers."""

BLOCK_CODES = 1 << 14


class SendInPlace(NamedTuple):
    """A `Send` whose receivers of this host copy the chunk from the sender's memory."""

    chunk: Chunk
    to: tuple[int, ...]


def chunk_code(nbytes: float) -> array[int]:
    """From here on, a chunk has so many bytes."""
    return array("i", [CHUNK, *_halves(nbytes)])


def compute_code(seconds: float) -> array[int]:
    """The rank computes for so long."""
    return array("i", [COMPUTE, *_halves(seconds)])


def until_code(seconds: float) -> array[int]:
    """The next step does not begin before this second."""
    return array("i", [UNTIL, *_halves(seconds)])


class Programs:
    """The programs of ranks in codes, made when they are needed; the first ones are kept."""

    def __init__(self, steps: Callable[[int], Iterable[Step | SendInPlace]], most: int) -> None:
        """steps: of a rank.  most: numbers that are kept, over all ranks."""
        self.steps = steps
        self._room = most
        self._kept: dict[int, list[array[int]]] = {}

    def blocks(self, rank: int) -> Iterator[array[int]]:
        """The codes of a rank, in blocks."""
        if rank in self._kept:
            yield from self._kept[rank]
            return
        blocks = []
        for block in encoded(rank, self.steps(rank)):
            yield block
            self._room -= len(block)
            if self._room > 0:
                blocks.append(block)
        if self._room > 0:
            self._kept[rank] = blocks


def encoded(rank: int, steps: Iterable[Step | SendInPlace]) -> Iterator[array[int]]:
    """The codes of a rank's steps, in blocks of about `BLOCK_CODES` numbers."""
    block = array("i")
    kind: type = Copy
    count = 0
    peers: Any = None
    for step in steps:
        now: type = type(step)
        sends = now is Send or now is SendInPlace
        its: Any = step.to if sends else None if now is Copy else step.frm  # type: ignore[union-attr]
        if now is kind and its == peers:
            count += 1
            continue
        if count:
            block.extend(_code(rank, kind, count, peers))
            if len(block) >= BLOCK_CODES:
                yield block
                block = array("i")
        kind, count, peers = now, 1, its
    if count:
        block.extend(_code(rank, kind, count, peers))
    if block:
        yield block


def plan_codes(plan: Plan) -> list[bytes]:
    """The codes of each rank."""
    return [b"".join(block.tobytes() for block in encoded(rank, s)) for rank, s in enumerate(plan.steps)]


def _code(rank: int, kind: type, count: int, peers: Any) -> tuple[int, ...]:
    """The code of `count` equal steps; peers: of a Send and a Reduce a tuple, of a Recv one rank."""
    if kind is Send or kind is SendInPlace:
        return (SEND if kind is Send else SEND_IN_PLACE, count, len(peers), *peers)
    if kind is Recv:
        return (RECV, count, peers)
    if kind is Copy:
        return (COPY, count)
    others = [peer for peer in peers if peer != rank]
    return (REDUCE, count, len(peers) - 1, len(others), *others)


def translated(block: array[int], name: Callable[[int], int], *, ordered: bool = True) -> array[int]:
    """The same codes of a plan with other names of peers.

    ordered: False: the peers of a reduction in ascending order.
    """
    found = array("i")
    at = 0
    while at < len(block):
        code = block[at]
        head = at + HEADS[code]
        end = head + (block[head - 1] if code in (SEND, REDUCE, SEND_IN_PLACE) else int(code == RECV))
        found.extend(block[at:head])
        peers = map(name, block[head:end])
        found.extend(peers if ordered or code != REDUCE else sorted(peers))
        at = end
    return found


def _halves(value: float) -> tuple[int, int]:
    low, high = struct.unpack("=ii", struct.pack("=d", value))
    return low, high
