"""Traces a step of training on shapes: every operator of forward, loss, backward and update of one rank.

Nothing is computed. What autograd runs in backward is recorded as it runs, and belongs to the module call and
the unit of the operator that it differentiates. Stages begin at module calls, so one trace serves any number;
and two traces serve any number of rows: sizes of operators are a + b * rows in nearly every model. A third
recording tells whether they are in this one; if not, each number of rows is recorded.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.parallel.failures import is_ours
from unisono.parallel.generators import RngRegion
from unisono.parallel.graph.capture import CaptureError, Shapes, call
from unisono.parallel.graph.containers import cast, tensors_in
from unisono.parallel.graph.cut import Cut
from unisono.parallel.graph.step_trace import StepTrace
from unisono.parallel.optimizers import chooses_lists, optimizers_of
from unisono.parallel.tensor_moves import TensorAxis
from unisono.parallel.tensor_parallel import run_cut
from unisono.torch_internals import autograd
from unisono.torch_internals.fake import READ, is_about_data

from .operators import TracedOperator, point_of

NO_UNIT = ""


class TracedMove(NamedTuple):
    """One collective of the tensor axis."""

    collective: str
    nbytes: int  # of the whole buffer, the larger end
    phase: str  # forward, backward, or regather: in backward, of what a layer got from all ranks and dropped
    call: int  # as of an operator
    unit: str  # likewise


class TracedAttention(NamedTuple):
    """One attention in forward, over all positions."""

    queries: int  # bytes of the queries
    keys: int  # of keys and values together
    heads: int  # the largest number that divides those of the queries and those of the keys
    width: int  # bytes of an element
    call: int  # as of an operator


class ModuleCall(NamedTuple):
    """A call of a module in forward: its path, which call of it from 0, and the bytes of its tensors."""

    path: str
    number: int
    nbytes: int


@dataclass
class TracedStep:
    """What one micro-batch runs on shapes, on one data rank, over all stages."""

    model: nn.Module  # the copy without values, cut; its parameters have gradients
    operators: list[TracedOperator] = field(default_factory=list)
    moves: list[TracedMove] = field(default_factory=list)
    attentions: list[TracedAttention] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)  # of modules, in the order in which they begin
    # Name of a parameter -> the call and the unit in which its module is called first.
    homes: dict[str, tuple[int, str]] = field(default_factory=dict)


# ---- recording ----

ACCUMULATES = 1 << 62
"""Functions that add to .grad have the largest numbers there are."""


def trace_step(
    shapes: Shapes,
    batch: tuple[Any, Any],
    loss: Callable[[Any, Any], Any],
    *,
    output: Callable[[Any], Any],
    units: Collection[str] = (),
    cut: Cut | None = None,
    dtype: torch.dtype | None = None,
) -> TracedStep:
    """Record forward, loss and backward of one micro-batch.

    Args:
        shapes: a copy of the model of its own; it is cut here.
        batch: (inputs, targets) of the micro-batch.
        output: the model's result -> what the loss takes.
        units: paths of modules whose parameters are gathered and reduced together.
        cut: how the tensor axis cuts the model; None: not.
        dtype: in which it computes; None: in that of its parameters.
    Raises:
        CaptureError: the model or the loss reads values, or raises. What code of this package raises stays.
    """
    model = shapes.model
    found = TracedStep(model)
    mode = TimedStep(found, units)
    if cut is not None:
        _cut(shapes, cut, mode)
    if dtype is not None:
        with shapes.mode, torch.no_grad():
            for value in [*model.parameters(), *model.buffers()]:
                if value.is_floating_point():
                    value.data = value.data.to(dtype)
    inputs, targets = shapes.inputs(batch[0]), shapes.inputs(batch[1])
    with (
        mode.follow(model.named_modules()), _on_shapes(f"a step of {type(model).__name__}"), shapes.mode,
        torch.enable_grad(), mode,
    ):  # fmt: skip
        result = output(call(model, cast(inputs, dtype)))
        value = loss(cast(result, torch.float32), targets)
        value = value[0] if isinstance(value, tuple) else value
        mode.backward(value.mean() if value.dim() else value)
    found.homes = _homes(model, mode.called)
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
    mode = TimedStep(seen, phase="update")
    remedy = ". With optimizer=None the update is priced as Adam's"
    with _on_shapes("the optimizer", remedy):
        made = optimizer(parameters)
    every = optimizers_of(made, parameters, swap=False)
    with _on_shapes("the optimizer", remedy), mode, mode.having(numbers=READ):
        for one in every if on_gpu else ():
            _step_by_lists(one)
        seen.operators.clear()
        for one in every:
            one.step()
    return seen.operators


@contextmanager
def _on_shapes(what: str, remedy: str = "") -> Iterator[None]:
    """Say what an error means where there are no values. One of this package stays, if nothing else helps."""
    try:
        yield
    except Exception as error:
        if is_ours(error) and not remedy:
            raise
        why = "reads values of tensors" if is_about_data(error) else type(error).__name__
        line = next(iter(str(error).strip().splitlines()), "")
        raise CaptureError(f"{what} cannot run on shapes: {why}: {line}{remedy}") from error


def _step_by_lists(optimizer: Any) -> None:
    """Choose PyTorch's kernels of lists, and make the state of a first step."""
    for group in optimizer.param_groups:
        if chooses_lists(optimizer, group):
            group["foreach"] = True
    optimizer.step()


class TimedStep(StepTrace):
    """What takes time in a step: each operator with its phase, module call and unit."""

    def __init__(self, found: TracedStep, units: Collection[str] = (), phase: str = "forward") -> None:
        super().__init__(phase)
        self.found, self.call, self.units = found, -1, [NO_UNIT]
        self.called: dict[str, tuple[int, str]] = {}  # where each module is called first
        self._unit_paths, self._counts = set(units), Counter[str]()
        self._bounds: list[int] = [-1]  # numbers of functions where another call or unit begins
        self._places: list[tuple[int, str]] = [(-1, NO_UNIT)]

    def operator(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run one operator, and note it."""
        output = op(*args, **named)
        if op.namespace in ("prim", "profiler") or (self.phase == "backward" and self._accumulates()):
            return output
        followed = self.phase == "backward" or (
            self.phase == "forward"
            and torch.is_grad_enabled()
            and any(tensor.requires_grad for tensor in tensors_in((args, named)))
        )
        size = point_of(op, args, named, output)
        self.found.operators.append(TracedOperator(size, self.phase, self.call, self.units[-1], followed))
        if size.kind == "attention":  # whose positions a context axis could cut
            q, k, v = [arg for arg in args if isinstance(arg, Tensor)][:3]
            heads, keys = math.gcd(q.shape[1], k.shape[1]), k.nbytes + v.nbytes
            attention = TracedAttention(q.nbytes, keys, heads, q.element_size(), self.call)
            self.found.attentions.append(attention)
        return output

    def note(self, collective: str, nbytes: int, phase: str = "") -> None:
        """A collective of the tensor axis happens here."""
        move = TracedMove(collective, nbytes, phase or self.phase, self.call, self.units[-1])
        self.found.moves.append(move)

    def begin(self, path: str, module: nn.Module, args: Any, named: Any) -> None:  # noqa: ARG002
        """A call of a module begins, and perhaps a unit."""
        self.call = len(self.found.calls)
        nbytes = sum(tensor.nbytes for tensor in tensors_in((args, named)))
        self.found.calls.append(ModuleCall(path, self._counts[path], nbytes))
        self._counts[path] += 1
        if path in self._unit_paths:
            self.units.append(path)
        self._mark()
        self.called.setdefault(path, (self.call, self.units[-1]))

    def end(self, path: str, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        """A call of a module ends."""
        if path in self._unit_paths:
            self.units.pop()
            self._mark()

    def _mark(self) -> None:
        """Functions of autograd that are made from now on belong to the present call and unit."""
        self._bounds.append(autograd.next_sequence())
        self._places.append((self.call, self.units[-1]))

    def backward(self, loss: Tensor) -> None:
        """Run backward; what a function runs belongs to the place where it was made."""
        if not autograd.numbers_functions():
            raise CaptureError(
                "this PyTorch does not number the functions of autograd, so no step is recorded"
            )
        self.phase = "backward"
        loss.backward()

    def _accumulates(self) -> bool:
        """Go to the place of the function whose backward runs; whether it adds to .grad."""
        number = autograd.running_sequence()
        if number >= 0:
            self.call, unit = self._places[bisect.bisect_right(self._bounds, number) - 1]
            self.units = [unit]
        return number > ACCUMULATES


def _homes(model: nn.Module, called: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """Where the innermost module around each parameter that was called has begun."""
    found = {}
    for name, _ in model.named_parameters():
        path = name.rpartition(".")[0]
        while path and path not in called:
            path = path.rpartition(".")[0]
        found[name] = called.get(path, (-1, NO_UNIT))
    return found


# ---- the tensor axis ----


def _cut(shapes: Shapes, cut: Cut, mode: TimedStep) -> None:
    """Have the copy run on one rank's parts, with collectives that only say what they are."""

    def part(value: Tensor, dim: int) -> Tensor:
        return value.narrow(dim, 0, value.shape[dim] // cut.parts).clone()

    with shapes.mode:
        run_cut(shapes.model, cut, part, _NotedAxis(mode, 0, cut.parts), RngRegion(None, "cpu"))


class _NotedAxis(TensorAxis):
    """An axis whose other ranks are not there. Its `group` is the mode that notes what moves."""

    def sum_(self, value: Tensor) -> None:
        self.group.note("all_reduce", value.nbytes)

    def gather_into(self, every: Tensor, mine: Tensor) -> None:  # noqa: ARG002
        self.group.note("all_gather", every.nbytes)

    def scatter_into(self, mine: Tensor, every: Tensor) -> None:  # noqa: ARG002
        if self.group.phase == "backward":  # of what a layer got from all ranks, which may be gathered again
            self.group.note("all_gather", every.nbytes, "regather")
        self.group.note("reduce_scatter", every.nbytes)


# ---- traces of other numbers of rows ----

CLOSE = 0.01
"""Sizes that differ by no more than this share are the same."""

LEAST = 2
"""Rows of a recording that others follow: one row may have other strides."""


class TracedRows:
    """What has been recorded of one model, under any number of cuts."""

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[int, TracedStep]] = {}
        self._bases: dict[Hashable, list[int]] = {}
        self._proportional: bool | None = None  # not known yet
        self._errors: dict[Hashable, CaptureError] = {}

    def of(self, key: Hashable, rows: int, record: Callable[[int], TracedStep]) -> TracedStep:
        """The step of so many rows.

        Args:
            key: of the program.  record: makes the trace of so many rows.
        Raises:
            CaptureError: it cannot be recorded. Other rows than one are not tried again then.
        """
        failed = key, rows >= LEAST
        if failed in self._errors:
            raise self._errors[failed]
        known, bases = self._known.setdefault(key, {}), self._bases.setdefault(key, [])
        if rows in known:
            return known[rows]
        guess = None
        if len(bases) == 2 and self._proportional is not False:
            guess = followed((bases[0], known[bases[0]]), (bases[1], known[bases[1]]), rows)
        if guess is not None and self._proportional:
            known[rows] = guess
            return guess
        try:
            known[rows] = record(rows)
        except CaptureError as error:
            self._errors[failed] = error
            raise
        if rows >= LEAST and len(bases) == 2 and self._proportional is None:
            self._proportional = guess is not None and _same(guess, known[rows])
        if rows >= LEAST and len(bases) < 2:
            bases.append(rows)
        return known[rows]


def followed(one: tuple[int, TracedStep], other: tuple[int, TracedStep], rows: int) -> TracedStep | None:
    """The trace of other rows, from those of two; None: these have other operators.

    Example: a product of (16, 8, 8) for 2 rows and (32, 8, 8) for 4 is (8, 8, 8) for one.
    """
    (first, low), (second, high) = one, other
    if not _alike(low, high):
        return None

    def size(a: float, b: float) -> float:
        return a if a == b else max(1.0, a + (b - a) * (rows - first) / (second - first))

    return replace(low, **_sized(low, high, size))


def _sized(one: TracedStep, other: TracedStep, size: Callable[[float, float], float]) -> dict[str, Any]:
    """What runs in the one, with other sizes made of those of both."""

    def operator(a: TracedOperator, b: TracedOperator) -> TracedOperator:
        point = tuple(size(x, y) for x, y in zip(a.size.point, b.size.point, strict=True))
        return a if a.size.point == point else a._replace(size=a.size._replace(point=point))

    def moved(a: Any, b: Any, *names: str) -> Any:
        return a._replace(**{name: round(size(getattr(a, name), getattr(b, name))) for name in names})

    sizes = {"moves": ("nbytes",), "attentions": ("queries", "keys"), "calls": ("nbytes",)}
    found: dict[str, Any] = {
        name: [moved(a, b, *names) for a, b in zip(getattr(one, name), getattr(other, name), strict=True)]
        for name, names in sizes.items()
    }
    found["operators"] = [operator(*pair) for pair in zip(one.operators, other.operators, strict=True)]
    return found


def _alike(one: TracedStep, other: TracedStep) -> bool:
    """Whether two traces are of one program."""
    return bool(_sized(one, one, lambda *_: 0.0) == _sized(other, other, lambda *_: 0.0))


def _same(guess: TracedStep, recorded: TracedStep) -> bool:
    """Whether the sizes of a guess are those that were recorded."""
    if not _alike(guess, recorded):
        return False
    sizes = [
        pair
        for a, b in zip(guess.operators, recorded.operators, strict=True)
        for pair in zip(a.size.point, b.size.point, strict=True)
    ]
    return all(abs(a - b) <= CLOSE * max(a, b) for a, b in sizes)
