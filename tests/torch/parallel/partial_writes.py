"""Writes of some values of a parameter that a plan cuts: as in one process, or refused."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel.outside_steps import DATA, LOW, TENSOR, ZERO1, ZERO3, made, net
from parallel.plain_training import seeded


def indexed() -> Iterator[Callable[[Tensor], object]]:
    """Writes of some values, which DTensor implements nowhere."""
    yield lambda p: p.__setitem__(torch.tensor([0, 3]), 0.5)
    yield lambda p: p.__setitem__(torch.tensor([1]), torch.ones(p.shape[1]))
    yield lambda p: p.__setitem__(p.detach() > 0.1, 0.1)
    yield lambda p: p.index_fill_(0, torch.tensor([0]), 1.0)
    yield lambda p: p.data.index_add_(0, torch.tensor([1]), torch.ones(1, p.shape[1]))
    yield lambda p: p.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 1.0)


def views() -> Iterator[Callable[[Tensor], object]]:
    """Writes into views, each along dimension 0 and 1."""
    yield lambda p: (p.__setitem__(0, 0.0), p.__setitem__((slice(None), 0), 0.0))
    yield lambda p: (p[0].mul_(2), p[:, 1].mul_(2))
    yield lambda p: (p.data[1:3].zero_(), p.data[:, 1:3].zero_())
    yield lambda p: p.__setitem__((1, 2), 3.0)
    yield lambda p: (p.t()[0].zero_(), p[0].zero_())
    yield lambda p: p.view(-1)[3].fill_(1.0)
    yield lambda p: (p[0][1].add_(1.0), p.chunk(2)[0].zero_(), p.chunk(2, 1)[0].zero_())


@torch.no_grad()
def check_writes_of_some_values_are_kept_or_refused(folder: Path) -> None:
    for plan in (DATA, ZERO1, ZERO3, LOW, TENSOR):
        run, model = made(plan), seeded(net)
        for write in indexed():
            for each in (run.model, model):
                write(each[2].weight)
            found = run.state_dict()  # of rank 0
            assert not found or torch.equal(found["2.weight"], model[2].weight), plan
        weight = run.model[2].weight
        cut = isinstance(weight, DTensor) and not all(one.is_replicate() for one in weight.placements)
        for number, write in enumerate(views()):
            if cut:
                with pytest.raises((RuntimeError, NotImplementedError), match="is a copy|aten.fill_.Tensor"):
                    pytest.fail(f"{plan} {number} {write(weight)}")
                if weight.placements[0].is_shard(0):
                    assert weight[0].clone().zero_().sum() == 0  # reading is right
            else:
                write(weight), write(model[2].weight)
        found = run.state_dict()
        assert cut or not found or torch.equal(found["2.weight"], model[2].weight), plan
