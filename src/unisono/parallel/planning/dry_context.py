"""The context axis in a dry run: the program of one rank on its positions, and no message."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from unisono.errors import UnfitError
from unisono.parallel.context.exchange import ContextGroup
from unisono.parallel.context.program import ContextProgram
from unisono.parallel.context.runtime import ContextModel
from unisono.parallel.plan import Plan
from unisono.parallel.sharded_parameters import TYPES

if TYPE_CHECKING:
    from unisono.parallel.mesh import PlanMesh

__all__ = ["DryContext"]


class DryContext(ContextModel):
    """A model without values whose sequence is cut, on the last rank: no other one has more in memory.

    Args:
        model: before it is wrapped.    output: what the loss gets of what it returns.
    Raises:
        ValueError: the plan has another axis, too, with which the memory is not predicted.
    """

    def __init__(self, model: nn.Module, output: Callable[[Any], Any], plan: Plan, device_type: str) -> None:
        for axis in ("tensor", "pipeline"):
            if getattr(plan, axis) > 1:
                raise UnfitError(
                    f"context={plan.context} with {axis}={getattr(plan, axis)}: its memory is not predicted"
                )
        dtype = TYPES[plan.precision] if plan.low else None
        axes = SimpleNamespace(device_type=device_type)
        mesh: Any = SimpleNamespace(plan=plan, axes=axes, context=None)
        super().__init__(model, dtype, output, mesh, None, None)

    def _group(self, mesh: PlanMesh) -> ContextGroup:
        return _ContextAlone(None, mesh.plan.context - 1, mesh.plan.context)

    def _proved(self, inputs: Any, targets: Any, loss: Any) -> ContextProgram:
        return self._program(inputs, targets, loss)

    def _shared_seed(self) -> int:
        return 0

    def _drawing(self, shared: int) -> AbstractContextManager[None]:
        del shared
        return nullcontext()


class _ContextAlone(ContextGroup):
    """A group whose other ranks are not there."""

    def sum_(self, value: Tensor) -> None:
        """Leave the values."""

    def gather(self, every: list[Tensor], mine: Tensor) -> None:
        """Leave the values."""

    def exchange(self, came: Tensor, sent: Tensor, gets: list[int], gives: list[int]) -> None:
        """Leave the values."""

    def hop(self, came: Tensor, sent: Tensor) -> list[Any]:
        """Everything has arrived."""
        del came, sent
        return []
