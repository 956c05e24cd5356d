"""Sequences that are cut over ranks: losses and gradients against one process."""

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from inside_parallel import PositionSpan, TensorAxis, attention
from parallel.models import token_loss as mean
from parallel.plain_training import begun
from parallel.rows import Row

WIDTH, WORDS = 16, 32


class Attention(nn.Module):
    """Causal, with fewer heads of keys than of queries."""

    def __init__(self, heads: int, key_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.key_heads, self.dropout = heads, key_heads, dropout
        size = WIDTH // 4
        self.q, self.kv = nn.Linear(WIDTH, heads * size), nn.Linear(WIDTH, 2 * key_heads * size)
        self.out = nn.Linear(heads * size, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, time, _ = x.shape
        q = self.q(x).view(rows, time, self.heads, -1).transpose(1, 2)
        k, v = self.kv(x).chunk(2, -1)
        k, v = (t.reshape(rows, time, self.key_heads, -1).transpose(1, 2) for t in (k, v))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, mask is None, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).reshape(rows, time, -1))


class Block(nn.Module):
    def __init__(self, *attention: Any) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention(*attention)
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.first(x), mask)
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """Positions are a table; with `padded` the input is (ids, padding) and attention has a mask."""

    def __init__(self, heads: int = 3, key_heads: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList(Block(heads, key_heads, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        time = ids.shape[1]
        x = self.words(ids) + self.places(torch.arange(time, device=ids.device))
        mask = None
        if padding is not None:
            mask = torch.ones(time, time, dtype=torch.bool).tril() & padding[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x) @ self.words.weight.T


def batches(time: int, count: int = 3, rows: int = 4) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(WORDS, (rows, time + 1), generator=generator) for _ in range(count)]
    return [(each[:, :-1], each[:, 1:]) for each in ids]


class Encoder(nn.Module):
    """PyTorch's own layers, which see all positions but the padding; the first position is classified."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH) / 10)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout), nn.Linear(WIDTH, 4)
        )

    def forward(self, ids: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids) + self.places[: ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1)
        mean = (x * kept).sum(1) / kept.sum(1)
        return self.head(x[:, 0] + mean), x


class OwnLoss(Decoder):
    """Shifts its labels itself."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(ids)
        shifted = logits[:, :-1].reshape(-1, WORDS)
        loss = functional.cross_entropy(shifted, labels[:, 1:].reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


class Recorded(nn.Module):
    """benchmarks/gpt.py, which looks back: its rows move between ranks."""

    def __new__(cls, **sizes: int) -> Any:
        sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
        import gpt

        return gpt.GPT(**{"layers": 2, "width": 20, "heads": 5, "context": 32, **sizes})


def classes(count: int = 3, rows: int = 4, time: int = 18) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        ids = torch.randint(WORDS, (rows, time), generator=generator)
        ends = torch.randint(1, time + 1, (rows, 1), generator=generator)
        targets = torch.randint(4, (rows,), generator=generator)
        found.append(({"ids": ids, "padding": torch.arange(time) >= ends}, targets))
    return found


def of_class(output: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output[0], targets) + output[1].pow(2).mean()


def check_attention_against_one_process(folder: Path) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    ranks = TensorAxis(dist.new_group(), rank, size)
    generator = torch.Generator().manual_seed(1)
    full, rows = (2, 4, 21, 5), torch.arange(21)
    masks = {
        "none": None,
        "bool": torch.rand(2, 1, 21, 21, generator=generator) > 0.3,
        "keys": (rows < 13).view(1, 1, 1, 21),
        "hides all": (rows > 9).view(21, 1).expand(21, 21),
        "floating": torch.randn(4, 21, 21, generator=generator, dtype=torch.float64),
    }
    for key_heads, heads, causal, other in itertools.product((4, 2, 1), (False, True), (False, True), masks):
        mask = masks[other]
        if (heads and key_heads % size) or (causal and mask is not None):
            continue
        q, grad = (torch.randn(full, generator=generator, dtype=torch.float64) for _ in range(2))
        k, v = (torch.randn(2, key_heads, 21, 5, generator=generator, dtype=torch.float64) for _ in range(2))
        leaves = [q, k, v] + [mask] * (mask is not None and mask.is_floating_point())
        whole = [t.clone().requires_grad_() for t in leaves]
        wanted = functional.scaled_dot_product_attention(
            *whole[:3], whole[3] if leaves[3:] else mask, is_causal=causal, enable_gqa=True
        )
        wanted.backward(grad)
        for begins in (0, 2):  # the sequence is one of an input that begins earlier
            span = PositionSpan(21 + begins, begins, 21, size)
            mine = span.positions(rank)
            parts = [t[:, :, mine].requires_grad_() for t in leaves[:3]]
            parts += [t.clone().requires_grad_() for t in leaves[3:]]
            how = attention.Attention(span, span, causal, 0.0, 5**-0.5, heads, "up::attention")
            out = attention.attend(*parts[:3], parts[3] if leaves[3:] else mask, how, ranks)
            out.backward(grad[:, :, mine])
            says = f"{key_heads} key heads, heads {heads}, causal {causal}, mask {other}"
            torch.testing.assert_close(out, wanted[:, :, mine], msg=says)
            for part, all_of_it in zip(parts[:3], whole, strict=False):
                torch.testing.assert_close(part.grad, all_of_it.grad[:, :, mine], msg=says)
            if leaves[3:]:
                dist.all_reduce(parts[3].grad, group=ranks.group)
                torch.testing.assert_close(parts[3].grad, whole[3].grad, msg=says)


class Changed(Decoder):
    """A decoder with one more thing at its end."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = [what]

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.what[0](self.words(ids))


def twice(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: 2 * grad)
    return x


def hooked(register: str) -> nn.Module:
    model = Decoder()
    getattr(model.blocks[0], register)(lambda *_: None)
    return model


PLAN, FIRST = up.Plan(context=2), batches(16)[:1]
SHORT = [(FIRST[0][0][:, :3], FIRST[0][1][:, :3])]


def row(make: Any, says: str, given: Any = FIRST, loss: Any = mean) -> Row:
    return Row(make, refused={says: [PLAN]}, given=given, loss=loss, sample=None)


TABLE = {
    "a ring": Row(partial(Decoder, 3, 3), [PLAN], given=batches(16), loss=mean, sample=None),
    "an exchange of heads": Row(partial(Decoder, 4, 4), [PLAN], given=batches(384), loss=mean, sample=None),
    "sharded and recomputed": Row(
        lambda: Decoder(3, 1), [up.Plan(context=2, zero=3, micro_batches=2, recompute=True)],
        given=batches(19), loss=mean, sample=None,
    ),
    "compares positions": row(
        lambda: Changed(lambda x: x.mul_(x[:, :1] * 2).mean(-1, True)), "compares each position"
    ),
    "a hook": row(lambda: hooked("register_forward_hook"), '"blocks.0" has a hook'),
    "a hook of backward": row(lambda: hooked("register_full_backward_hook"), '"blocks.0" has a hook'),
    "a hook on a tensor": row(lambda: Changed(lambda x: twice(x).mean(-1, True)), "hook on a tensor"),
    "three positions": row(Decoder, "has 3 positions, and 2 ranks take 4", SHORT),
    "a loss of no position": row(
        Decoder, "a value for each position", loss=lambda logits, _: logits.mean(-1)
    ),
    "no sequence": row(
        lambda: nn.Embedding(8, 4), "can be cut along a sequence", [(torch.arange(4), torch.arange(4))],
        lambda x, _: x.sum(),
    ),
    "a loss that depends on values": row(
        Decoder, "depends on the values", loss=lambda logits, _: logits.mean() * (1 + int(logits.sum() > 0))
    ),
}  # fmt: skip


def check_ranks_with_different_inputs_are_told(folder: Path) -> None:
    rank = dist.get_rank()
    for given in (batches(16, rows=4 + rank)[0], batches(16 + 2 * rank)[0], batches(16, count=2)[rank]):
        with pytest.raises((ValueError, RuntimeError), match="different"):
            begun(PLAN, Decoder, mean).step(given)
