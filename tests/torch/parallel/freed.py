"""A run that nothing refers to is freed, with its model and its moments. `main(rank, size, folder)`."""

import gc
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import unisono.parallel as up
import unisono.torch  # noqa: F401


def main(rank: int, size: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=150)
    )
    plans: list[dict[str, Any]] = [{"data": 2}, {"data": 2, "zero": 2}, {"pipeline": 2, "micro_batches": 2}]
    for plan in [*plans, {"data": 2, "swap": "memory"}]:
        left = used(plan)
        gc.collect()
        kept = [name for name, ref in left.items() if ref() is not None]
        assert not kept, (kept, plan)
    dist.destroy_process_group()
    print("fine")


def used(plan: dict[str, Any]) -> dict[str, weakref.ref[Any]]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    run = up.parallelize(
        model, up.Plan(**plan), optimizer=lambda p: torch.optim.AdamW(p, lr=0.1), loss=nn.functional.mse_loss
    )
    run.step((torch.ones(4, 4), torch.zeros(4, 4)))
    run.close()
    return {"run": weakref.ref(run), "model": weakref.ref(model), "optimizer": weakref.ref(run.optimizer)}
