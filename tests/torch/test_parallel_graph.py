"""What is recorded of a model, and the cut that follows from it. The fast part of the zoo, on two ranks."""

import dataclasses
import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import suite
import unisono.parallel as up
from effort import swept
from inside_parallel import Shapes
from inside_parallel import prove_cut as prove
from loops import each
from zoo.cells import Cell
from zoo.own import Encoder, Lstm, Mixer, MultiQuery, Nano, Scan, UNet

MATRIX = torch.ones(8, 8)
IDS = torch.zeros(4, 8, dtype=torch.long)


def test_a_linear_layer_is_recorded_with_its_cost_and_uses() -> None:
    layer = nn.Linear(4, 2)
    graph = up.capture(layer, torch.ones(3, 4))
    assert graph.flops == 2 * 3 * 4 * 2
    assert [node.name for node in graph.nodes] == ["aten.t", "aten.addmm"]
    assert [use.node for use in graph.uses("weight")] == [0]
    assert [use.node for use in graph.uses("bias")] == [1]
    assert graph.values[graph.outputs[0]].shape == (3, 2)
    assert "test_parallel_graph.py" in graph.nodes[0].line


def test_a_module_that_runs_twice_is_one_line_of_the_table() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    lines = str(up.capture(nn.Sequential(block, block), torch.ones(2, 4))).splitlines()
    (row,) = (line for line in lines if line.startswith("0.0"))
    assert row.split()[:4] == ["0.0", "Linear", "2", "4"]


def test_a_copy_without_values_does_not_keep_a_parameter_that_is_replaced() -> None:
    model = nn.Linear(4, 4)
    shapes, kept = Shapes(model), weakref.ref(model.weight)
    assert shapes.original(model.weight) == "weight"
    model.weight = nn.Parameter(torch.ones(4, 4))
    gc.collect()
    assert kept() is None
    assert shapes.original(model.weight) is None


class Groups(nn.Module):
    """Multiplies groups of what it takes by a parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor, ends: Tensor | None) -> Tensor:
        return functional.grouped_mm(x, self.weight, offs=ends)


@each(
    ("rows", "weight", "ends"),
    [
        ((8, 16), (2, 16, 24), [4, 8]),
        ((8, 16), (16, 24), [8, 16]),
        ((2, 8, 16), (16, 24), [8, 24]),
        ((2, 8, 16), (2, 16, 24), None),
    ],
)
def test_a_product_of_groups_is_recorded_with_the_shape_of_a_run(
    rows: tuple[int, ...], weight: tuple[int, ...], ends: list[int] | None
) -> None:
    """PyTorch 2.12 and 2.13 tell the shape in bf16 only."""
    for dtype in (torch.float32, torch.bfloat16):
        model = Groups(*weight).to(dtype)
        given = torch.ones(rows, dtype=dtype), None if ends is None else torch.tensor(ends, dtype=torch.int32)
        graph, run = up.capture(model, given), model(*given)
        recorded = graph.values[graph.outputs[0]]
        assert (recorded.shape, recorded.dtype) == (run.shape, dtype)


@dataclass
class Given:
    x: Tensor
    scale: float


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), []

    def forward(self, given: Given, more: dict[str, Tensor]) -> dict[str, Any]:
        self.calls.append(1)
        hidden = self.layer(given.x) * given.scale
        for _ in range(3):
            hidden = hidden + more["y"] if hidden.shape[0] > 1 else hidden
        return {"hidden": hidden, "pair": (hidden, hidden.sum())}


def test_containers_and_python_run_and_the_model_stays_as_it_is() -> None:
    model = Containers()
    graph = up.capture(model, (Given(torch.ones(2, 4), 0.5), {"y": torch.ones(4)}))
    assert [node.name for node in graph.nodes].count("aten.add") == 3
    assert len(graph.outputs) == 3
    assert model.calls == []
    assert model.layer.weight.grad is None
    assert type(model.layer.weight) is nn.Parameter


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Nano()
    assert up.capture(model, IDS).flops == up.capture(Nano(), IDS).flops


class ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[x > 0].view(-1, 4))


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3)


@each(
    ("model", "says"),
    [
        (
            ReadsValues(),
            r"ReadsValues does what depends on the values .*_graph.py:\d+: return self.layer\(x\[x",
        ),
        (
            Raises(),
            r"Raises raises RuntimeError on the sample: .*_graph.py:\d+: return x @ torch.ones\(3, 3\)",
        ),
    ],
)
def test_what_cannot_be_recorded_names_the_line(model: nn.Module, says: str) -> None:
    with pytest.raises(up.CaptureError, match=says):
        up.capture(model, torch.ones(2, 4))


@dataclasses.dataclass
class Guarded:
    """A configuration that must not be asked for one width, such as one whose layers differ."""

    width: int = 4

    def __getattribute__(self, name: str) -> object:
        if name == "width":
            raise LookupError("ask a layer")
        return object.__getattribute__(self, name)


def test_a_configuration_is_not_asked_for_its_fields() -> None:
    model = nn.Linear(4, 4)
    model.config = Guarded()  # type: ignore[assignment]
    assert up.capture(model, torch.ones(2, 4)).nodes


def test_a_wrong_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="model is a int, expected an nn.Module"):
        up.capture(3, torch.ones(2))


# ---- cuts ----


@each(
    ("make", "sample", "share", "cut"),
    [
        (Nano, IDS, 0.95, {"h.0.attn.c_attn.q.weight": 0, "h.0.attn.c_proj.weight": 1, "wte.weight": 0}),
        (MultiQuery, IDS, 0.85, {"q.weight": 0, "scale": 0, "o.weight": 1}),
        (Encoder, IDS, 0.95, {"body.layers.0.self_attn.q.weight": 0, "body.layers.1.linear2.weight": 1}),
        (Mixer, IDS, 0.9, {"tokens.0.weight": 0, "tokens.2.weight": 1}),
        (UNet, torch.ones(2, 3, 8, 8), 0.9, {"down2.weight": 0, "mid1.weight": 1}),
        (Lstm, IDS, 0.1, {}),
    ],
)
def test_what_is_cut(make: Any, sample: Tensor, share: float, cut: dict[str, int]) -> None:
    found = prove(make(), sample, 2)
    assert found.parameters[0] >= share * found.parameters[1], str(found)
    assert cut.items() <= found.dims.items(), str(found)


def test_gradients_that_are_sums() -> None:
    found = prove(MultiQuery(), IDS, 2)
    assert set(found.sums) == {"q_norm.weight", "q_norm.bias"}
    entered = {path for path, moves in found.moves.items() if (True, ()) in moves}
    assert entered == {"k_norm", "v"}


class Chain(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Any, width: int = 8) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, width), nn.Linear(width, 4), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


def written_through_a_view(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1, 2, 4)[:, 1].copy_(x.view(-1, 2, 4)[:, 0])
    return x


def writes_nothing(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 8:] *= 0.5
    return x + x[:, 8:].sum() + (x[:1, :0] * x[:1, :0]).sum()


def by_its_size(x: Tensor) -> Tensor:
    return x / x.shape[-1]


def by_its_shape(x: Tensor) -> Tensor:
    return torch.relu(x) if x.shape[-1] == 8 else torch.tanh(x)


@each(
    ("between", "pair"),
    [
        (torch.tanh, True),
        (lambda x: functional.gelu(x) * 2.0 + 1.0, True),
        (lambda x: x.view(-1, 2, 4).transpose(1, 2).transpose(1, 2).reshape(-1, 8), True),
        (lambda x: x.relu_(), True),
        (lambda x: torch.cat([x, x], 0)[: len(x)], True),
        (lambda x: x.softmax(-1), False),
        (lambda x: x - x.mean(-1, keepdim=True), False),
        (lambda x: x.cumsum(-1), False),
        (lambda x: x.flip(-1), False),
        (lambda x: x.roll(1, -1), False),
        (lambda x: x.view(-1, 4, 2).transpose(1, 2).reshape(-1, 8), False),
        (lambda x: x * torch.arange(8.0), False),
        (lambda x: x @ MATRIX, False),
        (lambda x: x @ torch.ones(8, 8), True),  # ones of another size are ones
        (lambda x: x + x.sort(-1)[0], False),
        (lambda x: functional.normalize(x, dim=-1), False),
        (lambda x: functional.layer_norm(x, (8,)), False),
        (writes_nothing, False),
        (by_its_size, False),
        (by_its_shape, False),
        (written_through_a_view, False),
    ],
)
def test_a_pair_is_cut_where_nothing_between_mixes_features(between: Any, pair: bool) -> None:
    found = prove(Chain(between), torch.ones(3, 4), 2)
    assert (found.modules.get("second") == "row") == pair, str(found)


class Outer(nn.Module):
    """A product of the features with themselves: [b, n, n]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.third(torch.tanh(self.second(h[:, :, None] * h[:, None, :]).transpose(1, 2)))


class JoinedKeys(nn.Module):
    """Grouped heads, whose keys are two tensors side by side; the second goes elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k1, self.k2 = nn.Linear(8, 24), nn.Linear(8, 4), nn.Linear(8, 4)
        self.out, self.other = nn.Linear(24, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k1, k2 = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k1, self.k2))
        k = torch.cat([k1, k2], 1)
        y = functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)) + self.other(k2.transpose(1, 2).flatten(2))


@each(
    ("make", "sample", "row"),
    [(Outer, torch.ones(3, 4), "second"), (JoinedKeys, torch.ones(3, 5, 8), "other")],
)
def test_a_part_that_is_no_part_of_the_value_is_not_cut(make: Any, sample: Tensor, row: str) -> None:
    found = prove(make(), sample, 2)
    assert found.modules.get(row) != "row", str(found)
    assert "row" not in found.modules.values(), str(found)


class WrittenBefore(nn.Module):
    """A layer takes what was written through another view: the gradient of the scale comes from there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(4, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y.transpose(0, 1).mul_(self.scale[:, None])
        return self.second(torch.tanh(self.first(y)))


class ReturnedHeads(nn.Module):
    """A layer that could be gathered takes heads, which go into a layer that sums, and are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.heads = nn.Linear(8, 8), nn.Linear(8, 16)
        self.sums, self.each = nn.Linear(16, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.heads(self.first(x)).unflatten(-1, (-1, 4)).transpose(1, 2)
        return self.sums(torch.tanh(heads).transpose(1, 2).flatten(2)), self.each(heads)


class TurnedHeads(nn.Module):
    """A layer that could be gathered takes features as rows; its output is multiplied, or summed."""

    def __init__(self, *, total: bool) -> None:
        super().__init__()
        self.first, self.heads = nn.Linear(8, 8), nn.Linear(8, 16)
        self.sums, self.each, self.total = nn.Linear(16, 8), nn.Linear(6, 6), total

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = torch.tanh(self.heads(self.first(x)))
        turned = self.each(heads.t()).t()
        return self.sums(heads if self.total else heads * turned), turned.sum()


@each(
    ("make", "sample"),
    [
        (ReturnedHeads, torch.ones(3, 5, 8)),
        (lambda: TurnedHeads(total=False), torch.ones(6, 8)),
        (lambda: TurnedHeads(total=True), torch.ones(6, 8)),
    ],
)
def test_what_a_gathered_layer_leaves_cut_is_no_whole_value(make: Any, sample: Tensor) -> None:
    found = prove(make(), sample, 2)
    assert found.modules.get("heads") != "column", str(found)


def test_a_gradient_through_a_written_view_is_summed() -> None:
    found = prove(WrittenBefore(), torch.ones(3, 4), 2)
    assert found.modules == {"first": "column", "second": "row"}, str(found)
    assert found.sums == ["scale"], str(found)


def test_what_the_ranks_do_not_divide_is_whole() -> None:
    assert "first.weight" not in prove(Chain(torch.tanh, width=9), torch.ones(3, 4), 2).dims
    assert "2 does not divide 9" in str(prove(Chain(torch.tanh, width=9), torch.ones(3, 4), 2))


def test_a_layer_that_was_split_and_is_one_again_may_have_parts_that_are_banned() -> None:
    found = prove(Scan(), IDS, 2)
    assert "into" not in found.fused, str(found)


@each(
    ("ranks", "names", "plans"),
    swept(
        [
            (2, "multi-query,two-losses,scan", "tensor,context"),
            (2, "dlrm,mixer", "tensor"),
            (4, "nano,encoder", "tensor pipeline"),
        ],
        [(2, "nano", "tensor,context"), (2, "lstm", "zero=3"), (4, "multi-query", "tensor zero=3")],
    ),
)
def test_the_fast_part_of_the_zoo(
    forks: suite.Forks, tmp_path: Path, ranks: int, names: str, plans: str
) -> None:
    job = f"{ranks} {names}"
    (printed, *_) = forks.run(tmp_path, {job: ("zoo.census", ranks, [names, plans])})[job]
    cells = [cell for line in printed.splitlines() if (cell := Cell.of(line)) is not None]
    assert [(cell.animal, cell.plan, cell.word) for cell in cells] == [
        (name, plan, "same") for name in names.split(",") for plan in plans.split(",")
    ], printed
