"""Training with compressed gradients, under DDP and under plans: `check_*(rank, size)`, run by worker.py."""

import math
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import unisono.parallel as up
from effort import crossed
from parallel import models
from parallel.compression import same_everywhere

# ---- DDP -----------------------------------------------------------------------------------------------


def trained(
    rank: int, size: int, settings: Any, steps: int, make: Any = torch.optim.AdamW, **options: Any
) -> tuple[nn.Module, Any, float]:
    model, case = models.make("gpt"), models.CASES["gpt"]
    ddp = DistributedDataParallel(model, **options)
    compression = settings.attach(ddp) if settings is not None else None
    optimizer = make(model.parameters(), lr=3e-3)
    losses = []
    for x, y in case.batches(steps, 4 * size):
        optimizer.zero_grad()
        loss = case.loss(ddp(x[rank::size]), y[rank::size])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mean = torch.tensor(sum(losses[-5:]) / 5)
    dist.all_reduce(mean)
    return model, compression, mean.item() / size


def check_ddp_trains_with_every_kind(rank, size):
    _, _, wanted = trained(rank, size, None, 12)
    kinds = (up.PowerSGD(rank=4, start=5), up.Compressed("bf16"), up.Compressed("int8"))
    for settings, options in crossed(kinds, ({"bucket_cap_mb": 0.03}, {"gradient_as_bucket_view": True})):
        model, compression, loss = trained(rank, size, settings, 12, **options)
        same_everywhere(dict(model.named_parameters()))
        assert compression.steps == 12
        assert abs(loss / wanted - 1) < 0.05, (settings, loss, wanted)


def check_the_first_steps_are_exact(rank, size):
    wanted, _, _ = trained(rank, size, None, 3, torch.optim.SGD, bucket_cap_mb=0.03)
    found, compression, _ = trained(
        rank, size, up.PowerSGD(rank=1, start=3), 3, torch.optim.SGD, bucket_cap_mb=0.03
    )
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert compression.memory() == 0


def check_a_loss_scaler_skips_and_goes_on(rank, size):
    for settings in (up.PowerSGD(rank=2, start=0), up.Compressed("fp16", small=0)):
        model = models.make("gpt")
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
        settings.attach(ddp)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        case = models.CASES["gpt"]
        for step, (x, y) in enumerate(case.batches(6, 4 * size)):
            optimizer.zero_grad()
            loss = case.loss(ddp(x[rank::size]), y[rank::size])
            if step == 2 and rank == 0:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            before = model[0].token.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, model[0].token.weight) == (step == 2)
        same_everywhere(dict(model.named_parameters()))
        assert all(torch.isfinite(p).all() for p in model.parameters())


def check_gradients_that_are_not_compressible_are_refused(rank, size):
    for model, says in (
        (nn.Linear(4, 4).double(), "'weight' is torch.float64 on cpu"),
        (nn.Linear(4, 4).bfloat16(), "'weight' is torch.bfloat16"),
    ):
        with pytest.raises(TypeError, match=says):
            up.PowerSGD().attach(DistributedDataParallel(model))


# ---- plans ---------------------------------------------------------------------------------------------


def planned(plan: up.Plan, name: str = "gpt") -> up.Run:
    return up.parallelize(
        models.make(name),
        plan,
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
        loss=models.CASES[name].loss,
    )


def check_a_plan_trains_with_every_kind(rank, size):
    batches = models.CASES["gpt"].batches(10, 4 * size)
    run = planned(up.Plan(data=size))
    assert run.compression is None
    wanted = [run.step(batch) for batch in run.shard(batches)]
    for settings in (up.PowerSGD(rank=4, start=3), up.Compressed("bf16"), up.Compressed("int8")):
        run = planned(up.Plan(data=size, compression=settings, micro_batches=2))
        found = [run.step(batch) for batch in run.shard(batches)]
        same_everywhere(dict(run.model.named_parameters()))
        assert run.compression.choices["1.fc1.weight"] != "exact"
        assert run.compression.choices["1.fc1.bias"] == "exact"
        assert run.compression.memory() > 0
        assert abs(sum(found[-3:]) / sum(wanted[-3:]) - 1) < 0.05, settings
    report = run.step(next(iter(run.shard(batches))), watch=True) and run.explain()
    calls = [call for call in report if call.why == "gradients are averaged over replicas, compressed"]
    assert {call.axis for call in calls} == {"replica"}
    uncompressed = 2 * (size - 1) / size * 4 * sum(p.numel() for p in run.model.parameters())
    assert sum(call.nbytes for call in calls) < 0.45 * uncompressed


class Uneven(nn.Module):
    """Rank 0 leaves a matrix unused, where rows say so."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Any) -> Any:
        return self.other(x) if bool((x[:, 0] > 1e3).all()) else self.used(x)


def check_who_used_a_parameter_is_counted_exactly(rank, size):
    for settings in (up.PowerSGD(rank=2, start=0), up.Compressed("int4", small=0)):
        run = up.parallelize(
            Uneven(),
            up.Plan(data=size, compression=settings),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            loss=functional.mse_loss,
        )
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        run.step((x, x))
        before = {name: one.clone() for name, one in run.compression.buffers().items() if "used" in name}
        run.step((x.index_fill(1, torch.tensor(0), 1e4), x))  # no rank uses it
        after = run.compression.buffers()
        assert before
        assert all(torch.equal(after[name], one) for name, one in before.items())
        if rank == 0:
            x = x.clone()
            x[:, 0] = 1e4
        with pytest.raises(RuntimeError, match="on .* of the data ranks only"):
            run.step((x, x))
        run.step((x.clamp(-1, 1), x.clamp(-1, 1)))
        same_everywhere(dict(run.model.named_parameters()))


def shared_folder(rank: int) -> str:
    folder = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(folder, 0)
    return folder[0]


def check_a_checkpoint_goes_on_bit_for_bit(rank, size):
    folder = shared_folder(rank)
    batches = models.CASES["mlp"].batches(8, 4 * size)
    for number, settings in enumerate(
        (up.PowerSGD(rank=2, start=2, saving=1.0, errors="1-6-9"), up.Compressed("int8", small=0))
    ):
        plan, path = up.Plan(data=size, compression=settings), f"{folder}/{number}"
        run = planned(plan, "mlp")
        for batch in run.shard(batches[:4]):
            run.step(batch)
        run.save(path)
        wanted = [run.step(batch) for batch in run.shard(batches[4:])]
        other = planned(plan, "mlp")
        other.load(path)
        assert other.compression.memory() > 0
        assert [other.step(batch) for batch in other.shard(batches[4:])] == wanted
        plain = planned(up.Plan(data=size), "mlp")
        plain.load(path)  # without compression: there is no room for the buffers, and no need
        assert plain.steps == 4
        changed = planned(up.Plan(data=size, compression=up.PowerSGD(rank=3, saving=0.5)), "mlp")
        changed.load(path)
        losses = [changed.step(batch) for batch in changed.shard(batches[4:])]
        assert all(math.isfinite(loss) for loss in losses)
