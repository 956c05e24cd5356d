"""How the ranks of a window order their calls: fences, posts and starts, locks, flushes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from unisono.mpi import constants
from unisono.mpi.errors import Exception
from unisono.mpi.group import Group


class Synchronization:
    """These methods of a window."""

    _alive: Callable[[], Any]

    def Fence(self, assertion: int = 0) -> None:  # noqa: ARG002
        """Wait until all ranks come here; all calls before have had their effect."""
        state = self._alive()
        state.call("fence", False)

    # ---- between some ranks

    def Start(self, group: Group, assertion: int = 0) -> None:  # noqa: ARG002
        """Wait until each rank of the group has posted for this one."""
        self._begin("started", group, "Start was called without Complete", "start")

    def Complete(self) -> None:
        """End what Start began: this rank's calls have had their effect."""
        state = self._alive()
        ranks, state.started = state.started, None
        if ranks is None:
            raise Exception(constants.ERR_RMA_SYNC, "Complete without Start")
        state.call("complete", ranks)

    def Post(self, group: Group, assertion: int = 0) -> None:  # noqa: ARG002
        """Let the ranks of the group use this rank's memory."""
        self._begin("posted", group, "Post was called without Wait", "post")

    def _begin(self, field: str, group: Group, wrong: str, call: str) -> None:
        """Begin an epoch with the ranks of a group."""
        state = self._alive()
        if getattr(state, field) is not None:
            raise Exception(constants.ERR_RMA_SYNC, wrong)
        ranks = state.world.ranks_of(group._alive().ranks)  # of the world
        if any(rank not in state.ranks for rank in ranks):
            raise Exception(constants.ERR_GROUP, "the group has ranks that are not in the window")
        state.call(call, ranks)
        setattr(state, field, ranks)

    def Wait(self) -> Literal[True]:
        """Wait until all of them have completed."""
        self._completed("Wait", True)
        return True

    def Test(self) -> bool:
        """Whether all of them have completed; True ends what Post began."""
        return self._completed("Test", False)

    def _completed(self, call: str, waits: bool) -> bool:
        state = self._alive()
        if state.posted is None:
            raise Exception(constants.ERR_RMA_SYNC, f"{call} without Post")
        fault, done = state.native.completed(state.posted, waits, state.forever)
        state.check(fault, call)
        if done:
            state.posted = None
        return bool(done)

    # ---- locks

    def Lock(self, rank: int, lock_type: int = constants.LOCK_EXCLUSIVE, assertion: int = 0) -> None:  # noqa: ARG002
        """Take the lock of a rank, alone or with others."""
        state = self._alive()
        if lock_type not in (constants.LOCK_EXCLUSIVE, constants.LOCK_SHARED):
            raise Exception(constants.ERR_LOCKTYPE, f"there is no type of locks {lock_type}")
        if rank == constants.PROC_NULL:
            return
        state.place(rank)
        if rank in state.locked:
            raise Exception(constants.ERR_RMA_SYNC, f"this rank has the lock of rank {rank} already")
        shared = lock_type == constants.LOCK_SHARED
        state.check(state.native.lock(state.ranks[rank], shared, state.forever), "Lock")
        state.locked[rank] = lock_type

    def Unlock(self, rank: int) -> None:
        """Give it back; this rank's calls have had their effect."""
        state = self._alive()
        if rank == constants.PROC_NULL:
            return
        if state.locked.pop(rank, None) is None:
            raise Exception(constants.ERR_RMA_SYNC, f"this rank does not have the lock of rank {rank}")
        state.check(state.native.unlock(state.ranks[rank], state.forever), "Unlock")

    def Lock_all(self, assertion: int = 0) -> None:
        """Take the locks of all ranks, with others."""
        for rank in range(len(self._alive().ranks)):
            self.Lock(rank, constants.LOCK_SHARED, assertion)

    def Unlock_all(self) -> None:
        """Give them back."""
        for rank in range(len(self._alive().ranks)):
            self.Unlock(rank)

    # ---- flushes

    def Flush(self, rank: int) -> None:
        """Wait until this rank's calls have had their effect at a rank."""
        state = self._alive()
        if rank != constants.PROC_NULL:
            state.check(state.native.flush(state.places[rank].home, state.forever), "Flush")

    def Flush_all(self) -> None:
        """The same at all ranks."""
        state = self._alive()
        state.check(state.native.flush(None, state.forever), "Flush_all")

    def Flush_local(self, rank: int) -> None:
        """The buffers of this rank's calls may be used again: they may when a call returns."""
        self._alive().place(rank)

    def Flush_local_all(self) -> None:
        """See `Flush_local`."""
        self._alive()

    def Sync(self) -> None:
        """Order this rank's own loads and stores with those of others."""
        state = self._alive()
        state.check(state.native.flush(state.world.rank, state.forever), "Sync")
