"""Cuts of the tensor axis that a caller names: proved from the recorded program, or refused and why."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from inside_parallel import prove_cut as prove
from loops import each
from zoo.own import Nano

IDS = torch.zeros(4, 8, dtype=torch.long)


def pair(*between: nn.Module, width: int = 32, goes: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, width), *between, nn.Linear(width, goes))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Fused(nn.Module):
    """Attention whose query, key and value are one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Torchs(nn.Module):
    """PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(self.table(ids)))


class Biased(nn.Module):
    """Attention with a learned number for each head and distance, as in T5, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.bias, self.mlp = nn.Embedding(8, 4), Gated()

    def forward(self, x: Tensor) -> Tensor:
        rows, positions, width = x.shape
        q, k, v = (layer(x).view(rows, -1, 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        places = torch.arange(positions)
        far = (places[:, None] - places).abs()
        scores = q @ k.transpose(2, 3) + self.bias(far).permute(2, 0, 1)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, positions, width)
        return self.mlp(x + self.o(mixed))


class Experts(nn.Module):
    """Experts that all rows go through, weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(pair(nn.GELU(), goes=16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1).unbind(-1)
        return x + sum(w[..., None] * expert(x) for w, expert in zip(weights, self.experts, strict=True))


def convolutions(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), *between, nn.Conv2d(8, 4, 3))


ROWS, TEXT, IMAGE = torch.ones(4, 16), torch.ones(2, 6, 16), torch.ones(2, 3, 8, 8)
COLUMN, ROW, GATHERED = "column", "row", "column, gathered"
HEADS = {"q": COLUMN, "k": COLUMN, "v": COLUMN, "o": ROW}


@each(
    ("model", "sample", "kinds", "dims"),
    [
        (pair(nn.GELU()), ROWS, {"0": COLUMN, "1": "whole", "2": ROW}, {"0.weight": 0, "2.weight": 1}),
        (pair(nn.LayerNorm(32)), ROWS, {"0": GATHERED}, {"0.weight": 0}),
        (pair(nn.LayerNorm(32)), ROWS, {"2": GATHERED}, {"2.weight": 0}),
        (Gated(), TEXT, {"gate": COLUMN, "up": COLUMN, "down": ROW}, {"up.weight": 0, "down.weight": 1}),
        (Biased(), TEXT, {**HEADS, "bias": COLUMN}, {"bias.weight": 1, "o.weight": 1}),
        (Biased(), TEXT, {"mlp.gate": COLUMN, "mlp.up": COLUMN, "mlp.down": ROW}, {"mlp.up.weight": 0}),
        (Experts(), TEXT, {"experts.0.0": COLUMN, "experts.0.2": ROW}, {"experts.0.2.weight": 1}),
        (Fused(), TEXT, {"qkv": COLUMN, "out": ROW}, {"qkv.q.weight": 0, "out.weight": 1}),
        (Torchs(), TEXT, {"attn": COLUMN, "attn.out_proj": ROW}, {"attn.k.weight": 0}),
        (Tied(), IDS, {"table": "vocabulary", "head": GATHERED}, {"table.weight": 0}),
        (convolutions(nn.ReLU()), IMAGE, {"0": COLUMN, "2": ROW}, {"0.weight": 0, "2.weight": 1}),
        (Nano(), IDS, {"h.0.attn.c_attn": COLUMN, "h.0.attn.c_proj": ROW}, {"h.0.attn.c_proj.weight": 1}),
    ],
)
def test_given_cuts_that_are_proved(model: nn.Module, sample: Tensor, kinds: Any, dims: Any) -> None:
    found = prove(model, sample, 2, kinds=kinds)
    assert dims.items() <= found.dims.items(), str(found)
    named = {path for path, kind in kinds.items() if kind != "whole"}
    assert all(path in named or path.rpartition(".")[0] in named for path in found.modules), str(found)
    again = prove(model, sample, 2, kinds=kinds, only=found)
    assert again.same(found)


@each(
    ("model", "sample", "kinds", "says"),
    [
        (pair(nn.ReLU()), ROWS, {"0": COLUMN}, r'does not name "2", .*cuts=\{\.\.\., "2": "row"\}'),
        (pair(nn.ReLU()), ROWS, {"2": ROW}, 'does not name "0", .*"0": "column"'),
        (
            pair(nn.ReLU()),
            ROWS,
            {"0": ROW, "2": COLUMN},
            r'"2" \(Linear\) cannot be cut by column: the model re',
        ),
        (pair(nn.ReLU()), ROWS, {"0": COLUMN, "2": "whole"}, 'by column: cuts= says that "2" is whole'),
        (pair(nn.LayerNorm(32)), ROWS, {"0": COLUMN, "2": ROW}, '"0" .*: aten.native_layer_norm needs all'),
        (pair(nn.Softmax(-1)), ROWS, {"0": COLUMN, "2": ROW}, '"0" .*: aten._softmax needs all of it'),
        (pair(nn.GroupNorm(1, 32)), ROWS, {"0": COLUMN, "2": ROW}, '"0" .*cannot be cut by column'),
        (pair(width=5), ROWS, {"0": COLUMN, "1": ROW}, "2 does not divide 5"),
        (
            pair(nn.LayerNorm(32)),
            ROWS,
            {"1": COLUMN},
            r'"1" \(LayerNorm\) is no layer that can be cut by column',
        ),
        (Gated(), TEXT, {"gate": COLUMN, "down": ROW}, 'does not name "up"'),
        (Biased(), TEXT, HEADS, 'does not name "bias", .*"bias": "column"'),
        (Fused(), TEXT, {"qkv": COLUMN}, 'does not name "out"'),
        (Torchs(), TEXT, {"attn.out_proj": ROW}, 'does not name "attn"'),
        (Tied(), IDS, {"table": COLUMN, "inner": ROW}, '"table" .*cannot be cut by column'),
        (Tied(), IDS, {"inner": "vocabulary"}, '"inner" .* no layer that can be cut by vocabulary'),
        (convolutions(nn.BatchNorm2d(8)), IMAGE, {"0": COLUMN, "2": ROW}, '"0" .*native_batch_norm'),
        (convolutions(), IMAGE, {"0": GATHERED}, '"0" .*cannot be cut by column, gathered'),
    ],
)
def test_given_cuts_that_are_refused(model: nn.Module, sample: Tensor, kinds: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        prove(model, sample, 2, kinds=kinds)
