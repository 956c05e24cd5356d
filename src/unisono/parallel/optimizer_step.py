"""Steps an optimizer whose parameters are cut: DTensors, alone or beside plain tensors.

An optimizer of PyTorch that changes each value by itself gets this rank's parts as plain tensors for the time
of its step. With DTensors it would compute the same bits, and each operation on each parameter would pay for
PyTorch's dispatch, which takes longer than the arithmetic of a small model.

Any other optimizer steps DTensors. PyTorch's foreach and fused kernels, its default for CUDA, take lists of
one kind only: meanwhile a group of both kinds is two groups with the same settings.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from unisono.torch_internals.training import has_step_hooks

from .gradients import gradient, local
from .plan import UnfitError
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
    with _one_kind(optimizer):
        try:
            optimizer.step()
        except Exception as error:
            if not _of_dtensor(error):
                raise
            raise RuntimeError(_cannot_step(optimizer, error)) from error


def _of_dtensor(error: Exception) -> bool:
    """Whether PyTorch's dispatch of DTensors raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return any("torch/distributed/tensor/" in frame.filename for frame in frames)


def _cannot_step(optimizer: optim.Optimizer, error: Exception) -> str:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
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
    """Whether it gets this rank's parts as plain tensors. Hooks of its step may read whole tensors."""
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
            lists.append([parts])
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


def _one_kind(optimizer: optim.Optimizer) -> contextlib.AbstractContextManager[None]:
    """Meanwhile no group that PyTorch's kernels for lists would refuse."""
    lists = [_kinds(group) for group in optimizer.param_groups]
    several = any(len(kinds) > 1 for kinds in lists)
    return _groups(optimizer, lists) if several else contextlib.nullcontext()


def _kinds(group: dict[str, Any]) -> list[list[Tensor]]:
    """The parameters of a group, in lists of one kind; no group has both of these settings."""
    cut = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
    one_by_one = group.get("foreach", False) is False and not group.get("fused")
    if one_by_one or len(cut) in (0, len(group["params"])):
        return [group["params"]]
    return [cut, [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]]


@contextlib.contextmanager
def _groups(optimizer: optim.Optimizer, lists: list[list[list[Tensor]]]) -> Iterator[None]:
    """Meanwhile the optimizer has a group for each list, with the settings of the group that it stands for.

    Args:
        lists: of each group.
    """
    groups = optimizer.param_groups
    stand_ins = [
        (group, {**group, "params": parameters})
        for group, several in zip(groups, lists, strict=True)
        for parameters in several
    ]
    optimizer.param_groups = [stand_in for _, stand_in in stand_ins]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, stand_in in stand_ins:  # what the step wrote into a group
            group.update({key: value for key, value in stand_in.items() if key != "params"})
