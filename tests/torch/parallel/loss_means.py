"""Losses that are no means, and losses that read numbers: as in one process, or refused by all ranks."""

import functools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import crossed
from parallel import plain_training

PLANS = (
    up.Plan(data=2),
    up.Plan(data=2, zero=3, micro_batches=2),
    up.Plan(pipeline=2, micro_batches=4),
    up.Plan(tensor=2, micro_batches=3),
)
WEIGHTS = torch.tensor([0.1, 1.0, 5.0])
GENERATOR = torch.Generator().manual_seed(1)
LABELS = [
    (torch.randn(8, 4, generator=GENERATOR), torch.randint(3, (8,), generator=GENERATOR)) for _ in range(3)
]
SHARES = [(x, functional.one_hot(y, 3).float()) for x, y in LABELS]
MEAN, REFUSED = "mean", "refused"


def contrastive(output: Tensor, labels: Tensor) -> Tensor:
    wanted = functional.one_hot(labels, 3).float() + 0.1
    return functional.cross_entropy(output @ wanted.t(), torch.arange(len(output)))


def dice(output: Tensor, shares: Tensor) -> Tensor:
    found = output.sigmoid()
    return 1 - 2 * (found * shares).sum() / (found.sum() + shares.sum())


def focal(output: Tensor, labels: Tensor) -> Tensor:
    each = functional.cross_entropy(output, labels, reduction="none")
    hard = (1 - (-each).exp()) ** 2
    return (hard * each).sum() / hard.sum()


class Following(nn.Module):
    """A mean over rows with a state, which a trial must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("center", torch.zeros(3))

    def forward(self, output: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        self.center.lerp_(output.detach().mean(0), 0.1)
        return functional.cross_entropy(output, labels)


CASES: dict[str, tuple[Any, Any, str]] = {
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), LABELS, MEAN),
    "class weights, an ignored label": (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1), LABELS, MEAN),
    "class weights, smoothing": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), LABELS, MEAN),
    "class weights, shares": (nn.CrossEntropyLoss(weight=WEIGHTS), SHARES, MEAN),
    "a partial": (functools.partial(functional.cross_entropy, weight=WEIGHTS), LABELS, MEAN),
    "a sum": (nn.CrossEntropyLoss(reduction="sum"), LABELS, MEAN),
    "a sum of a function": (functools.partial(functional.mse_loss, reduction="sum"), SHARES, MEAN),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), SHARES, MEAN),
    "pos_weight, a sum": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS, reduction="sum"), SHARES, MEAN),
    "margins": (nn.MultiMarginLoss(weight=WEIGHTS), LABELS, MEAN),
    "an own mean": (lambda o, y: ((o - y) ** 2).mean(), SHARES, MEAN),
    "an own mean with a state": (Following(), LABELS, MEAN),
    "a batchmean": (lambda o, y: functional.kl_div(o.log_softmax(1), y, reduction="batchmean"), SHARES, MEAN),
    "own weights": (lambda o, y: functional.nll_loss(o.log_softmax(1), y, weight=WEIGHTS), LABELS, REFUSED),
    "an own sum": (lambda o, y: ((o - y) ** 2).sum(), SHARES, REFUSED),
    "by a constant": (lambda o, y: functional.cross_entropy(o, y, reduction="sum") / 8, LABELS, REFUSED),
    "contrastive": (contrastive, LABELS, REFUSED),
    "dice": (dice, SHARES, REFUSED),
    "focal": (focal, LABELS, REFUSED),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def alone(loss: Any, batches: Any) -> list[float]:
    return plain_training.alone(net, batches, loss, optimizer=sgd).losses


def start(plan: up.Plan, loss: Any, batches: Any, **more: Any) -> up.Run:
    return up.parallelize(net(), plan, optimizer=sgd, loss=loss, sample=batches[0][0], **more)


def check_losses_are_those_of_one_process_or_refused(folder: Path) -> None:
    few = ("class weights", "a sum", "an own mean with a state", "own weights", "contrastive", "dice")
    for plan, name in [*crossed(PLANS[:1], [*CASES]), *crossed(PLANS[1:], few)]:
        loss, batches, wanted = CASES[name]
        run = start(plan, loss, batches)
        if wanted is REFUSED:
            with pytest.raises(ValueError, match="the loss is no mean of its parts"):
                pytest.fail(f"{plan} {name}: {run.step(next(iter(run.shard(batches))))}")
            continue
        expected = alone(loss, batches)
        assert run.evaluate(next(iter(run.shard(batches)))) == pytest.approx(expected[0], rel=1e-4)
        found = [run.step(batch) for batch in run.shard(batches)]
        assert found == pytest.approx(expected, rel=1e-4), (plan, name)


def check_what_the_error_says_helps(folder: Path) -> None:
    own, batches, _ = CASES["own weights"]
    for plan in PLANS:
        run = start(plan, own, batches, weigh=lambda labels: WEIGHTS[labels].sum())
        assert [run.step(batch) for batch in run.shard(batches)] == pytest.approx(
            alone(own, batches), rel=1e-4
        )
    run = start(PLANS[0], contrastive, LABELS, weigh="rows")  # as DDP does
    assert run.step(next(iter(run.shard(LABELS)))) > 0
    run = start(PLANS[0], own, LABELS)
    with pytest.raises(ValueError, match="the loss is no mean of its parts"):
        run.evaluate(next(iter(run.shard(LABELS))))
    for mine in (lambda o, y: (own(o, y), len(y)), lambda o, y: (own(o, y) * len(y), 1)):
        run = start(PLANS[0], mine, LABELS, weigh="counted")
        with pytest.raises(ValueError, match="the loss is no mean of its parts"):
            run.step(next(iter(run.shard(LABELS))))


def check_sums_over_several_calls(folder: Path) -> None:
    loss = nn.CrossEntropyLoss(reduction="sum")
    joined = [tuple(torch.cat(some) for some in zip(*LABELS, strict=True))]
    run = start(PLANS[0], loss, LABELS)
    for number, batch in enumerate(run.shard(LABELS)):
        run.step(batch, update=number == 2)
    after = run.evaluate(next(iter(run.shard(joined))))
    model = net()
    value = loss(model(joined[0][0]), joined[0][1])
    value.backward()
    sgd(model.parameters()).step()
    assert after == pytest.approx(loss(model(joined[0][0]), joined[0][1]).item(), rel=1e-4)


def check_losses_that_draw_numbers_and_few_rows(folder: Path) -> None:
    def noisy(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output + 0.1 * torch.randn_like(output), labels)

    def chancy(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output * (1 + random.random()), labels)

    for loss in (noisy, chancy):
        run = start(PLANS[0], loss, LABELS)
        assert run.step(next(iter(run.shard(LABELS)))) > 0
    few = [(x[:2], y[:2]) for x, y in LABELS]
    run = start(
        PLANS[0], CASES["own weights"][0], few
    )  # one row on each rank, in the first step of one class
    with pytest.raises(ValueError, match="the loss is no mean of its parts"):
        for batch in run.shard(few):
            run.step(batch)
    run = start(PLANS[0], contrastive, few)
    with pytest.raises(ValueError, match="the loss is no mean of its parts"):
        run.step(next(iter(run.shard(few))))
    own = CASES["an own mean"][0]
    few = [(x[:2], y[:2]) for x, y in SHARES]
    found = [run.step(batch) for run in (start(PLANS[0], own, few),) for batch in run.shard(few)]
    assert found == pytest.approx(alone(own, few), rel=1e-4)


# ---- numbers that a loss reads, under a context axis ----

STATE: dict[str, float] = {"beta": 0.0}
HELD = SimpleNamespace(beta=0.0, tensor=torch.zeros(()))
IDS = torch.arange(24).reshape(4, 6) % 9


class Annealed(nn.Module):
    """Reads an attribute."""

    beta = 0.0

    def forward(self, output: Tensor, ids: Tensor) -> Tensor:
        return weighted(output, ids, self.beta)


def weighted(output: Tensor, ids: Tensor, beta: float | Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), ids.flatten()) + beta * output.square().mean()


def words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9))


def check_a_context_axis_follows_the_numbers_of_a_loss(folder: Path) -> None:
    module, step, array = Annealed(), [0], np.zeros(1, np.float32)
    losses = {
        "a dict": lambda o, y: weighted(o, y, STATE["beta"]),
        "an attribute": module,
        "an object": lambda o, y: weighted(o, y, HELD.beta),
        "a closure": lambda o, y: weighted(o, y, step[0] / 4),
        "a number made a tensor": lambda o, y: weighted(o, y, torch.tensor(STATE["beta"])),
        "another tensor": lambda o, y: weighted(o, y, HELD.tensor),
        "an array": lambda o, y: weighted(o, y, torch.from_numpy(array)[0]),
    }
    for name, loss in losses.items():
        step[0], model, wanted, found = 0, words(), [], []
        optimizer = sgd(model.parameters())
        run = up.parallelize(words(), up.Plan(context=2), optimizer=sgd, loss=loss, sample=IDS)
        for number, batch in enumerate(run.shard([(IDS, IDS)] * 3)):
            step[0] = number
            STATE["beta"] = HELD.beta = module.beta = array[0] = number / 4
            HELD.tensor = torch.tensor(number / 4)
            optimizer.zero_grad()
            value = loss(model(IDS), IDS)
            value.backward()
            optimizer.step()
            wanted.append(value.item())
            found.append(run.step(batch))
        assert found == pytest.approx(wanted, rel=1e-4), name


def check_numbers_that_a_context_axis_cannot_follow(folder: Path) -> None:
    calls = [0]

    def counting(output: Tensor, ids: Tensor) -> Tensor:
        calls[0] += 1
        return weighted(output, ids, calls[0] / 10)

    run = up.parallelize(words(), up.Plan(context=2), optimizer=sgd, loss=counting, sample=IDS)
    with pytest.raises(ValueError, match="reads another number each time"):
        run.step((IDS, IDS))
    rank = torch.distributed.get_rank()
    run = up.parallelize(
        words(),
        up.Plan(context=2),
        optimizer=sgd,
        loss=lambda o, y: weighted(o, y, STATE["beta"]),
        sample=IDS,
    )
    run.step((IDS, IDS))
    STATE["beta"] = 0.5 + rank
    with pytest.raises(ValueError, match="reads other numbers on some ranks"):
        run.step((IDS, IDS))


# ---- up.shard ----


class Sharding(nn.Module):
    """Products that are sharded by themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.product = up.shard(torch.matmul, ((2, 1), (1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return up.whole(self.product(x, self.weight))


def check_shard_within_a_plan_is_refused(folder: Path) -> None:
    run = up.parallelize(Sharding(), up.Plan(data=2), optimizer=sgd, loss=functional.cross_entropy)
    with pytest.raises(ValueError, match=r"the tensor axis of Plan\(data=2\) has 1"):
        run.step(next(iter(run.shard(LABELS))))
    assert Sharding()(LABELS[0][0]).shape == (8, 3)


def check_shard_compares_its_plain_inputs(folder: Path) -> None:
    x = LABELS[0][0] + torch.distributed.get_rank()
    with pytest.raises(ValueError, match=r"shard\(matmul\): plain tensors count as replicated"):
        Sharding()(x)
    with pytest.raises(ValueError, match=r"shard\(Linear\): plain tensors count as replicated"):
        torch.manual_seed(0)
        up.shard(nn.Linear(4, 4), ((1, 1), (2, 1), (2,)))(x)
