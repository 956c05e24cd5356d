"""The ways to train the model of gpt.py, on one rank. train.py and train_table.py measure them.

A way is one of `ddp`, `fsdp2`, `zero1` to `zero3` (DeepSpeed's, where it is installed), `up0` to `up3`:
`up.Plan(data=ranks, zero=0..3)`, `tensor`: `up.Plan(tensor=ranks)`, `sequence`: the same with sequence=True,
`pipeline`: `up.Plan(pipeline=ranks, micro_batches=rows)`, and `context`: `up.Plan(context=ranks)`. All train
on the same rows. Where there are fewer rows than ranks, ranks with the whole model have nothing to share:
each trains on all rows. `alone` trains every rank by itself.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from turns import TurnWorker

THEIRS, OURS = ("ddp", "fsdp2", "zero1", "zero2", "zero3"), ("up0", "up1", "up2", "up3")
SHARED = ("tensor", "sequence", "pipeline", "context")  # ranks that share a model or rows have the same rows
ALONE, REDUCTIONS = "alone", "all-reduces"
BUCKET_BYTES = 25 << 20  # DDP's
LAYERS, HEAD_WIDTH = 6, 32
COMPARED_STEPS = 3
TOLERANCE = 1e-4  # nats per byte, between ways; AVG and SUM-then-divide round differently
M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # of glibc's mallopt
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9}
LEARNING_RATE = 1e-3


def width_of(model: str) -> int:
    """The width at which LAYERS blocks have about this number of parameters, 12 * width^2 each.

    Example: "10M" -> 384, of which the blocks have 10.6 million.
    """
    parameters = float(model[:-1]) * UNITS[model[-1]] if model[-1:] in UNITS else float(model)
    return max(1, round((parameters / (12 * LAYERS)) ** 0.5 / HEAD_WIDTH)) * HEAD_WIDTH


def same(losses: dict[str, list[float]]) -> float:
    """The largest difference between the losses of all ways; ends the program where it is too large."""
    first, *others = losses.values()
    difference = max((float(np.abs(np.subtract(first, each)).max()) for each in others), default=0.0)
    if difference > TOLERANCE:
        raise SystemExit(f"the losses differ: {losses}")
    return difference


class TrainingRank(TurnWorker):
    """A joined rank, with a model for each way."""

    COMMANDS = (*TurnWorker.COMMANDS, "bind", "losses", "peak", "received")

    def bind(
        self, way: str, width: int, rows: int, context: int, limit_mb: int | None = None
    ) -> dict[str, Any]:
        """Make the model of a way, and its step. `limit_mb`: memory that this process may take for it."""
        import torch
        from gpt import GPT, VOCABULARY

        torch.set_num_threads(1)
        tokens = torch.randint(VOCABULARY, (rows, context + 1), generator=torch.Generator().manual_seed(0))
        if way not in SHARED and rows >= self.size:
            tokens = tokens.chunk(self.size)[self.rank]
        torch.manual_seed(0)
        self.before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        if limit_mb is not None:
            for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 65536)):
                ctypes.CDLL(None).mallopt(option, value)  # memory that is freed is given back
            most = memory("VmData") + limit_mb * 1_000_000
            resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
        model = GPT(LAYERS, width, width // HEAD_WIDTH, context)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        makers = {"up": ours, "zero": deepspeeds, REDUCTIONS: reductions, **dict.fromkeys(SHARED, ours)}
        self.ways[way] = makers.get(way.rstrip("0123"), pytorchs)(model, way, self.size, tokens)
        return {"parameters": parameters}

    def losses(self, way: str, steps: int) -> dict[str, Any]:
        """Train a few steps."""
        return {"losses": [self.ways[way]() for _ in range(steps)]}

    def received(self, way: str) -> dict[str, Any]:
        """The bytes that this rank receives in a step. Lifts the limit of memory, for the profiler."""
        from unisono.parallel.profiled_step import profile_step

        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        _, trace = profile_step(self.ways[way])
        return {"bytes": trace.received(self.size)}

    def peak(self) -> dict[str, Any]:
        """The memory of the model and of its steps."""
        return {"peak": memory("VmHWM") - self.before}


def memory(name: str) -> int:
    """Bytes of this process, from a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def mean(loss: Any, ranks: int) -> float:
    """The mean over all ranks, as from `Run.step`."""
    import torch.distributed as dist

    loss = loss.detach().double()
    dist.all_reduce(loss)
    return float(loss.item()) / ranks


def pytorchs(model: Any, way: str, ranks: int, tokens: Any) -> Callable[[], float]:
    """A step of `model` under DDP, cut block by block by `fully_shard`, or alone."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if way == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif way == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item() if way == ALONE else mean(loss, ranks)

    return step


def reductions(model: Any, _way: str, _ranks: int, _tokens: Any) -> Callable[[], None]:
    """The all-reduces of DDP's reducer in a step, without computation."""
    import torch
    import torch.distributed as dist

    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    whole, rest = divmod(nbytes, BUCKET_BYTES)
    buckets = [torch.zeros(each // 4) for each in [BUCKET_BYTES] * whole + [rest] * bool(rest)]

    def step() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    return step


def ours(model: Any, way: str, ranks: int, tokens: Any) -> Callable[[], float]:
    """A step of `model` under a plan of this project."""
    import torch

    import unisono.parallel as up

    plans = {
        "tensor": {"tensor": ranks},
        "sequence": {"tensor": ranks, "sequence": ranks > 1},
        "pipeline": {"pipeline": ranks, "micro_batches": len(tokens)},
        "context": {"context": ranks},
    }
    run = up.parallelize(
        model,
        up.Plan(**plans.get(way) or {"data": ranks, "zero": int(way[2:])}),
        sample=tokens[:1] if way in SHARED else None,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        loss=lambda output, _: output,
    )
    return lambda: run.step((tokens, tokens))


def deepspeeds(model: Any, way: str, ranks: int, tokens: Any) -> Callable[[], float]:
    """A step of `model` under DeepSpeed, with PyTorch's AdamW."""
    import deepspeed
    import torch
    import torch.distributed as dist

    config = {
        "gradient_clipping": 0.0,  # its default clips to a norm of 1
        "train_micro_batch_size_per_gpu": len(tokens),
        "zero_optimization": {"stage": int(way[4:])},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    options = {"model": model, "optimizer": optimizer, "config": config, "dist_init_required": False}
    engine, *_ = deepspeed.initialize(**options)

    def step() -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return mean(loss, ranks)

    return step
