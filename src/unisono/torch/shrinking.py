"""Process groups that lose ranks: the method behind PyTorch's `shrink_group`.

The engine's group makes the next one of the ranks that are left, see `Group.shrink`. That needs no store.
PyTorch makes further groups through a store, and the job's may have ended with a rank. So each shrunk group
has a store of its own, in the process of its rank 0.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from unisono.engine.base.validation import listed, whole
from unisono.engine.diagnosis.fault_reader import publish_close_reason
from unisono.engine.group.shrink import await_last_calls
from unisono.engine.membership.eviction import eviction
from unisono.errors import PeerLost, UnisonoError, message
from unisono.torch_internals import c10d
from unisono.torch_internals.shrinking import have_shrinking

from .reconfiguration import store_of_rank_0
from .subgroups import GroupCounter, Subgroups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from unisono.engine.backends.torch_store import EngineStore
    from unisono.engine.group.departure import Departure
    from unisono.engine.group.native import NativeGroup

    from .cuda import CudaGroup
    from .hooks import AbortHooks

__all__ = ["Shrinkable"]

CONNECT_S = 10.0
"""For the store in the new group's rank 0, which listens already."""

DEFAULT, ABORT = 0, 1  # `dist.distributed_c10d.SHRINK_DEFAULT`, SHRINK_ABORT


class Survivors(NamedTuple):
    """The engine's group of the ranks that are left, by their numbers in the process group.

    Attributes:
        ranks: ranks[i] is the process group's rank of rank i of `group`.
        lost: who is out, and why.
    """

    group: NativeGroup
    ranks: tuple[int, ...]
    lost: dict[int, Departure]

    def shrunk(self, excluded: Sequence[int]) -> Survivors:
        """The survivors of these without the excluded ranks, and without those that are lost meanwhile."""
        group: Any = self.group.shrink([self.ranks.index(rank) for rank in excluded if rank in self.ranks])
        ranks = tuple(self.ranks[former] for former in group.previous_ranks)
        return Survivors(group, ranks, self.lost | {self.ranks[each.rank]: each for each in group.left})


class Shrinkable(Subgroups):
    """The methods of a process group that makes the group of the ranks that are left."""

    _hooks: AbortHooks
    _cuda: CudaGroup
    _global_ranks: list[int]
    _size: int
    _survivors: Survivors | None = None  # after a call of `shrink` that failed: the next one begins with them

    @property
    def supports_shrinking(self) -> bool:
        """True, unless this PyTorch cannot return the new group; see docs/pytorch-versions.md."""
        return have_shrinking()

    @property
    def global_ranks(self) -> list[int]:
        """The rank in the world of each rank of the group."""
        return list(self._global_ranks)

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = DEFAULT, opts_override: Any = None
    ) -> Any:
        """Make the group of the other ranks, which all call this. Programs use `dist.shrink_group`.

        The survivors keep their order. This group ends, and an excluded rank gets `Evicted` at its next call;
        a call that is under way may end with `Aborted` before.

        Args:
            ranks_to_exclude: ranks of this group, the same on every rank that stays; living or lost.
            shrink_flags: SHRINK_DEFAULT: no call may be under way, and none may have failed. SHRINK_ABORT:
                calls under way fail first; for a group that has lost a rank.
            opts_override: a Backend.Options, whose timeout the new group has; None: this group's timeout.
        Raises:
            ValueError, TypeError: no ranks of this group, or this one; or ranks gave different lists.
            RuntimeError: SHRINK_DEFAULT, and a call is under way or has failed.
            PeerLost: a further rank was lost. Call it again, with that rank in the list, too.
            Evicted: the others go on without this rank.  Timeout: no agreement came about.
        """
        excluded = self._excluded(ranks_to_exclude)
        flags = whole(shrink_flags, "shrink_flags", DEFAULT, ABORT)
        timeout = _timeout(opts_override) or self._timeout
        if self._survivors is None:
            if flags == ABORT:
                self._abort_calls()
            else:
                self._require_no_calls()
        before = self._survivors or Survivors(self._group, tuple(range(self._size)), {})
        self._survivors = survivors = before.shrunk(excluded)
        made = self._successor(survivors, timeout, opts_override)
        try:
            handle = self._agreed(survivors, excluded, made)
            with self._renumbering(survivors):
                made._succeed(survivors.group, handle)
        except BaseException:
            made.shutdown()
            raise
        self._survivors = None
        self._cuda.abort()  # not in order: that would wait for the ranks that are out
        return made

    def _excluded(self, given: Sequence[int]) -> list[int]:
        ranks = [
            whole(rank, "shrink: a rank", 0, self._size - 1) for rank in listed(given, "ranks_to_exclude")
        ]
        expected = f"different ranks of {self._size}, without this one, {self._rank}"
        if not ranks or len({*ranks}) < len(ranks) or self._rank in ranks:
            text = message("shrink: these ranks cannot be excluded", observed=f"{ranks}", expected=expected)
            raise ValueError(text)
        return sorted(ranks)

    def _abort_calls(self) -> None:
        """End all calls under way with an error, on every rank; not those that have ended here."""
        await_last_calls(self._group, [rank for rank in range(self._size) if rank != self._rank])
        try:
            self._hooks.before_abort()
        finally:
            publish_close_reason(self._group._planner.engine, "a call of shrink_group")
            self._group.abort()

    def _require_no_calls(self) -> None:
        planner = self._group._planner
        if gone := eviction(planner.engine, self._rank, self._size):
            raise planner.evicted("shrink_group", gone.why)
        pending = sum(not work.done() for work in self._group._works) + planner.engine.open_messages
        if planner.engine.faulted:
            observed = "a call of this group has failed"
        elif pending:
            observed = f"calls under way: {pending}"
        else:
            return
        raise RuntimeError(
            message(
                "shrink_group: SHRINK_DEFAULT is for a group without a fault and without calls under way",
                where=f"group={self._group.name} rank={self._rank}/{self._size}",
                observed=observed,
                remedy="Wait for its works first, or pass shrink_flags=SHRINK_ABORT on every rank.",
            )
        )

    def _successor(self, survivors: Survivors, timeout: timedelta, opts: Any) -> Any:  # noqa: ARG002
        """A process group for the survivors, without ranks yet."""
        world: Any = dist.GroupMember.WORLD
        size = len(survivors.ranks)
        place = (self._store, survivors.group.rank, size, timeout, self._group_name)
        made = self._make(*place, connects=False)
        if world is not self:
            made._global_ranks = [self._global_ranks[rank] for rank in survivors.ranks]
        return made

    def _agreed(self, survivors: Survivors, excluded: list[int], made: Any) -> str:
        """The handle of the new group's rank 0, once all ranks want the same group and have it.

        Ranks are compared by their numbers in the engine's first group: a rank whose last call returned may
        be in another process group than one whose call failed.
        """
        group, members = survivors.group, self._group.members
        wanted = [members[rank] for rank in range(self._size) if rank not in excluded]
        handle = made.get_reconfigure_handle() if group.rank == 0 else ""
        with self._renumbering(survivors):
            answers = group.all_gather_object([wanted, handle])
        lists = [answer[0] for answer in answers]
        other = next((rank for rank, each in enumerate(lists) if each != wanted), None)
        if other is not None:
            first, second = sorted([(self._rank, wanted), (survivors.ranks[other], lists[other])])
            raise ValueError(
                message(
                    f"shrink_group: the ranks of group {self._group.name!r} disagree",
                    observed=f"rank {first[0]} keeps {first[1]}, rank {second[0]} {second[1]}",
                    remedy="Every rank that stays calls shrink_group with the same list.",
                )
            )
        further = {rank: each for rank, each in survivors.lost.items() if rank not in excluded}
        if further:
            raise self._too_few(further)
        return str(answers[0][1])

    @contextmanager
    def _renumbering(self, survivors: Survivors) -> Iterator[None]:
        """A rank that is lost inside has its number in this group, as the next call needs it."""
        try:
            yield
        except PeerLost as error:
            raise self._too_few({survivors.ranks[error.rank]: error}) from error

    def _too_few(self, lost: Mapping[int, Departure | PeerLost]) -> PeerLost:
        """The error that names the ranks that were lost and not excluded."""
        first = next(iter(lost))
        named = [f"rank {rank} ({each.why})" for rank, each in lost.items() if not isinstance(each, PeerLost)]
        return PeerLost(
            message(
                f"shrink_group: {', '.join(named) or f'rank {first}'} is lost, too",
                where=f"group={self._group.name} rank={self._rank}/{self._size}",
                expected="all ranks that are not in the list",
                remedy="Call shrink_group again on every rank that is left, with all lost ranks in the list.",
            ),
            rank=first,
            pid=lost[first].pid,
            host=lost[first].host,
        )

    def _succeed(self, group: NativeGroup, handle: str) -> None:
        """Become the process group of an engine's group. handle: of its rank 0, where its store is."""
        with store_of_rank_0(group):  # which may end right after this call
            store = self._store_at(handle, "shrunk/", CONNECT_S)
            store.inner.timeout_s = self._timeout.total_seconds()
            self._store = store
            self._group_counter = GroupCounter(store, self._rank, None)
        self._take(group, self._group_counter.keys())

    def _leave_survivors(self) -> None:
        """Close the engine's group of a call of `shrink` that failed."""
        survivors, self._survivors = self._survivors, None
        if survivors is not None:
            with suppress(UnisonoError):
                survivors.group.close()

    # ---- the process group's own -----------------------------------------------------------------------

    def _store_at(self, handle: str, prefix: str, timeout_s: float) -> EngineStore:
        """The part of the store of a handle."""
        raise NotImplementedError

    def _take(self, group: NativeGroup, keys: c10d.Store) -> None:
        """Become the process group of an engine's group."""
        raise NotImplementedError


def _timeout(opts: Any) -> timedelta | None:
    """The timeout of PyTorch's Backend.Options; None: there are none."""
    found = None if opts is None else getattr(opts, "_timeout", opts)
    if found is not None and not isinstance(found, timedelta):
        raise TypeError(f"shrink: opts_override is {opts!r}, expected a torch.distributed.Backend.Options")
    return found
