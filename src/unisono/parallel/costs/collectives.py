"""What moving takes: collectives and messages between the ranks of a job, and what its axes exchange.

`CollectiveCosts` prices by the engine's cost model; `LinkCosts` by hardware files, for GPUs that this machine
need not have; a `Link` by a latency and a time for each byte, the alpha-beta model.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from unisono.codecs.codec import Codec
from unisono.engine.costs.machine import MachineCalibration
from unisono.engine.costs.tuner import Tuner
from unisono.engine.group.codec_arguments import BLOCK_OF_ALL
from unisono.engine.group.codec_planning import coded_algorithm
from unisono.errors import UnfitError
from unisono.planner.choice_page import PricedCollective
from unisono.planner.collectives import RankLayout, collective_s, interconnect_of, message_s
from unisono.planner.hardware import Interconnect, slowest
from unisono.plans.coded_edges import ALL, BETWEEN

if TYPE_CHECKING:
    from unisono.planner.hardware import Hardware

    from .trace import TracedAttention, TracedStep


@dataclass(frozen=True)
class Link:
    """A network: seconds for a message, seconds for a byte, seconds to copy a byte locally."""

    latency_s: float = 5e-6
    byte_s: float = 2.5e-10
    copy_s: float = 1e-10

    def received(self, kind: str, ranks: int, nbytes: float) -> float:
        """The bytes that a rank receives. `nbytes`: of its part before the move.

        Example: all_gather on 4 ranks of 100 bytes each: 300.
        """
        share = (ranks - 1) / ranks
        return {
            "slice": 0.0,
            "all_gather": (ranks - 1) * nbytes,
            "all_to_all": share * nbytes,
            "reduce_scatter": share * nbytes,
            "all_reduce": 2 * share * nbytes,
        }[kind]

    def seconds(self, kind: str, ranks: int, nbytes: float) -> float:
        """Predict the time of one move. The copies of packing and unpacking are counted, too."""
        if kind == "slice":
            return self.copy_s * nbytes / ranks
        rounds = math.ceil(math.log2(ranks)) * (2 if kind == "all_reduce" else 1)
        received = self.received(kind, ranks, nbytes)
        return rounds * self.latency_s + self.byte_s * received + self.copy_s * (nbytes + received)


# ---- prices of calls ----


class CollectiveCosts:
    """Prices of one job.

    Args:
        machine: the figures of its hosts. Between hosts those of the network count, as for the engine.
        hosts: number of the host of each rank, by rank.
        turn_s: more of each call, see `SharedSteps`.
    """

    def __init__(self, machine: MachineCalibration, hosts: Sequence[int], turn_s: float = 0.0) -> None:
        self._machine = machine.between_networks() if len(set(hosts)) > 1 else machine
        self._hosts, self._turn_s = tuple(hosts), turn_s
        self._price = functools.cache(self._priced)
        self._tuner = functools.cache(self._of)

    @property
    def here(self) -> int:
        """Ranks of the host that has most."""
        return max(self._hosts.count(host) for host in set(self._hosts))

    def seconds(self, collective: str, members: Sequence[int], nbytes: float) -> float:
        """A call among these ranks, while all other groups of the job make theirs.

        Args:
            nbytes: of the whole buffer: of an all_gather the result, of a reduce_scatter the input.
        """
        hosts = tuple(self._hosts[rank] for rank in members)
        if len(hosts) < 2:
            return 0.0
        return self._price(collective, hosts, max(1, round(nbytes))) + self._turn_s

    def coded(self, members: Sequence[int], nbytes: float, codec: Codec) -> float:
        """An all_reduce of f32 values that travel as codes: between hosts only, where there are several.

        Args:
            nbytes: of the values.
        """
        hosts = tuple(self._hosts[rank] for rank in members)
        if len(hosts) < 2:
            return 0.0
        edges = BETWEEN if len(set(hosts)) > 1 else ALL
        per_value = codec.nbytes(BLOCK_OF_ALL) / BLOCK_OF_ALL
        whole = max(1, round(nbytes))
        algorithm, _ = coded_algorithm("all_reduce", None, edges, whole)
        return (
            self._tuner(hosts).predict_coded("all_reduce", algorithm, whole, per_value, edges) + self._turn_s
        )

    def message(self, sender: int, receiver: int, nbytes: float, beside: int = 1) -> float:
        """A message between two ranks, at one end.

        Args:
            beside: ranks that send at the same time; between hosts those of a host share its link.
        """
        machine = self._machine
        if self._hosts[sender] != self._hosts[receiver]:
            shared = min(beside, self.here)
            return 2 * machine.tcp_s + nbytes * shared / machine.tcp
        rate = min(machine.take, machine.copy.all_memory)
        return machine.flag_s + nbytes / rate

    def _priced(self, collective: str, hosts: tuple[int, ...], nbytes: int) -> float:
        tuner = self._tuner(hosts)
        per_rank = -(-nbytes // len(hosts)) if collective in ("all_gather", "reduce_scatter") else nbytes
        return tuner.predict(collective, tuner.choose(collective, per_rank), nbytes)

    def _of(self, hosts: tuple[int, ...]) -> Tuner:
        """The tuner of such a group; its ranks have their share of the cores, and of their host's link."""
        cores, tcp = self._machine.cores, self._machine.tcp
        if cores and len(set(hosts)) == 1:
            cores = max(1, cores * len(hosts) // max(self.here, len(hosts)))
        if len(set(hosts)) > 1:  # the other groups of a host call at the same time
            tcp /= max(1, self.here // max(hosts.count(host) for host in hosts))
        return Tuner(len(hosts), hosts, msgspec.structs.replace(self._machine, cores=cores, tcp=tcp))


# ---- hosts with hardware files ----


class LinkCosts:
    """Prices of one job, as `CollectiveCosts` has them for this machine.

    Args:
        hardware: of each host.    hosts: number of the host of each rank, by rank.
    """

    def __init__(self, hardware: Sequence[Hardware], hosts: Sequence[int]) -> None:
        self._hardware, self._hosts = tuple(hardware), tuple(hosts)
        self._slowest = functools.cache(self._of)

    def seconds(self, collective: str, members: Sequence[int], nbytes: float) -> float:
        """As `CollectiveCosts.seconds`."""
        here = Counter(self._hosts[rank] for rank in members)
        links, share = self._slowest(frozenset(here))
        return collective_s(collective, RankLayout(len(members), max(here.values())), nbytes, links, share)

    def coded(self, members: Sequence[int], nbytes: float, codec: Codec) -> float:
        """Raise ValueError: no codec runs on a GPU."""
        del members, nbytes, codec
        raise UnfitError("compression takes f32 gradients in CPU memory, and the hosts have GPUs")

    def message(self, sender: int, receiver: int, nbytes: float, beside: int = 1) -> float:
        """A message between two ranks, at one end. Each rank has its own share of the ports."""
        del beside
        ends = {self._hosts[sender], self._hosts[receiver]}
        links, share = self._slowest(frozenset(ends))
        return message_s(nbytes, links, share, inside=len(ends) == 1)

    def _of(self, hosts: frozenset[int]) -> tuple[Interconnect, float]:
        """The slowest links of these hosts, and the share of their rates that a step gets."""
        found = slowest([*{id(self._hardware[host]): self._hardware[host] for host in hosts}.values()])
        return interconnect_of(found, None, found.ranks), found.efficiency.links


Collectives = CollectiveCosts | LinkCosts


# ---- groups of ranks ----

TRIED_BYTES = 1 << 20
"""Of the call by which groups are compared."""


class RankGroups:
    """The groups of one job.

    Args:
        hosts: number of the host of each rank; (): all are on one.
        costs: of their calls.    kinds: of each host, what its links depend on; (): hosts are equal.
    """

    def __init__(
        self, hosts: Sequence[int] = (), costs: Collectives | None = None, kinds: Sequence[Hashable] = ()
    ) -> None:
        self._hosts, self._costs, self._kinds = tuple(hosts), costs, tuple(kinds)
        self._known: dict[Hashable, list[int]] = {}

    def slowest(self, size: int, stride: int) -> list[int]:
        """The ranks of the slowest of all groups of `size` ranks, `stride` apart.

        Example: on two hosts of three ranks slowest(2, 1) is [2, 3].
        """
        blocks = range(0, len(self._hosts), size * stride)
        shifts = [block + at for block in blocks for at in range(stride)]
        return self._longest("all_reduce", [place * stride for place in range(size)], shifts)

    def farthest(self, sender: int, receiver: int, count: int) -> tuple[int, int]:
        """Of `count` pairs of ranks, of which these are the first, the one whose message takes longest."""
        one, other = self._longest("message", [sender, receiver], range(count))
        return one, other

    def _longest(self, call: str, first: Sequence[int], shifts: Sequence[int]) -> list[int]:
        """Of the groups that lie as the first one does, so many ranks on, that whose call takes longest."""
        costs, key = self._costs, (call, *first, len(shifts))
        if costs is None or len(first) == 1 or len(set(self._hosts)) == 1:
            return [*first]

        def seconds(group: list[int]) -> float:
            if call == "message":
                return costs.message(group[0], group[1], TRIED_BYTES, len(shifts))
            return costs.seconds(call, group, TRIED_BYTES)

        if key not in self._known:
            found = self._unlike([shift + rank for rank in first] for shift in shifts)
            self._known[key] = max(found, key=seconds)
        return self._known[key]

    def _unlike(self, groups: Iterable[list[int]]) -> list[list[int]]:
        """One of each kind of groups: alike are those whose ranks lie alike on hosts of the same kinds."""
        found: dict[tuple[Hashable, ...], list[int]] = {}
        for group in groups:
            hosts = [self._hosts[rank] for rank in group]
            places = {host: place for place, host in enumerate(dict.fromkeys(hosts))}
            kinds = [self._kinds[host] for host in places] if self._kinds else []
            found.setdefault((*(places[host] for host in hosts), *kinds), group)
        return [*found.values()]


# ---- what the context axis and the expert axis exchange ----

TOP = 2
"""Experts of a row: they are not known before a router runs."""

FEW_BYTES = 1024
"""Of numbers of rows, of experts, of weights."""

ROUTED = 35
"""Small operators that sort the rows of a layer of experts and put them back, in forward."""


class SpreadExperts(NamedTuple):
    """The experts of a model: modules called with their rows, their parameters, and a rank's share of all."""

    called: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    spread: float = 1.0


class PricedExchange(NamedTuple):
    """One exchange, the calls of its forward and its backward. `call`: the number of its module call."""

    cause: str
    call: int
    forward: tuple[PricedCollective, ...]
    backward: tuple[PricedCollective, ...]

    def charged(self, call_s: float) -> PricedExchange:
        """The same where each call takes so many seconds more."""
        forward, backward = (
            tuple(each._replace(seconds=each.seconds + each.calls * call_s) for each in calls)
            for calls in (self.forward, self.backward)
        )
        return self._replace(forward=forward, backward=backward)

    @property
    def forward_s(self) -> float:
        """Seconds of the forward."""
        return sum(each.seconds for each in self.forward)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward."""
        return sum(each.seconds for each in self.backward)


def attention_exchange(
    attention: TracedAttention, collectives: Collectives, members: Sequence[int]
) -> PricedExchange:
    """An attention over a sequence that is cut: as a ring or by an exchange of heads, the cheaper one.

    A ring sends keys and values n - 1 times, in backward again, and their gradients n times in f32.
    """
    ranks = len(members)
    queries, keys = attention.queries / ranks, attention.keys / ranks

    def hops(times: int, nbytes: float) -> PricedCollective:
        slowest = max(
            collectives.message(one, other, nbytes)
            for one, other in zip(members, [*members[1:], members[0]], strict=True)
        )
        return PricedCollective("message", "context", 2, times * nbytes, times, times * slowest)

    there = (hops(ranks - 1, keys),)
    ring = PricedExchange("context", attention.call, there, (*there, hops(ranks, keys * 4 / attention.width)))
    if attention.heads % ranks:
        return ring
    one_way = tuple(  # queries and results, keys and values: each an all-to-all
        _exchanged("context", 2, members, nbytes, collectives) for nbytes in (queries, keys / 2)
    )
    heads = PricedExchange("context", attention.call, one_way, one_way)
    return heads if 2 * heads.forward_s <= ring.forward_s + ring.backward_s else ring


def _exchanged(
    axis: str, times: int, members: Sequence[int], nbytes: float, collectives: Collectives
) -> PricedCollective:
    """So many exchanges of all ranks with all others."""
    taken = times * collectives.seconds("all_to_all", members, nbytes)
    return PricedCollective("all_to_all", axis, len(members), times * nbytes, times, taken)


def expert_exchanges(
    traced: TracedStep,
    paths: Collection[str],
    collectives: Collectives,
    members: Sequence[int],
    share: float,
) -> list[PricedExchange]:
    """Rows go once to each rank that has one of their experts, evenly spread, and back; twice, for backward.

    Forward also tells how many rows go, and sends the experts and the weights of each; backward the gradients
    of these weights.

    Args:
        paths: of the modules that are called with the rows of a layer of experts.
        share: of these rows, that a rank has.
    Example: on two ranks a row of two experts goes to 2 * (1 - 1/4) = 1.5 of them.
    """
    ranks = len(members)
    spread = ranks * (1 - (1 - 1 / ranks) ** TOP)
    found = []
    for number, call in enumerate(traced.calls):
        if call.path in paths:
            rows = _exchanged("expert", 2, members, call.nbytes * share * spread, collectives)
            few, one = (_exchanged("expert", times, members, FEW_BYTES, collectives) for times in (3, 1))
            found.append(PricedExchange("experts", number, (rows, few), (rows, one)))
    return found
