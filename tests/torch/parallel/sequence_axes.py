"""Plan(sequence=True) with the other axes. On four ranks."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import unisono.parallel as up
from parallel import models, sequences, sweep
from parallel.plain_training import alone, begun, under
from parallel.rows import Row
from parallel.stage_table import IDS, Shared, loss


def cuts_gpt(run: up.Run) -> bool:
    return "4.fc2" in sequences.moves(run, "scatter")


def plans(*more: dict[str, Any], **axes: int) -> list[up.Plan]:
    return [up.Plan(tensor=2, sequence=True, **axes, **one) for one in more]


TEXT = models.text_batches(3, 8)
SHARDED = plans(
    {}, {"zero": 1, "micro_batches": 2}, {"zero": 2, "recompute": True}, {"zero": 3},
    {"zero": 3, "recompute": True, "micro_batches": 2}, data=2,
)  # fmt: skip
STAGES = plans(
    {}, {"schedule": "zb-h1"}, {"schedule": "interleaved"}, {"recompute": True, "zero": 1}, pipeline=2,
    micro_batches=2,
)  # fmt: skip
SHARED = plans({}, {"recompute": True}, pipeline=2, micro_batches=2)
TABLE = {
    "data": Row(models.gpt, SHARDED, given=TEXT, loss=models.token_loss, holds=cuts_gpt),
    "stages": Row(models.gpt, STAGES, given=TEXT, loss=models.token_loss, holds=cuts_gpt),
    "four tensor ranks": Row(
        models.gpt, [up.Plan(tensor=4, sequence=True)], given=TEXT, loss=models.token_loss, holds=cuts_gpt,
        options={"check": True},
    ),
    "a shared block in stages": Row(Shared, SHARED, given=IDS, loss=loss),
}  # fmt: skip
if sweep.HAVE_TRANSFORMERS:
    TABLE |= {
        "Llama and data": Row(models.llama, SHARDED, given=TEXT, loss=models.token_loss),
        "GPT-2 in stages": Row(models.gpt2, STAGES, given=TEXT, loss=models.token_loss),
    }


def check_low_precision(folder: Path) -> None:
    given = models.text_batches(3, 4)
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
    other = begun(up.Plan(data=4), models.gpt, models.token_loss)
    other.load(folder / "saved")
    losses = [other.step(batch) for batch in other.shard(given[2:])]
    again = [run.step(batch) for batch in run.shard(given[2:])]
    assert max(abs(a - b) for a, b in zip(losses, again, strict=True)) < 1e-5
    wanted = alone(models.gpt, given, models.token_loss).losses
    assert max(abs(a - b) for a, b in zip([*seen.losses, *again], wanted, strict=True)) < 1e-5
