"""recompute="selective": the same losses bit for bit, memory between that of no and of full recomputation."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.plain_training import begun, same

KINDS: tuple[Any, ...] = (False, "selective", True)
PLANS = (
    {"data": 2}, {"data": 2, "zero": 3, "precision": "bf16"}, {"data": 2, "zero": 2, "micro_batches": 2},
    {"pipeline": 2, "micro_batches": 2}, {"tensor": 2}, {"tensor": 2, "zero": 1},
    {"data": 2, "swap": "memory"},
)  # fmt: skip


class Dropped(models.Block):
    """Attention and dropout draw; what is not computed again must not shift what is."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            one(y).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        x = x + functional.dropout(self.out_proj(mixed.transpose(1, 2).flatten(2)), 0.3)
        return x + functional.dropout(self.fc2(functional.gelu(self.fc1(self.norm2(x)))), 0.3)


def dropped() -> nn.Module:
    model = models.gpt()
    for index in range(1, 5):
        model[index] = Dropped()
    return model


def losses(make: Any, loss: Any = models.token_loss, batches: Any = None, **plan: Any) -> list[float]:
    run = begun(up.Plan(**plan), make, loss)
    return [run.step(batch) for batch in run.shard(batches or models.text_batches(3, 8))]


def check_losses_are_the_same_bits(folder: Path) -> None:
    for plan in PLANS:
        for make in (models.gpt, dropped):
            if make is dropped and "tensor" in plan:
                continue
            wanted, *found = (losses(make, recompute=kind, **plan) for kind in KINDS)
            assert found == [wanted, wanted], (plan, make, wanted, found)
    images = models.image_batches(3, 8)
    wanted, *found = (
        losses(models.conv, functional.cross_entropy, images, recompute=kind, data=2) for kind in KINDS
    )
    assert found == [wanted, wanted]


def check_losses_are_those_of_one_process(folder: Path) -> None:
    for plan in (up.Plan(data=2, recompute="selective"), up.Plan(tensor=2, zero=1, recompute="selective")):
        same(plan, models.gpt, models.text_batches(3, 8), models.token_loss)


class _Heap(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ["arena", "ord", "smb", "hb", "hbytes", "us", "fsm", "used", "free", "keep"]
    )


def heap_bytes() -> int:
    """Bytes that the program has allocated and not freed."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Heap
    found = ask()
    return int(found.used + found.hbytes)


def wide() -> nn.Module:
    width = 256

    def block() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Sigmoid(),
            nn.Linear(4 * width, width),
        )  # fmt: skip

    return nn.Sequential(*(block() for _ in range(6)), nn.Linear(width, 4))


def check_memory_lies_between(folder: Path) -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("glibc before 2.33 does not tell")
    x, y = torch.randn(1024, 256), torch.randint(4, (1024,))
    held = []
    for kind in KINDS:
        seen: list[int] = []

        def loss(output: Tensor, targets: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(heap_bytes())  # the activations are there
            return functional.cross_entropy(output, targets)

        run = begun(up.Plan(data=2, recompute=kind), wide, loss)
        (batch,) = run.shard([(x, y)])
        run.step(batch)
        before = heap_bytes()
        run.step(batch)
        held.append(seen[-1] - before)
    print("MB of activations: none, selective, full", [round(nbytes / 1e6, 1) for nbytes in held], flush=True)
    none, selective, full = held
    assert full * 1.5 < selective < none / 1.5, held
