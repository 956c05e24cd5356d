"""Training under a plan beside one process: what several programs of this folder compare."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import unisono.parallel as up

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 1e-2)


def net(width: int = 16, blocks: int = 6) -> nn.Sequential:
    """The same weights in every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))


def batches(width: int = 16, count: int = 4) -> list[Batch]:
    """The same rows in every call."""
    torch.manual_seed(1)
    return [(torch.randn(16, width), torch.randn(16, width)) for _ in range(count)]


def alone(
    model: nn.Module, rows: list[Batch], make: Any = adam, loss_of: Loss = nn.functional.mse_loss
) -> list[float]:
    """The losses of one process without a plan."""
    optimizer, losses = make(model.parameters()), []
    for x, y in rows:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def planned(
    plan: Any, model: nn.Module, make: Any = adam, loss_of: Loss = nn.functional.mse_loss, **how: Any
) -> up.Run:
    """A run of the plan; the first call joins the group."""
    if not dist.is_initialized():
        dist.init_process_group("unisono")
    return up.parallelize(model, plan, optimizer=make, loss=loss_of, **how)


def same(found: list[float], wanted: list[float], within: float = 1e-6, beyond: float = -1.0) -> None:
    """The losses differ by less than `within`; and by more than `beyond`, where something is rounded."""
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    assert beyond < worst < within, (worst, found, wanted)


def kept(run: up.Run) -> int:
    """The elements of parameters that this rank keeps."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in run.parameters.values())
