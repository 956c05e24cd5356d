"""Programs on the tensor axis that change between steps; losses that look into the model. On two ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.models import Pair
from parallel.plain_training import begun, refused, same, under
from parallel.rows import VECTORS, variant
from parallel.tensor_table import TENSOR, TIMES_TEMP, Tempered, between

LOSS = functional.cross_entropy
X, Y = models.vector_batches(1, 8)[0]


class Kept(Tempered):
    """The loss takes an attribute that the forward leaves behind."""

    def between(self, x: Tensor) -> Tensor:
        self.hidden = x.pow(2)
        return torch.tanh(x * self.temp)


def noted(kind: Any) -> tuple[Any, list[Any]]:
    """A maker, and what it has made."""
    made: list[Any] = []

    def make() -> nn.Module:
        made.append(kind())
        return made[-1]

    return make, made


def check_what_the_loss_takes_beside_the_output(folder: Path) -> None:
    make, kept = noted(Kept)
    same(
        TENSOR, make, VECTORS, lambda o, y: LOSS(o, y) + 0.1 * kept[-1].hidden.mean(), sample=X
    )  # fmt: skip
    make, made = noted(TIMES_TEMP)

    def regularised(output: Tensor, targets: Tensor) -> Tensor:
        return LOSS(output, targets) + 0.1 * made[-1].temp.pow(2)

    says = 'the loss takes the parameter "temp" itself.*Compute it in the forward'
    refused(says, TENSOR, make, VECTORS, regularised, sample=X)
    for plan in (up.Plan(data=2), up.Plan(data=2, micro_batches=2)):
        same(plan, make, VECTORS, regularised)
    make, made = noted(Kept)
    same(TENSOR, make, VECTORS, regularised, sample=X)  # it is whole


def check_a_second_derivative_through_a_cut_is_refused(folder: Path) -> None:
    class Sloped(Pair):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.requires_grad_()
            return super().forward(self.seen)

    make, made = noted(Sloped)

    def penalty(output: Tensor, targets: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.sum(), made[-1].seen, create_graph=True)
        return LOSS(output, targets) + slope.pow(2).mean()

    refused("cut on the tensor ", TENSOR, make, models.vector_batches(2, 8), penalty, sample=X)


class ByStep(Pair):
    """Another program from the third step on."""

    calls, late = 0, False

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.late = self.calls > 2
        return torch.tanh(x.softmax(-1) if self.late else x)


BY_ROWS = between("ByRows", lambda _, x: x.softmax(-1) if len(x) > 6 else x)
BY_CHANCE = between("ByChance", lambda _, x: x.softmax(-1) if random.random() < 0.5 else x)
EVALUATED = variant("Evaluated", Pair, between=lambda model, x: x if model.training else x.softmax(-1))


def check_programs_that_change_during_a_run(folder: Path) -> None:
    run, _ = under(TENSOR, BY_ROWS, [(X[:4], Y[:4])] * 2, LOSS, sample=X[:4])
    assert run.cut.modules["fc2"] == "row"
    with pytest.raises(ValueError, match="this batch runs another program of ByRows"):
        run.step((X, Y))
    run, _ = under(TENSOR, ByStep, [(X, Y)] * 2, LOSS, sample=X)
    with pytest.raises(ValueError, match="this batch runs another program of ByStep"):
        for _ in range(4):
            run.step((X, Y))
    for more in ({"sample": X}, {}):
        refused("Python's random or NumPy|fc2", TENSOR, BY_CHANCE, [(X, Y)], **more)
    begun(up.Plan(tensor=2, micro_batches=2), BY_ROWS, sample=X[:4]).step((X, Y))  # four rows in each part


def check_an_evaluation_that_runs_another_program(folder: Path) -> None:
    run, _ = under(TENSOR, EVALUATED, models.vector_batches(2, 8), LOSS, sample=X)
    assert {"fc1.weight", "fc2.weight"} <= set(run.cut.dims)
    run.model.eval()
    with pytest.raises(
        ValueError, match=r"this batch runs another program of Evaluated .*_softmax needs all"
    ):
        run.evaluate((X, Y))
    run.model.train()
    run.step((X, Y))
    batch = models.text_batches(1, 4)[0]
    run = begun(TENSOR, models.gpt, models.token_loss, sample=batch[0])
    run.model.eval()
    run.evaluate(batch)
