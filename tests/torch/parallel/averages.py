"""`up.EMA`: the averages are those of one process under every plan, also in evaluations and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unisono.parallel as up
from effort import swept
from parallel import models
from parallel.fused_saves import Fused
from parallel.fused_saves import batches as vectors
from parallel.plain_training import adamw, begun, seeded

DECAY = 0.8
PLANS = (
    up.Plan(data=2), up.Plan(data=2, zero=1), up.Plan(data=2, zero=3), up.Plan(tensor=2),
    up.Plan(tensor=2, zero=2), up.Plan(pipeline=2, micro_batches=2),
    up.Plan(pipeline=2, micro_batches=2, zero=1),
)  # fmt: skip


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def alone(make: Any, given: Any) -> tuple[nn.Module, AveragedModel]:
    model = seeded(make)
    optimizer = adamw(model.parameters())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    average.update_parameters(model)  # the first call copies
    for x, y in given:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    return model, average


def trained(run: up.Run, given: Any, ema: up.EMA) -> None:
    for batch in run.shard(given):
        run.step(batch)
        ema.update()


def close(found: dict[str, Any], wanted: nn.Module) -> None:
    """On rank 0, which has them."""
    for name, value in found.items():
        torch.testing.assert_close(value, wanted.get_parameter(name), rtol=1e-4, atol=1e-5, msg=name)


def check_averages_are_those_of_one_process(folder: Path) -> None:
    given = models.vector_batches(5, 8)
    model, average = alone(plain, given)
    x, y = given[0]
    wanted = functional.cross_entropy(average(x), y).item()
    plans = swept(PLANS[2::2], (*PLANS[:2], *PLANS[3::2]))
    for number, plan in enumerate(plans):
        run = begun(plan, plain)
        ema = up.EMA(run, DECAY)
        trained(run, given, ema)
        ema.update()  # no step since
        assert ema.updates == 5
        (batch,) = run.shard([(x, y)])
        mine = run.evaluate(batch)
        with ema.applied():
            assert abs(run.evaluate(batch) - wanted) < 1e-5, plan
            close(run.state_dict(), average.module)
            for call in (lambda run=run, batch=batch: run.step(batch), lambda run=run: run.save(folder)):
                with pytest.raises(RuntimeError, match=r"averages are in place.*EMA\.applied"):
                    call()
        assert run.evaluate(batch) == mine, plan  # what was gathered within is gone
        close(run.state_dict(), model)
        run.save(folder / str(number), also={"ema": ema})
    for number, _ in enumerate(plans):  # each is loaded under another plan
        run = begun(plans[number - 2], plain)
        ema = up.EMA(run, DECAY)
        run.load(folder / str(number), also={"ema": ema})
        assert ema.updates == 5
        with ema.applied():
            close(run.state_dict(), average.module)
        if number == 0:
            trained(run, given[:1], ema)
            with ema.applied():
                close(run.state_dict(), alone(plain, [*given, given[0]])[1].module)


def check_shards_stay_shards(folder: Path) -> None:
    """A rank keeps averages of what it holds."""
    total = sum(p.numel() for p in seeded(plain).parameters())
    run = begun(up.Plan(data=2, zero=3), plain)
    held = sum(value.to_local().numel() for value in up.EMA(run).tensors().values())
    assert held <= total / 2 + 16


def check_low_precision_and_frozen_parameters(folder: Path) -> None:
    """Masters and averages are f32; a parameter that was frozen in a checkpoint is its average."""
    given = models.vector_batches(3, 8)
    for zero in (0, 1):
        model = seeded(plain)
        model[0].requires_grad_(False)
        run = up.parallelize(
            model,
            up.Plan(data=2, zero=zero, precision="bf16"),
            optimizer=adamw,
            loss=functional.cross_entropy,
        )
        ema = up.EMA(run, lambda updates: min(DECAY, updates / 10))
        trained(run, given, ema)
        with ema.applied():
            found = run.state_dict()
        assert all(value.dtype == torch.float32 for value in found.values())
        assert "0.weight" not in ema.tensors()
        where = folder / f"frozen {zero}"
        run.save(where, also={"ema": ema})
        other = begun(up.Plan(tensor=2), plain)
        averages = up.EMA(other, DECAY)
        other.load(where, also={"ema": averages})
        with averages.applied():
            again = other.state_dict()
        for name, value in found.items():
            assert torch.equal(value, again[name]), (zero, name, value, again[name])


def check_fused_layers_that_a_plan_splits(folder: Path) -> None:
    given = vectors(3)
    runs = {plan: begun(plan, Fused) for plan in (up.Plan(tensor=2), up.Plan(data=2))}
    for number, (plan, run) in swept([*enumerate(runs.items())][:1], [*enumerate(runs.items())][1:]):
        ema = up.EMA(run, DECAY)
        trained(run, given, ema)
        with ema.applied():
            wanted = run.state_dict()
        where = folder / f"fused {number}"
        run.save(where, also={"ema": ema})
        other = begun(next(one for one in runs if one is not plan), Fused)
        averages = up.EMA(other)
        other.load(where, also={"ema": averages})
        with averages.applied():
            found = other.state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in found.items()), plan


def check_wrong_use_is_named(folder: Path) -> None:
    run = begun(up.Plan(data=2), plain)
    for decay, kind, says in (
        (1.0, ValueError, "decay is 1.0; it must be at least 0 and below 1"),
        (-0.1, ValueError, "decay is -0.1"),
        ("0.9", TypeError, "decay is '0.9', expected a number or a function"),
        (True, TypeError, "decay is True"),
    ):
        with pytest.raises(kind, match=says):
            up.EMA(run, decay)
    with pytest.raises(TypeError, match="run is a Sequential, expected what parallelize returned"):
        up.EMA(run.model)
    with pytest.raises(ValueError, match=r"EMA is not for Plan\(swap='memory'\)"):
        up.EMA(begun(up.Plan(data=2, swap="memory"), plain))
    with pytest.raises(ValueError, match=r"EMA is not for Plan\(local_steps=2\)"):
        up.EMA(begun(up.Plan(data=2, local_steps=2), plain))
    run.save(folder)
    with pytest.raises(ValueError, match="the checkpoint has no 'ema'; it has nothing beside"):
        run.load(folder, also={"ema": up.EMA(run)})
    (batch,) = run.shard(models.vector_batches(1, 8))
    ema = up.EMA(run)
    run.step(batch, update=False)
    with pytest.raises(ValueError, match="1 calls of step"), ema.applied():
        pass
    ema.update()
    assert ema.updates == 0
    run.step(batch)
    with ema.applied(), pytest.raises(RuntimeError, match="averages are in place"), ema.applied():
        pass
