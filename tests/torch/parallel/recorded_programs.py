"""What a recording of a program must not lose: hooks of a layer that is cut, gradients of what is written."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.plain_training import same
from parallel.run_features import in_group
from parallel.wild import DATA, LOSS, PIPELINE, TENSOR, Mlp, rows
from unisono.parallel import program_state


class PreHooked(Mlp):
    """A layer that is cut gets what a hook has made of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.a.register_forward_pre_hook(lambda _, args: (args[0] * 0.7,))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Scan(Mlp):
    """What it writes into a new tensor goes on, with the gradient of what was written."""

    def between(self, x: Tensor) -> Tensor:
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


class Skips(Mlp):
    """It leaves out a mask that hides nothing, which a recording cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.other, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Cross() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.given(x)[:, None], self.norm(self.other(torch.stack([x, -x, 2 * x], 1)))
        mask: Any = torch.ones(len(x), 1, 1, 3, dtype=torch.bool, device=x.device)
        real = not (isinstance(x, FakeTensor) or x.is_meta)
        for layer in self.layers:
            h = layer(h, None if real else mask, other)
        return super().forward(h[:, 0]) * other.square().mean((1, 2))[:, None]


def check_a_mask_that_is_left_out(folder: Path) -> None:
    for plan in (TENSOR, DATA):
        same(plan, Skips, rows(), LOSS, sample=rows()[0][0])


def check_hooks_and_writes_in_a_recorded_program(folder: Path) -> None:
    for make, plan in ((PreHooked, TENSOR), (PreHooked, PIPELINE), (Scan, TENSOR), (Scan, PIPELINE)):
        same(plan, make, rows(), LOSS, sample=rows()[0][0])


class Text(nn.Module):
    """Takes texts of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, models.WIDTH), nn.Linear(models.WIDTH, 32)
        self.block = models.Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


def check_the_programs_of_many_lengths_are_bounded(folder: Path) -> None:
    """Of three that are kept the least recently used one goes; what is kept is not proved again."""
    program_state.PROGRAMS = 3
    made: list[int] = []
    setitem = program_state.ProgramCache.__setitem__

    def counted(cache: Any, key: Any, value: Any) -> None:
        fresh = key not in cache
        setitem(cache, key, value)
        made.extend([len(cache)] * fresh)

    program_state.ProgramCache.__setitem__ = counted  # type: ignore[method-assign]
    for plan in (up.Plan(tensor=2), up.Plan(pipeline=2), up.Plan(context=2)):
        sample = torch.zeros(2, 8, dtype=torch.long)
        run = up.parallelize(
            Text(),
            plan,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            loss=models.token_loss,
            sample=sample,
        )
        begun = len(made)
        for length, proofs in ((10, 1), (12, 2), (14, 3), (10, 3), (16, 4), (10, 4), (12, 5), (16, 5)):
            tokens = torch.arange(2 * length).view(2, length) % 32
            run.step((tokens, tokens))
            assert len(made) - begun == proofs, (plan, length, made[begun:])
        assert max(made[begun:]) == 3
    program_state.ProgramCache.__setitem__ = setitem  # type: ignore[method-assign]


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
