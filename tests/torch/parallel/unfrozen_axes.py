"""Parameters that are unfrozen and frozen between steps, under two axes at once. On four ranks."""

from pathlib import Path

import unisono.parallel as up
from parallel import models
from parallel.run_features import in_group
from parallel.unfrozen import alone, same


def check_losses_are_those_of_one_process(folder: Path) -> None:
    batches = models.text_batches(5, 4)
    wanted = alone(models.gpt, batches, models.token_loss)
    for plan in (
        up.Plan(data=2, tensor=2, zero=2, micro_batches=2),
        up.Plan(data=2, pipeline=2, zero=1, micro_batches=2),
        up.Plan(tensor=2, pipeline=2),
    ):
        same(plan, models.gpt, models.token_loss, batches, wanted)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
