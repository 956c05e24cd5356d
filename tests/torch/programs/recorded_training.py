"""Two steps of training by a plan, on four ranks: data x tensor, or a pipeline; what they call is recorded.

Run by test_recorded_training.py.
"""

import atexit
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unisono.parallel as up
import unisono.torch  # noqa: F401

PLANS = {"tensor": {"tensor": 2, "data": 2}, "pipeline": {"pipeline": 2, "data": 2, "micro_batches": 2}}


def main(rank: int, size: int, folder: Path, kind: str) -> None:
    os.environ["UNISONO_RECORD"] = str(folder / "step.json")  # as `unisono run --record` sets it
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    batches = [(torch.randn(16, 16), torch.randint(4, (16,))) for _ in range(2)]
    run = up.parallelize(
        model,
        up.Plan(**PLANS[kind]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        loss=functional.cross_entropy,
    )
    for batch in run.shard(batches):
        run.step(batch)
    dist.destroy_process_group()
    atexit._run_exitfuncs()  # they write the file; a fork ends without them
