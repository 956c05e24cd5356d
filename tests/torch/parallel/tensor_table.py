"""Programs on the tensor axis, many of which only look as if a cut were right. On two ranks."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono.parallel as up
from effort import swept
from parallel import models
from parallel.models import Pair
from parallel.rows import Row, variant

WIDTH, HEADS = models.WIDTH, models.HEADS
TENSOR, ZERO1, SEQUENCE = up.Plan(tensor=2), up.Plan(tensor=2, zero=1), up.Plan(tensor=2, sequence=True)
BOTH, DATA = (TENSOR, ZERO1), up.Plan(data=2)
TEXT = models.text_batches(4, 4)
PAIR = {"cuts": {"fc1": "column", "fc2": "row"}}
NAMES = ("fc1.weight", "fc1.bias", "fc2.weight")


def text_row(make: Any, *cut: str, trains: Any = (TENSOR,), cuts: Any = None, **more: Any) -> Row:
    return Row(make, trains, given=TEXT, loss=models.token_loss, cut=cut, options={"cuts": cuts}, **more)


def text(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(models.Embed(), *blocks, nn.Linear(WIDTH, models.VOCABULARY))


# ---- attention ----


class Attention(nn.Module):
    """Multi-head or multi-query attention; `fixed`: the number of heads is written, their width follows."""

    def __init__(self, *, fixed: bool = False, one_key: bool = False) -> None:
        super().__init__()
        keys = WIDTH // HEADS if one_key else WIDTH
        self.query, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, keys), nn.Linear(WIDTH, keys)
        self.shape = (HEADS, -1) if fixed else (-1, WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, self.shape).transpose(1, 2)
        shape = (1, -1) if self.key.out_features != WIDTH else self.shape
        k, v = (layer(x).unflatten(-1, shape).transpose(1, 2) for layer in (self.key, self.value))
        mixed = functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return x + self.out_proj(mixed.transpose(1, 2).flatten(2))


class Thrice(nn.Module):
    """One block, three times."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(self.block(x)))


def fixed() -> nn.Module:
    return text(Attention(fixed=True), models.Block())


def one_key() -> nn.Module:
    return text(Attention(one_key=True))


def thrice(block: nn.Module) -> nn.Module:
    return text(block, block, block)


def around() -> nn.Module:
    layer = nn.Linear(16, 16)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), layer)


def halved_heads(run: up.Run) -> Any:
    return run.cut.sizes["1"]


def query_is_cut(run: up.Run) -> bool:
    return any("query" in name for name in run.cut.dims)


def keys_come_out_whole(run: up.Run) -> bool:
    moved = {path for path, moves in run.cut.moves.items() if any(comes_out for comes_out, _ in moves)}
    return moved >= {"1.key", "1.value"}


HEADS_BY_HAND = {
    **{f"1.{name}": "column" for name in ("query", "key", "value")}, "1.out_proj": "row", "2.fc1": "column",
    "2.fc2": "row",
}  # fmt: skip
ONE_KEY_BY_HAND = {"1.query": "column", "1.out_proj": "row", "1.key": "whole", "1.value": "whole"}
ATTENTION = {
    "heads by hand": text_row(
        fixed, "1.query.weight", "2.fc2.weight", cuts=HEADS_BY_HAND, holds=halved_heads
    ),
    "a written number of heads": text_row(
        fixed, "1.query.weight", "1.out_proj.weight", "2.fc1.weight", holds=halved_heads
    ),
    "heads that stay whole": text_row(
        fixed, "2.fc1.weight", cuts={"1.*": "whole"}, holds=lambda run: "1.query.weight" not in run.cut.dims
    ),
    "heads by their width": text_row(lambda: text(Attention(), models.Block()), "1.query.weight"),
    "a block in a block, three times": text_row(lambda: text(Thrice(models.Block())), holds=query_is_cut),
    "written heads, three times": text_row(
        lambda: text(Thrice(Attention(fixed=True))), holds=query_is_cut
    ),
    "one entry, three times": text_row(lambda: thrice(models.Block()), holds=query_is_cut),
    "one entry of written heads": text_row(lambda: thrice(Attention(fixed=True)), holds=query_is_cut),
    "one key": text_row(one_key, "1.query.weight", holds=keys_come_out_whole),
    "one key by hand": text_row(
        one_key, "1.query.weight", cuts=ONE_KEY_BY_HAND, holds=keys_come_out_whole
    ),
}  # fmt: skip


# ---- two layers, and something between them ----


class Tempered(Pair):
    """With a parameter of no dimension that each rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.temp = nn.Parameter(torch.tensor([0.7]))


def between(name: str, function: Callable[[Any, Tensor], Tensor], init: Any = None) -> Any:
    return variant(name, Tempered, init, between=lambda model, x: torch.tanh(function(model, x)))


def view(model: Any, x: Tensor) -> Tensor:
    """The gradient of `temp` comes back through a write into a view."""
    s = torch.ones(2)
    s[0] = model.temp[0]
    return x * s[0] + s[1:]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5]))

    def forward(self, h: Tensor) -> dict[str, Tensor]:
        return {"scale": self.w.exp()}


class Shifted(nn.Linear):
    """A linear layer that adds more than its bias."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) + self.shift


class Plus(nn.Linear):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:  # type: ignore[override]
        return functional.linear(x, self.weight) + r


def hooked(model: Any) -> None:
    """Hooks that use a whole parameter: after a layer cut by column, and before one cut by row."""
    model.fc1.register_forward_hook(lambda _m, _a, out: out * model.temp)
    model.fc2.register_forward_pre_hook(lambda _m, args: (args[0] + model.temp,))
    model.fc2.register_forward_hook(lambda _m, _a, out: out + model.temp)


class HookedFused(nn.Module):
    """A fused layer whose hook would be lost if it became several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 96), nn.Linear(32, 4)
        self.qkv.register_forward_hook(lambda _m, _a, out: out * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.tanh(q) * k + v)


def rebound(model: Any, x: Tensor) -> Tensor:
    """A buffer that is another tensor after each step, and one that is written through a view."""
    with torch.no_grad():
        model.mean = 0.9 * model.mean + 0.1 * x.mean(0)
        model.last[0].copy_(x.detach().sum(0))
    return x + model.mean + model.last[0] * 0.01


def with_buffers(model: Any) -> None:
    model.register_buffer("mean", torch.zeros(32))
    model.register_buffer("last", torch.zeros(2, 32))


def own_forward(model: Any) -> None:
    layer = model.fc2
    layer.forward = lambda x: functional.linear(x, layer.weight, layer.bias) + layer.bias


def listed(model: Any) -> None:
    model.gain = nn.Parameter(torch.full((32,), 0.5))
    model.gains = [model.gain]


class Straight(torch.autograd.Function):
    """A gradient that its forward does not tell."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad / (1.0 + grad.norm())


class Beside(nn.Module):
    """One layer makes what is cut and what is used whole."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(16, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        whole, part = self.both(x).chunk(2, -1)
        return torch.tanh(self.out(part)) * whole


class SharedBetween(nn.Module):
    """One module takes what is whole, and what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(16, 4), nn.Tanh()
        self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.layer_norm(self.first(x), (4,))
        return h + self.down(self.act(self.up(self.act(h))))


class Again(nn.Module):
    """Recomputes a part of its own forward, with heads of a written number."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)
        self.gain = nn.Parameter(torch.ones(32))
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        h = self.fc1(x).view(len(x), 4, -1)
        return self.fc2((h * h.norm(dim=-1, keepdim=True)).flatten(1) * self.gain)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.ones((), requires_grad=True)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


def by_data(model: Any, x: Tensor) -> Tensor:
    return x + 1 if x.abs().sum() > 0 else x


def locked() -> nn.Module:
    model = models.gpt()
    model.lock = threading.Lock()
    return model


SOFTMAX = variant("Softmax", Pair, between=lambda _, x: x.softmax(-1))
TIMES_TEMP = between("Scaled", lambda model, x: x * model.temp)
LISTED = between("ListOfParameters", lambda model, x: x * model.gains[0], listed)
BY_DATA = variant("Data", Pair, between=by_data)
SOFTMAX_BY_COLUMN = r'"fc1" \(Linear\) cannot be cut by column: aten\._softmax needs all of it, at .*x\.softm'
BETWEEN = {
    "softmax by hand": Row(SOFTMAX, refused={SOFTMAX_BY_COLUMN: [TENSOR]}, options=PAIR),
    "softmax": Row(SOFTMAX, [TENSOR], holds=lambda run: run.cut.modules["fc1"] == "column, gathered"),
    "a whole parameter by hand": Row(
        TIMES_TEMP, [TENSOR], cut=NAMES, options=PAIR, holds=lambda run: run.cut.sums == ["temp"]
    ),
    "a whole parameter": Row(TIMES_TEMP, [TENSOR]),
    "nothing": Row(Pair, [TENSOR], cut=NAMES, options=PAIR),
    "a size becomes a number": Row(
        between("BySize", lambda _, x: x / torch.tensor(float(x.shape[-1])).sqrt()), BOTH
    ),
    "a size fills a tensor": Row(
        between("FilledBySize", lambda _, x: x / torch.full((1,), float(x.shape[-1])).sqrt()), BOTH
    ),
    "a write into a view": Row(between("ThroughView", view), BOTH),
    "a whole value in a dict": Row(
        between(
            "FromDict", lambda m, x: x * m.scale(x)["scale"], lambda m: setattr(m, "scale", Scale())
        ),
        BOTH,
    ),
    "a row that adds more": Row(variant("ShiftedRow", Pair, lambda m: setattr(m, "fc2", Shifted())), BOTH),
    "a row that adds an argument": Row(
        variant(
            "PlusRow", Pair, lambda m: setattr(m, "fc2", Plus(32, 4)),
            forward=lambda m, x: m.fc2(torch.tanh(m.fc1(x)), x[:, :4]),
        ),
        BOTH,
    ),
    "hooks with a whole parameter": Row(between("Hooked", lambda _, x: x, hooked), BOTH),
    "a hook of a fused layer": Row(HookedFused, BOTH),
    "buffers that are replaced": Row(between("Rebound", rebound, with_buffers), BOTH),
    "a forward of its own": Row(variant("OwnForward", Pair, own_forward), BOTH),
    "a backward of its own, and a sum": Row(between("Taken", lambda _, x: Straight.apply(x) + x), BOTH),
    "a backward of its own": Row(
        variant("Own", Pair, between=lambda _, x: Straight.apply(x)), [TENSOR],
        holds=lambda run: run.cut.modules.get("fc2") != "row",
    ),
    "a list of parameters": Row(LISTED, [TENSOR], {"also in the attribute": [ZERO1]}),
    "a gradient of none": Row(between("Detached", lambda model, x: x * model.temp.detach()), BOTH),
    "whole beside cut": Row(Beside, [TENSOR]),
    "a module for whole and cut": Row(SharedBetween, [TENSOR]),
    "recomputes itself": Row(lambda: Again(reentrant=False), [TENSOR]),
    "recomputes itself, reentrant": Row(lambda: Again(reentrant=True), [TENSOR]),
    "a first layer that is the last": Row(around, [TENSOR]),
    "a first layer that is the last, by hand": Row(
        around, refused={'"0" .Linear. cannot be cut by column: the model returns it': [TENSOR]},
        options={"cuts": {"0": "column", "2": "row"}},
    ),
    "what depends on data": Row(
        BY_DATA, [up.Plan(data=2, zero=1)],
        {r"Data does what depends on the values of a tensor, .* at .*_table\.py:\d+: return x": [TENSOR]},
    ),
}  # fmt: skip
GIVEN = {
    "given cuts": text_row(
        models.gpt, trains=swept([SEQUENCE], BOTH), cuts={"*.fc1": "column", "*.fc2": "row"}, gradients=True,
        sample=None,  # the first layer tells inputs
        holds=lambda run: run.cut.modules and all(p.endswith((".fc1", ".fc2")) for p in run.cut.modules),
    ),
}  # fmt: skip
NO_COPY = {r"Sequential cannot be copied .* cannot be recorded": [TENSOR]}
LOCKED = {
    f"a lock, {name}": Row(
        locked, (), NO_COPY, TEXT, models.token_loss, sample=sample, options={"cuts": cuts}
    )
    for name, sample, cuts in (
        ("by hand", None, {"*.fc1": "column", "*.fc2": "row"}),
        ("recorded", TEXT[0][0], None),
    )
}
TABLE = ATTENTION | BETWEEN | GIVEN | LOCKED
