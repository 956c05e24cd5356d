"""Optimizers of DTensors beside plain tensors: the tensor axis cuts two layers of the model, not the others.

Losses are those of one process; the groups stay as the user made them.

optimizers.py BACKEND: with "nccl" every rank has a GPU, with any other one the CPU. Two ranks.
"""

import sys

import torch
import torch.distributed as dist
from plans import Batch, Optimizer, alone, joined
from torch import nn
from torch.nn import functional

import unisono.parallel as up

WAYS: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "one by one": {"foreach": False},
}
CUTS = {"0": "column", "2": "row"}
PLANS = (up.Plan(tensor=2), up.Plan(tensor=2, clip=0.1))
STEPS = 3
DECAY = 0.5  # of the learning rate after each step


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def batches() -> list[Batch]:
    chance = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 8, generator=chance), torch.randint(4, (6,), generator=chance)) for _ in range(STEPS)
    ]


def grouped(parameters: list[nn.Parameter]) -> list[dict]:
    """Two groups: the first has both kinds of parameters, the second has vectors only."""
    matrices = [p for p in parameters if p.dim() == 2]
    vectors = [p for p in parameters if p.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "lr": 0.02}]


def optimizers(way: dict[str, bool]) -> dict[str, Optimizer]:
    nesterov = {"momentum": 0.9, "nesterov": True}
    made: dict[str, Optimizer] = {
        "AdamW": lambda given: torch.optim.AdamW(given, lr=0.01, **way),
        "AdamW of groups": lambda given: torch.optim.AdamW(grouped(given), lr=0.01, **way),
    }
    if not way.get("fused"):  # PyTorch's fused SGD takes no DTensors
        made["SGD"] = lambda given: torch.optim.SGD(given, lr=0.1, **way)
        made["SGD of groups"] = lambda given: torch.optim.SGD(grouped(given), lr=0.1, **nesterov, **way)
    return made


def trained(plan: up.Plan, optimizer: Optimizer, device: torch.device) -> list[float]:
    """The losses of a run by `plan`."""
    cuts = CUTS if plan.tensor > 1 else None
    run = up.parallelize(
        make().to(device), plan, optimizer=optimizer, loss=functional.cross_entropy, cuts=cuts
    )
    assert run.optimizer is not None
    groups, losses = list(run.optimizer.param_groups), []
    for x, y in run.shard(batches()):
        losses.append(run.step((x.to(device), y.to(device))))
        assert all(a is b for a, b in zip(run.optimizer.param_groups, groups, strict=True))
        for group in run.optimizer.param_groups:
            group["lr"] *= DECAY
    return losses


def main() -> None:
    device = joined(sys.argv[1])
    for plan in PLANS:
        for way, settings in WAYS.items():
            for name, optimizer in optimizers(settings).items():
                losses = trained(plan, optimizer, device)
                wanted = alone(make(), batches(), optimizer, plan.clip, DECAY)
                torch.testing.assert_close(losses, wanted, atol=1e-5, rtol=0, msg=f"{name}, {way}, {plan}")
    low = up.Plan(data=2, zero=1, precision="bf16")  # fully_shard reduces bf16 gradients in f32
    sgd = optimizers({})["SGD"]
    wanted = alone(make(), batches(), sgd, None, DECAY)
    torch.testing.assert_close(trained(low, sgd, device), wanted, atol=2e-2, rtol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
