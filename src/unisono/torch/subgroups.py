"""Groups made from a group: `split_group` and `merge_remote_group`. `new_group` makes the usual ones."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from unisono.engine.backends.torch_store import part
from unisono.engine.group.parent_group import ParentGroup
from unisono.errors import message
from unisono.torch_internals import c10d

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    import torch

    from unisono.engine.bootstrap.engine import EngineSettings
    from unisono.engine.group.native import NativeGroup


class ParentRanks(NamedTuple):
    """The parent group in which a group is made, if any, and the parent's ranks that may be in it."""

    group: Subgroups | None
    ranks: Sequence[int]

    def parent(self, operation: str, size: int) -> ParentGroup | None:
        """The parent to watch while a group of `size` ranks is made."""
        return (
            None
            if self.group is None
            else ParentGroup(self.group._group._planner, operation, self.ranks, size)
        )

    @property
    def engine_settings(self) -> EngineSettings | None:
        """By which the parent's ranks reach each other."""
        return None if self.group is None else self.group._group._engine_settings


NO_PARENT = ParentRanks(None, ())


class GroupCounter:
    """Counts the groups made under one prefix of a store.

    `destroy_process_group` followed by `init_process_group` over one store would use the same keys again.
    Each rank counts its own groups, so all ranks get the same number without waiting for each other. A rank
    marks the number of a group that it could not make: a rank that missed this attempt passes over it.
    """

    def __init__(self, store: c10d.Store, rank: int, within: Subgroups | None) -> None:
        self._store = store
        self._ended: list[GroupCounter] = []  # subgroups whose keys are still there
        self._parent = None if within is None else within._group_counter
        self._era = "" if self._parent is None else f"{self._parent.number}/"  # a new world counts from 0
        if self._parent is not None:
            self._parent._delete_keys()
        self._key = f"unisono/begun/{self._era}{rank}"
        self.number: int = store.add(self._key, 1)
        while store.check([self._failed()]):
            self.number = store.add(self._key, 1)

    def _failed(self) -> str:
        return f"unisono/failed/{self._era}{self.number}"

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Make the group inside."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store has ended
                self._store.set(self._failed(), "")
            raise

    def keys(self) -> c10d.Store:
        """A part of the store to which no earlier group under the same prefix has written."""
        found: c10d.Store = part(self._store, f"unisono/{self._era}{self.number}/")
        return found

    def forget(self) -> None:
        """The group ends. The next subgroup deletes its key: at the end of a job the store may have ended."""
        if self._parent is not None:
            self._parent._ended.append(self)

    def _delete_keys(self) -> None:
        while self._ended:
            ended = self._ended.pop()
            with contextlib.suppress(RuntimeError):  # a store may be unable to delete keys
                ended._store.delete_key(ended._key)


class Subgroups:
    """The methods of a process group that make another one from it."""

    _group: NativeGroup
    _group_counter: GroupCounter
    _rank: int
    _store: c10d.Store
    _timeout: timedelta
    _group_name: str
    _group_desc: str

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: the ranks that are in no part of a split make no group."""

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,  # noqa: ARG002
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,  # noqa: ARG002
    ) -> c10d.ProcessGroup | None:
        """Make a group of some of this group's ranks; None on the others. Programs use `new_group`."""
        ranks = list(new_ranks)
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._group_name} split {'_'.join(map(str, ranks))}"
        store = part(self._store, f"split/{name}/")
        desc = group_desc or f"{self._group_desc}:split"
        within = ParentRanks(self, ranks)
        return self._another(store, ranks.index(self._rank), len(ranks), timeout, name, desc, within)

    splitGroup = split_group  # noqa: N815

    def merge_remote_group(
        self,
        store: c10d.Store,
        size: int,
        timeout: timedelta | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> c10d.ProcessGroup:
        """Make a group of the ranks of several groups.

        Every rank of every group calls this. Ranks are numbered in the order of arrival, as in PyTorch.

        Args:
            store: a store that all ranks reach, or a part of it (PrefixStore), for this group only.
            size: the number of ranks of all groups together.
            timeout: for the rendezvous and for the calls of the new group; None: this group's.
            group_name: the same on every rank.
        Raises:
            ValueError: more ranks arrived than `size`, or the store was used for another group.
            Timeout: not all ranks arrived.
        """
        rank = store.add("unisono/merged", 1) - 1
        if rank >= size:
            raise ValueError(
                message(
                    "merge_remote_group: more ranks used this store than the new group has",
                    observed=f"{rank + 1} ranks",
                    expected=f"size={size}",
                    remedy="Give the size of all groups together, and every new group a store of its own: "
                    "PrefixStore(name, store).",
                )
            )
        name = group_name or "merge"
        return self._another(store, rank, size, timeout, name, group_desc or f"{self._group_desc}:merge")

    def _another(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        timeout: timedelta | None,
        name: str,
        desc: str,
        within: ParentRanks = NO_PARENT,
    ) -> c10d.ProcessGroup:
        place = (store, rank, size, timeout or self._timeout, f"group {name}")
        made = self._make(*place, parent_ranks=within)
        made.setGroupName(name)
        made.setGroupDesc(desc)
        return cast("c10d.ProcessGroup", made)

    def _make(self, *place: Any, parent_ranks: ParentRanks = NO_PARENT, connects: bool = True) -> Any:
        """Make a group of this one's kind.

        Args:
            place: its store, rank, size, timeout and name.
            connects: False: it has no ranks yet.
        """
        raise NotImplementedError
