"""Pipelines of models that no rule knows: what a run does beside its steps. On two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono.parallel as up
from effort import swept
from parallel.model_table import DATA, PIPELINE
from parallel.plain_training import begun, refused, same, under
from parallel.stage_table import (
    GIVEN,
    IDS,
    PLACED,
    TIME,
    ZBV,
    Block,
    Placeholders,
    Shared,
    Skips,
    Tuned,
    batches,
    loss,
)


def check_other_shapes_and_evaluation(folder: Path) -> None:
    """Batches of other lengths, fewer rows, and an evaluation run programs of their own."""
    mixed = [*batches(1), *batches(1, time=4), *batches(1, rows=5), *batches(1)]
    run = same(PIPELINE, Skips, mixed, loss, sample=mixed[0][0])
    run.model.eval()
    first = run.evaluate(mixed[1])
    assert first == run.evaluate(mixed[1])
    run.model.train()


def check_checkpoints_have_all_of_it(folder: Path) -> None:
    given = batches(4)
    wanted = same(DATA, Skips, given, loss)
    losses = [wanted.evaluate(one) for one in wanted.shard(given)]
    zero2, zero3 = up.Plan(data=2, zero=2), up.Plan(data=2, zero=3)
    usual = [(ZBV, zero3), (zero2, PIPELINE)]
    more = [(PIPELINE, zero3), (ZBV, PIPELINE), (PIPELINE, PIPELINE), (zero2, zero3)]
    for plan, other in swept(usual, more):
        run, _ = under(plan, Skips, given, loss, sample=given[0][0])
        run.save(folder / str(plan) / str(other))
        again = begun(other, Skips, loss, sample=given[0][0])
        again.load(folder / str(plan) / str(other))
        found = [again.evaluate(one) for one in again.shard(given)]
        assert max(abs(a - b) for a, b in zip(losses, found, strict=True)) < 1e-5, (plan, other)


class Meta(Skips):
    def reset_parameters(self) -> None:
        self.start.data.fill_(0.1)
        self.gain.data.fill_(1.0)
        self.steps.copy_(torch.linspace(0.5, 1.0, TIME).unsqueeze(-1))


def check_a_model_on_the_meta_device(folder: Path) -> None:
    def make() -> nn.Module:
        with torch.device("meta"):
            return Meta()

    results = []
    for plan in (DATA, PIPELINE):
        run = begun(plan, make, loss, seed=3, sample=GIVEN[0][0])
        results.append([run.step(one) for one in run.shard(GIVEN)])
    assert max(abs(a - b) for a, b in zip(*results, strict=True)) < 1e-5, results


def check_what_a_program_checks_about_values(folder: Path) -> None:
    run = begun(PIPELINE, Placeholders, loss, sample=PLACED[0][0])
    few = PLACED[1][0] | {"ids": PLACED[1][0]["ids"].clamp(min=2)}
    with pytest.raises((RuntimeError, ValueError), match="check of the model's own fails|cannot be used"):
        run.step((few, PLACED[1][1]))


class Other(Shared):
    """Shorter rows run another module."""

    def __init__(self) -> None:
        super().__init__()
        self.second = Block()

    def forward(self, ids: Tensor) -> Any:
        x = self.table(ids)
        for _ in range(4):
            block = self.block if ids.shape[1] > 4 else self.second
            x = block(x, scale=torch.ones(()))[0]
        return self.head(x)


def check_a_batch_of_another_program_is_refused(folder: Path) -> None:
    run, _ = under(PIPELINE, Other, IDS[:1], loss, sample=IDS[0][0])
    with pytest.raises(ValueError, match="this batch runs another program"):
        run.step((IDS[0][0][:, :3], IDS[0][1][:, :3]))
    run.step(IDS[0])
    with pytest.raises(ValueError, match="a ndarray among the inputs of Tuned"):
        begun(PIPELINE, Tuned, loss, sample=(IDS[0][0], IDS[0][0].numpy()))


class Apart(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.second = Block()

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.block(self.table(ids), scale=torch.ones(()))
        return self.head(self.second(x, scale=torch.ones(()))[0])


def check_a_loss_that_takes_a_parameter_of_another_stage(folder: Path) -> None:
    made: list[Any] = []

    def make() -> nn.Module:
        made.append(Apart())
        return made[-1]

    def penalty(output: Any, targets: Tensor) -> Tensor:
        return loss(output, targets) + 0.01 * made[-1].block.norm.weight.pow(2).sum()

    refused("which is on another stage of the pipeline", PIPELINE, make, IDS[:1], penalty, sample=IDS[0][0])


def check_ranks_with_different_inputs_are_told(folder: Path) -> None:
    """The rows of the first batches are compared, and the shapes of all."""
    rank = torch.distributed.get_rank()
    for count, says in ((1, "give different rows"), (3, "their inputs have different shapes")):
        run, _ = under(PIPELINE, Shared, IDS[:count], loss, sample=IDS[0][0])
        with pytest.raises(ValueError, match=says):
            run.step((IDS[0][0][:, : 3 + rank], IDS[0][1][:, : 3 + rank]))
