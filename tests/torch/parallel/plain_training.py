"""Training in one process by plain PyTorch, beside the same training under a plan."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import unisono.parallel as up

Make = Callable[[], nn.Module]
TOLERANCE = 1e-5
NO_CLIP = 1e9  # a run that clips has the norm
REFUSALS = (ValueError, TypeError, RuntimeError)


class Trained(NamedTuple):
    """What a training showed: each step's loss and the norm of its gradients, and the state in the end."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


_known: deque[tuple[tuple[Any, ...], Trained]] = deque(maxlen=8)  # several plans ask for one training


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any, rate: float = 0.1) -> torch.optim.Optimizer:
    """Whose parameters depend on gradients, not on their signs."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def seeded(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make()


def loss_of(model: nn.Module, batch: Any, loss: Any) -> Tensor:
    """`loss` None: the model's own; one that returns its sum and the count is their mean."""
    if loss is None:
        output = model(**batch)
        return output["loss"]
    inputs, targets = batch
    if isinstance(inputs, dict):
        output = model(**inputs)
    else:
        output = model(*inputs) if type(inputs) is tuple else model(inputs)
    found = loss(getattr(output, "logits", output), targets)
    return found[0] / found[1] if isinstance(found, tuple) else found


def trained(
    make: Make,
    batches: Sequence[Any],
    loss: Any,
    *,
    optimizer: Any = adamw,
    clip: float = NO_CLIP,
    parts: int = 1,
    filled: bool = False,
    before: Any = None,
    schedule: Any = None,
) -> tuple[nn.Module, Trained]:
    """Train in this process. A parameter that is frozen at first is in the optimizer where `before` thaws it.

    Args:
        parts: of a batch, whose losses are averaged.
        filled: a missing gradient is zero.
        before: what is done to the model before each step, a function of the model and the step.
        schedule: makes a scheduler of the optimizer's rates.
    """
    model, losses, norms = seeded(make), [], []
    own = [parameter for parameter in model.parameters() if parameter.requires_grad or before]
    made = optimizer(own)
    scheduler = schedule(made) if schedule else None
    for step, batch in enumerate(batches):
        if before:
            before(model, step)
        made.zero_grad()
        if filled:
            for parameter in own:
                parameter.grad = torch.zeros_like(parameter)
        total = 0.0
        for part in parts_of(batch, parts) if parts > 1 else [batch]:
            value = loss_of(model, part, loss) / parts
            value.backward()
            total += value.item()
        norms.append(nn.utils.clip_grad_norm_(own, clip).item())
        made.step()
        losses.append(total)
        if scheduler:
            scheduler.step()
    return model, Trained(losses, norms, model.state_dict())


def parts_of(batch: Any, parts: int) -> list[Any]:
    if isinstance(batch, dict):
        return [{name: value.chunk(parts)[at] for name, value in batch.items()} for at in range(parts)]
    return list(zip(*(value.chunk(parts) for value in batch), strict=True))


def alone(make: Make, batches: Sequence[Any], loss: Any, **more: Any) -> Trained:
    """As `trained`, once for the plans that are compared with it one after the other."""
    asked = (make, batches, loss, *more, *more.values())
    for known, found in _known:
        if len(known) == len(asked) and all(
            one is other or (isinstance(one, (int, float, str)) and one == other)
            for one, other in zip(known, asked, strict=True)
        ):
            return found
    found = trained(make, batches, loss, **more)[1]
    _known.append((asked, found))
    return found


def begun(
    plan: up.Plan, make: Make, loss: Any = nn.functional.cross_entropy, *, optimizer: Any = adamw, **more: Any
) -> up.Run:
    """A run of a seeded model. `pieces`: a function of the model."""
    model = seeded(make)
    more |= {"pieces": more["pieces"](model)} if callable(more.get("pieces")) else {}
    return up.parallelize(model, plan, optimizer=optimizer, loss=loss, **more)


def under(
    plan: up.Plan, make: Make, batches: Sequence[Any], loss: Any, *, before: Any = None, **more: Any
) -> tuple[up.Run, Trained]:
    """Train by a plan on all ranks; the state is on rank 0, and has what a swap keeps elsewhere."""
    plan = dataclasses.replace(plan, clip=plan.clip or NO_CLIP)

    def prepared() -> nn.Module:
        model = make()
        if before:
            before(model, 0)
        return model

    run = begun(plan, prepared, loss, **more)
    losses, norms = [], []
    for step, batch in enumerate(run.shard(batches)):
        if before:
            before(run.model, step)
        losses.append(run.step(batch))
        norms.append(run.grad_norm or 0.0)
    return run, Trained(losses, norms, {})


def same(
    plan: up.Plan,
    make: Make,
    batches: Sequence[Any],
    loss: Any,
    *,
    state: bool = False,
    tolerance: float = TOLERANCE,
    parts: int = 1,
    filled: bool = False,
    beside: Make | None = None,
    **more: Any,
) -> up.Run:
    """Assert that a plan trains as one process does, and that the ranks keep the same values.

    Later norms amplify rounding, in one process, too: the first counts.

    Args:
        state: whether the parameters and buffers in the end are compared, too.
        beside: the model of one process, where that is another.
    """
    both = {name: more[name] for name in ("optimizer", "before") if name in more}
    wanted = alone(
        beside or make, batches, loss, clip=plan.clip or NO_CLIP, parts=parts, filled=filled, **both
    )
    run, found = under(plan, make, batches, loss, **more)
    values = run.state_dict() if state else {}
    run.close()  # what is swapped comes back
    far = {
        "losses": max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)),
        "norm": abs(wanted.norms[0] - found.norms[0]) / max(wanted.norms[0], 1.0),
        "state": 0.0,
    }
    if state:  # rank 0 has it, and tells the others, which would wait for it otherwise
        told = [far_from(values, wanted.state)]
        dist.broadcast_object_list(told)
        far["state"], where = told[0]
        print(f"the state is farthest at {where}", flush=True)
    between = 0.0 if plan.expert > 1 else apart(run)  # ranks have other experts
    print(plan, far, f"apart {between:.1e}", flush=True)
    assert max(far.values()) < tolerance, (plan, far, found.losses, wanted.losses)
    assert between < TOLERANCE, plan
    return run


def far_from(values: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """The largest distance of two states, and where it is."""
    if other := set(values) ^ set(wanted):
        return math.inf, str(other)
    return max((distance(values[name], value), name) for name, value in wanted.items())


def distance(value: Tensor, wanted: Tensor) -> float:
    if not wanted.is_floating_point() or not wanted.numel():
        return 0.0 if torch.equal(value, wanted) else math.inf
    return ((value - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)).item()


def refused(
    says: str,
    plan: up.Plan,
    make: Make,
    batches: Sequence[Any],
    loss: Any = nn.functional.cross_entropy,
    *,
    error: Any = REFUSALS,
    **more: Any,
) -> None:
    """All ranks raise, at the latest in a step over `batches`."""
    with pytest.raises(error, match=says) as caught:
        under(plan, make, batches, loss, **more)
    print(caught.value, flush=True)


def same_gradients(plan: up.Plan, make: Make, batch: Any, loss: Any, **more: Any) -> up.Run:
    """Assert that a step of gradient descent moves each parameter under a plan as in one process.

    The values are random, because those of a new model hide mistakes: a norm's weights are all one, a last
    layer is zero.
    """

    def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    def scattered() -> nn.Module:
        model = seeded(make)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter) * (0.02 + 0.1 * parameter.abs().mean())
        return model

    wanted, moved = scattered(), scattered()
    value = loss_of(wanted, batch, loss)
    value.backward()
    plain_sgd(wanted.parameters()).step()
    run = up.parallelize(scattered(), plan, optimizer=plain_sgd, loss=loss, **more)
    (mine,) = run.shard([batch])
    assert abs(run.step(mine) - float(value)) < TOLERANCE * max(abs(float(value)), 1.0)
    run.copy_to(moved)
    largest = max(float(p.grad.abs().max()) for p in wanted.parameters() if p.grad is not None)
    for (name, one), other in zip(wanted.named_parameters(), moved.parameters(), strict=True):
        assert float((one - other).abs().max()) < 1e-3 * largest, (name, str(run.cut))
    return run


def local(value: Tensor) -> Tensor:
    """This rank's part."""
    return value.to_local() if isinstance(value, DTensor) else value


def apart(run: up.Run) -> float:
    """The largest difference between ranks of a tensor or data group in what all of them hold whole."""
    worst = 0.0
    for value in [*run.model.parameters(), *run.model.buffers()]:
        if value.is_meta or isinstance(value, DTensor) or not value.is_floating_point():
            continue
        for axis in ("tensor", "shard", "replica"):
            worst = max(worst, spread(value.detach(), run.mesh.group(axis)))
    return worst


def spread(value: Tensor, group: Any) -> float:
    """The largest difference between the values of two ranks."""
    most, least = value.clone(), value.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return float((most - least).max()) if most.numel() else 0.0
