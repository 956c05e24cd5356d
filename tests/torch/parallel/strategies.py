"""`up.shard` in models under plans: losses and parameters of one process, moves, refusals. On 4 ranks."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel import models
from parallel.plain_training import alone, sgd

BATCHES = models.vector_batches(3, 8)
Cut = Callable[[Any, Any], Any]


def plain(function: Any, _strategy: Any) -> Any:
    return function


class MatMulCell(nn.Module):
    def __init__(self, rows: int, columns: int, strategy: Any, cut: Cut) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * 0.2)
        self.matmul = cut(torch.matmul, strategy)

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight)


class Net(nn.Module):
    """The program of the text: two products, each with its strategy over `k` ranks."""

    def __init__(self, k: int = 1, cut: Cut = plain) -> None:
        super().__init__()
        self.cell1 = MatMulCell(16, 32, ((k, 1), (1, 1)), cut)
        self.cell2 = MatMulCell(32, 4, ((1, 1), (1, k)), cut)

    def forward(self, x: Tensor) -> Tensor:
        return up.whole(self.cell2(self.cell1(x)))


class Mixed(nn.Module):
    """Sharded calls, layers that the tensor axis cuts, and DTensor's own operators between."""

    def __init__(self, k: int = 1, cut: Cut = plain) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.w, self.v = nn.Parameter(torch.randn(16, 24) * 0.2), nn.Parameter(torch.randn(24, 16) * 0.2)
        self.after = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.one, self.two = cut(torch.matmul, ((k, 1), (1, 1))), cut(torch.matmul, ((1, k), (k, 1)))
        self.softmax = cut(torch.softmax, ((1, k),))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        y = torch.tanh(self.one(x, self.w)) * 2
        return self.after(up.whole(self.softmax(self.two(y, self.v), 1)) + x)


class Convolutions(nn.Module):
    """Rows cut, then channels; the last product has rows in uneven parts."""

    def __init__(self, k: int = 1, cut: Cut = plain) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 1, 3, 3) * 0.3)
        self.v, self.b = nn.Parameter(torch.randn(8, 4, 2, 2) * 0.3), nn.Parameter(torch.randn(8))
        self.one = cut(functional.conv2d, ((k, 1, 1, 1), (1, 1, 1, 1)))
        self.two = cut(functional.conv2d, ((1, k, 1, 1), (1, k, 1, 1), (1,)))
        self.last = MatMulCell(8, 4, ((k, 1), (1, 1)), cut)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.one(x.view(-1, 1, 4, 4), self.w, padding=1))
        return up.whole(self.last(up.whole(self.two(y, self.v, self.b)).mean((2, 3))))


def compare(make: Any, plan: up.Plan, batches: Any = BATCHES) -> None:
    """Losses and parameters are those of one process."""
    loss = functional.cross_entropy
    wanted = alone(make, batches, loss, optimizer=sgd)
    torch.manual_seed(0)
    model = make(plan.tensor, up.shard)
    sample = batches[0][0][: len(batches[0][0]) // plan.data // plan.micro_batches]
    run = up.parallelize(model, plan, loss=loss, optimizer=sgd, sample=sample)
    with up.record() as moves:
        losses = [run.step(batch) for batch in run.shard(batches)]
    named = {entry.where for entry in moves}
    if make is Mixed and run.mesh.stage == 0:  # which calls operators, where a model has stages
        assert {"matmul, input 1, backward", "whole"} <= named, str(moves)
    torch.testing.assert_close(losses, wanted.losses, rtol=1e-5, atol=1e-5, msg=str(plan))
    for name, value in run.state_dict().items():
        torch.testing.assert_close(value, wanted.state[name], rtol=1e-5, atol=1e-5, msg=f"{plan}: {name}")
    run.close()


def check_the_program_of_the_text(_folder: Path) -> None:
    """Strategies, stages and micro-batches in one network; on stage 0 one gather for each micro-batch."""
    ranks = dist.get_world_size() // 2
    plan = up.Plan(tensor=ranks, pipeline=2, micro_batches=4)
    batches = models.vector_batches(3, 4 * ranks)
    compare(Net, plan, batches)
    run = up.parallelize(
        Net(ranks, up.shard),
        plan,
        loss=functional.cross_entropy,
        optimizer=sgd,
        sample=torch.zeros(ranks, 16),
    )
    (batch,) = run.shard(batches[:1])
    run.step(batch)
    with up.record() as moves:
        run.step(batch, watch=True)
    found = [(entry.where, entry.move.kind) for entry in moves]
    gathers = found.count(("whole", "all_gather"))
    backward = {entry.where for entry in moves if "backward" in entry.where}
    assert gathers == 4, str(moves)  # of what goes to the next stage, or of the result
    assert {entry.move.ranks for entry in moves} == {ranks}
    assert backward == {"matmul, input 1, backward", "matmul, input 0, backward"} or run.mesh.stage == 0
    told = [call for call in run.explain() if call.why.startswith("up.shard")]
    assert len(told) == len(moves), str(run.explain())
    run.close()


def check_every_axis(_folder: Path) -> None:
    two = {"data": 2, "tensor": 2}
    stages = {"pipeline": 2, "tensor": 2, "micro_batches": 2}
    usual = [
        (Mixed, {**two, "zero": 3}),
        (Mixed, {**two, "recompute": True, "micro_batches": 2}),
        (Mixed, {"tensor": 4, "sequence": True}),
        (Mixed, {**stages, "schedule": "zb-h1"}),
        (Convolutions, two),
    ]
    more = [(Mixed, {"tensor": 4}), (Mixed, two), (Mixed, stages), (Convolutions, {"tensor": 4})]
    for make, given in swept(usual, more):
        compare(make, up.Plan(**given))


def check_uneven_rows(_folder: Path) -> None:
    """Six rows over four ranks: 2, 1, 2 and 1."""
    uneven = [(x[:6], y[:6]) for x, y in BATCHES]
    for make in (Mixed, Convolutions):
        compare(make, up.Plan(tensor=4), uneven)


def check_a_loss_in_parts(_folder: Path) -> None:
    """A loss that is sharded is made whole."""
    loss = up.shard(functional.cross_entropy, ((2, 1), (2,)))
    wanted = alone(Net, BATCHES, functional.cross_entropy, optimizer=sgd).losses
    for plan in (up.Plan(data=2, tensor=2), up.Plan(pipeline=2, tensor=2, micro_batches=2)):
        torch.manual_seed(0)
        run = up.parallelize(Net(2, up.shard), plan, loss=loss, optimizer=sgd, sample=torch.zeros(2, 16))
        losses = [run.step(batch) for batch in run.shard(BATCHES)]
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-5)


def check_cross_entropy_is_that_of_pytorch(_folder: Path) -> None:
    """With masked classes, in 16 bits, and for labels that no class has."""
    entropy = up.shard(functional.cross_entropy, ((2, 2), (2,)))
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    masked = x.masked_fill(torch.arange(4) == (y + 1)[:, None] % 4, -math.inf)
    for logits, rounding in ((masked, 1e-6), (x.bfloat16(), 1e-2)):
        loss = functional.cross_entropy(logits, y)
        torch.testing.assert_close(up.whole(entropy(logits, y)), loss, rtol=rounding, atol=rounding)
    with pytest.raises(ValueError, match="reduction='none', expected mean or sum"):
        entropy(x, y, reduction="none")
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        up.whole(entropy(x, y + 1))


def check_groups(_folder: Path) -> None:
    """Outside of plans a group shares an operator, and another one beside it another operator."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    place = dist.get_rank() // 2
    x, w = BATCHES[place][0], torch.randn(16, 6, generator=torch.Generator().manual_seed(place))
    w.requires_grad_()
    for rows, columns in ((2, 1), (1, 2)):
        y = up.shard(torch.matmul, ((rows, 1), (1, columns)), group=groups[place])(x, w)
        assert y.device_mesh.size() == 2
        torch.testing.assert_close(up.whole(y), x @ w)
        (grad,) = torch.autograd.grad(up.whole(y).sum(), w)
        torch.testing.assert_close(grad, x.sum(0)[:, None].expand_as(w))
    with pytest.raises(ValueError, match="needs 4 ranks, there are 2"):
        up.shard(torch.matmul, ((4, 1), (1, 1)), group=groups[place])(x, w)
    with pytest.raises(ValueError, match="a DTensor on .* operators run on"):
        up.shard(torch.neg, ((1, 1),))(y)


def _writes(_net: Any, y: Tensor) -> Tensor:
    y = y.clone()
    y[1:] *= 2
    return up.whole(y)


class Refused(nn.Module):
    """Calls `run` with itself and x."""

    def __init__(self, run: Any, strategy: Any = ((2, 1), (1, 1)), **more: Any) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(16, 4)), nn.Parameter(torch.ones(4))
        self.linear, self.run = nn.Linear(4, 4), run
        self.matmul = up.shard(torch.matmul, strategy, **more)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.matmul(x, self.w))


def check_refusals(_folder: Path) -> None:
    """What is refused by name, before a parameter has changed."""

    def whole(_net: Any, y: Tensor) -> Tensor:
        return up.whole(y)

    tensor, data = up.Plan(data=2, tensor=2), up.Plan(data=4)
    parts = "left in parts: make it whole by up.whole"
    sharded = Refused(whole)
    sharded.linear = up.shard(nn.Linear(4, 4), ((1, 1), (2, 1), (2,)))
    world = dist.group.WORLD
    for model, plan, told in (
        (Refused(lambda _, y: y), tensor, f"the model returns a value that up.shard has {parts}"),
        (Refused(lambda net, y: up.whole(y + net.b)), tensor, f"aten.add takes a value .* {parts}"),
        (Refused(lambda net, y: net.linear(y)), tensor, f"aten.addmm takes a value .* {parts}"),
        (Refused(lambda _, y: up.whole(functional.dropout(y))), tensor, f"takes a value .* {parts}"),
        (Refused(whole), data, r"needs 2 ranks, the tensor axis of Plan\(data=4\) has 1: write tensor="),
        (Refused(whole, ((3, 1), (1, 1))), tensor, "of 3 parts some would be empty|needs 3 ranks"),
        (Refused(whole, ((1, 2), (1, 1))), tensor, "must be cut alike"),
        (Refused(whole, group=world), tensor, "Leave out group= and context="),
        (Refused(whole), up.Plan(context=2, tensor=2), "Leave out group= and context="),
        (Refused(whole), up.Plan(data=2, pipeline=2, micro_batches=2), "needs 2 ranks, the tensor axis"),
        (Refused(_writes), tensor, f"aten.mul_ writes into a value .* {parts}"),
        (sharded, tensor, "is a DTensor, as up.shard makes of a module"),
    ):
        before = [value.detach().clone() for value in (model.w, model.b)]
        with pytest.raises(ValueError, match=told):
            run = up.parallelize(
                model, plan, loss=functional.cross_entropy, optimizer=sgd, sample=torch.zeros(4, 16)
            )
            run.step(next(iter(run.shard(BATCHES))))
        assert all(map(torch.equal, before, (model.w, model.b)))
