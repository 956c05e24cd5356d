"""The ranks of this job, in numbers: their memory, their speed, and how many share a host."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.engine.costs.machine import recall
from unisono.engine.environment import env
from unisono.parallel.layouts.cost import Link

from .step_time import RankSpeed

__all__ = ["JobMachine", "measure"]

SHARE = 0.9  # of what is free: the rest is for libraries, messages and fragmentation
SIDE = 512  # of the matrices whose product is timed
ROUNDS = 5
MANY = 100  # small operators


class JobMachine(NamedTuple):
    """What a job has.

    Args:
        ranks: of the job.    memory: bytes that a rank may use.    speed: of a rank.
        told: where the speed comes from.
    """

    ranks: int
    memory: int
    speed: RankSpeed
    told: str


def measure(device_type: str, held: int) -> JobMachine:
    """Measure this job. All ranks call this, and get the same, if there is a process group.

    Args:
        held: bytes that this process has taken already for what is planned.
    """
    alone = not dist.is_initialized()
    mine = _host(), _free(device_type), held, _operator_s(device_type), _rate(device_type)
    told: list[Any] = [mine] if alone else [None] * dist.get_world_size()
    if not alone:
        dist.all_gather_object(told, mine)
    hosts = Counter(host for host, *_ in told)
    shared = device_type == "cpu"  # the ranks of a host share what is free there
    memory = min(
        int(SHARE * (free // (hosts[host] if shared else 1) + taken)) for host, free, taken, *_ in told
    )
    flops, operator_s = min(rate for *_, rate in told), max(seconds for *_, seconds, _ in told)
    speed, how = speed_of(flops, operator_s, min(hosts.values()), device_type)
    return JobMachine(len(told), memory, speed, how)


def speed_of(flops: float, operator_s: float, host: int, device_type: str) -> tuple[RankSpeed, str]:
    """A rank's speed, with the links of this machine's calibration, and where it comes from."""
    loaded = recall(env.read(strict=False))
    figures = loaded.calibration
    wire = figures.between_networks()
    inside = Link(figures.flag_s + figures.call_s, 1 / min(figures.give, figures.take))
    between = Link(wire.tcp_s, 1 / wire.tcp)
    rate = figures.copy.at("memory")
    links = (
        "calibrated links" if figures.measured_here else "links by default, unisono calibrate measures them"
    )
    speed = RankSpeed(flops, rate, operator_s, inside, between, host, hides=device_type == "cuda")
    return speed, f"a product at {flops / 1e9:.3g} GFLOP/s, {links}"


def _rate(device_type: str) -> float:
    """FLOP/s of a product of two matrices, the best of some rounds."""
    left, right = (torch.ones(SIDE, SIDE, device=device_type) for _ in range(2))
    return 2.0 * SIDE**3 / _best(lambda: left @ right)


def _operator_s(device_type: str) -> float:
    """Seconds of a small operator of which autograd keeps a record, the best of some rounds."""
    small = torch.ones(8, device=device_type, requires_grad=True)

    def several() -> torch.Tensor:
        value = small
        for _ in range(MANY):
            value = value * 2.0
        return value

    return _best(several) / MANY


def _best(work: Callable[[], torch.Tensor]) -> float:
    best = math.inf
    for _ in range(ROUNDS):
        began = time.perf_counter()
        float(work().flatten()[0].detach())
        best = min(best, time.perf_counter() - began)
    return best


def _host() -> str:
    kernel = Path("/proc/sys/kernel/random/boot_id")
    return f"{os.uname().nodename} {kernel.read_text().strip() if kernel.exists() else ''}"


def _free(device_type: str) -> int:
    """Bytes that this process could still take on its device; on a host that all its processes could."""
    if device_type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min(available, *_of_control_group())


def _of_control_group() -> list[int]:
    """What the control group of this process allows beside what it has; nothing where it has no limit."""
    root = Path("/sys/fs/cgroup")
    try:
        place = next(
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        folder = root / place.lstrip("/")
        folder = folder if (folder / "memory.max").exists() else root
        most, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except (OSError, StopIteration):
        return [1 << 62]
    return [1 << 62] if most == "max" else [max(0, int(most) - int(used))]
