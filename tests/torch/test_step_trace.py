"""The readings of one step are of the same operators; a pause of one ends with what raised in it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inside_parallel import MemoryTracker, Recorder, Shapes, StorageWatch, TimedStep, TracedStep, point_of
from unisono.torch_internals.fake import OperatorMode

X = torch.ones(3, 4)


class Plain(OperatorMode):
    """Notes the operators of a step with values, and the storages that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.sizes, self.made = [], [], {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.names.append(str(func.overloadpacket))
        self.sizes.append(point_of(func, args, kwargs or {}, output))
        self.made[output.untyped_storage().data_ptr()] = output
        return output


def test_graph_seconds_and_bytes_are_of_the_operators_that_a_real_forward_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)))
    with Plain() as real:
        model(X)
    for value in model.parameters():  # of which there are views
        real.made.pop(value.data_ptr(), None)
    shapes = Shapes(model)
    graph = Recorder(shapes).run(shapes.model, X)
    found, watch = TracedStep(shapes.model), StorageWatch("cpu", {})
    timed, watch.account, watch.phase = TimedStep(found, ["1"]), MemoryTracker(None, watch.place), "forward"
    named, given = [*shapes.model.named_modules()], shapes.inputs(X)
    for value in [*shapes.model.parameters(), given]:
        watch.see(value, counts=False)
    with timed.follow(named), watch.follow(named), shapes.mode, watch, timed:  # both see one run
        shapes.model(given)
    assert [node.name for node in graph.nodes] == real.names
    assert [each.size for each in found.operators] == real.sizes
    assert [each.unit for each in found.operators] == ["", "", "1", "1", "1", "1"]
    assert [call.path for call in found.calls] == [frame.path for frame in graph.frames]
    assert watch.account.peak.nbytes == sum(each.untyped_storage().nbytes() for each in real.made.values())
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
    assert "aten.bmm" in [node.name for node in graph.nodes]
    assert graph.values[graph.outputs[0]].kind == "operator"
