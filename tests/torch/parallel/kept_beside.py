"""What is saved beside a run comes back as it was; `keep` deletes older ones. On one rank."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono.parallel as up
from parallel.group_of_a_job import process_group


class Plain:
    """A state of all kinds that JSON changes, or writes like another one."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


STATE = {
    "tuple": (1, ("a", [2.5])), "numbers": {2: "two", -1: {3: (4,)}}, "mixed": {None: 2, (1, 2): True},
    "pairs:": [1], "alone": {"pairs:": 5}, "too": {"tuple:": [6]}, "empty": [{}, (), []],
}  # fmt: skip


def a_run(model: nn.Module | None = None) -> tuple[up.Run, Any]:
    torch.manual_seed(0)
    run = up.parallelize(
        model or nn.Linear(3, 1),
        up.Plan(),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        loss=nn.functional.mse_loss,
    )
    return run, torch.optim.lr_scheduler.MultiStepLR(run.optimizer, [2, 4])


def rates(run: up.Run, scheduler: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        run.step((torch.ones(2, 3), torch.ones(2, 1)))
        scheduler.step()
        found.append(run.optimizer.param_groups[0]["lr"])
    return found


def main(rank: int, size: int, folder: Path) -> None:
    with process_group(rank, size, folder):
        run, scheduler = a_run()
        plain = Plain(STATE)
        rates(run, scheduler, 1)
        run.save(folder / "saved", also={"scheduler": scheduler, "plain": plain})
        rest = rates(run, scheduler, 4)
        again, found = a_run()
        empty = Plain()
        again.load(folder / "saved", also={"scheduler": found, "plain": empty})
        assert empty.state == STATE
        assert (got := rates(again, found, 4)) == rest, (got, rest)

        larger, _ = a_run(nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1)))
        larger.save(folder / "larger")
        smaller, _ = a_run(nn.Sequential(nn.Linear(3, 1)))
        with pytest.raises(ValueError, match="2 parameters .* such as '1.bias': it is of another model"):
            smaller.load(folder / "larger")

        kept = folder / "kept"
        for _ in range(3):
            run.save(kept, keep=2)
            rates(run, scheduler, 1)
        assert names(kept) == ["step-00000006", "step-00000007"]
        shutil.copytree(kept / "step-00000006", kept / "step-00000006-best")
        early, scheduler = a_run()
        rates(early, scheduler, 1)
        early.save(kept, keep=1)  # begun anew in a folder with later ones
        saved = ["step-00000001", "step-00000006", "step-00000006-best", "step-00000007"]
        assert names(kept) == saved, names(kept)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
