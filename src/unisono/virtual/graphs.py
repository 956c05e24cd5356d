"""CUDA graphs: a capture records the operations, and a replay runs them again on the same memory.

An operation runs while it is recorded, since programs ask for its results. On a GPU a capture computes
nothing; so at its end the memory that was there before gets its old values back.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.torch_internals.graphs import OperatorMode, address_of, owners, without_modes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# mypy must pass with and without PyTorch installed.
# mypy: disallow-subclassing-any=False, warn-unused-ignores=False, disallow-untyped-calls=False

CAPTURING = "CUDA error: operation not permitted when stream is capturing\n{} waits for the GPU"
WAITING = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
MESSAGES = ("send", "recv", "recv_anysource")  # both ranks of an exchange send first: neither may wait for it
MASKS = (torch.bool, torch.uint8)
PLAIN = (torch.Tensor, torch.nn.Parameter)
_STATE = SimpleNamespace(capture=None, busy=False)  # a process captures one graph at a time


def capturing() -> bool:
    """Whether this process captures a graph."""
    return _STATE.capture is not None


def as_one_step(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what is more than one operation, such as a collective: one step of the graph under capture.

    A replay waits for the Work that it returns.
    """
    if _STATE.capture is None or _STATE.busy:
        return call(*args, **kwargs)
    with without_modes():
        return _STATE.capture.record(call, args, kwargs)


class RecordedGraph:
    """The steps of a graph, and the memory that they use."""

    def __init__(self, generators: list[Any]) -> None:
        self.steps: list[_GraphStep] = []
        self.storages: dict[int, Any] = {}  # by address: those that steps use
        self.sizes: dict[int, int] = {}  # bytes; of those that steps make
        self._generators = [*torch.cuda.default_generators, *generators]
        self._capture: Any = None

    def begin(self) -> None:
        """Record from now on."""
        if capturing():
            raise torch.AcceleratorError(CAPTURING.format("a second capture"))
        self._states = [each.get_state() for each in self._generators]
        self._capture = _STATE.capture = _Capture(self)
        self._capture.__enter__()

    def end(self) -> None:
        """Record no more. Gives older memory its values back; frees what no tensor of the program has."""
        self._capture.__exit__(None, None, None)
        _STATE.capture = None
        for key, values in self._capture.before.items():
            self._fit(key, values.numel())
            _bytes(self.storages[key]).copy_(values)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        self._capture = None
        last: dict[int, int] = {}
        ours = dict.fromkeys(self.storages, 1)  # the dictionary
        for i, step in enumerate(self.steps):
            for x in step.tensors:
                ours[_key(x)] += 1
                last[_key(x)] = i
            last.update((key, i) for key in step.made)
        self._unused: dict[int, list[int]] = {}  # after the step
        for key in self.sizes:
            if owners(self.storages[key]) <= ours[key]:
                self._unused.setdefault(last[key], []).append(key)
                self._fit(key, 0)

    @torch.no_grad()
    def replay(self) -> None:
        """Run the steps again, each on the memory of the capture."""
        works: list[tuple[Any, list[Tensor]]] = []
        for i, step in enumerate(self.steps):
            if getattr(step.call, "__name__", "") not in MESSAGES or any(map(_overlap(step), works)):
                _wait(works)
            result = step.call(*step.args, **step.kwargs)
            if hasattr(result, "wait"):
                works.append((result, step.tensors))
            if step.made:
                self._place(step, result)
            for key in self._unused.get(i, ()):
                self._fit(key, 0)
        _wait(works)

    def _place(self, step: _GraphStep, result: Any) -> None:
        """Copy new results to where those of the capture are."""
        results = tree_leaves(result)
        if getattr(step.call, "namespace", "") == "_c10d_functional":
            results = [torch.ops._c10d_functional.wait_tensor(x) for x in results]
        for key, i in step.made.items():
            self._fit(key, self.sizes[key])
            _bytes(self.storages[key]).copy_(_bytes(results[i].untyped_storage()))

    def _fit(self, key: int, nbytes: int) -> None:
        if self.storages[key].nbytes() != nbytes:
            self.storages[key].resize_(nbytes)


class _GraphStep(NamedTuple):
    """One recorded call. Its tensors are aliases of the program's, which keep the memory."""

    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor]
    made: dict[int, int]  # the storages that are new, and the numbers of the results in them


class _Capture(OperatorMode):
    """Records all operations on GPUs of this thread, and of the autograd threads that it starts."""

    supports_higher_order_operators = True

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph
        self.before: dict[int, Tensor] = {}  # the values of older storages

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled graphs run compiled: each is one step."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a subclass takes itself apart; its operations come back here
        return self.record(func, args, kwargs or {})

    def record(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call, and make it a step if it computes something of GPUs."""
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        kept = (args, kwargs)
        views = getattr(call, "is_view", False)  # schemas may not say what is written, but what is a view
        on_gpus = any(x.is_cuda for x in given)
        if hasattr(call, "_schema"):
            _refuse_to_wait(call, args, kwargs, given)
        if on_gpus:
            self._keep_values(given)
            kept = tree_map_only(torch.Tensor, torch.Tensor.detach, kept)
        busy, _STATE.busy = _STATE.busy, True
        try:
            result = call(*args, **kwargs)
        finally:
            _STATE.busy = busy
        results = enumerate(tree_leaves(result))
        old = {_key(x) for x in given}
        fresh = {_key(x): (i, x) for i, x in results if isinstance(x, torch.Tensor) and x.is_cuda}
        fresh = {key: found for key, found in fresh.items() if key not in old}
        for key, (_, x) in fresh.items():
            self._graph.storages[key] = x.untyped_storage()
            self._graph.sizes[key] = x.untyped_storage().nbytes()
        if fresh or (on_gpus and not views):
            made = {key: i for key, (i, _) in fresh.items()}
            tensors = [x for x in tree_leaves(kept) if isinstance(x, torch.Tensor)]
            for x in tensors:
                self._graph.storages.setdefault(_key(x), x.untyped_storage())
            self._graph.steps.append(_GraphStep(call, *kept, tensors, made))
        return result

    def _keep_values(self, given: list[Tensor]) -> None:
        """Keep the values of memory that is older than the capture: not all schemas say what is written."""
        for x in filter(lambda x: x.is_cuda, given):
            key = _key(x)
            if key not in self._graph.sizes and key not in self.before:
                self._graph.storages[key] = x.untyped_storage()
                self.before[key] = torch.ops.unisono_virtual.host(_bytes(x.untyped_storage())).clone()


def _refuse_to_wait(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> None:
    """Raise CUDA's error for an operation that would wait for the GPU, which computes nothing."""
    name = call.name() if callable(getattr(call, "name", None)) else ""
    devices = {x.device.type for x in given}
    if name == "aten::_to_copy" and kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]).type)
    copies = name in ("aten::copy_", "aten::_to_copy") and {"cpu", "cuda"} <= devices
    blocking = not kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
    reads = "cuda" in devices and any(tag in call.tags for tag in WAITING)
    masks = name != "aten::index.Tensor" or any(x.dtype in MASKS for x in given[1:])
    if (copies and blocking) or (reads and masks and kwargs.get("output_size") is None):
        raise torch.AcceleratorError(CAPTURING.format(name))


def _overlap(step: _GraphStep) -> Callable[[tuple[Any, list[Tensor]]], bool]:
    """Whether a Work's tensors share memory with those of a message: then the program has waited between."""
    spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in step.tensors]
    return lambda work: any(
        start < x.data_ptr() + x.nbytes and x.data_ptr() < end for x in work[1] for start, end in spans
    )


def _wait(works: list[tuple[Any, list[Tensor]]]) -> None:
    while works:
        works.pop(0)[0].wait()


def _key(x: Tensor) -> int:
    return address_of(x.untyped_storage())


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
