"""While a subgroup is made: the parent's faults that end the wait for its ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from unisono.engine.base.limits import limit_errors
from unisono.engine.diagnosis.fault_reader import read
from unisono.engine.diagnosis.fault_text import error
from unisono.engine.group.native_planning import NativePlanner
from unisono.engine.store import Store
from unisono.engine.store.liveness_store import LivenessStore
from unisono.errors import GroupError, RendezvousError


class ParentGroup:
    """The parent of a new group, as its ranks need it while the group is made.

    Args:
        operation: for errors: "subgroup([0, 2])".
        ranks: the parent's ranks that may be in the new group.
        needed: how many of them the new group needs; None: all.
    """

    def __init__(
        self, planner: NativePlanner, operation: str, ranks: Sequence[int], needed: int | None = None
    ) -> None:
        self._planner = planner
        self._operation = operation
        self._ranks = list(ranks)
        self._needed = len(self._ranks) if needed is None else needed

    def check(self) -> None:
        """Check that the new group can still be made.

        Raises:
            PeerLost: too few of its ranks are alive: one has closed the parent or ended.
            GroupError: the parent was aborted.  GroupClosed: this rank has closed it.
        """
        planner = self._planner
        engine = planner.engine
        found = engine.fault_unless_alive(self._ranks, self._needed, False)
        if engine.faulted:  # after the search: a rank that found the fault may have left because of it
            raise planner.failure(self._operation, planner.timeout_s, engine)
        if found is not None:
            raise error(read(planner.fault_context(engine, self._operation, planner.timeout_s), found))

    def has_first(self) -> bool:
        """Whether the parent's rank 0 is there: the store that the world was given ends with its process."""
        return self._planner.engine.fault_unless_alive([0], 1, False) is None

    def abort(self) -> None:
        """Abort the parent if too few are alive, as each of its operations would: all ranks report the same
        one.

        Raises:
            GroupClosed: this rank has closed it.
        """
        self._planner.engine.fault_unless_alive(self._ranks, self._needed, True)


def making(size: int) -> AbstractContextManager[None]:
    """Explains limits of the system that prevent a group of `size` ranks; -1: the size is not known yet."""
    takes = (
        f"a group of {size} ranks takes up to {3 * size + 16}" if size > 0 else "a group takes some per rank"
    )
    return limit_errors(RendezvousError, "the group cannot be made", takes)


@contextlib.contextmanager
def watching(parent: ParentGroup | None, keys: Store) -> Iterator[Store]:
    """The store in which to wait for the other ranks of a parent, if there is one."""
    if parent is None:
        yield keys
        return
    try:
        parent.check()
        yield LivenessStore(keys, parent.check)
    except GroupError:
        parent.abort()
        raise
