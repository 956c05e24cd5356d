"""Models as people write them: lambdas in attributes, calls of `forward`, lists of lists, complex weights,
activations in place.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.plain_training import same, same_gradients, under
from parallel.run_features import in_group
from unisono.parallel import sharded_parameters
from unisono.parallel.graph.shapes import model_copy
from unisono.parallel.structure import entries

LOSS = functional.cross_entropy
DATA, ZERO, SWAP = up.Plan(data=2), up.Plan(data=2, zero=3), up.Plan(data=2, swap="disk")
TENSOR, PIPELINE = up.Plan(tensor=2), up.Plan(pipeline=2, micro_batches=2)


def rows(count: int = 3) -> Any:
    return models.vector_batches(count, 8)


class Block(nn.Module):
    """Its branch is a lambda, as in minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.ModuleDict({"up": nn.Linear(16, 32), "act": nn.GELU(), "down": nn.Linear(32, 16)})
        m = self.mlp
        self.branch = lambda x: m["down"](m["act"](m["up"](x)))
        self.both = [lambda x: x, lambda x, norm=self.norm: norm(x)]

    def forward(self, x: Tensor) -> Tensor:
        return self.both[0](x) + self.branch(self.both[1](x))


class Blocks(nn.Module):
    def __init__(self, *, directly: bool = False) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)
        self.seen: list[Tensor] = []
        self.head.register_forward_pre_hook(lambda _module, args: self.note(args[0]))
        self.directly = directly

    def note(self, x: Tensor) -> None:
        self.width = x.shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x) if self.directly else block(x)
        return self.head(x)


class Heads(nn.Module):
    """The attention is called by its forward, as in llama2.c; its number of heads is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention.forward(self.norm(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, time, _ = x.shape
        q, k, v = (layer(x).view(rows, time, 4, 4).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).contiguous().view(rows, time, -1))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList([Heads(), Heads()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x.abs().long() % 16)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Pairs(nn.Module):
    """A list of lists: nothing calls the inner ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(16), nn.Linear(16, 16), nn.ParameterList([torch.ones(16)])])
            for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear, gains in self.layers:
            x = x + torch.tanh(linear(norm(x))) * gains[0]
        return self.head(x)


class Waves(nn.Module):
    """A complex weight beside f32 ones, as in FNO and S5."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(9, 9, dtype=torch.complex64) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return self.head(x + torch.fft.irfft(torch.fft.rfft(x.float()) @ self.weight, n=16))


class Absent(nn.Linear):
    """PyTorch has no complex numbers of two bf16."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.view_as_complex(y.unflatten(-1, (-1, 2))).abs().repeat(1, 2)


def check_lambdas_of_a_copy_run_its_modules(folder: Path) -> None:
    model = Blocks()
    made = model_copy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert made(torch.ones(2, 16)).abs().max() == 0
    assert made.width == 16
    assert not hasattr(model, "width")
    assert model(torch.ones(2, 16)).abs().max() > 0
    same(PIPELINE, Blocks, rows(), LOSS, sample=rows()[0][0])
    same(TENSOR, Blocks, rows(), LOSS, sample=rows()[0][0])
    same_gradients(TENSOR, Blocks, rows()[0], LOSS, sample=rows()[0][0])


def check_modules_that_are_called_by_their_forward(folder: Path) -> None:
    for plan in (TENSOR, PIPELINE):
        run = same(plan, Words, rows(), LOSS, sample=rows()[0][0])
        if run.cut is not None:
            assert run.cut.parameters[0] > 0.5 * run.cut.parameters[1], run.cut
    graph = up.capture(Words(), rows()[0][0])
    assert [use.module for use in graph.uses("layers.1.attention.wo.weight")] == ["layers.1.attention.wo"]
    assert sum(frame.path == "layers.1.attention" for frame in graph.frames) == 1


def check_lists_of_lists(folder: Path) -> None:
    small, sharded_parameters.SMALL_MODEL_BYTES = sharded_parameters.SMALL_MODEL_BYTES, 0
    try:
        model = Pairs()
        assert entries(model) == [module for pair in model.layers for module in list(pair)[:2]]
        for plan in (ZERO, SWAP):
            same(plan, Pairs, rows(), LOSS)
    finally:
        sharded_parameters.SMALL_MODEL_BYTES = small


class InPlace(nn.Module):
    """A residual branch that begins with an activation in place, as in VQ-VAE; `add`: with a sum."""

    def __init__(self, *, add: bool = False) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.LeakyReLU(0.2, inplace=not add), nn.Linear(16, 16))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        if self.add:
            x += 1
        return x + self.branch(x)


def in_place(*, add: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), InPlace(add=add), InPlace(add=add), nn.Linear(16, 4))


def check_units_that_write_into_their_inputs(folder: Path) -> None:
    small, sharded_parameters.SMALL_MODEL_BYTES = sharded_parameters.SMALL_MODEL_BYTES, 0
    again = up.Plan(data=2, recompute=True)
    try:
        for plan in (ZERO, SWAP, again):
            same(plan, in_place, rows(), LOSS)
        for plan in (ZERO, SWAP, again):
            with pytest.raises(
                ValueError, match=r"writes into the tensor that its unit takes.*x = x"
            ) as caught:
                under(plan, lambda: in_place(add=True), rows(), LOSS)
            print(caught.value, flush=True)
    finally:
        sharded_parameters.SMALL_MODEL_BYTES = small


def check_complex_weights(folder: Path) -> None:
    for plan in (ZERO, up.Plan(data=2, zero=1, micro_batches=2), TENSOR):
        same(plan, Waves, rows(), LOSS, sample=rows()[0][0])
    with pytest.raises(ValueError, match=r"PyTorch does not have in bf16.*keep_f32") as caught:
        under(up.Plan(data=2, precision="bf16"), lambda: Absent(16, 4), rows(), LOSS)
    print(caught.value, flush=True)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
