"""precision="autocast": losses, norms and outputs of one process under torch.autocast."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel import models
from parallel.models import token_loss as loss
from parallel.plain_training import adamw, apart, begun, seeded

LOW = torch.bfloat16
EXACT = (
    up.Plan(data=2),
    up.Plan(data=2, zero=3),
    up.Plan(data=2, zero=2, micro_batches=2, recompute=True),
    up.Plan(data=2, zero=1, recompute="selective"),
    up.Plan(data=2, compression=up.PowerSGD(rank=64)),
)
ROUNDED = (up.Plan(tensor=2), up.Plan(tensor=2, sequence=True), up.Plan(tensor=2, data=1, micro_batches=2))


class Block(nn.Module):
    """Makes f32 tensors in its forward, as a mask, positions and a state, and has f32 buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mixes", torch.randn(16, 16) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), -1e4).triu(1)
        q, k, v = self.first(self.norm(x)).unflatten(-1, (4, 12)).transpose(1, 2).chunk(3, -1)
        weights = (q @ k.mT * 0.5 + mask).softmax(-1)
        found = (weights @ v).transpose(1, 2).flatten(2)
        state, states = torch.zeros(len(x), 16), []
        for step in range(length):
            state = torch.tanh(state @ self.mixes + found[:, step])
            states.append(state)
        places = torch.arange(length).float().unsqueeze(-1) / length
        return x + self.last(torch.stack(states, 1) + places) * self.gain


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(11, 16), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    drawn = (torch.randint(11, (8, 6), generator=generator) for _ in range(count))
    return [(ids, ids.roll(1, 1)) for ids in drawn]


def alone(given: list[Any], parts: int) -> tuple[list[float], list[float], Tensor]:
    """Losses and norms of one process, which computes the rows in parts; and outputs of the first batch."""
    model = seeded(Model)
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for x, y in given:
        optimizer.zero_grad()
        total = 0.0
        for rows, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with torch.autocast("cpu", LOW):
                value = loss(model(rows), targets) / parts
            value.backward()
            total += value.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        losses.append(total)
    with torch.no_grad(), torch.autocast("cpu", LOW):
        return losses, norms, model(given[0][0])


def check_losses_are_those_of_one_process(folder: Path) -> None:
    given = batches(4)
    usual = (EXACT[1], EXACT[3], ROUNDED[1])
    for plan in swept(usual, [plan for plan in (*EXACT, *ROUNDED) if plan not in usual]):
        far = 1e-5 if plan in EXACT else 5e-2
        wanted, norms, outputs = alone(given, plan.data * plan.micro_batches)
        whole = up.Plan(**{**vars(plan), "precision": "autocast", "clip": 1e9})
        run = begun(whole, Model, loss, sample=given[0][0])
        mine, found = list(run.shard(given)), []
        for batch, norm in zip(mine, norms, strict=True):
            found.append(run.step(batch))
            assert abs(run.grad_norm - norm) < far * max(norm, 1.0), (plan, run.grad_norm, norm)
        worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        print(f"{plan}: losses {worst:.1e}, apart {apart(run):.1e}", flush=True)
        assert worst < far, (plan, found, wanted)
        assert apart(run) < 1e-5, plan
        assert all(parameter.dtype == torch.float32 for parameter in run.parameters.values())
        run.model.eval()
        output = run.predict(mine[0][0])
        rows = outputs.chunk(plan.data)[run.mesh.everyone.row if plan.data > 1 else 0]
        assert output.dtype == outputs.dtype == LOW
        assert (output - rows).abs().max() < 5e-2 * rows.abs().max(), plan
        assert not torch.is_autocast_enabled("cpu")


def check_autocast_of_the_caller(folder: Path) -> None:
    """A loop that has its own is as before."""
    given = batches(2)
    wanted, *_ = alone(given, 2)
    run = begun(up.Plan(data=2), Model, loss)
    found = []
    for batch in run.shard(given):
        with torch.autocast("cpu", LOW):  # which keeps casts of weights until its end
            found.append(run.step(batch))
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-5, (found, wanted)


class Mixes(nn.Module):
    """A product with a buffer, which bf16 does not mix with f32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("matrix", torch.randn(16, 16) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) @ self.matrix))


def mixes(*, low: bool) -> nn.Module:
    model: Any = seeded(Mixes)
    model.matrix = model.matrix.to(LOW if low else torch.float32)
    return model


def low_alone(given: list[Any], parts: int) -> list[float]:
    """One process: masters in f32, and a model that is bf16, with its buffers."""
    master, low, losses = mixes(low=True), seeded(Mixes).to(LOW), []
    optimizer = adamw(master.parameters())
    for x, y in given:
        optimizer.zero_grad()
        pairs, total = [*zip(master.parameters(), low.parameters(), strict=True)], 0.0
        for rows, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
            for mine, other in pairs:
                other.data.copy_(mine)
                other.grad = None
            value = functional.cross_entropy(low(rows.to(LOW)).float(), targets)
            value.backward()
            total += value.item() / parts
            for mine, other in pairs:
                grad = other.grad.float() / parts
                mine.grad = grad if mine.grad is None else mine.grad + grad
        optimizer.step()
        losses.append(total)
    return losses


def check_buffers_in_low_precision(folder: Path) -> None:
    """They stay as they are: f32 ones are not mixed with bf16, others train as in model.bfloat16()."""
    given = models.vector_batches(3, 8)
    options: Any = {"optimizer": adamw, "loss": functional.cross_entropy, "sample": given[0][0]}
    for plan in ({"data": 2}, {"data": 2, "zero": 3}, {"pipeline": 2}, {"tensor": 2}):
        whole = up.Plan(**plan, precision="bf16")
        says = r"\(matrix\): write module\.matrix = module\.matrix\.bfloat16\(\) before parallelize"
        with pytest.raises((ValueError, RuntimeError), match=says) as caught:
            run = up.parallelize(mixes(low=False), whole, **options)
            run.step(next(iter(run.shard(given))))
        without = "write precision='autocast' without pipeline=" in str(caught.value)
        assert "'autocast'" in str(caught.value) and without == ("pipeline" in plan), caught.value
        print(caught.value, flush=True)
        run = up.parallelize(mixes(low=True), whole, **options)
        found, wanted = [run.step(batch) for batch in run.shard(given)], low_alone(given, whole.data)
        worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        print(f"{plan}: losses {worst:.1e}", flush=True)
        assert worst < (1e-2 if "tensor" in plan else 1e-5), (plan, found, wanted)
        state = run.state_dict()
        assert not state or state["matrix"].dtype == LOW


def check_what_does_not_go_with_it(folder: Path) -> None:
    with pytest.raises(ValueError, match="autocast16"):
        up.Plan(precision="autocast16")  # type: ignore[arg-type]
    x, y = batches(1)[0]
    with pytest.raises(ValueError, match="plan: precision='autocast' is not predicted"):
        up.plan(Model(), sample=(x, y), ranks=2, optimizer=adamw, loss=loss, precision="autocast")
    with pytest.raises(ValueError, match="precision='autocast' is not priced"):
        up.StepPredictor(Model(), (x, y), loss=loss).forecast(up.Plan(data=2, precision="autocast"))
