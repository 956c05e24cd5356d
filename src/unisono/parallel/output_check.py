"""Tries the stages of a pipeline, or a context axis: what they return for a few rows is what the model does.

A copy of the model, as it was before it was cut, runs in evaluation mode beside the plan. Dropout is off, no
buffer changes, and there are no gradients. So the check sees a wrong forward, and no wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from unisono.torch.control_data import on_every_rank

from .batches import cut_rows, rows_of
from .divergence import relative_difference
from .generators import drawing
from .graph.capture import call
from .graph.containers import tensors_in
from .graph.model_copy import model_copy
from .pipeline.runtime import PipelineRuntime, StepInput

if TYPE_CHECKING:
    from .mesh import PlanMesh
    from .pipeline.schedule import Schedule
    from .plan import Plan

__all__ = ["OutputCheck"]

ROWS = 4  # of a batch
SEED = 0x5EED
LOW = 0.05  # what low precision may differ by, as a share of the largest value

Confirm = Callable[[list[tuple[Any, Any]]], None]


class OutputCheck:
    """A copy of a model before it was cut. It is used once.

    Args:
        fill: gives a copy on the meta device its values.
        output: of the model -> what the loss takes.
    """

    def __init__(
        self, model: nn.Module, fill: Callable[[nn.Module], object], output: Callable[[Any], Any]
    ) -> None:
        try:
            self._copy = model_copy(model)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), so check=True "
                "cannot compare. Leave it out"
            ) from error
        fill(self._copy)
        self._output = output

    @classmethod
    def of(
        cls,
        model: nn.Module,
        plan: Plan,
        check: bool | None,
        fill: Callable[[nn.Module], object],
        output: Callable[[Any], Any],
    ) -> OutputCheck | None:
        """What the user asks for; None: nothing, or the plan has no such axis."""
        return cls(model, fill, output) if check and (plan.pipeline > 1 or plan.context > 1) else None

    def run(
        self,
        model: nn.Module,
        runtime: PipelineRuntime,
        schedule: Schedule,
        confirm: Confirm,
        inputs: Any,
        mesh: PlanMesh,
    ) -> None:
        """Run both on some rows of this rank's batch. All ranks call this.

        Args:
            model: that trains; of other stages it has no parameters.
            schedule: of one micro-batch.
            confirm: proves the programs of micro-batches.
        Raises:
            ValueError: the outputs differ.
        """
        few = cut_rows(inputs, 0, min(ROWS, rows_of([inputs])))
        outputs: list[Any] = []

        def keep(output: Any, _targets: Any) -> Tensor:
            outputs.append(output)
            return torch.zeros((), device=mesh.axes.device_type)

        micros = [(few, ())]
        step = StepInput(micros, [1.0], keep, train=False, recorded=False)
        with torch.no_grad(), drawing(SEED, mesh.axes.device_type), _evaluating(model):
            confirm(micros)
            runtime.run(schedule, step)

        def compare() -> None:
            wrong = self._difference(few, outputs[0], mesh) if outputs else None
            if wrong is not None:
                raise ValueError(wrong)

        on_every_rank(compare, mesh.world)

    def _difference(self, few: Any, found: Any, mesh: PlanMesh) -> str | None:
        with torch.no_grad(), drawing(SEED, mesh.axes.device_type), _evaluating(self._copy):
            wanted = self._output(call(self._copy, few))
        pairs = [*tensors_in(wanted)], [*tensors_in(found)]
        what = ""
        if [one.shape for one in pairs[0]] != [one.shape for one in pairs[1]]:
            what = (
                f"{[list(one.shape) for one in pairs[1]]} in place of {[list(one.shape) for one in pairs[0]]}"
            )
        least = 0.0 if mesh.plan.precision == "f32" else LOW
        for number, (one, other) in enumerate(zip(*pairs, strict=True) if not what else ()):
            if not one.is_floating_point():
                continue
            far = relative_difference(one.nan_to_num(), other.to(one.dtype).nan_to_num())  # of masks, too
            if far > least:
                what = f"tensor {number} of its output differs by {far:.1e} of its largest value"
                break
        if not what:
            return None
        return (
            f"{mesh.plan} does not compute what {type(self._copy).__name__} does: {what}, on {ROWS} rows in "
            "evaluation mode. If the model draws random numbers there, leave out check=; else leave out "
            "pipeline= or context="
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module is in evaluation mode, and as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
