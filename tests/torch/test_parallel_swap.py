"""Swapping in one process: the losses of training in memory, bit for bit. See parallel/swaps.py."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from parallel import models
from unisono.parallel import Disk, Host, Swapped


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def in_memory(model: nn.Module, loss: Any, batches: Any, parts: int) -> list[float]:
    optimizer, losses = adamw(model.parameters()), []
    for x, y in batches:
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            part, share = loss(model(inputs), targets), len(inputs) / len(x)
            (part * share).backward()
            total += part.item() * share
        optimizer.step()
        losses.append(total)
    return losses


def same(make: Any, loss: Any, batches: Any, parts: int = 1, **more: Any) -> None:
    torch.manual_seed(0)
    alone = make()
    torch.manual_seed(0)
    model = make()
    wanted = in_memory(alone, loss, batches, parts)
    with Swapped(model, optimizer=adamw, loss=loss, **more) as swapped:
        assert [swapped.step(batch, micro_batches=parts) for batch in batches] == wanted
        assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters())
        assert 0 <= swapped.waited_s <= swapped.step_s
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", ["mlp", "tied", "conv"])
def test_the_same_bits(name: str, parts: int, tmp_path: Path) -> None:
    case = models.CASES[name]
    same(case.make, case.loss, case.batches(4, 9), parts, store=Disk(tmp_path))
    assert not list(tmp_path.iterdir())  # the file has no name


def test_host_memory() -> None:
    same(models.mlp, functional.cross_entropy, models.vector_batches(3, 4), store=Host())


class Recomputed(nn.Module):
    """Blocks that are recomputed in backward, one of them used twice, and a branch around."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = checkpoint(self.blocks[0], x, use_reentrant=False)
        second = checkpoint(self.blocks[1], first, use_reentrant=False)
        return self.head(self.blocks[2](second) + self.blocks[1](first))


def test_recomputation_reuse_and_branches() -> None:
    same(Recomputed, functional.cross_entropy, models.vector_batches(4, 6), 2)


def test_frozen_parameters_come_and_go_too() -> None:
    def make() -> nn.Module:
        model = models.mlp()
        model[2].requires_grad_(False)
        return model

    same(make, functional.cross_entropy, models.vector_batches(3, 4))


def test_clipping() -> None:
    case = models.CASES["mlp"]
    alone, model = models.make("mlp"), models.make("mlp")
    optimizer = adamw(alone.parameters())
    with Swapped(model, optimizer=adamw, loss=case.loss, clip=0.1) as swapped:
        for x, y in case.batches(4, 8):
            optimizer.zero_grad()
            loss = case.loss(alone(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            optimizer.step()
            assert swapped.step((x, y)) == pytest.approx(loss.item(), abs=1e-6)


class Full(Host):
    """A store with room for so many tensors."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, key: Any, tensor: Tensor) -> None:
        if key not in self._kept and len(self._kept) == self.room:
            raise OSError(28, "No space left on device")
        super().write(key, tensor)


# no room for gradients; for the state, when half of it is stepped
@pytest.mark.parametrize("times", [1, 2])
def test_a_full_store_ends_it(times: int) -> None:
    """What is left is of no step: training on would go unnoticed."""
    case = models.CASES["mlp"]
    model, (batch,) = case.make(), case.batches(1, 9)
    store = Full(times * len(list(model.parameters())) + 1)
    swapped = Swapped(model, optimizer=adamw, loss=case.loss, store=store)
    with pytest.raises(OSError, match="No space"):
        swapped.step(batch)
    store.room = 1000
    with pytest.raises(RuntimeError, match=r"incomplete since OSError: .*No space.*Make a new run"):
        swapped.step(batch)
    swapped.close()
    with pytest.raises(RuntimeError, match="incomplete"):
        swapped.step(batch)


def test_a_step_after_the_end() -> None:
    case = models.CASES["mlp"]
    swapped = Swapped(case.make(), optimizer=adamw, loss=case.loss, store=Host())
    swapped.close()
    with pytest.raises(RuntimeError, match="was closed"):
        swapped.step(next(iter(case.batches(1, 9))))


READS: dict[str, Any] = {
    "norm": lambda model, _: [p.norm() for p in model.parameters()],
    "data": lambda model, _: next(model.parameters()).data,
    "detach": lambda model, _: next(model.parameters()).detach(),
    "view": lambda model, _: next(model.parameters()).view(-1),
    "item": lambda model, _: next(model.parameters())[0],
    "in place": lambda model, _: next(model.parameters()).add_(1.0),
    "copy into": lambda model, _: next(model.parameters()).copy_(torch.zeros(1)),
    "as argument": lambda model, _: torch.add(1.0, next(model.parameters())),
    "in a list": lambda model, _: torch.cat([p.flatten() for p in model.parameters()]),
    "numpy": lambda model, _: next(model.parameters()).numpy(),
    "list": lambda model, _: next(model.parameters()).tolist(),
    "address": lambda model, _: next(model.parameters()).data_ptr(),
    "state_dict": lambda model, _: model.state_dict(),
    "to": lambda model, _: model.to(torch.float64),
    "load": lambda model, _: model.load_state_dict(model.state_dict()),
    "vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()),
    "moments": lambda _, optimizer: [s["exp_avg"].norm() for s in optimizer.state.values()],
    "save moments": lambda _, optimizer: torch.save(optimizer.state_dict(), io.BytesIO()),
    "initialize": lambda model, _: nn.init.zeros_(next(model.parameters())),
    "optimizer": lambda model, _: torch.optim.SGD(model.parameters(), lr=0.1).step(
        lambda: model[0].weight.sum()
    ),
}


@pytest.mark.parametrize("store", [Disk, Host])
def test_reading_what_is_swapped_out_raises(store: Any) -> None:
    """The memory is not there: reading it ended the interpreter."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    batch = torch.randn(4, 8), torch.randn(4, 8)
    with Swapped(model, optimizer=adamw, loss=functional.mse_loss, store=store()) as swapped:
        swapped.step(batch)
        for read in READS.values():
            with pytest.raises(
                RuntimeError, match=r"of a swapped tensor of shape \[8.*: its values are in memory only"
            ):
                read(model, swapped.optimizer)
        for copied in (copy.deepcopy, lambda model: torch.save(model, io.BytesIO())):
            with pytest.raises((RuntimeError, TypeError, AttributeError)):  # the hooks cannot be copied
                copied(model)
        assert "swapped out" in repr(list(model.parameters()))
        assert model[0].weight.shape == (8, 8)
        assert model[0].weight.grad is None
        assert torch.isfinite(model(batch[0])).all()
        swapped.step(batch)


@pytest.mark.parametrize("store", [Disk, Host])
def test_values_are_read_and_written_where_they_are_kept(store: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    batch = torch.randn(4, 8), torch.randn(4, 8)
    with Swapped(model, optimizer=adamw, loss=functional.mse_loss, store=store()) as swapped:
        swapped.step(batch)
        with swapped.mapped():
            before = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
            before.load_state_dict(model.state_dict())
            moments = [state["exp_avg"].clone() for state in swapped.optimizer.state.values()]
            with torch.no_grad():
                model[1].weight.zero_()
        assert sum(moment.norm() for moment in moments) > 0
        with torch.no_grad():
            before[1].weight.zero_()
        assert torch.equal(model(batch[0]), before(batch[0]))
        swapped.step(batch)
    assert model[1].weight.norm() > 0


def test_a_loss_that_reads_other_units_raises() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(y, target) + sum(p.norm() for p in model.parameters())

    with (
        Swapped(model, optimizer=adamw, loss=loss) as swapped,
        pytest.raises(RuntimeError, match="swapped tensor"),
    ):
        swapped.step((torch.randn(4, 8), torch.randn(4, 8)))
