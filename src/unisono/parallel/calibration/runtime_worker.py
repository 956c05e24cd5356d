"""One of two ranks of `unisono calibrate --compute`: what the runtime of a plan takes beside its operators.

    unisono run -n 2 -m unisono.parallel.calibration.runtime_worker FILE

Each figure is a difference: a chain of tiny layers under a plan, less the same chain in a plain loop; or of
a long chain less a short one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from unisono.engine.costs.machine import recall
from unisono.engine.environment import env
from unisono.parallel.calibration.reference_models import clock
from unisono.parallel.calibration.worker import measure_as_rank
from unisono.parallel.costs.collectives import CollectiveCosts
from unisono.planner.compute_calibration import RuntimeCosts

SHORT, LONG = 4, 16
WIDTH, WIDE, ROWS = 16, 512, 8
WARM, ROUNDS = 2, 12
LEAST_SECONDS, LEAST_BYTE_SECONDS = 1e-7, 1e-12


def measure() -> RuntimeCosts:
    """The costs of the runtime; the mean of both ranks."""
    plain = {layers: _plain(layers) for layers in (SHORT, LONG)}
    layers = LONG - SHORT

    def slope(plan: up.Plan, against: Callable[[int], float]) -> float:
        more = _under(plan, LONG) - against(LONG) - _under(plan, SHORT) + against(SHORT)
        return more / layers

    together = up.Plan(data=2)
    short, long = (_under(together, each) - plain[each] for each in (SHORT, LONG))
    with_replicas = {SHORT: short + plain[SHORT], LONG: long + plain[LONG]}
    parameter = max(LEAST_SECONDS, (long - short) / (2 * layers))
    bucket = _collective()
    replicas = max(LEAST_SECONDS, short - 2 * SHORT * parameter - bucket)
    parts = _under(up.Plan(data=2, micro_batches=4), SHORT) - _plain(SHORT, 4)
    micro = (parts - short) / 3
    agree = _agreement()
    step = max(LEAST_SECONDS, replicas - agree)
    sharded = up.Plan(data=2, zero=1)  # such a chain is one unit
    in_unit = max(LEAST_SECONDS, slope(sharded, plain.__getitem__) / 2)
    unit = _under(sharded, SHORT) - plain[SHORT] - 2 * SHORT * in_unit - step - agree
    found = RuntimeCosts(
        step_s=step,
        agree_s=agree,
        micro_s=micro,
        parameter_s=parameter,
        bucket_s=bucket,
        unit_s=unit,
        unit_parameter_s=in_unit,
        unit_byte_s=_unit_byte(),
        recompute_s=slope(up.Plan(data=2, recompute=True), with_replicas.__getitem__) - _forward(),
        message_s=_message(),
        move_s=slope(up.Plan(tensor=2), plain.__getitem__),
    )
    values = torch.tensor(msgspec.structs.astuple(found), dtype=torch.float64).clamp(min=LEAST_BYTE_SECONDS)
    dist.all_reduce(values)
    return RuntimeCosts(*(values / dist.get_world_size()).tolist())


def _unit_byte() -> float:
    """What a byte of a unit takes to be gathered and reduced once, beside the collectives."""
    plan, nbytes = up.Plan(data=2, zero=1), 4.0 * WIDE * (WIDE + 1)
    more = _under(plan, SHORT, WIDE) - _under(plan, SHORT)
    operators = _plain(SHORT, width=WIDE) - _plain(SHORT)
    update = _plain(SHORT, width=WIDE) - _plain(SHORT, width=WIDE, update=False)
    collectives = CollectiveCosts(recall(env.read()).calibration, (0, 0))
    moved = sum(collectives.seconds(name, (0, 1), nbytes) for name in ("all_gather", "reduce_scatter"))
    return (more - operators + update / 2 - SHORT * moved) / (SHORT * nbytes)


def _chain(layers: int, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _batch(parts: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    return torch.ones(ROWS * parts, width), torch.zeros(ROWS * parts, width)


def _least(step: Callable[[], object]) -> float:
    """The least seconds of a step. Both ranks call this together."""
    taken = []
    for _ in range(WARM + ROUNDS):
        dist.barrier()
        began = clock()
        step()
        taken.append(clock() - began)
    return min(taken[WARM:])


def _under(plan: up.Plan, layers: int, width: int = WIDTH) -> float:
    run = up.parallelize(_chain(layers, width), plan, optimizer=_sgd, loss=functional.mse_loss)
    batch = _batch(plan.micro_batches, width)
    return _least(lambda: run.step(batch))


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _plain(layers: int, parts: int = 1, *, width: int = WIDTH, update: bool = True) -> float:
    model, (x, y) = _chain(layers, width), _batch(1, width)
    optimizer = _sgd(model.parameters())

    def step() -> None:
        for _ in range(parts):
            functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        if update:
            optimizer.step()
        optimizer.zero_grad()

    return _least(step)


def _forward() -> float:
    """Forward of a layer."""
    model, (x, _) = _chain(LONG), _batch(1)
    return _least(lambda: model(x)) / LONG


def _collective() -> float:
    """A small collective that is waited for, without what the engine takes."""
    x = torch.zeros(4)
    return _least(lambda: [dist.all_reduce(x, async_op=True).wait() for _ in range(20)]) / 20


def _agreement() -> float:
    """What ranks agree on at the end of a step."""

    def agree() -> list[float]:
        x = torch.tensor([0.0] * 8, dtype=torch.float64)
        dist.all_reduce(x)
        return x.tolist()

    return _least(lambda: [agree() for _ in range(20)]) / 20


def _message() -> float:
    """A message between stages, at one end: both ends send four and receive four."""
    few, many = (_under(up.Plan(pipeline=2, micro_batches=each), SHORT) for each in (4, 8))
    half = _plain(SHORT // 2, 8, update=False) - _plain(SHORT // 2, 4, update=False)
    return (many - few - half) / 8


if __name__ == "__main__":
    measure_as_rank(measure)
