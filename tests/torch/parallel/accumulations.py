"""Gradients of several calls of `step`: the update is that of one process that has all rows at once."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import crossed, swept
from parallel import models
from parallel.plain_training import adamw, alone, apart, begun, seeded
from parallel.run_features import whole

PLANS = (
    up.Plan(data=2), up.Plan(data=2, micro_batches=2), up.Plan(data=2, zero=1), up.Plan(data=2, zero=2),
    up.Plan(data=2, zero=3), up.Plan(tensor=2), up.Plan(tensor=2, zero=1), up.Plan(data=2, swap="memory"),
    up.Plan(pipeline=2, micro_batches=2), up.Plan(pipeline=2, micro_batches=2, zero=3),
    up.Plan(pipeline=2, micro_batches=2, schedule="zb-h1"), up.Plan(data=2, uneven_use=True),
)  # fmt: skip
ON_FOUR = (
    up.Plan(data=4), up.Plan(data=4, zero=2, shard=2), up.Plan(data=4, zero=3, shard=2),
    up.Plan(data=2, tensor=2, zero=2), up.Plan(pipeline=2, data=2, schedule="zbv", micro_batches=2, zero=1),
    up.Plan(pipeline=2, tensor=2, micro_batches=2),
)  # fmt: skip
SIZES = (8, 4, 6)  # rows of the calls of one update


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def calls_of(steps: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Per update its calls."""
    batches = models.vector_batches(steps, sum(SIZES))
    return [list(zip(x.split(SIZES), y.split(SIZES), strict=True)) for x, y in batches]


def trained(run: up.Run, updates: Any, *, between: Any = None) -> list[float]:
    """The mean loss of each update, over all its rows."""
    found = []
    for calls in updates:
        total = count = 0.0
        for number, batch in enumerate(run.shard(calls), 1):
            total += run.step(batch, update=number == len(calls)) * len(calls[number - 1][1])
            count += len(calls[number - 1][1])
            if between is not None and number < len(calls):
                between(run, batch)
        found.append(total / count)
    return found


def check_calls_add_up_to_one_batch(folder: Path) -> None:
    updates = calls_of(4)
    wanted = alone(net, [joined(calls) for calls in updates], functional.cross_entropy)
    for plan in swept(PLANS[1::3], (*PLANS[::3], *PLANS[2::3])) if dist.get_world_size() == 2 else ON_FOUR:
        run = begun(plan, net)
        found = trained(run, updates, between=lambda run, batch: run.evaluate(batch))
        assert run.steps == len(updates)
        run.close()
        worst = max(abs(a - b) for a, b in zip(found, wanted.losses, strict=True))
        assert worst < 1e-5, (plan, found, wanted.losses)
        assert apart(run) < 1e-5, plan


def check_the_norm_and_low_precision(folder: Path) -> None:
    """Clipping sees the norm of the whole; fp16 has one scale, and bf16 accumulates in f32."""
    updates = calls_of(3)
    wanted = alone(net, [joined(calls) for calls in updates], functional.cross_entropy)
    for zero in (0, 1, 2):
        run = begun(up.Plan(data=2, clip=1e9, zero=zero), net)
        trained(run, updates[:1])
        assert abs(run.grad_norm - wanted.norms[0]) < 1e-5, zero
    for zero, precision in crossed((0, 1, 2), ("bf16", "fp16")):
        plan = up.Plan(data=2, precision=precision, zero=zero)
        run = begun(plan, net)
        found = trained(run, updates)
        worst = max(abs(a - b) for a, b in zip(found, wanted.losses, strict=True))
        assert worst < 4e-3, (plan, worst)
        assert run.skipped == 0


def sum_and_count(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return functional.cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()


def check_labels_are_weighed_over_all_calls(folder: Path) -> None:
    updates = calls_of(3)
    for calls in updates:
        calls[0][1][:3] = -100
        calls[2][1][5] = -100
    wanted = alone(net, [joined(calls) for calls in updates], functional.cross_entropy)
    plans = (up.Plan(data=2), up.Plan(data=2, zero=2, micro_batches=2), up.Plan(pipeline=2))
    ways = (("tokens", functional.cross_entropy), ("counted", sum_and_count))
    values = wanted_values(updates)
    for plan, (weigh, loss) in crossed(plans, ways):
        run = begun(plan, net, loss, weigh=weigh)
        trained(run, updates)
        for name, value in whole(run).items():
            torch.testing.assert_close(
                value, values[name], rtol=1e-4, atol=1e-5, msg=f"{plan} {weigh} {name}"
            )
    assert len(wanted.losses) == 3
    run = begun(up.Plan(data=2), net)
    first, second = calls_of(2)[0][1], updates[0][1]
    second[1][:] = -100
    second[1][::2] = 0  # half of the labels, on both ranks
    parts = list(run.shard([first, second]))
    run.step(parts[0], update=False)
    with pytest.raises(ValueError, match="more in some parts than in others"):
        run.step(parts[1])
    run.step(parts[0])  # what was accumulated stays
    assert run.steps == 1


def wanted_values(updates: Any) -> dict[str, Tensor]:
    """The parameters of one process after these updates."""
    model = seeded(net)
    optimizer = adamw(model.parameters())
    for calls in updates:
        optimizer.zero_grad()
        x, y = joined(calls)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return dict(model.named_parameters())


def check_dropout_draws_anew_in_each_call(folder: Path) -> None:
    dropped = nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.5))
    run = up.parallelize(dropped, up.Plan(data=2), optimizer=adamw, loss=functional.cross_entropy)
    (batch,) = run.shard(models.vector_batches(1, 8))
    assert run.step(batch, update=False) != run.step(batch, update=False)


def check_what_waits_is_not_lost_silently(folder: Path) -> None:
    for plan in swept([up.Plan(data=2), up.Plan(data=2, zero=2)], [up.Plan(data=2, zero=1)]):
        run = begun(plan, net)
        (batch,) = run.shard(models.vector_batches(1, 8))
        run.save(folder / str(plan))
        run.step(batch, update=False)
        for call in (run.state_dict, lambda run=run: run.save(folder / "no")):
            with pytest.raises(ValueError, match="1 calls of step.batch, update=False. wait for an update"):
                call()
        with pytest.raises(TypeError, match="update is 1, expected bool"):
            run.step(batch, update=1)
        run.load(folder / str(plan))  # forgets them
        run.step(batch)
        once = whole(run)
        other = begun(plan, net)
        other.step(batch)
        assert all(torch.equal(value, once[name]) for name, value in whole(other).items()), plan
    run = begun(up.Plan(tensor=2), net)
    (batch,) = run.shard(models.vector_batches(1, 8))
    with pytest.raises(ValueError, match="update is True on some ranks and False on others"):
        run.step(batch, update=dist.get_rank() == 0)


def check_a_step_that_raises_leaves_nothing(folder: Path) -> None:
    broken = [False]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        if broken[0]:
            raise ArithmeticError("as asked")
        return functional.cross_entropy(output, targets)

    for plan in swept([up.Plan(data=2), up.Plan(data=2, zero=2)], [up.Plan(data=2, zero=1)]):
        run = begun(plan, net, loss)
        first, second = run.shard(models.vector_batches(2, 8))
        run.step(first, update=False)
        broken[0] = True
        with pytest.raises(ArithmeticError):
            run.step(first, update=False)
        broken[0] = False
        run.step(second)
        other = begun(plan, net, loss)
        other.step(second)
        again = whole(other)
        assert all(torch.equal(value, again[name]) for name, value in whole(run).items()), plan
