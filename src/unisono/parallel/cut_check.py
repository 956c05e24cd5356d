"""Tries a cut on the tensor axis: one micro-batch through the whole model and through the cut one.

A rule cuts modules by their names, which say nothing of the code between them. So both ways train copies of
the model with the same random values, and loss, gradients and buffers must be equal. Where they are not, the
error names the first module with another output, or the last one whose parameters get another gradient.

Random values, because those of a new model hide mistakes: a norm's weights are all one, a last layer is zero.
Dropout is off at first. Then the cut copy runs again with dropout: whole parameters must get the same
gradients on all ranks of the tensor axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unisono.torch.control_data import on_every_rank

from .batches import cut_rows, rows_of
from .divergence import ModelOutputs, difference, differing_gradients, text
from .generators import drawing, seed_of
from .gradients import TiedParameter, add_up
from .graph.capture import call
from .graph.containers import cast, tensors_in
from .graph.fused import split_
from .graph.model_copy import model_copy
from .graph.python_stack import draws_in_python, python_states
from .structure import ModelStructure, identity, run_pieces, structure_of
from .tensor_parallel import cut_model
from .unit_outputs import own_memory

if TYPE_CHECKING:
    from .graph.cut import Cut
    from .mesh import PlanMesh

LIMIT_BYTES = 100 << 20  # of parameters: a larger model is tried where check=True asks for it
ROWS = 4  # of a micro-batch; more show no more
SEED = 0x5EED
DROPOUT_P = 10  # its place among the arguments of multi_head_attention_forward

Loss = Callable[[Any, Any], Tensor]


class CutModelError(Exception):
    """The cut copy raised."""


def should_check(model: nn.Module, cut: Cut, check: bool | None) -> bool:
    """Whether to try the cut.

    Raises:
        ValueError: nothing proves this cut, and the model is too large to be copied unasked.
    """
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    if cut.proved:
        return bool(check and cut.dims)
    if check is not None or nbytes < LIMIT_BYTES:
        return check is not False
    raise ValueError(
        f"nothing proves that {type(model).__name__} can be cut so: its modules are cut by name, and its "
        f"{nbytes / 1e6:.0f} MB of parameters are too many to copy unasked. Write parallelize(..., "
        "sample=inputs of a batch): its recorded program then decides. Or check=True: the first step trains "
        f"two copies on {ROWS} rows, both ways. Or check=False, if you have compared losses and gradients"
    )


class CutCheck:
    """A copy of a model before it was cut, and how it is to be cut. It is used once.

    Args:
        model: with its values, or on the meta device.
        fill: gives a copy on the meta device its values.
        output: of the model -> what the loss takes.
    """

    def __init__(
        self,
        model: nn.Module,
        pieces: Sequence[nn.Module] | None,
        cuts: dict[str, str] | None,
        cut: Cut,
        fill: Callable[[nn.Module], object],
        output: Callable[[Any], Any] = identity,
    ) -> None:
        self._output = output
        try:
            self._model, self._pieces = model_copy((model, pieces))
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), so its cut "
                "cannot be tried. If you have compared losses and gradients, write check=False"
            ) from error
        self._model.zero_grad()
        fill(self._model)
        self._cuts, self._cut = cuts, cut

    def run(self, batch: tuple[Any, Any], loss: Loss, mesh: PlanMesh) -> None:
        """Try the cut on some rows of `batch`. All ranks call this.

        Raises:
            ValueError: it trains another model; the text names a module, and what to write.
        """
        device = mesh.axes.device_type
        if any(p.is_floating_point() and p.itemsize < 4 for p in self._model.parameters()):
            self._model.float()
            batch = cast(batch, torch.float32)
        scatter_(self._model)
        for path, sizes in self._cut.fused.items():  # both have the same parameters
            split_(self._model, path, sizes)
        whole, (model, pieces) = self._model, model_copy((self._model, self._pieces))
        with torch.enable_grad():
            forward = _forward(whole, self._structure(whole, self._pieces), mesh, self._output)
            drawn = python_states()
            with drawing(SEED, device), NoDropout():
                wanted, batch = alone(whole, forward, batch, loss)
            if python_states() != drawn:
                raise ValueError(f"{draws_in_python(type(whole).__name__)}, or leave out tensor=")
            structure = self._structure(model, pieces)
            region = cut_model(model, self._cut, mesh.part("tensor"), regathers=mesh.plan.sequence)
            sums = [TiedParameter(name, mesh.group("tensor"), 1, "up::sums") for name in self._cut.sums]
            for module in [*structure.units, model]:
                module.register_forward_hook(own_memory)
            forward = _forward(model, structure, mesh, self._output)

            def still() -> tuple[str, str] | None:
                with drawing(SEED, device), NoDropout():
                    return difference(wanted, train(model, forward, batch, loss, sums))

            def drawn() -> tuple[str, str] | None:
                model.zero_grad()
                region.forget()
                with drawing(seed_of(SEED, mesh.row), device):
                    return differing_gradients(train(model, forward, batch, loss, sums).parameters, mesh)

            for attempt in (still, drawn):
                _agree(attempt, mesh, partial(text, mesh.plan.tensor, model, structure))

    def _structure(self, model: nn.Module, pieces: Sequence[nn.Module] | None) -> ModelStructure:
        return structure_of(model, pieces, self._cuts, staged=bool(pieces))


def _agree(
    attempt: Callable[[], tuple[str, str] | None], mesh: PlanMesh, text: Callable[[str, str], str]
) -> None:
    """Raise the error of one rank on all ranks."""

    def check() -> None:
        try:
            found = attempt()
        except CutModelError as failed:
            error = failed.__cause__
            found = str(failed), f"it raises {type(error).__name__}: {error}"
        if found is not None:
            raise ValueError(text(*found))

    on_every_rank(check, mesh.world)


# ---- both ways ----


@torch.no_grad()
def scatter_(model: nn.Module) -> None:
    """Move every parameter by a random number, the same on all ranks."""
    generator = torch.Generator().manual_seed(SEED)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu").to(parameter)
            parameter.add_(noise * (0.02 + 0.1 * parameter.abs().mean()))


class NoDropout(TorchFunctionMode):
    """Dropout drops nothing."""

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


def _forward(
    model: nn.Module, structure: ModelStructure, mesh: PlanMesh, output: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """What the plan computes: the model, or its pieces one after the other."""

    def forward(inputs: Any) -> Any:
        if mesh.plan.pipeline == 1 or not structure.pieces:
            return output(call(model, inputs))
        return run_pieces(structure.pieces, inputs, spreads=structure.spreads)

    return forward


def alone(
    model: nn.Module, forward: Callable[[Any], Any], batch: Any, loss: Loss
) -> tuple[ModelOutputs, tuple[Any, Any]]:
    """Train on a few rows, or on all where the loss of a few is not finite; return the rows, too."""
    rows = rows_of(list(batch))
    for taken in (min(ROWS, rows), rows):
        few = cut_rows(batch, 0, taken)
        model.zero_grad()
        seen = train(model, forward, few, loss)
        if bool(seen.loss.isfinite()):
            return seen, few
    raise ValueError(
        f"the loss of the first batch is {float(seen.loss)}, so the cut cannot be tried on it. Begin with a "
        "batch whose loss is finite, or write parallelize(..., check=False)"
    )


def train(
    model: nn.Module,
    forward: Callable[[Any], Any],
    batch: Any,
    loss: Loss,
    sums: Sequence[TiedParameter] = (),
) -> ModelOutputs:
    """Forward and backward of one micro-batch.

    Raises:
        CutModelError: the cut model raised; the text is the path of its innermost module.
    """
    outputs: list[tuple[str, list[Tensor]]] = []
    active: list[str] = []
    handles: list[Any] = []
    for path, module in model.named_modules():

        def begin(_module: nn.Module, _args: Any, path: str = path) -> None:
            active.append(path)

        def end(_module: nn.Module, _args: Any, output: Any, path: str = path) -> None:
            del active[active.index(path) :]
            outputs.append((path, [tensor.detach().clone() for tensor in _tensors(output)]))

        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        value = loss(forward(batch[0]), batch[1])
        value.backward()
        add_up(dict(model.named_parameters()), sums)
    except Exception as error:
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise CutModelError(active[-1] if active else "") from error
        raise
    finally:
        for handle in handles:
            handle.remove()
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return ModelOutputs(outputs, value.detach(), dict(model.named_parameters()), buffers)


def _tensors(output: Any) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(output) if not isinstance(tensor, DTensor))
