"""The loss after training with compressed gradients, on two models: `main(rank, size, folder)`."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import unisono.parallel as up
from parallel import models
from parallel.group_of_a_job import process_group

RUNS = {"gpt": (400, 8, 5e-3), "mlp": (800, 32, 3e-3)}  # steps, rows of all ranks, learning rate
WAYS = {
    "exact": None,
    "bf16": up.Compressed("bf16", feedback=False, small=256),
    "int8": up.Compressed("int8", small=256),
    "low rank": up.PowerSGD(rank=4, start=20, saving=1.0),
}


def final_loss(name: str, settings: Any, rank: int, size: int) -> float:
    """The mean over 20 batches after training."""
    steps, rows, lr = RUNS[name]
    case, model = models.CASES[name], models.make(name)
    ddp = DistributedDataParallel(model)
    if settings is not None:
        settings.attach(ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for x, y in case.batches(steps, rows):
        optimizer.zero_grad()
        case.loss(ddp(x[rank::size]), y[rank::size]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return sum(case.loss(model(x), y).item() for x, y in case.batches(20, rows)) / 20


def main(rank: int, size: int, folder: Path) -> None:
    with process_group(rank, size, folder):
        found = {n: {w: final_loss(n, s, rank, size) for w, s in WAYS.items()} for n in RUNS}
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))
