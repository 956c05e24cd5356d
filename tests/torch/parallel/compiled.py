"""Compiled models: the losses of the same plan without, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono.parallel as up
from parallel import models
from parallel.plain_training import begun

BACKEND = "eager"  # TorchDynamo's part, without minutes of a C++ compiler


def net() -> nn.Module:
    first, second = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
    return nn.Sequential(first, second, nn.Linear(16, 4))


def whole() -> nn.Module:
    model = net()
    model.compile(backend=BACKEND)
    return model


def layers() -> nn.Module:
    model = net()
    for layer in model:
        layer.compile(backend=BACKEND)
    return model


def made(make: Any, **plan: Any) -> up.Run:
    return begun(up.Plan(**plan), make)


def check_losses_are_those_without(folder: Path) -> None:
    batches = models.vector_batches(3, 8)
    for plan, makes in (
        ({"data": 2}, (whole, layers)),
        ({"data": 2, "zero": 3, "precision": "bf16"}, (whole, layers)),
        ({"data": 2, "recompute": "selective"}, (layers,)),
        ({"pipeline": 2, "micro_batches": 2}, (layers,)),
        ({"tensor": 2}, (layers,)),
    ):
        plain = made(net, **plan)
        wanted = [plain.step(batch) for batch in plain.shard(batches)]
        for make in makes:
            torch._dynamo.reset()
            run = made(make, **plan)
            found = [run.step(batch) for batch in run.shard(batches)]
            assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5, (plan, make)
            assert set(run.state_dict()) == set(plain.state_dict())


def check_what_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has other names of parameters.*Write model\.compile"):
        made(lambda: torch.compile(net(), backend=BACKEND), data=2)
    with pytest.raises(ValueError, match="swap='memory'.* frees parameters .*\"0\" is compiled"):
        made(layers, data=2, swap="memory")
    with pytest.raises(ValueError, match=r"never the compiled model itself.*layer\.compile"):
        made(whole, pipeline=2)
