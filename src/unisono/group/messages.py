"""Point-to-point messages of a group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from unisono.buffers import ITEMSIZES, view
from unisono.group.calls import Caller, named
from unisono.group.site import site
from unisono.group.work import MessageWork, seconds

__all__ = ["ANY_TAG", "Messages", "Recv", "Send"]

ANY_TAG = -1
ANY_RANK = -1
Timeout = float | timedelta | None


class Send(NamedTuple):
    """For `batch`: send `x` to rank `dst`."""

    x: Any
    dst: int
    tag: int = 0


class Recv(NamedTuple):
    """For `batch`: receive into `x` from rank `src`, or from anybody (None)."""

    x: Any
    src: int | None = None
    tag: int = 0


class Messages:
    """Operations that two ranks call. They may overlap any collective.

    Messages between two ranks with the same tag arrive in the order they were sent. A message has the
    size and dtype that its receiver expects; another one raises `Mismatch`. Two ranks that both send
    first do not deadlock, whatever the size: who waits here takes in what arrives.
    """

    _caller: Caller

    def send(self, x: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> None:
        """Send `x` to rank `dst`. Returns when `x` may be changed; it may not have been received yet."""
        if self._caller.send(x, dst, tag, timeout) < 0:
            self._pass(timeout, self._checked("send", x, dst, tag, timeout, receiving=False))

    def recv(self, x: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> int:
        """Receive into `x` from rank `src`, or from anybody (None); the rank it came from.

        Args:
            tag: of the message; `ANY_TAG` takes any.
        """
        source = self._caller.recv(x, src, tag, timeout)
        if source >= 0:
            return source
        work = self._checked("recv", x, src, tag, timeout, receiving=True)
        self._pass(timeout, work)
        return work.source

    def isend(self, x: Any, dst: int, tag: int = 0, *, timeout: Timeout = None) -> MessageWork:
        """Begin to send `x`; it is the operation's until the work is done."""
        return self._begin(self._checked("isend", x, dst, tag, timeout, receiving=False))

    def irecv(self, x: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> MessageWork:
        """Begin to receive into `x`; the work's `source` tells from whom, when done."""
        return self._begin(self._checked("irecv", x, src, tag, timeout, receiving=True))

    def sendrecv(
        self, x: Any, dst: int, out: Any, src: int | None = None, tag: int = 0, *, timeout: Timeout = None
    ) -> int:
        """Send `x` to `dst` and receive into `out` from `src` at once; the rank it came from."""
        incoming = self._checked("sendrecv", out, src, tag, timeout, receiving=True)
        outgoing = self._checked("sendrecv", x, dst, tag, timeout, receiving=False)
        self._pass(timeout, incoming, outgoing)
        return incoming.source

    def batch(self, messages: Sequence[Send | Recv], *, timeout: Timeout = None) -> list[MessageWork]:
        """Begin to send and receive all of `messages`; their works, in the same order.

        All are checked before the first is posted, and receives are posted first, so any pattern of sends
        and receives that match across ranks completes, whatever the order they are listed in.

        Example (p=2): works = group.batch([Send(x, peer), Recv(y, peer)]); for work in works: work.wait()
        """
        works = []
        for number, one in enumerate(messages):
            if not isinstance(one, Send | Recv):
                raise TypeError(f"batch: message {number} is a {type(one).__name__}, expected Send or Recv")
            receiving = isinstance(one, Recv)
            peer = one.src if isinstance(one, Recv) else one.dst
            works.append(self._checked("batch", one.x, peer, one.tag, timeout, receiving=receiving))
        for number in sorted(range(len(works)), key=lambda number: isinstance(messages[number], Send)):
            self._begin(works[number])
        return works

    def _checked(
        self, name: str, x: Any, peer: int | None, tag: int, timeout: Timeout, *, receiving: bool
    ) -> MessageWork:
        """Check the arguments of one message; its work, which has not been posted."""
        caller = self._caller
        try:
            address, numel, dtype = view(x, receiving, "out" if name == "sendrecv" and receiving else "x")
        except (TypeError, ValueError) as error:
            raise named(name, error) from None
        if peer is None and receiving:
            peer = ANY_RANK
        elif peer is None or not 0 <= peer < caller.size:
            raise ValueError(f"{name}: rank {peer} is not in group {caller.name!r} of {caller.size} ranks")
        if not (0 <= tag < 1 << 31 or (tag == ANY_TAG and receiving)):
            raise ValueError(f"{name}: tag is {tag}, expected 0..2147483647")
        timeout_s = seconds(timeout, caller.timeout_s)
        engine = caller.engine
        post = engine.post_recv if receiving else engine.post_send
        nbytes = numel * ITEMSIZES[dtype]
        where = site() if name in ("isend", "irecv", "batch") else ""  # the others are still there when asked
        operation = f"{name}(tag={tag})" if tag > 0 else name
        begin = partial(post, peer, tag, dtype, address, nbytes, timeout_s)
        return MessageWork(engine, begin, x, caller.scene(engine, operation, timeout_s, where))

    def _pass(self, timeout: Timeout, *works: MessageWork) -> None:
        """Post all of them, then wait for the last one first."""
        timeout_s = seconds(timeout, self._caller.timeout_s)
        try:
            for work in works:
                work.start()
            for work in reversed(works):
                if work.wait_or_abort(timeout_s):
                    raise work.failure()
        except BaseException:  # a fault, or Ctrl-C at any point: their bytes may be moved yet
            for work in works:
                self._caller.keep(work)
            raise

    def _begin(self, work: MessageWork) -> MessageWork:
        try:
            work.start()
            if not work.done():
                self._caller.keep(work)
                self._caller.engine.detach()
        except BaseException:  # as by Ctrl-C, perhaps right after it was posted
            self._caller.keep(work)
            raise
        return work
