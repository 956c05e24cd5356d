"""Stages that are cut from a program, with the other axes. On four ranks."""

from pathlib import Path
from typing import Any

from torch import nn

import unisono.parallel as up
from effort import swept
from parallel.plain_training import alone, apart, same, under
from parallel.program_stages import Shared, Skips, batches, loss, with_aux
from parallel.run_features import in_group
from zoo.own import Nano


def check_data_and_zero(folder: Path) -> None:
    given = batches()
    ids = [(inputs["ids"], targets) for inputs, targets in given]
    skips, shared = (Skips, given, with_aux), (Shared, ids, loss)
    usual = [
        ({"zero": 1, "schedule": "zb-h1"}, skips),
        ({"zero": 3, "recompute": True}, shared),
    ]
    further = ({}, {"zero": 1}, {"zero": 2}, {"zero": 3})
    for more, (model, batches_, with_loss) in swept(
        usual, [(more, case) for more in further for case in (skips, shared)]
    ):
        plan = up.Plan(pipeline=2, data=2, micro_batches=2, **more)
        same(plan, model, batches_, with_loss, sample=batches_[0][0])


def check_tensor(folder: Path) -> None:
    given = batches()
    for more in swept([{}], [{"zero": 1}, {"recompute": True}]):
        plan = up.Plan(pipeline=2, tensor=2, micro_batches=2, **more)
        for model in swept([], [Skips]):
            run = same(plan, model, given, with_aux, sample=given[0][0])
            assert run.cut.modules["blocks.0.up"] == "column", str(run.cut)
            assert run.cut.modules["blocks.4.down"] == "row", str(run.cut)
        ids = [(inputs["ids"], targets) for inputs, targets in given]
        run = same(plan, Nano, ids, loss, sample=ids[0][0])
        assert "h.0.attn.c_attn.q.weight" in run.cut.dims, str(run.cut)


def check_four_stages(folder: Path) -> None:
    given = batches()
    for schedule in swept(["zb-h1"], ["1f1b"]):
        plan = up.Plan(pipeline=4, micro_batches=4, schedule=schedule)
        same(plan, Skips, given, with_aux, sample=given[0][0])


def check_low_precision(folder: Path) -> None:
    given = batches()

    def small(output: Any, targets: Any) -> Any:  # without an overflow in fp16, which would skip a step
        return loss(output, targets) * 1e-3

    wanted = alone(Skips, given, small).losses
    for precision in swept(["bf16"], ["fp16"]):
        plan = up.Plan(pipeline=2, data=2, micro_batches=2, precision=precision)
        run, (found, *_) = under(plan, Skips, given, small, sample=given[0][0])
        assert run.skipped == 0, plan
        far = max(abs(a - b) / a for a, b in zip(wanted, found, strict=True))
        print(f"{plan}: {far:.1e}")
        assert far < 1e-2, (found, wanted)


class Dropped(Skips):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down = nn.Sequential(nn.Dropout(0.5), block.down, nn.Dropout(0.5))


def check_dropout_draws_the_same_for_what_ranks_share(folder: Path) -> None:
    given = batches()
    plan = up.Plan(pipeline=2, tensor=2, micro_batches=2)
    run, _ = under(plan, Dropped, given, loss, sample=given[0][0])
    assert "blocks.0.up.weight" in run.cut.dims
    assert apart(run) < 1e-6


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
