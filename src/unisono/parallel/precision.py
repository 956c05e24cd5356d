"""Low precision: which modules stay in f32, and the scales of the loss and of units under fp16.

Whether a step overflowed is decided once, for all ranks; see gradients.py.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import UnfitError
from unisono.torch_internals.training import module_at

from .gradients import local
from .graph.containers import mapped
from .plan import Plan

BATCH_NORM: Any = nn.BatchNorm1d.__mro__[1]  # the base of all of them
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
NORMS = (
    BATCH_NORM, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm, nn.GroupNorm,
    nn.RMSNorm,
)  # fmt: skip


def kept_in_f32(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The modules of a plan in low precision that keep f32 parameters and compute in f32.

    Raises:
        ValueError: a pattern matches nothing; or ranks may leave such a module unused.
    """
    if not plan.low:
        return []
    found: dict[nn.Module, str] = {}
    for pattern in plan.keep_f32:
        named = {
            module: path
            for path, module in model.named_modules()
            if path and (fnmatchcase(path, pattern) or (pattern == "norms" and isinstance(module, NORMS)))
        }
        if not named:
            raise UnfitError(f'Plan: keep_f32: no module of {type(model).__name__} is called "{pattern}"')
        called = {module: path for module, path in named.items() if not isinstance(module, CONTAINERS)}
        if not called:
            path = next(iter(named.values()))
            raise UnfitError(
                f'Plan: keep_f32: "{path}" is a {type(module_at(model, path)).__name__}, whose modules '
                f'are called, and not itself. Write "{path}.*"'
            )
        found |= called
    modules = model.named_modules()
    found |= {module: path for path, module in modules if path and isinstance(module, BATCH_NORM)}
    if found and plan.uneven_use:
        raise UnfitError(
            f'"{next(iter(found.values()))}" keeps f32, and its gradients are reduced by themselves, which '
            "uneven_use=True does not do. Use precision='f32'"
        )
    return list(found)


def check_staged(model: nn.Module, kept: Sequence[nn.Module], staged: Container[nn.Module]) -> None:
    """Refuse a module that keeps f32 and that no stage of a pipeline calls, unless all its parts keep it."""
    run = {value for module in kept if module in staged for value in module.parameters()}
    for path, module in model.named_modules():
        if module in kept and not run.issuperset(module.parameters()):
            raise UnfitError(
                f'Plan: keep_f32: no stage of the pipeline calls "{path}" as a whole, so it would compute in '
                f'low precision. Name its parts: "{path}.*"'
            )


@dataclass
class LossScaler:
    """Grows while steps succeed, shrinks when one overflows. Scale 1 and no growth where the type needs
    none.
    """

    scale: float = 2.0**16
    growth: float = 2.0
    shrink: float = 0.5
    every: int = 2000
    succeeded: int = 0

    @classmethod
    def of(cls, precision: str) -> LossScaler:
        """Make the one for a type: fp16 is scaled, others are not."""
        return cls() if precision == "fp16" else cls(scale=1.0, growth=1.0, shrink=1.0)

    @property
    def active(self) -> bool:
        """Whether the loss is scaled."""
        return self.growth != 1.0

    def update(self, overflowed: bool) -> None:
        """Take the verdict on a step.

        Raises:
            FloatingPointError: gradients overflow although the loss is hardly scaled; the training diverged.
        """
        if not overflowed:
            self.succeeded += 1
            if self.succeeded % self.every == 0:
                self.scale *= self.growth
            return
        self.succeeded = 0
        self.scale *= self.shrink
        if self.scale < 2.0**-14:
            raise FloatingPointError(
                f"gradients still overflow with the loss scaled by {self.scale:.1e}: a parameter or a batch "
                "is not finite, or the training diverged"
            )


class UnitScales:
    """A scale for the gradients within each unit, beside that of the loss, which all else has.

    A gradient that comes to a unit is multiplied by its scale over that of the loss, and one that leaves it
    divided. What is not finite there becomes zero, so that only the scale falls within which it overflowed;
    the step is skipped. Source: Ramesh et al., Zero-Shot Text-to-Image Generation, 2021, section 2.4, where
    the paths between units are f32; here they are in the type of compute, with the loss's scale.

    Args:
        units: by their paths.    names: path of a parameter -> its name.    loss: the scale of the loss.
    Attributes:
        units: the scale of each, in their order.
    """

    def __init__(self, units: Mapping[str, nn.Module], names: Mapping[str, str], loss: LossScaler) -> None:
        self._loss, self.units = loss, [LossScaler.of("fp16") for _ in units]
        self._scalers = [loss, *self.units]
        self._number = {
            name: number
            for number, path in enumerate(units, 1)
            for at, name in names.items()
            if at.startswith(f"{path}.")
        }
        self._lost: list[Tensor | bool] = [False] * len(self._scalers)
        for number, unit in enumerate(units.values(), 1):
            unit.register_forward_pre_hook(partial(self._taken, number), with_kwargs=True)
            unit.register_forward_hook(partial(self._given, number))

    def scale_of(self, name: str) -> float:
        """By what the gradient of a parameter comes multiplied."""
        return self._scalers[self._number.get(name, 0)].scale

    def unify(self, trained: Mapping[str, nn.Parameter]) -> list[bool]:
        """Give all gradients the loss's scale. Return which overflowed here: outside units, in each unit."""
        lost, self._lost = self._lost, [False] * len(self._scalers)
        for name, parameter in trained.items():
            if parameter.grad is not None:
                grad, number = local(parameter.grad), self._number.get(name, 0)
                lost[number] = lost[number] | ~torch.isfinite(grad).all()
                grad.mul_(self._loss.scale / self._scalers[number].scale)
        return [bool(one) for one in lost]

    def update(self, overflowed: Sequence[bool]) -> None:
        """Take the verdict of all ranks on a step."""
        for scaler, one in zip(self._scalers, overflowed, strict=True):
            scaler.update(one)

    def forget(self) -> None:
        """A step ended with an error."""
        self._lost = [False] * len(self._scalers)

    def _taken(self, number: int, _unit: nn.Module, args: Any, named: Any) -> Any:
        return mapped((args, named), partial(_with_hook, partial(self._pass, number, number, False)))

    def _given(self, number: int, _unit: nn.Module, _args: Any, output: Any) -> Any:
        return mapped(output, partial(_with_hook, partial(self._pass, number, 0, True)))

    def _pass(self, number: int, blamed: int, enters: bool, grad: Tensor) -> Tensor:
        """A gradient that enters or leaves a unit."""
        finite = torch.isfinite(grad)
        self._lost[blamed] = self._lost[blamed] | ~finite.all()
        factor = self._scalers[number].scale / self._loss.scale
        return torch.where(finite, grad, 0) * (factor if enters else 1 / factor)


def _with_hook(hook: Any, value: Tensor) -> Tensor:
    """A copy whose gradient passes by the hook. A view would lose it where it is written into."""
    if not (value.requires_grad and value.is_floating_point()):
        return value
    alone = value.clone()
    alone.register_hook(hook)
    return alone
