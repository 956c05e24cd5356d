"""Programs of ranks: calls, compute and messages between two ranks, in order, with overlap.

A program is data. It is written by hand or read from JSON, and runs on any network:

    step = [
        Compute(2e-3),
        Call("all_reduce", "ring", 100e6, handle="gradients"),   # goes on beside what follows
        Compute(1e-3),
        Wait("gradients"),
    ]
    simulate_program(Program(ranks=[step]), network)

The calls of a group run in their order, on a stream of the group beside the program. Calls of different
groups share the links, not the processor of a rank.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

import msgspec

from unisono.engine.base.checking import instance, not_negative, whole
from unisono.networks import Network
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
from unisono.simulation.result import Result
from unisono.simulation.run import Conditions, network_of, run
from unisono.simulation.segments import parts_of, segments_of

__all__ = [
    "Call",
    "Compute",
    "Program",
    "RecvFrom",
    "SendTo",
    "Wait",
    "read_program",
    "simulate_program",
    "write_program",
]


KEPT_CODES = 1 << 24
"""Numbers of programs that are kept while ranks are compared."""


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """The rank computes for so many seconds."""

    seconds: float


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A collective of a group.

    Attributes:
        nbytes: as for `simulate`.  group: its number in `Program.groups`.  root: a rank of the group.
        handle: "": the rank waits for the end. A name: it goes on, and `Wait` waits.
    """

    collective: str
    algorithm: str
    nbytes: float
    group: int = 0
    root: int = 0
    handle: str = ""


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """The rank waits for the latest call with this handle."""

    handle: str


class SendTo(msgspec.Struct, frozen=True, tag="send"):
    """A message to a rank; the sender goes on. Messages between two ranks keep their order."""

    peer: int
    nbytes: float


class RecvFrom(msgspec.Struct, frozen=True, tag="recv"):
    """The next message of a rank."""

    peer: int


Item = Compute | Call | Wait | SendTo | RecvFrom


class Program(msgspec.Struct, frozen=True):
    """What all ranks do.

    Attributes:
        ranks: the items of each rank; one list only: all ranks do the same.
        groups: their ranks; an empty one has all ranks. The first one is the default of `Call`.
        name: for people.
    """

    ranks: Sequence[Sequence[Item]]
    groups: Sequence[Sequence[int]] = ((),)
    name: str = "program"

    def of(self, rank: int) -> Sequence[Item]:
        """The items of a rank."""
        return self.ranks[rank if len(self.ranks) > 1 else 0]


_decode = msgspec.json.Decoder(Program).decode


def read_program(path: str | Path) -> Program:
    """A program from JSON, as `write_program` writes it.

    Raises:
        ValueError: it is no program.  OSError: it cannot be read.
    """
    try:
        return _decode(Path(path).read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no program: {error}") from None


def write_program(program: Program, path: str | Path) -> None:
    """Write a program as JSON."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(program), indent=1))


def simulate_program(
    program: Program,
    network: Network | str | Path,
    *,
    size: int | None = None,
    segment_bytes: int | None = None,
    slow: Mapping[int, float] | None = None,
    delay: Mapping[int, float] | None = None,
    slow_links: Mapping[str | int, float] | None = None,
    lost_links: Collection[str | int] = (),
    timeline: int = 0,
) -> Result:
    """How long a program takes on a network; the arguments are those of `simulate`.

    Raises:
        SimulationError: it does not end.
        ValueError: an item is wrong; the message names the rank and the item.
    """
    network = network_of(network, size)
    several = len(instance(program, Program, "program").ranks) > 1
    least = len(program.ranks) if several else 1
    size = whole(least if several and size is None else size or network.size, "size", least, network.size)
    if several and size != least:
        raise ValueError(f"the program is one of {least} ranks, got size={size}")
    network = network.first(size)
    groups = [tuple(group) or tuple(range(size)) for group in program.groups]
    _check(program, groups, size)
    lowered = _Lowered(program, groups, network, segment_bytes)
    conditions = Conditions.of(network, slow, delay, slow_links, lost_links, timeline)
    folding = unfolded() if several or conditions.uneven else lowered.folding()
    return run(program.name, network, lowered.blocks, folding, conditions, streams=1 + len(groups))


def _check(program: Program, groups: Sequence[Sequence[int]], size: int) -> None:
    for number, group in enumerate(groups):
        if len(set(group)) != len(group):
            raise ValueError(f"group {number} has a rank twice")
        for rank in group:
            whole(rank, f"a rank of group {number}", 0, size - 1)
    for rank in range(size if len(program.ranks) > 1 else min(1, size)):
        handles = set()
        for number, item in enumerate(program.of(rank)):
            where = f"{program.name}: rank {rank}, item {number}"
            if isinstance(item, Compute):
                not_negative(item.seconds, f"{where}: seconds")
            elif isinstance(item, Call):
                group = groups[whole(item.group, f"{where}: group", 0, len(groups) - 1)]
                not_negative(item.nbytes, f"{where}: nbytes")
                whole(item.root, f"{where}: root", 0, len(group) - 1)
                handles.add(item.handle)
            elif isinstance(item, Wait):
                if item.handle not in handles:
                    raise ValueError(
                        f"{where} waits for {item.handle!r}, which no call before has as its handle"
                    )
            else:
                whole(item.peer, f"{where}: peer", 0, size - 1)
                if isinstance(item, SendTo):
                    not_negative(item.nbytes, f"{where}: nbytes")


class _Lowered:
    """The codes of all streams: stream 0 is a rank's program, stream 1 + g runs its calls of group g.

    Call number k of a rank signals event 2k when it is issued, and 2k + 1 when it has ended.
    """

    def __init__(
        self, program: Program, groups: Sequence[tuple[int, ...]], network: Network, segment_bytes: int | None
    ) -> None:
        self._program, self._groups, self._network = program, groups, network
        self._segment_bytes = segment_bytes
        self._places = [{rank: place for place, rank in enumerate(group)} for group in groups]
        self._steps = lru_cache(maxsize=256)(self._steps_of)

    def folding(self) -> Folding:
        """How ranks fold that all do the same: by the axes that all calls fold by."""
        items = self._program.of(0)
        network = self._network
        whole = all(group == tuple(range(network.size)) for group in self._groups)
        if not whole or any(isinstance(item, (SendTo, RecvFrom)) for item in items):
            return unfolded()
        calls = {(item.collective, item.algorithm, item.root) for item in items if isinstance(item, Call)}
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
        return self._calls(rank, stream - 1) if stream else self._items(rank)

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
                codes = array("i", [AWAIT, latest[item.handle]])
            elif rank in self._places[item.group]:
                codes.extend((SIGNAL, 2 * calls))
                if not item.handle:
                    codes.extend((AWAIT, 2 * calls + 1))
                latest[item.handle] = 2 * calls + 1
                calls += 1
            if codes:
                yield codes, 1

    def _calls(self, rank: int, group: int) -> Iterator[tuple[array[int], int]]:
        if rank not in self._places[group]:
            return
        number = -1
        for item in self._program.of(rank):
            if not isinstance(item, Call) or rank not in self._places[item.group]:
                continue
            number += 1
            if item.group != group:
                continue
            yield array("i", [AWAIT, 2 * number]), 1
            yield from self._call(rank, item)
            yield array("i", [SIGNAL, 2 * number + 1]), 1

    def _call(self, rank: int, call: Call) -> Iterator[tuple[array[int], int]]:
        members = self._groups[call.group]
        steps, parts = self._steps(call.collective, call.algorithm, call.group, call.root)
        segments = segments_of(self._network, call.nbytes, parts, self._segment_bytes)
        base = (1 + call.group) * self._network.size
        place = self._places[call.group][rank]
        whole_program = chunk_code(call.nbytes / parts / segments)
        for block in encoded(place, steps(place)):
            whole_program += translated(block, lambda peer: base + members[peer])
        yield whole_program, segments

    def _steps_of(
        self, collective: str, algorithm: str, group: int, root: int
    ) -> tuple[partial[Iterable[Step]], int]:
        members = self._groups[group]
        hosts = tuple(self._network.hosts[rank] for rank in members)
        function = steps_of(collective, algorithm, len(members), hosts)
        steps = partial(_steps, function, len(members), root)
        return steps, parts_of(collective, steps, len(members))


def _steps(function: StepFunction, size: int, root: int, rank: int) -> Iterable[Step]:
    return function(rank, size, root)
