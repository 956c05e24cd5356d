"""Tries an expert axis: some rows of the first batch through copies of the model, with and without it.

Both copies have the same random values, as in a trial of the tensor axis (cut_check.py). Each rank's loss,
its buffers and the gradients of what is outside experts must be the same. So must those of its experts,
summed over the ranks whose rows they get.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from unisono.parallel.cut_check import (
    LIMIT_BYTES,
    SEED,
    CutModelError,
    Loss,
    NoDropout,
    alone,
    scatter_,
    train,
)
from unisono.parallel.divergence import difference
from unisono.parallel.families import identity
from unisono.parallel.generators import drawing
from unisono.parallel.graph.capture import call
from unisono.parallel.graph.containers import cast
from unisono.parallel.graph.model_copy import model_copy
from unisono.parallel.unit_outputs import own_memory
from unisono.torch.control_data import on_every_rank

from .axis import ExpertAxis

if TYPE_CHECKING:
    from unisono.parallel.mesh import PlanMesh


def should_try(model: nn.Module, axis: ExpertAxis, check: bool | None) -> bool:
    """Whether to try the axis.

    Raises:
        ValueError: the model is too large to be copied unasked, and has layers that nothing proves.
    """
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    if check is not None or nbytes < LIMIT_BYTES:
        return check is not False
    unknown = [layer for layer in axis.layers if not _is_known(model.get_submodule(layer.path))]
    if not unknown:
        return False
    raise ValueError(
        f'nothing proves that "{unknown[0].path}" ({type(model.get_submodule(unknown[0].path)).__name__}) '
        f"can be spread over ranks, and the {nbytes / 1e6:.0f} MB of {type(model).__name__} are too many to "
        "copy unasked. Write parallelize(..., check=True): the first step trains two copies on some rows. Or "
        "check=False, if you have compared losses and gradients"
    )


def _is_known(module: nn.Module) -> bool:
    """Whether it is one of Hugging Face's layers, whose interface of experts fixes what they compute."""
    return type(module).__module__.startswith("transformers.") and hasattr(type(module), "_apply_gate")


class ExpertCheck:
    """A copy of a model before its experts were spread. It is used once.

    Args:
        fill: gives a copy on the meta device its values.
        output: of the model -> what the loss takes.
    """

    def __init__(
        self,
        model: nn.Module,
        axis: ExpertAxis,
        fill: Callable[[nn.Module], object],
        output: Callable[[Any], Any] = identity,
    ) -> None:
        try:
            self._model = model_copy(model)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), so its experts "
                "cannot be tried. If you have compared losses and gradients, write check=False"
            ) from error
        self._model.zero_grad()
        fill(self._model)
        self._axis, self._output = axis, output

    def run(self, batch: tuple[Any, Any], loss: Loss, mesh: PlanMesh) -> None:
        """Try the axis on some rows of this rank's batch. All ranks call this.

        Raises:
            ValueError: it trains another model; the text names a module, and what to write.
        """
        if any(p.is_floating_point() and p.itemsize < 4 for p in self._model.parameters()):
            self._model.float()
            batch = cast(batch, torch.float32)
        scatter_(self._model)
        whole, cut = self._model, model_copy(self._model)
        with torch.enable_grad():
            with drawing(SEED, mesh.axes.device_type), NoDropout():
                wanted, few = alone(whole, self._forward(whole), batch, loss)
            self._axis.cut(cut, trial=True)
            for module in cut.modules():
                module.register_forward_hook(own_memory)
            with drawing(SEED, mesh.axes.device_type), NoDropout():
                try:
                    found = train(cut, self._forward(cut), few, loss)
                except CutModelError as failed:
                    raise ValueError(
                        self._text(str(failed), f"it raises {failed.__cause__!r}")
                    ) from failed.__cause__
            self._add_up(wanted.parameters)
            here = {name: value for name, value in wanted.parameters.items() if name in found.parameters}
            wrong = difference(wanted._replace(parameters=here), found)

        def compare() -> None:
            if wrong is not None:
                raise ValueError(self._text(*wrong))

        on_every_rank(compare, mesh.world)

    def _forward(self, model: nn.Module) -> Callable[[Any], Any]:
        return lambda inputs: self._output(call(model, inputs))

    def _add_up(self, parameters: dict[str, nn.Parameter]) -> None:
        """Sum the gradients of experts over the ranks whose rows they get."""
        group = self._axis.mesh.group("tensor")
        for name in sorted(self._axis.names):
            parameter = parameters[name]
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= self._axis.tensor.parts  # whose ranks have the same rows

    def _text(self, path: str, what: str) -> str:
        name = type(self._model).__name__
        where = f'"{path}" ({type(self._model.get_submodule(path)).__name__})' if path else name
        layers = [layer.path for layer in self._axis.layers]
        near = max(layers, key=lambda one: len(_common(one, path)))
        pattern = ".".join("*" if part.isdigit() else part for part in near.split("."))
        return (
            f"expert={self._axis.ranks} does not train {name} as one process does. In {where}, {what}. "
            "Experts must take each row by itself, and a layer must add up what they return. Write "
            f'experts={{"{pattern}": "whole"}}'
        )


def _common(one: str, other: str) -> list[str]:
    """The parts at which two paths begin alike."""
    found = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        found.append(a)
    return found
