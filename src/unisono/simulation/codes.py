"""The steps of a rank as numbers, for csrc/simulator/simulation.hpp.

Steps that stand side by side and have the same peers are one code. Sends among them are one message; receives
and reductions are still done one by one.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator

from unisono.plans import Copy, Recv, Reduce, Send
from unisono.plans.plan import Step

__all__ = [
    "AWAIT",
    "CHUNK",
    "COMPUTE",
    "COPY",
    "RECV",
    "REDUCE",
    "SEGMENT",
    "SEND",
    "SIGNAL",
    "chunk_code",
    "compute_code",
    "encoded",
    "same",
]

SEND, RECV, REDUCE, COPY, CHUNK, COMPUTE, SIGNAL, AWAIT, SEGMENT = range(9)
"""The codes, as `simulator::Code` has them."""

Name = Callable[[int], int]
"""Translates a rank."""


def same(rank: int) -> int:
    """The same rank."""
    return rank


def chunk_code(nbytes: float) -> array[int]:
    """From here on, a chunk has so many bytes."""
    return array("i", [CHUNK, *_halves(nbytes)])


def compute_code(seconds: float) -> array[int]:
    """The rank computes for so long."""
    return array("i", [COMPUTE, *_halves(seconds)])


def encoded(
    rank: int, steps: Iterable[Step], most: int, name: Name = same, *, ordered: bool = True
) -> Iterator[array[int]]:
    """The codes of a rank's steps, in blocks of about `most` numbers.

    Args:
        name: translates the peers.  ordered: False: the peers of a reduction in ascending order.
    """
    block = array("i")
    for kind, count, peers, additions in _runs(steps):
        if kind is Send:
            block.extend((SEND, count, len(peers), *map(name, peers)))
        elif kind is Recv:
            block.extend((RECV, count, name(peers[0])))
        elif kind is Reduce:
            others = [name(peer) for peer in peers if peer != rank]
            block.extend((REDUCE, count, additions, len(others), *(others if ordered else sorted(others))))
        else:
            block.extend((COPY, count))
        if len(block) >= most:
            yield block
            block = array("i")
    if block:
        yield block


def _runs(steps: Iterable[Step]) -> Iterator[tuple[type, int, tuple[int, ...], int]]:
    """(kind, how many, peers, additions) of steps that stand side by side and have the same peers."""
    kind: type = Copy
    count = 0
    peers: tuple[int, ...] = ()
    for step in steps:
        now: type = type(step)
        if now is Send:
            its = step.to  # type: ignore[union-attr]
        elif now is Recv:
            its = (step.frm,)  # type: ignore[union-attr,assignment]
        elif now is Reduce:
            its = step.frm  # type: ignore[union-attr,assignment]
        else:
            its = ()
        if now is kind and its == peers:
            count += 1
            continue
        if count:
            yield kind, count, peers, len(peers) - 1
        kind, count, peers = now, 1, its
    if count:
        yield kind, count, peers, len(peers) - 1


def _halves(value: float) -> tuple[int, int]:
    low, high = struct.unpack("=ii", struct.pack("=d", value))
    return low, high
