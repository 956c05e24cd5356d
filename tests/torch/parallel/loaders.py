"""What `run.shard` gets on each rank: the whole data, or a part already, which is refused. On two ranks."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import unisono.parallel as up
from parallel.plain_training import adamw
from parallel.run_features import made

ROWS = 32
DATA = [(torch.tensor([float(k)]), torch.tensor([float(k)])) for k in range(ROWS)]


def mine() -> range:
    return range(dist.get_rank(), ROWS, 2)


class Items(Dataset[Any]):
    """Items of some rows, changed by numbers that `draw` gives."""

    def __init__(self, rows: Any = range(ROWS), draw: Any = None, keys: str = "xy") -> None:
        self.rows, self.draw, self.keys = list(rows), draw or (lambda: 0.0), keys

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Any:
        row = self.rows[at]
        x = torch.tensor([float(row), float(row) * 2.0]) + self.draw()
        return (x, torch.tensor(row % 3)) if self.keys == "xy" else (x, x[:1])


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Any, draw: Any = None) -> None:
        self.items = Items(rows, draw)

    def __iter__(self) -> Iterator[Any]:
        return iter([self.items[at] for at in range(len(self.items))])


class Order(Sampler[int]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(list(self.rows()))

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.rows()))


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


def run_of(plan: up.Plan = up.Plan(data=2)) -> up.Run:  # noqa: B008
    return up.parallelize(
        Model(), plan, optimizer=adamw, loss=lambda o, y: (o[:, 0] - y.flatten()).pow(2).mean()
    )


def loader(data: Any = None, **more: Any) -> Any:
    return DataLoader(DATA if data is None else data, **{"batch_size": 4, **more})


def check_loaders(folder: Path) -> None:
    """Each row once, whoever shuffles; a loader of batches is cut alike."""
    run = made("mlp", up.Plan(data=2))
    x = torch.arange(22.0).view(22, 1)
    torch.manual_seed(dist.get_rank())  # ranks would shuffle differently
    own = [
        batch[0].flatten().tolist()
        for batch in run.shard(DataLoader(TensorDataset(x), batch_size=5, shuffle=True))
    ]
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, own)
    assert sorted(v for rows in everyone for batch in rows for v in batch) == x.flatten().tolist()
    assert [len(batch) for batch in everyone[0]] == [3, 3, 3, 3, 1]


def check_loaders_that_are_cut_by_rank_are_refused(folder: Path) -> None:
    rank = dist.get_rank()
    for name, one in (
        ("iterable", loader(Stream(mine()))),
        ("list", list(loader(Subset(DATA, mine())))),
        ("generator", (batch for batch in list(loader(Items(mine()))))),
        ("lengths", list(loader())[: 8 - rank]),
        ("shuffled", list(loader(Items(random.Random(rank).sample(range(ROWS), ROWS))))),
        ("subset", loader(Subset(DATA, mine()))),
        ("dataset", loader(Items(mine()))),
        ("slice", loader(DATA[rank::2])),
        ("tensors", loader(TensorDataset(torch.arange(ROWS).float()[rank::2].clone(), torch.ones(16)))),
        ("shuffled dataset", loader(Items(mine()), shuffle=True)),
        ("worker", loader(Items(mine()), num_workers=1)),
        ("shorter dataset", loader(Items(range(ROWS - 20 * rank)))),
        ("sampler", loader(sampler=Order(mine))),
        ("random order of a part", loader(sampler=Order(lambda: random.sample(mine(), 16)))),
        ("batches", DataLoader(DATA, batch_sampler=BatchSampler(Order(mine), 4, drop_last=False))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"run\.shard: .* give it the whole data on every rank"):
            print(name, next(iter(run_of().shard(one))), flush=True)


def check_whole_loaders_are_accepted(folder: Path) -> None:
    """Whatever a rank draws by itself."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    own = random.Random(rank)
    weights = torch.ones(ROWS)
    generator = torch.Generator().manual_seed(rank)
    for name, one in (
        ("whole", loader()), ("shuffle", loader(shuffle=True)), ("list", list(loader())),
        ("torch", loader(Items(draw=lambda: torch.rand(2)))), ("python", loader(Items(draw=random.random))),
        ("numpy", loader(Items(draw=lambda: float(np.random.rand())))),
        ("own generator", loader(Items(draw=own.random))),
        ("own generator without labels", loader(Items(draw=own.random, keys="xx"))),
        ("stream", loader(Stream(range(ROWS), torch.randn(()).item))),
        ("workers", loader(Items(), num_workers=1)),
        ("weights", loader(sampler=WeightedRandomSampler(weights, ROWS, generator=generator))),
        ("replacement", loader(sampler=RandomSampler(DATA, replacement=True, num_samples=8))),
        ("entropy", loader(sampler=Order(lambda: own.sample(range(ROWS), ROWS)))),
        ("small draws of its own", loader(sampler=Order(lambda: own.sample(range(ROWS), 4)))),
        ("generator", (batch for batch in list(loader()))),
        ("constants", loader([(torch.ones(1),) * 2] * ROWS)),
    ):  # fmt: skip
        run = run_of()
        batches = list(run.shard(one))
        assert batches, name
        run.step(batches[0])


def check_a_rank_that_looks_alone_goes_on(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unisono.parallel.batches.WAIT_S", 0.1)
        run = run_of()
        batches = run.shard(list(loader()))
        if dist.get_rank() == 0:
            assert len(list(batches)) == 8
        dist.barrier()
        run.step(next(iter(batches)))


def check_rows_that_ranks_share_are_compared_at_first(folder: Path) -> None:
    """In the first steps; a run with data ranks may bring any batches."""
    own = torch.full((4, 2), float(dist.get_rank()) + 1.0), torch.arange(4) + dist.get_rank()
    for plan in (up.Plan(pipeline=2), up.Plan(tensor=2)):
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 8))
        run = up.parallelize(model, plan, optimizer=adamw, loss=nn.CrossEntropyLoss())
        for call in (run.step, run.evaluate):
            with pytest.raises(
                ValueError, match="of one pipeline, context or tensor group give different rows"
            ):
                call(own)
    run = run_of()
    for _ in range(4):
        run.step((own[0], own[1].float()))


def check_a_sampler_that_cuts_for_ranks_is_refused(folder: Path) -> None:
    run = made("mlp", up.Plan(data=2))
    rows = TensorDataset(torch.arange(16.0).view(16, 1))
    sampler = DistributedSampler(rows)
    with pytest.raises(ValueError, match=r"DistributedSampler .*1 of 2 parts.*shuffle=True"):
        list(run.shard(DataLoader(rows, batch_size=4, sampler=sampler)))
    alike = DistributedSampler(rows, num_replicas=1, rank=0)
    assert len(list(run.shard(DataLoader(rows, batch_size=4, sampler=alike)))) == 4
    batched = TensorDataset(torch.arange(16.0).view(4, 4, 1))  # an item is a batch
    own = [
        batch[0].flatten().tolist() for batch in run.shard(DataLoader(batched, batch_size=None, shuffle=True))
    ]
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, own)
    assert sorted(v for rank in everyone for batch in rank for v in batch) == list(range(16))
