"""Runs a recorded program, or a stage of it: operators, and calls of modules, on values by their numbers.

The stages of a pipeline and the ranks of a context group run the same steps. What an axis inserts at an
operator, such as moves of positions, is an `Insertion`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unisono.torch_internals.fake import is_fake, memory_of

from .containers import CallStructure, Slot, shown, slots_in
from .noted_call import ModuleOp
from .program import Frame, Graph, Node, Ref, Value, template


class RunningModel(Protocol):
    """The model that runs."""

    def module(self, path: str) -> nn.Module:
        """The module of a path."""

    def held(self, name: str) -> Any:
        """A parameter or buffer as it is now."""


class Values(dict[int, Any]):
    """The tensors of one run by their numbers in the graph."""

    def __init__(self, graph: Graph, model: RunningModel, seed: int | None = None) -> None:
        super().__init__()
        self.graph, self.model, self.seed = graph, model, seed

    def resolve(self, ref: Ref) -> Any:
        """A value; parameters, buffers and constants are where the model has them now."""
        found = self.get(ref.value)
        if found is not None:
            return found
        value = self.graph.values[ref.value]
        if value.kind in ("parameter", "buffer"):
            return self.model.held(value.name)
        if value.kind != "constant":
            raise AssertionError(f"value {ref.value} is not on this stage")
        constant = self.graph.constants[ref.value]
        return (
            getattr(self.model.module(constant[0]), constant[1]) if isinstance(constant, tuple) else constant
        )

    def note(self, numbers: Iterable[int | None], output: Any) -> None:
        """Add what an operator has returned."""
        flat = output if isinstance(output, (tuple, list)) else (output,)
        self.update((n, t) for n, t in zip(numbers, flat, strict=True) if n is not None)

    def run(self, steps: Iterable[RunStep]) -> None:
        """Run steps in order."""
        for step in steps:
            if step.grad:
                step.run(self)
            else:
                with torch.no_grad():
                    step.run(self)
            for number in step.drops:
                self.pop(number, None)


@dataclass
class RunStep:
    """One operator or call of a module, prepared once for all runs.

    Args:
        run: takes and adds values.
        grad: gradients are enabled.
        drops: values that nothing takes afterwards.
    """

    run: Callable[[Values], None]
    grad: bool = True
    drops: Sequence[int] = ()


@dataclass(frozen=True)
class Insertion:
    """What an axis inserts at an operator.

    Args:
        given: of the values of a run, what finds the operator's arguments; None: they are the values.
        around: what it draws random numbers in; None: in those of the model.
        after: is called with the values when those that the operator makes are there.
    """

    given: Callable[[Values], Callable[[Ref], Any]] | None = None
    around: Callable[[Values], AbstractContextManager[None]] | None = None
    after: Callable[[Values], None] | None = None


NOTHING = Insertion()


def operator(node: Node, op: Callable[..., Any], inserted: Insertion = NOTHING) -> RunStep:
    """The step of an operator. op: what runs in its place; the op of a module gets the module first."""
    arguments, outputs = template((node.args, node.named)), node.outputs
    path = node.op.path if isinstance(node.op, ModuleOp) else None

    def plain(values: Values) -> None:
        args, named = arguments(values.resolve)
        values.note(outputs, op(*args, **named))

    def run(values: Values) -> None:
        args, named = arguments(values.resolve if inserted.given is None else inserted.given(values))
        here = op if path is None else partial(op, values.model.module(path))
        with nullcontext() if inserted.around is None else inserted.around(values):
            output = here(*args, **named)
        values.note(outputs, output)
        if inserted.after is not None:
            inserted.after(values)

    return RunStep(plain if inserted == NOTHING and path is None else run, node.grad)


def call_of(frame: Frame, graph: Graph, renames: Sequence[tuple[int, int]]) -> RunStep:
    """The step of a module that runs as it is."""
    arguments, results = template(frame.arguments), _ModuleResults(frame, graph, renames)
    written = [(after, Ref(before)) for before, after in renames]

    def run(values: Values) -> None:
        args, named = arguments(values.resolve)
        output = values.model.module(frame.path)(*args, **named)
        values.update(results.numbered(output, values))
        values.update((after, values.resolve(before)) for after, before in written)

    return RunStep(run, frame.grad)


def unit(frame: Frame, steps: Sequence[RunStep], reads: Sequence[int], makes: Sequence[int]) -> RunStep:
    """The step of a module whose hooks run, and `steps` in place of its forward, on the values `reads`."""

    def inside(empty: Callable[[], Values], *came: Tensor) -> tuple[Tensor, ...]:
        inner = empty()
        inner.update(zip(reads, came, strict=True))
        inner.run(steps)
        return tuple(inner[number] for number in makes)

    def run(values: Values) -> None:
        module = values.model.module(frame.path)
        empty = partial(
            Values, values.graph, values.model, values.seed
        )  # a unit that runs again needs no more
        made = module(ForwardCall(partial(inside, empty)), *(values[number] for number in reads))
        values.update(zip(makes, made, strict=True))

    return RunStep(run, frame.grad)


class ForwardCall:
    """Stands in front of the values that a module is called with: its forward is `run` of them.

    No dataclass and no tuple: what `fully_shard` looks through for tensors.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run


# ---- what a module returns ----


class _ModuleResults:
    """What one call of a module returns, as values of the recorded program: another result raises.

    The program knows a tensor by its number, and a module may return one that the program had before: what it
    takes, or one tensor at two places. Such a result has to be that tensor again, because operators of the
    stage take it by the same number.

    Args:
        frame: the call.
        renames: (value, value after a write in place) of what the module writes into.
    """

    def __init__(self, frame: Frame, graph: Graph, renames: Iterable[tuple[int, int]]) -> None:
        self._path = frame.path
        self._wanted = dict(zip(frame.slots[1], frame.outputs, strict=True))
        self._values = {number: graph.values[number] for number in frame.outputs}
        written = {after: before for before, after in renames}
        first: dict[int, Slot] = {}
        self._given: list[tuple[Slot, int]] = []  # with the value that this was before the call
        self._again: list[tuple[Slot, Slot]] = []  # with the place where it was before
        for slot, number in self._wanted.items():
            before = written.get(number, number)
            if not frame.first <= graph.values[before].node < frame.last:
                self._given.append((slot, before))
            elif number in first:
                self._again.append((slot, first[number]))
            first.setdefault(number, slot)

    def numbered(self, output: Any, before: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The tensors of `output` by their numbers.

        Args:
            before: the values before the call, by their numbers.
        Raises:
            RuntimeError: it returned other things when it was recorded.
        """
        found = dict(slots_in(output))
        if found.keys() != self._wanted.keys():
            sides = [
                CallStructure(frozenset(slots), frozenset(slots), frozenset())
                for slots in (found, self._wanted)
            ]
            raise self._error(*sides[0].difference(sides[1]))
        for slot, number in self._wanted.items():
            if not _fits(found[slot], self._values[number]):
                here, there = _kind(found[slot]), _kind(self._values[number])
                raise self._error(f"a tensor of {here} at {shown(slot)}", f"one of {there}")
        for slot, number in self._given:
            if number in before and not _is(found[slot], before[number]):
                raise self._error(
                    f"a tensor of its own at {shown(slot)}", "there one that was there before the call"
                )
        for slot, other in self._again:
            if not _is(found[slot], found[other]):
                raise self._error(f"two tensors at {shown(other)} and {shown(slot)}", "one at both")
        return {number: found[slot] for slot, number in self._wanted.items()}

    def _error(self, here: str, there: str) -> RuntimeError:
        return RuntimeError(
            f'"{self._path}" returns {here}; the program that was recorded has {there}. The stages of a '
            "pipeline follow that program: something beside inputs, shapes and settings decides what the "
            "module runs. Let it return the same in every step"
        )


def _is(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are one tensor for the program. A wrapper may have made another object, or a copy."""
    if tensor is other:
        return True
    if tensor.requires_grad != other.requires_grad or tensor.shape != other.shape:
        return False
    alike = tensor.storage_offset() == other.storage_offset() and tensor.stride() == other.stride()
    if is_fake(tensor) or tensor.is_meta or (alike and memory_of(tensor)[1] == memory_of(other)[1]):
        return True
    return torch.equal(tensor.nan_to_num(), other.to(tensor.dtype).nan_to_num())


def _fits(tensor: Tensor, value: Value) -> bool:
    """Whether a tensor can be a recorded one, or a rank's part of it. A part has no size that is larger, so
    no tensors of several shapes have changed places if all fit."""
    sizes = [*zip(tensor.shape, value.shape, strict=False)]
    same = tensor.dim() == len(value.shape) and tensor.is_floating_point() == value.dtype.is_floating_point
    return same and all(here <= there for here, there in sizes)


def _kind(tensor: Tensor | Value) -> str:
    return f"shape {[*tensor.shape]} and type {str(tensor.dtype).removeprefix('torch.')}"
