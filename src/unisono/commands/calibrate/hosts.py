"""`unisono calibrate --hosts`: measure the network between the hosts of a job, and write it as a file.

Every rank of the job runs it: unisono run --nnodes 2 ... -m unisono calibrate --hosts -o cluster.toml

Measured with collectives of two ranks, the engine's own messages:

    latency     an exchange of 8 bytes, less the overheads: both ranks send, then wait, as in most algorithms;
                in a ping-pong a rank that only waits would also pay for its wake-up
    overheads   of a sender whose messages do not wait, and of a receiver whose messages have come
    rate        the further bytes of a large message, over the further time
    sharing     the same in both directions at once (full or half duplex), from two hosts to one, and from two
                ranks of a host: what the ranks of a host get together
    memory      between ranks of one host: a sender writes small messages and the receiver copies them, large
                ones are only copied; so there are two rates
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from unisono.engine.costs.machine import MachineCalibration, recall
from unisono.engine.environment import env
from unisono.engine.group.group import Group
from unisono.networks.costs import Costs
from unisono.networks.quantities import written_rate, written_time

__all__ = ["HostMeasurements", "measure_hosts", "written"]

SMALL = 8
STAGED = (32 << 10, 96 << 10)
"""Within a host, the sender writes such messages into memory that its receivers have read: it is slow."""
IN_PLACE = 128 << 10
LARGE = (1 << 20, 5 << 20)
"""Two sizes: the rate is their difference over that of their times."""
ROUNDS = 10
"""Exchanges in a row. The quickest quarter of the repeats counts: other programs only make them slower."""
BURST = 8
"""Messages that wait for nobody: an edge holds twice as many."""
REPEATS = 7
ARRIVED_S = 0.02


class Pair(NamedTuple):
    """Between two ranks. Seconds, bytes per second. rate: of large messages; staged: of `STAGED`."""

    one_way_s: float
    send_s: float
    receive_s: float
    rate: float
    staged: float


class HostMeasurements(NamedTuple):
    """What was found.

    Attributes:
        names, ranks, cores: of each host.
        between: of each pair of hosts that was measured; () for one host.
        inside: between two ranks of a host; None: no host has two.
        duplex: "full" or "half".
        incast: how much of the rate two senders to one host get together; fan: two ranks of one sender.
        reduce, copy: bytes per second of a core, by `unisono calibrate`.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    cores: tuple[int, ...]
    between: tuple[tuple[int, int, Pair], ...]
    inside: Pair | None
    duplex: str
    incast: float
    fan: float
    reduce: float
    copy: float


def measure_hosts(world: Group) -> HostMeasurements:
    """Measure; every rank of the group calls it and gets the same result."""
    hosts = world._planner.hosts
    told = world.all_gather_object((socket.gethostname(), len(os.sched_getaffinity(0))))
    members = [[rank for rank, host in enumerate(hosts) if host == each] for each in range(max(hosts) + 1)]
    names = [told[ranks[0]][0] for ranks in members]
    names = [name if names.count(name) == 1 else f"{name}-{at}" for at, name in enumerate(names)]
    leaders = [ranks[0] for ranks in members]
    pairs = [(at, at + 1) for at in range(len(leaders) - 1)]
    if len(leaders) > 2:
        pairs.append((0, len(leaders) - 1))
    between = tuple((a, b, _pair(world, leaders[a], leaders[b])) for a, b in pairs)
    crowd = next((ranks for ranks in members if len(ranks) > 1), None)
    inside = _pair(world, crowd[0], crowd[1]) if crowd else None
    duplex, incast, fan = "full", 1.0, 1.0
    if between:
        alone = between[0][2].rate
        duplex = "full" if _both_ways(world, leaders[0], leaders[1]) > 1.4 * alone else "half"
        if len(leaders) > 2:
            incast = _together(world, [(leaders[0], leaders[1]), (leaders[2], leaders[1])]) / alone
        if len(members[0]) > 1 and len(members[1]) > 1:
            fan = _together(world, list(zip(members[0][:2], members[1][:2], strict=True))) / alone
    machine = _machine(world)
    return HostMeasurements(
        tuple(names),
        tuple(map(len, members)),
        tuple(told[ranks[0]][1] for ranks in members),
        between,
        inside,
        duplex,
        incast,
        fan,
        machine.reduce.all_memory,
        machine.copy.all_memory,
    )


def _machine(world: Group) -> MachineCalibration:
    mine = recall(env.read()).calibration if world.rank == 0 else None
    text = json.dumps([mine.reduce.all_memory, mine.copy.all_memory]) if mine else ""
    reduce, copy = json.loads(world.all_gather_object(text)[0])
    import msgspec

    base = MachineCalibration()
    return msgspec.structs.replace(
        base,
        reduce=msgspec.structs.replace(base.reduce, all_memory=reduce),
        copy=msgspec.structs.replace(base.copy, all_memory=copy),
    )


def _pair(world: Group, one: int, other: int) -> Pair:
    """Measure between two ranks; all ranks get the result."""
    group = world.subgroup((one, other))
    found = None
    if group is not None:
        with group:
            trip = statistics.quantiles((_exchange(group) for _ in range(6 * REPEATS)), n=4)[0]
            send_s, receive_s = _bursts(group)
            short, long = (_quickest(partial(_timed, group, nbytes)) for nbytes in LARGE)
            rate = (LARGE[1] - LARGE[0]) / max(long - short, 1e-9)
            low, high = (_quickest(partial(_timed, group, nbytes)) for nbytes in STAGED)
            staged = (STAGED[1] - STAGED[0]) / max(high - low, 1e-9)
            found = Pair(trip, send_s, receive_s, rate, staged)
    return Pair(*world.all_gather_object(found and tuple(found))[one])


def _quickest(work: Callable[[], float]) -> float:
    """The shortest of some repeats: other programs only make them longer."""
    work()
    return min(work() for _ in range(REPEATS))


def _exchange(group: Group) -> float:
    """Seconds until each of two ranks has a message of the other."""
    x, both = np.zeros(SMALL, np.uint8), np.zeros((2, SMALL), np.uint8)
    group.barrier()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        group.all_gather(both, x, algorithm="direct")
    return (time.perf_counter() - start) / ROUNDS


def _bursts(group: Group) -> tuple[float, float]:
    """The overhead of a sender, and that of a receiver, by both ranks' clocks."""
    x = np.zeros(SMALL, np.uint8)
    sent: list[float] = []
    taken: list[float] = []
    for _ in range(4 * REPEATS):
        group.barrier()
        if group.rank == 1:
            time.sleep(ARRIVED_S)
        start = time.perf_counter()
        for _ in range(BURST):
            group.broadcast(x, 0)
        (taken if group.rank else sent).append((time.perf_counter() - start) / BURST)
    medians = group.all_gather_object(statistics.median(taken if group.rank else sent))
    return float(medians[0]), float(medians[1])


def _timed(group: Group, nbytes: int) -> float:
    """Seconds until a large message has come and a small one went back."""
    x, answer = np.zeros(nbytes, np.uint8), np.zeros(1, np.uint8)
    group.barrier()
    start = time.perf_counter()
    group.broadcast(x, 0)
    group.broadcast(answer, 1)
    return time.perf_counter() - start


def _both_ways(world: Group, one: int, other: int) -> float:
    """Bytes per second of two ranks that send to each other at once, together."""
    group = world.subgroup((one, other))
    found = 0.0
    if group is not None:
        with group:
            short, long = (_quickest(partial(_swapped, group, nbytes)) for nbytes in LARGE)
            found = 2 * (LARGE[1] - LARGE[0]) / max(long - short, 1e-9)
    return float(world.all_gather_object(found)[one])


def _swapped(group: Group, nbytes: int) -> float:
    """Seconds until each of two ranks has a large message of the other."""
    x, both = np.zeros(nbytes, np.uint8), np.zeros((2, nbytes), np.uint8)
    group.barrier()
    start = time.perf_counter()
    group.all_gather(both, x, algorithm="direct")
    group.barrier()
    return time.perf_counter() - start


def _together(world: Group, ways: list[tuple[int, int]]) -> float:
    """Bytes per second of several senders at once, all together."""
    groups = [(way, world.subgroup(way)) for way in ways]
    spent: list[float] = []
    for _ in range(REPEATS):
        world.barrier()
        start = time.perf_counter()
        works = [
            group.broadcast(np.zeros(LARGE[1], np.uint8), 0, async_op=True)
            for _, group in groups
            if group is not None
        ]
        for work in works:
            work.wait()
        spent.append(max(world.all_gather_object(time.perf_counter() - start)))
    for _, group in groups:
        if group is not None:
            group.close()
    return len(ways) * LARGE[1] / statistics.median(spent)


# ---- the file ----------------------------------------------------------------------------------------


def costs_of(measured: HostMeasurements) -> Costs:
    """The costs of a rank."""
    pair = measured.between[0][2] if measured.between else measured.inside
    assert pair is not None
    return Costs(
        o_send_s=pair.send_s,
        o_recv_s=pair.receive_s,
        reduce_s_per_byte=1 / measured.reduce,
        copy_s_per_byte=1 / measured.copy,
    )


def written(measured: HostMeasurements) -> str:
    """The network as TOML.

    Equal hosts become a star, on which `-n` may ask for more of them; others are written one by one.
    """
    costs = costs_of(measured)
    lines = [
        f"# Measured {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC between {', '.join(measured.names)}"
    ]
    if measured.incast != 1.0:
        lines.append(f"# two senders to one host: {measured.incast:.2f} of the rate of one, together")
    if measured.fan != 1.0:
        lines.append(f"# two ranks of one host: {measured.fan:.2f} of the rate of one, together")
    uniform = len(set(measured.ranks)) == 1 and len(set(measured.cores)) == 1 and _even(measured)
    lines += _star(measured) if uniform else _by_name(measured)
    lines += [
        "",
        "[costs]",
        f'send = "{written_time(costs.o_send_s)}"',
        f'receive = "{written_time(costs.o_recv_s)}"',
        f'reduce = "{written_rate(measured.reduce)}"',
        f'copy = "{written_rate(measured.copy)}"',
        *_inside_costs(measured),
    ]
    return "\n".join([*lines, ""])


def _inside_costs(measured: HostMeasurements) -> list[str]:
    """What messages within a host cost. What a staged byte takes longer is the writing."""
    inside = measured.inside
    if inside is None:
        return []
    writing = max(1 / inside.staged - 1 / inside.rate, 1e-12)
    in_place = f", in_place = {IN_PLACE}" if min(measured.cores) >= max(measured.ranks) else ""
    times = f'send = "{written_time(inside.send_s)}", receive = "{written_time(inside.receive_s)}"'
    rates = f'write = "{written_rate(1 / writing)}", copy = "{written_rate(inside.rate)}"'
    return [f"inside = {{ {times}, {rates}{in_place} }}"]


def _even(measured: HostMeasurements) -> bool:
    rates = [pair.rate for _, _, pair in measured.between] or [1.0]
    return max(rates) <= 1.25 * min(rates)


def _cable(pairs: list[Pair]) -> tuple[float, float]:
    """Latency of one cable of the two between hosts, and the rate."""
    pair = min(pairs, key=lambda pair: pair.one_way_s)
    latency = max(pair.one_way_s - pair.send_s - pair.receive_s, 1e-7)
    return latency / 2, statistics.median(pair.rate for pair in pairs)


def _inner(measured: HostMeasurements) -> str:
    inside = measured.inside
    if inside is None:
        return ""
    latency = max(inside.one_way_s - inside.send_s - inside.receive_s, 1e-8)
    memory = max(measured.copy * max(measured.cores), inside.rate)  # of all cores; a rank's own is in [costs]
    return f'{{ latency = "{written_time(latency)}", rate = "{written_rate(memory)}" }}'


def _star(measured: HostMeasurements) -> list[str]:
    lines = ['name = "measured"', *(['grows = "fabric.hosts"'] if measured.between else [])]
    lines += ["", "[hosts]", f"ranks = {measured.ranks[0]}", f"cores = {measured.cores[0]}"]
    if measured.inside is not None:
        lines += ['inside = "memory"', f"inner = {_inner(measured)}"]
    lines += ["", "[fabric]", 'kind = "star"', f"hosts = {len(measured.names)}"]
    if measured.between:
        latency, rate = _cable([pair for _, _, pair in measured.between])
        duplex = ', duplex = "half"' if measured.duplex == "half" else ""
        lines.append(
            f'cable = {{ latency = "{written_time(latency)}", rate = "{written_rate(rate)}"{duplex} }}'
        )
    return lines


def _by_name(measured: HostMeasurements) -> list[str]:
    lines = ['name = "measured"']
    for name, ranks, cores in zip(measured.names, measured.ranks, measured.cores, strict=True):
        lines += ["", "[[host]]", f"name = {json.dumps(name)}", f"ranks = {ranks}", f"cores = {cores}"]
        if ranks > 1 and measured.inside is not None:
            lines.append(f"memory = {_inner(measured)}")
    lines += ["", "[[switch]]", 'name = "switch"']
    for at, name in enumerate(measured.names):
        latency, rate = _cable([pair for a, b, pair in measured.between if at in (a, b)])
        best = max(pair.rate for a, b, pair in measured.between if at in (a, b))
        lines += ["", "[[cable]]", f'between = [{json.dumps(name)}, "switch"]']
        lines += [f'latency = "{written_time(latency)}"', f'rate = "{written_rate(max(rate, best))}"']
        if measured.duplex == "half":
            lines.append('duplex = "half"')
    return lines
