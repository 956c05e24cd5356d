"""Random programs with their batches, and what one process makes of them."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from model_fuzz.operators import DOWN, MIDDLE, OPERATORS, UP
from model_fuzz.writer import POSITIONS, ROWS, WIDTH, WORDS, Writer, module_of
from unisono.parallel.graph.containers import mapped

STEPS = 2
Choice = tuple[str, int]
# name -> (ranks, plan, whether each row has to be computed by itself)
PLANS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "tensor": (2, {"tensor": 2}, False),
    "sequence": (2, {"tensor": 2, "sequence": True}, False),
    "tensor recompute": (2, {"tensor": 2, "recompute": True}, False),
    "tensor micro": (2, {"tensor": 2, "micro_batches": 2}, True),
    "zero": (2, {"data": 2, "zero": 3}, True),
    "zero recompute": (2, {"data": 2, "zero": 2, "recompute": True, "micro_batches": 2}, True),
    "pipeline": (2, {"pipeline": 2, "micro_batches": 2}, True),
    "context": (2, {"context": 2}, True),
    "tensor 3": (3, {"tensor": 3}, False),
    "tensor zero": (4, {"tensor": 2, "data": 2, "zero": 3}, True),
    "tensor pipeline": (4, {"tensor": 2, "pipeline": 2, "micro_batches": 2}, True),
    "tensor context": (4, {"tensor": 2, "context": 2}, True),
    "tensor 4": (4, {"tensor": 4}, False),
    "pipeline zero": (4, {"pipeline": 2, "data": 2, "zero": 1, "micro_batches": 2}, True),
}
SHARES = (10, 6, 1, 2, 1, 1, 4, 4, 3, 2, 2, 2, 2, 1)


@dataclass(frozen=True)
class Case:
    """A program under a plan. dropped: the choices of the seed that are left out."""

    seed: int
    plan: str
    dropped: tuple[int, ...] = ()


@dataclass
class Program:
    """A program that runs. `loss` is None: it computes its own."""

    source: str
    inputs: Any
    targets: Tensor | None
    loss: Any
    kinds: list[str]
    rows: bool

    def batch(self) -> tuple[Any, Any]:
        return (self.inputs, self.targets) if self.loss is not None else self.inputs

    def model(self) -> nn.Module:
        return module_of(self.source)


@dataclass
class Trained:
    """What came of two steps."""

    losses: list[float]
    norm: float
    state: dict[str, Tensor]


def case_of(seed: int, plans: tuple[str, ...] = tuple(PLANS)) -> Case:
    """The case of a seed."""
    shares = [share for name, share in zip(PLANS, SHARES, strict=True) if name in plans]
    return Case(seed, random.Random(f"plan {seed}").choices(plans, shares)[0])


def choices_of(seed: int) -> list[Choice]:
    """The operators of a seed."""
    rng, found = random.Random(seed), list[str]()

    def some(table: dict[str, tuple[Any, float]], count: int = 1) -> list[str]:
        return rng.choices(list(table), [weight for _, weight in table.values()], k=count)

    found += some(MIDDLE, rng.randrange(2))
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        found += [
            *some(UP),
            *some(MIDDLE, rng.choice((0, 1, 1, 2, 2, 3, 4))),
            *some(DOWN),
            *some(MIDDLE, rng.choice((0, 0, 1))),
        ]
    return [(name, rng.randrange(10**6)) for name in found]


def program_of(case: Case) -> Program | None:
    """The program of a case; None: there is none, such as without parameters."""
    rng, rows = random.Random(f"program {case.seed}"), PLANS[case.plan][2]
    generator = torch.Generator().manual_seed(case.seed)
    inputs = _inputs(rng.random(), generator)
    writer = Writer(inputs, rows)
    choices = choices_of(case.seed)
    if not any(value.is_floating_point() for value in inputs.values()):
        choices = [("embedding", case.seed), *choices]
    torch.manual_seed(case.seed)
    for place, (name, seed) in enumerate(choices):
        if place not in case.dropped:
            writer.write(name, OPERATORS[name], seed)
    return _ended(writer, rng, generator)


def _inputs(share: float, generator: torch.Generator) -> dict[str, Tensor]:
    floats = torch.randn(ROWS, POSITIONS, WIDTH, generator=generator)
    ids = torch.randint(WORDS, (ROWS, POSITIONS), generator=generator)
    if share < 0.55:
        return {"x1": floats}
    if share < 0.75:
        return {"x1": ids}
    if share < 0.85:
        return {"x1": floats, "x2": ids}
    if share < 0.93:
        return {"x1": floats.flatten(1)[:, :12].contiguous()}
    return {"x1": torch.randn(ROWS, 4, 4, 4, generator=generator)}


def _ended(writer: Writer, rng: random.Random, generator: torch.Generator) -> Program | None:
    """Choose the output and the loss."""
    names = [name for name in writer.floats() if name not in writer.inputs]
    good = [name for name in names if writer.shape(name)[:1] == [ROWS] and len(writer.shape(name)) > 1]
    if not names or (writer.rows and not good):
        return None
    last = good[-1] if good and (writer.rows or rng.random() < 0.7) else names[-1]
    shape, kind = writer.shape(last), rng.random()
    targets: Tensor | None = torch.randn(shape, generator=generator)
    loss: Any = mean_square
    output = last
    if kind < 0.25 or last not in good:
        output, targets, loss = f'{{"loss": ({last} - 0.3).square().mean(), "out": {last}}}', None, None
    elif kind < 0.5:
        targets, loss = torch.randint(shape[-1], shape[:-1], generator=generator), entropy
    source = writer.source(output, writer.parts(rng) if rng.random() < 0.7 else [])
    inputs = next(iter(writer.inputs.values())) if len(writer.inputs) == 1 else tuple(writer.inputs.values())
    if loss is None:
        inputs = dict(writer.inputs)
    found = Program(source, inputs, targets, loss, [each.kind for each in writer.statements], writer.rows)
    return found if not writer.rows or by_row(found) else None


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def entropy(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def by_row(program: Program) -> bool:
    """Whether each half of the rows gives its half of the output, and leaves the same buffers."""
    found = []
    for rows in (slice(None), slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
        model = program.model()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                output = called(model, mapped(program.inputs, lambda tensor, rows=rows: tensor[rows]))
        except (RuntimeError, IndexError, ValueError):
            return False
        found.append((output["out"] if isinstance(output, dict) else output, [*model.buffers()]))
    (whole, buffers), *halves = found
    for part, (half, others) in zip(whole.chunk(2), halves, strict=True):
        if half.shape != part.shape or not torch.allclose(half, part, rtol=1e-9, atol=1e-9):
            return False
        if not all(torch.equal(a, b) for a, b in zip(buffers, others, strict=True)):
            return False
    return True


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def alone(program: Program) -> Trained | None:
    """Train in one process. None: it does not train, or its gradients are too large to compare."""
    model = program.model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return None
    optimizer, losses, norm = sgd(parameters), [], 0.0
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            output = called(model, program.inputs)
            loss = output["loss"] if program.loss is None else program.loss(output, program.targets)
            loss.backward()
            for parameter in parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
            here = float(torch.nn.utils.clip_grad_norm_(parameters, 1e9))
            norm = norm if step else here
            if not 1e-9 < here < 50:
                return None
            optimizer.step()
            losses.append(float(loss))
    except RuntimeError:  # such as backward through what was written in place
        return None
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    finite = all(bool(value.isfinite().all()) for value in state.values())
    return Trained(losses, norm, state) if finite and all(abs(x) < 1e4 for x in losses) else None


def under(program: Program, plan: dict[str, Any]) -> tuple[Trained, up.Run]:
    """Train by a plan on all ranks. The state is there on rank 0 only."""
    sample = program.inputs
    run = up.parallelize(
        program.model(),
        up.Plan(**plan, clip=1e9),
        optimizer=sgd,
        loss=program.loss,
        sample=sample,
        weigh="rows" if program.loss else None,
    )
    losses, norm = [], 0.0
    for step, batch in enumerate(run.shard([program.batch()] * STEPS)):
        losses.append(run.step(batch))
        norm = norm if step else (run.grad_norm or 0.0)
    state = run.state_dict()
    return Trained(losses, norm, state), run


def difference(wanted: Trained, found: Trained, *, whole: bool) -> str:
    """What differs by more than rounding; empty: nothing."""
    for step, (a, b) in enumerate(zip(wanted.losses, found.losses, strict=True)):
        if not abs(a - b) < 1e-8 * max(1.0, abs(a)):
            return f"the loss of step {step} is {b}, expected {a}"
    if not abs(wanted.norm - found.norm) < 1e-8 * max(1.0, wanted.norm):
        return f"the norm of gradients is {found.norm}, expected {wanted.norm}"
    if whole and set(wanted.state) != set(found.state):
        return f"the state has other names: {sorted(set(wanted.state) ^ set(found.state))}"
    for name, value in wanted.state.items() if whole else ():
        far = float((value.double() - found.state[name].double()).abs().max()) if value.numel() else 0.0
        if not far < 1e-8 * max(1.0, float(value.double().abs().max())):
            return f"after {STEPS} steps {name} differs by {far:.1e}"
    return ""
