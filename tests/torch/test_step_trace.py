"""The readings of one step are of the same operators; a pause of one ends with what raised in it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inside_parallel import (
    MemoryTracker,
    Recorder,
    Shapes,
    StorageWatch,
    TimedStep,
    TracedStep,
    kernel_memory,
    point_of,
)
from unisono.torch_internals.fake import OperatorMode

X = torch.ones(3, 4)


class Plain(OperatorMode):
    """Notes the operators of a step with values, and the bytes of all storages that they make."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.sizes: list[Any] = []
        self.held = {each.untyped_storage().data_ptr(): each for each in known}
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.ops.append(str(func.overloadpacket))
        self.sizes.append(point_of(func, args, kwargs or {}, output))
        storage = output.untyped_storage()
        if storage.data_ptr() not in self.held:
            self.held[storage.data_ptr()] = output
            self.nbytes += storage.nbytes()
        return output


def test_graph_seconds_and_bytes_are_of_the_operators_that_a_real_forward_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)))
    with Plain([*model.parameters(), X]) as real:
        model(X)

    shapes = Shapes(model)
    graph = Recorder(shapes).run(shapes.model, X)
    assert [node.name for node in graph.nodes] == real.ops

    found = TracedStep(shapes.model)
    timed = TimedStep(found, units=["1"])
    watch = StorageWatch("cpu", kernel_memory(on_gpu=False, virtual=False))
    watch.account = MemoryTracker(None, watch.place)
    named = [*shapes.model.named_modules()]
    handles = [*timed.follow(named), *watch.follow(named)]
    given = shapes.inputs(X)
    with shapes.mode, watch, timed:  # both see one run
        for value in [*shapes.model.parameters(), given]:
            watch.see(value, counts=False)
        watch.phase = "forward"
        output = shapes.model(given).sum()
    for handle in handles:
        handle.remove()
    del output
    assert [each.size for each in found.operators][:-1] == real.sizes
    assert [each.unit for each in found.operators] == ["", "", "1", "1", "1", "1", ""]
    assert [call.path for call in found.calls] == [frame.path for frame in graph.frames]
    assert watch.account.peak.nbytes == real.nbytes
    assert watch.account.peak.place.module == "1.1"


class Falls(nn.Module):
    """Computes another way where attention raises."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = functional.scaled_dot_product_attention(x, x[..., :2], x)
        except RuntimeError:
            y = x
        return y @ y.transpose(-1, -2)


def test_a_program_is_recorded_after_an_attention_that_raised() -> None:
    shapes = Shapes(Falls())
    graph = Recorder(shapes, attention=True).run(shapes.model, torch.ones(1, 2, 3, 4))
    names = [node.name for node in graph.nodes]
    assert "aten.bmm" in names, names
    assert graph.values[graph.outputs[0]].kind == "operator"
