"""Parameters, gradients and optimizer state on disk or in host memory, on the device while they are needed.

A unit is fetched as a whole: a block of the model. Its parameters come before its forward, and
again before its backward: autograd has saved them, and a gradient computed from freed or changed memory would
be wrong. Memory is released by emptying the storages, not by replacing tensors, so that what autograd saved
finds its bytes again.

    forward: each unit in, out      backward: each unit in, its gradients to the store, out
    finish: each unit's gradients averaged over the data ranks      update: each unit in, stepped, out

`Plan(swap=...)` has it in a run; `Swapped` trains a model by it in one process.
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .batches import micro_batches as cut
from .batches import rows_of
from .gradients import bits_of, norm_of, sum_of_squares
from .graph.capture import call
from .graph.containers import tensors_in
from .replicated_parameters import GradientBucket, call_alive
from .spill import Disk, Host, Key, SpillStorage, is_spilled, mark_spilled, unmark_spilled
from .structure import entries

FORWARDS = 8  # at first, whose parameters are compared with the store


def store_of(swap: str) -> SpillStorage:
    """Make the store that `Plan(swap=...)` names: "disk", "memory", or the folder of the file."""
    return Host() if swap == "memory" else Disk(None if swap == "disk" else swap)


def spill_parameters(model: nn.Module, store: SpillStorage) -> Callable[[str, nn.Parameter], None]:
    """Return what puts parameters of `model`, by their names, to where `ParameterSwap` finds them."""
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}

    def spill(name: str, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.contiguous()
        store.write((numbers[name], "value"), parameter.data)
        _empty(parameter)

    return spill


class _SwapUnit:
    """A module, the parameters it uses (tied ones too), and how many backwards of it are under way."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.module, self.parameters = module, list(parameters)
        self.backwards = 0


class ParameterSwap:
    """Keeps in memory only the parameters of the current unit of a model, and of the next one.

    To a run it is what `ReplicatedParameters` is: the data axis under ZeRO 0.

    Args:
        modules: what to bring in one after the other; other parameters stay in memory during a step.
        group: the data ranks, over which gradients are averaged; None: nobody else has any.
        uneven_use: see `Plan`.
    Attributes:
        root: the model.
        waited_s: seconds in which compute has waited for the store; `step` sets it to 0 first.
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
    ) -> None:
        self.root = root
        self._store, self._group, self._uneven_use = store, group, uneven_use
        self._names = {parameter: name for name, parameter in root.named_parameters()}
        self._number = {parameter: number for number, parameter in enumerate(self._names)}
        self._io = self._executor()
        self._units = _units(root, modules)
        self._users: dict[nn.Parameter, int] = dict.fromkeys(self._number, 0)  # units that have it here
        self._loaded: set[_SwapUnit] = set()
        self._coming: dict[nn.Parameter, Future[None]] = {}
        self._writing: list[Future[None]] = []
        self._norms: dict[nn.Parameter, float] = {}  # of the gradients that are in the store
        self._versions: dict[nn.Parameter, int] = {}  # when they came
        self._order: list[_SwapUnit] = []  # of forward, as seen in this step
        self.watched = 0
        self._before: list[_SwapUnit] = []  # in the last one: what to read ahead
        self._in_backward = False
        self.waited_s = 0.0
        self._ended = ""  # why nothing is swapped any more
        self._hooks = list(self._hook_all())
        for parameter in self._number:
            if is_spilled(parameter):
                continue  # in the store already
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            self._put((self._number[parameter], "value"), parameter.data)
            self._written()
            _empty(parameter)

    def _executor(self) -> Executor:
        """What reads and writes in the background, in order."""
        return ThreadPoolExecutor(1, thread_name_prefix="unisono swap")

    # ---- what a run asks of the data axis ----

    def check(self) -> None:
        """Raise RuntimeError where it cannot swap any more: it was closed, or the store is incomplete."""
        if self._ended:
            raise RuntimeError(self._ended)

    def reset(self) -> None:
        """Forget a step that ended with an error, or a backward outside one."""
        self._backward_ended()
        self._norms.clear()

    buckets: Sequence[GradientBucket] = ()  # one at a time is made, and checked

    def waiting(self) -> list[Any]:
        """The norms of the gradients that wait in the store."""
        return [*self._norms.values()]

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
        for number, (_, own) in enumerate(reversed(self._owned())):
            trained = [(self._names[p], p) for p in own if p.requires_grad]
            if trained:
                self._average(GradientBucket(trained, number, self._group))
        self._written()

    def _average(self, bucket: GradientBucket) -> None:
        for parameter in bucket.parameters:
            if parameter in self._norms:
                self._fetch_gradient(parameter)
        bucket.reduce()
        bucket.wait()
        bucket.finish_step(uneven_use=self._uneven_use)
        if not self._uneven_use:
            bucket.check_used()
        for parameter in bucket.parameters:
            if parameter.grad is not None:
                self._keep_gradient(parameter, parameter.grad)

    # ---- the rest of a step ----

    def squared_norm(self, copies: int = 1) -> float:
        """Return the squared norm of all gradients, of which so many ranks have the same."""
        having = [parameter for parameter in self._number if parameter in self._norms]
        if not having:
            return 0.0
        norms = [self._norms[parameter] for parameter in having]
        together = torch.tensor(norms, dtype=torch.float64, device=having[0].device)
        return sum_of_squares(together, [1 / copies] * len(norms)).item()

    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Unit by unit: parameters, gradients times `factor` and state in, one step, all out again.

        An error leaves some units stepped and others not: nothing can be swapped afterwards.
        """
        try:
            self._update(optimizer, factor)
        except BaseException as error:
            self._fail(error)
            raise

    def _update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        units = self._owned()
        for (unit, owned), (following, _) in zip(units, [*units[1:], (None, None)], strict=True):
            own = [p for p in owned if p in self._norms]
            self._load(unit)
            if following is not None:
                self._read_ahead([following], 0)
            for parameter in own:
                grad = self._fetch_gradient(parameter)
                grad.mul_(factor) if factor != 1.0 else None
                for name, value in _state_of(optimizer, parameter):
                    _fill(value)
                    self._get((self._number[parameter], name), value)
            optimizer.step()
            for parameter in own:
                parameter.grad = None
                self._put((self._number[parameter], "value"), parameter.data)
                for name, value in _state_of(optimizer, parameter):
                    self._put((self._number[parameter], name), value)
            self._written()
            for parameter in own:
                for _, value in _state_of(optimizer, parameter):
                    _empty(value)
            self._release(unit)
        self._norms.clear()

    def _owned(self) -> list[tuple[_SwapUnit, list[nn.Parameter]]]:
        """Each unit with the parameters that no unit before it has."""
        first: dict[nn.Parameter, _SwapUnit] = {}
        for unit in self._units:
            for parameter in unit.parameters:
                first.setdefault(parameter, unit)
        return [(unit, [p for p in unit.parameters if first[p] is unit]) for unit in self._units]

    # ---- everything at once ----

    @contextlib.contextmanager
    def mapped(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[dict[nn.Parameter, Tensor]]:
        """Yield each parameter's stored values, for reading and writing in place.

        Parameters on the CPU show them, too. So does the optimizer's state meanwhile; what is put into it
        instead goes to the store at the end.
        """
        self.check()
        self._written()
        state: Any = {} if optimizer is None else optimizer.state
        values = {p: self._store.view((number, "value"), p) for p, number in self._number.items()}
        emptied = {
            p: self._shown(p, value)
            for p, value in values.items()
            if is_spilled(p) and p.device.type == "cpu"
        }
        # where it is kept, and what stands for it
        seen: dict[tuple[nn.Parameter, str], tuple[Tensor, Tensor]] = {}
        for parameter, number in self._number.items():
            for name, value in _state_of(optimizer, parameter):
                seen[parameter, name] = self._store.view((number, name), value), value
                state[parameter][name] = seen[parameter, name][0]
        try:
            yield values
        finally:
            for parameter, own in emptied.items():
                parameter.data = own
                mark_spilled(parameter)
            for parameter in self._number:
                for name, value in _state_of(optimizer, parameter):
                    kept, stands = seen.get((parameter, name), (None, value))
                    if value is not kept:
                        stands = value.to(parameter.device).contiguous()
                        self._put((self._number[parameter], name), stands)
                        self._written()
                        _empty(stands)
                    state[parameter][name] = stands

    def _shown(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """Make a parameter have the values; return its own memory, which is empty."""
        unmark_spilled(parameter)
        own, parameter.data = parameter.data, value
        return own

    def close(self) -> None:
        """Bring the parameters back into memory for good, and give the store up."""
        for hook in self._hooks:
            hook.remove()
        known = self._ended
        try:
            for unit in self._units:
                self._load(unit)
            self._written()
        except OSError:
            if not known:
                raise
        finally:
            self._ended = self._ended or "the swap was closed: the parameters are in memory for good"
            self._io.shutdown()
            self._store.close()

    # ---- forward and backward ----

    def _hook_all(self) -> Iterator[Any]:
        spill = partial(call_alive, weakref.WeakMethod(self._spill))
        for unit in self._units:  # before the caller's hooks, which may need the values
            before = self._before_use(unit)
            yield unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            yield unit.module.register_forward_hook(self._after_use(unit), always_call=True)
        for parameter in self._number:
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(spill)
        yield self.root.register_forward_pre_hook(self._forward_begins, prepend=True)
        yield self.root.register_forward_hook(self._forward_ends, always_call=True)

    def _forward_begins(self, _module: nn.Module, _args: Any) -> None:
        self.check()
        self._backward_ended()  # of the micro-batch before
        self._order, self.watched = [], max(self.watched - 1, 0)

    def _forward_ends(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._release_all()
        self._before = self._order

    def _check_unwritten(self, unit: _SwapUnit) -> None:
        """Refuse a forward that has written a parameter of `unit`, whose old values are in the store."""
        for parameter in unit.parameters:
            written = parameter._version != self._versions[parameter]
            if self.watched and not written:  # a write by .data has no version
                kept = self._store.view((self._number[parameter], "value"), parameter.data)
                written = not torch.equal(bits_of(kept.to(parameter.device)), bits_of(parameter.data))
            if written:
                raise RuntimeError(
                    f'the forward writes the parameter "{self._names[parameter]}", and swap= would lose '
                    "it: the store has the old values. Compute what the forward needs from the parameter, "
                    "or write inside `with run.swap.mapped():` between two steps"
                )

    def _backward_ended(self) -> None:
        self._in_backward = False
        self._release_all()

    def _before_use(self, unit: _SwapUnit) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            self._load(unit)
            if not self._in_backward:
                self._order.append(unit)
                self._read_ahead(self._before, len(self._order))
            if not torch.is_grad_enabled():
                return None
            return tuple(self._with_gradient_hook(unit, a) for a in args), {
                k: self._with_gradient_hook(unit, v) for k, v in named.items()
            }

        return hook

    def _with_gradient_hook(self, unit: _SwapUnit, value: Any) -> Any:
        """Hook the gradient of `value`: when it is complete, backward of the unit has ended."""
        if isinstance(value, Tensor) and value.requires_grad:
            return _GradientCallback.apply(value, partial(self._backward_of_unit_ended, unit))
        return value

    def _after_use(self, unit: _SwapUnit) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self._in_backward:
                self._check_unwritten(unit)
            began: list[bool] = []

            def before_backward(_grad: Tensor) -> None:
                if not began:
                    began.append(True)
                    unit.backwards += 1
                    self._load(unit)
                    self._read_ahead(self._before[::-1], len(self._before) - self._place(unit))

            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(before_backward)
            if not self._in_backward and unit.module is not self.root:
                self._release(unit)

        return hook

    def _place(self, unit: _SwapUnit) -> int:
        return self._before.index(unit) if unit in self._before else len(self._before)

    def _backward_of_unit_ended(self, unit: _SwapUnit) -> None:
        unit.backwards -= 1
        if unit.backwards == 0 and unit.module is not self.root:
            self._release(unit)

    def _spill(self, parameter: nn.Parameter | Tensor) -> None:
        """Add a complete gradient to the stored one, and free its memory."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        grad = parameter.grad.contiguous()
        if parameter in self._norms:
            grad = self._fetch_gradient(parameter).add_(grad)
        self._keep_gradient(parameter, grad)

    def _keep_gradient(self, parameter: nn.Parameter, grad: Tensor) -> None:
        parameter.grad = None
        self._norms[parameter] = self._norm(grad)
        self._put((self._number[parameter], "grad"), grad)

    def _norm(self, grad: Tensor) -> float:
        return float(norm_of(grad).item())

    def _fetch_gradient(self, parameter: nn.Parameter) -> Tensor:
        parameter.grad = torch.empty_like(parameter)
        self._get((self._number[parameter], "grad"), parameter.grad)
        return parameter.grad

    # ---- memory ----

    def _load(self, unit: _SwapUnit) -> None:
        """Have the parameters of `unit` in memory."""
        self._start(unit)
        for parameter in unit.parameters:
            if parameter in self._coming:
                self._wait(self._coming.pop(parameter))

    def _start(self, unit: _SwapUnit) -> None:
        if unit in self._loaded:
            return
        self._loaded.add(unit)
        for parameter in unit.parameters:
            self._users[parameter] += 1
            if self._users[parameter] == 1:
                _fill(parameter)
                self._versions[parameter] = parameter._version
                key = (self._number[parameter], "value")
                self._coming[parameter] = self._submit(self._store.read, key, parameter.data)

    def _read_ahead(self, order: Sequence[_SwapUnit], place: int) -> None:
        if place < len(order):
            self._start(order[place])

    def _release(self, unit: _SwapUnit) -> None:
        if unit not in self._loaded:
            return
        self._load(unit)  # a read that has begun must end first
        self._loaded.remove(unit)
        for parameter in unit.parameters:
            self._users[parameter] -= 1
            if self._users[parameter] == 0:
                _empty(parameter)

    def _release_all(self) -> None:
        for unit in list(self._loaded):
            unit.backwards = 0
            self._release(unit)

    def _put(self, key: Key, tensor: Tensor) -> None:
        """Write in the background; two writes may be under way."""
        self._writing.append(self._submit(self._store.write, key, tensor))
        while len(self._writing) > 2:
            self._wait(self._writing.pop(0))

    def _submit(self, move: Callable[[Key, Tensor], None], key: Key, tensor: Tensor) -> Future[None]:
        """Move in the background, in the order of the stream in which the caller computes."""
        if tensor.is_cuda and torch.cuda.is_initialized():
            move = partial(_on_stream, torch.cuda.current_stream(tensor.device), move)
        return self._io.submit(move, key, tensor)

    def _fail(self, error: BaseException) -> None:
        self._ended = self._ended or (
            f"what is swapped is incomplete since {type(error).__name__}: {error}. Make a new run, and load "
            "its last checkpoint"
        )

    def _get(self, key: Key, tensor: Tensor) -> None:
        self._wait(self._submit(self._store.read, key, tensor))

    def _written(self) -> None:
        while self._writing:
            self._wait(self._writing.pop(0))

    def _wait(self, work: Future[None]) -> None:
        start = time.perf_counter()
        try:
            work.result()
        except OSError as error:
            self._fail(error)
            raise
        self.waited_s += time.perf_counter() - start


def _on_stream(stream: Any, move: Callable[[Key, Tensor], None], key: Key, tensor: Tensor) -> None:
    with torch.cuda.stream(stream):  # a thread's own one is the default stream
        move(key, tensor)


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


def _units(model: nn.Module, modules: Iterable[nn.Module]) -> list[_SwapUnit]:
    """The given modules, and the model itself for all other parameters."""
    inside = list(modules)
    units = [_SwapUnit(module, [*module.parameters()]) for module in inside if module is not model]
    taken = {parameter for unit in units for parameter in unit.parameters}
    rest = [parameter for parameter in model.parameters() if parameter not in taken]
    return [*units, _SwapUnit(model, rest)] if rest else units


def _state_of(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
    """What `optimizer` keeps of the parameter's size; counters stay in memory."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return [(name, v) for name, v in sorted(state.items()) if isinstance(v, Tensor) and v.dim() > 0]


def _empty(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)
    mark_spilled(tensor)


def _fill(tensor: Tensor) -> None:
    """Give an emptied tensor its memory back, without content."""
    unmark_spilled(tensor)
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


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
        return min(1.0, self._clip / (math.sqrt(self._swap.squared_norm()) + 1e-6))

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
