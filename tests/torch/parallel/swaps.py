"""Swapping under a plan: the losses of the same plan without it, bit for bit, and a quarter of the memory."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel import limited, models
from parallel.run_features import Branches, adamw, made, whole


def trained(name: str, plan: up.Plan, steps: int = 3, **more: Any) -> tuple[list[float], up.Run]:
    run = made(name, plan, **more)
    return [run.step(batch) for batch in run.shard(models.CASES[name].batches(steps, 10))], run


def check_swapping_changes_no_bit(folder: Path) -> None:
    for name, swap, plan in (
        ("mlp", "memory", {}),
        ("conv", "disk", {"clip": 0.1}),
        ("tied", str(folder), {"micro_batches": 2, "clip": 0.5}),
        ("gpt", "disk", {"micro_batches": 3, "recompute": True}),
    ):
        wanted, alone = trained(name, up.Plan(data=2, **plan))
        losses, run = trained(name, up.Plan(data=2, swap=swap, **plan))
        assert losses == wanted, (name, plan, losses, wanted)
        assert run.grad_norm == alone.grad_norm
        assert all(p.untyped_storage().nbytes() == 0 for p in run.model.parameters())
        (batch,) = run.shard(models.CASES[name].batches(1, 10))
        assert run.evaluate(batch) == alone.evaluate(batch)
        run.close()
        for key, value in whole(alone).items():
            assert torch.equal(run.model.get_parameter(key), value), key


def check_ranks_that_swap_may_use_different_parameters(folder: Path) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
    x[0, 0], x[4, 0] = 1.0, -1.0  # the first half goes left, the second right
    batch = (x, x[:, :4].argmax(1))
    results = []
    for swap in (None, "disk"):
        torch.manual_seed(0)
        plan = up.Plan(data=2, uneven_use=True, swap=swap)
        run = up.parallelize(Branches(), plan, optimizer=adamw, loss=functional.cross_entropy)
        results.append([run.step(part) for part in run.shard([batch] * 3)])
    assert results[0] == results[1]
    torch.manual_seed(0)
    plan = up.Plan(data=2, swap="disk")
    run = up.parallelize(Branches(), plan, optimizer=adamw, loss=functional.cross_entropy)
    (part,) = run.shard([batch])
    with pytest.raises(RuntimeError, match=r"has a gradient on 50% .*uneven_use=True"):
        run.step(part)
    assert run.steps == 0


def check_a_checkpoint_of_a_run_that_swaps(folder: Path) -> None:
    case, plans = models.CASES["tied"], (up.Plan(data=2, swap="disk"), up.Plan(data=2, zero=2))
    others = (plans[::-1], (plans[0], up.Plan(data=2, swap="memory")))
    for first, then in swept([plans], others):
        here = folder / f"{first.swap} {then.swap}"
        one, other = made("tied", first), made("tied", then)
        batches = list(one.shard(case.batches(4, 8)))
        for batch in batches[:2]:
            one.step(batch)
        one.save(here)
        dist.barrier()
        other.load(here)
        for batch in batches[2:]:
            assert abs(one.step(batch) - other.step(batch)) < 1e-5, (first, then)
        assert other.steps == 4


def check_four_times_the_memory_allowed(folder: Path) -> None:
    """Each of two ranks trains what it could not hold."""

    def losses(layers: int, swap: str | None, megabytes: float | None = None) -> list[float]:
        plan = up.Plan(data=2, swap=swap)
        model = limited.model(layers)
        run = up.parallelize(model, plan, optimizer=limited.optimizer, loss=functional.mse_loss)
        if megabytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limited.virtual_bytes() + int(megabytes * 1e6), most))
        try:
            return [run.step(batch) for batch in run.shard([(x, x) for x in limited.batches()])]
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

    limited.give_freed_memory_back()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    losses(2, "disk")  # libraries and threads come first
    wanted = losses(limited.LAYERS, None)
    assert losses(limited.LAYERS, "disk", limited.STATE_MB / 4) == wanted
    # the second: no room for the stack of a thread
    with pytest.raises((MemoryError, OSError, RuntimeError), match="memory|Resource temporarily unavailable"):
        losses(limited.LAYERS, None, limited.STATE_MB / 4)
