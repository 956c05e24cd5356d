"""Where a unit's memory is between its uses: parameters, gradients and optimizer state, in a store.

A unit is a block of the model: its parameters come and go together. Memory is released by emptying the
storages, not by replacing tensors, so that what autograd or `fully_shard` holds finds its bytes again. A
parameter that is cut stands for this rank's part of it. While one unit computes, the next one is read; which
one that is, the last passes have shown.

    update: each unit in with its gradients and state, stepped, out
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.torch_internals.dtensor import of_part, part_of

from .gradients import gradient, norm_of, scale_
from .optimizers import has_cut_parameters, step
from .spill import Disk, Host, Key, SpillStorage, allocate, free, is_spilled, show


def store_of(swap: str) -> SpillStorage:
    """Make the store that `Plan(swap=...)` names: "disk", "memory", or the folder of the file."""
    return Host() if swap == "memory" else Disk(None if swap == "disk" else swap)


class SwapUnit:
    """Parameters that come and go together; tied ones are in several units."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)


class SwapSpace:
    """The store of a rank, and what of it is in memory.

    Attributes:
        norms: of the gradients that are in the store, f64 [].
        waited_s: seconds in which compute has waited for the store; a step sets it to 0 first.
    """

    def __init__(self, store: SpillStorage) -> None:
        self.norms: dict[nn.Parameter, Tensor] = {}
        self.waited_s = 0.0
        self._store, self._io = store, self._executor()
        self._names: dict[nn.Parameter, str] = {}
        self._units: list[SwapUnit] = []
        self._users: dict[nn.Parameter, int] = {}  # units that have it in memory
        self._loaded: set[SwapUnit] = set()
        self._coming: dict[nn.Parameter, Future[None]] = {}
        self._writing: list[Future[None]] = []
        self._versions: dict[nn.Parameter, int] = {}  # when they came
        self._last: tuple[SwapUnit | None, SwapUnit | None] = (None, None)  # the last two units
        self._following: dict[tuple[SwapUnit | None, SwapUnit | None], SwapUnit] = {}  # what came after two
        self._streams: dict[torch.device, Any] = {}
        self._ended = ""  # why nothing is swapped any more

    def _executor(self) -> Executor:
        """What reads and writes in the background, in order."""
        return ThreadPoolExecutor(1, thread_name_prefix="unisono swap")

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """Move a parameter to the store."""
        if parameter in self._names:
            return
        self._names[parameter], self._users[parameter] = name, 0
        if not isinstance(parameter, DTensor):  # its memory may be a part of something
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        self._put((name, "value"), parameter)
        self._written()
        free(parameter)

    def check(self) -> None:
        """Raise RuntimeError where it cannot swap any more: it was closed, or the store is incomplete."""
        if self._ended:
            raise RuntimeError(self._ended)

    def release_all(self) -> None:
        """Free every unit; a pass has ended."""
        for unit in list(self._loaded):
            self.release(unit)
        self._last = (None, None)

    def reset(self) -> None:
        """Forget a step that ended with an error, or a backward outside one."""
        self.norms.clear()
        self.release_all()

    # ---- gradients ----

    def keep_gradients(self, parameters: Iterable[nn.Parameter], *, add: bool = True) -> None:
        """Move gradients to the store, added to those that are there, or in their place."""
        for parameter in parameters:
            if parameter.grad is None or parameter not in self._names:
                continue
            grad: Any = gradient(parameter)
            if add and parameter in self.norms:
                stored = torch.empty_like(grad)
                self._get((self._names[parameter], "grad"), stored)
                grad = stored.add_(grad)
            parameter.grad = None
            self.norms[parameter] = self._norm(grad)
            self._put((self._names[parameter], "grad"), grad.contiguous())

    def fetch_gradient(self, parameter: nn.Parameter) -> Tensor:
        """Bring a gradient back; return this rank's part."""
        part = torch.empty_like(part_of(parameter))
        self._get((self._names[parameter], "grad"), part)
        parameter.grad = of_part(part, parameter)
        return part

    @contextlib.contextmanager
    def fetched(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Have the gradients of some parameters in memory."""
        some = [*parameters]
        for parameter in some:
            if parameter in self.norms:
                self.fetch_gradient(parameter)
        yield
        self.keep_gradients(some, add=False)

    def _norm(self, grad: Tensor) -> Tensor:
        return norm_of(grad)

    # ---- the optimizer ----

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
        has = [p for group in optimizer.param_groups for p in group["params"]]
        cut = has_cut_parameters(has)
        staying = [(p, p.grad) for p in has if p.grad is not None]  # what no unit has: it is in memory
        scale_([p for p, _ in staying], factor)
        for parameter, _ in staying:
            parameter.grad = None
        units = [(unit, own) for unit, own in self.owned() if any(p in self.norms for p in own)]
        for (unit, owned), (following, _) in zip(units, [*units[1:], (None, None)], strict=True):
            own = [p for p in owned if p in self.norms]
            self._load(unit)
            if following is not None:
                self._start(following)
            for parameter in own:
                grad = self.fetch_gradient(parameter)
                grad.mul_(factor) if factor != 1.0 else None
                for name, value in _state_of(optimizer, parameter):
                    allocate(value)
                    self._get((self._names[parameter], name), value)
            step(optimizer, cut=cut)
            for parameter in own:
                parameter.grad = None
                self._put((self._names[parameter], "value"), parameter)
                for name, value in _state_of(optimizer, parameter):
                    self._put((self._names[parameter], name), value)
            self._written()
            for parameter in own:
                for _, value in _state_of(optimizer, parameter):
                    free(value)
            self.release(unit)
        self.norms.clear()
        for parameter, kept in staying:
            parameter.grad = kept
        if staying:
            step(optimizer, cut=cut)

    def owned(self) -> list[tuple[SwapUnit, list[nn.Parameter]]]:
        """Each unit with the parameters that no unit before it has."""
        first: dict[nn.Parameter, SwapUnit] = {}
        for unit in self._units:
            for parameter in unit.parameters:
                first.setdefault(parameter, unit)
        return [(unit, [p for p in unit.parameters if first[p] is unit]) for unit in self._units]

    # ---- everything at once ----

    @contextlib.contextmanager
    def mapped(self, optimizer: torch.optim.Optimizer | None = None) -> Iterator[dict[nn.Parameter, Tensor]]:
        """Yield each parameter's stored values, for reading and writing in place; cut as the parameter is.

        Parameters on the CPU show them, too. So does the optimizer's state meanwhile; what is put into it
        instead goes to the store at the end.
        """
        self.check()
        self.release_all()  # a forward alone has left the unit that it read ahead
        self._written()
        state: Any = {} if optimizer is None else optimizer.state
        views = {p: self._store.view((name, "value"), part_of(p)) for p, name in self._names.items()}
        ends = [
            show(p, view) for p, view in views.items() if is_spilled(p) and part_of(p).device.type == "cpu"
        ]
        # where it is kept, and what stands for it
        seen: dict[tuple[nn.Parameter, str], tuple[Tensor, Tensor]] = {}
        for parameter, path in self._names.items():
            for name, value in _state_of(optimizer, parameter):
                kept = of_part(self._store.view((path, name), part_of(value)), value)
                seen[parameter, name] = kept, value
                state[parameter][name] = kept
        try:
            yield {p: of_part(view, p) for p, view in views.items()}
        finally:
            for end in ends:
                end()
            for parameter, path in self._names.items():
                for name, value in _state_of(optimizer, parameter):
                    kept, stands = seen.get((parameter, name), (value, value))
                    if (parameter, name) not in seen or value is not kept:
                        part = part_of(value).to(part_of(parameter).device).contiguous()
                        stands = part if part is part_of(value) else of_part(part, value)
                        self._put((path, name), stands)
                        self._written()
                        free(stands)
                    state[parameter][name] = stands

    def close(self) -> None:
        """Bring the parameters back into memory for good, and give the store up."""
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

    # ---- memory ----

    def use(self, unit: SwapUnit) -> None:
        """Have a unit in memory now, and begin to read the one that came next in the last pass."""
        self.check()
        self._load(unit)
        if unit is not self._last[1]:
            self._following[self._last] = unit
            self._last = (self._last[1], unit)
        following = self._following.get(self._last)
        if following is not None:
            self._start(following)

    def _load(self, unit: SwapUnit) -> None:
        """Have the parameters of `unit` in memory."""
        self._start(unit)
        for parameter in unit.parameters:
            if parameter in self._coming:
                self._wait(self._coming.pop(parameter))

    def _start(self, unit: SwapUnit) -> None:
        if unit in self._loaded:
            return
        self._loaded.add(unit)
        for parameter in unit.parameters:
            self._users[parameter] += 1
            if self._users[parameter] == 1:
                allocate(parameter)
                self._versions[parameter] = parameter._version
                key = (self._names[parameter], "value")
                self._coming[parameter] = self._submit(self._store.read, key, parameter)

    def release(self, unit: SwapUnit) -> None:
        """Free what no other unit has in memory."""
        if unit not in self._loaded:
            return
        self._load(unit)  # a read that has begun must end first
        self._loaded.remove(unit)
        for parameter in unit.parameters:
            self._users[parameter] -= 1
            if self._users[parameter] == 0:
                free(parameter)

    def _put(self, key: Key, tensor: Tensor) -> None:
        """Write in the background; two writes may be under way."""
        self._writing.append(self._submit(self._store.write, key, tensor))
        while len(self._writing) > 2:
            self._wait(self._writing.pop(0))

    def _submit(self, move: Callable[[Key, Tensor], None], key: Key, tensor: Tensor) -> Future[None]:
        """Move in the background, after what the stream has computed in which the caller is."""
        part = part_of(tensor).data  # which has a version of its own
        if part.is_cuda and torch.cuda.is_initialized():
            stream = self._streams.setdefault(part.device, torch.cuda.Stream(part.device))
            computed = torch.cuda.current_stream(part.device).record_event()
            return self._io.submit(_on_stream, stream, computed, move, key, part)
        return self._io.submit(move, key, part)

    def _fail(self, error: BaseException) -> None:
        """Swap nothing any more. What is under way ends first: its memory may be freed next."""
        wait([*self._writing, *self._coming.values()])
        self._writing.clear()
        self._coming.clear()
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


def _on_stream(
    stream: Any, computed: Any, move: Callable[[Key, Tensor], None], key: Key, tensor: Tensor
) -> None:
    """Move beside what the device computes. A store returns when the bytes have moved."""
    with torch.cuda.stream(stream):
        stream.wait_event(computed)
        move(key, tensor)


def _state_of(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
    """What `optimizer` keeps of the parameter's size; counters stay in memory."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return [(name, v) for name, v in sorted(state.items()) if isinstance(v, Tensor) and v.dim() > 0]
