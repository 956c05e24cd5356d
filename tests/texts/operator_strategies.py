"""Strategies per operator, alone and within plans. `operator_strategies.py NAME`."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from told import of_all, refusal, say
from torch import nn
from trained import alone, planned, same

import unisono.parallel as up


class Product(nn.Module):
    """A product with a weight, and its strategy; None: without."""

    def __init__(self, rows: int, columns: int, strategy: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * 0.1)
        self.matmul = up.shard(torch.matmul, strategy) if strategy else torch.matmul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, self.weight)


class Net(nn.Module):
    """Two products: rows of the first on n ranks, columns of the second; n = 0: no strategies."""

    def __init__(self, n: int = 0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one = Product(16, 32, ((n, 1), (1, 1)) if n else None)
        self.two = Product(32, 8, ((1, 1), (1, n)) if n else None)
        self.whole: Any = up.whole if n else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(self.two(self.one(x)))


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
    y = up.shard(torch.matmul, ((4, 1), (1, 1)))(x, w)
    assert of_all(len(y.to_local())) == [2, 1, 2, 1]
    torch.testing.assert_close(up.whole(y), x @ w)
    say("6 rows by 4 ranks: right")
    images, kernels = torch.randn(4, 3, 5, 5), torch.randn(8, 3, 3, 3)
    cut = up.shard(nn.functional.conv2d, ((4, 1, 1, 1), (1, 1, 1, 1)))
    torch.testing.assert_close(up.whole(cut(images, kernels)), nn.functional.conv2d(images, kernels))
    say("images of a convolution: right")
    say(refusal(lambda: up.shard(torch.matmul, ((1, 2), (4, 1)))(x, w), ValueError))
    own = x + dist.get_rank()  # different rows on the ranks are no whole that all have
    say(refusal(lambda: up.shard(torch.matmul, ((1, 1), (1, 4)))(own, w), ValueError))


def trains(plan: up.Plan, n: int) -> None:
    """The network of strategies under a plan, beside the plain one in one process."""
    run = planned(plan, Net(n), sgd, nn.functional.cross_entropy, sample=rows()[0])
    same([run.step(batch, watch=at == 3) for at, batch in enumerate(run.shard([rows()] * 4))], wanted())
    why = "up.shard: a value goes into the layout of an operator"
    assert {call.operation for call in run.explain() if call.why == why} >= {"all_gather", "all_reduce"}
    say("the losses of one process")


def stages() -> None:
    trains(up.Plan(pipeline=2, tensor=2, micro_batches=2), 2)


def data_outside() -> None:
    trains(up.Plan(data=2, tensor=2), 2)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
