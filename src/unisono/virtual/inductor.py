"""torch.compile's default backend: Inductor compiles graphs of virtual GPUs for the CPU.

Dynamo and autograd trace a program as on a GPU. Of each graph that they hand to Inductor, this module
compiles a copy whose devices are the CPU, and runs it on the memory of the GPU's tensors. A graph that the
CPU cannot have runs uncompiled, as with the backend "aot_eager", and one line on stderr gives the reason.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from unisono.torch_internals import inductor

from .environment import PAGE
from .graphs import as_one_step
from .kernels import on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = torch.float16
aten: Any = torch.ops.aten
OPERATOR = type(aten.mm.default)
PRODUCTS = {
    getattr(aten, name).default
    for name in ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")
}
"""Slow in float16 on a CPU: they run in float32 and are rounded once, as on a GPU."""

LOG = logging.getLogger(__name__)
_RUNNING = threading.local()
_NOTHING = contextlib.nullcontext()
_NOTICED: set[str] = set()


def install(module: ModuleType) -> None:
    """Compile for the CPU from now on. `module`: torch._inductor.compile_fx."""
    inductor.compile_through(module, _for_virtual_gpus)


def runs_compiled() -> bool:
    """Whether this thread is in a compiled graph, which sees memory of GPUs as the CPU's."""
    return getattr(_RUNNING, "depth", 0) > 0


def _for_virtual_gpus(compile_one: Callable[..., Any]) -> Callable[..., Any]:
    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], *rest: Any, **settings: Any) -> Any:
        if not _uses_gpus(graph, inputs):
            return compile_one(graph, inputs, *rest, **settings)
        if inductor.compiles_ahead():
            raise NotImplementedError(
                f"AOTInductor compiles nothing for a virtual GPU: use CPU tensors. {PAGE}"
            )
        if settings.get("cudagraphs") is not None:
            settings["cudagraphs"].value = False  # the results are the same
        devices = [_index(x) for x in _outputs(graph)]
        try:
            moved, on_cpu = _moved(graph, inputs)
            compiled = compile_one(moved, on_cpu, *rest, **settings)
        except Exception as error:  # what Inductor cannot do, PyTorch can without it
            LOG.debug("a graph runs uncompiled", exc_info=True)
            _notice(error)
            return _boxed(graph)
        return _on_host(compiled, devices, _operations(moved))

    return compile_graph


def _on_host(compiled: Callable[..., Any], devices: list[int], operations: list[Any]) -> Callable[..., Any]:
    """Make a compiled graph take and return tensors of virtual GPUs.

    Args:
        devices: of the results, by index; -1: the CPU, or no tensor.
        operations: those of the graph.
    """
    draws = any(torch.Tag.nondeterministic_seeded in op.tags for op in operations)
    communicates = any(op.namespace == "_c10d_functional" for op in operations)

    def run_on_host(*inputs: Any) -> list[Any]:
        with _cpu_draws_as_gpu(inputs) if draws else _NOTHING:
            return on_host(call, inputs, devices.__getitem__)

    def call(words: list[Any]) -> list[Any]:
        _RUNNING.depth = getattr(_RUNNING, "depth", 0) + 1
        try:
            made = list(compiled(words))
        finally:
            _RUNNING.depth -= 1
        if communicates:  # a wait finds the call by memory that the CPU's tensor has
            made = [
                torch.ops._c10d_functional.wait_tensor(x) if isinstance(x, torch.Tensor) else x for x in made
            ]
        return made

    return _boxed(lambda *inputs: as_one_step(run_on_host, inputs, {}))


@contextlib.contextmanager
def _cpu_draws_as_gpu(inputs: Sequence[Any]) -> Iterator[None]:
    """Seed the CPU's random numbers from those of a graph's first GPU, for the time of the graph."""
    device = next((x.device for x in inputs if _index(x) >= 0), CUDA)
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(int(torch.randint(2**62, (), device=device)))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _moved(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """Return a copy of a graph with all devices the CPU, and inputs for it.

    Raises:
        NotImplementedError: the CPU does not have an operation.
    """
    mode = next((x.fake_mode for x in _values(graph, inputs) if hasattr(x, "fake_mode")), None)
    if mode is None:
        raise NotImplementedError("its inputs have values, not only shapes")
    with mode:
        on_cpu = [_like(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    moved = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    moved.meta.update(graph.meta)
    for node in moved.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _place)
        if node.op == "get_attr":
            _move_attribute(moved, node)
        elif node.target in PRODUCTS:
            _widen(moved.graph, node)
    missing = inductor.without_cpu_kernel(_operations(moved))
    missing += [f"{name} with gradients" for name in ("flex_attention",) if _has_gradients(moved, name)]
    if missing:
        raise NotImplementedError(f"the CPU does not have {', '.join(missing)}")
    moved.recompile()
    inductor.propagate(moved, mode, on_cpu)
    return moved, on_cpu


def _like(x: torch.Tensor) -> torch.Tensor:
    """Return an input of the same shape on the CPU; without values."""
    if not x.is_cuda:
        return x
    if x.storage_offset() == 0:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=CPU)
    whole = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device=CPU)
    return whole.as_strided(x.size(), x.stride(), x.storage_offset())


def _place(word: Any) -> Any:
    return CPU if isinstance(word, torch.device) and word.type == "cuda" else word


def _move_attribute(moved: fx.GraphModule, node: fx.Node) -> None:
    """Move a constant or a graph within the graph."""
    name = str(node.target)
    found = getattr(moved, name)
    if isinstance(found, torch.Tensor) and found.is_cuda:
        setattr(moved, name, torch.ops.unisono_virtual.host(found))
    elif isinstance(found, fx.GraphModule):
        inputs = [each.meta["val"] for each in found.graph.nodes if each.op == "placeholder"]
        setattr(moved, name, _moved(found, inputs)[0])


def _widen(graph: fx.Graph, node: fx.Node) -> None:
    """Multiply in float32 what is float16, and round the results."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    if all(x is None or x.dtype != HALF for x in values):
        return
    cast = torch.ops.prims.convert_element_type.default

    def widened(word: Any) -> Any:
        half = isinstance(word, fx.Node) and word.meta["val"].dtype == HALF
        return graph.call_function(cast, (word, torch.float32)) if half else word

    with graph.inserting_before(node):
        node.args = fx.node.map_aggregate(node.args, widened)
    for result in [user for user in node.users if user.target is operator.getitem] or [node]:
        with graph.inserting_after(result):
            rounded = graph.call_function(cast, (result, HALF))
        result.replace_all_uses_with(rounded)
        rounded.args = (result, HALF)


def _operations(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if isinstance(node.target, OPERATOR)]


def _has_gradients(graph: fx.GraphModule, name: str) -> bool:
    """Whether a graph is a step's forward or backward with this operator; that forward has two results."""
    found = {str(node.target): node for node in graph.graph.nodes if node.op == "call_function"}
    forward = found.get(name)
    return f"{name}_backward" in found or (forward is not None and len(forward.users) > 1)


def _outputs(graph: fx.GraphModule) -> list[Any]:
    (last,) = graph.graph.find_nodes(op="output")
    return [each.meta.get("val") if isinstance(each, fx.Node) else None for each in last.args[0]]


def _index(value: Any) -> int:
    return value.device.index if isinstance(value, torch.Tensor) and value.is_cuda else -1


def _uses_gpus(graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    return any(_index(x) >= 0 for x in _values(graph, inputs))


def _values(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    return [*inputs, *(node.meta.get("val") for node in graph.graph.nodes)]


def _boxed(call: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Take inputs as a list, which is empty when `call` runs: nobody else keeps their memory."""

    def run(inputs: list[Any]) -> Any:
        given = tuple(inputs)
        inputs.clear()
        return call(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _notice(error: Exception) -> None:
    """Say once for each reason that a graph runs uncompiled."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if reason not in _NOTICED:
        _NOTICED.add(reason)
        text = f"unisono: torch.compile on virtual GPUs: a graph runs uncompiled (aot_eager): {reason}"
        print(text[:400], file=sys.stderr)
