"""Refuses models that no plan trains as one process does, and sets what all plans need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from unisono.errors import UnfitError
from unisono.torch.control_data import on_every_rank

from .plan import Plan

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["check_model"]


def check_model(model: nn.Module, plan: Plan) -> None:
    """Check a model, and make its embeddings' gradients dense, as sums over ranks are. Parameters that are
    sharded become contiguous.

    Raises:
        ValueError: it has parameters without shapes, TorchScript, or an embedding that counts or writes by
            the rows of one rank; the text names the module.
    """
    for path, module in model.named_modules():
        where = f'"{path}" ({type(module).__name__})' if path else type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise UnfitError(
                f"{where} is TorchScript, which takes no hooks, and whose program cannot be recorded. "
                "Give the Python module that it was made of"
            )
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None and is_lazy(value):
                raise UnfitError(
                    f'"{name}" of {where} has no shape yet. Call the model on a batch once before '
                    "parallelize: model(inputs)"
                )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _check_embedding(where, module, plan)
            module.sparse = False
    if plan.zero or plan.low:
        _make_contiguous(model)


@torch.no_grad()
def _make_contiguous(model: nn.Module) -> None:
    """Give each parameter the memory format that `fully_shard` needs. Example: nn.Parameter(matrix.t())."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _check_embedding(where: str, module: nn.Embedding | nn.EmbeddingBag, plan: Plan) -> None:
    if module.max_norm is not None and (plan.copies > 1 or plan.zero or plan.low):
        raise UnfitError(
            f"{where} has max_norm={module.max_norm}: it normalises the rows that its inputs name, in the "
            "table itself, and every data rank has other inputs. Normalise what it returns, or the whole "
            "table between two steps"
        )
    if module.scale_grad_by_freq and (plan.copies > 1 or plan.micro_batches > 1):
        raise UnfitError(
            f"{where} has scale_grad_by_freq=True: it counts the inputs of one rank and one micro-batch, not "
            "those of the batch. Leave it out, or use tensor= with micro_batches=1"
        )


# ---- what ranks must have alike ----


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
