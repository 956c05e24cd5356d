"""Loops of `run.backward` and `run.update` train as in one process: `Alone` gives them plain PyTorch."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import crossed
from parallel import models
from parallel.plain_training import seeded

PLANS = [up.Plan(data=2), up.Plan(data=2, zero=1), up.Plan(data=2, zero=3)]
TOLERANCE = 2e-6
LOSS = functional.cross_entropy


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, eps=1e-3)  # the usual one divides rounding by rounding


def net(inputs: int = 16, outputs: int = 4) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, outputs)
    )


class Alone:
    """One process: what a loop of PyTorch has."""

    def __init__(self, make: Callable[[], nn.Module], optimizer: Any) -> None:
        self.model = seeded(make)
        self.optimizer = optimizer(self.model.parameters())
        self.losses: list[float] = []
        self._lost: Any = 0.0

    def rows(self, batches: Sequence[Any]) -> Iterator[Any]:
        self.optimizer.zero_grad()
        return iter(batches)

    def backward(
        self, loss: Tensor, *, also: Sequence[Any] = (), retain_graph: bool = False, **_rows: Any
    ) -> None:
        loss.backward(retain_graph=retain_graph)
        for one in (self, *also):
            one._lost = one._lost + loss.detach()

    def update(self, closure: Any = None) -> None:
        if closure is not None:

            def anew() -> Tensor:
                self.optimizer.zero_grad()
                self._lost = 0.0
                closure()
                return self._lost  # type: ignore[no-any-return]

            self._lost = self.optimizer.step(anew)
        else:
            self.optimizer.step()
        self.losses.append(float(self._lost))
        self._lost = 0.0
        self.optimizer.zero_grad()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def whole(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.model.state_dict().items()}


class Planned:
    """The same under a plan."""

    def __init__(self, plan: up.Plan, make: Callable[[], nn.Module], optimizer: Any) -> None:
        self.run = up.parallelize(seeded(make), plan, optimizer=optimizer, loss=None)
        self.model, self.optimizer = self.run.model, self.run.optimizer
        self.losses: list[float] = []

    def rows(self, batches: Sequence[Any]) -> Iterator[Any]:
        return iter(self.run.shard(batches))

    def backward(self, loss: Tensor, *, also: Sequence[Any] = (), **more: Any) -> None:
        self.run.backward(loss, also=[one.run for one in also], **more)

    def update(self, closure: Any = None) -> None:
        self.losses.append(float(self.run.update(closure)))

    def parameters(self) -> list[nn.Parameter]:
        return list(self.run.trained.values())

    def whole(self) -> dict[str, Tensor]:
        return self.run.state_dict()


World = Callable[..., Any]
BATCHES = models.vector_batches(4, 8)


def fgsm(world: World) -> list[Any]:
    """Goodfellow et al., 2015: rows are moved along the gradient of their loss."""
    own = world(net, sgd)
    for x, y in own.rows(BATCHES):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(LOSS(own.model(x), y), x)
        own.backward(LOSS(own.model((x + 0.1 * slope.sign()).detach()), y))
        own.update()
    return [own]


def fgsm_by_backward(world: World) -> list[Any]:
    """The attack's gradient comes by a backward, and those of the parameters go."""
    own = world(net, sgd)
    for x, y in own.rows(BATCHES):
        x = x.clone().requires_grad_()
        LOSS(own.model(x), y).backward()
        own.optimizer.zero_grad()
        own.backward(LOSS(own.model((x + 0.1 * x.grad.sign()).detach()), y))
        own.update()
    return [own]


def gan(world: World) -> list[Any]:
    """Goodfellow et al., 2014: two models, two optimizers."""
    player, judge = world(lambda: net(4, 16), adam), world(lambda: net(16, 1), adam)
    bce = functional.binary_cross_entropy_with_logits
    for x, _ in judge.rows(BATCHES):
        noise = x[:, :4].cos()
        fake, one, zero = player.model(noise), x.new_ones(len(x), 1), x.new_zeros(len(x), 1)
        judge.optimizer.zero_grad()
        judge.backward(bce(judge.model(x), one) + bce(judge.model(fake.detach()), zero))
        judge.update()
        player.optimizer.zero_grad()
        player.backward(bce(judge.model(fake), one))
        player.update()
    return [player, judge]


def frozen_gan(world: World) -> list[Any]:
    """The judge is frozen while the player learns, and twice as busy."""
    player, judge = world(lambda: net(4, 16), adam), world(lambda: net(16, 1), adam)
    bce = functional.binary_cross_entropy_with_logits
    for x, _ in judge.rows(BATCHES):
        noise, one, zero = x[:, :4].cos(), x.new_ones(len(x), 1), x.new_zeros(len(x), 1)
        for _ in range(2):
            judge.model.requires_grad_(True)
            judge.optimizer.zero_grad()
            with torch.no_grad():
                fake = player.model(noise)
            judge.backward(bce(judge.model(x), one))
            judge.backward(bce(judge.model(fake), zero))
            judge.update()
        judge.model.requires_grad_(False)
        player.backward(bce(judge.model(player.model(noise)), one))
        player.update()
        judge.model.requires_grad_(True)
    return [player, judge]


def wgan_gp(world: World) -> list[Any]:
    """Gulrajani et al., 2017: the norm of the judge's gradient by its inputs is in its loss."""
    player, judge = world(lambda: net(4, 16), adam), world(lambda: net(16, 1), adam)
    for number, (x, y) in enumerate(judge.rows(BATCHES)):
        fake = player.model(x[:, :4].cos())
        share = y[:, None] / 4
        between = (share * x + (1 - share) * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(judge.model(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        judge.optimizer.zero_grad()
        judge.backward(judge.model(fake.detach()).mean() - judge.model(x).mean() + 10 * penalty)
        judge.update()
        if number % 2:
            player.backward(-judge.model(player.model(x[:, :4].cos())).mean())
            player.update()
    return [player, judge]


def pinn(world: World) -> list[Any]:
    """Raissi et al., 2019: u'' = -u in the loss."""
    own = world(lambda: net(2, 1), adam)
    for rows, _ in own.rows(BATCHES):
        x = rows[:, :2].clone().requires_grad_()
        u = own.model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        own.backward((second[:, :1] + u).square().mean() + (u - 1).square().mean())
        own.update()
    return [own]


class Weighed(nn.Module):
    """Kendall et al., 2018: the weight of each task is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(2))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, losses: Tensor) -> Tensor:
        return (losses * (-self.scales).exp() + self.scales).sum() + (self.bias - 1).square()


class Task(nn.Module):
    """A model with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = net(), Weighed()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.net(x)
        return self.loss(torch.stack([LOSS(output, y), output.square().mean()]))  # type: ignore[no-any-return]


def weight_in_the_model(world: World, make: Any = Task, optimizer: Any = adam) -> list[Any]:
    """The model returns its loss."""
    own = world(make, optimizer)
    for x, y in own.rows(BATCHES):
        own.backward(own.model(x, y))
        own.update()
    return [own]


def weight_in_the_loss(world: World) -> list[Any]:
    own, loss = world(net, sgd), world(Weighed, adam)
    for x, y in own.rows(BATCHES):
        output = own.model(x)
        value = loss.model(torch.stack([LOSS(output, y), output.square().mean()]))
        own.backward(value, also=[loss], rows=1)
        own.update()
        loss.update()
    return [own, loss]


@torch.no_grad()
def climbed(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Move parameters uphill by a norm over all of them; return the moves."""
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()  # type: ignore[union-attr]
    moves = [p.grad * (0.05 / (norm + 1e-12)) for p in parameters]
    for parameter, move in zip(parameters, moves, strict=True):
        parameter.add_(move)
    return moves


def sam(world: World) -> list[Any]:
    """Foret et al., 2021, as two passes."""
    own = world(net, sgd)
    for x, y in own.rows(BATCHES):
        own.backward(LOSS(own.model(x), y))
        moves = climbed(own.parameters())
        own.optimizer.zero_grad()
        own.backward(LOSS(own.model(x), y))
        with torch.no_grad():
            for parameter, move in zip(own.parameters(), moves, strict=True):
                parameter.sub_(move)
        own.update()
    return [own]


class Sam(torch.optim.SGD):
    """The same as an optimizer."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "needs a closure"
        parameters = [p for group in self.param_groups for p in group["params"]]
        loss = closure()
        moves = climbed(parameters)
        closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        super().step()
        return loss


def by_closure(optimizer: Any, world: World, dtype: torch.dtype = torch.float32) -> list[Any]:
    own = world(lambda: net().to(dtype), optimizer)
    for x, y in own.rows(BATCHES):
        own.update(lambda x=x, y=y: own.backward(LOSS(own.model(x.to(dtype)), y)))
    return [own]


def sam_by_closure(world: World) -> list[Any]:
    return by_closure(lambda parameters: Sam(parameters, lr=0.1), world)


def sgd_by_closure(world: World) -> list[Any]:
    return by_closure(sgd, world)


def lbfgs(world: World) -> list[Any]:
    """Liu and Nocedal, 1989; in f64, as its steps multiply rounding."""
    make = lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)  # noqa: E731
    return by_closure(make, world, torch.float64)


def lbfgs_with_line_search(world: World) -> list[Any]:
    make = lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe")  # noqa: E731
    return by_closure(make, world, torch.float64)


def accumulation(world: World) -> list[Any]:
    """Parts of a batch, of different sizes, and a norm that the loop clips; a scheduler."""
    own = world(net, sgd)
    schedule = torch.optim.lr_scheduler.StepLR(own.optimizer, 1, 0.5)
    uneven = [(x[:7], y[:7]) for x, y in BATCHES]
    for first, second in zip(*(own.rows(uneven[part::2]) for part in range(2)), strict=True):
        for x, y in (first, second):
            own.backward(LOSS(own.model(x), y) / 2, rows=len(x))
        nn.utils.clip_grad_norm_(own.parameters(), 0.1)
        own.update()
        schedule.step()
    return [own]


def two_losses(world: World) -> list[Any]:
    """Two backwards of one graph, and gradients that the loop reads and writes between."""
    own = world(net, sgd)
    for x, y in own.rows(BATCHES):
        output = own.model(x)
        own.backward(LOSS(output, y), retain_graph=True)
        for parameter in own.parameters():
            parameter.grad.mul_(0.5)
        own.backward(output.square().mean())
        own.update()
    return [own]


class Maml(nn.Module):
    """Finn et al., 2017: a step of gradient descent for each row, and a derivative of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16) / 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        tasks = self.weight.expand(len(x), 4, 16)
        loss = LOSS((tasks @ x[:, :, None])[..., 0], y, reduction="sum")
        (slope,) = torch.autograd.grad(loss, tasks, create_graph=True)
        return LOSS(((tasks - 0.5 * slope) @ x[:, :, None])[..., 0], (y + 1) % 4)


def maml(world: World) -> list[Any]:
    return weight_in_the_model(world, Maml, sgd)


LOOPS = (
    fgsm,
    fgsm_by_backward,
    gan,
    frozen_gan,
    wgan_gp,
    pinn,
    weight_in_the_model,
    weight_in_the_loss,
    sam,
    sam_by_closure,
    sgd_by_closure,
    lbfgs,
    lbfgs_with_line_search,
    accumulation,
    two_losses,
    maml,
)


def compare(plan: up.Plan, loop: Callable[[World], list[Any]]) -> None:
    def planned(make: Any, optimizer: Any) -> Planned:
        return Planned(plan, make, optimizer)

    for wanted, found in zip(loop(Alone), loop(planned), strict=True):
        far = max(abs(a - b) for a, b in zip(wanted.losses, found.losses, strict=True))
        there = found.whole()
        moved = max(
            (float((value - there[name]).abs().max()) for name, value in wanted.whole().items() if there),
            default=0.0,
        )
        print(f"{loop.__name__}, {plan}: losses {far:.1e}, parameters {moved:.1e}", flush=True)
        assert far < TOLERANCE * max(1.0, *map(abs, wanted.losses)), (plan, loop, found.losses, wanted.losses)
        assert moved < 10 * TOLERANCE, (plan, loop, moved)


def check_loops_train_as_one_process(folder: Path) -> None:
    for loop, plan in crossed(LOOPS, PLANS):
        compare(plan, loop)
    compare(up.Plan(data=2, zero=2), wgan_gp)
