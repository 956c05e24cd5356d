"""What goes on after a load as before it: schedulers, the order of data, dropout, several optimizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import unisono.parallel as up
from inside_parallel import RankBatches
from parallel.plain_training import seeded


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 4))


def two(parameters: Any) -> list[torch.optim.Optimizer]:
    weights = [value for name, value in parameters.named.items() if name.endswith("weight")]
    biases = [value for name, value in parameters.named.items() if name.endswith("bias")]
    return [torch.optim.SGD(weights, lr=0.1, momentum=0.9), torch.optim.AdamW(biases, lr=1e-2)]


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(
        torch.randn(48, 16, generator=generator), torch.randint(4, (48,), generator=generator)
    )
    return DataLoader(data, batch_size=8, shuffle=True)


class Training:
    def __init__(self, plan: up.Plan, seed: int) -> None:
        model = seeded(net)
        torch.manual_seed(seed)
        self.run = up.parallelize(model, plan, optimizer=two, loss=functional.cross_entropy)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in self.run.optimizer]
        self.batches = self.run.shard(loader())
        self.also = {"first": self.schedulers[0], "second": self.schedulers[1], "data": self.batches}

    def epoch(self, stop: int = 100) -> list[float]:
        losses = []
        for batch in self.batches:
            losses.append(self.run.step(batch))
            for scheduler in self.schedulers:
                scheduler.step()
            if len(losses) == stop:
                break
        return losses


def check_a_load_goes_on_where_the_save_was(folder: Path) -> None:
    for number, plan in enumerate((up.Plan(data=2), up.Plan(data=2, zero=2), up.Plan(tensor=2))):
        whole = Training(plan, 3)
        wanted = whole.epoch()
        wanted += whole.epoch()
        part = Training(plan, 3)
        found = part.epoch()
        found += part.epoch(2)
        part.run.save(f"{folder}/{number}", also=part.also)
        again = Training(plan, 99)  # another seed, another order, other masks
        again.run.load(f"{folder}/{number}", also=again.also)
        found += again.epoch()
        assert [one.get_last_lr() for one in again.schedulers] == [
            one.get_last_lr() for one in whole.schedulers
        ]
        assert len(found) == len(wanted) == 12
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5, (plan, found, wanted)
    with pytest.raises(ValueError, match="has no 'other'; it has first, second, data beside"):
        again.run.load(f"{folder}/2", also={"other": again.batches})
    with pytest.raises(TypeError, match="save: 'model' is a Sequential whose state cannot be saved"):
        again.run.save(f"{folder}/3", also={"model": net()})


class Noisy(Dataset[Tensor]):
    """A row is its number and a fraction that is drawn when it is loaded, as augmentations are."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> Tensor:
        return row + torch.rand((), dtype=torch.float64)


def shuffled(data: Any, *, own: bool) -> DataLoader[Any]:
    """own: by a generator of its own; else by PyTorch's default one."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4) if own else None
    return DataLoader(data, batch_size=5, shuffle=True, generator=generator)


def check_the_order_of_data_is_that_of_one_process(folder: Path) -> None:
    for own in (False, True):
        alone = shuffled(range(12), own=own)
        wanted = [[batch.tolist() for batch in alone] for _ in range(3)]
        batches = RankBatches(shuffled(Noisy(), own=own), 0, 1)  # both ranks have all rows, as tensor ranks
        first = [batch.tolist() for batch in batches]
        between = batches.state_dict()
        second = [batch.tolist() for batch in batches]
        assert [[int(value) for value in batch] for batch in first] == wanted[0]
        assert [[int(value) for value in batch] for batch in second] == wanted[1]
        everyone: list[Any] = [None] * 2
        dist.all_gather_object(everyone, first)
        assert everyone[0] == everyone[1], "the ranks of a tensor group need the same rows"
        again = RankBatches(shuffled(Noisy(), own=own), 0, 1)
        again.load_state_dict(between)
        assert again.state_dict() == between
        assert [batch.tolist() for batch in again] == second
        assert [[int(value) for value in batch.tolist()] for batch in again] == wanted[2]
        part = RankBatches(shuffled(Noisy(), own=own), dist.get_rank(), 2)
        dist.all_gather_object(everyone, [batch.tolist() for batch in part])
        whole = [a + b for a, b in zip(*everyone, strict=True)]
        assert [[int(value) for value in batch] for batch in whole] == wanted[0]
        assert len({value % 1 for batch in whole for value in batch}) == 12, "data ranks draw other numbers"


def _on_one(parameters: Any) -> torch.optim.Optimizer:
    if dist.get_rank():
        raise KeyError("one rank")
    return torch.optim.SGD(parameters, lr=0.1)


def check_a_stage_without_parameters_of_an_optimizer(folder: Path) -> None:
    def made(*, groups: bool) -> up.Run:
        def by_stage(parameters: Any) -> list[torch.optim.Optimizer]:
            first, last = ([v for k, v in parameters.named.items() if k[0] == place] for place in "03")
            given: Any = ([{"params": first}], [{"params": last}]) if groups else (first, last)
            return [torch.optim.SGD(given[0], lr=0.1), torch.optim.AdamW(given[1], lr=1e-2)]

        plan = up.Plan(pipeline=2)
        return up.parallelize(seeded(net).eval(), plan, optimizer=by_stage, loss=functional.cross_entropy)

    with pytest.raises(
        ValueError, match=r"got no parameter on rank \d, which trains .* Give each optimizer a"
    ):
        made(groups=False)
    error, text = (KeyError, "one rank") if dist.get_rank() else (ValueError, "raised on rank 1: KeyError")
    with pytest.raises(error, match=text):
        up.parallelize(seeded(net), up.Plan(data=2), optimizer=_on_one, loss=functional.cross_entropy)
    x, y = next(iter(loader()))
    run, alone = made(groups=True), seeded(net).eval()
    optimizers = [torch.optim.SGD(alone[0].parameters(), 0.1), torch.optim.AdamW(alone[3].parameters(), 1e-2)]
    shared: list[Any] = [(x, y)]
    dist.broadcast_object_list(shared)
    x, y = shared[0]
    for _ in range(3):
        loss = functional.cross_entropy(alone(x), y)
        assert abs(run.step((x, y)) - loss.item()) < 1e-5
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def check_wrong_lists_of_optimizers_are_named(folder: Path) -> None:
    def made(optimizer: Any, **more: Any) -> up.Run:
        return up.parallelize(
            net(), up.Plan(data=2, **more), optimizer=optimizer, loss=functional.cross_entropy
        )

    with pytest.raises(ValueError, match="optimizer returned 0 optimizers, expected one or more"):
        made(lambda _: [])
    with pytest.raises(TypeError, match="optimizer returned a int"):
        made(lambda p: [torch.optim.SGD(p, lr=0.1), 3])
    with pytest.raises(ValueError, match="two optimizers have the same parameter"):
        made(lambda p: [torch.optim.SGD(p, lr=0.1), torch.optim.SGD(p, lr=0.1)])
    with pytest.raises(ValueError, match="returned 2 optimizers, expected one$"):
        made(two, swap="disk")
