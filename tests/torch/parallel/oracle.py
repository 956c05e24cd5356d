"""Training in one process, written out: the losses every plan must give. It shares nothing with
unisono.parallel.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

from parallel import models

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@functools.cache
def losses(
    name: str,
    optimizer: str,
    precision: str,
    steps: int,
    rows: int,
    parts: int,
    clip: float | None,
    scale: float,
) -> list[float]:
    """The loss of each step. `parts`: micro-batches, which matter where rounding does."""
    case, model = models.CASES[name], models.make(name)
    made = models.optimizer(optimizer, model.parameters())
    found = []
    for batch in case.batches(steps, rows):
        loss, grads = gradients(
            model, case, batch, TYPES[precision], parts if precision != "f32" else 1, scale
        )
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        found.append(loss)
    return found


def gradients(
    model: nn.Module, case: Any, batch: tuple[Tensor, Tensor], dtype: torch.dtype, parts: int, scale: float
) -> tuple[float, list[Tensor]]:
    """Loss and f32 gradients of f32 masters, computed in `dtype`."""
    low = copy.deepcopy(model).to(dtype)
    rows = len(batch[0])
    sums, total = [torch.zeros_like(p) for p in model.parameters()], 0.0
    for x, y in zip(*(torch.tensor_split(tensor, parts) for tensor in batch), strict=True):
        output = low(x.to(dtype) if x.is_floating_point() else x)
        loss = case.loss(getattr(output, "logits", output).float(), y)
        share = len(x) / rows
        grads = torch.autograd.grad(loss * (share * scale), list(low.parameters()))
        for sum_, grad in zip(sums, grads, strict=True):
            sum_ += grad.float() / scale
        total += loss.item() * share
    return total, sums
