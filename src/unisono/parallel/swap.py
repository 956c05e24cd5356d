"""Training with parameters, gradients and optimizer state on disk or in host memory, on the device while
they are needed.

A unit is what is brought in together: a block of the model. Its parameters come before its forward, and
again before its
backward: autograd has saved them, and a gradient computed from freed or changed memory would be wrong.
    Memory is
released by emptying the storages, not by replacing tensors, so that what autograd saved finds its bytes
again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from .batches import micro_batches, rows_of, tensors_of
from .families import family_of
from .spill import Disk, Key, Store

__all__ = ["Swapped"]


class _Unit:
    """A module, the parameters it uses (tied ones too), and how many backwards of it are under way."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.module, self.parameters = module, list(parameters)
        self.backwards = 0


class Swapped:
    """A model that trains with little memory, in one process or in each of several.

    Args:
        model: an nn.Sequential, a model with containers of blocks, or one that a rule knows; other
            parameters stay in
            memory during a step.
        optimizer: makes the optimizer from all parameters. Each is stepped on its own, as torch.optim's
            optimizers but
            LBFGS allow.
        store: Disk(folder) or Host().
        clip: largest global norm of gradients.
        units: the modules to bring in one after the other; None: by the model's rule.
    Attributes:
        waited_s: seconds of the last step in which compute waited for the store.    step_s: seconds of that
            step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss: Callable[[Any, Any], Tensor],
        store: Store | None = None,
        clip: float | None = None,
        units: Sequence[nn.Module] | None = None,
    ) -> None:
        self.model, self._loss, self._clip = model, loss, clip
        self.optimizer = optimizer(list(model.parameters()))
        self._number = {parameter: number for number, parameter in enumerate(model.parameters())}
        self._store = store or Disk()
        self._io = ThreadPoolExecutor(1, thread_name_prefix="unisono swap")
        self._units = _units(model, family_of(model, None, None).units if units is None else units)
        self._users: dict[nn.Parameter, int] = dict.fromkeys(self._number, 0)  # units that have it here
        self._loaded: set[_Unit] = set()
        self._coming: dict[nn.Parameter, Future[None]] = {}
        self._writing: list[Future[None]] = []
        self._on_disk: set[nn.Parameter] = set()  # whose gradient is in the store
        self._order: list[_Unit] = []  # of forward, as seen in this step
        self._before: list[_Unit] = []  # in the last one: what to read ahead
        self._in_backward = False
        self._squares: dict[nn.Parameter, float] = {}
        self.waited_s = self.step_s = 0.0
        self._hooks = list(self._hook_all())
        for parameter in self._number:
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            self._put((self._number[parameter], "value"), parameter.data)
            self._written()
            _empty(parameter.data)

    def step(self, batch: tuple[Any, Any], *, micro_batches: int = 1) -> float:
        """Train on one batch of (inputs, targets); return its mean loss.

        The losses are bit for bit those of `optimizer.zero_grad(); loss.backward(); optimizer.step()` on the
        same parts.
        """
        began, self.waited_s = time.perf_counter(), 0.0
        rows, mean = rows_of(list(batch)), 0.0
        for inputs, targets in _parts(batch, micro_batches):
            share = rows_of([inputs, targets]) / rows
            self._order = []
            loss = self._loss(_called(self.model, inputs), targets)
            self._release_all()
            self._before = self._order
            self._in_backward = True
            try:
                (loss * share).backward()
            finally:
                self._in_backward = False
                self._release_all()
            mean += loss.item() * share
        self._update()
        self.step_s = time.perf_counter() - began
        return mean

    def close(self) -> None:
        """Bring the parameters back into memory for good, and give the store up. The optimizer's state is
        dropped.
        """
        for hook in self._hooks:
            hook.remove()
        for unit in self._units:
            self._load(unit)
        self._written()
        self._io.shutdown()
        self._store.close()
        self.optimizer.state.clear()

    def __enter__(self) -> Swapped:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- forward and backward ----

    def _hook_all(self) -> Iterator[Any]:
        for unit in self._units:
            yield unit.module.register_forward_pre_hook(self._coming_to(unit), with_kwargs=True)
            yield unit.module.register_forward_hook(self._leaving(unit), always_call=True)
        for parameter in self._number:
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(self._spill)

    def _coming_to(self, unit: _Unit) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            self._load(unit)
            if not self._in_backward:
                self._order.append(unit)
                self._read_ahead(self._before, len(self._order))
            if not torch.is_grad_enabled():
                return None
            return tuple(self._watched(unit, a) for a in args), {
                k: self._watched(unit, v) for k, v in named.items()
            }

        return hook

    def _watched(self, unit: _Unit, value: Any) -> Any:
        """Make `value` tell when its gradient is there: then this backward of the unit is through."""
        if isinstance(value, Tensor) and value.requires_grad:
            return _Through.apply(value, lambda: self._through(unit))
        return value

    def _leaving(self, unit: _Unit) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            began: list[bool] = []

            def before_backward(_grad: Tensor) -> None:
                if not began:
                    began.append(True)
                    unit.backwards += 1
                    self._load(unit)
                    self._read_ahead(self._before[::-1], len(self._before) - self._place(unit))

            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(before_backward)
            if not self._in_backward and unit.module is not self.model:
                self._release(unit)

        return hook

    def _place(self, unit: _Unit) -> int:
        return self._before.index(unit) if unit in self._before else len(self._before)

    def _through(self, unit: _Unit) -> None:
        unit.backwards -= 1
        if unit.backwards == 0 and unit.module is not self.model:
            self._release(unit)

    def _spill(self, parameter: nn.Parameter | Tensor) -> None:
        """A gradient is complete: out of memory with it, added to what is there."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        key, grad = (self._number[parameter], "grad"), parameter.grad.contiguous()
        parameter.grad = None
        if parameter in self._on_disk:
            earlier = torch.empty_like(grad)
            self._wait(self._io.submit(self._store.read, key, earlier))
            grad = earlier.add_(grad)
        self._on_disk.add(parameter)
        self._squares[parameter] = torch.linalg.vector_norm(grad, dtype=torch.float64).item() ** 2
        self._put(key, grad)

    # ---- the optimizer ----

    def _update(self) -> None:
        """Unit by unit: parameters, gradients and state in, one step, all out again."""
        factor = self._factor()
        stepped: set[nn.Parameter] = set()
        for unit, following in zip(self._units, [*self._units[1:], None], strict=True):
            own = [p for p in unit.parameters if p in self._on_disk and p not in stepped]
            self._load(unit)
            if following is not None:
                self._read_ahead([following], 0)
            for parameter in own:
                parameter.grad = torch.empty_like(parameter)
                self._get((self._number[parameter], "grad"), parameter.grad)
                parameter.grad.mul_(factor) if factor != 1.0 else None
                for name, value in self._state_of(parameter):
                    _fill(value)
                    self._get((self._number[parameter], name), value)
            self.optimizer.step()
            for parameter in own:
                parameter.grad = None
                self._put((self._number[parameter], "value"), parameter.data)
                for name, value in self._state_of(parameter):
                    self._put((self._number[parameter], name), value)
            self._written()
            for parameter in own:
                for _, value in self._state_of(parameter):
                    _empty(value)
            stepped.update(own)
            self._release(unit)
        self._on_disk.clear()
        self._squares.clear()

    def _factor(self) -> float:
        if self._clip is None:
            return 1.0
        norm = math.sqrt(sum(self._squares.values()))
        return min(1.0, self._clip / (norm + 1e-6))

    def _state_of(self, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
        """What the optimizer keeps of the parameter's size; counters stay in memory."""
        state = self.optimizer.state.get(parameter, {})
        return [(name, v) for name, v in sorted(state.items()) if isinstance(v, Tensor) and v.dim() > 0]

    # ---- memory ----

    def _load(self, unit: _Unit) -> None:
        """Have the parameters of `unit` in memory."""
        self._start(unit)
        for parameter in unit.parameters:
            if parameter in self._coming:
                self._wait(self._coming.pop(parameter))

    def _start(self, unit: _Unit) -> None:
        if unit in self._loaded:
            return
        self._loaded.add(unit)
        for parameter in unit.parameters:
            self._users[parameter] += 1
            if self._users[parameter] == 1:
                _fill(parameter.data)
                key = (self._number[parameter], "value")
                self._coming[parameter] = self._io.submit(self._store.read, key, parameter.data)

    def _read_ahead(self, order: Sequence[_Unit], place: int) -> None:
        if place < len(order):
            self._start(order[place])

    def _release(self, unit: _Unit) -> None:
        if unit not in self._loaded:
            return
        self._load(unit)  # a read that has begun must end first
        self._loaded.remove(unit)
        for parameter in unit.parameters:
            self._users[parameter] -= 1
            if self._users[parameter] == 0:
                _empty(parameter.data)

    def _release_all(self) -> None:
        for unit in list(self._loaded):
            unit.backwards = 0
            self._release(unit)

    def _put(self, key: Key, tensor: Tensor) -> None:
        """Write in the background; two writes may be under way."""
        self._writing.append(self._io.submit(self._store.write, key, tensor))
        while len(self._writing) > 2:
            self._wait(self._writing.pop(0))

    def _get(self, key: Key, tensor: Tensor) -> None:
        self._wait(self._io.submit(self._store.read, key, tensor))

    def _written(self) -> None:
        while self._writing:
            self._wait(self._writing.pop(0))

    def _wait(self, work: Future[None]) -> None:
        start = time.perf_counter()
        work.result()
        self.waited_s += time.perf_counter() - start


class _Through(torch.autograd.Function):
    """Passes a tensor on, and tells when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, tell: Callable[[], None]) -> Tensor:
        ctx.tell = tell
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.tell()
        return grad, None


def _units(model: nn.Module, modules: Iterable[nn.Module]) -> list[_Unit]:
    """The given modules, and the model itself for what is in none of them."""
    inside = list(modules)
    units = [_Unit(module, [*module.parameters()]) for module in inside if module is not model]
    taken = {parameter for unit in units for parameter in unit.parameters}
    rest = [parameter for parameter in model.parameters() if parameter not in taken]
    return [*units, _Unit(model, rest)] if rest else units


def _parts(batch: tuple[Any, Any], parts: int) -> list[Any]:
    return micro_batches(batch, parts)


def _called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _empty(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _fill(tensor: Tensor) -> None:
    """Give an emptied tensor its memory back, without content."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
