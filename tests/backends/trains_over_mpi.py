"""Trains by DDP, FSDP2, tensor parallel and plans over a backend: trains_over_mpi.py NAME.

Rank 0 prints "LOSSES " and the losses of each way as JSON.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import unisono as un
import unisono.parallel as up

STEPS, ROWS, WIDTH = 4, 8, 16


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """All rows of a step."""
    draws = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=draws), torch.randn(ROWS, WIDTH, generator=draws)


def mean(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(trained: nn.Module, *, rows: bool) -> list[float]:
    """The loss of each step; rows: this rank has its part of them."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, y = (each.chunk(dist.get_world_size())[dist.get_rank()] if rows else each for each in batch(step))
        loss = nn.functional.mse_loss(trained(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
    return losses


def ddp() -> list[float]:
    return train(DistributedDataParallel(model()), rows=True)


def fsdp2() -> list[float]:
    """With a checkpoint in the middle, read into another model."""
    first = model()
    for layer in (first[0], first[2], first):
        fully_shard(layer)
    losses = train(first, rows=True)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save({"model": first.state_dict()}, checkpoint_id=folder[0])
    second = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    for layer in (second[0], second[2], second):
        fully_shard(layer)
    state = {"model": second.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    second.load_state_dict(state["model"])
    return [*losses, *train(second, rows=True)]


def tensor_parallel() -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return train(
        parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), rows=False
    )


def plan(**axes: int) -> Callable[[], list[float]]:
    def trained() -> list[float]:
        run = up.parallelize(
            model(),
            up.Plan(**axes),  # type: ignore[arg-type]
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            loss=nn.functional.mse_loss,
        )
        return [float(run.step(rows)) for rows in run.shard([batch(step) for step in range(STEPS)])]

    return trained


def check_limits() -> None:
    """What MPI does not have is an error in words, and the group goes on."""
    late = dist.get_world_size() - 1
    if dist.get_rank() == late:
        time.sleep(2)
    limit_s = 0.5 if dist.get_rank() == 0 else 10
    with pytest.raises(un.Timeout, match=f"Rank {late} failed to pass monitoredBarrier"):
        dist.monitored_barrier(timeout=timedelta(seconds=limit_s), wait_all_ranks=True)
    for name in ("abort", "shrink", "reconfigure", "merge_remote_group"):
        with pytest.raises(un.NotSupported, match=name):
            getattr(dist.group.WORLD, name)()
    dist.barrier()


WAYS = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "tensor parallel": tensor_parallel,
    "data=4": plan(data=4),
    "zero=3": plan(data=4, zero=3),
    "tensor=2, zero=1": plan(data=2, tensor=2, zero=1),
    "pipeline=2": plan(data=2, pipeline=2, micro_batches=2),
}

if __name__ == "__main__":
    dist.init_process_group(sys.argv[1])
    if sys.argv[1] == "unisono-mpi":
        check_limits()
    losses = {name: way() for name, way in WAYS.items()}
    if dist.get_rank() == 0:
        print("LOSSES", json.dumps(losses), flush=True)
    dist.destroy_process_group()
