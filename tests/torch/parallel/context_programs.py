"""Programs that look harmless or odd, with cut sequences: as one process, or refused. On two ranks."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel.contexts import WIDTH, WORDS, Block, batches, mean
from parallel.plain_training import begun, same
from parallel.rows import Row


class Program(nn.Module):
    """Embeds, runs a block, something else, and the block again."""

    def __init__(self, what: Callable[["Program", Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), Block(3, 1)
        self.gain, self.slope = nn.Parameter(torch.rand(WIDTH)), nn.PReLU(WIDTH)
        self.gate, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.kernel = nn.Parameter(torch.rand(WIDTH, 1, 3) / 3)
        self.memory = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.blocks = nn.ModuleList([self.block])  # a unit that runs twice
        self.what = [what]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.words(ids))
        return self.blocks[0](self.what[0](self, x)) @ self.words.weight.T


def written(model: Program, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :, 0] = 0.5
    y[..., 1:3] *= model.gain[1:3]
    y.view(4, -1, 4).add_(1.0)
    y.masked_fill_(x > 1, 0.1)
    y += torch.linspace(0, 1, x.shape[1]).view(1, -1, 1)
    return y


def gated(model: Program, x: Tensor) -> Tensor:
    pooled = model.gate(x.mean(1)) + model.gain.mean() * x[:, -1]  # whole again, with parameters
    return (
        x * torch.sigmoid(pooled).unsqueeze(1)
        + model.gain * torch.arange(x.shape[1]).view(-1, 1) / x.shape[1]
    )


def detached(model: Program, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True) + x.sum(1, keepdim=True) / x.shape[1]
    return x / scale.clamp(min=0.1) + x.detach() + x.var(-1, keepdim=True) + x.std(-1, True, keepdim=True)


def looks_around(model: Program, x: Tensor) -> Tensor:
    before = functional.pad(x[:, :-2], (0, 0, 2, 0))
    after = functional.pad(x[:, 1:], (0, 0, 0, 1), value=0.5)
    shifted = functional.pad(x, (0, 0, 1, -1)) - functional.pad(x, (0, 0, -3, 3), value=0.1)
    return x + before * after + functional.pad(x[:, 3:-1], (0, 0, 1, 3)) + shifted


def shapes(model: Program, x: Tensor) -> Tensor:
    rows, time, width = x.shape
    y = torch.einsum("bsd,de->bse", x, model.gate.weight).reshape(rows * time, width)
    y = torch.cat([y[:, 4:], y[:, :4]], 1).view(rows, time, 2, -1).transpose(2, 3).flatten(2)
    y = torch.stack([y, x.square()], 1).mean(1)
    first, second = y.permute(1, 0, 2).split(WIDTH // 2, -1)
    return torch.cat([second, first], -1).transpose(0, 1).contiguous() + model.gain.expand_as(x).sort(-1)[0]


def written_out(model: Program, x: Tensor) -> Tensor:
    """Attention without scaled_dot_product_attention; the second one is [rows, keys, queries] at last."""
    q, k, v = x, model.gate(x), x * model.gain
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    weights = (q @ k.mT / 3).masked_fill(later, float("-inf")).softmax(-1)
    bias = torch.arange(x.shape[1]).float() / 9
    turned = torch.baddbmm(bias, v, q.mT, alpha=0.3).softmax(-1).mT
    return x + weights @ v + (k.mT @ turned).mT


def summed(model: Program, x: Tensor) -> Tensor:
    """Products that sum over positions, with a value of each position and with one that all ranks have."""
    state = torch.baddbmm(model.gain.diag(), x.mT, model.gate(x), beta=0.5, alpha=0.1)
    mixed = x.mT @ (torch.arange(x.shape[1]).view(-1, 1) / x.shape[1] * model.gain)
    return (x @ state + x @ mixed) / 9


def slides(model: Program, x: Tensor) -> Tensor:
    """Kernels over positions: causal ones, around each position, in frames and back; and over all of them."""
    turned, kernel, width = x.mT, model.kernel, x.shape[2]
    causal = functional.conv1d(turned, kernel, padding=2, groups=width)[..., : x.shape[1]]
    padded = functional.conv1d(functional.pad(turned, (2, 0)), kernel, groups=width)
    around = functional.conv1d(turned, kernel, padding=4, dilation=2, groups=width)[..., 2:-2]
    frames = functional.conv1d(turned, kernel, stride=2, padding=1, groups=width)
    back = functional.conv_transpose1d(functional.gelu(frames), kernel, stride=2, padding=1, groups=width)
    mixed = functional.conv1d(x, torch.ones(2, x.shape[1], 3) * model.gain[:3])  # positions as channels
    return x + (causal * padded + around + back).mT + mixed.mean(1, keepdim=True).mean(-1, keepdim=True)


def remembers(model: Program, x: Tensor) -> Tensor:
    """States from one position to the next."""
    found, (last, _) = model.memory(x)
    state, states, written = torch.zeros_like(x[:, 0]), [], torch.zeros_like(x)
    for at, each in enumerate(x.unbind(1)):
        state = state * model.gain + each
        states.append(state)
        written[:, at] = state * x[:, at]
    return (
        found * written
        + torch.stack(states, 1)
        + last[0].repeat(1, 2).unsqueeze(1)
        + functional.group_norm(x.mT, 4).mT
    )


def filled(_model: Program, x: Tensor) -> Tensor:
    """New memory that gets its values by parts of the features."""
    y, z = x.new_empty(*x.shape[:-1], x.shape[-1] + 4), torch.zeros(x.shape[:2])
    y[..., :4], y[..., 4:] = x[..., -4:], x
    z.copy_(x[..., 0])
    return y[..., 2:-2] * z.sigmoid().unsqueeze(-1)


def scattered(_model: Program, x: Tensor) -> Tensor:
    best, at = x.topk(3, -1)
    mask = torch.zeros_like(x).scatter_(-1, at, 1.0)
    fresh = torch.zeros(x.shape).scatter_(-1, at, best)
    return x * mask + fresh.scatter_add(-1, at, best)


def turned(_model: Program, x: Tensor) -> Tensor:
    angles = torch.outer(torch.arange(x.shape[1]), torch.arange(x.shape[2] // 2) / 8)
    turns = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turns).flatten(2)


def repeated(_model: Program, x: Tensor) -> Tensor:
    twice = (
        x.flatten(0, 1).repeat(2, 1)
        * torch.tensor([1.0, 0.5]).repeat_interleave(x.shape[:2].numel())[:, None]
    )
    return twice.view(2, *x.shape).sum(0)


def prefixed(model: Program, x: Tensor) -> Tensor:
    first = model.norm.weight.expand(len(x), 1, -1)
    y = torch.cat([first, x, first * 2, first], 1)
    return torch.tanh(y)[:, 1:-2] + torch.cat([first, first, x[:, 2:]], 1)


KNOWN = (
    written, gated, detached, looks_around, shapes, written_out, summed, filled, scattered, turned, repeated,
    prefixed, slides, remembers,
)  # fmt: skip
PLANS = (up.Plan(context=2), up.Plan(context=2, zero=3, recompute=True))
IDS = batches(17)


def flat(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), targets.flatten()


WEIGHT = torch.rand(WORDS, generator=torch.Generator().manual_seed(1))


def soft(logits: Tensor, targets: Tensor) -> Tensor:
    aims = functional.one_hot(targets, WORDS).float() * 0.9 + 0.1 / WORDS
    apart = functional.kl_div(logits.log_softmax(-1), aims, reduction="batchmean")
    return apart + functional.mse_loss(logits, aims) + functional.smooth_l1_loss(logits, aims)


def by_position(logits: Tensor, targets: Tensor) -> Tensor:
    each = functional.cross_entropy(*flat(logits, targets), reduction="none").view_as(targets)
    weights = torch.arange(targets.shape[1]) % 3
    return (each * weights).sum() / (weights.sum() * len(targets)) + logits[:, -1].logsumexp(-1).mean()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ignored and smoothed": lambda o, y: functional.cross_entropy(
        *flat(o, y), ignore_index=3, label_smoothing=0.1
    ),
    "weighed": lambda o, y: functional.cross_entropy(o.transpose(1, 2), y, WEIGHT),
    "shifted": lambda o, y: functional.cross_entropy(*flat(o[:, :-1], y[:, 1:])),
    "soft": soft,
    "by position": by_position,
}


class Series(nn.Module):
    """Floating inputs, and a target for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(5, WIDTH), Block(3, 3), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first((x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))))


GENERATOR = torch.Generator().manual_seed(1)
SERIES = [
    (torch.randn(4, 18, 5, generator=GENERATOR), torch.randn(4, 18, 1, generator=GENERATOR)) for _ in range(3)
]


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.memory, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.memory(self.words(ids))[0])


def check_an_lstm_in_low_precision(folder: Path) -> None:
    """Its list of parameters changes when they are gathered, which is not another program."""
    found = []
    for parts in (1, 2):
        plan = up.Plan(context=2, precision="bf16", micro_batches=parts)
        run = begun(plan, Remembers, mean, sample=IDS[0][0][: len(IDS[0][0]) // parts])
        found.append([run.step(batch) for batch in run.shard(IDS)])
    assert max(abs(a - b) for a, b in zip(*found, strict=True)) < 1e-2, found


def one_position_is_written(model: Program, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0.5
    return y


def one_position_changes_later(model: Program, x: Tensor) -> Tensor:
    y = x.clone()
    last = y[:, -1]
    y += 1.0
    return y + last.unsqueeze(1)


def check_what_needs_all_positions(folder: Path) -> None:
    """It runs on all of them, on each rank, and a warning names the operator."""
    for what in (
        lambda model, x: x / x.var() + x / x.max(),
        lambda model, x: functional.softmax(x, 1) + torch.cumsum(x, -2) * model.gain,
        lambda model, x: x[:, torch.arange(17).flip(0)] + x.flip(1).sort(1)[0],
        lambda model, x: x.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1) * model.gain,
        lambda model, x: functional.scaled_dot_product_attention(x.mT, x.mT, x.mT).mT + model.gate(x),
        lambda model, x: x + (x @ x.mT).softmax(1) @ x + (x @ x.mT + (x @ x.mT * 0.1).mT).softmax(-1) @ x,
        lambda model, x: torch.cat([x[:, 1:], x[:, :1]], 1) * x[:, ::2].mean(dim=(1, 2), keepdim=True),
        lambda model, x: x + x[:, 1:].view(4, 8, 2, -1).amax(2).repeat_interleave(2, 1).mean(1, True),
    ):
        for more in ({}, {"zero": 3, "recompute": True}):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                same(up.Plan(context=2, **more), partial(Program, what), batches(17), mean)
            said = [str(one.message) for one in seen if "on the whole sequence" in str(one.message)]
            assert bool(said) == (dist.get_rank() == 0), said
            assert not said or "context_programs.py:" in said[0], said


class Checked(Program):
    """Checks its ids, and what a block makes of them."""

    def __init__(self) -> None:
        super().__init__(shapes)

    def forward(self, ids: Tensor) -> Tensor:
        torch._check_tensor_all((ids > 0).any(), lambda: "nothing but padding")
        x = self.block(self.words(ids))
        torch._check_tensor_all(torch.isfinite(x))
        return x @ self.words.weight.T


def check_what_a_program_checks_about_values(folder: Path) -> None:
    given = batches(16)
    run = same(up.Plan(context=2), Checked, given, mean, sample=given[0][0])
    with pytest.raises((RuntimeError, ValueError), match="check of the model's own fails"):
        run.step((torch.zeros_like(given[0][0]), given[0][1]))


TABLE = {
    what.__name__: Row(partial(Program, what), PLANS, given=IDS, loss=mean, sample=None) for what in KNOWN
} | {
    f"a loss {name}": Row(
        partial(Program, gated), PLANS[:1], given=IDS, loss=loss, sample=None, options={"weigh": "rows"}
    )
    for name, loss in LOSSES.items()
} | {
    "series": Row(Series, PLANS[:1], given=SERIES, loss=functional.mse_loss, sample=None),
    **{
        f"refused {number}": Row(
            partial(Program, what), refused={"context=2 cannot cut": PLANS[:1]}, given=batches(16), loss=mean,
            sample=None,
        )
        for number, what in enumerate((
            lambda model, x: model.norm(x.mT).mT,  # a mean over positions, and a buffer
            one_position_is_written, one_position_changes_later,
        ))
    },
}  # fmt: skip
