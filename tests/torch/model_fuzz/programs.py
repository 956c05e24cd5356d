"""Random programs with their inputs and losses, and the plans that they train under."""

import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from model_fuzz.tables import DOWN, MIDDLE, OPERATORS, UP
from model_fuzz.writer import POSITIONS, ROWS, WIDTH, WORDS, Writer, module_of

IGNORED = -100  # a label that no loss counts
Choice = tuple[str, int]
# name -> (ranks, plan, whether each row has to be computed by itself, share of the cases)
PLANS: dict[str, tuple[int, dict[str, Any], bool, int]] = {
    "tensor": (2, {"tensor": 2}, False, 10),
    "sequence": (2, {"tensor": 2, "sequence": True}, False, 6),
    "tensor recompute": (2, {"tensor": 2, "recompute": True}, False, 1),
    "tensor selective": (2, {"tensor": 2, "recompute": "selective"}, False, 1),
    "tensor micro": (2, {"tensor": 2, "micro_batches": 2}, True, 2),
    "data": (2, {"data": 2}, True, 1),
    "zero": (2, {"data": 2, "zero": 3}, True, 3),
    "zero recompute": (2, {"data": 2, "zero": 2, "recompute": True, "micro_batches": 2}, True, 1),
    "swap": (2, {"data": 2, "swap": "disk"}, True, 1),
    "expert": (2, {"data": 2, "expert": 2}, True, 1),
    "pipeline": (2, {"pipeline": 2, "micro_batches": 2}, True, 4),
    "zero bubble": (2, {"pipeline": 2, "micro_batches": 4, "schedule": "zb-h1"}, True, 1),
    "context": (2, {"context": 2}, True, 4),
    "tensor 3": (3, {"tensor": 3}, False, 3),
    "tensor data": (4, {"tensor": 2, "data": 2}, True, 2),
    "tensor zero": (4, {"tensor": 2, "data": 2, "zero": 3}, True, 2),
    "tensor pipeline": (4, {"tensor": 2, "pipeline": 2, "micro_batches": 2}, True, 2),
    "tensor context": (4, {"tensor": 2, "context": 2}, True, 2),
    "tensor 4": (4, {"tensor": 4}, False, 2),
    "pipeline zero": (4, {"pipeline": 2, "data": 2, "zero": 1, "micro_batches": 2}, True, 1),
}


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
    weigh: str | None
    kinds: list[str]
    rows: bool

    def model(self) -> nn.Module:
        return module_of(self.source)


def case_of(seed: int, plans: tuple[str, ...] = tuple(PLANS)) -> Case:
    """The case of a seed."""
    shares = [PLANS[name][3] for name in plans]
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
    if "expert" in PLANS[case.plan][1]:
        choices = [*choices, ("experts", case.seed)]
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
    other = rng.choice(good[-4:] or [last])
    output, loss, targets, weigh = _loss(writer, last, other, rng, generator, own=last not in good)
    source = writer.source(output, writer.parts(rng) if rng.random() < 0.7 else [], rng)
    inputs: Any = next(iter(writer.inputs.values()))
    if loss is None:
        inputs = dict(writer.inputs)
    elif len(writer.inputs) > 1:
        inputs = tuple(writer.inputs.values())
    kinds = [each.kind for each in writer.statements]
    found = Program(source, inputs, targets, loss, weigh, kinds, writer.rows)
    return found if not writer.rows or by_row(found, inputs) else None


def _loss(
    writer: Writer, last: str, other: str, rng: random.Random, generator: torch.Generator, *, own: bool
) -> tuple[str, Any, Tensor | None, str | None]:
    """The output as an expression, the loss function, its targets, and what it is a mean over."""
    shape, kind = writer.shape(last), rng.random()
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    ignored = labels.masked_fill(torch.rand(labels.shape, generator=generator) < 0.4, IGNORED)
    ignored.view(-1)[0] = 0
    if kind < 0.3 or own:
        if kind < 0.08 and not own:
            writer.inputs["labels"] = ignored
            made = f"functional.cross_entropy({last}.flatten(0, -2), labels.flatten())"
            return f'{{"loss": {made}, "out": {last}}}', None, None, "tokens"
        forms = (
            f"({last} - 0.3).square().mean()",
            f"functional.smooth_l1_loss({last}, torch.zeros_like({last}))",
            f"{last}.square().sum() / {last}.numel()",
        )
        made = rng.choice(forms)
        if not own and rng.random() < 0.4:
            made += f" + 0.1 * {other}.abs().mean()"
        return f'{{"loss": {made}, "out": {last}}}', None, None, None
    if kind < 0.5:
        return last, entropy, labels, "rows"
    if kind < 0.6:
        return last, entropy, ignored, "tokens"
    targets = torch.rand(shape, generator=generator)
    if kind < 0.7:
        pair = rng.choice((f"{last}, {other}", f'{{"out": {last}, "other": {other}}}'))
        return pair, two_losses, targets, "rows"
    return last, rng.choice((mean_square, mean_square, logistic)), targets, "rows"


def mean_square(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def logistic(output: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(output, targets)


def entropy(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def two_losses(output: Any, targets: Tensor) -> Tensor:
    first, second = outputs_of(output)
    return mean_square(first, targets) + 0.1 * second.abs().mean()


def called(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def outputs_of(output: Any) -> list[Tensor]:
    """The tensors of an output, without its loss."""
    if isinstance(output, Tensor):
        return [output]
    return [v for k, v in output.items() if k != "loss"] if isinstance(output, dict) else [*output]


def by_row(program: Program, inputs: Any) -> bool:
    """Whether each half of the rows gives its half of the outputs, and leaves the same buffers."""
    found = []
    count = len(next(iter(tree_leaves(inputs))))
    for rows in (slice(None), slice(0, count // 2), slice(count // 2, count)):
        model = program.model()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                part = tree_map_only(Tensor, lambda tensor, rows=rows: tensor[rows], inputs)
                output = called(model, part)
        except (RuntimeError, IndexError, ValueError):
            return False
        found.append((outputs_of(output), [*model.buffers()]))
    (wholes, buffers), *halves = found
    for place, (parts, others) in enumerate(halves):
        for whole, part in zip(wholes, parts, strict=True):
            half = whole[: count // 2] if place == 0 else whole[count // 2 :]
            if half.shape != part.shape or not torch.allclose(half, part, rtol=1e-9, atol=1e-9):
                return False
        if not all(torch.equal(a, b) for a, b in zip(buffers, others, strict=True)):
            return False
    return True
