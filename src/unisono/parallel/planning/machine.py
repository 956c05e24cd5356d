"""The ranks of this job, in numbers: their memory, their hosts, and what operators take on their devices."""

from __future__ import annotations

import functools
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.planner.compute_calibration import ComputeCalibration
from unisono.planner.operator_costs import OperatorCosts, roofline_of

from .device_costs import NEEDED_BYTES, device_costs

__all__ = ["JobMachine", "measure"]

SHARE = 0.9  # of what is free: the rest is for libraries, messages and fragmentation
SIDES = (512, 4096)  # of the matrices whose product is timed
LONG_S = 1e-3  # what is timed takes at least as long
COPIED = 64 << 20  # bytes
ROUNDS = 5
MANY = 100  # small operators
FAST = 1e12
"""FLOP/s in f32 of a device whose operators are all measured: it does that in seconds."""


class JobMachine(NamedTuple):
    """What a job has.

    Args:
        memory: bytes that a rank may use.    hosts: the number of the host of each rank.
        compute: what operators take on its GPUs; None: its hosts compute.
    """

    memory: int
    hosts: tuple[int, ...]
    compute: ComputeCalibration | None

    def with_ranks(self, ranks: int, hosts: int | None) -> JobMachine:
        """The same with other ranks, evenly on so many hosts; None: as here, or on one.

        Raises:
            ValueError: they are not evenly on them.
        """
        if hosts is None and ranks == len(self.hosts):
            return self
        each, left = divmod(ranks, hosts or 1)
        if left:
            raise ValueError(f"plan: {ranks} ranks are not evenly on {hosts} hosts")
        return self._replace(hosts=tuple(rank // each for rank in range(ranks)))


def measure(device_type: str, held: int) -> JobMachine:
    """Measure this job. All ranks call this, and get the same, if there is a process group.

    Args:
        held: bytes that this process has taken already for what is planned.
    """
    alone, on_host = not dist.is_initialized(), device_type == "cpu"
    mine = _host(), _free(device_type), held, None if on_host else _costs(device_type)
    told: list[Any] = [mine] if alone else [None] * dist.get_world_size()
    if not alone:
        dist.all_gather_object(told, mine)
    names = [host for host, *_ in told]
    here = Counter(names)
    memory = min(  # the ranks of a host share what is free there
        int(SHARE * (free // (here[host] if on_host else 1) + taken)) for host, free, taken, _ in told
    )
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    costs = [each for *_, each in told if each is not None]
    return JobMachine(memory, tuple(numbers[name] for name in names), _of_devices(costs))


def _of_devices(costs: list[OperatorCosts]) -> ComputeCalibration | None:
    """What operators take on the slowest of these devices, each of which is a rank's own."""
    if not costs:
        return None
    slowest = max(costs, key=lambda each: each.at("product", SIDES[-1], SIDES[-1], SIDES[-1]))
    return ComputeCalibration("", str(torch.__version__), "", 1, (slowest,))


def _costs(device_type: str) -> OperatorCosts:
    """What operators take on this rank's device: measured, or a roofline of a slow or a full one."""
    flops, low = (_rate(device_type, dtype) for dtype in (torch.float32, torch.bfloat16))
    if device_type == "cuda" and flops > FAST and _free(device_type) > NEEDED_BYTES:
        return device_costs(flops)
    return roofline_of(flops, _copy_rate(device_type), _operator_s(device_type), low=low / flops)


def _copy_rate(device_type: str) -> float:
    """Bytes that are copied in a second, in the best of some rounds."""
    left, right = (torch.ones(COPIED // 4, device=device_type) for _ in range(2))
    return COPIED / _best(lambda: left.copy_(right))


def _rate(device_type: str, dtype: torch.dtype) -> float:
    """FLOP/s of a product of two matrices that are large enough for the clock, the best of some rounds."""
    rate = 0.0
    for side in SIDES:
        left, right = (torch.ones(side, side, device=device_type, dtype=dtype) for _ in range(2))
        seconds = _best(functools.partial(torch.mm, left, right))
        rate = 2.0 * side**3 / seconds
        if seconds > LONG_S:
            break
    return rate


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
