"""All ranks train the same model by the same plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from unisono.torch.control_data import on_every_rank

if TYPE_CHECKING:
    from .plan import Plan


def agree(model: nn.Module, plan: Plan, seed: int) -> tuple[int, int]:
    """Refuse ranks with different plans or models, which would wait for each other in different calls; return
    rank 0's seed, and that of its generator.
    """
    told = on_every_rank(lambda: (str(plan), describe(model), (seed, torch.initial_seed())))
    for rank, (other, tensors, _) in enumerate(told):
        if other != told[0][0]:
            raise ValueError(
                f"ranks have different plans: rank 0 {told[0][0]}, rank {rank} {other}; give all the same"
            )
        for name in {**told[0][1], **tensors}:
            if tensors.get(name) != told[0][1].get(name):
                raise ValueError(
                    f"ranks have different models: {name!r} is {told[0][1].get(name, 'missing')} on rank 0, "
                    f"{tensors.get(name, 'missing')} on rank {rank}"
                )
    return told[0][2]


def describe(model: nn.Module) -> dict[str, str]:
    """What every rank must have alike, by name."""
    found: dict[str, str] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        frozen = isinstance(value, nn.Parameter) and not value.requires_grad
        found[name] = f"{list(value.shape)}, {value.dtype}" + ", frozen" * frozen + ", meta" * value.is_meta
    return found


def same_everywhere(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers, but for those on the meta device."""
    with torch.no_grad():
        for value in [v for v in [*model.parameters(), *model.buffers()] if not v.is_meta]:
            dist.broadcast(value.data, src=0)
