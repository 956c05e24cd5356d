"""Swapping of what a rank owns: ZeRO, tensor, pipeline, low precision. The oracles are the same plan without
swap, and plain training in one process.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono.parallel as up
from effort import swept
from parallel import models, plain_training
from parallel.run_features import made
from parallel.swaps import trained

ZERO = [{"data": 4, "zero": zero} for zero in (1, 2, 3)]
PLANS: list[dict[str, Any]] = [
    *ZERO,
    {"data": 4, "zero": 3, "shard": 2, "micro_batches": 2},
    {"data": 4, "zero": 1, "micro_batches": 2, "clip": 0.5},
    {"data": 4, "zero": 2, "uneven_use": True},
    {"data": 4, "zero": 3, "recompute": True, "precision": "bf16"},
    {"data": 2, "tensor": 2},
    {"data": 2, "tensor": 2, "zero": 3, "clip": 0.1},
    {"data": 2, "pipeline": 2, "micro_batches": 2},
    {"pipeline": 2, "tensor": 2, "micro_batches": 2, "clip": 0.5},
    {"data": 2, "pipeline": 2, "zero": 1, "micro_batches": 4},
    {"data": 2, "pipeline": 2, "zero": 3, "micro_batches": 2, "precision": "fp16"},
    {"data": 4, "precision": "bf16"},
]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def weights(run: up.Run) -> dict[str, torch.Tensor]:
    return {name: value for name, value in run.weights() if value is not None}


def check_losses_and_weights_are_those_without_swap(folder: Path) -> None:
    short = [("gpt", "memory", plan) for plan in PLANS]
    more = [(name, swap, plan) for name in ("tied", "mlp") for swap in ("disk", str(folder)) for plan in PLANS]
    for name, swap, plan in swept(short, more):
        print(name, swap, plan, flush=True)
        for make in (plain_training.adamw, sgd)[: 2 if plan in ZERO else 1]:
            wanted, alone = trained(name, up.Plan(**plan), optimizer=make)
            losses, run = trained(name, up.Plan(**plan, swap=swap), optimizer=make)
            exact = plan.get("tensor", 1) == plan.get("pipeline", 1) == 1
            gap = 0.0 if exact else 2e-6
            assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) <= gap, (losses, wanted)
            away = [p for p in run.model.parameters() if not p.is_meta and p.dim()]
            assert away
            assert all(getattr(p, "_local_tensor", p).untyped_storage().nbytes() == 0 for p in away)
            mine, theirs = weights(run), weights(alone)
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                torch.testing.assert_close(mine[key], value, rtol=0, atol=10 * gap, msg=key)
            run.close()
