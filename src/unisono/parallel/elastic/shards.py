"""Shards that survive their rank: now and then a copy of each rank's own, and of those of a neighbour.

    rank     0     1     2     3          under ZeRO over all data ranks; neighbours of the ring are on
    own      s0    s1    s2    s3         different hosts where there are several
    other    s3    s0    s1    s2

Under hybrid sharding a replica has the same shards, and each rank keeps a copy of its own only. After a
change each rank gets its new shards from those that hold the old ones. All of them take the state after one
step, the newest that is whole: some may have gone further than others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.engine.group.native import NativeGroup
from unisono.engine.publishing.boxes import Box, overlap
from unisono.parallel.gradients import local, span
from unisono.parallel.plan import Plan

NOBODY = -1


@dataclass(frozen=True)
class HeldCopy:
    """What a rank tells the others of a copy that it has.

    Attributes:
        steps, generation: it is of the state after so many steps, over the ranks of that group.
        place, other: whose shards it has: its own, and those of a neighbour (NOBODY: of none).
        shards: ranks that share; rank r has shard r % shards.
    """

    steps: int
    generation: int
    place: int
    other: int
    shards: int

    @property
    def label(self) -> tuple[int, int]:
        """By which the copies of different ranks belong together."""
        return self.steps, self.generation


class ShardCopy:
    """A copy of a rank's state, in its memory.

    Args:
        tensors: the state by name; DTensors are sharded along dimension 0.
        about: the run's own numbers.
        written: what is JSON, by name.
        caches: buffers that are not persistent, by name.
        reused: an older copy, whose memory is used again where it fits.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        about: dict[str, Any],
        written: dict[str, bytes],
        caches: Mapping[str, Tensor],
        plan: Plan,
        steps: int,
        group: NativeGroup,
        reused: ShardCopy | None,
    ) -> None:
        self.about = about
        self.caches = {name: value.clone() for name, value in caches.items()}
        self.written = {name: text for name, text in written.items() if name.startswith("optimizer.")}
        self.sharded = {name for name, value in tensors.items() if isinstance(value, DTensor)}
        self.kinds = [(name, str(one.dtype), tuple(one.shape)) for name, one in tensors.items()]
        old: Mapping[str, Tensor] = {} if reused is None else reused.own
        self.own: dict[str, Tensor] = {
            name: _copied(local(value.detach()), old.get(name)) for name, value in tensors.items()
        }
        following, before = _neighbours(group) if plan.data == plan.shards > 1 else (NOBODY, NOBODY)
        self.held = HeldCopy(steps, group.generation, group.rank, before, plan.shards)
        self.other: dict[str, Tensor] = {} if reused is None or before == NOBODY else reused.other
        if before != NOBODY:
            self._exchange(group, following, before, plan.shards)

    def _exchange(self, group: NativeGroup, following: int, before: int, shards: int) -> None:
        old, self.other = self.other, {}
        works = []
        for name, dtype, shape in self.kinds:
            if name in self.sharded:
                first, last = rows_of_shard(shape[0], shards, before)
                like = old.get(name)
                wanted = (last - first, *shape[1:])
                if like is None or like.shape != wanted:
                    like = torch.empty(wanted, dtype=getattr(torch, dtype.removeprefix("torch.")))
                self.other[name] = like
                works += [group.irecv(_raw(like), before)] if like.numel() else []
                works += [group.isend(_raw(self.own[name]), following)] if self.own[name].numel() else []
        for work in works:
            work.wait()

    def shard(self, name: str, place: int) -> Tensor:
        """The rows of a tensor that the shard of `place` has; this rank has them."""
        mine = place % self.held.shards == self.held.place % self.held.shards
        return self.own[name] if mine else self.other[name]


class Sources(NamedTuple):
    """Where each shard of the former ranks comes from: a rank of the new group, and how it has it."""

    label: tuple[int, int]
    ranks: list[int]
    rebuilt: tuple[str, ...]


def sources_of(reports: Sequence[Sequence[HeldCopy]], steps: int, lost: Mapping[int, str]) -> Sources | None:
    """Choose who sends each shard of the newest state that is whole. None: each one has lost a shard.

    Args:
        reports: the copies of each rank.
        steps: those of the newest completed one; no later state is taken.
        lost: ranks of the former group that are out, for the text.
    """
    labels = sorted({one.label for held in reports for one in held if one.steps <= steps}, reverse=True)
    for label in labels:
        having = {rank: one for rank, held in enumerate(reports) for one in held if one.label == label}
        shards = next(iter(having.values())).shards
        ranks, rebuilt = [], []
        for shard in range(shards):
            own = [rank for rank, one in having.items() if one.place % shards == shard]
            copies = [rank for rank, one in having.items() if one.other % shards == shard and one.other >= 0]
            found = [*own, *copies][:1]
            ranks += found
            if found and not own:
                rebuilt.append(f"shard {shard} from the copy on rank {found[0]}")
            elif found and any(place % shards == shard for place in lost):
                rebuilt.append(f"shard {shard} from the replica on rank {found[0]}")
        if len(ranks) == shards:
            return Sources(label, ranks, tuple(rebuilt))
    return None


def send_shards(
    group: NativeGroup,
    plan: Plan,
    copy: ShardCopy | None,
    kinds: Sequence[tuple[str, str, tuple[int, ...]]],
    sources: Sources,
    filled: Mapping[str, Tensor],
) -> None:
    """Fill each rank's new shards from those that hold the old ones. All ranks call this.

    Args:
        copy: of this rank, with the label of the sources; None: it is new, and receives only.
        kinds: (name, dtype, shape) of what is sharded.
        filled: this rank's new shards, by name.
    """
    works = []
    for name, _, shape in kinds:
        for source, place, to, first, last in _moves(shape[0], sources.ranks, plan):
            if group.rank not in (source, to):
                continue
            old = rows_of_shard(shape[0], len(sources.ranks), place)[0]
            new = rows_of_shard(shape[0], plan.shards, to)[0]
            given = None if copy is None or source != group.rank else copy.shard(name, place)
            if source == to:
                assert given is not None
                local(filled[name])[first - new : last - new].copy_(given[first - old : last - old])
            elif given is not None:
                works.append(group.isend(_raw(given[first - old : last - old]), to))
            else:
                works.append(group.irecv(_raw(local(filled[name])[first - new : last - new]), source))
    for work in works:
        work.wait()


def _moves(rows: int, ranks: Sequence[int], plan: Plan) -> Iterator[tuple[int, int, int, int, int]]:
    """(from, the shard there, to, first row, last row) of each piece; rows are those of the whole tensor."""
    for place, source in enumerate(ranks):
        first, last = rows_of_shard(rows, len(ranks), place)
        for to in range(plan.data):
            begin, end = rows_of_shard(rows, plan.shards, to)
            common = overlap(Box((first,), (last - first,)), Box((begin,), (end - begin,)))
            if common:
                yield source, place, to, common.offset[0], common.offset[0] + common.shape[0]


def rows_of_shard(rows: int, shards: int, rank: int) -> tuple[int, int]:
    """The rows [first, last) of a rank, as `fully_shard` cuts dimension 0. Example: 5, 3 -> 0:2, 2:4, 4:5."""
    first, size = span(rows, [(shards, rank % shards)])
    return first, first + size


def _neighbours(group: NativeGroup) -> tuple[int, int]:
    """The next rank and the one before in a ring in which neighbours are on different hosts, if possible."""
    hosts = group._hosts
    within = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    ring = sorted(range(group.size), key=lambda rank: (within[rank], rank))
    at = ring.index(group.rank)
    return ring[(at + 1) % len(ring)], ring[at - 1]


def _copied(value: Tensor, old: Tensor | None) -> Tensor:
    if old is None or old.shape != value.shape or old.dtype != value.dtype:
        return value.clone()
    return old.copy_(value)


def _raw(tensor: Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
