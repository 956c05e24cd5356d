"""Backwards that come to a parameter twice, that fail, and gradients as other axes make them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono as un
import unisono.parallel as up
from effort import crossed
from parallel.plain_training import local
from parallel.run_features import whole
from unisono.parallel import replicated_parameters


class Shared(nn.Module):
    """A layer that is used four times, recomputed in backward or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            if self.reentrant is None:
                x = self.shared(x)
            else:
                x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return x


def square_run(model: nn.Module, plan: up.Plan) -> up.Run:
    return up.parallelize(
        model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=functional.mse_loss
    )


def own_batch(seed: int) -> tuple[Tensor, Tensor]:
    """Other rows on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(8, 4, generator=generator), torch.zeros(8, 4)


def check_a_shared_layer_may_be_recomputed(folder: Path) -> None:
    """Backward comes to its parameters four times."""

    def stepped(run: up.Run, reentrant: bool | None) -> dict[str, Tensor]:
        run.model.reentrant = reentrant
        run.step(own_batch(1))
        return whole(run)

    def equal(found: dict[str, Tensor]) -> None:
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name])

    wanted = stepped(square_run(Shared(), up.Plan(data=2)), None)
    equal(stepped(square_run(Shared(), up.Plan(data=2)), True))  # one bucket, reduced when all have come
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_parameters, "BUCKET_BYTES", 1)  # one for each parameter
        run = square_run(Shared(), up.Plan(data=2))
        with pytest.raises(RuntimeError, match=r"'shared\.(weight|bias)' again .*use_reentrant=False"):
            stepped(run, True)
        equal(stepped(run, False))


class Failing(torch.autograd.Function):
    """Fails in this backward, counted down; 0: never."""

    countdown = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Failing.countdown -= 1
        if Failing.countdown == 0:
            raise FloatingPointError("in the middle of backward")
        return grad


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Failing.apply(self.a(x)))


def check_a_step_after_an_error_starts_anew(folder: Path) -> None:
    plans = [up.Plan(data=2, zero=zero, micro_batches=2) for zero in range(4)]
    plans.append(up.Plan(data=2, precision="bf16", micro_batches=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_parameters, "BUCKET_BYTES", 1)
        for backward, plan in crossed((1, 2), plans):
            undisturbed, run = (square_run(Interrupted(), plan) for _ in range(2))
            Failing.countdown = backward
            with pytest.raises(FloatingPointError):
                run.step(own_batch(1))
            assert all(parameter.grad is None for parameter in run.optimizer.param_groups[0]["params"])
            assert run.steps == 0
            Failing.countdown = 0
            run.step(own_batch(2))
            undisturbed.step(own_batch(2))
            after = whole(run)
            for name, value in whole(undisturbed).items():
                assert torch.equal(after[name], value), (plan, backward, name)


def check_compressed_adam_takes_what_tensor_axes_make(folder: Path) -> None:
    """A partial sum is reduced; a graph that saved the old values fails; parts get different random bits."""
    mesh = dist.init_device_mesh("cpu", (2,))
    values = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    parameter = nn.Parameter(values)
    parameter.grad = DTensor.from_local(torch.full((3,), 1.0 + dist.get_rank()), mesh, [Partial()])
    optimizer = up.CompressedAdam([parameter], lr=0.1)
    graph = (parameter * parameter).sum()
    optimizer.step()
    mean = un.codecs.decode(local(optimizer.state[parameter]["exp_avg"]), "1-6-9")
    torch.testing.assert_close(mean, torch.full((3,), 0.3), rtol=2**-8, atol=0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()

    cut = nn.Parameter(distribute_tensor(torch.zeros(2000, 3), mesh, [Shard(0)]))
    cut.grad = distribute_tensor(torch.full((2000, 3), 0.3), mesh, [Shard(0)])
    optimizer = up.CompressedAdam([cut])
    optimizer.step()
    both = optimizer.state[cut]["exp_avg"].full_tensor().view(2, 1000, 3)
    assert not torch.equal(both[0], both[1])
    alone = nn.Parameter(torch.zeros(2000, 3))
    alone.grad = torch.full((2000, 3), 0.3)
    optimizer2 = up.CompressedAdam([alone])
    optimizer2.step()
    assert torch.equal(optimizer2.state[alone]["exp_avg"].view(2, 1000, 3), both)
