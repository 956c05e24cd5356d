"""What `grid.py` measures, as a network of the simulator: its parameters, and the fit of them.

A placement is a star of hosts. Times of messages and calls are one set of numbers; what a byte costs is one
set for each size of the buffer (`networks.ByteCosts`), as caches have it. The fit minimizes the sum of the
absolute logarithms of predicted over measured times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono import networks
from unisono.commands.bench.cases import OPERATIONS
from unisono.networks import ByteCosts, Cable, Costs, InsideCosts, Network
from unisono.simulation import Call, Program, Result, simulate_program

PLACEMENTS = {"2": (1, 2), "4": (1, 4), "8": (1, 8), "2x1": (2, 1), "2x2": (2, 2), "4x1": (4, 1)}
"""Name -> hosts, ranks on each."""

SIZES = (4, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)

LINK_BURST_BYTES = 256 << 10
"""What a link passes at once after a pause (`hosts.Node.shape`)."""

CALLS = (2, 4)
"""Calls in a simulation: the first ones begin with idle ranks and full bursts."""


class Cell(NamedTuple):
    """What was measured: microseconds."""

    placement: str
    collective: str
    algorithm: str
    nbytes: int
    us: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.placement:>4} {self.collective}/{self.algorithm} {self.nbytes} B"


TIMES: dict[str, float] = {
    "call_s": 4e-7,
    "wake_s": 2e-7,
    "inside_send_s": 5e-8,
    "inside_recv_s": 5e-8,
    "inside_latency_s": 1e-7,
    "o_send_s": 3e-6,
    "o_recv_s": 2e-6,
    "latency_s": 3e-6,
}
"""Parameters of a network that do not depend on the size of a buffer, and where the fit begins."""

BYTES: dict[str, float] = {
    "reduce": 2.2e-11,
    "copy": 2e-11,
    "write": 2.2e-11,
    "read": 2.2e-11,
    "in_place": 6e-11,
    "send": 5e-11,
}
"""Seconds per byte: `networks.ByteCosts`."""

LARGER = tuple(size // 2 for size in SIZES[4:])
"""Buffers larger than each of these have costs per byte of their own, within one host."""

IN_PLACE_BYTES = 128 << 10
"""From this size on the engine passes a message without a copy of the sender (`csrc/engine/executor.cpp`)."""

LINK_BYTES_PER_S = 1e9 / 8 * 1448 / 1514
"""What a link of `RATE` carries beside the headers of Ethernet, IP and TCP."""

TIE = 0.05
"""How much a parameter's distance from where the fit began counts, beside the errors of cells."""

Values = dict[str, float]
"""Parameters by name; "copy@524288" is that of buffers larger than this."""


def network_of(placement: str, values: Values) -> Network:
    """The network with these parameters."""
    count, each = PLACEMENTS[placement]
    given, cores = {**TIMES, **BYTES, **values}, len(os.sched_getaffinity(0))
    larger = [
        ByteCosts(
            beyond_bytes=size,
            **{name: values[f"{name}@{size}"] for name in BYTES if f"{name}@{size}" in values},
        )
        for size in LARGER
    ]
    costs = Costs(
        **{name: given[name] for name in ("o_send_s", "o_recv_s", "call_s", "wake_s")},
        o_s_per_byte=given["send"],
        reduce_s_per_byte=given["reduce"],
        copy_s_per_byte=given["copy"],
        inside=InsideCosts(
            send_s=given["inside_send_s"],
            recv_s=given["inside_recv_s"],
            write_s_per_byte=given["write"],
            s_per_byte=given["read"],
            in_place_bytes=IN_PLACE_BYTES,
            in_place_s_per_byte=given["in_place"],
        ),
        larger=tuple(larger),
    )
    return networks.star(
        count,
        ranks=each,
        cable=Cable(given["latency_s"] / 2, LINK_BYTES_PER_S, burst_bytes=LINK_BURST_BYTES),
        inner=Cable(given["inside_latency_s"], 1e12),
        cores=cores,
        shared_cores=cores,
        costs=costs,
    )


def predict(net: Network, cell: Cell) -> float:
    """Microseconds of a call among many, as the benchmark times it.

    A collective that a rank may leave before the others have come begins on all ranks at once. Calls of the
    others follow one another, so what counts is how much longer some more of them take.
    """
    call = Call(cell.collective, cell.algorithm, cell.nbytes)
    if not OPERATIONS[cell.collective].synchronizing:
        found = simulate_program(Program(ranks=[[call]]), net)
        return max(found.seconds, busiest(net, found)) * 1e6
    few, many = (simulate_program(Program(ranks=[[call] * count]), net) for count in CALLS)
    return max((many.seconds - few.seconds) / (CALLS[1] - CALLS[0]), busiest(net, many) / CALLS[1]) * 1e6


def busiest(net: Network, found: Result) -> float:
    """Seconds of the busiest link at its rate: its burst is used up before the clock runs."""
    return max((use.nbytes / net.links[use.link].bytes_per_s for use in found.links), default=0.0)


def fitted(placement: str, cells: Sequence[Cell]) -> Values:
    """The parameters with the smallest errors on these cells, step by step to larger buffers."""
    count, each = PLACEMENTS[placement]
    inside = [name for name in TIMES if name.startswith("inside")] if each > 1 else []
    between = ["o_send_s", "o_recv_s", "latency_s"] if count > 1 else []
    bytewise = [name for name in BYTES if name != "send"] if count == 1 else ["reduce", "copy"]
    small = [cell for cell in cells if cell.nbytes <= LARGER[0]]
    crowded = count * each > len(os.sched_getaffinity(0))
    begin = {}
    if crowded:
        begin = {"wake_s": 2e-6} if count == 1 else {"wake_s": 5e-6, "o_send_s": 8e-6, "o_recv_s": 1e-5}
    values = improved(placement, begin, ["call_s", "wake_s", *inside, *between, *bytewise[:-1]], small)
    for size, next_size in zip(LARGER, (*LARGER[1:], 1 << 62), strict=True) if count == 1 else ():
        begin = {f"{name}@{size}": BYTES[name] for name in bytewise}
        mine = [cell for cell in cells if size < cell.nbytes <= next_size]
        values = improved(placement, {**values, **begin}, list(begin), mine)
    return values


def improved(placement: str, values: Values, names: list[str], cells: Sequence[Cell]) -> Values:
    """The same parameters, with those of these names fitted to cells."""
    given = {**TIMES, **BYTES, **values}

    def with_point(point: NDArray[np.float64]) -> Values:
        return {**values, **dict(zip(names, map(float, np.exp(point)), strict=True))}

    def errors(point: NDArray[np.float64]) -> NDArray[np.float64]:
        net = network_of(placement, with_point(point))
        found = [np.log(predict(net, cell) / cell.us) for cell in cells]
        return np.array([*found, *(TIE * (point - start))])  # what no cell tells stays where it was

    start = np.log([given[name] for name in names])
    point, cost = minimized(errors, start)
    print(f"  {placement}: {', '.join(names)}: mean error {cost:.4f}", flush=True)
    return with_point(point)


def minimized(
    errors: Callable[[NDArray[np.float64]], NDArray[np.float64]], start: NDArray[np.float64], rounds: int = 16
) -> tuple[NDArray[np.float64], float]:
    """Levenberg and Marquardt's method on errors of which large ones count less; the mean error, too."""
    point, damping = start.copy(), 1e-2
    now = errors(point)
    for _ in range(rounds):
        weights = np.sqrt(1 / np.maximum(np.abs(now), 0.05))  # the sum of absolute errors
        slopes = np.empty((now.size, point.size))
        for k in range(point.size):
            moved = point.copy()
            moved[k] += 0.05
            slopes[:, k] = (errors(moved) - now) / 0.05
        matrix, right = slopes * weights[:, None], -now * weights
        better = False
        for _ in range(4):
            normal = matrix.T @ matrix
            normal[np.diag_indices_from(normal)] += damping * (np.diag(normal) + 1e-6)
            step = np.clip(np.linalg.solve(normal, matrix.T @ right), -1.5, 1.5)
            then = errors(point + step)
            if np.abs(then).mean() < np.abs(now).mean():
                gain = np.abs(now).mean() - np.abs(then).mean()
                point, now, damping, better = point + step, then, damping / 4, gain > 1e-4
                break
            damping *= 6
        if not better:
            break
    return point, float(np.abs(now).mean())
