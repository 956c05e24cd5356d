"""Calls of an elastic run: what it refuses, and where it is in its data, also after a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import unisono.parallel as up
from parallel.elastic_training import alone, loader, made
from parallel.run_features import in_group


def check_a_process_group_of_the_program(_: Path) -> None:
    with pytest.raises(ValueError, match="there is a process group already"):
        made(up.Plan(data=dist.get_world_size(), elastic=True), 0)


def check_calls(_: Path) -> None:
    with pytest.raises(ValueError, match="on_change is for runs whose ranks change"):
        made(up.Plan(), 0, on_change=print)
    with pytest.raises(TypeError, match="on_change is a int, expected a function"):
        made(up.Plan(elastic=True), 0, on_change=3)
    with pytest.raises(ValueError, match=r"begins with 3 ranks, and this job has 1. Write data=1"):
        made(up.Plan(data=3, elastic=True), 0)
    assert not dist.is_initialized()
    run: Any = made(up.Plan(elastic=True), 0)
    batches = run.shard(loader())
    for number, batch in enumerate(batches):
        first = run.step(batch)
        with pytest.raises(ValueError, match="a batch is what run.shard"):
            run.step((batch[0], batch[1]))
        with pytest.raises(ValueError, match="update=False is not for Plan.elastic=True"):
            run.step(batch, update=False)
        with pytest.raises(ValueError, match=r"EMA is not for Plan\(elastic=True\)"):
            up.EMA(run)
        with pytest.raises(ValueError, match="call run.model"):
            run.predict(batch[0])
        with pytest.raises(ValueError, match="in the background would outlive"):
            run.save("nowhere", background=True)
        with pytest.raises(TypeError, match="'thing' is a int whose state cannot be saved"):
            run.attach(thing=3)
        with pytest.raises(ValueError, match="expected a positive number"):
            batches.set_batch_size(0)
        if number == 1:
            batches.set_batch_size(24)
        if number > 1:
            assert len(batch[1]) == 24
    assert number == 4, "2 batches of 12, then 3 of 24"
    assert first > 0
    lists = run.shard([((torch.randn(4, 16), torch.arange(4)), torch.zeros(4, dtype=torch.long))])
    with pytest.raises(ValueError, match="a DataLoader draws rows"):
        lists.set_batch_size(3)
    run.model.eval()
    assert [run.evaluate(batch) > 0 for batch in lists] == [True]
    run.close()
    assert not dist.is_initialized()


def counting() -> Any:
    torch.manual_seed(0)
    return up.parallelize(
        torch.nn.Linear(1, 1),
        up.Plan(elastic=True),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        loss=torch.nn.functional.mse_loss,
    )


def numbers() -> DataLoader[Any]:
    x = torch.arange(24.0).view(24, 1)
    return DataLoader(TensorDataset(x, x), batch_size=4, shuffle=True)


def rows(batch: Any) -> list[int]:
    return [int(one) for one in batch[0].flatten()]


def check_a_batch_of_another_size_in_a_checkpoint(folder: Path) -> None:
    run = counting()
    batches = run.shard(numbers())
    seen: list[int] = []
    for number, batch in enumerate(batches):
        seen += rows(batch)
        run.step(batch)
        if number == 1:
            batches.set_batch_size(6)
        if number == 2:
            break
    run.save(folder, also={"batches": batches})
    run.close()
    assert len(seen) == 14
    run = counting()
    batches = run.shard(numbers())
    run.load(folder, also={"batches": batches})
    rest = [rows(batch) for batch in batches]
    assert [len(one) for one in rest] == [6, 4]
    assert sorted(seen + [row for one in rest for row in one]) == list(range(24))
    assert [len(rows(batch)) for batch in batches] == [6, 6, 6, 6], "the next epoch, too"
    run.close()


def check_a_loop_that_ends_early(_: Path) -> None:
    run = counting()
    batches = run.shard(numbers())
    first = []
    for _number in range(3):
        for batch in batches:
            first.append(rows(batch))
            assert batches.active
            break
        assert not batches.active
    assert len({tuple(one) for one in first}) == 3, f"each epoch has an order of its own: {first}"
    run.close()
    run.close()


def main(rank: int, size: int, folder: Path, name: str) -> None:
    if name == "check_a_process_group_of_the_program":
        in_group(rank, size, folder, globals()[name])
    else:
        with alone():
            globals()[name](folder)
