"""What is swapped by whom: whole parameters around each module (`ParameterSwap`), this rank's parts of them
around each gathering (`ShardSwap`), and a model in one process (`Swapped`).

Whole parameters come before their unit's forward, and again before its backward: autograd has saved them, and
a gradient computed from freed or changed memory would be wrong.

    forward: each unit in, out      backward: each unit in, its gradients to the store, out
    finish: each unit's gradients averaged over the data ranks      update: see `swap_space`

Under ZeRO, and where the tensor axis, a pipeline or low precision has `fully_shard` compute on copies, a rank
swaps what it owns: its parts come before they are gathered and go once they are copied. What was gathered is
freed after each use, and gathered again.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.torch_internals.fsdp import follow_units

from .batches import micro_batches as cut
from .batches import rows_of
from .gradients import bits_of, sum_of_squares
from .graph.capture import call
from .graph.containers import tensors_in
from .replicated_parameters import GradientBucket, call_alive
from .spill import Disk, SpillStorage
from .structure import entries
from .swap_space import SwapSpace, SwapUnit

FORWARDS = 8  # at first, whose parameters are compared with the store


class _ModuleUnit(SwapUnit):
    """A module, the parameters it uses, and how many backwards of it are under way."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.module = module
        self.backwards = 0


class ParameterSwap(SwapSpace):
    """Keeps in memory only the parameters of the current unit of a model, and of the next one.

    To a run it is what `ReplicatedParameters` is: the data axis under ZeRO 0.

    Args:
        modules: what to bring in one after the other; other parameters stay in memory during a step.
        group: the data ranks, over which gradients are averaged; None: nobody else has any.
        uneven_use: see `Plan`.
        fill: gives parameters on the meta device their values, and calls with the name and each of them.
    Attributes:
        root: the model.
        watched: in so many forwards, the bits that they leave in memory are compared with the store.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Iterable[nn.Module],
        store: SpillStorage,
        *,
        group: dist.ProcessGroup | None = None,
        uneven_use: bool = False,
        fill: Callable[[nn.Module, Callable[[str, nn.Parameter], None]], object] | None = None,
    ) -> None:
        super().__init__(store)
        self.root = root
        self._group, self._uneven_use = group, uneven_use
        if fill is not None:
            fill(root, self.take)
        for name, parameter in root.named_parameters():
            self.take(name, parameter)
        self._units: list[_ModuleUnit] = _units(root, modules)  # type: ignore[assignment]
        self.watched = 0
        self._in_backward = False
        self._hooks = list(self._hook_all())

    # ---- what a run asks of the data axis ----

    @property
    def swap(self) -> SwapSpace:
        """What swaps."""
        return self

    def reset(self) -> None:
        """Forget a step that ended with an error, or a backward outside one."""
        self._backward_ended()
        super().reset()

    buckets: Sequence[GradientBucket] = ()  # one at a time is made, and checked

    def waiting(self) -> list[Any]:
        """The norms of the gradients that wait in the store."""
        return [*self.norms.values()]

    def before_backward(self, *, last: bool) -> None:  # noqa: ARG002  (gradients are reduced by `finish`)
        """From now on units are fetched for backward."""
        self._in_backward = True

    def after_weights(self) -> None:
        """Nothing: there is one stage, whose schedules compute gradients of weights in backward."""

    def reduce_now(self) -> None:
        """`finish` does it."""

    def finish(self) -> None:
        """Average the gradients over the data ranks, unit by unit, the last one first."""
        self._backward_ended()
        if self._group is None:
            return
        for number, (_, own) in enumerate(reversed(self.owned())):
            trained = [(self._names[p], p) for p in own if p.requires_grad]
            if trained:
                self._average(GradientBucket(trained, number, self._group))
        self._written()

    def _average(self, bucket: GradientBucket) -> None:
        with self.fetched(bucket.parameters):
            bucket.reduce()
            bucket.wait()
            bucket.finish_step(uneven_use=self._uneven_use)
            if not self._uneven_use:
                bucket.check_used()

    def close(self) -> None:
        """Bring the parameters back into memory for good, and give the store up."""
        for hook in self._hooks:
            hook.remove()
        super().close()

    # ---- forward and backward ----

    def _hook_all(self) -> Iterator[Any]:
        spill = partial(call_alive, weakref.WeakMethod(self._spill))
        for unit in self._units:  # before the caller's hooks, which may need the values
            before = self._before_use(unit)
            yield unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            yield unit.module.register_forward_hook(self._after_use(unit), always_call=True)
        for parameter in self._names:
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(spill)
        yield self.root.register_forward_pre_hook(self._forward_begins, prepend=True)
        yield self.root.register_forward_hook(self._forward_ends, always_call=True)

    def _forward_begins(self, _module: nn.Module, _args: Any) -> None:
        self.check()
        self._backward_ended()  # of the micro-batch before
        self.watched = max(self.watched - 1, 0)

    def _forward_ends(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.release_all()

    def _check_unwritten(self, unit: _ModuleUnit) -> None:
        """Refuse a forward that has written a parameter of `unit`, whose old values are in the store."""
        for parameter in unit.parameters:
            written = parameter._version != self._versions[parameter]
            if self.watched and not written:  # a write by .data has no version
                kept = self._store.view((self._names[parameter], "value"), parameter.data)
                written = not torch.equal(bits_of(kept.to(parameter.device)), bits_of(parameter.data))
            if written:
                raise RuntimeError(
                    f'the forward writes the parameter "{self._names[parameter]}", and swap= would lose '
                    "it: the store has the old values. Compute what the forward needs from the parameter, "
                    "or write inside `with run.swap.mapped():` between two steps"
                )

    def _backward_ended(self) -> None:
        self._in_backward = False
        for unit in self._units:
            unit.backwards = 0
        self.release_all()

    def _before_use(self, unit: _ModuleUnit) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            self.use(unit)
            if not torch.is_grad_enabled():
                return None
            return tuple(self._with_gradient_hook(unit, a) for a in args), {
                k: self._with_gradient_hook(unit, v) for k, v in named.items()
            }

        return hook

    def _with_gradient_hook(self, unit: _ModuleUnit, value: Any) -> Any:
        """Hook the gradient of `value`: when it is complete, backward of the unit has ended."""
        if isinstance(value, Tensor) and value.requires_grad:
            return _GradientCallback.apply(value, partial(self._backward_of_unit_ended, unit))
        return value

    def _after_use(self, unit: _ModuleUnit) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self._in_backward:
                self._check_unwritten(unit)
            began: list[bool] = []

            def before_backward(_grad: Tensor) -> None:
                if not began:
                    began.append(True)
                    unit.backwards += 1
                    self.use(unit)

            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(before_backward)
            if not self._in_backward and unit.module is not self.root:
                self.release(unit)

        return hook

    def _backward_of_unit_ended(self, unit: _ModuleUnit) -> None:
        unit.backwards -= 1
        if unit.backwards == 0 and unit.module is not self.root:
            self.release(unit)

    def _spill(self, parameter: nn.Parameter | Tensor) -> None:
        """Add a complete gradient to the stored one, and free its memory."""
        assert isinstance(parameter, nn.Parameter)
        self.keep_gradients([parameter])


class ShardSwap(SwapSpace):
    """Keeps this rank's parts of parameters in memory while `fully_shard` copies them, and in the update."""

    def __init__(self, store: SpillStorage) -> None:
        super().__init__(store)
        self._reduced: _ShardUnit | None = None  # whose gradients are under way
        self.closed = False

    def hook(self, module: nn.Module) -> None:
        """Have the parts of all units from now on. They are taken already."""
        follow_units(module, self._unit)

    def _unit(self, parameters: list[nn.Parameter]) -> _ShardUnit:
        self._units.append(unit := _ShardUnit(self, parameters))
        return unit

    def spill(self, reduced: _ShardUnit) -> None:
        """Move the gradients of the unit before to the store, while those of this one travel."""
        before, self._reduced = self._reduced, reduced
        if before is not None:
            before.wait()
            self.keep_gradients(before.parameters)

    def reset(self) -> None:
        """Forget a step that ended with an error, or a backward outside one."""
        self._reduced = None
        super().reset()

    def finish(self) -> None:
        """A backward has ended, whose gradients have come."""
        self._reduced = None
        for unit in self._units:
            self.keep_gradients(unit.parameters)
        self.release_all()

    def close(self) -> None:
        """Bring the parts back into memory for good, and give the store up."""
        super().close()
        self.closed = True


class _ShardUnit(SwapUnit):
    """The parts of what `fully_shard` gathers together."""

    def __init__(self, swap: ShardSwap, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._swap = swap
        self.wait: Callable[[], None] = lambda: None

    def gather(self) -> None:
        if not self._swap.closed:
            self._swap.use(self)

    def gathered(self) -> None:
        if not self._swap.closed:
            self._swap.release(self)

    def reduced(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        if not self._swap.closed:
            self._swap.spill(self)


class _GradientCallback(torch.autograd.Function):
    """The identity, with a callback when the gradient arrives."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tell: Callable[[], None]) -> Tensor:
        ctx.tell = tell
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.tell()
        return grad, None


def _units(model: nn.Module, modules: Iterable[nn.Module]) -> list[_ModuleUnit]:
    """The given modules, and the model itself for all other parameters."""
    inside = list(modules)
    units = [_ModuleUnit(module, [*module.parameters()]) for module in inside if module is not model]
    taken = {parameter for unit in units for parameter in unit.parameters}
    rest = [parameter for parameter in model.parameters() if parameter not in taken]
    return [*units, _ModuleUnit(model, rest)] if rest else units


# ---- in one process ----


class Swapped:
    """A model that trains with little memory, in one process. For several there is `Plan(swap=...)`.

    Args:
        model: an nn.Sequential, a model with containers of blocks, or one that a rule knows; other
            parameters stay in memory during a step.
        optimizer: makes the optimizer from all parameters. Each is stepped on its own, as torch.optim's
            optimizers but LBFGS allow.
        store: Disk(folder) or Host().
        clip: largest global norm of gradients.
        units: the modules to bring in one after the other; None: by the model's rule.
    Attributes:
        step_s: seconds of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss: Callable[[Any, Any], Tensor],
        store: SpillStorage | None = None,
        clip: float | None = None,
        units: Sequence[nn.Module] | None = None,
    ) -> None:
        self.model, self._loss, self._clip = model, loss, clip
        self.optimizer = optimizer(list(model.parameters()))
        modules = entries(model) if units is None else units
        self._swap = ParameterSwap(model, modules, store or Disk())
        self._swap.watched = FORWARDS
        self.step_s = 0.0

    @property
    def waited_s(self) -> float:
        """Seconds of the last step in which compute waited for the store."""
        return self._swap.waited_s

    def mapped(self) -> AbstractContextManager[object]:
        """Have the parameters and moments where the store has them, to be read or written there."""
        return self._swap.mapped(self.optimizer)

    def step(self, batch: tuple[Any, Any], *, micro_batches: int = 1) -> float:
        """Train on one batch of (inputs, targets); return its mean loss.

        The losses are bit for bit those of `optimizer.zero_grad(); loss.backward(); optimizer.step()` on the
        same parts.
        """
        self._swap.check()
        began, rows, mean = time.perf_counter(), rows_of(list(batch)), 0.0
        self._swap.waited_s = 0.0
        try:
            for inputs, targets in cut(batch, micro_batches):
                share = rows_of([inputs, targets]) / rows
                given = (inputs,) if isinstance(inputs, list) else inputs
                loss = self._loss(call(self.model, given), targets)
                self._swap.before_backward(last=False)
                (loss * share).backward()
                mean += loss.item() * share
            self._swap.finish()
            self._swap.update(self.optimizer, self._factor())
        except BaseException:
            self._swap.reset()
            raise
        self.step_s = time.perf_counter() - began
        return mean

    def _factor(self) -> float:
        if self._clip is None:
            return 1.0
        return min(1.0, self._clip / (math.sqrt(self._squared_norm()) + 1e-6))

    def _squared_norm(self) -> float:
        norms = [*self._swap.norms.values()]
        return sum_of_squares(torch.stack(norms), [1.0] * len(norms)).item() if norms else 0.0

    def close(self) -> None:
        """Bring the parameters back into memory for good, and give the store up. The optimizer's state is
        dropped.
        """
        self._swap.close()
        self.optimizer.state.clear()

    def __enter__(self) -> Swapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
