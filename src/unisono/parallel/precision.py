"""Low precision: which modules stay in f32, and the scale of the loss under fp16.

Whether a step overflowed is decided once, for all ranks; see gradients.py.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from unisono.errors import UnfitError
from unisono.torch_internals.training import module_at

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
