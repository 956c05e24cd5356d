"""A pipeline keeps the parameters that nothing uses, for weights and checkpoints. On two ranks."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

import unisono.parallel as up
from parallel.plain_training import same
from parallel.program_stages import PIPELINE, SCHEDULES, WIDTH, Skips, batches, loss
from parallel.run_features import in_group


class Leftover(Skips):
    """Parameters that nothing uses: in a layer of their own, in a block, and beside a used one."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.spare = nn.Linear(3, 2), nn.Parameter(torch.ones(3))
        self.blocks[4].spare = nn.Linear(2, 2)


def check_parameters_that_nothing_uses_are_kept(folder: Path) -> None:
    given = batches(2)
    wanted = same(up.Plan(data=2), Leftover, given, loss).state_dict()
    for plan in (PIPELINE, SCHEDULES[4], dataclasses.replace(PIPELINE, recompute=True)):
        found = same(plan, Leftover, given, loss, sample=given[0][0]).state_dict()
        assert [*found] == [*wanted]
        assert all(torch.allclose(value, wanted[name], atol=1e-5) for name, value in found.items())


class PartlyUsed(Skips):
    """One parameter is used for what nothing takes, one module is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.lost, self.spare = nn.Parameter(torch.ones(WIDTH)), nn.Linear(3, 2)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        found = super().forward(**inputs)
        (self.table.weight * self.lost).sum()
        return found


def check_weights_have_parameters_that_nothing_needs(folder: Path) -> None:
    given = batches(2)
    for plan in (PIPELINE, SCHEDULES[4]):
        run = same(plan, PartlyUsed, given, loss, sample=given[0][0])
        weights = run.state_dict()
        assert torch.distributed.get_rank() > 0 or set(weights) == set(PartlyUsed().state_dict())


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
