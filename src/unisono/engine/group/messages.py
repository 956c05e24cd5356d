"""Point-to-point messages of a group.

Messages between two ranks with the same tag arrive in the order they were sent. A message has the dtype that
its receiver expects, and at most its size; otherwise the receive raises `Mismatch`. Two ranks that both send
first do not deadlock, whatever the size: a rank that waits also accepts other messages.

An unexpected message is kept, up to 64 MiB from each rank. Beyond that, messages wait in the sender, and so
do all later messages of that sender. A rank that itself sends n bytes keeps n more.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, SupportsIndex, cast

from unisono._native import FaultKind, Status, StorageHold
from unisono.engine.base.checking import whole
from unisono.engine.diagnosis.read import read_nothing_came
from unisono.engine.diagnosis.render import error as rendered
from unisono.engine.diagnosis.site import site
from unisono.engine.group.layout import named
from unisono.engine.group.planning import Planner
from unisono.engine.group.work import Kept, MessageWork, seconds
from unisono.engine.memory.buffers import ITEMSIZES, pinned, view

__all__ = ["ANY_TAG", "RecvFrom", "SendTo", "begin", "checked", "iprobe", "plain", "probe", "run"]

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


def checked(
    planner: Planner,
    name: str,
    x: Any,
    peer: SupportsIndex | None,
    tag: int,
    timeout: Seconds,
    *,
    receiving: bool,
    exact: bool = False,
    form: int | None = None,
) -> MessageWork:
    """Check the arguments of one message; returns its work, not yet posted.

    Args:
        exact: a shorter message is a Mismatch, too.
        form: the form of a message of codes; None: that of the array.
    """
    x = planner.seen(name, x)
    keep = pinned(x)  # before its address is read
    try:
        address, numel, dtype = view(x, receiving, "out" if name == "sendrecv" and receiving else "x")
    except (TypeError, ValueError) as error:
        raise named(name, error) from None
    rank, tag = _addressed(planner, name, peer, tag, receiving=receiving)
    timeout_s = seconds(timeout, planner.timeout_s)
    engine = planner.engine
    own = planner.own_message(name, (address, numel, dtype), rank, tag, timeout, keep, receiving)
    if own is not None:
        return cast("MessageWork", own)
    is_object = name.endswith("_object")
    nbytes = numel * ITEMSIZES[dtype]
    dtype = dtype if form is None else form
    # Blocking calls: the caller's frame still exists when an error needs its line.
    where = ""
    if name in ("isend", "irecv", "batch"):
        where = site()
        keep = (keep, StorageHold(keep))
    operation = f"{name}(tag={tag})" if tag > 0 else name
    if receiving:
        post = partial(engine.post_recv, rank, tag, dtype, exact, address, nbytes, timeout_s)
    else:
        post = partial(engine.post_send, rank, tag, dtype, is_object, address, nbytes, timeout_s)
    return MessageWork(engine, post, keep, planner.scene(engine, operation, timeout_s, where), receiving)


def _addressed(
    planner: Planner, name: str, peer: SupportsIndex | None, tag: int, *, receiving: bool
) -> tuple[int, int]:
    """The numbers of the other rank and of the tag.

    Raises:
        ValueError, TypeError: there is no such rank, or no such tag.
    """
    tag = whole(tag, f"{name}: tag")
    if peer is None and not receiving:
        raise ValueError(f"{name}: rank None is not in group {planner.name!r} of {planner.size} ranks")
    rank = ANY_RANK if peer is None else planner.member(name, peer)
    if not (0 <= tag < 1 << 31 or (tag == ANY_TAG and receiving)):
        raise ValueError(f"{name}: tag is {tag}, expected 0..2147483647")
    return rank, tag


def plain(
    planner: Planner, name: str, src: SupportsIndex | None, tag: int, timeout: Seconds
) -> tuple[int | None, int, float]:
    """The source, tag and timeout of a receive as the engine reads them. Raises as `checked` does."""
    rank, tag = _addressed(planner, name, src, tag, receiving=True)
    planner.engine  # noqa: B018  (raises once the group was closed)
    return None if rank == ANY_RANK else rank, tag, float(seconds(timeout, planner.timeout_s))


def probe(planner: Planner, src: SupportsIndex | None, tag: int, timeout: Seconds) -> Status:
    """See `Group.probe`."""
    rank, tag = _addressed(planner, "probe", src, tag, receiving=True)
    timeout_s = seconds(timeout, planner.timeout_s)
    engine = planner.engine
    fault, status = engine.probe(rank, tag, timeout_s)
    if status is not None:
        return status
    if fault == FaultKind.TIMEOUT and not engine.faulted:
        raise rendered(read_nothing_came(planner.scene(engine, "probe", timeout_s)))
    raise planner.failure("probe", timeout_s, engine)


def iprobe(planner: Planner, src: SupportsIndex | None, tag: int) -> Status | None:
    """See `Group.iprobe`."""
    rank, tag = _addressed(planner, "iprobe", src, tag, receiving=True)
    engine = planner.engine
    fault, status = engine.look(rank, tag)
    if fault:
        raise planner.failure("iprobe", planner.timeout_s, engine)
    return status


def run(kept: Kept, planner: Planner, timeout: Seconds, *works: MessageWork) -> None:
    """Post all works, then wait for them, the last one first."""
    timeout_s = seconds(timeout, planner.timeout_s)
    try:
        for work in works:
            work.start()
        for work in reversed(works):
            if work.wait_or_abort(timeout_s):
                raise work.failure()
    except BaseException:  # a fault, or Ctrl-C at any point: the engine may still move their bytes
        for work in works:
            kept.keep(work)
        raise


def begin(kept: Kept, planner: Planner, work: MessageWork) -> MessageWork:
    """Post a work, and keep it until it is done."""
    try:
        work.start()
        if not work.done():
            kept.keep(work)
            planner.engine.detach()
    except BaseException:  # as by Ctrl-C, perhaps right after it was posted
        kept.keep(work)
        raise
    return work
