"""Chunks and segments of a buffer, as the engine cuts it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from unisono.engine.base.validation import whole
from unisono.networks import Network
from unisono.plans.codes import compute_code
from unisono.plans.contracts import CONTRACTS
from unisono.plans.plan import Copy, Reduce, Step

__all__ = ["call_code", "parts_of", "segments_of"]

SEGMENT_BYTES = 2 << 20
"""The engine's segments between hosts (docs/design.md), over all chunks."""

LOCAL_SEGMENT_BYTES = 256 << 10
"""Those within one host."""

SLICE_BYTES = 4096
"""A segment takes a multiple of it from each chunk."""

MOST_SEGMENTS = 1 << 24
MOST_SEGMENT_BYTES = 1 << 62


def call_code(network: Network, rank: int) -> array[int]:
    """What a call costs a rank before its first step."""
    seconds = network.costs_of(rank).call_s
    return compute_code(seconds) if seconds else array("i")


def parts_of(collective: str, steps: Callable[[int], Iterable[Step]], size: int) -> int:
    """The chunks of the whole buffer. Every rank of a plan mentions all of them (`lowering._header`)."""
    contract = CONTRACTS[collective]
    blocks = "p" in (contract.out_blocks, contract.in_blocks)
    return size if blocks else max(1, _chunks(steps(0)))


def _chunks(steps: Iterable[Step]) -> int:
    """The chunks of Out or In that a program mentions."""
    most = 0
    for step in steps:
        for chunk in (step.dst, step.src) if isinstance(step, Copy) else (step.chunk,):
            if chunk[0] != "tmp" and chunk[1] >= most:
                most = chunk[1] + 1
        if isinstance(step, Reduce) and step.own is not None and step.own.index >= most:
            most = step.own.index + 1
    return most


def segments_of(hosts: Sequence[int], nbytes: float, parts: int, segment_bytes: int | None) -> int:
    """How many segments the buffer is cut into, as csrc/engine/executor.cpp does. hosts: of the ranks."""
    if segment_bytes is not None:
        if whole(segment_bytes, "segment_bytes", 1, MOST_SEGMENT_BYTES) >= nbytes:
            return 1  # the caller's own; the engine's may leave a rest, as below
        size = segment_bytes
    else:
        size = LOCAL_SEGMENT_BYTES if hosts.count(hosts[0]) == len(hosts) else SEGMENT_BYTES
    segment = size / parts
    if segment >= SLICE_BYTES:
        segment = segment // SLICE_BYTES * SLICE_BYTES
    segments = max(1, -int(-(nbytes / parts) // segment))
    if segments > MOST_SEGMENTS:
        limit = f"expected {MOST_SEGMENTS} at most"
        raise ValueError(f"{nbytes:g} bytes in segments of {size} are {segments}, {limit}")
    return segments
