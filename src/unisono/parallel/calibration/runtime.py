"""Measures what the runtime of a plan takes beside its operators, on two ranks.

Each figure is a difference: a chain of tiny layers under a plan, less the same chain in a plain loop; or of
a long chain less a short one. The chains take turns: the machine may become faster or slower meanwhile.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from unisono.engine.costs.machine import recall
from unisono.engine.environment import env
from unisono.parallel.calibration.reference_models import mean_of_ranks, timed
from unisono.parallel.costs.collectives import CollectiveCosts
from unisono.planner.compute_calibration import RuntimeCosts

SHORT, LONG = 4, 16
WIDTH, WIDE, ROWS = 16, 512, 8
WARM, ROUNDS = 2, 12
TURNS, STEPS = 30, 4
LEAST_SECONDS, LEAST_BYTE_SECONDS = 1e-7, 1e-12


class LayerChain(NamedTuple):
    """A chain of layers and how it trains: under a plan, or in a plain loop."""

    layers: int
    plan: up.Plan | None = None
    parts: int = 1  # micro-batches of the plain loop
    width: int = WIDTH
    update: bool = True  # whether its optimizer takes a step
    dtype: torch.dtype = torch.float32  # of the plain loop
    unit: int = 1  # layers in each piece


REPLICAS, SHARDED = up.Plan(data=2), up.Plan(data=2, zero=1)
MICRO, AGAIN = up.Plan(data=2, micro_batches=4), up.Plan(data=2, recompute=True)
CUT = up.Plan(tensor=2)
LOW = torch.bfloat16
UNITS, UNITS_MICRO = (up.Plan(data=2, zero=1, precision="bf16", micro_batches=each) for each in (1, 4))
"""In low precision each piece is a unit, however small it is."""

FEW, MANY = (up.Plan(pipeline=2, micro_batches=each) for each in (4, 8))
HALVES = tuple(LayerChain(SHORT // 2, parts=each, update=False) for each in (4, 8))
"""What a rank of the pipelines computes."""

CHAINS = (
    *(LayerChain(layers, plan) for plan in (None, REPLICAS, SHARDED, AGAIN, CUT) for layers in (SHORT, LONG)),
    *(LayerChain(layers, plan) for plan in (UNITS, UNITS_MICRO) for layers in (SHORT, LONG)),
    *(LayerChain(LONG, plan, unit=LONG // SHORT) for plan in (UNITS, UNITS_MICRO)),
    *(LayerChain(layers, parts=parts, dtype=LOW) for layers in (SHORT, LONG) for parts in (1, 4)),
    *(LayerChain(SHORT, plan) for plan in (MICRO, FEW, MANY)),
    LayerChain(SHORT, parts=4), *HALVES,
    *(LayerChain(SHORT, width=WIDE, update=each) for each in (True, False)),
    LayerChain(SHORT, SHARDED, width=WIDE),
)  # fmt: skip


class Taken(dict[LayerChain, float]):
    """The seconds of a step of each chain."""

    def layer(self, plan: up.Plan, against: up.Plan | None) -> float:
        """One more layer under a plan, beside those under another or in a plain loop."""
        long, short = (
            self[LayerChain(layers, plan)] - self[LayerChain(layers, against)] for layers in (LONG, SHORT)
        )
        return (long - short) / (LONG - SHORT)

    def micro(self, plan: up.Plan, alone: up.Plan) -> float:
        """One more micro-batch under a plan of four, beside a plain loop."""
        more = self[LayerChain(SHORT, plan)] - self[LayerChain(SHORT, alone)]
        return (more - self[LayerChain(SHORT, parts=4)] + self[LayerChain(SHORT)]) / 3

    def unit_and_parameter(self, plan: up.Plan, parts: int = 1) -> tuple[float, float]:
        """One more unit, and one more parameter in a unit, under a plan in 16 bits."""
        many, few = self[LayerChain(LONG, plan)], self[LayerChain(LONG, plan, unit=LONG // SHORT)]
        long, short = (self[LayerChain(layers, parts=parts, dtype=LOW)] for layers in (LONG, SHORT))
        parameter = few - self[LayerChain(SHORT, plan)] - long + short
        return (many - few) / (LONG - SHORT), parameter / (2 * (LONG - SHORT))


def measure_runtime() -> RuntimeCosts:
    """The costs of the runtime; the mean of both ranks."""
    taken = _in_turns(CHAINS)

    short = taken[LayerChain(SHORT, REPLICAS)] - taken[LayerChain(SHORT)]
    parameter = max(LEAST_SECONDS, taken.layer(REPLICAS, None) / 2)
    bucket = _collective()
    replicas = max(LEAST_SECONDS, short - 2 * SHORT * parameter - bucket)
    agree = _agreement()
    unit, low = taken.unit_and_parameter(UNITS)
    found = RuntimeCosts(
        step_s=max(LEAST_SECONDS, replicas - agree),
        agree_s=agree,
        micro_s=taken.micro(MICRO, REPLICAS),
        parameter_s=parameter,
        bucket_s=bucket,
        unit_s=unit,
        unit_parameter_s=max(LEAST_SECONDS, taken.layer(SHARDED, None) / 2),  # such a chain is one unit
        low_parameter_s=low,
        passed_s=(taken.unit_and_parameter(UNITS_MICRO, parts=4)[0] - unit) / 3,
        unit_byte_s=_unit_byte(taken),
        recompute_s=taken.layer(AGAIN, REPLICAS) - _forward(),
        message_s=_message(taken),
        move_s=taken.layer(CUT, None),
    )
    values = (max(each, LEAST_BYTE_SECONDS) for each in msgspec.structs.astuple(found))
    return RuntimeCosts(*mean_of_ranks(values))


def _unit_byte(taken: Taken) -> float:
    """What a byte of a unit takes to be gathered and reduced once, beside the collectives."""
    nbytes = 4.0 * WIDE * (WIDE + 1)
    more = taken[LayerChain(SHORT, SHARDED, width=WIDE)] - taken[LayerChain(SHORT, SHARDED)]
    wide, loop = (taken[LayerChain(SHORT, width=WIDE, update=each)] for each in (True, False))
    collectives = CollectiveCosts(recall(env.read()).calibration, (0, 0))
    moved = sum(collectives.seconds(name, (0, 1), nbytes) for name in ("all_gather", "reduce_scatter"))
    operators = wide - taken[LayerChain(SHORT)] - (wide - loop) / 2  # a rank updates its half
    return (more - operators - SHORT * moved) / (SHORT * nbytes)


def _message(taken: Taken) -> float:
    """A message between stages, at one end: both ends send four more and receive four more."""
    few, many = HALVES
    return (taken[LayerChain(SHORT, MANY)] - taken[LayerChain(SHORT, FEW)] - taken[many] + taken[few]) / 8


def _in_turns(chains: Sequence[LayerChain]) -> Taken:
    """The lower quartile of the seconds of a step of each. Both ranks call this together."""
    steps = {each: _step_of(each) for each in chains}
    found: dict[LayerChain, list[float]] = {each: [] for each in chains}
    for _ in range(TURNS):
        for chain, step in steps.items():
            found[chain] += [timed(step) for _ in range(STEPS)][1:]
    return Taken({chain: statistics.quantiles(seconds, n=4)[0] for chain, seconds in found.items()})


def _step_of(chain: LayerChain) -> Callable[[], object]:
    layers = _layers(chain.layers, chain.width)
    model = nn.Sequential(*(layers[at : at + chain.unit] for at in range(0, chain.layers, chain.unit)))
    if chain.plan is None:
        return _loop(model, chain)
    run = up.parallelize(model, chain.plan, optimizer=_sgd, loss=functional.mse_loss)
    batch = _batch(chain.plan.micro_batches, chain.width)
    return lambda: run.step(batch)


def _loop(model: nn.Module, chain: LayerChain) -> Callable[[], object]:
    x, y = _batch(1, chain.width)
    model, x = model.to(chain.dtype), x.to(chain.dtype)
    optimizer = _sgd(model.parameters())

    def step() -> None:
        for _ in range(chain.parts):
            functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        if chain.update:
            optimizer.step()
        optimizer.zero_grad()

    return step


def _layers(count: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def _batch(parts: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.ones(ROWS * parts, width), torch.zeros(ROWS * parts, width)


def _least(step: Callable[[], object]) -> float:
    """The least seconds of a step. Both ranks call this together."""
    return min([timed(step) for _ in range(WARM + ROUNDS)][WARM:])


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def _forward() -> float:
    model, (x, _) = _layers(LONG, WIDTH), _batch(1, WIDTH)
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
