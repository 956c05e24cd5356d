"""Schedules with times (TE-CCL's epochs) on a network: a message leaves in its epoch, and switches copy.

TE-CCL's model: an epoch is as long as a chunk on a link. A switch forwards the bytes of a message as they
come, and may send copies to several ranks, in this epoch or in later ones: the sender's link is crossed once.
So the switches of the network run programs, too. What tells a switch of a message is one without bytes before
it. A copy leaves when the message would have come if it had been sent in the epoch that the schedule says.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from unisono.networks import Network
from unisono.plans.codes import RECV, SEND, chunk_code, until_code
from unisono.schedules.teccl import Piece, TecclSchedule
from unisono.simulation.folding import unfolded
from unisono.simulation.result import Result
from unisono.simulation.run import Conditions, run

__all__ = ["run_paced"]


MOST_WAITING = 1 << 12
"""Messages that a rank has not taken yet. Those of a schedule wait until they are needed."""


class PacedMessage(NamedTuple):
    """A message that an endpoint sends at a time; switches are the endpoints after the ranks."""

    start_s: float
    piece: Piece
    source: int
    target: int


class PacedEndpoint:
    """The program of a rank or a switch: what it sends and when, and from whom each piece comes first."""

    def __init__(self, *, switch: bool) -> None:
        self.switch = switch
        self.sends: list[PacedMessage] = []
        self.coming: dict[int, list[Piece]] = {}
        self.origin: dict[Piece, int] = {}

    def codes(self, chunk: float, ranks: int) -> Iterator[array[int]]:
        """The program: a piece is received before it is sent on, and all that is left at the end.

        chunk: its bytes.  ranks: endpoints from this number on are switches.
        """
        taken = dict.fromkeys(self.coming, 0)
        held: set[Piece] = set()

        def take(source: int) -> array[int]:
            held.add(self.coming[source][taken[source]])
            taken[source] += 1
            before = array("i", [RECV, 1, source]) if self.switch and taken[source] > 1 else array("i")
            return before + array("i", [RECV, 1, source])

        for copy in self.sends:
            while copy.piece in self.origin and copy.piece not in held:
                yield take(self.origin[copy.piece])
            yield until_code(copy.start_s)
            if copy.target >= ranks:
                yield chunk_code(0.0) + array("i", [SEND, 1, 1, copy.target])
            yield chunk_code(chunk) + array("i", [SEND, 1, 1, copy.target])
        for source, pieces in self.coming.items():
            while taken[source] < len(pieces):
                yield take(source)
            if self.switch:
                yield array("i", [RECV, 1, source])  # the bytes of the last one


def run_paced(
    schedule: TecclSchedule, epoch_s: float, network: Network, nbytes: float, conditions: Conditions
) -> Result:
    """Simulate it. nbytes: of the whole buffer, for which the epochs are meant.

    Raises:
        SimulationError: the run does not end.
    """
    chunk = nbytes / (schedule.size * schedule.parts)
    ends = [PacedEndpoint(switch=n >= network.size) for n in range(network.size + len(network.switches))]
    for copy in sorted(_copies(schedule, epoch_s, network)):
        ends[copy.source].sends.append(copy)
        target = ends[copy.target]
        target.coming.setdefault(copy.source, []).append(copy.piece)
        target.origin.setdefault(copy.piece, copy.source)
    for rank in range(network.size):  # what a rank gives it does not wait for
        ends[rank].origin = {piece: source for piece, source in ends[rank].origin.items() if piece[0] != rank}

    def blocks(actor: int) -> Iterator[tuple[array[int], int]]:
        for block in ends[actor].codes(chunk, network.size):
            yield block, 1

    name = f"{schedule.collective}/{schedule.name}"
    return run(
        name, network, blocks, unfolded(), conditions, nbytes=nbytes, switches=True, window=MOST_WAITING
    )


def _copies(schedule: TecclSchedule, epoch_s: float, network: Network) -> Iterator[PacedMessage]:
    """All messages: those over a switch are one to it, and one from it for each rank."""
    links, names = network.links, {switch.name: n for n, switch in enumerate(network.switches)}
    crossed: set[tuple[Piece, int, int]] = set()
    for flow in schedule.flows:  # in the order of epochs
        start = flow.epoch * epoch_s
        route = network.route(flow.source, flow.target)
        switch = next((names[links[n].ends[1]] for n in route[:-1] if links[n].ends[1] in names), None)
        if switch is None:
            yield PacedMessage(start, flow.piece, flow.source, flow.target)
            continue
        endpoint = network.size + switch
        if (flow.piece, flow.source, switch) not in crossed:
            crossed.add((flow.piece, flow.source, switch))
            yield PacedMessage(start, flow.piece, flow.source, endpoint)
        way = network.route(flow.source, endpoint)
        yield PacedMessage(start + sum(links[n].latency_s for n in way), flow.piece, endpoint, flow.target)
