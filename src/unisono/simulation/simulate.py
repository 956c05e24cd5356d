"""Runs a plan on a network that exists as data only."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from unisono.engine.base.validation import flag, instance, not_negative, whole
from unisono.networks import Network
from unisono.plans.catalog import steps_of
from unisono.plans.codes import RECV, REDUCE, SEGMENT, SEND, Programs, chunk_code
from unisono.plans.contracts import CONTRACTS
from unisono.plans.custom import checked
from unisono.plans.plan import Copy, Plan, Recv, Reduce, Send, Step, StepFunction
from unisono.schedules import is_file, steps_in
from unisono.simulation.folding import Folding, folded, unfolded
from unisono.simulation.result import Result
from unisono.simulation.run import Conditions, network_of, run
from unisono.simulation.segments import EngineCut, call_code, parts_of

__all__ = ["simulate"]

IN_NETWORK = "in_network"

KEPT_CODES = 1 << 26
"""Numbers of programs that are kept in memory, over all ranks; longer programs are made again per segment."""

LEAST_BLOCK_CODES = 1 << 12

MOST_OWN_STEPS = 1 << 22
"""Of a rank, where the steps are the caller's: a function that never ends is refused."""

CHUNK_CODES = 3
"""Of `chunk_code`."""


def simulate(
    collective: str,
    network: Network | str | Path,
    *,
    algorithm: str | StepFunction | Plan,
    nbytes: float,
    size: int | None = None,
    root: int = 0,
    segment_bytes: int | None = None,
    fold: bool | None = None,
    slow: Mapping[int, float] | None = None,
    delay: Mapping[int, float] | None = None,
    slow_links: Mapping[str | int, float] | None = None,
    lost_links: Collection[str | int] = (),
    timeline: int = 0,
    paced: bool = False,
) -> Result:
    """How long a collective takes on a network, and what limits it.

    A rank runs its steps in their order. A message takes the links of its route: it shares each with all
    others that cross it, max-min fairly. docs/simulate.md says what is modelled and what is not.

    Args:
        network: a network, a file or the name of one that is shipped.
        algorithm: a name of the catalogue, a schedule's file (which is proved), a plan, or a function
            (rank, size, root) -> steps. "in_network": the switches of the network add (all_reduce only); each
            takes an equal part of the buffer.
        nbytes: of the whole buffer; of the larger one where input and output differ (all_gather: the result).
        size: the number of ranks; None: all of the network.
        segment_bytes: the buffer is cut into segments of so many bytes; None: as the engine does.
        fold: simulate one rank of each orbit of the symmetry. None: where that changes nothing.
        slow: rank -> factor of all it does itself.  delay: rank -> seconds until it begins.
        slow_links: name or number of a link -> factor of the time that a byte takes.
        lost_links: names or numbers of links on which nothing arrives.
        timeline: keep so many spans of what ranks did.
        paced: a schedule of TE-CCL keeps its epochs, and switches that are endpoints copy (`paced`).
    Raises:
        SimulationError: the run does not end; the message names the rank, the step and the link.
        PlanError: there is no such algorithm.  ValueError: an argument is out of range.
        OSError: the file of the network or of the schedule cannot be read.
    Example:
        >>> network = un.networks.star(8, cable=un.networks.Cable(5e-6, 1e9))
        >>> round(un.simulate("all_reduce", network, algorithm="ring", nbytes=8).seconds, 6)
        0.000168
    """
    network = network_of(network, size)
    fold = fold if fold is None else flag(fold, "fold")
    size = network.size if size is None else whole(size, "size", 1, network.size)
    network = network.first(size)
    root = whole(root, "root", 0, size - 1)
    nbytes = not_negative(nbytes, "nbytes")
    conditions = Conditions.of(network, slow, delay, slow_links, lost_links, timeline)
    if flag(paced, "paced"):
        return _paced(collective, algorithm, network, nbytes, conditions)
    if algorithm == IN_NETWORK:
        return _in_network(collective, network, nbytes, segment_bytes, conditions)
    return _planned(collective, network, algorithm, nbytes, root, segment_bytes, fold, conditions)


def _planned(
    collective: str,
    network: Network,
    algorithm: str | StepFunction | Plan,
    nbytes: float,
    root: int,
    segment_bytes: int | None,
    fold: bool | None,
    conditions: Conditions,
) -> Result:
    """As `simulate`, of steps that ranks run."""
    size = network.size
    name, function, pieces = _function(collective, algorithm, network, root)
    named = isinstance(algorithm, str) and not is_file(algorithm)
    steps = partial(_program, function, size, root)
    parts = parts_of(collective, steps, size) * pieces
    cut = EngineCut.of(collective, steps, network, range(size), nbytes, parts, segment_bytes)
    programs = Programs(lambda rank: cut.steps(rank, steps(rank)), KEPT_CODES)
    folding = _folding(network, programs, root, fold, conditions, trusted=named)
    most = max(LEAST_BLOCK_CODES, KEPT_CODES * folding.order // size)
    blocks = _Blocks(programs, cut, most, network)
    return run(f"{collective}/{name}", network, blocks.of, folding, conditions, nbytes=nbytes)


def _in_network(
    collective: str, network: Network, nbytes: float, segment_bytes: int | None, conditions: Conditions
) -> Result:
    """All ranks send to the switches that add, and receive the sums; switches come after the ranks."""
    count, size = len(network.switches), network.size
    if collective != "all_reduce" or not count:
        what = collective if count else f"{network.name}, none of whose switches adds"
        raise ValueError(f"{IN_NETWORK} is an algorithm of all_reduce, got {what}")
    cut = EngineCut.of(collective, lambda _: (), network, range(size), nbytes, count, segment_bytes)
    segments, head = cut.segments, chunk_code(cut.chunk_bytes)
    everyone = range(size)
    adds = array("i", [REDUCE, 1, size - 1, size, *everyone, SEND, 1, size, *everyone])
    gives, takes = array("i"), array("i")
    for switch in range(size, size + count):
        gives.extend((SEND, 1, 1, switch))
        takes.extend((RECV, 1, switch))

    def blocks(actor: int) -> Iterator[tuple[array[int], int]]:
        if actor >= size:
            yield head + adds, segments
            return
        yield (
            call_code(network, actor) + head + gives,
            1,
        )  # a segment ahead: the way up and the way down overlap
        if segments > 1:
            yield gives + takes, segments - 1
        yield takes, 1

    return run(
        f"{collective}/{IN_NETWORK}", network, blocks, unfolded(), conditions, nbytes=nbytes, switches=True
    )


def _function(
    collective: str, algorithm: str | StepFunction | Plan, network: Network, root: int
) -> tuple[str, StepFunction, int]:
    """(name, steps, chunks per block) of an algorithm."""
    if instance(collective, str, "collective") not in CONTRACTS:
        raise ValueError(f"no collective {collective!r}: there are {', '.join(CONTRACTS)}")
    hosts = tuple(network.hosts)
    if isinstance(algorithm, str) and not is_file(algorithm):
        return algorithm, steps_of(collective, algorithm, network.size, hosts), 1
    if isinstance(algorithm, str):
        planned = steps_in(algorithm, collective, network.size, root)
        return Path(algorithm).name, planned, planned.parts
    if isinstance(algorithm, Plan):
        parts = whole(algorithm.parts, "the parts of the plan", 1)
        return algorithm.algorithm, _steps_of_plan(algorithm, collective, network.size, root), parts
    if not callable(algorithm):
        raise TypeError(f"algorithm is a {type(algorithm).__name__}, expected a name, a function or a plan")
    name = str(getattr(algorithm, "__name__", "custom"))
    return name, partial(_own_steps, f"{collective}/{name}", algorithm), 1


def _paced(
    collective: str, algorithm: object, network: Network, nbytes: float, conditions: Conditions
) -> Result:
    """A schedule with its times."""
    from unisono.schedules.teccl import read_paced
    from unisono.simulation.paced import run_paced

    if not isinstance(algorithm, str) or not algorithm.endswith(".json"):
        raise ValueError(f"paced: algorithm is {algorithm!r}, expected a file of TE-CCL, which ends in .json")
    schedule, epoch_s = read_paced(algorithm)
    if (schedule.collective, schedule.size) != (collective, network.size):
        given = f"{schedule.collective} of {schedule.size} ranks"
        raise ValueError(f"{algorithm} is {given}, expected {collective} of {network.size}")
    return run_paced(schedule, epoch_s, network, nbytes, conditions)


def _own_steps(what: str, function: StepFunction, rank: int, size: int, root: int) -> Iterator[Step]:
    """The steps of the caller's function, checked one by one."""
    given = function(rank, size, root)
    if not isinstance(given, Iterable):
        raise TypeError(f"{what}: it gives rank {rank} a {type(given).__name__}, expected steps")
    for number, step in enumerate(given):
        where = f"{what}: rank {rank}, step {number}"
        if number == MOST_OWN_STEPS:
            raise ValueError(f"{where}: there are more than {MOST_OWN_STEPS} steps")
        found = checked(where, step)
        _check_peers(where, found, rank, size)
        yield found


def _check_peers(where: str, step: Step, rank: int, size: int) -> None:
    """Refuse ranks that are not there, twice there, or the rank itself where it cannot be."""
    if isinstance(step, Copy):
        return
    peers = step.to if isinstance(step, Send) else (step.frm,) if isinstance(step, Recv) else step.frm
    for peer in peers:
        whole(peer, f"{where}: a rank", 0, size - 1)
    if len(set(peers)) < len(peers):
        raise ValueError(f"{where}: {step} names a rank twice")
    if isinstance(step, Reduce) and not peers:
        raise ValueError(f"{where}: {step} has no contribution")
    if not isinstance(step, Reduce) and rank in peers:
        raise ValueError(f"{where}: {step} is a message from rank {rank} to itself")


def _steps_of_plan(plan: Plan, collective: str, size: int, root: int) -> StepFunction:
    """The steps of a plan of this collective.

    Raises:
        ValueError: it is of another collective, size or root.
    """
    wanted, given = (collective, size, root), (plan.collective, plan.size, plan.root)
    if wanted != given:
        raise ValueError(f"{plan} is a plan of {given}, expected {wanted}: collective, size, root")
    if len(plan.steps) != size:
        raise ValueError(f"{plan} has the steps of {len(plan.steps)} ranks, expected {size}")
    return partial(_own_steps, str(plan), lambda rank, _size, _root: plan.steps[rank])


def _program(function: StepFunction, size: int, root: int, rank: int) -> Iterator[Step]:
    return iter(function(rank, size, root))


def _folding(
    network: Network,
    programs: Programs,
    root: int,
    fold: bool | None,
    conditions: Conditions,
    *,
    trusted: bool,
) -> Folding:
    """How ranks fold; a condition of one rank or link breaks the symmetry."""
    if conditions.uneven:
        if fold:
            raise ValueError("fold is True, but slow or delayed ranks and links break the symmetry")
        return unfolded()
    if fold is False:
        return unfolded()
    return folded(network, programs, root, trusted=trusted or bool(fold))


class _Blocks(NamedTuple):
    """The program of each rank in blocks. most: numbers that the simulator keeps of one rank."""

    programs: Programs
    cut: EngineCut
    most: int
    network: Network

    def of(self, rank: int) -> Iterator[tuple[array[int], int]]:
        """(block, how often it runs). Programs that are not too long are given once for all segments."""
        if call := call_code(self.network, rank):
            yield call, 1
        whole = chunk_code(self.cut.chunk_bytes)
        blocks = self.programs.blocks(rank)
        for block in blocks:
            whole += block
            if len(whole) > self.most:
                break
        else:
            if len(whole) > CHUNK_CODES:
                yield whole, self.cut.segments
            if end := self.cut.end():
                yield end, 1
            return
        yield whole, 1
        yield from ((block, 1) for block in blocks)
        for _ in range(self.cut.segments - 1):
            yield array("i", [SEGMENT]), 1
            yield from ((block, 1) for block in self.programs.blocks(rank))
        if end := self.cut.end():
            yield end, 1
