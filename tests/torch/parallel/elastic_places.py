"""Where an elastic run is in its data, after a loop that ended early and after a checkpoint."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import unisono.parallel as up
from parallel.elastic_training import alone


def made() -> Any:
    torch.manual_seed(0)
    return up.parallelize(
        torch.nn.Linear(1, 1),
        up.Plan(elastic=True),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        loss=torch.nn.functional.mse_loss,
    )


def loader() -> DataLoader[Any]:
    x = torch.arange(24.0).view(24, 1)
    return DataLoader(TensorDataset(x, x), batch_size=4, shuffle=True)


def rows(batch: Any) -> list[int]:
    return [int(one) for one in batch[0].flatten()]


def check_a_batch_of_another_size_in_a_checkpoint(folder: Path) -> None:
    run = made()
    batches = run.shard(loader())
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
    run = made()
    batches = run.shard(loader())
    run.load(folder, also={"batches": batches})
    rest = [rows(batch) for batch in batches]
    assert [len(one) for one in rest] == [6, 4]
    assert sorted(seen + [row for one in rest for row in one]) == list(range(24))
    assert [len(rows(batch)) for batch in batches] == [6, 6, 6, 6], "the next epoch, too"
    run.close()


def check_a_loop_that_ends_early(_: Path) -> None:
    run = made()
    batches = run.shard(loader())
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
    with alone():
        globals()[name](folder)
