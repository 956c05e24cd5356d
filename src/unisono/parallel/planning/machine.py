"""The hosts and ranks of a job, as they are given, and in numbers: memory, speed, what operators take there.

On the GPU of this machine that is measured in some seconds. It runs what the host has queued. So each call is
timed on the device while a queue is full, and apart from it the host's seconds of operators too small for the
device to count.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from unisono.engine.base.validation import instance, positive, whole
from unisono.engine.environment.env import parse_size
from unisono.parallel.calibration.operators import call_of
from unisono.planner.compute_calibration import ComputeCalibration
from unisono.planner.hardware import Cluster, Hardware, find_cluster, find_hardware
from unisono.planner.operator_costs import (
    BY_BYTES,
    BY_ELEMENTS,
    OperatorCosts,
    operator_costs_of,
    roofline_of,
    tables,
)
from unisono.torch.control_data import on_every_rank

if TYPE_CHECKING:
    from unisono.parallel.plan import Plan

MOST_RANKS = 4096
"""Of a job: prices of collectives of more take long."""

MOST_SPEED = 1e6


def bytes_of(memory: object) -> int | None:
    """Bytes, from a number or a text such as "16G".

    Raises:
        ValueError: they are none.
    """
    if isinstance(memory, str):
        try:
            memory = parse_size(memory)
        except ValueError as error:
            raise ValueError(f"plan: memory is {memory!r}, expected {error}") from None
    if memory is not None and (type(memory) is not int or not 1 <= memory < 1 << 62):
        raise ValueError(f'plan: memory is {memory!r}, expected bytes of a rank, such as 16 << 30 or "16G"')
    return memory


@dataclass(frozen=True, kw_only=True)
class JobHost:
    """One host of a job.

    Args:
        ranks: on it.
        memory: bytes of each of them, or a text such as "16G"; None: as `plan(memory=...)` says, or what the
            hardware leaves for plans.
        speed: the rate at which each of them computes, beside a rank of this job or a GPU of the hardware:
            0.5 takes twice as long.
        hardware: GPUs of the host, which this machine need not have: a name such as "a100-80g", a file, or a
            `Hardware`. None: ranks compute as those of this job.
    Raises:
        TypeError, ValueError: wrong arguments.    OSError: the file cannot be read.
    Example: up.plan(..., hosts=[up.JobHost(ranks=4), up.JobHost(ranks=4, memory="8G", speed=0.5)])
    """

    ranks: int
    memory: int | str | None = None
    speed: float = 1.0
    hardware: Hardware | str | Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ranks, bool) or isinstance(self.speed, bool):
            raise TypeError("JobHost: ranks and speed are numbers, not True or False")
        whole(self.ranks, "JobHost: ranks", 1, MOST_RANKS)
        if not 1 / MOST_SPEED <= positive(self.speed, "JobHost: speed") <= MOST_SPEED:
            raise ValueError(f"JobHost: speed is {self.speed}, expected {1 / MOST_SPEED:g} to {MOST_SPEED:g}")
        memory, gpu = bytes_of(self.memory), self.gpu
        if gpu is not None and self.ranks > gpu.ranks:
            raise ValueError(f"JobHost: ranks is {self.ranks}, and a host of {gpu.name} has {gpu.ranks} GPUs")
        if gpu is not None:
            gpu.check_limit(memory or 0, "JobHost: ")

    @property
    def gpu(self) -> Hardware | None:
        """Its hardware, read; None: as in this job."""
        given = instance(self.hardware, (Hardware, str, Path, type(None)), "JobHost: hardware")
        return None if given is None else find_hardware(given)


def hosts_of(given: object, ranks: int | None) -> int | list[JobHost] | None:
    """The hosts of `plan(hosts=...)`, checked: how many equal ones, or each of them; None: as in this job.

    Args:
        given: a number; a list whose entries are ranks of a host or a JobHost; or hardware as
            `unisono plan --hosts` takes it: "4xa100-80g", a file, or pairs of a number and hardware.
        ranks: of all hosts, if they are given. A list has to have as many; equal hosts of hardware may have
            more, of which they are evenly taken.
    Raises:
        TypeError, ValueError: wrong arguments.    OSError: a file cannot be read.
    """
    if given is None or (type(given) is int and given >= 1):
        return given
    pairs = isinstance(given, (list, tuple)) and bool(given) and isinstance(given[0], (list, tuple))
    if isinstance(given, (str, Path)) or pairs:
        return _of_cluster(find_cluster(given), ranks)  # type: ignore[arg-type]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise ValueError(
            f"plan: hosts is {given!r}, expected a number of at least 1, a list: ranks, or a JobHost, each, "
            'or hardware such as "4xa100-80g"'
        )
    found = [each if isinstance(each, JobHost) else JobHost(ranks=each) for each in given]
    have = sum(each.ranks for each in found)
    if not found or have > MOST_RANKS:
        raise ValueError(f"plan: hosts have {have} ranks, expected 1 to {MOST_RANKS}")
    if ranks not in (None, have):
        raise ValueError(f"plan: hosts have {have} ranks, and ranks is {ranks}")
    if len({each.hardware is None for each in found}) > 1:
        raise ValueError(
            "plan: some hosts have hardware, and others are as this one; write it for all or for none"
        )
    return found


def _of_cluster(cluster: Cluster, ranks: int | None) -> list[JobHost]:
    """Each host of a cluster; equal ones have as many of `ranks`."""
    if cluster.ranks > MOST_RANKS:
        raise ValueError(f"plan: hosts have {cluster.ranks} ranks, expected 1 to {MOST_RANKS}")
    kinds = [(kind.hosts, kind.hardware.ranks, kind.hardware) for kind in cluster.kinds]
    if ranks not in (None, cluster.ranks):
        (count, most, gpu), *others = kinds
        if others or ranks % count or ranks // count > most:
            raise ValueError(
                f"plan: hosts have {cluster.ranks} ranks, and ranks is {ranks}. Fewer have to be evenly on "
                "equal hosts"
            )
        kinds = [(count, ranks // count, gpu)]
    return [each for count, here, gpu in kinds for each in [JobHost(ranks=here, hardware=gpu)] * count]


SHARE = 0.9  # of what is free: the rest is for libraries, messages and fragmentation
SIDES = (512, 4096)  # of the matrices whose product is timed
LONG_S = 1e-3  # what is timed takes at least as long
COPIED = 64 << 20  # bytes
ROUNDS = 5
NOISE = 1.1  # rates of equal devices differ by up to so much
MANY = 200  # small operators
FAST = 1e12
"""FLOP/s in f32 of a device whose operators are all measured: it does that in seconds."""


class JobMachine(NamedTuple):
    """What a job has."""

    memory: tuple[int, ...]  # bytes that each rank may use
    hosts: tuple[int, ...]  # the number of the host of each rank
    speeds: tuple[float, ...]  # of each rank, its rate of compute beside `compute`
    compute: ComputeCalibration | None  # what operators take on its GPUs; None: its hosts compute
    hardware: tuple[Hardware, ...] = ()  # of each host, where they are not as this machine; (): as here
    shared: bool = False  # `memory` is what was free on the hosts, over the ranks there

    def with_ranks(self, ranks: int, hosts: int | Sequence[JobHost] | None) -> JobMachine:
        """The same with other ranks, which are as the least here: evenly on so many hosts, or on these.

        Ranks that share the memory of their host have less of it where they are more.

        Args:
            hosts: None: as here, or one.
        Raises:
            ValueError: they are not evenly on them.
        """
        if hosts is None and ranks == len(self.hosts):
            return self
        slowest, here = min(self.speeds), Counter(self.hosts)
        least = min(
            memory * (here[host] if self.shared else 1)
            for memory, host in zip(self.memory, self.hosts, strict=True)
        )
        if hosts is None or isinstance(hosts, int):
            each, left = divmod(ranks, hosts or 1)
            if left:
                raise ValueError(f"plan: {ranks} ranks are not evenly on {hosts} hosts")
            hosts = [JobHost(ranks=each)] * (hosts or 1)
        every = [(number, host) for number, host in enumerate(hosts) for _ in range(host.ranks)]
        return self._replace(
            memory=tuple(
                bytes_of(host.memory) or max(1, least // (host.ranks if self.shared else 1))
                for _, host in every
            ),
            hosts=tuple(number for number, _ in every),
            speeds=tuple(slowest * host.speed for _, host in every),
        )

    def of_places(self, plan: Plan) -> list[tuple[int, float]]:
        """Of each place of a pipeline, the least memory and the lowest speed of its ranks."""
        each = plan.ranks // plan.pipeline
        blocks = [slice(first, first + each) for first in range(0, plan.ranks, each)]
        return [(min(self.memory[block]), min(self.speeds[block])) for block in blocks]

    def limited(self, memory: int | None) -> JobMachine:
        """The same where each rank has so many bytes; None: those that are free."""
        if memory is None:
            return self
        return self._replace(memory=(memory,) * len(self.memory), shared=False)


def machine_of(hosts: Sequence[JobHost], memory: int | None, types: Collection[str]) -> JobMachine:
    """Hosts with hardware, which this machine need not have. A kind that is slower counts by its products.

    Args:
        memory: bytes of a rank where its host does not say; None: what the hardware leaves.
        types: in which plans compute.
    Raises:
        ValueError: the hardware has no rate for one of these types, or less memory.
    """
    gpus = [gpu for host in hosts if (gpu := host.gpu) is not None]
    kinds = [gpu for number, gpu in enumerate(gpus) if gpu not in gpus[:number]]
    for gpu in kinds:
        gpu.check_limit(memory or 0, "plan: ")
    costs = [operator_costs_of(gpu, types) for gpu in kinds]
    products, kind = [*map(_product_s, costs)], [kinds.index(gpu) for gpu in gpus]
    every = [(number, host) for number, host in enumerate(hosts) for _ in range(host.ranks)]
    return JobMachine(
        memory=tuple(bytes_of(host.memory) or memory or gpus[at].usable_bytes for at, host in every),
        hosts=tuple(at for at, _ in every),
        speeds=tuple(host.speed * max(products) / products[kind[at]] for at, host in every),
        compute=_of_devices(costs),
        hardware=tuple(kinds[each] for each in kind),
    )


def measure(device_type: str, held: int) -> JobMachine:
    """Measure this job. All ranks call this, and get the same, if there is a process group.

    Args:
        held: bytes that this process has taken already for what is planned.
    """
    on_host = device_type == "cpu"

    def here() -> tuple[str, int, int, OperatorCosts | None]:
        costs = None if on_host else _costs(device_type)  # libraries take their workspaces before one looks
        return _host(), _free(device_type), held, costs

    told = on_every_rank(here)
    names = [host for host, *_ in told]
    ranks = Counter(names)
    memory = tuple(  # the ranks of a host share what is free there
        max(1, int(SHARE * (free // (ranks[host] if on_host else 1) + taken)))
        for host, free, taken, _ in told
    )
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    costs = [each for *_, each in told if each is not None]
    products = [_product_s(each) for each in costs]
    slowest = max(products, default=1.0)
    rates = tuple(rate if (rate := slowest / each) > NOISE else 1.0 for each in products) or (1.0,) * len(
        told
    )
    hosts = tuple(numbers[name] for name in names)
    return JobMachine(memory, hosts, rates, _of_devices(costs), shared=on_host)


def _product_s(costs: OperatorCosts) -> float:
    """Seconds of a large product."""
    return costs.at("product", SIDES[-1], SIDES[-1], SIDES[-1])


def _of_devices(costs: list[OperatorCosts]) -> ComputeCalibration | None:
    """What operators take on the slowest of these devices, each of which is a rank's own."""
    if not costs:
        return None
    slowest = max(costs, key=_product_s)
    return ComputeCalibration("", str(torch.__version__), "", 1, (slowest,))


def _costs(device_type: str) -> OperatorCosts:
    """What operators take on this rank's device: measured, or a roofline of a slow or a full one."""
    _multiply(device_type)
    flops, low = (_rate(device_type, dtype) for dtype in (torch.float32, torch.bfloat16))
    if device_type == "cuda" and flops > FAST and _free(device_type) > NEEDED_BYTES:
        return device_costs(flops)
    costs = roofline_of(flops, _copy_rate(device_type), _operator_s(device_type), low=low / flops)
    if device_type == "cuda":
        torch.cuda.empty_cache()
    return costs


def _multiply(device_type: str) -> None:
    """Have cuBLAS take the workspaces that it keeps: one of this thread, of autograd's, of cuBLASLt.

    The allocator counts them. 65 MiB were seen on an H100: 2 x 32 and 1; older kinds have 2 x 8.1 by
    PyTorch's default. Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    given = torch.ones(64, 64, device=device_type, requires_grad=True)
    weight, bias = (torch.ones(shape, device=device_type, requires_grad=True) for shape in ((64, 64), (64,)))
    (torch.nn.functional.linear(given, weight, bias) @ weight).sum().backward()


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
    return min([available, *_of_control_groups()])


def _of_control_groups(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """What the control groups around this process that have a limit allow beside what they have.

    Cached files count as free: the kernel drops them where memory is asked for.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    place = next((line.split(":", 2)[2] for line in lines if line.startswith("0::")), "/")
    folder = root / place.lstrip("/")
    found = (_allowed(each) for each in (folder, *folder.parents) if each == root or root in each.parents)
    return [each for each in found if each is not None]


def _allowed(group: Path) -> int | None:
    """The bytes that a control group allows beside what it has; None: it has no limit."""
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if most == "max":
        return None
    return max(0, int(most) - int(used) + int(stat.get("inactive_file", 0)))


BYTES = (1e5, 3e6, 3e7, 3e8)
ELEMENTS = (1e5, 1e6, 1e7, 4e7)
POINTS: dict[str, tuple[tuple[float, ...], ...]] = {
    "product": ((64, 1024, 8192), (256, 1024, 4096), (256, 1024, 8192)),
    "batched": ((32, 128, 512), (1e7, 1e9, 3e10)),
    "convolution": ((16, 64, 256), (1e8, 1e9, 1e10)),
    "convolution_backward": ((16, 64, 256), (1e8, 1e9, 1e10)),
    "attention": ((128, 512, 2048), (1e8, 1e9, 1e10)),
    "attention_backward": ((128, 512, 2048), (1e8, 1e9, 1e10)),
    **dict.fromkeys(BY_BYTES, (BYTES,)),
    **dict.fromkeys(BY_ELEMENTS, (ELEMENTS,)),
}
"""Where each class is measured. On a GPU both types have a table of their own."""

LOW = {f"{kind}_low": axes for kind, axes in POINTS.items() if kind not in BY_BYTES}

NEEDED_BYTES = 2 << 30
"""Of free memory, for the largest of these calls."""

DEVICE_ROUNDS, CALLS = 3, 6
AHEAD = 1e-3
"""So long the device is busy before timed calls begin: by then the host has queued all of them."""

LEAST = 1e-7


def device_costs(flops: float) -> OperatorCosts:
    """The costs of operators on this GPU. Its generator of random numbers has its state again after it.

    Args:
        flops: of a product of f32, per second.
    """
    queue = _DeviceQueue(flops)
    with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        measured = tables(lambda kind, *point: queue.seconds(kind, torch.float32, point), POINTS)
        measured |= tables(
            lambda kind, *point: queue.seconds(kind.removesuffix("_low"), torch.bfloat16, point), LOW
        )
    torch.cuda.empty_cache()
    launch, forward, backward, view = _host_seconds()
    return OperatorCosts(
        1, 1, measured, max(0.0, forward - launch), max(0.0, backward - launch), view, launch_s=launch
    )


class _DeviceQueue:
    """Times calls on the device alone."""

    def __init__(self, flops: float) -> None:
        self._busy = torch.ones(2048, 2048, device="cuda")
        self._ahead = max(1, math.ceil(AHEAD / (2 * 2048**3 / flops)))

    def seconds(self, kind: str, dtype: torch.dtype, point: tuple[float, ...]) -> float:
        """The least seconds of one call, of some rounds."""
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype)  # the cases make their tensors of it
            with torch.device("cuda"):
                call = call_of(kind, point)
                call()
                return max(LEAST, min(self._round(call) for _ in range(DEVICE_ROUNDS)))
        finally:
            torch.set_default_dtype(before)

    def _round(self, call: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self._ahead):
            torch.mm(self._busy, self._busy)
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / CALLS


def _host_seconds() -> tuple[float, float, float, float]:
    """Of the host: an operator, one of a module that autograd follows, its backward, and a view."""
    small = torch.ones(8, device="cuda")
    model = nn.Sequential(*(nn.Hardtanh() for _ in range(MANY)))
    followed = small.clone().requires_grad_()

    def alone() -> None:
        for _ in range(MANY):
            small.mul(2.0)

    def views() -> None:
        for _ in range(MANY):
            small.view(2, 4)

    def forward() -> None:
        made.append(model(followed).sum())

    def backward() -> None:
        made.pop().backward()

    made: list[torch.Tensor] = []
    found = [math.inf] * 4
    for _ in range(DEVICE_ROUNDS + 1):  # the first is slower
        for place, work in enumerate((alone, forward, backward, views)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            found[place] = min(found[place], (time.perf_counter() - began) / MANY)
    launch, ahead, back, view = found
    return launch, ahead, back, view
