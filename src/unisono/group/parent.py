"""While a group is made: what may end the waiting for its ranks, besides a rank's own failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from unisono.diagnosis.read import read
from unisono.diagnosis.render import error
from unisono.errors import GroupError, RendezvousError
from unisono.group.planning import Planner
from unisono.limits import explained
from unisono.store import Store
from unisono.store.watched import WatchedStore

__all__ = ["Parent", "making", "watching"]


class Parent:
    """What a new group's ranks have to know of the one they are in already.

    Args:
        operation: what is being done, for errors: "subgroup([0, 2])".
        ranks: those of the parent that the new group may consist of.
        needed: so many of them it takes; None: all.
    """

    def __init__(
        self, planner: Planner, operation: str, ranks: Sequence[int], needed: int | None = None
    ) -> None:
        self._planner = planner
        self._operation = operation
        self._ranks = list(ranks)
        self._needed = len(self._ranks) if needed is None else needed

    def check(self) -> None:
        """Look whether the new group can still come about.

        Raises:
            PeerLost: too few of its ranks are left: one has closed the parent or ended.
            GroupError: the parent was aborted.  GroupClosed: this rank has closed it.
        """
        planner = self._planner
        engine = planner.engine
        if engine.faulted:
            raise planner.failure(self._operation, planner.timeout_s, engine)
        found = engine.lacking(self._ranks, self._needed, False)
        if found is not None:
            raise error(read(planner.scene(engine, self._operation, planner.timeout_s), found))

    def abort(self) -> None:
        """Abort the parent if too few are left, as each of its operations would: all report the same rank.

        Raises:
            GroupClosed: this rank has closed it.
        """
        self._planner.engine.lacking(self._ranks, self._needed, True)


def making(size: int) -> AbstractContextManager[None]:
    """Explains the limits that end the making of a group of so many ranks; -1: not known yet."""
    takes = (
        f"a group of {size} ranks takes up to {3 * size + 16}" if size > 0 else "a group takes some per rank"
    )
    return explained(RendezvousError, "the group cannot be made", takes)


@contextlib.contextmanager
def watching(parent: Parent | None, keys: Store) -> Iterator[Store]:
    """The store in which to wait for the other ranks of a parent, if there is one."""
    if parent is None:
        yield keys
        return
    try:
        parent.check()
        yield WatchedStore(keys, parent.check)
    except GroupError:
        parent.abort()
        raise
