"""Algorithms for several hosts: they send as little as possible between hosts, where it is expensive.

A host may have any ranks, and any number of them. `hierarchical` algorithms are for large buffers: each
host's link carries each byte once. `leaders` algorithms are for small ones: one rank per host communicates,
in few rounds.

Source: Karonis, de Supinski, Foster, Gropp, Lusk, Bresnahan, "Exploiting hierarchy in parallel computer
networks to optimize collective operation performance", IPDPS 2000; Jia et al., "Highly scalable deep
learning training system with mixed-precision", arXiv:1807.11205 (2018), for the all-reduce in three phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from unisono.plans import dissemination, doubling
from unisono.plans.plan import (
    Copy,
    In,
    Out,
    Recv,
    Reduce,
    Send,
    Step,
    StepFunction,
    Tmp,
    by_host,
    exchange,
)
from unisono.plans.tree import children

Below = Callable[[int, int], Sequence[int]]
"""A tree over hosts: (place, number of hosts) -> the places of its children; place 0 is the root."""


class HostPosition:
    """The position of a rank among the hosts; places of hosts are counted from the root's host.

    Example: hosts (0, 0, 1, 1, 1), rank 3, root 0: place 1, ranks (2, 3, 4), local_peers (2, 4), leader 2.

    Attributes:
        hosts: the ranks of each host, the root's host first.  place: of this rank's host.
        ranks: of this host.  local_peers: the other ranks of this host, the next one first.
        leader: communicates with other hosts: the root, or the first rank.
    """

    def __init__(self, rank: int, hosts: tuple[int, ...], root: int = 0) -> None:
        groups = by_host(hosts)
        first = next(number for number, ranks in enumerate(groups) if root in ranks)
        self.hosts = groups[first:] + groups[:first]
        self._root = root
        self.place = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        self.ranks = self.hosts[self.place]
        after = self.ranks.index(rank) + 1
        self.local_peers = self.ranks[after:] + self.ranks[: after - 1]
        self.leader = self.leader_of(self.place)

    def leader_of(self, place: int) -> int:
        """The leader of a host."""
        return self._root if place == 0 else self.hosts[place][0]

    def leaders(self) -> tuple[int, ...]:
        """The leaders of all hosts."""
        return tuple(self.leader_of(place) for place in range(len(self.hosts)))

    def tree(self, below: Below) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(leader above, leaders below) this host in a tree over the hosts."""
        count = len(self.hosts)
        above = [self.leader_of(place) for place in range(count) if self.place in below(place, count)]
        return tuple(above), tuple(map(self.leader_of, below(self.place, count)))


def chain(place: int, count: int) -> Sequence[int]:
    """A chain of hosts: every link carries every byte once in and once out."""
    return range(place + 1, min(place + 2, count))


def on_ranks(ranks: tuple[int, ...], steps: StepFunction, rank: int) -> Iterator[Step]:
    """An algorithm for ranks 0..n-1, run by `ranks`."""
    for step in steps(ranks.index(rank), len(ranks), 0):
        if isinstance(step, Send):
            yield Send(step.chunk, to=tuple(ranks[peer] for peer in step.to))
        elif isinstance(step, Recv):
            yield Recv(step.chunk, frm=ranks[step.frm])
        elif isinstance(step, Reduce):
            yield Reduce(step.chunk, frm=tuple(ranks[peer] for peer in step.frm), own=step.own)
        else:
            yield step


# ---- along a tree over the hosts -----------------------------------------------------------------------


def broadcast_along(rank: int, hosts: tuple[int, ...], root: int, below: Below) -> Iterator[Step]:
    """Along a tree over the hosts, and in each host to all its ranks."""
    here = HostPosition(rank, hosts, root)
    if rank != here.leader:
        yield Recv(Out(0), frm=here.leader)
        return
    above, under = here.tree(below)
    yield from (Recv(Out(0), frm=leader) for leader in above)
    yield Send(Out(0), to=(*reversed(under), *here.local_peers))


def reduce_along(rank: int, hosts: tuple[int, ...], root: int, below: Below) -> Iterator[Step]:
    """Up a tree over the hosts, each of which reduces its ranks."""
    here = HostPosition(rank, hosts, root)
    if rank != here.leader:
        yield Send(Out(0), to=(here.leader,))
        return
    above, under = here.tree(below)
    result = Tmp(0) if above else Out(0)
    if here.local_peers or under or not above:
        yield Reduce(result, frm=(*here.ranks, *under), own=Out(0))
    else:
        result = Out(0)
    if above:
        yield Send(result, to=above)


def broadcast(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """From host to host along a chain, and in each host to all its ranks: for large buffers."""
    return broadcast_along(rank, hosts, root, chain)


def leaders_broadcast(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """Along a binomial tree over the hosts, and in each host to all its ranks: for small buffers."""
    return broadcast_along(rank, hosts, root, children)


def reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """Every host adds the message of the host before it to the sum of its ranks: for large buffers."""
    return reduce_along(rank, hosts, root, chain)


def leaders_reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """Up a binomial tree over the hosts, each of which reduces its ranks: for small buffers."""
    return reduce_along(rank, hosts, root, children)


def _through_leaders(rank: int, hosts: tuple[int, ...], between: StepFunction) -> Iterator[Step]:
    here = HostPosition(rank, hosts)
    if rank != here.leader:
        yield Send(Out(0), to=(here.leader,))
        yield Recv(Out(0), frm=here.leader)
        return
    if here.local_peers or len(hosts) == 1:
        yield Reduce(Out(0), frm=here.ranks)
    if len(here.hosts) > 1:
        yield from on_ranks(here.leaders(), between, rank)
    yield Send(Out(0), to=here.local_peers)


def leaders_all_reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """To the host's leader, recursive doubling between leaders, back to the host's ranks."""
    return _through_leaders(rank, hosts, doubling.all_reduce)


def barrier(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Notify the host's leader, dissemination between leaders, notification by the leader."""
    return _through_leaders(rank, hosts, dissemination.barrier)


# ---- every rank takes part -----------------------------------------------------------------------------


def all_reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Reduce-scatter in every host, all-reduce between hosts chunk by chunk, all-gather in every host.

    On every host a chunk has one owner. One of the hosts is the chunk's home: its owner there computes the
    sum. With h hosts every link carries 2(h-1)/h * nbytes in and as much out, for any number of ranks per
    host.

        two hosts, ranks 0,1 and 2; chunks 0..3    rank 0   rank 1   rank 2
        owned: 0,1 | 2,3 | 0,1,2,3                 2,3 -> 1  0,1 -> 0
        home of 0 and 2 is the first host          1 -> 2   3 -> 2   0 -> 0, 2 -> 1
    """
    return all_reduce_in_pieces(rank, hosts, 1)


def all_reduce_in_pieces(rank: int, hosts: tuple[int, ...], pieces: int) -> Iterator[Step]:
    """`all_reduce` in pieces; contributions to a piece are sent before the previous result is received."""
    here = HostPosition(rank, hosts)
    count = len(here.hosts)
    width = count * max(map(len, here.hosts))
    before = _AllReduceShare(here, rank, range(0))
    for number in range(pieces + 1):
        piece = _AllReduceShare(
            here, rank, range(number * width, (number + 1) * width if number < pieces else 0)
        )
        if here.local_peers:
            yield from exchange(
                rank,
                piece.given(piece.away),
                [Reduce(Out(chunk), frm=here.ranks) for chunk in piece.mine_away],
            )
        yield from exchange(
            rank,
            [*piece.up, *piece.given(piece.stays), *before.results()],
            [*piece.reduced(), *(Recv(Out(send.chunk.index), frm=send.to[0]) for send in before.up)],
        )
        yield from exchange(
            rank,
            [Send(Out(chunk), to=here.local_peers) for chunk in before.mine],
            [Recv(Out(chunk), frm=peer) for peer, chunk in before.taken()],
        )
        before = piece


class _AllReduceShare:
    """Some chunks of an all-reduce on several hosts, for one rank.

    Attributes:
        away, stays: chunks whose home is another host, or this one; those that must leave come first.
        mine: the chunks that this rank owns on its host; mine_away, mine_here: as above.
        up: the sends to homes on other hosts.
    """

    def __init__(self, here: HostPosition, rank: int, chunks: range) -> None:
        self._here = here
        self._count = len(here.hosts)
        self._order = sorted(chunks, key=lambda chunk: (chunk - here.place - 1) % self._count)
        self.away = [chunk for chunk in self._order if chunk % self._count != here.place]
        self.stays = [chunk for chunk in self._order if chunk % self._count == here.place]
        self.mine = [chunk for chunk in self._order if self._owner(here.place, chunk) == rank]
        self.mine_away = [chunk for chunk in self.mine if chunk % self._count != here.place]
        self.mine_here = [chunk for chunk in self.mine if chunk % self._count == here.place]
        size = sum(map(len, here.hosts))
        self.up = sorted(
            (Send(Out(chunk), to=(self._owner(chunk % self._count, chunk),)) for chunk in self.mine_away),
            key=lambda send: (send.to[0] - rank) % size,  # hosts begin with different ones
        )

    def _owner(self, place: int, chunk: int) -> int:
        ranks = self._here.hosts[place]
        return ranks[chunk // self._count % len(ranks)]

    def _abroad(self, chunk: int) -> tuple[int, ...]:
        """The owners on other hosts, the next host first."""
        places = ((self._here.place + distance) % self._count for distance in range(1, self._count))
        return tuple(self._owner(place, chunk) for place in places)

    def given(self, part: list[int]) -> list[Send]:
        """The sends to the owners on this host."""
        here = self._here
        return [
            Send(Out(chunk), to=(peer,))
            for peer in here.local_peers
            for chunk in part
            if self._owner(here.place, chunk) == peer
        ]

    def reduced(self) -> list[Reduce]:
        """The chunks whose final sum this rank computes."""
        return [Reduce(Out(c), frm=(*self._here.ranks, *self._abroad(c))) for c in self.mine_here]

    def results(self) -> list[Send]:
        """The sends of these sums to the other hosts."""
        return [Send(Out(chunk), to=self._abroad(chunk)) for chunk in self.mine_here]

    def taken(self) -> list[tuple[int, int]]:
        """(owner on this host, chunk) of the results that this rank receives from it."""
        here = self._here
        return [(p, c) for p in here.local_peers for c in self._order if self._owner(here.place, c) == p]


def carrier(ranks: tuple[int, ...], block: int, at_home: tuple[int, ...]) -> int:
    """The rank of a host that forwards a block; on the block's own host, its own rank."""
    return ranks[at_home.index(block) % len(ranks)]


def all_gather(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Blocks travel around a ring of hosts; the rank that receives one sends it to all of its host.

    Every link carries every block of the other hosts once in, and all but the next host's once out.
    """
    here = HostPosition(rank, hosts)
    count = len(here.hosts)
    behind, ahead = here.hosts[here.place - 1], here.hosts[(here.place + 1) % count]
    yield Copy(Out(rank), In(0))
    for round_ in range(count):
        blocks = here.hosts[here.place - round_]
        coming = here.hosts[here.place - round_ - 1] if round_ + 1 < count else ()
        mine = [block for block in blocks if carrier(here.ranks, block, blocks) == rank]
        onward = {block: (carrier(ahead, block, blocks),) if coming else () for block in mine}
        takes = [
            Recv(Out(block), frm=carrier(here.ranks, block, blocks)) for block in blocks if block not in mine
        ]
        takes += [
            Recv(Out(block), frm=carrier(behind, block, coming))
            for block in coming
            if carrier(here.ranks, block, coming) == rank
        ]
        sends = [Send(Out(block), to=(*onward[block], *here.local_peers)) for block in mine]
        yield from exchange(rank, sends, takes)


def reduce_scatter(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Sums travel around a ring of hosts, each of which adds its ranks, and end at their destination.

    Every link carries every block of the other hosts once out, and all but the previous host's once in.
    """
    here = HostPosition(rank, hosts)
    count = len(here.hosts)
    behind, ahead = here.hosts[here.place - 1], here.hosts[(here.place + 1) % count]
    onward: list[Send] = []
    for round_ in range(count):
        blocks = here.hosts[here.place - 1 - round_]
        at = {block: carrier(here.ranks, block, blocks) for block in blocks}
        mine = [block for block in blocks if at[block] == rank]
        before = {block: (carrier(behind, block, blocks),) if round_ else () for block in mine}
        sends = [
            Send(In(block), to=(at[block],))
            for peer in here.local_peers
            for block in blocks
            if at[block] == peer
        ]
        adds = [
            Reduce(Out(0) if block == rank else Tmp(block), frm=(*before[block], *here.ranks), own=In(block))
            for block in mine
        ]
        yield from exchange(rank, [*onward, *sends], adds)
        onward = [Send(Tmp(block), to=(carrier(ahead, block, blocks),)) for block in mine]


def gather(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """Every host's leader sends the blocks of its host at once. All blocks are equally long."""
    here = HostPosition(rank, hosts, root)
    if rank != here.leader:
        yield Send(In(0), to=(here.leader,))
        return
    held = Out if rank == root else Tmp
    if rank == root:
        yield Copy(Out(root), In(0))
    yield from (Recv(held(peer), frm=peer) for peer in here.local_peers)
    if rank != root:
        yield from (Send(In(0) if peer == rank else Tmp(peer), to=(root,)) for peer in here.ranks)
        return
    for place in range(1, len(here.hosts)):
        yield from (Recv(Out(peer), frm=here.leader_of(place)) for peer in here.hosts[place])


def scatter(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:
    """The root sends every host's leader the blocks of its host at once. All blocks are equally long."""
    here = HostPosition(rank, hosts, root)
    if rank == root:
        for place in range(1, len(here.hosts)):
            yield from (Send(In(peer), to=(here.leader_of(place),)) for peer in here.hosts[place])
        yield from (Send(In(peer), to=(peer,)) for peer in here.local_peers)
        yield Copy(Out(0), In(root))
    elif rank != here.leader:
        yield Recv(Out(0), frm=here.leader)
    else:
        yield from (Recv(Out(0) if peer == rank else Tmp(peer), frm=root) for peer in here.ranks)
        yield from (Send(Tmp(peer), to=(peer,)) for peer in here.local_peers)
