"""Steps an optimizer whose groups have DTensors, cut on the tensor axis, beside plain tensors.

PyTorch's foreach and fused kernels, its default for CUDA, take lists of one kind only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["has_mixed_parameters", "step"]


def has_mixed_parameters(parameters: Iterable[Tensor]) -> bool:
    """Whether some of them are DTensors and some are not."""
    return len({isinstance(parameter, DTensor) for parameter in parameters}) > 1


def step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`; meanwhile a group of both kinds is two groups with the same settings."""
    groups = optimizer.param_groups
    parts = [(group, part) for group in groups for part in _parts(group)]
    optimizer.param_groups = [part for _, part in parts]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
        for group, part in parts:  # what the step wrote into a group
            group.update({key: value for key, value in part.items() if key != "params"})


def _parts(group: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a group that PyTorch's kernels for lists would refuse; no other has both of these settings."""
    one_by_one = group.get("foreach", False) is False and not group.get("fused")
    if one_by_one or not has_mixed_parameters(group["params"]):
        return [group]
    cut = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
    return [{**group, "params": cut}, {**group, "params": whole}]
