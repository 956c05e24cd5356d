"""Point-to-point messages of a group.

Messages between two ranks with the same tag arrive in the order they were sent. A message has the dtype that
its receiver expects, and at most its size; otherwise the receive raises `Mismatch`. Two ranks that both send
first do not deadlock, whatever the size: a rank that waits also accepts other messages.

An unexpected message is kept, up to 64 MiB from each rank. Beyond that, messages wait in the sender until a
receive matches, in any order of tags. A rank that itself sends n bytes keeps n more.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple, SupportsIndex

from unisono.engine.base.validation import whole
from unisono.engine.group.arguments import MessageArguments
from unisono.engine.group.buffer_layout import with_call_name
from unisono.engine.group.planning import Planner
from unisono.engine.group.work import MessageWork
from unisono.engine.memory.buffers import ITEMSIZES, DeviceArray, pinned, view
from unisono.engine.memory.strided import Unpacking, is_strided, pack, share_memory

ANY_TAG = -1
ANY_RANK = -1
Seconds = float | timedelta | None


class SendTo(NamedTuple):
    """For `batch`: send `x` to rank `dst`."""

    x: Any
    dst: SupportsIndex
    tag: int = 0


class RecvFrom(NamedTuple):
    """For `batch`: receive into `x` from rank `src`, or from any rank (None)."""

    x: Any
    src: SupportsIndex | None = None
    tag: int = 0


def checked(planner: Planner[Any], name: str, *arguments: Any, **options: Any) -> MessageWork:
    """Check the arguments of one message, see `read`; returns its work, not yet posted."""
    return planner.message(read(planner, name, *arguments, **options))


def together(planner: Planner[Any], messages: Sequence[MessageArguments]) -> list[MessageWork]:
    """The works of messages that are posted together, not yet posted.

    A send whose memory a receive writes to sends a copy: what is there now.

    Raises:
        ValueError: two receives share memory, or one of the messages shares it with a receive under way.
    """
    receives = [_extent(one) for one in messages if one.receiving and one.numel]
    if len(receives) > 1:
        receives.sort()
    for (_, end), (start, _) in pairwise(receives):
        if start < end:
            raise ValueError(f"{messages[0].name}: two receives share memory; give each a buffer of its own")
    packed = [x for one in messages if one.unpack is not None for x in one.unpack.outputs]
    apart: list[Any] = (
        [(ctypes.c_char * (end - start)).from_address(start) for start, end in receives] if packed else []
    )
    for x in packed:
        if any(share_memory(x, other) for other in apart):
            raise ValueError(f"{messages[0].name}: two receives share memory; give each a buffer of its own")
        apart.append(x)
    written = sorted([*receives, *map(_reach, packed)])
    works = [planner.message(_without_sharing(one, written)) for one in messages]
    for work in works:
        work.refuse_shared_memory()
    return works


def _extent(message: MessageArguments) -> tuple[int, int]:
    return message.address, message.address + message.numel * ITEMSIZES[message.dtype]


def _without_sharing(message: MessageArguments, receives: list[tuple[int, int]]) -> MessageArguments:
    start, end = _extent(message)
    last = bisect_left(receives, (end, 0)) - 1  # the last receive that begins before its end
    if message.receiving or start == end or last < 0 or receives[last][1] <= start:
        return message
    if isinstance(message.keep, DeviceArray):
        raise ValueError(f"{message.name}: x shares memory with a receive; send a copy: x.clone()")
    copy = bytearray((ctypes.c_char * (end - start)).from_address(start))
    return message._replace(address=view(copy, name="x")[0], keep=pinned(copy))


def read(
    planner: Planner[Any],
    name: str,
    x: Any,
    peer: SupportsIndex | None,
    tag: int,
    timeout: Seconds,
    *,
    receiving: bool,
    exact: bool = False,
    form: int | None = None,
    synchronous: bool = False,
) -> MessageArguments:
    """Check the arguments of one message.

    Raises:
        ValueError, TypeError: one of them is wrong.
    """
    x = planner.as_readable(name, x)
    unpack = None
    if is_strided(x) and not isinstance(x, (list, tuple)):
        unpack = Unpacking() if receiving else None
        try:
            x = _packed(planner, name, x, unpack)
        except ValueError as error:
            raise with_call_name(name, error) from None
    keep = pinned(x)  # before its address is read
    try:
        address, numel, dtype = view(x, receiving, "out" if name == "sendrecv" and receiving else "x")
    except (TypeError, ValueError) as error:
        raise with_call_name(name, error) from None
    rank, tag = addressed(planner, name, peer, tag, receiving=receiving)
    return MessageArguments(
        name, address, numel, dtype, rank, tag, timeout, keep, receiving, exact, form, synchronous, unpack
    )


def _packed(planner: Planner[Any], name: str, x: Any, unpack: Unpacking | None) -> Any:
    """See `strided`. It refuses memory to which a receive under way writes."""
    low, high = _reach(x)
    planner.refuse_shared_memory(name, low, high - low)
    return pack(x, unpack, "out" if name == "sendrecv" and unpack is not None else "x", read=unpack is None)


def _reach(x: Any) -> tuple[int, int]:
    """The first address of an array, and that behind its last one."""
    steps = [(length - 1) * stride for length, stride in zip(x.shape, x.strides, strict=True)]
    first = x.__array_interface__["data"][0]
    low, high = (first + sum(filter(sign, steps)) for sign in ((0).__gt__, (0).__lt__))
    return low, high + x.itemsize


def addressed(
    planner: Planner[Any], name: str, peer: SupportsIndex | None, tag: int, *, receiving: bool
) -> tuple[int, int]:
    """The numbers of the other rank and of the tag.

    Raises:
        ValueError, TypeError: there is no such rank, or no such tag.
    """
    tag = whole(tag, f"{name}: tag")
    if peer is None and not receiving:
        raise ValueError(f"{name}: rank None is not in group {planner.name!r} of {planner.size} ranks")
    rank = ANY_RANK if peer is None else planner.member(name, peer)
    if not (0 <= tag <= planner.most_tag or (tag == ANY_TAG and receiving)):
        raise ValueError(f"{name}: tag is {tag}, expected 0..{planner.most_tag}")
    return rank, tag


def run(planner: Planner[Any], timeout: Seconds, *works: MessageWork) -> None:
    """Post all works, then wait for them, the last one first."""
    timeout_s = planner.seconds(timeout)
    for work in works:
        work.start()
    for work in reversed(works):
        if work.wait_or_abort(timeout_s):
            raise work.failure()


def begin(work: MessageWork) -> MessageWork:
    """Post a work that outlives the call."""
    work.start(outlives=True)
    if not work.ended():
        work.detach()
    return work
