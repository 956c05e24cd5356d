"""Parameters that are unfrozen and frozen between steps: losses, moments and checkpoints of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models, plain_training
from parallel.parameter_table import Scaled
from parallel.plain_training import adamw, apart, begun, seeded

PLANS = (
    up.Plan(data=2), up.Plan(data=2, uneven_use=True), up.Plan(data=2, zero=1), up.Plan(data=2, zero=2),
    up.Plan(data=2, zero=3), up.Plan(tensor=2), up.Plan(pipeline=2, micro_batches=2),
    up.Plan(pipeline=2, micro_batches=2, schedule="zb-h1"),
)  # fmt: skip
ON_FOUR = (
    up.Plan(data=2, tensor=2, zero=2, micro_batches=2), up.Plan(tensor=2, pipeline=2),
    up.Plan(data=2, pipeline=2, zero=1, micro_batches=2),
)  # fmt: skip
FIRST = 2  # the step before which the lower half is unfrozen


def decaying(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def lower(model: Any) -> list[nn.Module]:
    """The first half of a model: under pipeline=2 all that its first stage trains."""
    return list(model[: len(model) // 2 + 1])


def set_trained(model: nn.Module, step: int) -> None:
    """Freeze the lower half, until `FIRST`; freeze its first entry again two steps later."""
    for module in lower(model):
        module.requires_grad_(step >= FIRST)
    model[0].requires_grad_(FIRST <= step < FIRST + 2)


def shrinking(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)


def alone(make: Any, batches: list[Any], loss: Any) -> list[float]:
    more: Any = {"optimizer": decaying, "before": set_trained, "schedule": shrinking}
    return plain_training.alone(make, batches, loss, **more).losses


def under(plan: up.Plan, make: Any, loss: Any, sample: Any = None) -> up.Run:
    def prepared() -> nn.Module:
        model = make()
        set_trained(model, 0)
        return model

    return begun(plan, prepared, loss, optimizer=decaying, sample=sample if plan.tensor > 1 else None)


def losses_of(run: up.Run, batches: list[Any], first: int = 0) -> list[float]:
    """Train on batches, the first of which is number `first`."""
    found = []
    scheduler = shrinking(run.optimizer)
    for step, batch in enumerate(run.shard(batches), first):
        set_trained(run.model, step)
        found.append(run.step(batch))
        scheduler.step()
        run.evaluate(batch)  # ZeRO 1 and 2 leave parameters gathered
        assert all(p.grad is None for p in run.parameters.values())
    return found


def check_a_short_training(folder: Path) -> None:
    batches, loss = models.vector_batches(5, 8), functional.cross_entropy
    wanted = alone(models.mlp, batches, loss)
    for plan in (up.Plan(data=2), up.Plan(data=2, zero=2), up.Plan(pipeline=2, micro_batches=2)):
        same(plan, models.mlp, loss, batches, wanted)


def same(plan: up.Plan, make: Any, loss: Any, batches: list[Any], wanted: list[float]) -> None:
    run = under(plan, make, loss, batches[0][0])
    found = losses_of(run, batches)
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    print(f"{plan}: losses {worst:.1e}", flush=True)
    assert worst < 1e-5, (plan, found, wanted)
    assert apart(run) < 1e-5, plan


def check_losses_are_those_of_one_process(folder: Path) -> None:
    text, vectors = models.text_batches(5, 4), models.vector_batches(6, 8)
    on_two = (
        (models.mlp, vectors, functional.cross_entropy, PLANS),
        (models.gpt, text, models.token_loss, (up.Plan(tensor=2), up.Plan(tensor=2, zero=1))),
        (lambda: models.gpt(tied=True), text, models.token_loss, (up.Plan(pipeline=2),)),
    )
    on_four = ((models.gpt, text, models.token_loss, ON_FOUR),)
    for make, batches, loss, plans in on_two if dist.get_world_size() == 2 else on_four:
        wanted = alone(make, batches, loss)
        for plan in plans:
            same(plan, make, loss, batches, wanted)


def check_low_precision(folder: Path) -> None:
    """Units that are wholly frozen at first reduce and step in f32 later."""
    batches, loss = models.vector_batches(6, 8), functional.cross_entropy
    wanted = alone(models.mlp, batches, loss)
    for zero in (0, 2, 3):
        run = under(up.Plan(data=2, zero=zero, precision="bf16"), models.mlp, loss)
        found = losses_of(run, batches)
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 2e-2, (found, wanted)
        state = run.optimizer.state[run.parameters["2.weight"]]
        assert state["exp_avg"].dtype == torch.float32
        assert state["step"] == len(batches) - FIRST


def check_a_checkpoint_goes_on(folder: Path) -> None:
    """Of a run that has unfrozen; and one of before, which a run loads that trains more."""
    batches, loss = models.vector_batches(6, 8), functional.cross_entropy
    for number, plan in enumerate((up.Plan(data=2, zero=2), up.Plan(pipeline=2, micro_batches=2))):
        for stop in (1, 4):
            place = folder / f"{number}-{stop}"
            run = under(plan, models.mlp, loss)
            for step, batch in enumerate(run.shard(batches)):
                set_trained(run.model, step)
                run.step(batch)
                if step == stop:
                    run.save(place)
            last = run.evaluate(batch)
            again = under(plan, models.mlp, loss)
            set_trained(again.model, stop)  # before load, which gives moments to what is trained
            again.load(place)
            for step, batch in list(enumerate(again.shard(batches)))[stop + 1 :]:
                set_trained(again.model, step)
                again.step(batch)
            assert abs(again.evaluate(batch) - last) < 1e-6, (plan, stop)


def check_averages_follow(folder: Path) -> None:
    batches, loss = models.vector_batches(6, 8), functional.cross_entropy
    model = seeded(models.mlp)
    optimizer = decaying(model.parameters())
    average = {name: value.detach().clone() for name, value in model.named_parameters()}
    for step, (x, y) in enumerate(batches):
        set_trained(model, step)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        for name, value in model.named_parameters():
            average[name].lerp_(value.detach(), 0.5)
    run = under(up.Plan(data=2, zero=1), models.mlp, loss)
    ema = up.EMA(run, decay=0.5)
    for step, batch in enumerate(run.shard(batches)):
        set_trained(run.model, step)
        run.step(batch)
        ema.update()
    with ema.applied():
        found = run.state_dict()
    for name, value in found.items():
        torch.testing.assert_close(value, average[name], rtol=1e-4, atol=1e-6)


def check_what_cannot_be_followed(folder: Path) -> None:
    """Each error comes on all ranks, before the step; then the run goes on."""
    batches, loss = models.vector_batches(6, 8), functional.cross_entropy
    run = under(up.Plan(data=2), models.mlp, loss)
    (first,) = run.shard(batches[:1])
    run.step(first, update=False)
    run.model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"rank 0: parameters were frozen or unfrozen while gradients wait"):
        run.step(first)
    run.model[0].requires_grad_(False)
    run.step(first)
    if dist.get_rank() == 1:
        run.model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'0.weight' is frozen on rank 0 and trained on rank 1"):
        run.step(first)
    run.model[0].requires_grad_(False)

    def by_kind(parameters: up.Parameters) -> torch.optim.Optimizer:
        kinds: dict[bool, list[nn.Parameter]] = {}
        for name, value in parameters.named.items():
            kinds.setdefault(name.endswith("bias"), []).append(value)
        return torch.optim.SGD([{"params": some} for some in kinds.values()], lr=0.1)

    model = seeded(models.mlp)
    model[0].requires_grad_(False)
    run = up.parallelize(model, up.Plan(data=2), optimizer=by_kind, loss=loss)
    run.step(first)
    run.model[0].weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match=r"'0.weight' is trained.*in which group.*\[2\].*\[1\].*add_param_group"
    ):
        run.step(first)
    run.optimizer.add_param_group({"params": [run.parameters["0.weight"]]})
    before = run.model[0].weight.detach().clone()
    run.step(first)
    assert not torch.equal(before, run.model[0].weight)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    run.model[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"not this rank's.*run\.parameters"):
        run.step(first)


def check_a_scalar_is_saved_thawed_and_loaded(folder: Path) -> None:
    def make() -> nn.Module:
        model = Scaled()
        model.scale.requires_grad_(False)
        return model

    first, second, third, _ = models.vector_batches(4, 8)
    loss = functional.cross_entropy

    def begin(plan: up.Plan) -> tuple[up.Run, Any]:
        run = begun(plan, make, loss)
        return run, iter(run.shard([first, second, third]))

    found = []
    for plan in (up.Plan(data=2), up.Plan(data=2, zero=3)):
        run, batches = begin(plan)
        run.step(next(batches))
        run.model.scale.requires_grad_(True)
        run.step(next(batches))
        run.save(folder / f"zero{plan.zero}")
        found.append(run.step(next(batches)))
        shape = {name: tuple(value.shape) for name, value in run.weights() if value is not None}.get(
            "scale", ()
        )
        assert shape == (), shape
    other, batches = begin(up.Plan(data=2))
    other.model.scale.requires_grad_(True)
    other.load(folder / "zero3")
    next(batches), next(batches)
    found.append(other.step(next(batches)))
    assert max(found) - min(found) < 1e-5, found


def check_thawing_in_the_middle_is_refused(folder: Path) -> None:
    batches = models.vector_batches(4, 8)
    for plan, says in (
        (up.Plan(data=2, swap="memory"), "'memory'.*up.parallelize"),
        (up.Plan(data=2, compression=up.PowerSGD(rank=2)), "PowerSGD.*does not follow"),
        (up.Plan(data=2, zero=1, shard=1, local_steps=2), "local_steps=2.*does not follow"),
    ):
        model = seeded(models.mlp)
        model[0].requires_grad_(False)
        run = up.parallelize(model, plan, optimizer=adamw, loss=functional.cross_entropy)
        first, second, *_ = run.shard(batches)
        run.step(first)
        run.model[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match=rf"'0\.weight' was frozen .*{says}"):
            run.step(second)
        run.model[0].requires_grad_(False)
        run.close()


def check_freezing_in_the_middle(folder: Path) -> None:
    """The run trains on without them; under swap it says that it cannot."""
    batches = models.vector_batches(4, 8)
    for plan in (up.Plan(data=2, uneven_use=True), up.Plan(data=2, zero=3)):
        plain_training.same(plan, models.mlp, batches, functional.cross_entropy, before=frozen_late)
    run = begun(up.Plan(data=2, swap="memory"), models.mlp)
    first, second, *_ = run.shard(batches)
    run.step(first)
    run.model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was trained .*up\.parallelize"):
        run.step(second)


def frozen_late(model: Any, step: int) -> None:
    model[0].requires_grad_(step < 2)


def check_a_new_run_trains_what_was_frozen(folder: Path) -> None:
    """A checkpoint of a run with frozen parameters continues in a run without: their moments begin anew."""
    batches = models.vector_batches(4, 8)
    model = seeded(models.mlp)
    model[0].requires_grad_(False)
    run = up.parallelize(model, up.Plan(data=2), optimizer=adamw, loss=functional.cross_entropy)
    for batch in list(run.shard(batches))[:2]:
        run.step(batch)
    run.save(folder / "saved")
    again = up.parallelize(models.mlp(), up.Plan(data=2), optimizer=adamw, loss=functional.cross_entropy)
    again.load(folder / "saved")
    for batch in list(again.shard(batches))[2:]:
        again.step(batch)
    assert again.optimizer.state[again.model[0].weight]["step"] == 2
    assert again.optimizer.state[again.model[2].weight]["step"] == 4
    assert apart(again) == 0
