"""BatchNorm over the rows of all data ranks: the losses, gradients and statistics of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import crossed, swept
from parallel import models
from parallel.kept_buffers import spread_of
from parallel.plain_training import adamw, apart, begun, same, seeded, trained
from parallel.rows import Row

SYNC: dict[str, Any] = {"sync_batch_norm": True}
PLANS = (
    up.Plan(data=2, **SYNC), up.Plan(data=2, zero=1, **SYNC), up.Plan(data=2, zero=3, **SYNC),
    up.Plan(data=2, swap="memory", **SYNC), up.Plan(tensor=2, **SYNC), up.Plan(pipeline=2, **SYNC),
)  # fmt: skip
ON_FOUR = (
    up.Plan(data=2, tensor=2, zero=1, **SYNC), up.Plan(data=2, pipeline=2, **SYNC),
    up.Plan(data=4, zero=2, shard=2, **SYNC), up.Plan(data=2, pipeline=2, schedule="zbv", **SYNC),
)  # fmt: skip


def flat() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16),
        nn.BatchNorm1d(16, affine=False), nn.ReLU(), nn.Linear(16, 4),
    )  # fmt: skip


class Residual(nn.Module):
    """A block of a ResNet. A bias before BatchNorm would have a gradient of rounding errors only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(x + self.bn2(self.conv2(y)))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.SyncBatchNorm(8), nn.ReLU(), Residual(), Residual(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


class Skipping(nn.Module):
    """No nn.Sequential: its stages and its cut come from its program."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = first = functional.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x) + first
        return self.head(x.mean((2, 3)))


def on_cpu(make: Any) -> Any:
    """The model for one process: PyTorch's SyncBatchNorm does not run there."""

    def made() -> nn.Module:
        model = make()
        for index, child in enumerate(model.children()):
            if isinstance(child, nn.SyncBatchNorm):
                model[index] = nn.BatchNorm2d(child.num_features)
        return model

    return made


def check_losses_are_those_of_one_process(folder: Path) -> None:
    plans = PLANS if dist.get_world_size() == 2 else ON_FOUR
    for plan in plans:
        run = same(plan, flat, models.vector_batches(6, 9), functional.cross_entropy)
        alone = seeded(flat)
        if plan.pipeline == 1 and plan.tensor == 1:
            assert apart(run) == 0
            alone(models.vector_batches(6, 9)[0][0])
            first = begun(plan, flat)
            for batch in first.shard(models.vector_batches(1, 9)):
                first.step(batch)
            for name, value in first.model.named_buffers():
                wanted = alone.get_buffer(name)
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=f"{plan} {name}")
            first.close()


def check_pytorchs_own_class(folder: Path) -> None:
    """A model with nn.SyncBatchNorm runs on CPUs, too."""
    wanted = begun(up.Plan(data=2, **SYNC), on_cpu(resnet))
    run = begun(up.Plan(data=2, **SYNC), resnet)
    for batch in run.shard(models.image_batches(2, 8)):
        assert run.step(batch) == wanted.step(batch)
    run.model.eval()
    run.evaluate(batch)


class Activated(nn.BatchNorm2d):
    """A norm with its activation, as image models write it."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.num_batches_tracked.add_(1)
        x = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.2, eps=self.eps
        )
        return functional.relu(x) * scale


class Halved(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Written(nn.BatchNorm1d):
    """Takes the mean of its rows by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.weight + self.bias


def activated() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), Activated(8), nn.Conv2d(8, 8, 3, bias=False), Halved(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def check_a_forward_without_the_function_is_refused(folder: Path) -> None:
    for zero in (0, 3):
        run = up.parallelize(
            nn.Sequential(nn.Linear(16, 16), Written(16), nn.Linear(16, 4)),
            up.Plan(data=2, zero=zero, **SYNC),
            optimizer=adamw,
            loss=functional.cross_entropy,
        )
        with pytest.raises(
            ValueError, match=r'"1" is a Written, whose forward does not call functional.batch_norm'
        ):
            run.step((torch.ones(4, 16), torch.zeros(4, dtype=torch.int64)))


def cumulative() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4))


def images(make: Any, plans: Any, count: int = 4, **more: Any) -> Row:
    return Row(make, plans, given=models.image_batches(count, 9), **more)


def has_its_statistics(run: up.Run) -> bool:
    plain = trained(activated, models.image_batches(3, 9), functional.cross_entropy)[0]
    return all(
        torch.allclose(run.model.get_buffer(path).to(buffer), buffer, atol=1e-5)
        for path, buffer in plain.named_buffers()
    )


NETWORKS = {"a ResNet": on_cpu(resnet), "a program": Skipping}
TABLE = {
    "a cumulative average": Row(
        cumulative, PLANS[:1], sample=None, holds=lambda run: int(run.model[1].num_batches_tracked) == 3
    ),
    # their functional.batch_norm takes the rows of all ranks; statistics move as in one process
    "forwards of their own": images(activated, (*PLANS[:3], PLANS[4]), 3, holds=has_its_statistics),
    **{name: images(make, swept(PLANS[::5], PLANS[4:5])) for name, make in NETWORKS.items()},
    **{f"{name}, on four ranks": images(make, ON_FOUR) for name, make in NETWORKS.items()},
}  # fmt: skip


def check_wrong_use_is_named(folder: Path) -> None:
    replaced = nn.BatchNorm1d(16)
    replaced.forward = replaced.forward  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r'"1" is a BatchNorm1d whose forward is an attribute'):
        up.parallelize(
            nn.Sequential(nn.Linear(16, 16), replaced, nn.Linear(16, 4)),
            up.Plan(data=2, **SYNC),
            optimizer=adamw,
            loss=functional.cross_entropy,
        )
    with pytest.raises(ValueError, match="buffers is 'mine'; it must be one of average, first, own"):
        up.Plan(data=2, buffers="mine")
    run = begun(up.Plan(data=2, **SYNC), flat)
    with pytest.raises(ValueError, match=r"expected 2D or 3D input \(got 4D input\)"):
        run.step((torch.ones(4, 1, 1, 16), torch.zeros(4, dtype=torch.int64)))
    capture = up.capture(run.model, torch.ones(4, 16))  # it sends nothing
    assert any("batch_norm" in node.name for node in capture.nodes)


def check_buffers_of_the_first_rank_or_each_ones_own(folder: Path) -> None:
    batches = models.vector_batches(3, 8)
    for kind, zero in crossed(("first", "own"), (0, 2)):
        run = begun(up.Plan(data=2, zero=zero, buffers=kind), flat)
        mine = seeded(flat)
        (batch,) = run.shard(batches[:1])
        run.step(batch)
        told: list[Any] = [batch]
        if kind == "first":
            dist.broadcast_object_list(told)
        mine(told[0][0])
        wanted = mine[1].running_mean
        torch.testing.assert_close(run.model[1].running_mean, wanted, rtol=1e-5, atol=1e-6)
        assert (spread_of(run) == 0) == (kind == "first")
        kept = run.model[1].running_mean.clone()
        where = folder / f"{kind} {zero}"
        run.save(where)
        assert torch.equal(kept, run.model[1].running_mean)
        dist.broadcast(kept, 0)
        again = begun(up.Plan(data=2), flat)
        again.load(where)
        assert torch.equal(again.model[1].running_mean, kept), kind
