"""Records what a model does, once, on shapes: no values are computed, and no memory is taken for them.

The model is copied without its values; the program runs on the copy, so nothing it writes into itself stays.
Python runs as it is: loops, branches, dicts, dataclasses. Only what reads the values of a tensor cannot run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import linecache
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from unisono.torch_internals.fake import OperatorMode, fake_mode, is_about_data, memory_of

from .cost import flops_of
from .program import Frame, FunctionCall, Graph, Node, Ref, Value

__all__ = ["SIZED", "CaptureError", "Shapes", "capture", "numbers_of", "tensors_in"]

PACKAGES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
SKIPPED = ("prim.device", "aten.detach_", "aten.sym_size", "aten.sym_numel", "aten.is_pinned")

# Functions whose arguments may be sizes that the program has written down
SIZED = {
    "view", "reshape", "view_as", "expand", "unflatten", "split", "split_with_sizes", "chunk", "narrow",
    "__getitem__", "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full",
    "repeat", "tensor_split", "slice_scatter", "rand", "randn", "resize_", "as_strided", "broadcast_to",
}  # fmt: skip


class CaptureError(ValueError):
    """A model cannot be recorded; the text names the file and the line."""


class Shapes:
    """A copy of a model without values, and the mode under which it runs.

    Args:
        model: with its values or on the meta device; it stays as it is.
        also: anything that refers to modules of `model`, such as a list of them; copied with it.
    Raises:
        CaptureError: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, also: Any = None) -> None:
        self.mode = fake_mode()
        memo: dict[int, Any] = {}
        for module in model.modules():
            for value in [*module._parameters.values(), *module._buffers.values(), *vars(module).values()]:
                if isinstance(value, Tensor) and id(value) not in memo:
                    memo[id(value)] = self.blank(value)
        try:
            self.model, self.also = copy.deepcopy((model, also), memo)
        except Exception as error:
            raise CaptureError(
                f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), so what it does "
                "cannot be recorded"
            ) from error

    def blank(self, value: Tensor) -> Tensor:
        """A tensor like `value`, without values; on the CPU in place of the meta device."""
        device = torch.device("cpu") if value.is_meta else value.device
        with self.mode, torch.no_grad():
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if isinstance(value, nn.Parameter):
            return nn.Parameter(made, requires_grad=value.requires_grad)
        return made

    def inputs(self, sample: Any) -> Any:
        """The sample, without its values."""
        return _mapped(sample, self.blank)


def capture(model: nn.Module, sample: Any) -> Graph:
    """Record what `model` does on inputs like `sample`: every operator, in order, with shapes and costs.

    Nothing is computed, and the model does not change. `print(graph)` shows a table by module.

    Args:
        model: any module, with its values or on the meta device.
        sample: its inputs: a tensor, a tuple of arguments, or a dict of keyword arguments.
    Raises:
        CaptureError: the program reads values of tensors, or raises; the text names the file and the line.
    Example: capture(nn.Linear(4, 2), torch.ones(3, 4)).flops == 2 * 3 * 4 * 2
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"capture: model is a {type(model).__name__}, expected an nn.Module")
    shapes = Shapes(model)
    return Recorder(shapes).run(shapes.model, sample)


class Recorder:
    """Records one run of a model's copy.

    Args:
        watch: called with each call of a function that takes sizes; returns the arguments to use.
    """

    def __init__(self, shapes: Shapes, watch: Callable[..., Any] | None = None) -> None:
        self.graph = Graph(type(shapes.model).__name__)
        self.paused = 0
        self._shapes, self._watch = shapes, watch
        self._known: dict[int, tuple[Tensor, int]] = {}  # the tensor is kept, so that its id stays its own
        self._storages: dict[int, tuple[Any, int]] = {}
        self.frames: list[int] = []
        self._ordinals: list[int] = [0]
        self._call = -1

    def run(self, model: nn.Module, sample: Any, forward: Callable[[Any], Any] | None = None) -> Graph:
        """Run `model` on `sample`, or `forward` on it, which runs parts of `model`."""
        self.graph.model = type(model).__name__
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, value in named:
                self.graph.names[name] = self._new(value, kind, name=name)
        handles = [
            handle
            for path, module in model.named_modules()
            for handle in (
                module.register_forward_pre_hook(self._begin(path), prepend=True, with_kwargs=True),
                module.register_forward_hook(self._end),
            )
        ]
        inputs = self._shapes.inputs(sample)
        for tensor in tensors_in(inputs):
            self._new(tensor, "input")
        try:
            with _quiet(), self._shapes.mode, _Operators(self), _Functions(self):
                output = forward(inputs) if forward is not None else call(model, inputs)
        except Exception as error:
            raise self._error(error, model) from error
        finally:
            for handle in handles:
                handle.remove()
        self.graph.outputs = [self.value(tensor) for tensor in tensors_in(output)]
        self._known.clear()
        self._storages.clear()
        return self.graph

    # ---- what the modes tell ----

    def value(self, tensor: Tensor) -> int:
        """The number of a tensor; one that nothing made is a constant."""
        self.paused += 1  # what is asked of a tensor here is no call of the program
        known = self._known.get(id(tensor))
        number = self._new(tensor, "constant") if known is None else known[1]
        made_by: Any = tensor.grad_fn
        if isinstance(made_by, BackwardCFunction):
            self.graph.own_backward.add(number)
        self.paused -= 1
        return number

    def stand_in(self, tensor: Tensor, other: Tensor) -> None:
        """Take `other` for `tensor` from now on."""
        self._known[id(other)] = other, self.value(tensor)

    def operator(self, op: Any, args: tuple[Any, ...], named: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run one operator and note it."""
        if self.paused or str(op.overloadpacket) in SKIPPED:
            return run()
        came = _mapped(args, lambda t: Ref(self.value(t))), _mapped(named, lambda t: Ref(self.value(t)))
        output = run()
        number = len(self.graph.nodes)
        flat = output if isinstance(output, (tuple, list)) else (output,)
        self.graph.nodes.append(
            Node(
                number, op, *came, (), tuple(self.frames), self._call, _line(),
                flops_of(op, args, output),
            )
        )  # fmt: skip
        outputs = tuple(
            self._new(part, "operator", node=number) if isinstance(part, Tensor) else None for part in flat
        )
        self.graph.nodes[number] = dataclasses.replace(self.graph.nodes[number], outputs=outputs)
        return output

    def function(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run one function of the program."""
        if self.paused:
            return function(*args, **named)
        name, ordinal = getattr(function, "__name__", str(function)), -1
        if name in SIZED:
            ordinal = self._ordinals[-1]
            self._ordinals[-1] += 1
        before, self._call = self._call, len(self.graph.calls)
        frame = self.frames[-1] if self.frames else -1
        self.graph.calls.append(FunctionCall(name, frame, ordinal, tuple(numbers_of((args, named)))))
        try:
            if self._watch is not None and ordinal >= 0:
                args, named = self._watch(self._call, args, named)
            return function(*args, **named)
        finally:
            self._call = before

    def _new(self, tensor: Tensor, kind: str, *, node: int = -1, name: str = "") -> int:
        number = len(self.graph.values)
        storage, key = memory_of(tensor)
        shared = self._storages.setdefault(key, (storage, number))[1]
        self.graph.values.append(
            Value(
                number, kind, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, shared, node, name
            )
        )  # fmt: skip
        self._known[id(tensor)] = tensor, number
        return number

    def _begin(self, path: str) -> Callable[..., None]:
        def begin(module: nn.Module, args: Any, named: Any) -> None:
            number = len(self.graph.frames)
            took = [self.value(tensor) for tensor in tensors_in((args, named))]
            frame = Frame(number, path, type(module).__name__, len(self.graph.nodes), inputs=took)
            self.graph.frames.append(frame)
            self.frames.append(number)
            self._ordinals.append(0)

        return begin

    def _end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        frame = self.graph.frames[self.frames.pop()]
        self._ordinals.pop()
        frame.last = len(self.graph.nodes)
        frame.outputs = [self.value(tensor) for tensor in tensors_in(output)]

    def _error(self, error: Exception, model: nn.Module) -> CaptureError:
        path = self.graph.frames[self.frames[-1]].path if self.frames else ""
        kind = type(model.get_submodule(path)).__name__
        where = f'"{path}" ({kind})' if path else kind
        lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(PACKAGES)]
        at = f"{lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line}" if lines else "PyTorch itself"
        if is_about_data(error):
            return CaptureError(
                f"{where} does what depends on the values of a tensor, which cannot be recorded, at {at}"
            )
        says = str(error).strip().splitlines()
        return CaptureError(
            f"{where} raises {type(error).__name__} on the sample: {says[0] if says else ''}, at {at}"
        )


class _Operators(OperatorMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        return self._recorder.operator(func, args, named, lambda: func(*args, **named))


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.function(func, args, kwargs or {})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs what an operator raises on shapes; this package raises it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def call(module: Any, inputs: Any) -> Any:
    """Call a module with what a batch has as inputs."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _line() -> str:
    """Where the program is: the innermost line outside PyTorch and outside this package."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    if frame is None:
        return ""
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{name}:{number}: {linecache.getline(name, number).strip()}"


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested containers and dataclasses."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from tensors_in(part)
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        for field in dataclasses.fields(thing):
            yield from tensors_in(getattr(thing, field.name))


def numbers_of(thing: Any) -> Iterator[int]:
    """Yield every integer in nested arguments; of a slice its bounds. A bool is none."""
    if isinstance(thing, (int, torch.SymInt)) and not isinstance(thing, bool):
        yield int(thing)
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from numbers_of(part)
    elif isinstance(thing, slice):
        yield from numbers_of((thing.start, thing.stop, thing.step))
    elif isinstance(thing, (tuple, list)):
        for part in thing:
            yield from numbers_of(part)


def _mapped(thing: Any, change: Callable[[Tensor], Any]) -> Any:
    """Nested containers with `change` applied to every tensor."""
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, dict):
        found = {key: _mapped(value, change) for key, value in thing.items()}
        return found if type(thing) is dict else _rebuilt(thing, found)
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_mapped(part, change) for part in thing))
    if isinstance(thing, (tuple, list)):
        plain: Any = tuple if isinstance(thing, tuple) else list
        return plain(_mapped(part, change) for part in thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        changed = copy.copy(thing)
        for field in dataclasses.fields(thing):
            object.__setattr__(changed, field.name, _mapped(getattr(thing, field.name), change))
        return changed
    return thing


def _rebuilt(thing: Any, found: dict[Any, Any]) -> Any:
    changed = copy.copy(thing)
    for key, value in found.items():
        changed[key] = value
    return changed
