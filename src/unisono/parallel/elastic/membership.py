"""The ranks of an elastic run: an engine's group that shrinks and grows, and is PyTorch's default group.

A newcomer is alone at first. It joins where its program first needs the others, when its model is made. The
loss of a rank ends no call: it is no failure of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch.distributed as dist

from unisono.engine.diagnosis.close_reason import close_reason
from unisono.engine.diagnosis.fault_reader import publish_close_reason
from unisono.engine.environment import env
from unisono.engine.group.elastic_loop import MOST_VAIN, join, too_few
from unisono.engine.group.init import init_process_group
from unisono.engine.group.native import NativeGroup
from unisono.engine.group.parent_group import ParentGroup
from unisono.errors import (
    Aborted,
    Evicted,
    GroupClosed,
    Mismatch,
    PeerLost,
    RendezvousError,
    StoreError,
    Timeout,
)  # fmt: skip
from unisono.parallel.failures import RunFailures
from unisono.torch.reconfiguration import follow
from unisono.torch_internals import c10d


class RunMembership:
    """The ranks of one run.

    Args:
        size: of a job at its start.
    Raises:
        ValueError: there is a process group already, or the job has another size.
    Attributes:
        group: the engine's group; None for a newcomer that has not joined.
        closed: whether this process has left.
    """

    def __init__(self, size: int) -> None:
        settings = env.read(strict=False)
        if dist.is_initialized():
            raise ValueError(
                "there is a process group already, and Plan(elastic=True) makes its own, in which ranks may "
                "die and come. Leave out init_process_group, or close the other elastic run"
            )
        given: tuple[int, int | None] = settings.elastic or (1, None)
        self._minimum, self._maximum = given
        self._addresses, self._listen = settings.join, settings.listen
        self._vain = 0
        self.closed = False
        self.group: NativeGroup | None = None
        torch_distributed: Any = dist  # its type stubs leave out HashStore
        torch_distributed.init_process_group(
            "unisono", store=torch_distributed.HashStore(), rank=0, world_size=1
        )
        if not self._addresses:
            try:
                self._found(size)
            except BaseException:
                self.close()
                raise

    def _found(self, size: int) -> None:
        group = cast("NativeGroup", init_process_group())
        self.group = group
        if group.size != size:
            raise ValueError(
                f"Plan(data={size}, elastic=True) begins with {size} ranks, and this job has {group.size}. "
                f"Write data={group.size}"
            )
        if group.size < self._minimum:
            raise too_few(group.size, self._minimum)
        group.elastic = True
        self.follow()

    @property
    def size(self) -> int:
        """How many ranks there are; 1 for a newcomer that has not joined."""
        return 1 if self.group is None else self.group.size

    @property
    def members(self) -> NativeGroup:
        """The engine's group of a rank that has joined."""
        assert self.group is not None
        return self.group

    def follow(self) -> None:
        """Make the engine's group PyTorch's default group, and let newcomers come to it."""
        self.members.listen(*self._listen)
        follow(self.members)

    def join(self) -> None:
        """Join the running group; returns when its members have taken this process in."""
        self.group = cast("NativeGroup", join(self._addresses))

    def is_asked(self) -> bool:
        """Whether a newcomer waits at this rank, and there is room for it."""
        group = self.members
        return (self._maximum is None or group.size < self._maximum) and group.newcomers_here() > 0

    def has_room(self, most: int | None) -> bool:
        """Whether another rank may come. most: ranks for which each batch has a row."""
        limit = self._limit(most)
        return limit is None or limit > self.members.size

    def _limit(self, most: int | None) -> int | None:
        limits = [limit for limit in (self._maximum, most) if limit is not None]
        return min(limits, default=None)

    def grow(self, most: int | None) -> bool:
        """Take in those that wait. All ranks call this. Returns whether the group is another one now."""
        before = self.members
        try:
            self.group = cast("NativeGroup", before.admit(maximum=self._limit(most)))
        except RendezvousError:  # such as a newcomer that has ended: the members go on without it
            return False
        return self.group is not before

    def shrink(self, fault: BaseException) -> None:
        """Make the group of the living.

        Raises:
            Evicted: the others go on without this rank.  GroupError: too few are left.
            fault: nobody was out, again and again.
        """
        former = self.members
        with contextlib.suppress(GroupClosed):  # the loss was seen in another group: how it came, too
            ParentGroup(former._planner, "shrink", range(former.size)).abort()
            if not former._planner.engine.faulted:  # all live; they may wait for this rank
                former.abort()
        self.group = group = cast("NativeGroup", former.shrink())
        self._vain = 0 if group.left else self._vain + 1
        if self._vain >= MOST_VAIN:
            raise fault
        if group.size < self._minimum:
            names = ", ".join(f"rank {one.rank} {one.why}" for one in group.left)
            raise too_few(group.size, self._minimum, names) from fault

    def succeed(self) -> None:
        """Faults so far were none of the program's: a call has succeeded."""
        self._vain = 0

    def lost(self, error: BaseException, groups: Iterable[Any]) -> bool:
        """Whether an error comes from the loss of a rank. groups: those in which the run communicates."""
        if self.group is None or isinstance(error, (Evicted, Mismatch)):
            return False
        if isinstance(error, (PeerLost, Timeout, Aborted, StoreError, RendezvousError)):
            return True
        return any(group.get_error() == c10d.ErrorType.COMM_ERROR for group in groups)

    def tell_reason(self, error: BaseException) -> None:
        """Tell the other members because of which error this rank leaves them."""
        if self.group is not None:
            publish_close_reason(self.group._planner.engine, close_reason(error))

    def close(self) -> None:
        """Leave: the other ranks go on without this one."""
        self.closed = True
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # an error of the group's end; others know of its loss
                dist.destroy_process_group()
        if self.group is not None:
            self.group.close()


class ElasticFailures(RunFailures):
    """The calls of a run, whose outcome the loss of a rank does not decide."""

    def __init__(
        self,
        world: dist.ProcessGroup,
        groups: Sequence[dist.ProcessGroup],
        lost: Callable[[BaseException], bool],
        tell: Callable[[BaseException], None],
    ) -> None:
        super().__init__(world, groups)
        self._lost, self._tell = lost, tell

    def resolve(self, error: Exception, *, together: bool) -> None:
        """Decide what the error of a call means, see `RunFailures`."""
        if not self._lost(error):
            super().resolve(error, together=together)

    def _abort(self, error: Exception) -> None:
        self._tell(error)
        super()._abort(error)
