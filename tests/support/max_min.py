"""A slow, exact simulator: fractions in place of floats, all rates computed anew at every event.

It knows messages, routes, bursts of links, and ranks that run their programs in order and wake up; no
symmetry, no bundles, no rendezvous.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

__all__ = ["Step", "rates", "run"]


class Step(NamedTuple):
    """ "send" or "recv" with a peer and bytes, or "compute" for `nbytes` seconds."""

    kind: str
    peer: int
    nbytes: Fraction


def rates(routes: Sequence[Sequence[int]], capacity: Sequence[Fraction]) -> list[Fraction]:
    """Max-min fair rates of flows, by their routes: progressive filling as in the textbook."""
    found: list[Fraction | None] = [None] * len(routes)
    left = list(capacity)
    while None in found:
        shares = {}
        for link, rest in enumerate(left):
            crossing = sum(r.count(link) for r, rate in zip(routes, found, strict=True) if rate is None)
            if crossing:
                shares[link] = rest / crossing
        least = min(shares.values())
        full = [link for link, share in shares.items() if share == least]
        for flow, route in enumerate(routes):
            if found[flow] is None and any(link in route for link in full):
                found[flow] = least
                for link in route:
                    left[link] -= least
    return [rate for rate in found if rate is not None]


class _Message:
    def __init__(self, edge: tuple[int, int], departs: Fraction, nbytes: Fraction) -> None:
        self.edge, self.departs, self.left = edge, departs, nbytes
        self.started = False


class _Buckets:
    """What links have saved while they were idle; they begin full. bursts: (): there are none."""

    def __init__(
        self,
        bursts: Sequence[Fraction],
        capacity: Sequence[Fraction],
        routes: dict[tuple[int, int], tuple[int, ...]],
    ) -> None:
        self.bursts, self.capacity, self.routes = bursts, capacity, routes
        self.saved, self.idle_since = list(bursts), [Fraction(0)] * len(bursts)

    def crossed(self, messages: Sequence[_Message]) -> list[int]:
        return [link for message in messages for link in self.routes[message.edge]]

    def begin(self, active: Sequence[_Message], time: Fraction) -> None:
        """Messages that begin now take equal parts of what their links have saved."""
        new = [message for message in active if not message.started]
        running = [message for message in active if message.started]
        for message in new:
            message.started = True
        if not self.bursts:
            return
        count = Counter(self.crossed(new))
        for link in set(count) - set(self.crossed(running)):
            more = self.capacity[link] * (time - self.idle_since[link])
            self.saved[link] = min(self.bursts[link], self.saved[link] + more)
        taken = dict.fromkeys(count, Fraction(0))
        for message in new:
            route = self.routes[message.edge]
            part = min([message.left, *(self.saved[link] / count[link] for link in route)])
            message.left -= part
            for link in route:
                taken[link] = max(taken[link], part)
        for link, part in taken.items():
            self.saved[link] -= part * count[link]

    def end(self, active: Sequence[_Message], time: Fraction) -> None:
        """Links whose last message ends now are idle."""
        going = set(self.crossed([message for message in active if message.left > 0]))
        for link in set(self.crossed(active)) - going if self.bursts else ():
            self.idle_since[link] = time


def run(
    programs: Sequence[Sequence[Step]],
    routes: dict[tuple[int, int], tuple[int, ...]],
    latency: Sequence[Fraction],
    capacity: Sequence[Fraction],
    o_send: Fraction,
    o_recv: Fraction,
    wake: Fraction = Fraction(0),
    bursts: Sequence[Fraction] = (),
) -> list[Fraction]:
    """When each rank is done. Messages on an edge follow each other; different edges share links."""
    size = len(programs)
    now, at = [Fraction(0)] * size, [0] * size
    edges: dict[tuple[int, int], list[_Message]] = {}
    arrived: dict[tuple[int, int], list[Fraction]] = {}
    time = Fraction(0)
    buckets = _Buckets(bursts, capacity, routes)

    def advance() -> None:
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(programs):
                while at[rank] < len(program):
                    step = program[at[rank]]
                    if step.kind == "compute":
                        now[rank] += step.nbytes
                    elif step.kind == "send":
                        now[rank] += o_send
                        edge = (rank, step.peer)
                        edges.setdefault(edge, []).append(_Message(edge, now[rank], step.nbytes))
                    elif arrived.get((step.peer, rank)):
                        here = arrived[step.peer, rank].pop(0)
                        now[rank] = max(now[rank], here) + o_recv + (wake if here > now[rank] else 0)
                    else:
                        break
                    at[rank] += 1
                    moved = True

    while True:
        advance()
        first = [queue[0] for queue in edges.values() if queue]
        if not first:
            return now
        active = [m for m in first if m.departs <= time]
        buckets.begin(active, time)
        speed = rates([routes[m.edge] for m in active], capacity)
        ends = [time + m.left / rate for m, rate in zip(active, speed, strict=True)]
        following = min([*ends, *(m.departs for m in first if m.departs > time)])
        for message, rate in zip(active, speed, strict=True):
            message.left -= rate * (following - time)
        time = following
        buckets.end(active, time)
        for message in active:
            if message.left == 0:
                edges[message.edge].pop(0)
                links = routes[message.edge]
                arrived.setdefault(message.edge, []).append(time + sum(latency[link] for link in links))
