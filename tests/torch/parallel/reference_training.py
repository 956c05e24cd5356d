"""Training in one process, written out: the losses every plan must give. It shares nothing with
unisono.parallel.

In bf16 and fp16 a gradient of 16 rows is another one than the sum of two gradients of 8: each is rounded. So
the one process computes in the parts of the plan (`Way`). It adds them up in the plan's order.
"""

from __future__ import annotations

import copy
import functools
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel import models

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Way(NamedTuple):
    """In which parts and in which order one process computes. Only rounding depends on it.

    Args:
        data, micro: a batch is cut into `data` parts, each into `micro`: each rounds its gradients by itself.
        early: gradients add up over `data` first, then over `micro`; otherwise the other way round.
        untied: each use of a shared parameter rounds its gradient by itself.
        first_untied: in the first of `micro` only, and their sum is not rounded. So does FSDP2 since 2.15: a
            parameter's first gradient is made in f32, later ones in bf16 and added to it.
        tensor: products of matrices that are cut in so many parts round each part of a sum.
    """

    data: int = 1
    micro: int = 1
    early: bool = False
    untied: bool = False
    first_untied: bool = False
    tensor: int = 1


@functools.cache
def losses(
    name: str,
    optimizer: str,
    precision: str,
    steps: int,
    rows: int,
    way: Way,
    clip: float | None,
    scale: float,
) -> list[float]:
    """The loss of each step."""
    case, model = models.CASES[name], models.make(name)
    made = models.optimizer(optimizer, model.parameters())
    found = []
    for batch in case.batches(steps, rows):
        loss, grads = gradients(model, case, batch, TYPES[precision], way, scale)
        factor = 1.0
        if clip is not None:
            norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
            factor = min(1.0, clip / (norm + 1e-6))
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad * factor
        made.step()
        found.append(loss)
    return found


def gradients(
    model: nn.Module, case: Any, batch: tuple[Tensor, Tensor], dtype: torch.dtype, way: Way, scale: float
) -> tuple[float, list[Tensor]]:
    """Loss and f32 gradients of f32 masters, computed in `dtype`."""
    low = lowered(model, dtype, way.tensor, untied=way.untied)
    first = lowered(model, dtype, way.tensor, untied=way.first_untied or way.untied)
    factor, total = scale * way.data, 0.0
    found: list[list[list[Tensor]]] = []  # of each part of `data`, of each of `micro`, of each parameter
    for own in micro_batches(batch, way):
        found.append([])
        for number, (x, y) in enumerate(own):
            now = low if number else first
            output = now(x.to(dtype) if x.is_floating_point() else x)
            loss = case.loss(getattr(output, "logits", output).float(), y)
            share = len(x) / len(batch[0])
            grads = torch.autograd.grad(loss * (share * factor), list(now.parameters()))
            uses = [grad.float() / factor for grad in grads]
            found[-1].append(uses if way.untied or now is low else per_master(model, now, uses))
            total += loss.item() * share
    order = zip(*found, strict=True) if way.early else found
    grads = added([added(part) for part in order])
    return total, per_master(model, low, grads)


def lowered(model: nn.Module, dtype: torch.dtype, parts: int, *, untied: bool) -> nn.Module:
    """A copy that computes in `dtype`."""
    low = copy.deepcopy(model)
    for parameter in low.parameters():  # buffers stay, such as the frequencies of rotary positions
        parameter.data = parameter.data.to(dtype)
    if untied:
        untie(low)
    if dtype != torch.float32:  # there the models are as they come
        cut(low, parts)
    return low


def per_master(model: nn.Module, low: nn.Module, grads: list[Tensor]) -> list[Tensor]:
    """The gradients of `model`'s parameters, from those of a copy that may be untied."""
    masters = dict(model.named_parameters(remove_duplicate=False))
    sums = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    for (path, _), grad in zip(low.named_parameters(), grads, strict=True):
        sums[masters[path]] += grad
    return list(sums.values())


def added(many: Iterable[list[Tensor]]) -> list[Tensor]:
    """The sum, from the left, of each parameter's."""
    return [functools.reduce(torch.add, each) for each in zip(*many, strict=True)]


def micro_batches(batch: tuple[Tensor, Tensor], way: Way) -> list[list[tuple[Tensor, Tensor]]]:
    """The rows in parts; there are no more of `micro` than the smallest part has rows."""
    micro = min(way.micro, len(batch[0]) // way.data)
    parts = zip(*(torch.tensor_split(tensor, way.data) for tensor in batch), strict=True)
    return [list(zip(*(torch.tensor_split(t, micro) for t in own), strict=True)) for own in parts]


def untie(model: nn.Module) -> None:
    """Give each module that shares a parameter one of its own."""
    seen = set()
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter in seen:
            place, _, name = path.rpartition(".")
            model.get_submodule(place).register_parameter(name, nn.Parameter(parameter.detach().clone()))
        seen.add(parameter)


COLUMN = re.compile(r"(^|\.)(query|key|value|[qkv]_proj|gate_proj|up_proj|fc1|c_fc|c_attn|lm_head)$")
ROW = re.compile(r"(^|\.)(out_proj|o_proj|down_proj|fc2|c_proj)$")


def cut(model: nn.Module, parts: int) -> None:
    """Compute the products of matrices in parts, as ranks of a tensor axis do."""
    linear = [(path, m) for path, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")]
    chain = isinstance(model, nn.Sequential) and isinstance(model[0], nn.Linear)  # column, row, ..., whole
    for number, (path, module) in enumerate(linear):
        column = number % 2 == 0 and number + 1 < len(linear) if chain else COLUMN.search(path)
        row = number % 2 == 1 if chain else ROW.search(path)
        if path.endswith("c_attn"):
            module.forward = functools.partial(by_column, module, parts, fused=3)
        elif column and parts > 1:
            module.forward = functools.partial(by_column, module, parts)
        elif row and parts > 1:
            module.forward = functools.partial(by_row, module, parts)


def matrix(module: nn.Module) -> Tensor:
    """The weight [out, in]."""
    weight: Tensor = module.weight
    return weight if isinstance(module, nn.Linear) else weight.t()


def own(part: Tensor, module: nn.Module) -> Tensor:
    """A part of the matrix in memory of its own, as a rank has it: some kernels round otherwise in a view."""
    return part.contiguous() if isinstance(module, nn.Linear) else part.t().contiguous().t()


def by_column(module: nn.Module, parts: int, x: Tensor, *, fused: int = 1) -> Tensor:
    """Each part of the output rounds its own gradient of the input. `fused`: so many layers in one matrix."""
    biases = [None] * fused if module.bias is None else module.bias.chunk(fused)
    outputs = []
    for weight, bias in zip(matrix(module).chunk(fused), biases, strict=True):
        weights = [w.contiguous() if fused > 1 else own(w, module) for w in weight.chunk(parts)]
        cuts = [None] * parts if bias is None else bias.chunk(parts)
        inputs = Copies.apply(x, parts)
        for each in zip(inputs, weights, cuts, strict=True):
            outputs.append(functional.linear(*each))
            outputs[-1].register_hook(Tensor.contiguous)
    return torch.cat(outputs, -1)


def by_row(module: nn.Module, parts: int, x: Tensor) -> Tensor:
    """Each part of the sum is rounded, then the sum."""
    shares: Any = [None] * parts  # of the bias
    if module.bias is not None:
        shares = [each / parts for each in Copies.apply(module.bias, parts)]
    cuts = zip(x.chunk(parts, -1), matrix(module).chunk(parts, 1), shares, strict=True)
    return total([functional.linear(part.contiguous(), own(w, module), share) for part, w, share in cuts])


def total(values: Sequence[Tensor]) -> Tensor:
    """The sum in f32 from the left, rounded once, as Unisono's all-reduce in shared memory makes it."""
    return functools.reduce(torch.add, [value.float() for value in values]).to(values[0].dtype)


class Copies(torch.autograd.Function):
    """`x` so many times; the gradients of the copies add up as `total` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int) -> Any:
        return tuple(x.clone() for _ in range(parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        return total(grads), None
