"""Sends rows to the ranks of their experts and back: two uneven all-to-alls, which autograd follows.

    this rank's rows, those for rank 0 first --all_to_all--> rows of all ranks, those of rank 0 first
    gradients of its rows                   <--all_to_all--  gradients of what it received

Every rank runs the same exchanges in the same order, whether it has rows or not. Autograd would leave out the
exchange of a rank whose rows need no gradient, and the others would wait. So an exchanged tensor always needs
a gradient where gradients are made, and `reached` ties it to the output of the layer.
Source: Lepikhin et al., GShard, ICLR 2021 (arXiv:2006.16668).

Ranks that have the same rows each send their share of them, and add up what returns:

    7 rows on 2 such ranks: 0 1 2 | 3 4 5 6

Ranks of one tensor group have the same values and the same gradients. Ranks of one context group that compute
a whole sequence have the same values, and their gradients add up (context/exchange.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.nn import functional

from unisono.parallel.generators import drawing, drawn_seed, seed_of
from unisono.parallel.graph.noted_call import ModuleOp, noted_call
from unisono.parallel.tensor_moves import TensorAxis, move


class RowExchange:
    """How many rows go from this rank to each one of a group, and how many come."""

    def __init__(self, sends: Sequence[int], receives: Sequence[int], group: Any, label: str) -> None:
        self.sends, self.receives = list(sends), list(receives)
        self._group, self._label = group, label

    def there(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Send rows to their ranks; return what all ranks have sent here. Shapes: [rows, ...] each."""
        return _exchanged(rows, self)

    def back(self, rows: Tensor) -> Tensor:
        """Return rows to where they came from; return this rank's own, in the order in which it sent them."""
        (own,) = _exchanged((rows,), RowExchange(self.receives, self.sends, self._group, self._label))
        return own

    def move(self, rows: Tensor, *, forward: bool) -> Tensor:
        """Move values without autograd."""
        sends, receives = (self.sends, self.receives) if forward else (self.receives, self.sends)
        return all_to_all(rows, sends, receives, self._group, self._label)


def all_to_all(rows: Tensor, sends: Sequence[int], receives: Sequence[int], group: Any, label: str) -> Tensor:
    """Send so many rows to each rank; return what came, by rank."""
    made = rows.new_empty(sum(receives), *rows.shape[1:])
    with record_function(label):
        dist.all_to_all_single(made, rows.contiguous(), list(receives), list(sends), group=group)
    return made


def told(numbers: Tensor, group: Any, label: str) -> Tensor:
    """Tell each rank its row of `numbers`; return what each rank has told this one. Shapes: [ranks, n]."""
    ones = [1] * len(numbers)
    return all_to_all(numbers, ones, ones, group, label)


def reached(output: Tensor, exchanged: Tensor) -> Tensor:
    """Return `output`; backward comes to `exchanged`, too, even if no value of it is in the output."""
    if not exchanged.requires_grad:
        return output
    tied: Tensor = _Reached.apply(output, exchanged)
    return tied


def used(output: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return `output`; the gradients of these parameters are zeros, not None."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return output
    tied: Tensor = _Used.apply(output, *trained)
    return tied


def _exchanged(rows: tuple[Tensor, ...], exchange: RowExchange) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return tuple(exchange.move(one, forward=True) for one in rows)
    found: tuple[Tensor, ...] = _MovedRows.apply(torch.zeros((), requires_grad=True), exchange, *rows)
    return found


class _MovedRows(torch.autograd.Function):
    """There in forward, back in backward: of all tensors, as soon as one of them has a gradient.

    The first argument makes the results need gradients.
    """

    @staticmethod
    def forward(ctx: Any, _needs: Tensor, exchange: RowExchange, *rows: Tensor) -> Any:
        ctx.exchange = exchange
        made = tuple(exchange.move(one, forward=True) for one in rows)
        ctx.mark_non_differentiable(*(one for one in made if not one.is_floating_point()))
        ctx.floating = [one.is_floating_point() for one in made]
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a gradient is differentiated again (create_graph=True) through a layer of experts. Leave "
                "out expert="
            )
        back = (
            ctx.exchange.move(grad, forward=False) if floating else None
            for grad, floating in zip(grads, ctx.floating, strict=True)
        )
        return None, None, *back


class _Reached(torch.autograd.Function):
    """The output, and an edge of autograd to something else.

    It saves a tensor: a recomputation that ends early ends after the last tensor that was saved, so not
    before the exchanges of its layer.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, _exchanged: Tensor) -> Tensor:
        ctx.save_for_backward(output.new_empty(0))
        return output.view_as(output)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


class _Used(torch.autograd.Function):
    """The output, and gradients of zeros for parameters."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def recorded(
    name: str, path: str, call: Callable[..., Any], args: tuple[Any, ...], also: Tensor, flops: int
) -> Tensor:
    """What stands for the call of a layer in a recorded program: a value like its first, with a gradient.

    Args:
        call: of the module that is at `path` then, with `args`.
        args: of the operator `name`: the first value, ..., the parameters.
        also: another value that has a gradient.
    """
    first, *_, parameters = args

    def made() -> Tensor:
        used = sum((parameter.sum() for parameter in parameters), also.sum())
        return first + used.to(first.dtype)  # type: ignore[no-any-return]

    return noted_call(ModuleOp(name, path, call), args, made, flops)  # type: ignore[no-any-return]


# ---- ranks that have the same rows ----


class RowShares:
    """The ranks that have this rank's rows.

    Args:
        tensor: those of its tensor group.
        context: those of its context group; None: they have other rows.
        label: of what they exchange, in a trace.
    Attributes:
        parts: how many they are.
    """

    def __init__(self, tensor: TensorAxis, context: TensorAxis | None, label: str) -> None:
        self._tensor, self._context, self._label = tensor, context, label
        ranks, place = (1, 0) if context is None else (context.parts, context.place)
        self.parts, self._place = tensor.parts * ranks, place * tensor.parts + tensor.place

    def bounds(self, rows: int) -> tuple[int, int]:
        """The rows [first, last) that this rank sends."""
        return rows * self._place // self.parts, rows * (self._place + 1) // self.parts

    def entered(self, value: Tensor) -> Tensor:
        """A value of which each rank uses its share."""
        return value if self._tensor.parts == 1 else move(value, "enter", 0, self._tensor, self._label)

    def added(self, value: Tensor) -> Tensor:
        """The sum of what the ranks have."""
        if self._tensor.parts > 1:
            value = move(value, "sum", 0, self._tensor, self._label)
        return value if self._context is None else move(value, "total", 0, self._context, self._label)

    def joined(self, share: Tensor, rows: int) -> Tensor:
        """All rows of which each rank has its share. Shapes: share [own rows, width]."""
        if self.parts == 1:
            return share
        first, last = self.bounds(rows)
        return self.added(functional.pad(share, (0, 0, first, rows - last)))

    def drawing(self, device: str) -> AbstractContextManager[None]:
        """These ranks draw for other rows, and the same numbers afterwards."""
        if self.parts == 1:
            return nullcontext()
        shared = drawn_seed() or 0
        return drawing(seed_of(shared, self._place), device)
