"""Training in one process by plain PyTorch, beside the same training under a plan: losses, the first norm."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono.parallel as up
from unisono.parallel.gradients import local

Make = Callable[[], nn.Module]
TOLERANCE = 1e-5


class ScopedValue(NamedTuple):
    """What a training showed: the loss of each step, and the norm of the first gradients."""

    losses: list[float]
    norm: float


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def seeded(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def alone(make: Make, batches: Sequence[Any], loss: Any) -> ScopedValue:
    """Train in this process."""
    model, losses, norms = seeded(make), [], []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(trained)
    for inputs, targets in batches:
        optimizer.zero_grad()
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        value = loss(getattr(output, "logits", output), targets)
        value.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1e9).item())
        optimizer.step()
        losses.append(value.item())
    return ScopedValue(losses, norms[0])


def under(
    plan: up.Plan, make: Make, batches: Sequence[Any], loss: Any, **more: Any
) -> tuple[up.Run, ScopedValue]:
    """Train by a plan on all ranks. `pieces`: a function of the model."""
    plan, model = dataclasses.replace(plan, clip=1e9), seeded(make)  # so that the run has the norm
    more |= {"pieces": more["pieces"](model)} if "pieces" in more else {}
    run = up.parallelize(model, plan, optimizer=adamw, loss=loss, **more)
    losses, norms = [], []
    for batch in run.shard(batches):
        losses.append(run.step(batch))
        norms.append(run.grad_norm)
    return run, ScopedValue(losses, norms[0] or 0.0)


def same(plan: up.Plan, make: Make, batches: Sequence[Any], loss: Any, **more: Any) -> up.Run:
    """Assert that a plan trains as one process does, and that the ranks keep the same values."""
    wanted = alone(make, batches, loss)
    run, found = under(plan, make, batches, loss, **more)
    run.close()  # what is swapped comes back
    worst = max(abs(a - b) for a, b in zip(wanted.losses, found.losses, strict=True))
    norm = abs(wanted.norm - found.norm) / max(wanted.norm, 1.0)
    print(f"{plan}: losses {worst:.1e}, norm {norm:.1e}, apart {apart(run):.1e}", flush=True)
    assert worst < TOLERANCE, (plan, found.losses, wanted.losses)
    assert norm < TOLERANCE, (plan, found.norm, wanted.norm)
    assert apart(run) < TOLERANCE, plan
    return run


def same_gradients(plan: up.Plan, make: Make, batch: Any, loss: Any, **more: Any) -> up.Run:
    """Assert that a step of gradient descent moves each parameter under a plan as in one process.

    The values are random, because those of a new model hide mistakes: a norm's weights are all one, a last
    layer is zero.
    """

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    def scattered() -> nn.Module:
        model = seeded(make)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter) * (0.02 + 0.1 * parameter.abs().mean())
        return model

    wanted, moved = scattered(), scattered()
    value = loss(wanted(batch[0]), batch[1])
    value.backward()
    sgd(wanted.parameters()).step()
    run = up.parallelize(scattered(), plan, optimizer=sgd, loss=loss, **more)
    (mine,) = run.shard([batch])
    assert abs(run.step(mine) - float(value)) < TOLERANCE * max(abs(float(value)), 1.0)
    run.copy_to(moved)
    largest = max(float(p.grad.abs().max()) for p in wanted.parameters() if p.grad is not None)
    for (name, one), other in zip(wanted.named_parameters(), moved.parameters(), strict=True):
        assert float((one - other).abs().max()) < 1e-3 * largest, (name, str(run.cut))
    return run


def apart(run: up.Run) -> float:
    """The largest difference between ranks of a tensor or data group in what all of them hold whole."""
    worst = 0.0
    for value in [*run.model.parameters(), *run.model.buffers()]:
        if value.is_meta or hasattr(value, "placements") or not value.is_floating_point():
            continue
        for axis in ("tensor", "shard", "replica"):
            worst = max(worst, spread(local(value).detach(), run.mesh.group(axis)))
    return worst


def spread(value: Tensor, group: Any) -> float:
    """The largest difference between the values of two ranks."""
    most, least = value.clone(), value.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return float((most - least).max()) if most.numel() else 0.0
