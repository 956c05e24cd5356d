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
from effort import crossed
from parallel.outside_steps import DATA, LOSS, PIPELINE, TENSOR, ZERO3, by_hand, made, net, rows
from parallel.plain_training import adamw, begun, same, seeded


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
            loss, sample = (None, whole) if given is whole else (functional.cross_entropy, given[0])
            run = begun(plan, Net, loss, weigh="tokens", sample=sample)
            found = [run.step(one) for one in run.shard([given, given])]
            assert torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=1e-5), (plan, type(given))


def check_what_has_no_rows_is_refused(folder: Path) -> None:
    run = begun(up.Plan(data=2), Net)
    whole = record()
    for strange in (Opaque(whole.x), np.ones((8, 8))):
        with pytest.raises(ValueError, match=f"a batch has a {type(strange).__name__}, whose data cannot be"):
            run.step(((strange, whole.gain), whole.labels))
    with pytest.raises(ValueError, match="a batch has no tensor"):
        run.step(("text", ()))
    with pytest.raises(ValueError, match="a batch has a Opaque"):
        next(iter(run.shard([(Opaque(whole.x), whole.labels)])))


def slope(output: Tensor, given: Any) -> Tensor:
    """A loss that differentiates by an input."""
    x, y = given
    (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return LOSS(output, y) + found.square().mean()


def check_inputs_that_require_gradients(folder: Path) -> None:
    batches = [(x.requires_grad_(), (x, y)) for x, y in rows()]
    for plan in (DATA, dataclasses.replace(DATA, micro_batches=2)):
        same(plan, net, batches, slope, sample=batches[0][0])
    for plan in (TENSOR, PIPELINE):
        run = made(plan, loss=slope)
        with pytest.raises(ValueError, match=r"an input of the batch requires a gradient, and no rank of"):
            run.step(next(iter(run.shard(batches))))
    run = made(TENSOR)
    with pytest.raises(RuntimeError, match=r"an input of the model requires a gradient, of which each rank"):
        run.model(batches[0][0])


def check_layouts_of_batches(folder: Path) -> None:
    x, y = rows()[0]
    nested = torch.nested.nested_tensor(
        [row[: 2 + number] for number, row in enumerate(x)], layout=torch.jagged
    )
    for given in (x.to_sparse(), x.to_sparse_csr(), nested):
        run = made(DATA)
        for call in (run.step, run.evaluate, lambda batch, run=run: next(iter(run.shard([batch])))):
            with pytest.raises(ValueError, match=r"a batch has a \w+ tensor, which is not cut into rows"):
                call((given, y))
    wanted = by_hand(seeded(net))((x, y))
    wide = torch.stack([x, x], -1).flatten(1)[:, ::2]
    turned = torch.complex(x, -x).conj().imag  # with the bit that negates
    for given, plan in crossed((x.t().contiguous().t(), wide, turned), (DATA, ZERO3, TENSOR, PIPELINE)):
        run = made(plan)
        assert abs(run.step(next(iter(run.shard([(given, y)])))) - wanted) < 1e-5, plan
