"""Replicas that train on their own and meet: against the same in one process. Four ranks."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono.parallel as up
from effort import swept
from parallel import models
from parallel.run_features import whole

STEPS, ROWS = 7, 8
Batches = list[tuple[Tensor, Tensor]]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def one_process(
    name: str, replicas: int, every: int, outer: up.OuterSGD, batches: Batches, optimizer: Any = adamw
) -> tuple[list[list[float]], list[nn.Module]]:
    """The losses of each replica, and their models: DiLoCo as in the paper, in plain PyTorch."""
    anchor = models.make(name)
    alone = [copy.deepcopy(anchor) for _ in range(replicas)]
    inner = [optimizer(model.parameters()) for model in alone]
    momentum = {"momentum": outer.momentum, "nesterov": outer.nesterov}
    meeting = torch.optim.SGD(anchor.parameters(), lr=outer.rate, **momentum)
    losses: list[list[float]] = [[] for _ in alone]
    for number, (x, y) in enumerate(batches, 1):
        rows = len(x) // replicas
        for place, (model, one) in enumerate(zip(alone, inner, strict=True)):
            mine = slice(place * rows, (place + 1) * rows)
            loss = models.CASES[name].loss(model(x[mine]), y[mine])
            loss.backward()
            one.step()
            one.zero_grad()
            losses[place].append(loss.item())
        if number % every == 0:
            for values in zip(anchor.parameters(), *(model.parameters() for model in alone), strict=True):
                values[0].grad = torch.stack([(values[0] - value).detach() for value in values[1:]]).mean(0)
            meeting.step()
            for model in alone:
                model.load_state_dict(anchor.state_dict())
    return losses, alone


def run_of(name: str, plan: up.Plan, optimizer: Any = adamw) -> up.Run:
    return up.parallelize(models.make(name), plan, optimizer=optimizer, loss=models.CASES[name].loss)


def parameters_of(run: up.Run, model: nn.Module) -> float:
    """The largest difference of this rank's parameters from those of a model."""
    wanted = dict(model.named_parameters(remove_duplicate=False))
    return max(float((value - wanted[name]).detach().abs().max()) for name, value in whole(run).items())


def check_plans_against_one_process(folder: Path) -> None:
    for name, plan in (
        ("mlp", up.Plan(data=4, local_steps=3, outer=up.OuterSGD(0.5, 0.5, nesterov=False))),
        *swept(
            [], [("gpt", up.Plan(data=4, local_steps=3)), ("gpt", up.Plan(data=2, tensor=2, local_steps=3))]
        ),
        ("tied", up.Plan(data=2, pipeline=2, micro_batches=2, local_steps=3)),
        ("gpt", up.Plan(data=4, zero=3, shard=2, local_steps=3)),
        *swept([], [("mlp", up.Plan(data=4, micro_batches=2, local_steps=1))]),
    ):
        # Adam makes whole steps of the rounding errors of gradients that are zero, as those of key's bias
        run = run_of(name, plan, sgd)
        batches = models.CASES[name].batches(STEPS, ROWS)
        losses = [run.step(batch) for batch in run.shard(batches)]
        replicas = plan.data // plan.shards
        wanted, alone = one_process(name, replicas, plan.local_steps or 1, plan.outer_sgd, batches, sgd)
        place = run.mesh.everyone.place("replica")
        far = max(abs(a - b) for a, b in zip(losses, wanted[place], strict=True))
        assert far < 2e-5, f"{plan}: losses are {far} off: {losses}, {wanted[place]}"
        assert parameters_of(run, alone[place]) < 2e-4, f"{plan}: parameters differ"


def check_one_local_step_of_sgd_is_data_parallelism(folder: Path) -> None:
    batches = models.CASES["mlp"].batches(5, ROWS)
    local, plain = (
        run_of("mlp", up.Plan(data=4, local_steps=1, outer="average"), sgd),
        run_of("mlp", up.Plan(data=4), sgd),
    )
    for run in (local, plain):
        for batch in run.shard(batches):
            run.step(batch)
    for name, value in whole(local).items():
        torch.testing.assert_close(value, whole(plain)[name], rtol=1e-5, atol=1e-6)


def check_no_byte_goes_between_replicas_before_they_meet(folder: Path) -> None:
    run = run_of("mlp", up.Plan(data=2, tensor=2, local_steps=2))
    first, second = run.shard(models.CASES["mlp"].batches(2, ROWS))
    run.step(first, watch=True)
    assert all(call.axis != "replica" for call in run.explain())
    assert {call.ranks for call in run.explain()} == {2}  # those of one replica
    run.step(second, watch=True)
    meetings = [call for call in run.explain() if call.axis == "replica"]
    assert [call.why for call in meetings] == ["replicas meet with the difference of their weights"], (
        run.explain()
    )
    assert meetings[0].ranks == 2


def check_replicas_are_equal_after_a_meeting(folder: Path) -> None:
    for compression in (None, up.Compressed("int8"), up.PowerSGD(rank=2, start=1)):
        run = run_of("gpt", up.Plan(data=4, local_steps=2, compression=compression))
        losses = []
        for number, batch in enumerate(run.shard(models.CASES["gpt"].batches(8, ROWS)), 1):
            losses.append(run.step(batch))
            told: list[Any] = [None] * 4
            dist.all_gather_object(told, [value.sum().item() for value in whole(run).values()])
            assert all(one == told[0] for one in told) == (number % 2 == 0)
        assert losses[-1] < losses[0]


def check_buffers_are_averaged(folder: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    batches = models.CASES["mlp"].batches(3, ROWS)
    model = make()
    run = up.parallelize(model, up.Plan(data=4, local_steps=3), optimizer=sgd, loss=models.CASES["mlp"].loss)
    mine = []
    for batch in run.shard(batches):
        mine.append(model[1].running_mean.clone())
        run.step(batch)
    alone, optimizer = make(), None
    optimizer = sgd(alone.parameters())
    for x, y in run.shard(batches):
        models.CASES["mlp"].loss(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, alone[1].running_mean)
    torch.testing.assert_close(model[1].running_mean, torch.stack(told).mean(0))


def check_a_checkpoint_goes_on(folder: Path) -> None:
    for number, (name, plan) in enumerate(
        swept(
            [("mlp", up.Plan(data=4, zero=2, shard=2, local_steps=3))],
            [
                ("mlp", up.Plan(data=4, local_steps=3, compression=up.Compressed("int8"))),
                ("gpt", up.Plan(data=4, local_steps=3)),
                ("mlp", up.Plan(data=2, tensor=2, local_steps=3)),
            ],
        )
    ):
        batches = models.CASES[name].batches(
            7, ROWS
        )  # the last one shows what the meeting before it had kept
        place = Path(folder, f"plan{number}")
        run = run_of(name, plan)
        mine = list(run.shard(batches))
        for batch in mine[:3]:
            run.step(batch)
        run.save(place)
        rest = [run.step(batch) for batch in mine[3:]]
        again = run_of(name, plan)
        again.load(place)
        assert [again.step(batch) for batch in mine[3:]] == rest, plan
        run.load(place)  # in a run that has gone on
        assert [run.step(batch) for batch in mine[3:]] == rest, plan
        other = run_of(name, up.Plan(data=4))
        other.load(place)
        assert other.steps == 3
        other.step(next(iter(other.shard(batches[3:]))))


def check_a_save_between_meetings_is_refused(folder: Path) -> None:
    run = run_of("mlp", up.Plan(data=4, local_steps=3))
    for batch in run.shard(models.CASES["mlp"].batches(4, ROWS)):
        run.step(batch)
    with pytest.raises(
        ValueError, match="save: after 4 steps each replica has weights of its own.* ends step 6"
    ):
        run.save(folder)
    with pytest.raises(ValueError, match="weights: after 4 steps"):
        run.state_dict()


def check_the_weights_of_replicas_that_have_met(folder: Path) -> None:
    batches = models.CASES["gpt"].batches(3, ROWS)
    for plan in (up.Plan(data=4, local_steps=3), up.Plan(data=2, pipeline=2, micro_batches=2, local_steps=3)):
        run = run_of("gpt", plan, sgd)
        for batch in run.shard(batches):
            run.step(batch)
        found = run.state_dict()
        _, alone = one_process("gpt", plan.data, 3, plan.outer_sgd, batches, sgd)
        assert (found.keys() == alone[0].state_dict().keys()) == (dist.get_rank() == 0)
        for name, value in found.items():
            torch.testing.assert_close(value, alone[0].state_dict()[name], rtol=0, atol=2e-4)


def check_wide_parameters_keep_their_bits(folder: Path) -> None:
    class Wide(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.double()).float()

    torch.manual_seed(0)
    model = nn.Sequential(Wide(16, 8, dtype=torch.float64), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight += 1e-12
    before = model[0].weight.detach().clone()
    run = up.parallelize(
        model,
        up.Plan(data=4, local_steps=1),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        loss=models.CASES["mlp"].loss,
    )
    for batch in run.shard(models.CASES["mlp"].batches(2, ROWS)):
        run.step(batch)
    assert torch.equal(model[0].weight, before)


def check_a_frozen_parameter_is_told(folder: Path) -> None:
    run = run_of("mlp", up.Plan(data=4, local_steps=2))
    first, second = run.shard(models.CASES["mlp"].batches(2, ROWS))
    run.step(first)
    run.model[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match="was trained when this run was made"):
        run.step(second)


def check_an_error_in_one_replica_ends_the_run_of_all(folder: Path) -> None:
    run = run_of("mlp", up.Plan(data=4, local_steps=2))
    first, second = run.shard(models.CASES["mlp"].batches(2, ROWS))
    run.step(first)
    with (
        pytest.raises(RuntimeError) if dist.get_rank() else pytest.raises((RuntimeError, IndexError)) as seen
    ):
        x, y = second
        run.step((x, y + 100 if dist.get_rank() == 0 else y))
    assert "this run cannot be used any more: rank 0 raised" in str(seen.value) or dist.get_rank() == 0
    with pytest.raises(RuntimeError, match="rank 0 raised"):
        run.step(first)
