"""Programs as codes for the native simulator.

Stream 0 of a rank is its program, and each group that it belongs to has a stream beside it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from unisono.engine.costs.tuner import Tuner
from unisono.networks import Network
from unisono.networks.prices import machine_of
from unisono.plans.catalog import steps_of
from unisono.plans.codes import (
    AWAIT,
    RECV,
    SEND,
    SIGNAL,
    Programs,
    chunk_code,
    compute_code,
    encoded,
    translated,
)
from unisono.plans.plan import Step, StepFunction
from unisono.simulation.folding import Folding, folded, unfolded
from unisono.simulation.items import Call, Compute, RecvFrom, SendTo, Wait
from unisono.simulation.segments import EngineCut, call_code, parts_of

if TYPE_CHECKING:
    from unisono.simulation.items import Program

__all__ = ["LoweredProgram"]

KEPT_CODES = 1 << 24
"""Numbers of programs that are kept while ranks are compared."""


class LoweredProgram:
    """The codes of all streams. Those of a rank are its program, then one for each of its groups.

    The calls of a group run on its stream, in their order. Call number k of a rank signals event 2k when it
    is issued, and 2k + 1 when it has ended.

    Attributes:
        streams: the most that a rank has.  working: those of them that do more than wait.
    """

    def __init__(
        self, program: Program, groups: Sequence[tuple[int, ...]], network: Network, segment_bytes: int | None
    ) -> None:
        self._program, self._groups, self._network = program, groups, network
        self._segment_bytes = segment_bytes
        self._memberships: list[list[int]] = [[] for _ in range(network.size)]
        self._places: list[dict[int, int]] = []
        self._streams: list[dict[int, int]] = []
        for number, group in enumerate(groups):
            self._places.append({rank: place for place, rank in enumerate(group)})
            self._streams.append({})
            for rank in group:
                self._memberships[rank].append(number)
                self._streams[number][rank] = len(self._memberships[rank])
        groups_of_rank = max(map(len, self._memberships))
        computes = any(not isinstance(item, (Call, Wait)) for items in program.ranks for item in items)
        self.streams, self.working = 1 + groups_of_rank, max(1, groups_of_rank + computes)
        self._steps = lru_cache(maxsize=256)(self._steps_of)
        self._cut = lru_cache(maxsize=256)(self._cut_of)
        self._tuners: dict[tuple[int, ...], Tuner] = {}
        self._calls: dict[tuple[int, tuple[int, ...]], dict[int, list[tuple[int, Call]]]] = {}

    def folding(self) -> Folding:
        """How ranks fold that all do the same: by the axes that all calls fold by."""
        items = self._program.of(0)
        network = self._network
        whole = all(group == tuple(range(network.size)) for group in self._groups)
        if not whole or any(isinstance(item, (SendTo, RecvFrom)) for item in items):
            return unfolded()
        calls = {
            (item.collective, item.algorithm or self._chosen(item.collective, item.nbytes, 0), item.root)
            for item in items
            if isinstance(item, Call)
        }
        found = []
        for collective, algorithm, root in sorted(calls):
            steps, _ = self._steps(collective, algorithm, 0, root)
            found.append(folded(network, Programs(steps, KEPT_CODES), root, trusted=True))
        if not found or any(each.order == 1 for each in found):
            return unfolded()
        digits = tuple(
            (axis[0][0], all(moved for _, moved in axis))
            for axis in zip(*(f.digits for f in found), strict=True)
        )
        order = math.prod(size for size, moved in digits if moved)
        return Folding(network.symmetry, digits, order) if order > 1 else unfolded()

    def blocks(self, actor: int) -> Iterator[tuple[array[int], int]]:
        """The blocks of an actor."""
        stream, rank = divmod(actor, self._network.size)
        if not stream:
            return self._items(rank)
        groups = self._memberships[rank]
        return self._calls_of(rank, groups[stream - 1]) if stream <= len(groups) else iter(())

    def _items(self, rank: int) -> Iterator[tuple[array[int], int]]:
        calls = 0
        latest: dict[str, int] = {}
        for item in self._program.of(rank):
            codes = array("i")
            if isinstance(item, Compute):
                codes = compute_code(item.seconds)
            elif isinstance(item, SendTo):
                codes = chunk_code(item.nbytes) + array("i", [SEND, 1, 1, item.peer])
            elif isinstance(item, RecvFrom):
                codes = array("i", [RECV, 1, item.peer])
            elif isinstance(item, Wait):
                if item.handle in latest:  # the call may be one of a group without this rank
                    codes = array("i", [AWAIT, latest[item.handle]])
            elif rank in self._places[item.group]:
                codes.extend((SIGNAL, 2 * calls))
                if not item.handle:
                    codes.extend((AWAIT, 2 * calls + 1))
                latest[item.handle] = 2 * calls + 1
                calls += 1
            if codes:
                yield codes, 1

    def _numbered(self, rank: int) -> dict[int, list[tuple[int, Call]]]:
        """The calls of a rank by group, with their numbers."""
        items, groups = self._program.of(rank), tuple(self._memberships[rank])
        found = self._calls.get((id(items), groups))
        if found is None:
            found = self._calls[id(items), groups] = {group: [] for group in groups}
            mine = (item for item in items if isinstance(item, Call) and item.group in found)
            for number, item in enumerate(mine):
                found[item.group].append((number, item))
        return found

    def _calls_of(self, rank: int, group: int) -> Iterator[tuple[array[int], int]]:
        for number, call in self._numbered(rank)[group]:
            yield array("i", [AWAIT, 2 * number]) + call_code(self._network, rank), 1
            yield from self._call(rank, call)
            yield array("i", [SIGNAL, 2 * number + 1]), 1

    def _call(self, rank: int, call: Call) -> Iterator[tuple[array[int], int]]:
        members, streams = self._groups[call.group], self._streams[call.group]
        algorithm = call.algorithm or self._chosen(call.collective, call.nbytes, call.group)
        steps, _ = self._steps(call.collective, algorithm, call.group, call.root)
        cut = self._cut(call.collective, algorithm, call.group, call.root, call.nbytes)
        size = self._network.size
        place = self._places[call.group][rank]
        whole_program = chunk_code(cut.chunk_bytes)
        for block in encoded(place, cut.steps(place, steps(place))):
            whole_program += translated(block, lambda peer: streams[members[peer]] * size + members[peer])
        yield whole_program, cut.segments
        if end := cut.end():
            yield end, 1

    def _cut_of(self, collective: str, algorithm: str, group: int, root: int, nbytes: float) -> EngineCut:
        steps, parts = self._steps(collective, algorithm, group, root)
        members = self._groups[group]
        return EngineCut.of(collective, steps, self._network, members, nbytes, parts, self._segment_bytes)

    def _hosts(self, group: int) -> tuple[int, ...]:
        return tuple(self._network.hosts[rank] for rank in self._groups[group])

    def _chosen(self, collective: str, nbytes: float, group: int) -> str:
        """The algorithm that the engine would choose."""
        hosts = self._hosts(group)
        tuner = self._tuners.get(hosts)
        if tuner is None:
            tuner = self._tuners[hosts] = Tuner(len(hosts), hosts, machine_of(self._network))
        blocks = collective in ("all_gather", "reduce_scatter")
        return tuner.choose(collective, int(nbytes) // len(hosts) if blocks else int(nbytes))

    def _steps_of(
        self, collective: str, algorithm: str, group: int, root: int
    ) -> tuple[partial[Iterable[Step]], int]:
        """The steps by place in the group, and the chunks of a buffer."""
        members, hosts = self._groups[group], self._hosts(group)
        function = steps_of(collective, algorithm, len(members), hosts)
        steps = partial(_steps, function, len(members), root)
        return steps, parts_of(collective, steps, len(members))


def _steps(function: StepFunction, size: int, root: int, rank: int) -> Iterable[Step]:
    return function(rank, size, root)
