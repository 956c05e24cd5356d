"""Gradients in stages: weights of weights, parameters without any, operators by what is trained."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel.model_table import DATA, PIPELINE
from parallel.rows import Row
from parallel.stage_table import GIVEN, H1, SCHEDULES, TIME, WIDTH, WORDS, ZBV, Skips, loss, stages

# ---- weights of weights ----


class Relative(nn.Module):
    """What follows from parameters alone is used by several layers, as relative positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.places, self.gain = nn.Parameter(torch.randn(TIME, WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x, places = self.table(ids), None
        for number, (first, query, key, value) in enumerate(self.layers):
            x = x + torch.tanh(first(x))
            if number == 3:
                places = self.places * 2.0 + self.gain
            if places is not None:
                x = x + torch.softmax(query(x) @ key(places).T, -1) @ value(places)
        return self.head(x)


class Gives(nn.Module):
    """A piece that sends a parameter to the next one, which its input does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(1, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.gain.expand(len(x), -1) * 2.0


class Takes(nn.Linear):
    def forward(self, x: Tensor, gain: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(super().forward(x) * gain)


class Chain(nn.Sequential):
    def forward(self, x: Any) -> Tensor:
        for piece in self:
            x = piece(*x) if isinstance(x, tuple) else piece(x)
        return x


def gives() -> nn.Module:
    return Chain(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Gives(), Takes(WIDTH, WIDTH), nn.Linear(WIDTH, 4))


TWO_PASSES = {
    "weights of weights": stages(Relative, (PIPELINE, H1, ZBV)),
    "pieces that send weights": Row(
        gives, (up.Plan(pipeline=2, micro_batches=4, schedule="zbv", cuts=(2, 3, 4)),), sample=None,
        options={"pieces": list},
    ),
}  # fmt: skip


# ---- parameters that nothing uses ----


class Leftover(Skips):
    """Parameters that nothing uses: in a layer of their own, in a block, and beside a used one."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.spare = nn.Linear(3, 2), nn.Parameter(torch.ones(3))
        self.blocks[4].spare = nn.Linear(2, 2)


class PartlyUsed(Skips):
    """One parameter is used for what nothing takes, one module is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.lost, self.spare = nn.Parameter(torch.ones(WIDTH)), nn.Linear(3, 2)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        found = super().forward(**inputs)
        (self.table.weight * self.lost).sum()
        return found


class Lost(nn.Module):
    """What the first stage makes goes into a layer whose output is lost, into numbers that have no gradient,
    and into a second tensor of the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.lost, self.head, self.aside = (nn.Linear(WIDTH, WORDS) for _ in range(3))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        first, second, third = self.first(x), self.second(x), self.third(x)
        x = torch.tanh(self.block(x))
        self.lost(first)
        picked = x.gather(-1, second.argsort(-1))
        return {"aside": self.aside(third), "logits": self.head(x + picked)}


def by_aside(output: Any, targets: Tensor) -> Tensor:
    return loss(output, targets) + 0.1 * output["aside"].square().mean()


class Aside(nn.Module):
    """A norm on both stages, of which the loss takes nothing: weight decay does not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = self.norm(x)
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        x = self.layers[3](torch.tanh(self.layers[2](x)))
        return {"out": x, "aside": self.norm(x) * early}


def decays(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


STATE = {"state": True}
PAIRS = [tuple(torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
UNUSED = {
    "parameters that nothing uses": stages(
        Leftover, (DATA, PIPELINE, ZBV, SCHEDULES[-1]), given=GIVEN[:2], compare=STATE,
    ),
    "parameters that nothing needs": stages(PartlyUsed, (PIPELINE, ZBV), given=GIVEN[:2], compare=STATE),
    # AdamW moves what has a gradient of zero, and not what has none
    "parameters without gradients": stages(Lost, (DATA, PIPELINE, *SCHEDULES[3:]), compare=STATE),
    "a second output": stages(Lost, (DATA, PIPELINE, *SCHEDULES[3:]), loss=by_aside, compare=STATE),
    "a norm on both stages without a gradient": Row(
        Aside, (PIPELINE,), given=PAIRS, loss=lambda output, y: functional.mse_loss(output["out"], y),
        holds=lambda run: not run.model.norm.weight.is_meta, options={"optimizer": decays}, compare=STATE,
    ),
}  # fmt: skip


# ---- operators that PyTorch chooses by what is trained ----


class Attends(nn.Module):
    """Stages begin within it. A mask that is trained takes another attention; singular values of what is
    trained are computed with their vectors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 5)
        self.mask = nn.Parameter(torch.randn(8, 8))
        self.table = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        found = self.norm(found.transpose(1, 2).flatten(2))
        return self.last(found) * torch.linalg.svdvals(self.table).sum()


def thaw(model: nn.Module, step: int) -> None:
    for name, value in model.named_parameters():
        value.requires_grad_(name not in ("mask", "table") or step in (1, 2))


GENERATOR = torch.Generator().manual_seed(1)
SEQUENCES = [
    (torch.randn(8, 8, 8, generator=GENERATOR), torch.randint(5, (8, 8), generator=GENERATOR))
    for _ in range(5)
]
CHOSEN = {
    "operators follow what is trained": stages(
        Attends, (PIPELINE, H1, up.Plan(context=2)), given=SEQUENCES,
        options={"before": thaw, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1)},
    ),
}  # fmt: skip
TABLE = TWO_PASSES | UNUSED | CHOSEN
