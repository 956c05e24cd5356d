"""Strategies per operator, alone and within plans. `strategies.py NAME`."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from told import refusal, say
from torch import nn
from trained import alone, planned, same

import unisono.parallel as up


class Net(nn.Module):
    """Two products: rows of the first on n ranks, columns of the second; n = 0: no strategies."""

    def __init__(self, n: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w, self.v = nn.Parameter(torch.randn(16, 32) * 0.1), nn.Parameter(torch.randn(32, 8) * 0.1)
        self.one = up.shard(torch.matmul, ((n, 1), (1, 1))) if n else torch.matmul
        self.two = up.shard(torch.matmul, ((1, 1), (1, n))) if n else torch.matmul
        self.whole: Any = up.whole if n else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(self.two(self.one(x, self.w), self.v))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.randn(16, 16, generator=made), torch.randint(8, (16,), generator=made)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.01, momentum=0.9)


def wanted() -> list[float]:
    return alone(Net(), [rows()] * 4, sgd, nn.functional.cross_entropy)


def two_products() -> None:
    dist.init_process_group("unisono")
    net = Net(4)
    with up.record() as moves:
        net(rows()[0])
    inserted = [entry.move.kind for entry in moves]
    same(alone(net, [rows()] * 4, sgd, nn.functional.cross_entropy), wanted())
    say("inserted before the end:", inserted[:1], "the losses of one process")


def operators() -> None:
    dist.init_process_group("unisono")
    torch.manual_seed(0)
    x, w = torch.randn(6, 16), torch.randn(16, 32)
    y = up.whole(up.shard(torch.matmul, ((4, 1), (1, 1)))(x, w))
    torch.testing.assert_close(y, x @ w)
    say("6 rows by 4 ranks: right")
    say(
        refusal(lambda: up.shard(nn.functional.conv2d, ((4, 1, 1, 1), (1, 1, 1, 1))), ValueError).partition(
            "."
        )[0]
    )
    say(refusal(lambda: up.shard(torch.matmul, ((1, 2), (4, 1)))(x, w), ValueError))
    own = x + dist.get_rank()  # different rows on the ranks are no whole that all have
    say(refusal(lambda: up.shard(torch.matmul, ((1, 1), (1, 4)))(own, w), ValueError))


def trains(plan: up.Plan, n: int) -> None:
    """The network of strategies under a plan, beside the plain one in one process."""
    run = planned(plan, Net(n), sgd, nn.functional.cross_entropy, sample=rows()[0])
    same([run.step(batch) for batch in run.shard([rows()] * 4)], wanted())
    say("the losses of one process")


def stages() -> None:
    trains(up.Plan(pipeline=2, tensor=2, micro_batches=2), 2)


def data_outside() -> None:
    trains(up.Plan(data=4), 4)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
