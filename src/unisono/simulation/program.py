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

from collections.abc import Collection, Mapping
from pathlib import Path

from unisono.engine.base.validation import whole
from unisono.networks import Network
from unisono.simulation.folding import unfolded
from unisono.simulation.items import Call, Program, check, check_types
from unisono.simulation.lowered import LoweredProgram
from unisono.simulation.result import Result
from unisono.simulation.run import Conditions, network_of, run

__all__ = ["simulate_program"]


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
    check_types(program)
    network = network_of(network, size)
    several = len(program.ranks) > 1
    least = len(program.ranks) if several else 1
    size = whole(least if several else network.size, "size") if size is None else whole(size, "size")
    size = whole(size, "size", least, network.size)
    if several and size != least:
        raise ValueError(f"the program is one of {least} ranks, got size={size}")
    network = network.first(size)
    groups = [tuple(group) or tuple(range(size)) for group in program.groups]
    check(program, groups, size)
    conditions = Conditions.of(network, slow, delay, slow_links, lost_links, timeline)
    lowered = LoweredProgram(program, groups, network, segment_bytes)
    largest = max((i.nbytes for items in program.ranks for i in items if isinstance(i, Call)), default=0.0)
    folding = unfolded() if several or conditions.uneven else lowered.folding()
    return run(
        program.name,
        network,
        lowered.blocks,
        folding,
        conditions,
        nbytes=largest,
        streams=lowered.streams,
        working=lowered.working,
    )
