"""`run.backward` and `run.update` beside `run.step`, and calls that do not go together."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono.parallel as up
from effort import crossed, swept
from parallel.own_loops import BATCHES, LOSS, PLANS, net, sgd
from parallel.plain_training import seeded
from unisono.errors import Mismatch


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


def made(plan: up.Plan, make: Callable[[], nn.Module] = net, optimizer: Any = sgd) -> up.Run:
    return up.parallelize(seeded(make), plan, optimizer=optimizer, loss=LOSS, weigh="rows")


def mine(rows: int = 8) -> Any:
    """This rank's rows of so many."""
    return tuple(values[:rows].tensor_split(2)[dist.get_rank()] for values in BATCHES[0])


def loss_of(run: up.Run, rows: int = 8) -> Tensor:
    x, y = mine(rows)
    return LOSS(run.model(x), y)


def check_a_step_is_backward_and_update(folder: Path) -> None:
    """Bit for bit, with all that a plan does beside."""
    more: list[dict[str, Any]] = [
        {},
        {"clip": 0.1},
        {"zero": 1, "clip": 0.1},
        {"zero": 3, "precision": "fp16", "clip": 0.1},
        {"precision": "bf16"},
        {"zero": 2, "recompute": True, "uneven_use": True},
        {"sync_batch_norm": True, "zero": 1},
        {"buffers": "first"},
    ]
    for settings in swept(more[3::2], [*more[:3], *more[4::2]]):
        plan = up.Plan(data=2, **settings)
        one, other = made(plan, normed), made(plan, normed)
        for x, y in one.shard(BATCHES):
            wanted = one.step((x, y))
            other.backward(LOSS(other.model(x), y), rows=len(x))
            found = float(other.update())
            assert abs(found - wanted) < 1e-12, (plan, found, wanted)
            assert (one.grad_norm, one.skipped, one.steps) == (other.grad_norm, other.skipped, other.steps)
        there = other.state_dict()
        for name, value in one.state_dict().items():
            assert torch.equal(value, there[name]), (plan, name)
        other.step((x, y))  # both kinds of loop in one run


WRONG: dict[str, Callable[[up.Run], object]] = {
    "update: gradients of step.* Call step.batch. first": lambda run: (
        run.step(mine(), update=False),
        run.update(),
    ),
    "backward: gradients of step.* Call step.batch. first": lambda run: (
        run.step(mine(), update=False),
        run.backward(loss_of(run)),
    ),
    "step: gradients of backward.* Call run.update.. first": lambda run: (
        run.backward(loss_of(run)),
        run.step(mine()),
    ),
    "save: 1 calls of backward": lambda run: (run.backward(loss_of(run)), run.save("never")),
    r"have \[4.0, 3.0\] rows": lambda run: run.backward(loss_of(run, 7)),
    "rows is 0": lambda run: run.backward(loss_of(run), rows=0),
    "on all ranks": lambda run: run.backward(loss_of(run), rows=4 if dist.get_rank() else None),
    "comes to no parameter of this run": lambda run: run.backward(loss_of(made(up.Plan(data=2)))),
    "requires no gradient": lambda run: run.backward(loss_of(run).detach()),
    "expected one: the mean": lambda run: run.backward(loss_of(run).expand(2)),
    "that is in no run": lambda run: run.backward(loss_of(run) * nn.Parameter(torch.ones(()))),
    "update: no run.backward": lambda run: run.update(lambda: loss_of(run)),
}


def check_wrong_calls_are_named_on_all_ranks(folder: Path) -> None:
    plans = (PLANS[0], PLANS[-1])
    for (text, wrong), plan in crossed([*WRONG.items()], plans):
        run = made(plan)
        with pytest.raises(ValueError, match=text):
            wrong(run)
        if "step" not in text and "save" not in text:  # the run can be used
            run.backward(loss_of(run))
            run.update()
    for plan in plans:
        with pytest.raises(ValueError, match=r"LBFGS.step needs a closure .* not in fp16"):
            made(up.Plan(data=2, precision="fp16"), optimizer=torch.optim.LBFGS)
        needs = made(plan, optimizer=torch.optim.LBFGS)
        with pytest.raises(ValueError, match=r"LBFGS.step needs a closure .* Use run.update"):
            needs.step(mine())
        needs.backward(loss_of(needs))
        with pytest.raises(TypeError, match=r"LBFGS.step needs a closure: run.update"):
            needs.update()


def check_ranks_that_call_different_things(folder: Path) -> None:
    calls: list[Callable[[up.Run, Any], object]] = [
        lambda run, batch: run.backward(LOSS(run.model(batch[0]), batch[1])),
        lambda run, batch: run.update(),
        lambda run, batch: run.evaluate(batch),
    ]
    for plan, (one, other) in crossed((PLANS[0], PLANS[-1]), [*itertools.combinations(calls, 2)]):
        run = made(plan)
        batch = mine()
        calls[0](run, batch)
        began = time.monotonic()
        with pytest.raises(Mismatch, match="ranks called different things"):
            (one if dist.get_rank() else other)(run, batch)
        assert time.monotonic() - began < 5  # nobody has waited


def check_what_ranks_would_have_alone(folder: Path) -> None:
    run = made(PLANS[0])
    run.backward(loss_of(run))
    for parameter in run.trained.values():
        parameter.grad.add_(dist.get_rank())  # type: ignore[union-attr]
    run.update()
    run.backward(loss_of(run))
    with pytest.raises(RuntimeError, match='the loop changes the parameter "0.weight"'):
        run.update()
    run, other = made(PLANS[0]), made(PLANS[0])
    run.backward(loss_of(run))
    other.backward(loss_of(other) + loss_of(run))
    with pytest.raises(RuntimeError, match="a backward that is not of this run has added"):
        run.update()


def check_other_plans_are_refused_by_their_fields(folder: Path) -> None:
    for field, value in (
        ("tensor", 2),
        ("pipeline", 2),
        ("context", 2),
        ("micro_batches", 2),
        ("swap", "memory"),
        ("compression", up.PowerSGD(rank=2)),
        ("local_steps", 2),
        ("precision", "autocast"),
    ):
        plan = up.Plan(**({} if value == 2 and field in AXES else {"data": 2}), **{field: value})
        run = made(plan)
        for call in (lambda run=run: run.backward(torch.ones((), requires_grad=True)), run.update):
            with pytest.raises(ValueError, match=f"needs {field}="):
                call()


AXES = ("tensor", "pipeline", "context")
