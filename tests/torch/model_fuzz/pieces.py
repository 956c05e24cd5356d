"""Modules and functions that random programs use by name, as `pieces.Gate(8)`: more than a statement says."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


class Gate(nn.Module):
    """Keyword arguments, some of which are None."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, other: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        y = self.layer(x) * scale
        if other is not None:
            y = y + other
        return x * torch.sigmoid(y) if mask is None else x * torch.sigmoid(y.masked_fill(~mask, 0.0))


class Pair(NamedTuple):
    """Two values."""

    first: Tensor
    second: Tensor


class Halves(nn.Module):
    """Two results, in a container."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(width, 2 * width), kind

    def forward(self, x: Tensor) -> Any:
        first, second = self.layer(x).chunk(2, -1)
        if self.kind == "dict":
            return {"first": first, "more": {"second": second, "none": None}}
        if self.kind == "list":
            return [first, [second, 3]]
        return Pair(first, second)


class Joined(nn.Module):
    """Takes any container of tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, given: Any) -> Tensor:
        if isinstance(given, dict):
            first, second = given["first"], given["more"]["second"]
        elif isinstance(given, list):
            first, (second, _) = given
        else:
            first, second = given
        return torch.tanh(self.layer(first)) * second


class Blend(nn.Module):
    """Is called with its tensors in other places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor | None, y: Tensor | None = None) -> Tensor:
        if x is None:
            assert y is not None
            return self.b(y)  # type: ignore[no-any-return]
        return self.a(x) if y is None else self.a(x) + self.b(y)  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Nested: one inside the other."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner: nn.Module = Residual(width, depth - 1) if depth else nn.Linear(width, width)
        self.gain = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.inner(self.norm(x)))


class Recurrent(nn.Module):
    """A cell in a loop over positions, dim 1."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.cell = kind, getattr(nn, f"{kind}Cell")(width, width)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], x.shape[2])
        both, found = (state, state), list[Tensor]()
        for place in range(x.shape[1]):
            if self.kind == "LSTM":
                both = self.cell(x[:, place], both)
                state = both[0]
            else:
                state = self.cell(x[:, place], state)
            found.append(state)
        return torch.stack(found, 1)


class Mixture(nn.Module):
    """Experts that all rows pass, weighted by the best two."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best, places = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, places, best / best.sum(-1, keepdim=True))
        return sum(branch(x) * weights[..., at, None] for at, branch in enumerate(self.branches))  # type: ignore[return-value]


class Bank(nn.Module):
    """Parameters in lists and dicts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gains = nn.ParameterList(nn.Parameter(torch.randn(width) * 0.5) for _ in range(2))
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(width) * 0.5)})
        self.layers = nn.ModuleDict({"a": nn.Linear(width, width), "b": nn.Linear(width, width)})

    def forward(self, x: Tensor, *names: str) -> Tensor:
        for gain in self.gains:
            x = x * gain
        for name in names or ("b", "a"):
            x = torch.tanh(self.layers[name](x))
        return x + self.named["shift"]


class Experts(nn.Module):
    """Stacked experts that a router gives rows: values decide what runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = StackedExperts(width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        weight, index = self.router(rows).softmax(-1).topk(2, -1)
        return x + self.experts(rows, index, weight).view_as(x)


class StackedExperts(nn.Module):
    """Experts as Hugging Face writes them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 6, width) * 0.3)
        self.down = nn.Parameter(torch.randn(4, width, 6) * 0.3)

    def forward(self, rows: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        output = torch.zeros_like(rows)
        for expert in range(self.num_experts):
            row, slot = torch.where(index == expert)
            inner = functional.gelu(functional.linear(rows[row], self.up[expert]))
            made = functional.linear(inner, self.down[expert]) * weight[row, slot, None]
            output = output.index_add(0, row, made)
        return output


class Scaled(torch.autograd.Function):
    """x times a factor; its gradient is clamped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (gradients[0] * ctx.factor).where(x.abs() < 2, 0.0), None


def scaled(x: Tensor, factor: float) -> Tensor:
    found: Tensor = Scaled.apply(x, factor)
    return found


def slope(layer: Any, x: Tensor) -> Tensor:
    """The gradient of a layer's sum, which is trained, too."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        (found,) = torch.autograd.grad(torch.tanh(layer(x)).sum(), x, create_graph=True)
    return found


def again(layer: Any, *given: Any) -> Any:
    """Computed once more in backward."""
    return checkpoint(layer, *given, use_reentrant=False)


def called(layer: nn.Module, x: Tensor, scale: Any) -> Any:
    """A layer with other parameters than its own."""
    return functional_call(layer, {name: value * scale for name, value in layer.named_parameters()}, (x,))


def normed(layer: nn.Module, kind: str) -> nn.Module:
    """A layer whose weight is computed of others."""
    return getattr(parametrizations, kind)(layer)  # type: ignore[no-any-return]


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", _Symmetric())


def hooked(layer: nn.Module, kind: str) -> nn.Module:
    """A layer with a hook on its forward."""
    if kind == "output":
        layer.register_forward_hook(lambda module, given, output: output * 0.5 + 0.1)
    elif kind == "input":
        layer.register_forward_pre_hook(lambda module, given: (torch.tanh(given[0]), *given[1:]))
    elif kind == "both":
        layer.register_forward_hook(lambda module, given, output: output + given[0])
    else:
        layer.register_forward_hook(
            lambda module, given, named, output: output.clone().mul_(0.7), with_kwargs=True
        )
    return layer


def rotated(x: Tensor, *, halves: bool) -> Tensor:
    """Rotary embeddings over the last two dims [positions, width]."""
    width = x.shape[-1] // 2
    turns = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10.0 ** torch.arange(width, dtype=x.dtype)
    if halves:
        cos, sin = (each.repeat(1, 2) for each in (turns.cos(), turns.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack(
        [even * turns.cos() - odd * turns.sin(), even * turns.sin() + odd * turns.cos()], -1
    ).flatten(-2)


def rotated_complex(x: Tensor) -> Tensor:
    """As `rotated`, by complex numbers."""
    width = x.shape[-1] // 2
    turns = torch.outer(torch.arange(x.shape[-2]).double(), 1 / 10.0 ** torch.arange(width).double())
    numbers = torch.view_as_complex(x.unflatten(-1, (width, 2)).contiguous())
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(turns), turns)).flatten(-2)
