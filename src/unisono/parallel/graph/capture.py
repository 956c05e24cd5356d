"""Records what a model does, once, on shapes: no values are computed, and no memory is taken for them.

The model is copied without its values; the program runs on the copy, so nothing it writes into itself stays.
Python runs as it is: loops, branches, dicts, dataclasses. Only what reads the values of a tensor cannot run.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import logging
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from unisono.torch_internals.fake import is_about_data, memory_of
from unisono.torch_internals.training import module_at

from .containers import argument_names, mapped, numbers_of, slots_in, slots_of_call, tensors_in
from .noted_call import ATTENTION, FUNCTION, PartsOp, bound, calls_told, check_at, left_in_parts, noted_call
from .program import Frame, FunctionCall, Graph, Node, Ref, Value, flops_of
from .shapes import CaptureError, Shapes, check_collective
from .step_trace import PACKAGES, StepTrace, program_frame

__all__ = ["SIZED", "CaptureError", "Recorder", "Shapes", "call", "capture", "quiet"]

CHECKPOINT = torch.utils.checkpoint.__file__
MODULE = nn.modules.module.__file__
STATE = frozenset(vars(nn.Module()))  # what nn.Module itself keeps among a module's attributes
SCRIPTED = "::DifferentiableGraphBackward"  # of torch.jit.script, whose operators run without autograd
SKIPPED = ("prim.device", "aten.detach_", "aten.sym_size", "aten.sym_numel", "aten.is_pinned")

# Functions whose arguments may be sizes that the program has written down
SIZED = {
    "view", "reshape", "view_as", "expand", "unflatten", "split", "split_with_sizes", "chunk", "narrow",
    "__getitem__", "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full",
    "repeat", "tensor_split", "slice_scatter", "rand", "randn", "resize_", "as_strided", "broadcast_to",
    "group_norm",
}  # fmt: skip


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


class Recorder(StepTrace):
    """Records one run of a model's copy: the graph of a step.

    Args:
        watch: called with each call of a function that takes sizes; returns the arguments to use.
        attention: a call of scaled_dot_product_attention is one operator, whatever PyTorch makes of it.
    """

    def __init__(
        self, shapes: Shapes, watch: Callable[..., Any] | None = None, *, attention: bool = False
    ) -> None:
        super().__init__()
        self.graph = Graph(type(shapes.model).__name__)
        self._shapes, self._watch, self._attention = shapes, watch, attention
        self._known: dict[int, tuple[Tensor, int]] = {}  # the tensor is kept, so that its id stays its own
        self._storages: dict[int, tuple[Any, int]] = {}
        self._made_by: dict[int, Any] = {}  # the grad_fn of each value as it was last seen
        self.frames: list[int] = []
        self._ordinals: list[int] = [0]
        self._call = -1
        self._names: dict[str, tuple[str, ...]] = {}  # of a module -> of its arguments by place

    def run(self, model: nn.Module, sample: Any, forward: Callable[[Any], Any] | None = None) -> Graph:
        """Run `model` on `sample`, or `forward` on it, which runs parts of `model`."""
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, value in named:
                self.graph.names[name] = self._new(value, kind, name=name)
        buffers = dict(model.named_buffers())
        modules = [*model.named_modules()]
        self._names = {path: argument_names(module.forward) for path, module in modules}
        inputs = self._shapes.inputs(sample)
        drawn = _python_states()
        for tensor in tensors_in(inputs):
            self._new(tensor, "input")
        try:
            told = self.attention if self._attention else None
            with (
                self.follow(modules) as ends, quiet(), calls_told(told), self._shapes.mode, self,
                _Functions(self),
            ):  # fmt: skip
                for path, module in modules:
                    if not isinstance(module, torch.jit.ScriptModule):
                        ends.callback(self._watched(path, module))
                output = forward(inputs) if forward is not None else call(model, inputs)
        except Exception as error:
            raise self._error(error, model) from error
        if _python_states() != drawn:
            raise CaptureError(
                f"{self.graph.model} draws numbers from Python's random or NumPy while it runs, so it does "
                "not run one program. Draw them outside, and give them to it",
                final=True,
            )
        self.graph.result = self._refs(output)
        self.graph.outputs = [ref.value for ref in tensors_in(self.graph.result, Ref)]
        if why := left_in_parts(self.graph.nodes, [*self.graph.outputs]):
            raise CaptureError(f"{self.graph.model}: {why}", final=True)
        self._note_kept(model, buffers)
        self._note_functions()
        for table in (self._known, self._storages, self._made_by):
            table.clear()
        return self.graph

    # ---- what the modes tell ----

    def value(self, tensor: Tensor) -> int:
        """The number of a tensor; one that nothing made is a constant."""
        with self.paused:  # what is asked of a tensor here is no call of the program
            return self._number(tensor)

    def _number(self, tensor: Tensor) -> int:
        known = self._known.get(id(tensor))
        original = None if known else self._shapes.original(tensor)
        if original is not None:
            number = self.graph.names[original]
        elif known is None:
            number = self._new(tensor, "constant")
            attribute = self._shapes.attributes.get(id(tensor))
            if attribute is not None:
                self.graph.constants[number] = attribute[1]
            else:
                self.graph.constants[number] = None if self._shapes.mode.is_our_fake(tensor) else tensor
        else:
            number = _saved_result(self.graph, tensor, known[1], self._made_by)
        made_by: Any = tensor.grad_fn
        self._made_by[number] = made_by
        if _hides(made_by):
            self.graph.own_backward.setdefault(number, self.frames[-1] if self.frames else -1)
        return number

    def stand_in(self, tensor: Tensor, other: Tensor) -> None:
        """Take `other` for `tensor` from now on, with its own shape."""
        number = self.value(tensor)
        with self.paused:
            self.graph.stand_ins[self._new(other, "operator")] = number

    def operator(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run one operator and note it."""
        if str(op.overloadpacket) in SKIPPED:
            return op(*args, **named)
        check_collective(op)
        if str(op.overloadpacket) == "aten._local_scalar_dense" and self._is_checked(args[0]):
            return True
        came = self._refs(args), self._refs(named)
        output = op(*args, **named)
        flat = output if isinstance(output, (tuple, list)) else (output,)
        self._note(op, came, flat, flops_of(op, args, output))
        return output

    def _refs(self, thing: Any) -> Any:
        return mapped(thing, lambda tensor: Ref(self.value(tensor)))

    def _note(self, op: Any, came: tuple[Any, Any], outputs: Sequence[Any], flops: int) -> None:
        number = len(self.graph.nodes)
        if _is_recomputed():
            self.graph.recomputed.add(number)
        made = tuple(
            self._new(part, "operator", node=number) if isinstance(part, Tensor) else None for part in outputs
        )
        frames, grad = tuple(self.frames), torch.is_grad_enabled()
        self.graph.nodes.append(Node(number, op, *came, made, frames, self._call, _line_now(), flops, grad))

    def _is_checked(self, read: Tensor) -> bool:
        """Whether a program reads this value only to raise where it is False; if so, note the check."""
        number = self.value(read)
        made_by = self.graph.values[number].node
        if made_by < 0 or self.graph.nodes[made_by].name != "aten._is_all_true":
            return False
        self._note(check_at(_line_now()), ((Ref(number),), {}), (None,), 0)
        return True

    def function(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run one function of the program."""
        if self.paused:
            return function(*args, **named)
        name, ordinal = getattr(function, "__name__", str(function)), -1
        if self._attention and name == FUNCTION:
            return self.attention(function, args, named)
        if function is noted_call:
            op, given, run, flops = args
            return self.noted(op, given, {}, run, flops)
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

    def attention(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run scaled_dot_product_attention and note it as one operator."""
        return self.noted(ATTENTION, (), bound(args, named), lambda: function(*args, **named))

    def noted(self, op: Any, args: Any, named: Any, run: Callable[[], Tensor], flops: int = 0) -> Any:
        """Run what makes one tensor, and note it as the operator `op` with these arguments."""
        if self.paused:
            return run()
        came = self._refs(args), self._refs(named)
        with self.paused:
            output, flops = op.recorded() if isinstance(op, PartsOp) else (run(), flops)
        self._note(op, came, (output,), flops)
        return output

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

    # ---- calls of modules ----

    def _watched(self, path: str, module: nn.Module) -> Callable[[], None]:
        """Have each call of a module's forward alone be seen; return the end.

        No hook of PyTorch is told of a program's own calls of `module.forward`, but what stands in place of
        a forward is called.
        """
        run, own = module.forward, vars(module).get("forward")

        @functools.wraps(run)
        def forward(*args: Any, **named: Any) -> Any:
            frame = self.graph.frames[self.frames[-1]] if self.frames else None
            alone = frame is None or frame.path != path or frame.begin >= 0
            if alone:
                self.begin(path, module, args, named)
            self._begin_body(args, named)
            output = run(*args, **named)
            self._end_body(output)
            if alone:
                self.end(path, module, args, output)
            return output

        def restore() -> None:
            del module.forward
            if own is not None:
                module.forward = own  # type: ignore[method-assign]

        module.forward = forward  # type: ignore[method-assign]
        return restore

    def begin(self, path: str, module: nn.Module, args: Any, named: Any) -> None:
        """A call of a module is a frame, with its hooks."""
        number = len(self.graph.frames)
        came, names = self._refs((args, named)), self._names[path]
        frame = Frame(
            number, path, type(module).__name__, len(self.graph.nodes), names=names,
            slots=(tuple(slot for slot, _ in slots_of_call(came[0], came[1], names, Ref)), ()),
            inputs=[ref.value for ref in tensors_in(came, Ref)], arguments=came,
            grad=torch.is_grad_enabled(), recomputed=_is_recomputed(), level=len(self.frames),
            autocast=torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"),
        )  # fmt: skip
        self.graph.frames.append(frame)
        self.frames.append(number)
        self._ordinals.append(0)

    def _begin_body(self, args: Any, named: Any) -> None:
        frame = self.graph.frames[self.frames[-1]]
        frame.begin = len(self.graph.nodes)
        here = [(slot, self.value(tensor)) for slot, tensor in slots_of_call(args, named, frame.names)]
        frame.hooked = here != [*zip(frame.slots[0], frame.inputs, strict=True)]

    def _end_body(self, output: Any) -> None:
        self.graph.frames[self.frames[-1]].end = len(self.graph.nodes)
        self._note_output(output)

    def _note_output(self, output: Any) -> None:
        frame = self.graph.frames[self.frames[-1]]
        frame.slots = frame.slots[0], tuple(slot for slot, _ in slots_in(output))
        frame.outputs = [self.value(tensor) for tensor in tensors_in(output)]

    def end(self, path: str, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        """A call of a module ends."""
        frame = self.graph.frames[self.frames[-1]]
        if frame.begin < 0:  # of a script, whose forward is not watched
            frame.begin = frame.first
            self._end_body(output)
        frame.last = len(self.graph.nodes)
        frame.inside = len(self.graph.frames) - 1 - frame.number
        body = [*zip(frame.slots[1], frame.outputs, strict=True)]
        self._note_output(output)
        frame.hooked |= body != [*zip(frame.slots[1], frame.outputs, strict=True)]
        self.frames.pop()
        self._ordinals.pop()

    # ---- at the end ----

    def _note_kept(self, model: nn.Module, buffers: dict[str, Tensor]) -> None:
        """Note what the program keeps in modules: tensors in attributes, and buffers that are others now."""
        made = {id(t): number for t, number in self._known.values() if self.graph.values[number].node >= 0}
        for path, module in model.named_modules():
            for leaf, thing in vars(module).items():
                if leaf not in STATE:
                    kept = {
                        made[id(t)]: f"{path}.{leaf}".lstrip(".") for t in tensors_in(thing) if id(t) in made
                    }
                    self.graph.kept |= kept
        for name, buffer in model.named_buffers():
            if buffers.get(name) is not buffer and id(buffer) in made:
                self.graph.rebound[name] = made[id(buffer)]

    def _note_functions(self) -> None:
        """Note what a torch.autograd.Function of the program takes: its backward may need all of it."""
        makers: dict[Any, list[int]] = {}
        for tensor, number in self._known.values():
            makers.setdefault(tensor.grad_fn, []).append(number)
        for function in filter(_hides, makers):
            for before, _ in function.next_functions:
                leaf = getattr(before, "variable", None)
                known = None if leaf is None else self._known.get(id(leaf))
                for number in makers.get(before, []) if known is None else [known[1]]:
                    self.graph.taken_by_functions.add(number)

    def _error(self, error: Exception, model: nn.Module) -> CaptureError:
        path = self.graph.frames[self.frames[-1]].path if self.frames else ""
        kind = type(module_at(model, path)).__name__
        where = f'"{path}" ({kind})' if path else kind
        lines = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(PACKAGES)]
        at = f"{lines[-1].filename}:{lines[-1].lineno}: {lines[-1].line}" if lines else "PyTorch itself"
        if is_about_data(error):
            does = "does what depends on the values of a tensor, which cannot be recorded"
        elif isinstance(error, CaptureError):
            does = str(error)
        else:
            says = str(error).strip().splitlines()
            does = f"raises {type(error).__name__} on the sample: {says[0] if says else ''}"
        return CaptureError(f"{where} {does}, at {at}", final=getattr(error, "final", False))


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.function(func, args, kwargs or {})


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """PyTorch logs what an operator raises on shapes; this package raises it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def call(module: Any, inputs: Any) -> Any:
    """Call a module with what a batch has as inputs."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


# ---- what autograd knows ----


def _hides(function: Any) -> bool:
    """Whether a function of autograd has a backward that the recorded operators do not show."""
    if isinstance(function, BackwardCFunction):
        return True
    return function is not None and str(function.name()).endswith(SCRIPTED)


def _saved_result(graph: Graph, tensor: Tensor, number: int, made_by: Mapping[int, Any]) -> int:
    """Return the value that `tensor` (value `number`) is: the result of an operator where autograd saved it.

    Autograd keeps a result detached, and gives what it takes out the grad_fn of the result. No operator
    shows that. A program that is run again by its operators would lose the gradient through the result.
    A detached tensor that is written has another grad_fn, and is itself.

    Args:
        made_by: value -> the grad_fn that it was last seen with.

    Example: tanh makes 3, detach of 3 makes 4, and tanh_backward takes 4 with tanh's grad_fn -> 3.
    """
    found = number
    while tensor.grad_fn is not None and (node := graph.values[found].node) >= 0:
        if graph.nodes[node].op is not torch.ops.aten.detach.default:
            break
        found = int(graph.nodes[node].args[0].value)
        if made_by.get(found) is tensor.grad_fn:
            return found
    return number


# ---- where a program is ----


def _is_recomputed() -> bool:
    """Whether torch.utils.checkpoint runs this, and the innermost module has called it."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == CHECKPOINT:
            return True
        if code.co_name == "_call_impl" and code.co_filename == MODULE:
            return False
        frame = frame.f_back
    return False


def _line_now() -> str:
    """Where the program is: the innermost line outside PyTorch and outside this package."""
    frame = program_frame()
    if frame is None:
        return ""
    name, number = frame.f_code.co_filename, frame.f_lineno
    return f"{name}:{number}: {linecache.getline(name, number).strip()}"


def _python_states() -> Any:
    """Of the generators whose numbers decide what Python does."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), rest
