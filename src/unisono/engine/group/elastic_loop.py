"""`elastic` and `join`: a program whose group changes while it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from unisono.engine.base.validation import text, whole
from unisono.engine.environment import env
from unisono.engine.group.group import MOST_SIZE, Group
from unisono.engine.group.init import init_process_group
from unisono.engine.group.joining import join_group
from unisono.errors import Aborted, GroupError, NotSupported, PeerLost, RendezvousError, Timeout, message

if TYPE_CHECKING:
    from unisono.engine.group.native import NativeGroup

__all__ = ["MOST_VAIN", "elastic", "join", "too_few"]

MOST_VAIN = 3
"""So many faults in succession after which nobody was out; then the fault is the program's, and is raised."""

STEADY_S = 60.0
"""A turn that lasted longer than this and a timeout made progress before its fault: it does not count as one
in succession."""


def join(address: str | Sequence[str], *, timeout: float | timedelta | None = None) -> Group:
    """Join a running group as a new rank. Its members take newcomers in where they call `admit`.

    The newcomer needs the job's token (UNISONO_TOKEN_FILE) and the group's build of Unisono. It learns the
    addresses of all hosts of the group at once, and asks another one if the first one ends.

    Args:
        address: "HOST:PORT" of any host of the group, as `listen` returns it, or several: a list, or a text
            with commas, as UNISONO_JOIN has them.
        timeout: seconds until it is taken in; default UNISONO_TIMEOUT_S, 300 s.
    Raises:
        AuthenticationError: the group has another token.
        RendezvousError: no group took this process in in time, or it refused it; the text says why.
        ValueError: no address.
    """
    return join_group(address, timeout)


class ElasticLoop:
    """What became of the group of each turn of the loop."""

    def __init__(self, group: NativeGroup, minimum: int, maximum: int | None) -> None:
        self.minimum = minimum
        self.maximum = maximum
        self.group = group
        self.fault: GroupError | None = None
        self.ended = False
        self.newcomers = 0
        self._vain = 0
        self._take(group)

    def _take(self, group: NativeGroup) -> None:
        self.group = group
        self.ended, self.fault, self.newcomers = False, None, 0
        self._began = time.monotonic()
        group.elastic = True
        group._loop = self

    def leave(self, error: BaseException | None) -> bool:
        """Called where the block `with group:` ends. True: the fault is dealt with in the next turn."""
        self.ended = True
        if error is None or isinstance(error, (PeerLost, Timeout, Aborted)):
            self.fault = cast("GroupError | None", error)
            return True
        self.group._loop = None
        return False

    def listen(self, place: tuple[str, int]) -> None:
        """Let newcomers come to the first group. A rank that is lost meanwhile is out in the next one."""
        try:
            self.group.listen(*place)
        except (PeerLost, Timeout, Aborted) as error:
            self._shrink(error)

    def next_group(self) -> bool:
        """Make the group of the next turn. False: the program has ended on all ranks."""
        if not self.ended:
            raise RuntimeError("elastic: use the group in a block `with group:`, which sees its faults")
        group = self.group
        if self.fault is None:
            try:
                if self.newcomers:
                    self._admit(group)
                    return True
                group.barrier()  # no rank leaves before all have ended
                return False
            except (PeerLost, Timeout, Aborted) as error:
                self.fault = error
        self._shrink(self.fault)
        return True

    def _admit(self, group: NativeGroup) -> None:
        try:
            self._take(cast("NativeGroup", group.admit(maximum=self.maximum)))
        except RendezvousError:  # such as a newcomer that has ended: the members go on without it
            self._take(group)

    def _shrink(self, fault: GroupError) -> None:
        if time.monotonic() - self._began > self.group.timeout_s + STEADY_S:
            self._vain = 0
        following = cast("NativeGroup", self.group.shrink())
        self._vain = 0 if following.left else self._vain + 1
        self._take(following)
        if self._vain >= MOST_VAIN:
            self.close()
            raise fault
        if following.size < self.minimum:
            names = ", ".join(f"rank {one.rank} {one.why}" for one in following.left)
            self.close()
            raise too_few(following.size, self.minimum, names) from fault

    def close(self) -> None:
        """Close the group."""
        self.group._loop = None
        self.group.close()


def too_few(size: int, minimum: int, observed: str = "") -> GroupError:
    """The error of a group that has fewer ranks than the minimum."""
    left = f"{size} rank" + ("s are" if size > 1 else " is")
    what = f"{left} left, and the minimum is {minimum}"
    return GroupError(message(what, observed=observed, remedy="Start more ranks, or lower the minimum."))


def elastic(
    minimum: int | None = None,
    maximum: int | None = None,
    *,
    timeout: float | timedelta | None = None,
    address: str = "",
    port: int = 0,
) -> Iterator[Group]:
    """The groups of a program that goes on when ranks die, freeze, leave or come: one for each membership.

        for group in un.elastic(minimum=2, maximum=8):
            with group:
                state.send_to_newcomers(group)
                while state.step < 1000:
                    state.train_step(group)
                    if group.waiting(): break

    The block runs again with the next group after each change. It ends with a `PeerLost`, a `Timeout` or an
    `Aborted`, which the `with` takes: then the living ranks shrink. Or it ends normally after `waiting` has
    returned a number: then these newcomers are admitted. Or it ends normally on all ranks: so does the loop.
    Any other exception ends the program, as does `Evicted`. The program keeps its state outside the block.

    The first group meets like `init_process_group()`. A process that was started to join a running group
    (UNISONO_JOIN=HOST:PORT) joins that. All groups are `elastic`, and listen.

    Args:
        minimum: with fewer ranks left, all of them raise a GroupError; None: that of `unisono run --elastic`,
            otherwise 1.
        maximum: no more ranks are admitted; None: that of `unisono run --elastic`, otherwise any number.
        timeout: see `init_process_group`.
        address, port: see `listen`; "" and 0: UNISONO_LISTEN, which `unisono run` sets.
    Raises:
        GroupError: too few ranks are left.  Evicted: the others go on without this rank.
        RuntimeError: the block did not use the group in a `with`.
    """
    settings = env.read(strict=False)
    given = settings.elastic or (1, None)
    least = whole(given[0] if minimum is None else minimum, "minimum", 1, MOST_SIZE)
    most = given[1] if maximum is None else maximum
    most = None if most is None else whole(most, "maximum", least, MOST_SIZE)
    place = (
        text(address, "address") or settings.listen[0],
        whole(port, "port", 0, 65535) or settings.listen[1],
    )
    return _turns(settings.join, least, most, timeout, place)


def _turns(
    joined: str, minimum: int, maximum: int | None, timeout: float | timedelta | None, place: tuple[str, int]
) -> Iterator[Group]:
    group = join(joined, timeout=timeout) if joined else init_process_group(timeout=timeout)
    if not hasattr(group, "_loop"):
        group.close()
        raise NotSupported("elastic: a group of this backend cannot change")
    if group.size < minimum:
        group.close()
        raise too_few(group.size, minimum)
    loop = ElasticLoop(cast("NativeGroup", group), minimum, maximum)
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        if joined:
            loop.group._planner.listening = place
        else:
            loop.listen(place)
        while True:
            yield loop.group
            if not loop.next_group():
                return
