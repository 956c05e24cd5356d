"""Data parallel over pipelines, one in each process: the losses of one process, also after a checkpoint.

`main(rank, size, folder)`: on CPU threads. As a program, with a backend and a folder: two GPUs for each rank.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import unisono.parallel as up

STEPS, ROWS = 4, 12


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(ROWS, 8), torch.randint(4, (ROWS,))) for _ in range(STEPS)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def alone() -> list[float]:
    model = net()
    optimizer, losses = optimizer_of(model), []
    for x, y in batches():
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrapped(state: Any, mode: str, schedule: str, devices: list[str]) -> DistributedDataParallel:
    model = net()
    if state is not None:
        model.load_state_dict(state)
    model[:2].to(devices[0])
    model[2:].to(devices[1])
    pipe = up.Pipe(model, 3, mode, balance=[2, 3], schedule=schedule)
    return DistributedDataParallel(pipe, find_unused_parameters=mode == "always")


def trained(rank: int, size: int, file: Path, mode: str, schedule: str, devices: list[str]) -> list[float]:
    model = wrapped(None, mode, schedule, devices)
    optimizer, losses = optimizer_of(model), []
    for step, (x, y) in enumerate(batches()):
        if step == STEPS // 2:
            if rank == 0:
                torch.save((model.module.state_dict(), optimizer.state_dict()), file)
            dist.barrier()
            state, moments = torch.load(file, map_location="cpu", weights_only=True)
            model = wrapped(state, mode, schedule, devices)
            optimizer = optimizer_of(model)
            optimizer.load_state_dict(moments)
        x, y = x.chunk(size)[rank].to(devices[0]), y.chunk(size)[rank].to(devices[1])
        if schedule == "gpipe":
            loss = functional.cross_entropy(model(x).local_value(), y)
        else:
            loss = model(x, target=y, loss=functional.cross_entropy).local_value()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().to(devices[0])
        dist.all_reduce(total)
        losses.append(total.item() / size)
    return losses


def compare(rank: int, size: int, folder: Path, devices: list[str]) -> None:
    for mode in ("never", "except_last", "always"):
        for schedule in ("gpipe", "1f1b"):
            file = folder / f"{mode}-{schedule}.pt"
            losses = trained(rank, size, file, mode, schedule, devices)
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone()), rtol=0, atol=1e-5)
    print("the losses of one process", flush=True)


def main(rank: int, size: int, folder: Path) -> None:
    from parallel.group_of_a_job import process_group  # not where this is a script

    with process_group(rank, size, folder):
        compare(rank, size, folder, ["cpu", "cpu"])


def on_gpus(backend: str, folder: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(2 * rank)
    dist.init_process_group(backend)
    compare(rank, size, Path(folder), [f"cuda:{2 * rank}", f"cuda:{2 * rank + 1}"])
    dist.destroy_process_group()


if __name__ == "__main__":
    on_gpus(*sys.argv[1:])
