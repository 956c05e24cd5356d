"""Plans of parallel training on four ranks: the losses of each are those of one process.

plans.py BACKEND: with "nccl" every rank has a GPU, with any other one the CPU.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unisono.parallel as up

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Batch = tuple[torch.Tensor, torch.Tensor]
PLANS = (
    up.Plan(data=4),
    up.Plan(data=4, zero=3),
    up.Plan(data=4, zero=2, shard=2),
    up.Plan(data=2, tensor=2),
    up.Plan(data=2, tensor=2, zero=1),
    up.Plan(data=2, pipeline=2, micro_batches=2, zero=3, schedule="interleaved"),
    up.Plan(pipeline=4, micro_batches=4, schedule="zb-h1"),
    up.Plan(data=2, pipeline=2, micro_batches=2, schedule="zbv", clip=0.5),
)
RECORDED = (up.Plan(data=2, tensor=2), up.Plan(tensor=2, pipeline=2, micro_batches=2))
"""Of a model whose cut and whose stages follow from its program."""
CUTS = {f"{layer}.0": ("column", "row")[layer % 2] for layer in range(6)}
STEPS = 4


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh() if i % 2 else nn.Identity()) for i in range(6)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


class Recorded(nn.Module):
    """Layers with a skip connection, which no nn.Sequential has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(x + self.down(torch.tanh(self.up(x))))


def recorded() -> nn.Module:
    torch.manual_seed(0)
    return Recorded()


def batches() -> list[Batch]:
    chance = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 16, generator=chance), torch.randint(4, (8,), generator=chance)) for _ in range(STEPS)
    ]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def alone(
    model: nn.Module, batches: list[Batch], optimizer: Optimizer, clip: float | None, decay: float = 1.0
) -> list[float]:
    """The losses of one process on the CPU. The learning rate is multiplied by `decay` after each step."""
    updates, losses = optimizer(list(model.parameters())), []
    for x, y in batches:
        updates.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        updates.step()
        losses.append(loss.item())
        for group in updates.param_groups:
            group["lr"] *= decay
    return losses


def joined(backend: str) -> torch.device:
    """Make the group of all ranks; the device of this one."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    return device


def train(plan: up.Plan, make: Callable[[], nn.Module], device: torch.device, **more: Any) -> None:
    """Assert that the losses under a plan are those of one process, and print them."""
    run = up.parallelize(make().to(device), plan, optimizer=adamw, loss=functional.cross_entropy, **more)
    losses = [run.step((x.to(device), y.to(device))) for x, y in run.shard(batches())]
    torch.testing.assert_close(losses, alone(make(), batches(), adamw, plan.clip), atol=1e-5, rtol=0)
    with tempfile.TemporaryDirectory() as folder:
        run.export(folder)  # rank 0 writes
        assert (dist.get_rank() == 0) == (Path(folder) / "model.safetensors").exists()
    if dist.get_rank() == 0:
        print(f"{plan}: {losses}", flush=True)


def main() -> None:
    device = joined(sys.argv[1])
    for plan in PLANS:
        train(plan, make, device, cuts=CUTS if plan.tensor > 1 else None)
    for plan in RECORDED:
        train(plan, recorded, device, sample=batches()[0][0].to(device))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
