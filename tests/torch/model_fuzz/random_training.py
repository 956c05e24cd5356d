"""How a random program is trained, drawn from its seed; what one process and a plan make of it."""

import random
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import unisono.parallel as up
from model_fuzz.programs import IGNORED, ROWS, Program, by_row, called, outputs_of
from model_fuzz.writer import POSITIONS, WORDS

FAR = 1e-8  # more than rounding, in f64


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        inputs: of all ranks, like `targets`.
        update: False: gradients only add up.
        frozen: names of parameters that this step does not train.
        before: what is computed in eval mode before it: "evaluate", "predict" or "".
    """

    inputs: Any
    targets: Tensor | None
    update: bool
    frozen: frozenset[str]
    before: str


@dataclass(frozen=True)
class Training:
    """The steps of a program, and its optimizers."""

    program: Program
    steps: tuple[Step, ...]
    optimizer: str
    clip: float

    def batch(self, step: Step) -> Any:
        return step.inputs if self.program.loss is None else (step.inputs, step.targets)

    def said(self) -> str:
        """As text, for a reader of a fault."""
        steps = []
        for step in self.steps:
            shapes = [list(x.shape) for x in _tensors(step.inputs)]
            words = [step.before, f"{shapes}", "" if step.update else "update=False"]
            words.append(f"frozen: {', '.join(sorted(step.frozen))}" if step.frozen else "")
            steps.append(" ".join(filter(None, words)))
        loss = self.program.loss.__name__ if self.program.loss else "its own"
        made = f"optimizer: {self.optimizer}  clip: {self.clip}  loss: {loss}  weigh: {self.program.weigh}"
        return "\n".join([made, *(f"step {number}: {text}" for number, text in enumerate(steps))])


@dataclass
class Trained:
    """What came of the steps."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    outputs: list[Any]


def _tensors(inputs: Any) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [inputs]
    return [*(inputs.values() if isinstance(inputs, dict) else inputs)]


def training_of(program: Program, seed: int) -> Training | None:
    """The training of a program; None: it has nothing to train."""
    rng, generator = random.Random(f"training {seed}"), torch.Generator().manual_seed(seed + 1)
    names = [name for name, _ in program.model().named_parameters()]
    if not names:
        return None
    frozen = _frozen(names, rng)
    update = rng.random() < 0.8
    first = Step(program.inputs, program.targets, update, frozen[0], "")
    others = _shapes(program, rng, generator)
    before = rng.choice(("", "", "", "evaluate", "evaluate", "predict"))
    second = replace(first, update=True, frozen=frozen[1] if update else frozen[0], before=before)
    if others is not None:
        second = replace(second, inputs=others[0], targets=others[1])
    steps = [first, second]
    if not update or frozen[1] != frozen[0] or rng.random() < 0.1:
        steps.append(replace(first, update=True, frozen=frozen[1], before=""))
    optimizer = rng.choice(("sgd", "sgd", "groups", "two", "adamw"))
    return Training(program, tuple(steps), optimizer, rng.choice((1e9, 1e9, 1.0, 0.1)))


def _frozen(names: list[str], rng: random.Random) -> tuple[frozenset[str], frozenset[str]]:
    """What the first step and the later ones do not train."""

    def half() -> frozenset[str]:
        found = [name for name in names if rng.random() < 0.5]
        return frozenset(found if len(found) < len(names) else found[1:])

    none, some, other = frozenset[str](), half(), half()
    pairs = ((none, none),) * 6 + ((some, some),) * 2 + ((some, none), (some, other), (none, some))
    return rng.choice(pairs)


def _shapes(
    program: Program, rng: random.Random, generator: torch.Generator
) -> tuple[Any, Tensor | None] | None:
    """Another batch, perhaps of other rows or positions, if the program takes it."""
    rows, positions = rng.choice((ROWS, ROWS, ROWS, 4, 12, 6)), rng.choice((POSITIONS,) * 3 + (4, 8))

    def other(value: Tensor) -> Tensor:
        shape = [rows, *value.shape[1:]]
        if value.dim() > 1 and shape[1] == POSITIONS:
            shape[1] = positions
        if value.is_floating_point():
            return torch.randn(shape, generator=generator)
        if bool((value == IGNORED).any()):
            return _ignored(torch.randint(WORDS, shape, generator=generator), generator)
        return torch.randint(int(value.max()) + 1, shape, generator=generator)

    inputs = tree_map_only(torch.Tensor, other, program.inputs)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = outputs_of(called(program.model(), inputs))[0]
    except (RuntimeError, IndexError, ValueError):
        return None
    if program.rows and not by_row(program, inputs):
        return None
    if program.targets is None:
        return inputs, None
    shape = [*output.shape[: program.targets.dim()]]
    if [*shape[1:]] != [*program.targets.shape[1:]] and positions == POSITIONS:
        return None
    if program.targets.is_floating_point():
        return inputs, torch.rand(shape, generator=generator)
    targets = torch.randint(output.shape[-1], shape, generator=generator)
    return inputs, _ignored(targets, generator) if program.weigh == "tokens" else targets


def _ignored(labels: Tensor, generator: torch.Generator) -> Tensor:
    away = torch.rand(labels.shape, generator=generator) < 0.4
    away.view(-1)[0] = False
    return labels.masked_fill(away, IGNORED)


def optimizers(
    kind: str, named: dict[str, nn.Parameter], known: frozenset[str]
) -> list[torch.optim.Optimizer]:
    """Those of a training. Names tell which of two has a parameter, so ranks and one process agree."""
    if kind == "sgd":
        return [torch.optim.SGD([*named.values()], lr=0.05, momentum=0.9)]
    if kind == "adamw":
        return [torch.optim.AdamW([*named.values()], lr=0.01, eps=1e-2, weight_decay=0.1)]
    parts: list[dict[str, Any]] = [{"params": []}, {"params": [], "lr": 0.02}]
    for name, value in named.items():
        parts[zlib.crc32(plain(name, known).encode()) % 2]["params"].append(value)
    if kind == "groups":
        return [torch.optim.SGD(parts, lr=0.05, momentum=0.9)]
    return [torch.optim.SGD(parts[:1], lr=0.05, momentum=0.9), torch.optim.SGD(parts[1:], lr=0.05)]


def plain(name: str, known: frozenset[str]) -> str:
    """The name of a parameter in the program; a plan may have split a fused layer into several, and those."""
    *path, leaf = name.split(".")
    layers = [".".join(path[:length]) for length in range(len(path), 0, -1)]
    names = (f"{layer}.{kind}{leaf}" for layer in layers for kind in ("", "in_proj_"))
    return next((each for each in (name, *names) if each in known), name)  # "": a rank trains nothing


def freeze(model: nn.Module, names: frozenset[str], known: frozenset[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(plain(name, known) not in names)


def _count(training: Training, step: Step) -> int:
    """What a batch counts beside others."""
    labels = (
        step.inputs["labels"] if training.program.loss is None and training.program.weigh else step.targets
    )
    if training.program.weigh == "tokens":
        assert labels is not None
        return int((labels != IGNORED).sum())
    return len(_tensors(step.inputs)[0])


def _parts(training: Training) -> Iterator[tuple[Step, float]]:
    """Each step, and the share of its loss in the gradient of its update."""
    waiting: list[Step] = []
    for step in training.steps:
        waiting.append(step)
        if step.update:
            whole = sum(_count(training, each) for each in waiting)
            yield from ((each, _count(training, each) / whole) for each in waiting)
            waiting = []


def alone(training: Training) -> Trained | None:
    """Train in one process. None: it does not train, or its gradients are too large to compare."""
    program, model = training.program, training.program.model()
    parameters = dict(model.named_parameters())
    known = frozenset(parameters)
    makers = optimizers(training.optimizer, parameters, known)
    found = Trained([], [], {}, [])

    def loss_of(step: Step) -> Tensor:
        output = called(model, step.inputs)
        return output["loss"] if program.loss is None else program.loss(output, step.targets)  # type: ignore[no-any-return]

    def before(step: Step) -> None:
        model.eval()
        with torch.no_grad():
            if step.before == "evaluate":
                found.losses.append(float(loss_of(step)))
            elif step.before == "predict":
                found.outputs.append(called(model, step.inputs))
        model.train()

    try:
        for step, share in _parts(training):
            freeze(model, step.frozen, known)
            before(step)
            loss = loss_of(step)
            (loss * share).backward()
            for parameter in parameters.values():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
            found.losses.append(float(loss))
            if not step.update:
                continue
            norm = float(torch.nn.utils.clip_grad_norm_([*parameters.values()], training.clip))
            if not 1e-6 < norm < 50:
                return None
            found.norms.append(norm)
            for maker in makers:
                maker.step()
                maker.zero_grad()
    except RuntimeError:  # such as backward through what was written in place
        return None
    found.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    finite = all(bool(value.isfinite().all()) for value in found.state.values())
    return found if finite and all(abs(x) < 1e4 for x in found.losses) else None


def under(training: Training, plan: dict[str, Any]) -> tuple[Trained, up.Run]:
    """Train by a plan on all ranks. The state is there on rank 0 only; outputs are those of a rank's rows."""
    program, model, kind = training.program, training.program.model(), training.optimizer
    known = frozenset(name for name, _ in model.named_parameters())
    freeze(model, training.steps[0].frozen, known)

    def made(given: Any) -> Any:
        found = optimizers(kind, given.named, known)
        return found if kind == "two" else found[0]

    run = up.parallelize(
        model,
        up.Plan(**plan, clip=training.clip),
        optimizer=made,
        loss=program.loss,
        sample=program.inputs,
        weigh=program.weigh,
    )
    found = Trained([], [], {}, [])
    for step in training.steps:
        freeze(run.model, step.frozen, known)
        (batch,) = run.shard([training.batch(step)])
        run.model.eval()
        if step.before == "evaluate":
            found.losses.append(run.evaluate(batch))
        elif step.before == "predict":
            found.outputs.append(run.predict(batch if program.loss is None else batch[0]))
        run.model.train()
        found.losses.append(run.step(batch, update=step.update))
        if step.update:
            found.norms.append(run.grad_norm or 0.0)
    found.state = run.state_dict()
    return found, run


def rows_of_rank(run: up.Run, training: Training) -> list[Tensor | None]:
    """The numbers of this rank's rows, for each prediction; None: all."""
    found: list[Tensor | None] = []
    for step in training.steps:
        if step.before == "predict":
            count = len(_tensors(step.inputs)[0])
            ((mine, _),) = run.shard([(torch.arange(count), torch.arange(count))])
            found.append(mine if len(mine) < count else None)
    return found


def difference(wanted: Trained, found: Trained, rows: list[Tensor | None], *, whole: bool) -> str:
    """What differs by more than rounding; empty: nothing."""
    for what, these, those in (
        ("the loss", wanted.losses, found.losses),
        ("the norm of gradients", wanted.norms, found.norms),
    ):
        for place, (a, b) in enumerate(zip(these, those, strict=True)):
            if not abs(a - b) < FAR * max(1.0, abs(a)):
                return f"{what}, number {place}, is {b}, expected {a}"
    for a, b, mine in zip(wanted.outputs, found.outputs, rows, strict=True):
        for whole_one, part in zip(outputs_of(a), outputs_of(b), strict=True):
            expected = whole_one if mine is None else whole_one[mine]
            if part.shape != expected.shape or not _near(expected, part):
                return f"a prediction differs: {list(part.shape)}, expected {list(expected.shape)}"
    if whole and set(wanted.state) != set(found.state):
        return f"the state has other names: {sorted(set(wanted.state) ^ set(found.state))}"
    for name, value in wanted.state.items() if whole else ():
        if not _near(value, found.state[name]):
            return f"after the last step {name} differs by {(value - found.state[name]).abs().max():.1e}"
    return ""


def _near(wanted: Tensor, found: Tensor) -> bool:
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    wanted, found = wanted.to(wide), found.to(wide)
    if not wanted.numel():
        return True
    return float((wanted - found).abs().max()) < FAR * max(1.0, float(wanted.abs().max()))
