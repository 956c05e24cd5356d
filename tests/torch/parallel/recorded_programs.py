"""What a recording of a program must not lose: hooks of a layer that is cut, gradients of what is written."""

from pathlib import Path

import torch
from torch import Tensor, nn

from parallel.plain_training import same
from parallel.run_features import in_group
from parallel.wild import LOSS, PIPELINE, TENSOR, Mlp, rows


class PreHooked(Mlp):
    """A layer that is cut gets what a hook has made of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.a.register_forward_pre_hook(lambda _, args: (args[0] * 0.7,))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Scan(Mlp):
    """What it writes into a new tensor goes on, with the gradient of what was written."""

    def between(self, x: Tensor) -> Tensor:
        rows = torch.linalg.solve_triangular(torch.eye(32), x.unsqueeze(-1), upper=False).squeeze(-1)
        found = torch.zeros_like(rows)
        for part in range(2):
            found[:, 16 * part : 16 * part + 16] = torch.tanh(rows[:, 16 * part : 16 * part + 16])
        return found


def check_hooks_and_writes_in_a_recorded_program(folder: Path) -> None:
    for make, plan in ((PreHooked, TENSOR), (PreHooked, PIPELINE), (Scan, TENSOR), (Scan, PIPELINE)):
        same(plan, make, rows(), LOSS, sample=rows()[0][0])


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
