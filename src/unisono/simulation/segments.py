"""Chunks and segments of a buffer as the engine cuts it, and which messages it sends in place."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from unisono.engine.base.validation import whole
from unisono.networks import Network
from unisono.plans.codes import RELEASE, SendInPlace, compute_code
from unisono.plans.contracts import CONTRACTS
from unisono.plans.lowering import NO_ZERO_COPY, ZERO_COPY_AHEAD, last_sends, zero_copy_mode
from unisono.plans.plan import Copy, Reduce, Send, Step

__all__ = ["EngineCut", "call_code", "parts_of"]

SEGMENT_BYTES = 2 << 20
"""The engine's segments between hosts (docs/design.md), over all chunks."""

LOCAL_SEGMENT_BYTES = 256 << 10
"""Those within one host, where messages are staged."""

ZERO_COPY_SEGMENT_BYTES = 4 << 20
"""Those within one host, where no message is; and a message that runs ahead of its segment."""

AHEAD_BYTES = 1 << 20
"""With more ranks than cores, messages of chunks from this size on may run ahead."""

STAGED_BYTES, SOCKET_BYTES = 512 << 10, 4 << 20
"""What a sender has outstanding in shared memory, and between hosts."""

SLICE_BYTES = 4096
"""A segment takes a multiple of it from each chunk."""

MOST_SEGMENTS = 1 << 24
MOST_SEGMENT_BYTES = 1 << 62
MOST_ANALYSED = 64
"""The steps of larger groups are not searched for messages in place, as in the engine (`plans.lowering`)."""


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


class EngineCut(NamedTuple):
    """How csrc/engine/executor.cpp runs a plan.

    Attributes:
        segments: of the buffer.
        in_place_bytes: messages of so many bytes are sent in place by a rank that receives nothing; 0: none.
        busy_bytes: the same for a rank that receives, too.
        reduces: the collective does.  chunk_bytes: of a chunk in one segment.
        analysed: the ranks of a host share memory, and are few: their steps are looked at one by one.
    """

    segments: int
    chunk_bytes: float
    hosts: Sequence[int]
    reduces: bool
    analysed: bool
    in_place_bytes: float = 0.0
    busy_bytes: float = 0.0

    @classmethod
    def of(
        cls,
        collective: str,
        steps: Callable[[int], Iterable[Step]],
        network: Network,
        members: Sequence[int],
        nbytes: float,
        parts: int,
        segment_bytes: int | None,
    ) -> EngineCut:
        """members: the ranks of the group; `steps` counts them from 0.  parts: chunks of the buffer.

        Raises:
            ValueError: there are too many segments.
        """
        size, chunk = len(members), nbytes / parts
        hosts = tuple(network.hosts[member] for member in members)
        each = Counter(hosts)
        crowded = any(0 < network.machines[host].cores < count for host, count in each.items())
        inside = network.costs_of(members[0]).inside
        analysed = inside is not None and size <= MOST_ANALYSED
        least = inside.in_place_bytes if inside and analysed else 0
        mode = NO_ZERO_COPY
        if least and len(each) == 1 and chunk >= least:
            mode = zero_copy_mode(collective, size, map(steps, range(size)), hosts)
        room = min(STAGED_BYTES if max(each.values()) > 1 else SOCKET_BYTES, SOCKET_BYTES) / (parts + 1)
        ahead = crowded and mode == ZERO_COPY_AHEAD and chunk >= AHEAD_BYTES
        if segment_bytes is not None:
            segment = whole(segment_bytes, "segment_bytes", 1, MOST_SEGMENT_BYTES) / parts
        elif ahead:
            segment = ZERO_COPY_SEGMENT_BYTES
        elif mode != NO_ZERO_COPY and not crowded:
            segment = ZERO_COPY_SEGMENT_BYTES / parts
        else:
            segment = min((LOCAL_SEGMENT_BYTES if len(each) == 1 else SEGMENT_BYTES) / parts, room)
        segments = _segments(chunk, segment, whole_buffer=segment_bytes is not None)
        if crowded and not ahead:
            least = 0
        return cls(
            segments,
            chunk / segments,
            hosts,
            CONTRACTS[collective].reduces,
            analysed,
            min(least, room),
            min(2 * least, room),
        )

    def steps(self, rank: int, steps: Iterable[Step]) -> Iterable[Step | SendInPlace]:
        """The steps of a rank, with the messages that are sent in place, and a copy for each reduction whose
        result goes elsewhere: that memory is fetched into the cache, too. Scratch memory is there already.
        """
        return self._analysed(rank, tuple(steps)) if self.analysed else steps

    def _analysed(self, rank: int, steps: Sequence[Step]) -> Iterator[Step | SendInPlace]:
        receives = any(_receives(rank, step) for step in steps)
        least = self.busy_bytes if receives else self.in_place_bytes
        last = (
            last_sends(steps, reduces=self.reduces) if 0 < least <= self.chunk_bytes else [False] * len(steps)
        )
        here = self.hosts[rank]
        for step, is_last in zip(steps, last, strict=True):
            if is_last and isinstance(step, Send) and any(self.hosts[peer] == here for peer in step.to):
                yield SendInPlace(step.chunk, step.to)
                continue
            yield step
            if isinstance(step, Reduce) and step.own not in (None, step.chunk) and step.chunk.space != "tmp":
                yield Copy(step.chunk, step.own)

    def end(self) -> array[int]:
        """What a rank does at the end of the call: its memory is its own again."""
        return array("i", [RELEASE]) if 0 < self.in_place_bytes <= self.chunk_bytes else array("i")


def _receives(rank: int, step: Step) -> bool:
    if isinstance(step, Reduce):
        return any(peer != rank for peer in step.frm)
    return not isinstance(step, (Send, Copy))


def _segments(chunk: float, segment: float, *, whole_buffer: bool) -> int:
    """How many a chunk is cut into. whole_buffer: the caller's own segment, which may hold all of it."""
    if whole_buffer and segment >= chunk:
        return 1  # the engine's may leave a rest, as below
    if segment >= SLICE_BYTES:
        segment = segment // SLICE_BYTES * SLICE_BYTES
    segments = max(1, -int(-chunk // segment))
    if segments > MOST_SEGMENTS:
        limit = f"expected {MOST_SEGMENTS} at most"
        raise ValueError(f"a chunk of {chunk:g} bytes in segments of {segment:g} has {segments}, {limit}")
    return segments
