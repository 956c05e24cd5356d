"""All-reduce in which one rank adds for all ranks, like a switch that reduces in the network.

Every host sends its sum once and receives the result once: half the bytes of a ring, if the aggregator's own
link is wide enough. On a host of its own the aggregator is an extra process that only adds.
Source: Graham et al., "Scalable hierarchical aggregation protocol (SHArP)", COMHPC 2016; CollNet in NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.plans.hierarchical import HostPosition
from unisono.plans.plan import Out, Recv, Reduce, Send, Step, by_host


def aggregator(hosts: tuple[int, ...]) -> int:
    """The rank that adds: the first one of the smallest host.

    Example: rank 4 for hosts (0, 0, 1, 1, 2), rank 0 on one host.
    """
    return min(by_host(hosts), key=len)[0]


def all_reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Ranks send to their host's leader, leaders to the aggregator, and the sum returns the same way."""
    here = HostPosition(rank, hosts, aggregator(hosts))
    above, under = here.tree(_star)
    if rank != here.leader:
        yield Send(Out(0), to=(here.leader,))
        yield Recv(Out(0), frm=here.leader)
        return
    if here.local_peers or under or not above:
        yield Reduce(Out(0), frm=(*here.ranks, *under))
    if above:
        yield Send(Out(0), to=above)
        yield Recv(Out(0), frm=above[0])
    yield Send(Out(0), to=(*under, *here.local_peers))


def _star(place: int, count: int) -> range:
    return range(1, count) if place == 0 else range(0)
