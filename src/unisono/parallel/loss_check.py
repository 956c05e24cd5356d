"""Refuses a loss that a plan would not train as one process does.

The first step tries whether it is the mean of its parts, into which a plan cuts the rows. The loss of some
rows is compared with those of their parts, in several splits: one may hide the difference. It counts only
where the order of the rows does not matter: then rows of the output belong to rows of the targets, and the
loss draws no numbers.

It may not take parameters beside the output of the model: its own, which nothing trains, or those that the
plan cuts. On the tensor axis the gradients of parameters of the model that a loss takes are whole on every
rank, those through the model are parts: no sum is right. In a pipeline the parameters of other stages are not
there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.torch_internals.fake import is_fake
from unisono.torch_internals.fsdp import GatheredParameter
from unisono.torch_internals.training import functions_behind, hooks_of, sequence_of

from .batches import rows_of
from .generators import drawing, pythons_generators_kept
from .graph.containers import mapped, tensors_in
from .loss_weights import count, kept_of, mean, pair
from .model_buffers import buffers_kept

ROWS = 8  # that are tried
SEED = 0x5EED
FAR = 1e-4, 2e-2  # of the loss: what differs by more is another number, in f32 and in 16 bits


class LossCheck:
    """A loss of (output, targets) that remembers some rows.

    Args:
        weigh: by what its means are weighed: a function, "counted", or None.    ignored: a label.
        device: where it is computed.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], weigh: Any, ignored: int, device: str) -> None:
        self.loss, self._weigh, self._ignored, self._device = loss, weigh, ignored, device
        self.seen: list[tuple[Any, Any]] = []
        self.asked = False  # a step has called it, on all ranks

    def __call__(self, output: Any, targets: Any) -> Any:
        with contextlib.suppress(Exception):  # the loss itself says what is wrong with them
            if self.rows < ROWS:
                self.seen.append(mapped(_some((output, targets)), lambda t: t.detach().clone()))
        return self.loss(output, targets)

    @property
    def rows(self) -> int:
        """How many it has seen."""
        return sum(rows_of([targets]) for _, targets in self.seen)

    def tensors(self) -> list[list[Tensor]]:
        """What it has seen, for other ranks."""
        return [[t.cpu() for t in tensors_in(one)] for one in self.seen]

    def problem(self, others: Sequence[list[Tensor]] = ()) -> str:
        """Why it is no mean over the rows that it has seen; "": it is, or this cannot be tried.

        Args:
            others: `tensors` of all ranks, in place of this one's.
        """
        if not self.seen:
            return ""
        found = ""
        with torch.no_grad(), drawing(SEED, self._device), _untouched(self.loss):
            for split in SPLITS:
                with contextlib.suppress(Exception):  # it takes no other number of rows, or hides them
                    found = found or self._problem(self._joined(others), split)
        return found

    def _joined(self, others: Sequence[list[Tensor]]) -> tuple[Any, Any]:
        seen = others or [[*tensors_in(one)] for one in self.seen]
        columns = iter([torch.cat(some) for some in zip(*seen, strict=True)])
        return mapped(self.seen[0], lambda own: next(columns).to(own.device))  # type: ignore[no-any-return]

    def _problem(self, whole: tuple[Any, Any], split: Callable[[int], list[range]]) -> str:
        rows = rows_of([whole[1]])
        if rows < 2:
            return ""
        parts = [_taken(whole, some) for some in split(rows)]
        value, values = self._value(whole), [self._value(part) for part in parts]
        low = min(t.itemsize for t in [value, *values]) < 4
        found, several = value.item(), [each.item() for each in values]
        limit = FAR[low] * max(map(abs, [found, *several])) + 1e-9
        expected = self._expected(whole, parts, several)
        if any(not abs(found - each) > limit for each in expected):  # nor where one is NaN
            return ""
        turned, again = self._value(_taken(whole, range(rows)[::-1])).item(), self._value(whole).item()
        if not (abs(found - turned) <= limit and abs(found - again) <= 1e-3 * limit):
            return ""
        return (
            f"the loss of {rows} rows is {found:.6g}, and of {len(parts)} parts of them "
            f"{', '.join(f'{each:.6g}' for each in several)}, which make {expected[0]:.6g}"
        )

    def _value(self, part: tuple[Any, Any]) -> Tensor:
        value: Any = self.loss(*part)
        return pair(value)[0] if self._weigh == "counted" else mean(value)

    def _expected(self, whole: Any, parts: Sequence[Any], values: Sequence[float]) -> list[float]:
        """What the loss should be, by each way in which it may be meant."""
        if self._weigh == "counted":
            counts = [pair(self.loss(*part))[1] for part in (whole, *parts)]
            return [sum(values) if abs(counts[0] - sum(counts[1:])) < 0.5 else float("inf")]
        weigh = self._weigh
        ways = [[count(weigh(y)) if callable(weigh) else rows_of([y]) for _, y in parts]]
        if weigh is None:
            ways.append(
                [kept_of(part[1], self._ignored) * rows for part, rows in zip(parts, ways[0], strict=True)]
            )
        return [
            sum(n * each for n, each in zip(ns, values, strict=True) if n) / sum(ns) if sum(ns) else values[0]
            for ns in ways
        ]


def not_a_mean(problem: str) -> str:
    """The text of the error, on all ranks."""
    return (
        f"the loss is no mean of its parts, into which the plan cuts the rows: "
        f"{problem or 'another rank found it'}. "
        "Write parallelize(..., weigh=targets -> the number by which it divides), such as weigh=lambda "
        'targets: class_weights[targets].sum(); or weigh="counted", with a loss that returns (sum, count); '
        'or give nn.CrossEntropyLoss(...) itself. weigh="rows" takes the mean of the parts, as DDP does'
    )


SPLITS: tuple[Callable[[int], list[range]], ...] = (
    lambda rows: [range((rows + 1) // 3 or 1), range((rows + 1) // 3 or 1, rows)],
    lambda rows: [range(n, min(n + 2, rows)) for n in range(0, rows, 2)],
    lambda rows: [range(n, n + 1) for n in range(rows)],
)


def _some(batch: tuple[Any, Any]) -> tuple[Any, Any]:
    """A few rows, from all over the batch."""
    rows = rows_of([batch[1]])
    return batch if rows <= ROWS else _taken(batch, [rows * n // ROWS for n in range(ROWS)])


def _taken(batch: tuple[Any, Any], chosen: Sequence[int]) -> tuple[Any, Any]:
    """Some rows of output and targets. An output may have several values for a row, one after the other."""
    rows, index = rows_of([batch[1]]), torch.tensor([*chosen], dtype=torch.long)

    def take(value: Tensor) -> Tensor:
        if value.dim() == 0:
            return value
        each, rest = divmod(len(value), rows)
        if rest or not each:
            raise ValueError("no rows")
        cut: Tensor = value.unflatten(0, (rows, each))  # type: ignore[no-untyped-call]
        return cut[index.to(value.device)].flatten(0, 1)

    return mapped(batch, take)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _untouched(loss: Any) -> Iterator[None]:
    """What the loss changes meanwhile is as before afterwards: attributes, buffers, Python's generators."""
    held = [*loss.modules()] if isinstance(loss, nn.Module) else [loss] if hasattr(loss, "__dict__") else []
    kept = [(vars(one), dict(vars(one))) for one in held]
    buffers = buffers_kept(one for one in held if isinstance(one, nn.Module))
    try:
        with buffers, pythons_generators_kept():
            yield
    finally:
        for now, before in kept:
            now.clear()
            now.update(before)


# ---- parameters ----


# the WrittenParameters of all runs: a loss may call their models
OF_RUNS: weakref.WeakSet[Any] = weakref.WeakSet()


class LossParameters:
    """What a loss may not take.

    Args:
        sums: names of parameters whose gradients are summed over the tensor axis.
        whole: ranks have whole parameters of the model, which the loss may take.
    """

    def __init__(self, model: nn.Module, sums: Iterable[str], tensor: int, *, whole: bool) -> None:
        self._model, self._sums, self._tensor, self._whole = model, frozenset(sums), tensor, whole

    def may_end(self, loss: object) -> bool:
        """Whether one check is enough: a loss takes in later steps what it takes in the first one."""
        own = loss.parameters() if isinstance(loss, nn.Module) else ()
        return self._whole and not any(one.requires_grad and not _is_of_run(one) for one in own)

    def check(self, loss: Tensor, begun: int, came: Sequence[Tensor] = ()) -> None:
        """Follow `loss` back to what the model has computed.

        Args:
            begun: `end_of_graph` when the model had run.
            came: from the stage before, which the model may return.
        Raises:
            ValueError: a parameter that is cut, or summed, or of the loss itself, is on the way.
        """
        for leaf in _leaves(loss, begun):
            if not any(leaf is one for one in came):
                self._refuse(leaf)

    def _refuse(self, leaf: Tensor) -> None:
        if leaf.is_meta:
            raise ValueError(
                "the loss takes a parameter of the model itself, which is on another stage of the pipeline. "
                "Compute it in the forward of the model, and return it"
            )
        if not _is_of_run(leaf):
            raise ValueError(
                f"the loss takes a tensor of its own that requires a gradient, {list(leaf.shape)}, and no "
                "rank would train it. Make it a parameter of the model, whose forward returns it or what "
                "needs it; or, if it does not train, call requires_grad_(False) of it, or of its module"
            )
        for name, parameter in self._model.named_parameters():
            if parameter is leaf and (name in self._sums or isinstance(leaf, DTensor)):
                raise ValueError(
                    f'the loss takes the parameter "{name}" itself, beside the output of the model, and '
                    f"tensor={self._tensor} gives each rank a part of its gradient. Compute it in the "
                    f'forward of the model, or write cuts={{"{name.rpartition(".")[0] or "*"}": "whole"}}'
                )


def end_of_graph() -> int:
    """A number above those of all functions of autograd until now, in this thread."""
    return sequence_of(torch.zeros((), requires_grad=True).clone().grad_fn)


def check_own_loss(loss: Tensor) -> None:
    """Raise TypeError or ValueError for a loss of the caller's from which no gradient comes, or one to a
    parameter that no run trains.
    """
    if not mean(loss).requires_grad:
        raise ValueError("backward: the loss requires no gradient: was it computed within torch.no_grad()?")
    for leaf in _leaves(loss, max(run.begun for run in OF_RUNS)):
        if isinstance(leaf, nn.Parameter) and not _is_of_run(leaf):
            raise ValueError(
                f"backward: the loss takes a parameter {list(leaf.shape)} that is in no run, and each rank "
                "would get another gradient. Make a run of its module, too: run.backward(loss, also=[that "
                "run]). Or, if it does not train, call requires_grad_(False) of it"
            )


def _is_of_run(leaf: Tensor) -> bool:
    """Whether a run trains it, or a plan has put another one in its place: then its gradient says so."""
    hooks = hooks_of(leaf, "hooks of gradients") or {}
    old = any(getattr(hook, "func", None) is refuse_replaced for hook in hooks.values())
    return old or isinstance(leaf, GatheredParameter) or any(id(leaf) in run.numbers for run in OF_RUNS)


@contextlib.contextmanager
def replaced_parameters_raise(model: nn.Module) -> Iterator[None]:
    """What is a parameter of `model` before the block, and none after it, raises RuntimeError in backward.

    Example: w = model.head.weight before; a loss with w.pow(2) under Plan(data=2, zero=3).
    """
    before = [(name, weakref.ref(value), dict(vars(value))) for name, value in model.named_parameters()]
    yield
    named = dict(model.named_parameters(remove_duplicate=False))
    now = {id(parameter) for parameter in named.values()}
    for name, reference, attributes in before:
        parameter, new = reference(), named.get(name)
        for attribute, value in attributes.items() if new is not None and new is not parameter else ():
            if not hasattr(new, attribute):
                setattr(new, attribute, value)
        if parameter is not None and parameter.requires_grad and id(parameter) not in now:
            parameter.register_hook(partial(refuse_replaced, name))


def refuse_replaced(name: str, _gradient: Tensor) -> None:
    """The hook of a parameter that the model had before a plan has put another one in its place."""
    raise RuntimeError(
        f'a gradient came to the parameter "{name}" that the model had before parallelize: the plan has put '
        "another one in its place, so this value is old, and nothing trains it. The loss, a hook or a "
        "closure holds it: compute what needs it in the forward of the model, from the module's attribute, "
        "and return it"
    )


# ---- the leaves of a loss ----


class UnchangedLoss:
    """A loss, called in steps without values; `restore` gives its parameters their gradients back."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        self.loss = loss
        self._before: dict[Tensor, Tensor | None] = {}

    def __call__(self, output: Any, targets: Any) -> Any:
        value = self.loss(output, targets)
        total = value[0] if isinstance(value, tuple) else value
        if isinstance(total, Tensor):
            for leaf in _leaves(total):
                if not is_fake(leaf) and not leaf.is_meta:
                    self._before.setdefault(leaf, leaf.grad)
        return value

    def restore(self) -> None:
        """Call it after the last step."""
        for leaf, grad in self._before.items():
            leaf.grad = grad
        self._before.clear()


def _leaves(value: Tensor, begun: int | None = None) -> Iterator[Tensor]:
    """The leaves of autograd's graph to which what was computed after `begun` leads."""
    found = (getattr(function, "variable", None) for function in functions_behind(value.grad_fn, begun))
    return (leaf for leaf in found if isinstance(leaf, Tensor))
