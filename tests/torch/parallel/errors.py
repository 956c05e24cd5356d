"""Errors in a step, on one rank or on all of four: the run goes on right, or ends on every rank by name."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.nn.functional as distributed_nn
from torch import Tensor
from torch.nn import functional

import unisono as un
import unisono.parallel as up
from effort import swept
from parallel import models
from parallel.backwards import Failing, Interrupted, own_batch, square_run
from parallel.run_features import adamw, made
from unisono.parallel import failures, replicated_parameters
from unisono.torch_internals import c10d

LIMITED = (
    up.Plan(data=2, pipeline=2, micro_batches=2),
    up.Plan(data=2, tensor=2),
    up.Plan(data=4, zero=3, shard=2),
    up.Plan(data=4, local_steps=2),
)
ENDED = r"this run cannot be used any more: rank {} raised {}: .*up\.parallelize.*checkpoint"


def ends(run: up.Run, batch: Any, culprit: int, error: type[Exception]) -> None:
    """The step raises on all ranks, before any timeout, and so does every later call."""
    began, ended = time.monotonic(), ENDED.format(culprit, error.__name__)
    mine = dist.get_rank() == culprit
    with pytest.raises(error if mine else RuntimeError, match=None if mine else ended):
        run.step(batch)
    assert time.monotonic() - began < 100  # the limit of the group is 150
    with pytest.raises(RuntimeError, match=ended):
        run.step(batch)
    with pytest.raises(RuntimeError, match=ended):
        run.evaluate(own_batch(1))


class Loss:
    """Raises at one call of it, counted down, on the ranks that call it."""

    def __init__(self) -> None:
        self.countdown = 0

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        self.countdown -= 1
        if self.countdown == 0:
            raise torch.OutOfMemoryError("no memory for this batch")
        return functional.cross_entropy(output, targets)


def check_a_pipeline_ends_and_a_new_run_goes_on(folder: Path) -> None:
    batches = models.vector_batches(4, 16)
    for plan in swept(
        [up.Plan(tensor=2, pipeline=2, micro_batches=4, schedule="interleaved")],
        [up.Plan(data=2, pipeline=2, micro_batches=4)],
    ):
        undisturbed, loss = made("mlp", plan), Loss()
        wanted = [undisturbed.step(batch) for batch in undisturbed.shard(batches)]
        run = up.parallelize(models.make("mlp"), plan, optimizer=adamw, loss=loss)
        mine = list(run.shard(batches))
        losses = [run.step(batch) for batch in mine[:2]]
        run.save(folder / str(plan), keep=1)
        loss.countdown = 3 if dist.get_rank() == 2 else 0  # one of two with the last stage
        ends(run, mine[2], 2, torch.OutOfMemoryError)
        again = made("mlp", plan)
        again.load(folder / str(plan))
        assert losses + [again.step(batch) for batch in mine[2:]] == wanted


def check_one_data_rank_ends_the_run(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "RAISED_S", 0.3)
        for plan in (up.Plan(data=4), up.Plan(data=4, zero=3), up.Plan(data=4, swap="disk")):
            run, loss = square_run(Interrupted(), plan), Failing
            run.step(own_batch(1))
            loss.countdown = 1 if dist.get_rank() == 1 else 0
            ends(run, own_batch(2), 1, FloatingPointError)
            loss.countdown = 0


def check_an_optimizer_that_raises_on_one_rank_ends_the_run(folder: Path) -> None:
    class Picky(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            if dist.get_rank() == 3:
                raise OverflowError("too large for me")
            super().step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "RAISED_S", 0.3)
        run = up.parallelize(
            models.mlp(), up.Plan(data=4, zero=1), optimizer=Picky, loss=functional.cross_entropy
        )
        (batch,) = run.shard(models.vector_batches(1, 8))
        if dist.get_rank() != 3:
            run.step(batch)  # the others have trained by then
        ends(run, batch, 3, OverflowError)


def check_ranks_that_raise_at_different_places_end_the_run(folder: Path) -> None:
    """Rank 0 in forward, the others after the first bucket went: the next step would take it for its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_parameters, "BUCKET_BYTES", 1)
        run = square_run(Interrupted(), up.Plan(data=4))
        Failing.countdown = 1
        x, y = own_batch(1)
        bad = (x[:, :3], y) if dist.get_rank() == 0 else (x, y)
        with pytest.raises((FloatingPointError, RuntimeError)):
            run.step(bad)
        Failing.countdown = 0
        with pytest.raises(RuntimeError, match="this run cannot be used any more: rank"):
            run.step((x, y))


def check_what_all_ranks_refuse_before_a_message_leaves_the_run_usable(folder: Path) -> None:
    plan = up.Plan(data=2, pipeline=2, micro_batches=2)
    run, undisturbed = made("mlp", plan), made("mlp", plan)
    (batch,) = run.shard(models.vector_batches(1, 8))
    odd = tuple(part[: 2 + dist.get_rank() // 2] for part in batch)
    with pytest.raises(ValueError, match="have different numbers of rows"):
        run.step(odd)
    assert run.step(batch) == undisturbed.step(batch)


def check_a_batch_that_one_rank_refuses_ends_the_run(folder: Path) -> None:
    """Else its next batch would meet this one of the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "RAISED_S", 0.3)
        run = made("mlp", up.Plan(data=2, pipeline=2, micro_batches=2))
        (batch,) = run.shard(models.vector_batches(1, 8))
        bad = (batch[0], batch[1][:1]) if dist.get_rank() == 2 else batch
        ends(run, bad, 2, ValueError)


def check_every_group_of_a_run_has_the_limit_of_the_job(folder: Path) -> None:
    world: Any = dist.group.WORLD
    before, limit = c10d.timeout_of(world), timedelta(seconds=77)
    world.set_timeout(limit)
    try:
        for plan in swept(LIMITED[1:3], (LIMITED[0], LIMITED[3])):
            known = set(dist.distributed_c10d._world.pg_map)
            run = made("mlp", plan)
            (batch,) = run.shard(models.vector_batches(1, 16))
            run.step(batch)
            run.step(batch)
            run.save(folder / str(plan))
            new = set(dist.distributed_c10d._world.pg_map) - known
            assert new, plan
            assert {c10d.timeout_of(group) for group in new} == {limit}, plan
    finally:
        world.set_timeout(before)


def check_a_group_that_fails_ends_the_run_at_once(folder: Path) -> None:
    """A call of the run times out: nobody waits RAISED_S for the others."""
    world: Any = dist.group.WORLD
    before = c10d.timeout_of(world)
    world.set_timeout(timedelta(seconds=1))
    try:
        run = square_run(Interrupted(), up.Plan(data=4))
    finally:
        world.set_timeout(before)
    run.step(own_batch(1))
    if dist.get_rank() == 3:
        time.sleep(3.0)
    began = time.monotonic()
    with pytest.raises((un.Timeout, un.PeerLost, RuntimeError)):
        run.step(own_batch(2))
    assert time.monotonic() - began < 1.0 + failures.RAISED_S / 2
    with pytest.raises(RuntimeError, match="this run cannot be used any more: rank"):
        run.step(own_batch(3))


def check_a_loss_under_a_pipeline_calls_collectives_of_its_ranks_only(folder: Path) -> None:
    """The ranks of the other stages do not run the loss: a collective with them would wait for ever."""
    plan, world = up.Plan(data=2, pipeline=2, micro_batches=2), dist.group.WORLD
    mine = un.init_process_group(store=un.HashStore(), rank=0, world_size=1)
    place = {"rank": dist.get_rank(), "world_size": 4}
    ours = un.init_process_group(store=un.FileStore(str(folder / "ours"), 4), **place)
    last = dist.new_group([2, 3])
    cross, one = functional.cross_entropy, torch.ones(1)
    refused: dict[str, Any] = {
        "all_reduce": lambda loss: dist.all_reduce(one.clone()),
        "barrier": lambda loss: dist.barrier(),
        "all_gather": lambda loss: dist.all_gather([one.clone() for _ in range(4)], one),
        "reduce_scatter": lambda loss: dist.reduce_scatter(one.clone(), [one] * 4, async_op=True),
        "broadcast": lambda loss: dist.broadcast(one.clone(), 2),
        "all_gather_object": lambda loss: dist.all_gather_object([None] * 4, 1),
        "all_reduce of a group": lambda loss: ours.all_reduce(one.numpy()),
        "broadcast_object of a group": lambda loss: ours.broadcast_object(1),
        "all_reduce of torch.distributed.nn": lambda loss: distributed_nn.all_reduce(loss),
        "all_reduce that is functional": lambda loss: functional_collectives.all_reduce(loss, "sum", world),
    }
    for name, collective in refused.items():

        def calls(output: Tensor, targets: Tensor, collective: Any = collective) -> Tensor:
            loss = cross(output, targets)
            collective(loss)
            return loss

        run = up.parallelize(models.make("mlp"), plan, optimizer=adamw, loss=calls)
        (batch,) = run.shard(models.vector_batches(1, 8))
        began = time.monotonic()
        with pytest.raises(
            (ValueError, RuntimeError), match=rf"the loss calls {name.split()[0]} with (ranks 0, 1|a gr)"
        ):
            run.step(batch)
        assert time.monotonic() - began < 10, name

    def is_right(output: Tensor, targets: Tensor) -> Tensor:
        total = torch.full((1,), float(len(targets)))
        dist.all_reduce(total, group=last)
        mine.all_reduce(total.numpy())
        assert total.item() == 2.0 * len(targets)
        assert dist.get_world_size() == 4
        return cross(output, targets)

    run, undisturbed = (
        up.parallelize(models.make("mlp"), plan, optimizer=adamw, loss=loss) for loss in (is_right, cross)
    )
    (batch,) = run.shard(models.vector_batches(1, 8))
    assert run.step(batch) == undisturbed.step(batch)
    mine.close()
    ours.close()
    dist.all_reduce(one.clone())  # after the step every group may be used
