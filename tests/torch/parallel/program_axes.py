"""Stages that are cut from a program, with the other axes. On four ranks."""

from pathlib import Path
from typing import Any

from torch import nn

import unisono.parallel as up
from effort import swept
from parallel.plain_training import apart, under
from parallel.rows import Row
from parallel.stage_table import GIVEN, Shared, Skips, loss, stages, with_aux
from zoo.own import Nano


def plans(*more: dict[str, Any], **axis: int) -> list[up.Plan]:
    return [up.Plan(pipeline=2, **{"micro_batches": 2, **axis, **one}) for one in more]


SHARDED = plans({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, data=2)
TENSOR = plans({}, tensor=2), plans({"zero": 1}, {"recompute": True}, tensor=2)
FOUR = {"pipeline": 4, "micro_batches": 4}


def is_cut(run: up.Run) -> bool:
    return run.cut.modules["blocks.0.up"] == "column" and run.cut.modules["blocks.4.down"] == "row"


def small(output: Any, targets: Any) -> Any:
    """Without an overflow in fp16, which would skip a step."""
    return loss(output, targets) * 1e-3


TABLE = {
    "connections and data": Row(
        Skips, swept(plans({"zero": 1, "schedule": "zb-h1"}, data=2), SHARDED), given=GIVEN, loss=with_aux
    ),
    "a shared block and data": stages(Shared, swept(plans({"zero": 3, "recompute": True}, data=2), SHARDED)),
    "connections and tensor": Row(
        Skips, swept([], [*TENSOR[0], *TENSOR[1]]), given=GIVEN, loss=with_aux, holds=is_cut
    ),
    "heads and tensor": stages(Nano, swept(*TENSOR), cut=["h.0.attn.c_attn.q.weight"]),
    "four stages": Row(
        Skips, [up.Plan(**FOUR, schedule=one) for one in swept(["zb-h1"], ["1f1b"])], given=GIVEN,
        loss=with_aux,
    ),
    "low precision": Row(
        Skips, plans(*({"precision": one} for one in swept(["bf16"], ["fp16"])), data=2), given=GIVEN,
        loss=small, compare={"tolerance": 2e-4}, holds=lambda run: run.skipped == 0,
    ),
}  # fmt: skip


class Dropped(Skips):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down = nn.Sequential(nn.Dropout(0.5), block.down, nn.Dropout(0.5))


def check_dropout_draws_the_same_for_what_ranks_share(folder: Path) -> None:
    run, _ = under(TENSOR[0][0], Dropped, GIVEN, loss, sample=GIVEN[0][0])
    assert "blocks.0.up.weight" in run.cut.dims
    assert apart(run) < 1e-6
