"""Compressed gradients where data ranks share, and in low precision: `check_*(rank, size)`, run by worker.py.

The reference is the same compression with zero=0, where no rank has a part of anything.
"""

import itertools
import math
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unisono.parallel as up
from effort import crossed
from parallel import models

LOW = up.PowerSGD(rank=2, factors="f32", start=2)


def losses(rank: int, size: int, *, steps: int = 8, make: Any = None, **plan: Any) -> tuple[list[float], Any]:
    case = models.CASES["gpt"]
    make = make or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    run = up.parallelize(models.make("gpt"), up.Plan(data=size, **plan), optimizer=make, loss=case.loss)
    return [run.step((x[rank::size], y[rank::size])) for x, y in case.batches(steps, 4 * size)], run


def check_zero_is_that_of_whole_gradients(rank, size):
    for settings in (LOW, up.PowerSGD(rank=2, start=0, errors="1-6-9"), up.Compressed("int8", start=1)):
        wanted, first = losses(rank, size, compression=settings)
        values, buffers = first.state_dict(), first.compression.buffers()
        for zero in (1, 2, 3):
            found, run = losses(rank, size, compression=settings, zero=zero)
            assert found == pytest.approx(wanted, rel=2e-4), (settings, zero)
            assert run.compression.choices == first.compression.choices
            for name, value in run.state_dict().items():
                torch.testing.assert_close(value, values[name], rtol=2e-2, atol=2e-4)
            assert run.compression.buffers().keys() == buffers.keys()
            assert all(run.compression.buffers()[key].shape == one.shape for key, one in buffers.items())


def check_low_precision_and_shards(rank, size):
    for precision, zero in itertools.product(("bf16", "fp16"), (0, 1, 3)):
        plain, _ = losses(rank, size, precision=precision, zero=zero)
        found, run = losses(rank, size, precision=precision, zero=zero, compression=LOW)
        assert run.compression.memory() > 0
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in run.trained.values())
        assert found[:2] == pytest.approx(plain[:2], rel=1e-5)
        if zero == 0:
            wanted = found
        assert found == pytest.approx(wanted, rel=5e-3), (precision, zero)
        assert run.skipped == 0
