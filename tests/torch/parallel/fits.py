"""A model that fits on no rank: `main(rank, size, folder, axis)` trains it in less memory than its parameters
take, and prints the peak. Built whole first, it does not come into this memory.
"""

import ctypes
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unisono.parallel as up
from parallel import limited
from parallel.run_features import in_group
from parallel.swaps import M_ARENA_MAX, M_MMAP_THRESHOLD

WIDTH, LAYERS, SHARE = 1024, 48, 0.75
WHOLE_MB = 4 * LAYERS * (WIDTH * WIDTH + WIDTH) / 1e6  # 201 MB, a unit 4
PLANS = {
    "zero": up.Plan(data=4, zero=3),  # per rank: a quarter of parameters and of gradients, some units whole
    "pipeline": up.Plan(pipeline=4, micro_batches=4),
}


def model(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def losses(plan: up.Plan, layers: int) -> tuple[float, list[float]]:
    """The peak while the model was made, and what its steps returned."""
    with torch.device("meta"):
        made = model(layers)
    run = up.parallelize(
        made, plan, optimizer=lambda p: torch.optim.SGD(p, lr=1.0), loss=functional.mse_loss, seed=0
    )
    built = peak_mb()
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1))
    return built, [run.step(batch) for batch in run.shard([(x, x)] * 3)]


def peak_mb() -> float:
    """The most memory this process has held since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def forget_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


def check(size: int, axis: str) -> None:
    plan = PLANS[axis]
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 65536)):  # memory that is freed is given back
        ctypes.CDLL(None).mallopt(option, value)
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    losses(plan, 4)  # libraries and threads come first
    before, limit = forget_peak(), limited.virtual_bytes() + int(SHARE * WHOLE_MB * 1e6)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    try:
        built, found = losses(plan, LAYERS)
        assert built - before < WHOLE_MB / size + 3 * WHOLE_MB / LAYERS
        print(
            f"{axis}: built with {built - before:.0f} MB, peak {peak_mb() - before:.0f} MB, "
            f"on top of {before:.0f}; the model {WHOLE_MB:.0f} MB"
        )
        assert found[-1] < found[0]
        with pytest.raises((MemoryError, RuntimeError), match="memory"):
            model(LAYERS)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    dist.barrier()


def main(rank: int, size: int, folder: Path, axis: str) -> None:
    in_group(rank, size, folder, lambda _: check(size, axis))
