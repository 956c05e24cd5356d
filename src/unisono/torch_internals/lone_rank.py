"""A job of which this process is one rank and no other rank is there: PyTorch's fake process group.

It is the default group of one thread. Other threads, and this one afterwards, have the job's own: such a
thread may tell other ranks that this one is at work.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import c10d, process_group_requests
from .probe import PrivateName, need

__all__ = ["NAMES", "is_lone", "lone_rank"]

NAMES = {
    "store": PrivateName(
        "torch.testing._internal.distributed.fake_pg:FakeStore",
        purpose="run collectives that send nothing",
        without="up.plan cannot run",
    ),
}
GROUPS = 1 << 20
"""Groups of one such job, at most: their names are its numbers, of which no group of a real job has one."""


class _ThreadJob(threading.local):
    group: Any = None
    count = 0


_here, _jobs = _ThreadJob(), itertools.count(1)


def is_lone() -> bool:
    """Whether this thread is the one rank of such a job."""
    return _here.group is not None


@contextlib.contextmanager
def lone_rank(rank: int, ranks: int) -> Iterator[None]:
    """Meanwhile this thread is `rank` of a job of so many ranks, and no message is sent or awaited.

    What a collective fills stays as it was. Groups that are made here end here.
    """
    state, first, before = need(c10d.NAMES["state"]), next(_jobs) * GROUPS, (_here.group, _here.count)
    if not hasattr(state, "knows_lone_ranks"):
        state.__class__ = _with_lone_ranks(type(state))
    others = dist.GroupMember.NON_GROUP_MEMBER  # PyTorch notes the ranks of groups without this rank there
    outside = state.pg_group_ranks.get(others)
    try:
        store, options = need(NAMES["store"])(), {"timeout": timedelta(minutes=1)}
        _here.group, _ = need(process_group_requests.MAKING)(
            ranks, rank, [], "fake", store, str(first), **options
        )
        _here.count = first + 1
        state.pg_group_ranks[_here.group] = {each: each for each in range(ranks)}
        yield
    finally:
        if outside is None:
            state.pg_group_ranks.pop(others, None)
        made = {str(number) for number in range(first, _here.count)}
        _here.group, _here.count = before
        for group, name in [*state.pg_names.items()]:
            if name in made:
                dist.destroy_process_group(group)
                state.tags_to_pg.pop(f"ptd:{name}", None)


def _with_lone_ranks(kind: Any) -> Any:
    """The class `kind` of what PyTorch knows of groups, with another default group in some threads."""

    class ThreadWorld(kind):  # type: ignore[misc]
        @property
        def default_pg(self) -> Any:
            return _here.group or super().default_pg

        @default_pg.setter
        def default_pg(self, group: Any) -> None:
            kind.default_pg.fset(self, group)

        @property
        def group_count(self) -> Any:
            return _here.count if _here.group else super().group_count

        @group_count.setter
        def group_count(self, count: int) -> None:
            if _here.group:
                _here.count = count
            else:
                kind.group_count.fset(self, count)

        knows_lone_ranks = True

    return ThreadWorld
