"""Steps an optimizer whose parameters are cut: DTensors, alone or beside plain tensors.

An optimizer of PyTorch that changes each value by itself gets this rank's parts as plain tensors for the time
of its step. With DTensors it would compute the same bits, and each operation on each parameter would pay for
PyTorch's dispatch, which takes longer than the arithmetic of a small model.

Any other optimizer steps DTensors, on all ranks alike: the numbers that it reads are those of whole
parameters.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from unisono.errors import UnfitError
from unisono.torch_internals.dtensor import reading_together
from unisono.torch_internals.training import has_step_hooks

from .gradients import gradient, local
from .replicated_parameters import like

# the state of a parameter is numbers, and tensors that are cut as the parameter is
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adadelta, optim.Adagrad, optim.Adamax, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop,
)  # fmt: skip
REMEDY = (
    "Use an optimizer that changes each value by itself, such as AdamW or up.CompressedAdam, or a plan that "
    "leaves parameters whole (zero=0, tensor=1)"
)


def has_cut_parameters(parameters: Iterable[Tensor]) -> bool:
    """Whether some of them are DTensors."""
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def step(optimizer: optim.Optimizer) -> None:
    """Call `optimizer.step()`, once. Groups, state and parameters are the same objects afterwards.

    Raises:
        RuntimeError: the optimizer has an operation that PyTorch does not have for parameters that are cut.
    """
    if steps_parts(optimizer):
        with _parts(optimizer):
            optimizer.step()
        return
    try:
        with reading_together():
            optimizer.step()
    except Exception as error:
        if not _of_dtensor(error):
            raise
        raise RuntimeError(_cannot_step(optimizer, error)) from error


def tell_of_hooks(optimizers: Iterable[optim.Optimizer], plan: object) -> bool:
    """Warn of hooks around a step, or a step in place of the class's, that see a part of the parameters.

    Returns:
        Whether there are any.
    """
    for one in optimizers:
        if has_step_hooks(one):
            warnings.warn(
                f"{type(one).__name__} has hooks of its step, or another step than its class's, and under "
                f"{plan} these see some of the parameters at a time. One that looks at several, as for a "
                "norm, does otherwise than in one process: clip by Plan(clip=...)",
                stacklevel=2,
            )
            return True
    return False


def _of_dtensor(error: Exception) -> bool:
    """Whether PyTorch's dispatch of DTensors raised it."""
    if "got mixed torch.Tensor and DTensor" in str(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return any("torch/distributed/tensor/" in frame.filename for frame in frames)


def _cannot_step(optimizer: optim.Optimizer, error: Exception) -> str:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    if "got mixed" in reason:
        reason = (
            "it computes with cut and whole ones together, where a number helps: float(norm) in place of norm"
        )
    return (
        f"{type(optimizer).__name__} cannot step parameters that are cut: PyTorch has no rule for an "
        f"operation of it on DTensors: {reason}. Some parameters may have changed: load the last checkpoint. "
        f"{REMEDY}"
    )


def refuse_cut_parameters(optimizer: optim.Optimizer) -> None:
    """Refuse an optimizer that no PyTorch steps on DTensors, before there are any.

    Raises:
        ValueError: it is one.
    """
    if isinstance(optimizer, optim.Adafactor):
        raise UnfitError(
            "Adafactor cannot step parameters that are cut: PyTorch has no rule for an operation of it on "
            f"DTensors. {REMEDY}"
        )


def chooses_lists(optimizer: optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether PyTorch takes its kernels of lists for a group on GPUs where nothing else is asked for.

    Adafactor takes a loop: lists need as much memory again as the parameters.
    """
    asked = group.get("foreach", False) is not None or group.get("fused") or group.get("differentiable")
    return not asked and not isinstance(optimizer, optim.Adafactor)


def steps_parts(optimizer: optim.Optimizer) -> bool:
    """Whether it gets this rank's parts as plain tensors, and draws nothing. Hooks of its step may read whole
    tensors, and draw.
    """
    return type(optimizer) in ELEMENTWISE and not has_step_hooks(optimizer)


@contextlib.contextmanager
def _parts(optimizer: optim.Optimizer) -> Iterator[None]:
    """Meanwhile the optimizer has this rank's parts, with their gradients and state."""
    state: Any = optimizer.state
    held: Any = defaultdict(dict)
    records, lists = [], []
    with torch.no_grad():
        for group in optimizer.param_groups:
            parts: list[Tensor] = []
            for parameter in group["params"]:
                part = local(parameter).detach()
                part.grad = gradient(parameter)
                entries = held[part] = {key: local(value) for key, value in state.get(parameter, {}).items()}
                records.append((parameter, part, entries, dict(entries)))
                parts.append(part)
            lists.append(parts)
    optimizer.state = held
    try:
        with _groups(optimizer, lists):
            yield
    finally:
        optimizer.state = state
    for parameter, part, entries, before in records:
        new = {key: value for key, value in entries.items() if before.get(key) is not value}
        if new:
            state[parameter].update({key: _as_cut(value, part, parameter) for key, value in new.items()})


def _as_cut(value: Any, part: Tensor, parameter: Tensor) -> Any:
    """New state of a part, as that of the parameter: a tensor of the part's shape is cut as the parameter."""
    cut = isinstance(value, Tensor) and value.dim() > 0 and value.shape == part.shape
    return like(value, parameter) if cut else value


@contextlib.contextmanager
def _groups(optimizer: optim.Optimizer, lists: list[list[Tensor]]) -> Iterator[None]:
    """Meanwhile the groups of the optimizer have these parameters in place of their own."""
    groups = optimizer.param_groups
    stand_ins = [{**group, "params": some} for group, some in zip(groups, lists, strict=True)]
    optimizer.param_groups = stand_ins
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, stand_in in zip(groups, stand_ins, strict=True):  # what the step wrote into a group
            group.update({key: value for key, value in stand_in.items() if key != "params"})
