"""Programs that run otherwise than they were recorded on such inputs: each trains alike, or is refused.

A model asks whether it is recorded (`real` is false), which stands for whatever it may depend on.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional

import unisono.parallel as up
from parallel.model_table import DATA, PIPELINE, TENSOR
from parallel.models import Pair
from parallel.models import token_loss as of_positions
from parallel.rows import Row, variant

CONTEXT = up.Plan(context=2)
Call = Callable[["Layer", Tensor, Tensor, bool], Any]


def is_real(x: Tensor) -> bool:
    return not (isinstance(x, FakeTensor) or x.is_meta)


# ---- hooks, writes and masks ----


class PreHooked(Pair):
    """A layer that is cut gets what a hook has made of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.fc1.register_forward_pre_hook(lambda _, args: (args[0] * 0.7,))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


def scan(_: Any, x: Tensor) -> Tensor:
    """What it writes into a new tensor goes on, with the gradient of what was written."""
    rows = torch.linalg.solve_triangular(torch.eye(32), x.unsqueeze(-1), upper=False).squeeze(-1)
    found = torch.zeros_like(rows)
    for part in range(2):
        found[:, 16 * part : 16 * part + 16] = torch.tanh(rows[:, 16 * part : 16 * part + 16])
    return found


class Cross(nn.Module):
    """Keys and values of another sequence, with a mask that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, mask: Tensor | None, other: Tensor) -> Tensor:
        q, k, v = (
            layer(given).unflatten(-1, (4, 4)).transpose(1, 2)
            for layer, given in ((self.q, self.norm(x)), (self.k, other), (self.v, other))
        )
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o(found.transpose(1, 2).flatten(2))


def hides_nothing(x: Tensor) -> Tensor:
    return torch.ones(len(x), 1, 1, 3, dtype=torch.bool, device=x.device)


class Skips(Pair):
    """It leaves out a mask that hides nothing, which a recording cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.other, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Cross() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.given(x)[:, None], self.norm(self.other(torch.stack([x, -x, 2 * x], 1)))
        for layer in self.layers:
            h = layer(h, None if is_real(x) else hides_nothing(x), other)
        return super().forward(h[:, 0]) * other.square().mean((1, 2))[:, None]


RECORDED = {
    "a hook in a recording": Row(PreHooked, (TENSOR, PIPELINE)),
    "writes in a recording": Row(variant("Scan", Pair, between=scan), (TENSOR, PIPELINE)),
    "a mask that is left out": Row(Skips, (TENSOR, DATA)),
}


# ---- calls of another structure ----


class Layer(nn.Module):
    """Attention with another sequence, whose arguments and results have many forms."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.norm = Cross(), nn.LayerNorm(16)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        others: tuple[Tensor, ...] = (),
        *,
        twice: bool = False,
        makes: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        for _ in range(1 + twice):
            x = self.cross(x, mask, self.norm(sum(others, x)))
        return x if makes is None else makes(x)


class Calls(Pair):
    """Its layer is called by a function that sees whether the program runs or is recorded."""

    def __init__(self, calls: Call) -> None:
        super().__init__()
        self.given, self.layer, self.calls = nn.Linear(16, 16), Layer(), calls

    def forward(self, x: Tensor) -> Tensor:
        h = self.given(x)
        h = torch.stack([h, -h, 2 * h], 1)
        h = self.calls(self.layer, h, h * 0.5, is_real(x))
        return super().forward(h[:, 0])


ALIKE: dict[str, Call] = {
    "by name": lambda layer, x, y, real: layer(others=(y,), x=x) if real else layer(x, None, (y,)),
    "without a mask": lambda layer, x, y, real: (
        layer(x, others=(y,)) if real else layer(x, hides_nothing(x), (y,))
    ),
    "in another order": lambda layer, x, y, real: layer(
        x, makes=lambda z: {"y": y, "z": z} if real else {"z": z, "y": y}
    )["z"],
}
OTHERS: dict[str, Call] = {
    '"layer" takes a tensor at mask; .* has none there': lambda layer, x, y, real: layer(
        x, hides_nothing(x) if real else None, (y,)
    ),
    '"layer" takes True at twice; .* has False there': lambda layer, x, y, real: layer(x, twice=real),
    '"layer" is called 2 times; .* has 1 calls': lambda layer, x, y, real: layer(layer(x) if real else x),
    "is called 1 times; .* has 2 calls": lambda layer, x, y, real: layer(x if real else layer(x)),
    "is called 0 times": lambda layer, x, y, real: x if real else layer(x),
}
CALLS = {
    f"a call {name}": Row(lambda calls=calls: Calls(calls), (TENSOR, DATA)) for name, calls in ALIKE.items()
} | {
    f"another call {number}": Row(lambda calls=calls: Calls(calls), refused={says: [TENSOR]})
    for number, (says, calls) in enumerate(OTHERS.items())
}


# ---- what moves, and what comes back ----


class Moved(nn.Module):
    """A block whose input, output and container have a gradient that ranks sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.kind = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), kind

    def forward(self, x: Tensor, *more: Tensor, causal: bool = False) -> Any:
        found = self.b(torch.tanh(self.a(sum(more, x)))) + (1.0 if causal else 0.0)
        if self.kind == "keys":
            return {"y" if is_real(x) else "x": found}
        return (found, x) if self.kind == "longer" and is_real(x) else (found,)


class Blocks(Pair):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.norm = Moved(kind), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        real, kind = is_real(x), self.block.kind
        h = self.norm(x)
        more = (h * 0.5,) * ((kind == "more" and real) + (kind == "less" and not real))
        found = self.block(h, *more, causal=kind == "flag" and real)
        return super().forward(next(iter(found.values())) if isinstance(found, dict) else found[0])


class Scored(nn.Linear):
    """Returns a number and a tensor, which change places when the program runs."""

    kind = ""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        score = self.weight.square().mean()
        others = {"places": (y, score), "longer": (score, y, y), "kinds": (score, y.argsort(-1))}
        return others.get(self.kind if is_real(y) else "", (score, y))


class Scores(Pair):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Scored(16, 16)
        self.block.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        score, y, *_ = self.block(x)
        return super().forward(x + y + score.tanh())


class Passes(nn.Module):
    """Returns what it takes or one tensor twice, and something else when the program runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(16, 16), kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.layer(x))
        found = {"order": (y, x), "other": (y * 2, y), "detached": (x.detach(), y), "twice": (y, y + x)}
        if self.kind in found and is_real(x):
            return found[self.kind]
        if self.kind == "written":
            return (x + y, y) if is_real(x) else (x.mul_(1.0).add_(y.detach()), y)
        return (y, y) if self.kind == "twice" else (x.contiguous(), y)


class Passed(Pair):
    """Takes what its block was given, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.given, self.block = nn.Linear(16, 16), Passes(kind)

    def forward(self, x: Tensor) -> Tensor:
        h = self.given(x)
        first, second = self.block(h)
        return super().forward(first - 0.3 * second + h)


NO_TENSOR, ONE = "; .* has none there", r"; .* has one of shape \[\] and"
OWN = "a tensor of its own at place 0; .* has there one that was there before the call"
STRUCTURES: tuple[tuple[Any, str, Any], ...] = (
    (Blocks, "more", ("takes a tensor at place 1" + NO_TENSOR, TENSOR)),
    (Blocks, "less", ("takes no tensor at place 1; .* has one there", TENSOR)),
    (Blocks, "flag", ("takes True at causal; .* has False there", TENSOR)),
    (Blocks, "longer", ("returns a tensor at place 1" + NO_TENSOR, TENSOR)),
    (Blocks, "keys", ("returns a tensor at y" + NO_TENSOR, TENSOR)),
    (Scores, "", None),
    (Scores, "places", (r"returns a tensor of shape \[4, 16\] and type float32 at place 0" + ONE, PIPELINE)),
    (
        Scores,
        "kinds",
        (r"returns a tensor .* type int64 at place 1; .* of shape \[4, 16\] and type fl", PIPELINE),
    ),
    (Scores, "longer", ("returns a tensor at place 2" + NO_TENSOR, PIPELINE)),
    (Passed, "", None),  # the program has one number for a tensor that comes back
    (Passed, "order", (f"returns {OWN}", PIPELINE)),
    (Passed, "other", (f"returns {OWN}", PIPELINE)),
    (Passed, "detached", (f"returns {OWN}", PIPELINE)),
    (Passed, "written", (f"returns {OWN}", PIPELINE)),
    (Passed, "twice", ("returns two tensors at place 0 and place 1; .* has one at both", PIPELINE)),
)


def structure(make: Any, kind: str, refused: Any) -> Row:
    if refused is None:
        return Row(lambda: make(kind), (PIPELINE,))
    says, plan = refused
    return Row(
        lambda: make(kind), refused={f'"block" {says}' + '.*"block.": "whole"' * (plan is TENSOR): [plan]}
    )


# ---- what is named ----


def halved(_: Any, x: Tensor) -> Tensor:
    y = torch.tanh(x)
    y.data.mul_(0.5)  # in one process backward takes the written values
    return y


POSITIONS = [(torch.linspace(-2, 2, 8 * 6 * 16).sin().view(8, 6, 16), torch.arange(48).view(8, 6) % 4)]
NAMED = {
    "writes by data": Row(
        variant("Halved", Pair, between=halved), (),
        {r"context=2.*writes in place.*x\.data\.mul_": [CONTEXT]},
        POSITIONS, of_positions,
    ),
    "collectives of the program": Row(
        variant(
            "Gathers", Pair,
            between=lambda _, x: torch.tanh(functional_collectives.all_reduce(x, "sum", dist.group.WORLD)),
        ),
        refused={"calls all_reduce of torch.distributed": [TENSOR, PIPELINE]},
    ),
}  # fmt: skip
TABLE = (
    RECORDED
    | CALLS
    | {f"{make.__name__} {kind}": structure(make, kind, says) for make, kind, says in STRUCTURES}
    | NAMED
)
