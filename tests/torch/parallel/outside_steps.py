"""What a program does with a model outside the steps of its run: as in one process, or refused by name."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional, init

import unisono.parallel as up
from effort import crossed, swept
from parallel import models
from parallel.plain_training import adamw, same, seeded

DATA, TENSOR = up.Plan(data=2), up.Plan(tensor=2)
ZERO1, ZERO2, ZERO3 = (up.Plan(data=2, zero=zero) for zero in (1, 2, 3))
LOW = up.Plan(data=2, precision="bf16")
PIPELINE = up.Plan(pipeline=2, micro_batches=2)
SWAP = up.Plan(data=2, swap="memory")
LOSS = functional.cross_entropy


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def made(plan: up.Plan, make: Callable[[], nn.Module] = net, loss: Any = LOSS, **more: Any) -> up.Run:
    sample = models.vector_batches(1, 8)[0][0]
    return up.parallelize(seeded(make), plan, optimizer=adamw, loss=loss, sample=sample, **more)


ROWS_OF_16 = models.vector_batches(3, 8)


def rows(steps: int = 3) -> list[Any]:
    return models.vector_batches(steps, 8)


def train(
    model: nn.Module, step: Callable[[Any], float], before: Callable[[nn.Module, Any], Any]
) -> list[float]:
    return [step(before(model, batch)) for batch in rows()]


def by_hand(model: nn.Module) -> Callable[[Any], float]:
    """A step of plain PyTorch."""
    optimizer = adamw(model.parameters())

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        loss = LOSS(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def attacked(model: nn.Module, batch: Any) -> Any:
    """Move the rows along the gradient that a backward leaves (Goodfellow et al., 2015)."""
    x = batch[0].clone().requires_grad_()
    LOSS(model(x), batch[1]).backward()
    return (x + 0.1 * x.grad.sign()).detach(), batch[1]


def left(model: nn.Module, batch: Any) -> Any:
    """Leave the gradient of another loss."""
    model(batch[0]).square().mean().backward()
    return batch


def written_gradients(model: nn.Module, batch: Any) -> Any:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return batch


def sharded(run: up.Run, before: Callable[[nn.Module, Any], Any]) -> list[float]:
    return [run.step(before(run.model, batch)) for batch in run.shard(rows())]


def check_gradients_of_others_do_not_count(folder: Path) -> None:
    def assert_same(plan: up.Plan, before: Any) -> None:
        model = seeded(net)
        wanted, found = train(model, by_hand(model), before), sharded(made(plan), before)
        assert max(abs(a - b) for a, b in zip(wanted, found, strict=True)) < 1e-5, (
            plan,
            before,
            found,
            wanted,
        )

    for plan, before in crossed((DATA, ZERO1, ZERO2, ZERO3, SWAP), (attacked, left)):
        assert_same(plan, before)
    for before in (left, written_gradients):
        assert_same(TENSOR, before)
    for zero in (0, 3):  # the loss of one run calls the model of another, and leaves gradients there
        judge = made(up.Plan(data=2, zero=zero), loss=LOSS)
        player = made(
            up.Plan(data=2, zero=zero),
            loss=lambda o, y, judge=judge: LOSS(judge.model(o @ o.new_ones(4, 16)), y),
        )
        alone, other = seeded(net), seeded(net)
        own, step, found = adamw(alone.parameters()), by_hand(other), []
        for (x, y), batch in zip(rows(), judge.shard(rows()), strict=True):
            own.zero_grad()
            value = LOSS(other(alone(x) @ x.new_ones(4, 16)), y)
            value.backward()
            own.step()
            found += [player.step(batch) - value.item(), judge.step(batch) - step((x, y))]
        assert max(map(abs, found)) < 1e-5, found


def check_gradients_that_wait_are_not_changed(folder: Path) -> None:
    def zeroed(model: nn.Module, _batch: Any) -> None:
        model.zero_grad()

    for plan, changed in (
        (DATA, left),
        (DATA, zeroed),
        (ZERO1, left),
        (ZERO3, zeroed),
        (SWAP, left),
        (TENSOR, left),
    ):
        run = made(plan)
        batches = [*run.shard(rows())]
        run.step(batches[0], update=False)
        run.step(batches[1])  # nothing was changed
        run.step(batches[0], update=False)
        changed(run.model, batches[1])
        with pytest.raises(RuntimeError, match=r"gradients that wait for an update .* were changed since"):
            run.step(batches[1])
        run.step(batches[2])


def check_models_of_pipelines_are_called_by_steps_alone(folder: Path) -> None:
    for make in (net, Returns):
        run = made(PIPELINE, make, loss=LOSS if make is net else Returns.loss)
        for x in (rows()[0][0], rows()[0][0].clone().requires_grad_()):
            with pytest.raises(RuntimeError, match=r"called outside a step.*run\.predict\(inputs\)"):
                run.model(x)
        run.predict(rows()[0][0])


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def by_vector(model: nn.Module) -> None:
    numel = sum(parameter.numel() for parameter in model.parameters())
    nn.utils.vector_to_parameters(torch.zeros(numel), model.parameters())


def by_all_in_one(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def thin() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))


def check_vectors_of_parameters_that_ranks_share(folder: Path) -> None:
    for plan, write, says in (
        (ZERO1, by_all_in_one, "What joins parameters, as parameters_to_vector does"),
        (ZERO3, by_all_in_one, "What joins parameters, as parameters_to_vector does"),
        (PIPELINE, by_all_in_one, "cat takes a parameter that another stage"),
        (PIPELINE, by_vector, "takes a parameter that another stage"),
    ):
        run = made(plan, thin, lambda output, _: output.square().mean())
        (batch,) = run.shard(rows(1))
        run.step(batch)
        with pytest.raises(RuntimeError, match=says), torch.no_grad():
            write(run.model)


def by_new_parameters(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(torch.zeros(32, 32))


def by_state(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def by_swap(model: nn.Module) -> None:
    weight = model[2].weight
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 0.5))


def check_assignments_that_a_plan_would_lose(folder: Path) -> None:
    for plan, assign in crossed(
        (ZERO1, ZERO3, LOW, TENSOR), (by_data, by_vector, by_new_parameters, by_swap)
    ):
        run = made(plan)
        batches = [*run.shard(rows())]
        run.step(batches[0])
        run.model.to("cpu")  # changes nothing
        run.step(batches[1])
        assign(run.model)
        with pytest.raises(RuntimeError, match="was assigned|another Parameter"):
            run.step(batches[2])
        if assign is by_data:  # what it was before stays
            run.step(batches[2])
            by_data(run.model)
            with pytest.raises(RuntimeError, match="was assigned"):
                run.state_dict()
    for plan, assign in crossed((DATA, TENSOR), (by_new_parameters, by_state)):
        run = made(plan)
        assign(run.model)
        with pytest.raises(RuntimeError, match=r"another Parameter than the plan has.*in place"):
            run.step(next(iter(run.shard(rows()))))
    for plan in (DATA, ZERO1, ZERO3, TENSOR, PIPELINE):  # in place counts
        run, model = made(plan), seeded(net)
        for each in (run.model, model):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(0.5)
                    parameter.data.add_(0.1)
        found = run.step(next(iter(run.shard(rows()))))
        assert abs(found - by_hand(model)(rows()[0])) < 1e-5, plan


def draws() -> Iterator[Callable[[Tensor], object]]:
    yield init.normal_
    yield init.xavier_uniform_
    yield init.kaiming_uniform_
    yield lambda p: p.uniform_(-0.1, 0.1)
    yield lambda p: p.data.exponential_()
    yield lambda p: p.data.mul_(torch.bernoulli(torch.full_like(p.data, 0.5)))
    yield lambda p: p.data.bernoulli_(0.3)
    yield lambda p: p.add_(torch.randn_like(p) * 0.1)
    yield lambda p: p.copy_(functional.dropout(p, 0.5))
    yield init.trunc_normal_


def check_random_numbers_are_those_of_one_process(folder: Path) -> None:
    for plan in swept((ZERO3, LOW, up.Plan(tensor=2, zero=1), PIPELINE), (DATA, ZERO1, TENSOR)):
        run, model = made(plan), seeded(net)
        for number, draw in enumerate(draws()):
            for each in (run.model, model):
                torch.manual_seed(number)
                with torch.no_grad():
                    for parameter in each.parameters():
                        if parameter.dim() == 2:
                            draw(parameter)
            found, wanted = run.state_dict(), model.state_dict()
            for name, value in found.items():
                assert torch.equal(value, wanted[name]), (plan, number, name)
        run.step(next(iter(run.shard(rows()))))
    own = torch.distributed.tensor.distribute_tensor(
        torch.zeros(4, 4), torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    )
    assert isinstance(own.normal_(), DTensor)


class Writes(nn.Linear):
    """Writes its parameter in some of its forwards."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.way == "data":
            weight.data.copy_(weight.data * 0.5)
        elif self.way == "assigned":
            weight.data = weight.data * 0.5
        elif self.way == "views":
            weight.data[0].zero_()
        elif self.way == "in place":
            with torch.no_grad():
                weight.mul_(0.5)
        elif self.way == "by rows":
            self.bias.detach().add_(x.mean())
        return super().forward(x)


def writing() -> nn.Module:
    return nn.Sequential(Writes(16, 32), nn.Tanh(), nn.Linear(32, 4))


def written(plan: up.Plan, steps: int) -> tuple[up.Run, list[Any]]:
    """A run after some steps, and batches."""
    run = made(plan, writing)
    batches = [*run.shard(rows(steps + 2))]
    for batch in batches[:steps]:
        run.step(batch)
    return run, batches[steps:]


def check_writes_in_any_forward(folder: Path) -> None:
    for plan, way in crossed((ZERO1, ZERO3, LOW), ("data", "assigned", "views", "in place")):
        run, batches = written(plan, 4)
        run.model[0].way = way
        with pytest.raises(RuntimeError, match='the forward writes the parameter "0.weight"'):
            run.step(batches[0])
    for plan, way in crossed((ZERO1, ZERO3), ("data", "in place")):
        run, batches = written(plan, 4)
        run.model[0].way = way
        run.model(batches[0][0])
        run.model[0].way = ""
        with pytest.raises(RuntimeError, match=r'"0\.weight" was written where this plan has a copy'):
            run.step(batches[0])
        run.step(batches[1])
    run, batches = written(DATA, 4)
    run.model[0].way = "in place"  # the same on both ranks
    run.step(batches[0])
    run.model[0].way = "by rows"
    with pytest.raises(RuntimeError, match=r'"0\.bias", and data ranks write different values'):
        run.step(batches[1])
    run, batches = written(SWAP, 9)
    run.model[0].way = "in place"
    with pytest.raises(RuntimeError, match="the forward writes the parameter .*swap= would lose"):
        run.step(batches[0])


class Weighed(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return LOSS(output * self.weight.exp(), targets)

    def by_name(self, output: Tensor, targets: Tensor) -> Tensor:
        return self(output, targets)


def check_parameters_of_a_loss(folder: Path) -> None:
    module, scale = Weighed(), torch.ones(4, requires_grad=True)
    wrong = (module, module.by_name, lambda o, y: module(o, y), lambda o, y: LOSS(o * scale, y))
    for plan, loss in crossed((DATA, ZERO3, TENSOR), wrong):
        run = made(plan, loss=loss)
        with pytest.raises(ValueError, match=r"takes a tensor of its own that requires a gradient, \[4\]"):
            run.step(next(iter(run.shard(rows()))))
    teacher = seeded(net)

    def distilled(output: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            taught = teacher(output.detach() @ output.new_ones(4, 16))
        return LOSS(output, targets) + (output - taught).square().mean()

    module.requires_grad_(False)
    for plan, loss in crossed((DATA, ZERO3, TENSOR), (module, distilled)):
        run = made(plan, loss=loss)
        run.step(next(iter(run.shard(rows()))))


class Returns(nn.Module):
    """Returns a parameter, by which the loss weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.scale = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(torch.tanh(self.first(x))), self.scale

    @staticmethod
    def loss(output: Any, targets: Tensor) -> Tensor:
        return LOSS(output[0] * output[1].exp(), targets)


def check_a_parameter_that_the_model_returns(folder: Path) -> None:
    for plan in (DATA, ZERO3, PIPELINE, up.Plan(pipeline=2, micro_batches=2, zero=1)):
        same(plan, Returns, ROWS_OF_16, Returns.loss, sample=ROWS_OF_16[0][0])
