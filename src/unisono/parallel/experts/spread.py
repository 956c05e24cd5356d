"""Spreads the experts of a model over ranks: finds the layers, keeps a copy for the trial, and cuts.

Nothing proves what a layer of experts computes. So the trial trains copies of the model with the same random
values, with and without the axis, on some rows of the first batch. Each rank's loss, its buffers and the
gradients of what is outside experts must be the same. So must those of its experts, summed over the ranks
whose rows they get. Where they are not, the error names the first module with another output, or the last one
whose parameters get another gradient.

Random values, because those of a new model hide mistakes: a norm's weights are all one, a last layer is zero.
Dropout is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import and_, eq
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unisono.errors import UnfitError
from unisono.parallel.batches import cut_rows, rows_of
from unisono.parallel.generators import drawing
from unisono.parallel.gradients import gradient
from unisono.parallel.graph.capture import call
from unisono.parallel.graph.containers import cast, tensors_in
from unisono.parallel.graph.shapes import model_copy
from unisono.parallel.mesh import PlanMesh
from unisono.parallel.output_check import LIMIT_BYTES, ROWS, SEED, raise_any, relative_difference
from unisono.parallel.precision import kept_in_f32
from unisono.parallel.structure import identity
from unisono.parallel.unit_hooks import own_memory
from unisono.torch_internals.training import module_at

from .layers import ExpertAxis, ExpertLayer, caller_of, expert_layers


def spread(
    model: nn.Module,
    mesh: PlanMesh,
    experts: dict[str, str] | None,
    check: bool | None,
    fill: Callable[[nn.Module], object],
    output: Callable[[Any], Any],
    *,
    pieces: bool = False,
) -> tuple[ExpertAxis | None, ExpertCheck | None]:
    """Leave this rank its experts, in place; return their axis, and what tries it in the first step.

    Without expert=, too, a layer that picks rows by values is one operator of a recorded program: a stacked
    one under context=, and what `experts` names. Its experts are then spread over the tensor ranks.

    Args:
        experts, check: see `parallelize`.
        fill: gives a copy on the meta device its values.
        output: of the model -> what the loss takes.
        pieces: stages are pieces, so that nothing is recorded for them.
    Raises:
        ValueError: no layer is known, or one cannot be spread or tried, or its experts are to keep f32; the
            text names it.
    """
    plan = mesh.plan
    layers = [] if plan.expert == plan.context == 1 and not experts else expert_layers(model, experts, plan)
    if not layers:
        return None, None
    recorded = plan.context > 1 or plan.tensor > 1 or (plan.pipeline > 1 and not pieces)
    if recorded:
        _check_within(model, layers)
    axis = ExpertAxis(model, layers, mesh, recorded=recorded)
    _check_exact(model, axis, kept_in_f32(model, plan))
    trial = ExpertCheck(model, axis, fill, output) if should_try(model, axis, check) else None
    axis.cut(model)
    return axis, trial


def _check_within(model: nn.Module, layers: list[ExpertLayer]) -> None:
    """Refuse a list that the model itself calls: all of its program would be one operator."""
    for layer in layers:
        if layer.kind == "list" and not caller_of(model, layer.path):
            raise UnfitError(
                f'{type(model).__name__} itself calls the experts of "{layer.path}", so nothing of its '
                "program is left to be cut by tensor, context or pipeline. Put the list, its router and what "
                "adds up the results into a module of their own"
            )


def _check_exact(model: nn.Module, axis: ExpertAxis, exact: Sequence[nn.Module]) -> None:
    """Refuse experts that keep f32: they would be reduced over all data ranks, which have others."""
    spread_over_ranks = {value for name, value in model.named_parameters() if name in axis.names}
    for path, module in model.named_modules():
        if module in exact and not spread_over_ranks.isdisjoint(module.parameters()):
            raise UnfitError(
                f'"{path}" keeps f32 and has experts that expert={axis.ranks} spreads over ranks; these '
                "compute in the plan's precision. Name other modules in keep_f32, such as gates, or use "
                "precision='f32'"
            )


# ---- the trial ----


FLOOR = 1e-2  # of the largest gradient: smaller ones are compared with this, as they may be rounding
DROPOUT_P = 10  # its place among the arguments of multi_head_attention_forward

Loss = Callable[[Any, Any], Tensor]


def should_try(model: nn.Module, axis: ExpertAxis, check: bool | None) -> bool:
    """Whether to try the axis."""
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    if check is not None or nbytes < LIMIT_BYTES:
        return check is not False
    unknown = [layer for layer in axis.layers if not _is_known(module_at(model, layer.path))]
    if not unknown:
        return False
    raise ValueError(
        f'nothing proves that "{unknown[0].path}" ({type(module_at(model, unknown[0].path)).__name__}) '
        f"can be spread over ranks, and the {nbytes / 1e6:.0f} MB of {type(model).__name__} are too many to "
        "copy unasked. Write parallelize(..., check=True): the first step trains two copies on some rows. Or "
        "check=False, if you have compared losses and gradients"
    )


def _is_known(module: nn.Module) -> bool:
    """Whether it is one of Hugging Face's layers, whose interface of experts fixes what they compute."""
    return type(module).__module__.startswith("transformers.") and hasattr(type(module), "_apply_gate")


class ExpertCheck:
    """A copy of a model before its experts were spread. It is used once."""

    def __init__(
        self,
        model: nn.Module,
        axis: ExpertAxis,
        fill: Callable[[nn.Module], object],
        output: Callable[[Any], Any] = identity,
    ) -> None:
        so = "its experts cannot be tried. If you have compared losses and gradients, write check=False"
        self._model = model_copy(model, so=so)
        self._model.zero_grad()
        fill(self._model)
        self._axis, self._output = axis, output

    def run(self, batch: tuple[Any, Any], loss: Loss, mesh: PlanMesh) -> None:
        """Try the axis on some rows of this rank's batch. All ranks call this."""
        if any(p.is_floating_point() and p.itemsize < 4 for p in self._model.parameters()):
            self._model.float()
            batch = cast(batch, torch.float32)
        _scatter(self._model)
        whole, cut = self._model, model_copy(self._model)
        with torch.enable_grad():
            with drawing(SEED, mesh.axes.device_type), _NoDropout():
                wanted, few = _alone(whole, self._forward(whole), batch, loss)
            self._axis.cut(cut, trial=True)
            active: list[str] = []
            for module in cut.modules():
                module.register_forward_hook(own_memory)
            with drawing(SEED, mesh.axes.device_type), _NoDropout():
                try:
                    found = _train(cut, self._forward(cut), few, loss, active)
                except Exception as error:
                    if all(layer.kind == "list" for layer in self._axis.layers):
                        raise  # which says itself what is wrong
                    path = active[-1] if active else ""
                    raise ValueError(self._text(path, f"it raises {error!r}")) from error
            self._add_up(wanted.parameters)
            here = {name: value for name, value in wanted.parameters.items() if name in found.parameters}
            wrong = _difference(wanted._replace(parameters=here), found)
        raise_any(None if wrong is None else self._text(*wrong), mesh)

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
        where = f'"{path}" ({type(module_at(self._model, path)).__name__})' if path else name
        layers = [layer.path for layer in self._axis.layers]
        near = max(layers, key=lambda one: sum(accumulate(map(eq, one.split("."), path.split(".")), and_)))
        pattern = ".".join("*" if part.isdigit() else part for part in near.split("."))
        return (
            f"expert={self._axis.ranks} does not train {name} as one process does. In {where}, {what}. "
            "Experts must take each row by itself, and a layer must add up what they return. Write "
            f'experts={{"{pattern}": "whole"}}'
        )


# ---- both ways ----


class ModelOutputs(NamedTuple):
    """What a copy of the model showed."""

    outputs: list[tuple[str, list[Tensor]]]  # path of each module that ended, in order
    loss: Tensor
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]


@torch.no_grad()
def _scatter(model: nn.Module) -> None:
    """Move every parameter by a random number, the same on all ranks."""
    generator = torch.Generator().manual_seed(SEED)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter)
            parameter.add_(noise * (0.02 + 0.1 * parameter.abs().mean()))


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            kwargs = {key: value for key, value in kwargs.items() if key not in ("p", "training", "train")}
            inplace = {"inplace": kwargs["inplace"]} if "inplace" in kwargs else {}
            return functional.dropout(args[0] if args else kwargs["input"], p=0.0, training=False, **inplace)
        if func is functional.multi_head_attention_forward:
            args = (*args[:DROPOUT_P], 0.0, *args[DROPOUT_P + 1 :])
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if len(args) <= 4 else {}
        return func(*args, **kwargs)


_DROPOUTS = {
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.alpha_dropout,
    torch.feature_dropout, torch.feature_alpha_dropout, torch.native_dropout,
}  # fmt: skip


def _alone(
    model: nn.Module, forward: Callable[[Any], Any], batch: Any, loss: Loss
) -> tuple[ModelOutputs, tuple[Any, Any]]:
    """Train on a few rows, or on all where the loss of a few is not finite; return the rows, too."""
    rows = rows_of(list(batch))
    for taken in (min(ROWS, rows), rows):
        few = cut_rows(batch, 0, taken)
        model.zero_grad()
        seen = _train(model, forward, few, loss, [])
        if bool(seen.loss.isfinite()):
            return seen, few
    raise ValueError(
        f"the loss of the first batch is {float(seen.loss)}, so the experts cannot be tried on it. Begin "
        "with a batch whose loss is finite, or write parallelize(..., check=False)"
    )


def _train(
    model: nn.Module, forward: Callable[[Any], Any], batch: Any, loss: Loss, active: list[str]
) -> ModelOutputs:
    """Forward and backward of one micro-batch. active: gets the paths of the modules that run."""
    outputs: list[tuple[str, list[Tensor]]] = []
    handles: list[Any] = []
    for path, module in model.named_modules():

        def begin(_module: nn.Module, _args: Any, path: str = path) -> None:
            active.append(path)

        def end(_module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
            del active[active.index(path) :]
            outputs.append((path, [tensor.detach().clone() for tensor in tensors_in(output)]))

        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        value = loss(forward(batch[0]), batch[1])
        value.backward()
    finally:
        for handle in handles:
            handle.remove()
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return ModelOutputs(outputs, value.detach(), dict(model.named_parameters()), buffers)


def _difference(alone: ModelOutputs, here: ModelOutputs) -> tuple[str, str] | None:
    """(the path of a module, what is wrong there); None: nothing."""
    grads = (parameter.grad for parameter in alone.parameters.values())
    largest = max((float(g.abs().max()) for g in grads if g is not None and g.numel()), default=0.0)
    wrong = {
        name: deviation
        for name, parameter in alone.parameters.items()
        if parameter.requires_grad
        and (deviation := _gradient_deviation(parameter, here.parameters[name], largest))
    }
    loss = relative_difference(alone.loss, here.loss)
    stale = {
        name: deviation
        for name, b in alone.buffers.items()
        if (deviation := relative_difference(b, here.buffers[name]))
    }
    if not wrong and not loss and not stale:
        return None
    for (path, first), (place, second) in zip(alone.outputs, here.outputs, strict=False):
        if path != place:
            break  # they call different modules from here on
        for one, other in zip(first, second, strict=False):
            if one.shape == other.shape and (deviation := relative_difference(one, other)):
                return path, f"its output differs by {deviation:.1e} of its largest value"
    if wrong:
        order = {path: number for number, (path, _) in enumerate(alone.outputs)}
        name = max(wrong, key=lambda name: order.get(name.rpartition(".")[0], -1))
        path, _, leaf = name.rpartition(".")
        return path, f"the gradient of {leaf} differs by {wrong[name]:.1e} of its largest value"
    if stale:
        name = next(iter(stale))
        return name.rpartition(".")[0], f"its buffer {name.rpartition('.')[2]} differs by {stale[name]:.1e}"
    return "", f"the loss differs by {loss:.1e}"


def _gradient_deviation(whole: nn.Parameter, cut: nn.Parameter, largest: float) -> float:
    mine = gradient(cut)
    full = whole.grad if whole.grad is not None else torch.zeros_like(whole)
    if isinstance(cut, DTensor):
        for axis, placement in enumerate(cut.placements):
            if isinstance(placement, Shard):
                mesh = cut.device_mesh
                full = full.chunk(mesh.size(axis), placement.dim)[mesh.get_local_rank(axis)]
    return relative_difference(full, torch.zeros_like(full) if mine is None else mine, FLOOR * largest)
