"""Plan(sequence=True) with the other axes. On four ranks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import unisono.parallel as up
from parallel import models, sequences, sweep
from parallel.plain_training import adamw, alone, same, seeded, under
from parallel.program_stages import Shared, batches, loss
from parallel.run_features import in_group


def check_data_and_zero(folder: Path) -> None:
    given = models.text_batches(3, 8)
    for more in (
        {},
        {"zero": 1, "micro_batches": 2},
        {"zero": 2, "recompute": True},
        {"zero": 3},
        {"zero": 3, "recompute": True, "micro_batches": 2},
    ):
        plan = up.Plan(tensor=2, data=2, sequence=True, **more)
        run = same(plan, models.gpt, given, models.token_loss, sample=given[0][0])
        assert "4.fc2" in sequences.moves(run, "scatter"), str(run.cut)
        if sweep.HAVE_TRANSFORMERS:
            same(plan, models.llama, given, models.token_loss, sample=given[0][0])


def check_pipelines(folder: Path) -> None:
    given = models.text_batches(3, 8)
    for more in ({}, {"schedule": "zb-h1"}, {"schedule": "interleaved"}, {"recompute": True, "zero": 1}):
        plan = up.Plan(tensor=2, pipeline=2, sequence=True, micro_batches=2, **more)
        run = same(plan, models.gpt, given, models.token_loss, sample=given[0][0])
        assert "4.fc2" in sequences.moves(run, "scatter"), str(run.cut)
        if sweep.HAVE_TRANSFORMERS:
            same(plan, models.gpt2, given, models.token_loss, sample=given[0][0])
    ids = [(inputs["ids"], targets) for inputs, targets in batches()]
    for more in ({}, {"recompute": True}):
        plan = up.Plan(tensor=2, pipeline=2, sequence=True, micro_batches=2, **more)
        same(plan, Shared, ids, loss, sample=ids[0][0])


def check_four_tensor_ranks(folder: Path) -> None:
    given = models.text_batches(3, 4)
    plan = up.Plan(tensor=4, sequence=True)
    run = same(plan, models.gpt, given, models.token_loss, sample=given[0][0], check=True)
    assert "4.fc2" in sequences.moves(run, "scatter"), str(run.cut)
    wanted = alone(models.gpt, given, models.token_loss).losses
    for precision in ("bf16", "fp16"):
        plan = up.Plan(tensor=2, data=2, sequence=True, zero=3, precision=precision)
        run, (found, *_) = under(plan, models.gpt, given, small, sample=given[0][0])
        assert run.skipped == 0
        torch.testing.assert_close(found, [x * 1e-3 for x in wanted], atol=1e-4, rtol=0)


def small(output: Any, targets: Tensor) -> Tensor:
    """Without an overflow in fp16, which would skip a step."""
    return models.token_loss(output, targets) * 1e-3


def check_checkpoints(folder: Path) -> None:
    given = models.text_batches(4, 8)
    plan = up.Plan(tensor=2, data=2, sequence=True, zero=1)
    run, seen = under(plan, models.gpt, given[:2], models.token_loss, sample=given[0][0])
    run.save(folder / "saved")
    other = up.parallelize(seeded(models.gpt), up.Plan(data=4), optimizer=adamw, loss=models.token_loss)
    other.load(folder / "saved")
    losses = [other.step(batch) for batch in other.shard(given[2:])]
    again = [run.step(batch) for batch in run.shard(given[2:])]
    assert max(abs(a - b) for a, b in zip(losses, again, strict=True)) < 1e-5
    wanted = alone(models.gpt, given, models.token_loss).losses
    assert max(abs(a - b) for a, b in zip([*seen.losses, *again], wanted, strict=True)) < 1e-5


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
