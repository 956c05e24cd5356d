"""`Group`: an ordered set of processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.mpi import constants
from unisono.mpi.errors import Exception, exact, whole
from unisono.mpi.handle import Handle, State, getter
from unisono.mpi.transport import worlds


class Members(State):
    """The state of a group: its processes, see `World.ids`, and which of them this one is."""

    def __init__(self, ranks: Sequence[int], own: int) -> None:
        self.ranks, self.own = tuple(ranks), own


class Group(Handle):
    """An ordered set of ranks."""

    _null = constants.ERR_GROUP

    def _new(self, ranks: Sequence[int]) -> Group:
        if not ranks:
            return type(self)(GROUP_EMPTY)
        return type(self)._of(Members(ranks, self._alive().own))

    Get_size, size = getter("The number of ranks.", lambda state: len(state.ranks))
    Get_rank, rank = getter("This process's rank, or UNDEFINED.", lambda one: _place(one.own, one.ranks))

    def _chosen(self, ranks: Sequence[int]) -> list[int]:
        members = self._alive().ranks
        numbers = [exact(rank, "rank") for rank in ranks]
        if any(not 0 <= rank < len(members) for rank in numbers) or len(set(numbers)) != len(numbers):
            raise Exception(constants.ERR_RANK, f"ranks {numbers} of a group of {len(members)}")
        return numbers

    def Incl(self, ranks: Sequence[int]) -> Group:
        """These ranks, in this order."""
        members = self._alive().ranks
        return self._new([members[rank] for rank in self._chosen(ranks)])

    def Excl(self, ranks: Sequence[int]) -> Group:
        """All other ranks."""
        out = set(self._chosen(ranks))
        return self._new([member for rank, member in enumerate(self._alive().ranks) if rank not in out])

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Group:
        """The ranks of ranges (first, last, stride)."""
        return self.Incl(_ranges(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Group:
        """All ranks but those of ranges (first, last, stride)."""
        return self.Excl(_ranges(ranks))

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Group:
        """All ranks of the first, then those of the second that are not in it."""
        first, second = group1._alive().ranks, group2._alive().ranks
        return cls((group2 if group1 == GROUP_EMPTY else group1)._new([*first, *_without(second, first)]))

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Group:
        """The ranks of the first that are in the second."""
        first, second = group1._alive().ranks, group2._alive().ranks
        return cls(group1._new(_without(first, _without(first, second))))

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Group:
        """The ranks of the first that are not in the second."""
        return cls(group1._new(_without(group1._alive().ranks, group2._alive().ranks)))

    def Compare(self, group: Group) -> int:
        """IDENT: the same ranks in the same order; SIMILAR: the same ranks; UNEQUAL."""
        mine, other = self._alive().ranks, group._alive().ranks
        if mine == other:
            return constants.IDENT
        return constants.SIMILAR if set(mine) == set(other) else constants.UNEQUAL

    def Translate_ranks(self, ranks: Sequence[int] | None = None, group: Group | None = None) -> list[int]:
        """The ranks in another group (None: that of COMM_WORLD) of these ranks (None: all)."""
        members = self._alive().ranks
        numbers = list(range(len(members))) if ranks is None else [exact(rank, "rank") for rank in ranks]
        other = worlds[0].ids[worlds[0].first :] if group is None else group._alive().ranks
        return [_translated(members, other, rank) for rank in numbers]

    def Dup(self) -> Group:
        """The same ranks."""
        return self._new(self._alive().ranks)

    @classmethod
    def Create_from_session_pset(cls, session: Any, pset_name: str) -> Group:
        """The ranks of a process set."""
        return cls(session.Create_group(pset_name))

    Free = Handle._free


def _place(member: int, members: tuple[int, ...]) -> int:
    return members.index(member) if member in members else constants.UNDEFINED


def _translated(members: tuple[int, ...], other: tuple[int, ...], rank: int) -> int:
    if rank == constants.PROC_NULL:
        return rank
    if not 0 <= rank < len(members):
        raise Exception(constants.ERR_RANK, f"rank {rank} of a group of {len(members)}")
    return _place(members[rank], other)


def _ranges(ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    found: list[int] = []
    for given in ranges:
        first, last, stride = (whole(one, "a range") for one in given)
        if stride == 0:
            raise Exception(constants.ERR_ARG, "a stride is 0")
        found += range(first, last + (1 if stride > 0 else -1), stride)
    return found


def _without(ranks: Sequence[int], others: Sequence[int]) -> list[int]:
    return [one for one in ranks if one not in others]


GROUP_NULL = Group()


def group_of(world: Any, ranks: Sequence[int]) -> Group:
    """The group of some ranks of a world."""
    return Group._of(Members(world.ids_of(ranks), world.ids[world.rank]))


GROUP_EMPTY: Group = Group._of(Members((), -1))
