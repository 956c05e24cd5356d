"""Records a step of training on shapes: every operator of forward, loss, backward and update of one rank.

Nothing is computed. What autograd runs in backward is recorded as it runs, and belongs to the module call and
the unit of the operator that it differentiates. Stages begin at module calls, so one trace serves any number.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.explained_errors import is_ours
from unisono.parallel.graph.call_structure import argument_names
from unisono.parallel.graph.capture import CaptureError, Shapes, call
from unisono.parallel.graph.containers import cast, tensors_in
from unisono.parallel.graph.cut import Cut, ModuleMove
from unisono.parallel.graph.fused import split_
from unisono.parallel.graph.local_model import ModuleMoves, narrow_
from unisono.parallel.graph.written import Written
from unisono.parallel.optimizers import chooses_lists, optimizers_of
from unisono.torch_internals.fake import OperatorMode, is_about_data, number_read
from unisono.torch_internals.training import module_at, next_sequence, sequence_of

from .operator_kinds import point_of
from .traced_step import (
    NO_UNIT,
    ModuleCall,
    StepLayout,
    TracedAttention,
    TracedMove,
    TracedOperator,
    TracedStep,
)

__all__ = ["trace_step", "trace_update"]

ACCUMULATES = 1 << 62
"""Functions that add to .grad have the largest numbers there are."""


def trace_step(
    shapes: Shapes,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Any],
    layout: StepLayout,
    *,
    output: Callable[[Any], Any],
) -> TracedStep:
    """Record forward, loss and backward of one micro-batch.

    Args:
        shapes: a copy of the model of its own; it is cut here.
        batch: (inputs, targets) of the micro-batch.
        output: the model's result -> what the loss takes.
    Raises:
        CaptureError: the model or the loss reads values, or raises. What code of this package raises stays.
    """
    model = shapes.model
    found = TracedStep(model)
    mode = _StepMode(found)
    if layout.cut is not None:
        _cut(shapes, layout.cut, mode)
    if layout.dtype is not None:
        with shapes.mode, torch.no_grad():
            for value in [*model.parameters(), *model.buffers()]:
                if value.is_floating_point():
                    value.data = value.data.to(layout.dtype)
    called: dict[str, tuple[int, str]] = {}
    handles = _hooks(model, layout, mode, called)
    inputs, targets = shapes.inputs(batch[0]), shapes.inputs(batch[1])
    try:
        with shapes.mode, torch.enable_grad(), mode:
            result = output(call(model, cast(inputs, layout.dtype)))
            value = loss(cast(result, torch.float32), targets)
            value = value[0] if isinstance(value, tuple) else value
            mode.backward(value.mean() if value.dim() else value)
    except Exception as error:
        if is_ours(error):
            raise
        why = "reads values of tensors" if is_about_data(error) else type(error).__name__
        says = str(error).strip().splitlines()
        raise CaptureError(
            f"a step of {type(model).__name__} cannot run on shapes: {why}: {says[0] if says else ''}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    found.homes = _homes(model, called)
    return found


def trace_update(
    traced: TracedStep, optimizer: Callable[[Any], Any], parameters: Any, *, on_gpu: bool
) -> list[TracedOperator]:
    """Record one step of an optimizer.

    Args:
        on_gpu: it steps by lists where it may choose, as PyTorch does on GPUs, and has its state already.
    Raises:
        CaptureError: it raises.    ValueError, TypeError: no run takes it.
    """
    seen = TracedStep(traced.model)
    mode = _StepMode(seen)
    mode.phase = "update"
    with _on_shapes():
        made = optimizer(parameters)
    every = optimizers_of(made, parameters, swap=False)
    with _on_shapes(), mode:
        for one in every if on_gpu else ():
            _step_by_lists(one)
        seen.operators.clear()
        for one in every:
            one.step()
    return seen.operators


@contextmanager
def _on_shapes() -> Iterator[None]:
    """Say that an error is of an optimizer without values."""
    try:
        yield
    except Exception as error:
        says = str(error).strip().splitlines()
        raise CaptureError(
            f"the optimizer cannot run on shapes: {type(error).__name__}: {says[0] if says else ''}. With "
            "optimizer=None the update is priced as Adam's"
        ) from error


def _step_by_lists(optimizer: Any) -> None:
    """Choose PyTorch's kernels of lists, and make the state of a first step."""
    for group in optimizer.param_groups:
        if chooses_lists(optimizer, group):
            group["foreach"] = True
    optimizer.step()


class _StepMode(OperatorMode):
    """Notes each operator with its phase, module call and unit."""

    def __init__(self, found: TracedStep) -> None:
        super().__init__()
        self.found, self.phase = found, "forward"
        self.call, self.units = -1, [NO_UNIT]
        self._bounds: list[int] = [-1]  # numbers of functions where another call or unit begins
        self._places: list[tuple[int, str]] = [(-1, NO_UNIT)]
        self._accumulates = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if self.phase == "update" and (number := number_read(func, args)) is not None:
            return number
        output = func(*args, **named)
        if self._accumulates or func.namespace == "prim":
            return output
        followed = self.phase == "backward" or (
            self.phase == "forward"
            and torch.is_grad_enabled()
            and any(tensor.requires_grad for tensor in tensors_in((args, named)))
        )
        size = point_of(func, args, named, output)
        self.found.operators.append(TracedOperator(size, self.phase, self.call, self.units[-1], followed))
        if size.kind == "attention":
            self._attend([arg for arg in args if isinstance(arg, Tensor)])
        return output

    def _attend(self, given: list[Tensor]) -> None:
        """Note an attention whose positions a context axis could cut."""
        q, k, v = given[:3]
        heads = math.gcd(q.shape[1], k.shape[1])
        self.found.attentions.append(
            TracedAttention(q.nbytes, k.nbytes + v.nbytes, heads, q.element_size(), self.call)
        )

    def note(self, collective: str, nbytes: int, phase: str = "") -> None:
        """A collective of the tensor axis happens here."""
        move = TracedMove(collective, nbytes, phase or self.phase, self.call, self.units[-1])
        self.found.moves.append(move)

    def mark(self) -> None:
        """Functions of autograd that are made from now on belong to the present call and unit."""
        self._bounds.append(next_sequence())
        self._places.append((self.call, self.units[-1]))

    def backward(self, loss: Tensor) -> None:
        """Run backward; what a function runs belongs to the place where it was made."""
        for function in _functions(loss.grad_fn):
            number = sequence_of(function)
            if number < 0:
                raise CaptureError(
                    "this PyTorch does not number the functions of autograd, so no step is recorded"
                )
            function.register_prehook(self._entering(number))
        self.phase = "backward"
        loss.backward()

    def _entering(self, number: int) -> Callable[[Any], None]:
        place = self._places[bisect.bisect_right(self._bounds, number) - 1]

        def enter(_gradients: Any) -> None:
            self._accumulates = number > ACCUMULATES
            self.call, self.units = place[0], [place[1]]

        return enter


def _functions(first: Any) -> Iterable[Any]:
    """Every function of autograd behind a loss."""
    seen, left = set(), [first]
    while left:
        function = left.pop()
        if function is not None and function not in seen:
            seen.add(function)
            left += [before for before, _ in function.next_functions]
            yield function


def _homes(model: nn.Module, called: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """Where the innermost module around each parameter that was called has begun."""
    found = {}
    for name, _ in model.named_parameters():
        path = name.rpartition(".")[0]
        while path and path not in called:
            path = path.rpartition(".")[0]
        found[name] = called.get(path, (-1, NO_UNIT))
    return found


def _hooks(
    model: nn.Module, layout: StepLayout, mode: _StepMode, called: dict[str, tuple[int, str]]
) -> list[Any]:
    """Follow calls and units while the model runs; note where each module is called first."""
    counts: Counter[str] = Counter()
    units = set(layout.units)
    handles: list[Any] = []

    def begin(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, named: Any) -> None:
            mode.call = len(mode.found.calls)
            nbytes = sum(t.numel() * t.element_size() for t in tensors_in((args, named)))
            mode.found.calls.append(ModuleCall(path, counts[path], nbytes))
            counts[path] += 1
            if path in units:
                mode.units.append(path)
            mode.mark()
            called.setdefault(path, (mode.call, mode.units[-1]))

        return hook

    def end(_module: nn.Module, _args: Any, _output: Any) -> None:
        mode.units.pop()
        mode.mark()

    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin(path), prepend=True, with_kwargs=True))
        if path in units:
            handles.append(module.register_forward_hook(end))
    return handles


# ---- the tensor axis ----


def _cut(shapes: Shapes, cut: Cut, mode: _StepMode) -> None:
    """Give the copy one rank's part of each parameter, with collectives that only say what they are."""
    model = shapes.model
    with shapes.mode:
        for path, sizes in cut.fused.items():
            split_(model, path, sizes)
    narrow_(shapes, cut)
    written = Written(model, cut.sizes)
    written.wrap()
    for path in dict.fromkeys([*cut.modules, *cut.moves]):
        _wrap(module_at(model, path), path, cut, mode)
    written.wrap_others()


def _wrap(module: nn.Module, path: str, cut: Cut, mode: _StepMode) -> None:
    run, kind, moves = module.forward, cut.modules.get(path, ""), cut.moves.get(path, {})
    scatters = any(each.kind == "scatter" for each in moves.values())

    def move(value: Tensor, how: ModuleMove) -> Tensor:
        changed: Tensor = _ShapeMove.apply(value, how, cut.parts, mode)
        return changed

    made = ModuleMoves(moves, argument_names(run), move)

    @wraps(run)
    def forward(*args: Any, **named: Any) -> Any:
        args, named = made.taken(args, named)
        output = run(*args, **named)
        if kind == "column, gathered":
            output = move(output, ModuleMove("gather", -1))
        elif kind in ("row", "vocabulary") and not scatters:
            output = move(output, ModuleMove("sum", 0))
        return made.returned(output)

    module.forward = forward  # type: ignore[method-assign]


INVERSE = {"gather": "slice", "gather, sum": "scatter", "scatter": "gather", "slice": "gather"}


class _ShapeMove(torch.autograd.Function):
    """A move of the tensor axis, on shapes: see tensor_moves.py."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, how: ModuleMove, parts: int, mode: _StepMode) -> Tensor:
        ctx.how = how, parts, mode
        return _made(value, how.kind, how.dim, parts, mode, first="enter", sums="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        how, parts, mode = ctx.how
        kind = INVERSE.get(how.kind, how.kind)
        if how.kind == "gather, sum":
            mode.note("all_gather", grad.numel() * grad.element_size(), "regather")
        return _made(grad, kind, how.dim, parts, mode, first="sum", sums="enter"), None, None, None


def _made(
    value: Tensor, kind: str, dim: int, parts: int, mode: _StepMode, *, first: str, sums: str
) -> Tensor:
    """What a move makes of a value. `first`: the kind that does nothing here.  `sums`: that which sums."""
    nbytes = value.numel() * value.element_size()
    if kind == first:
        return value.view_as(value)
    if kind == sums:
        mode.note("all_reduce", nbytes)
        return value.clone(memory_format=torch.contiguous_format)
    if kind == "slice":
        return value.narrow(dim, 0, value.shape[dim] // parts).clone()
    if kind == "scatter":
        mode.note("reduce_scatter", nbytes)
        return value.narrow(dim, 0, value.shape[dim] // parts).clone()
    mode.note("all_gather", nbytes * parts)
    return torch.cat([value] * parts, dim)
