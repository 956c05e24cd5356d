"""Batches in every kind of container: the same losses as tensors in a tuple, or a refusal before the step."""

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel.plain_training import adamw, seeded
from parallel.run_features import in_group


class Named(NamedTuple):
    x: Tensor
    gain: Tensor


@dataclasses.dataclass
class Record:
    x: Tensor
    gain: Tensor
    labels: Tensor


class Net(nn.Module):
    """Takes two tensors; or a record, of which it computes the loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any, gain: Tensor | None = None) -> Any:
        if gain is not None:
            return self.last(torch.tanh(self.first(x)) * gain)
        output = self(x.x, x.gain)
        return {"output": output, "loss": functional.cross_entropy(output, x.labels)}


class Collated(collections.UserDict[str, Tensor]):
    """A mapping that is no dict, as what tokenizers return."""


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def record() -> Record:
    generator = torch.Generator().manual_seed(5)
    x, gain = torch.randn(8, 8, generator=generator), torch.rand(8, 8, generator=generator)
    return Record(
        x, gain, torch.randint(4, (8,), generator=generator).index_fill(0, torch.tensor([0, 1]), -100)
    )


def check_losses_are_those_of_one_process(folder: Path) -> None:
    whole, alone = record(), seeded(Net)
    optimizer, wanted = adamw(list(alone.parameters())), []
    for _ in range(2):
        loss = alone(whole)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    x, gain = whole.x, whole.gain
    kinds: tuple[Any, ...] = (Named(x, gain), Collated(x=x, gain=gain), [x, gain])
    for plan in (up.Plan(data=2), up.Plan(pipeline=2, micro_batches=2)):
        for given in (*((kind, whole.labels) for kind in kinds), whole):
            own = given is whole
            run = up.parallelize(
                seeded(Net), plan, optimizer=adamw, loss=None if own else functional.cross_entropy,
                weigh="tokens", sample=whole if own else given[0],
            )  # fmt: skip
            found = [run.step(one) for one in run.shard([given, given])]
            assert torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=1e-5), (plan, type(given))


def check_what_has_no_rows_is_refused(folder: Path) -> None:
    run = up.parallelize(seeded(Net), up.Plan(data=2), optimizer=adamw, loss=functional.cross_entropy)
    whole = record()
    for strange in (Opaque(whole.x), np.ones((8, 8))):
        with pytest.raises(ValueError, match=f"a batch has a {type(strange).__name__}, whose data cannot be"):
            run.step(((strange, whole.gain), whole.labels))
    with pytest.raises(ValueError, match="a batch has no tensor"):
        run.step(("text", ()))
    with pytest.raises(ValueError, match="a batch has a Opaque"):
        next(iter(run.shard([(Opaque(whole.x), whole.labels)])))


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
