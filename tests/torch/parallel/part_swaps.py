"""Swapping of what a rank owns: ZeRO, tensor, pipeline, context, experts, low precision. The oracles are the
same plan without swap, and plain training in one process.
"""

import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono.parallel as up
from effort import swept
from parallel import expert_axis, models, plain_training
from parallel.run_features import made
from parallel.swaps import trained

ZERO = [{"data": 4, "zero": zero} for zero in (1, 2, 3)]
SHORT: list[dict[str, Any]] = [
    *ZERO,
    {"data": 2, "tensor": 2, "clip": 0.1},
    {"data": 2, "pipeline": 2, "zero": 1, "micro_batches": 2, "precision": "bf16"},
]
PLANS: list[dict[str, Any]] = [
    {"data": 4, "zero": 3, "shard": 2, "micro_batches": 2},
    {"data": 4, "zero": 1, "micro_batches": 2, "clip": 0.5},
    {"data": 4, "zero": 2, "uneven_use": True},
    {"data": 4, "zero": 3, "recompute": True, "precision": "bf16"},
    {"data": 2, "tensor": 2},
    {"data": 2, "tensor": 2, "zero": 3, "clip": 0.1},
    {"data": 2, "pipeline": 2, "micro_batches": 2},
    {"pipeline": 2, "tensor": 2, "micro_batches": 2, "clip": 0.5},
    {"data": 2, "pipeline": 2, "zero": 1, "micro_batches": 4},
    {"data": 2, "pipeline": 2, "zero": 3, "micro_batches": 2, "precision": "fp16"},
    {"data": 2, "context": 2},
    {"context": 2, "tensor": 2, "zero": 2},
    {"data": 4, "precision": "bf16"},
]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def weights(run: up.Run) -> dict[str, torch.Tensor]:
    return {name: value for name, value in run.weights() if value is not None}


def check_losses_and_weights_are_those_without_swap(folder: Path) -> None:
    short = [("gpt", ("memory", "disk")[number % 2], plan) for number, plan in enumerate(SHORT)]
    kinds = [("gpt", "memory"), ("tied", "disk"), ("mlp", str(folder))]
    for name, swap, plan in swept(short, [(*kind, plan) for kind in kinds for plan in PLANS]):
        print(name, swap, plan, flush=True)
        for make in swept([plain_training.adamw], [sgd] * (plan in ZERO)):
            wanted, alone = trained(name, up.Plan(**plan), 2, optimizer=make)
            losses, run = trained(name, up.Plan(**plan, swap=swap), 2, optimizer=make)
            exact = plan.get("tensor", 1) == plan.get("pipeline", 1) == 1
            gap = 0.0 if exact else 2e-6
            assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) <= gap, (losses, wanted)
            away = [p for p in run.model.parameters() if not p.is_meta and p.dim()]
            assert away
            assert all(getattr(p, "_local_tensor", p).untyped_storage().nbytes() == 0 for p in away)
            mine, theirs = weights(run), weights(alone)
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                torch.testing.assert_close(mine[key], value, rtol=0, atol=10 * gap, msg=key)
            run.close()


def check_losses_are_those_of_one_process(folder: Path) -> None:
    staged = {"data": 2, "pipeline": 2, "zero": 1, "swap": "disk", "micro_batches": 2}
    short = [(staged, sgd)]
    more = [
        {"data": 4, "zero": 3},
        *({"data": 4, "zero": zero, "swap": "disk"} for zero in (1, 2)),
        {"data": 2, "tensor": 2},
    ]
    case = models.CASES["gpt"]
    for plan, optimizer in swept(short, [(each, sgd) for each in more]):
        chosen, given = up.Plan(**{"swap": "memory"} | plan), case.batches(3, 8)
        plain_training.same(chosen, case.make, given, case.loss, optimizer=optimizer, state=optimizer is sgd)
    expert = {"data": 4, "expert": 2, "swap": "disk"}
    for plan in swept([], [expert | {"zero": 3}, expert, expert | {"zero": 1, "recompute": True}]):
        expert_axis.same(up.Plan(**plan), expert_axis.listed, expert_axis.batches(2))


def check_checkpoints_go_between_plans(folder: Path) -> None:
    plain = {"data": 4, "zero": 2}
    parts, cut = {"data": 4, "zero": 3, "swap": "disk"}, {"data": 2, "tensor": 2, "swap": "memory"}
    staged = {"data": 2, "pipeline": 2, "zero": 1, "swap": "disk", "micro_batches": 2}
    case = models.CASES["gpt"]
    pairs = swept([(plain, parts)], [(parts, cut), (cut, staged), (staged, plain)])
    for number, (first, then) in enumerate(pairs):
        for make in (plain_training.adamw, sgd)[: 2 - number % 2]:
            one, other = (made("gpt", up.Plan(**plan), optimizer=make) for plan in (first, then))
            batches = list(one.shard(case.batches(4, 8)))
            for batch in batches[:2]:
                one.step(batch)
            one.save(place := folder / f"{number} {make.__name__}")
            dist.barrier()
            of_other = list(other.shard(case.batches(4, 8)))
            other.step(of_other[0])  # it is set up, and what it has is overwritten
            other.load(place)
            for mine, theirs in zip(batches[2:], of_other[2:], strict=True):
                assert abs(one.step(mine) - other.step(theirs)) < 1e-5, (first, then)
            assert other.steps == 4


def check_a_damaged_store_ends_the_run(folder: Path) -> None:
    """On one rank: a disk that takes no more, and a file that is cut short."""
    case, no_limit = models.CASES["gpt"], resource.getrlimit(resource.RLIMIT_FSIZE)
    full, short, place = "File too large", "too early", folder / "swapped"
    place.mkdir(exist_ok=True)
    for plan, says in (({"zero": 3}, full), ({}, short), ({"zero": 1}, short)):
        run = made("gpt", up.Plan(data=4, **plan, swap=str(place)))
        (batch,) = run.shard(case.batches(1, 8))
        run.step(batch)
        assert not list(place.iterdir()), "the file has no name"
        if dist.get_rank() == 1 and says == full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, no_limit[1]))
        elif dist.get_rank() == 1:
            os.ftruncate(run.swap._store._file.fileno(), 0)
        with pytest.raises((OSError, RuntimeError)) as raised:
            run.step(batch)
        resource.setrlimit(resource.RLIMIT_FSIZE, no_limit)
        if dist.get_rank() == 1:
            assert says in str(raised.value), raised.value
            assert str(place) in str(raised.value), raised.value
        else:
            assert re.search("rank 1 (raised|aborted .*) OSError", str(raised.value)), raised.value
        with pytest.raises(RuntimeError, match="cannot be used any more|incomplete"):
            run.step(batch)


def check_what_is_loaded_counts_after_an_evaluation(folder: Path) -> None:
    case = models.CASES["gpt"]
    for plan in ({"zero": 2}, {"zero": 3, "swap": "disk"}):
        run = made("gpt", up.Plan(data=4, **plan))
        first, second, last = run.shard(case.batches(3, 8))
        run.step(first)
        run.save(place := folder / f"evaluated {plan['zero']}")
        dist.barrier()
        wanted = run.evaluate(last)
        run.step(second)
        assert run.evaluate(last) != wanted
        run.load(place)
        assert run.evaluate(last) == wanted, plan


def check_values_are_in_memory_inside_mapped_alone(folder: Path) -> None:
    run = made("gpt", up.Plan(data=4, zero=3, swap="disk"))
    (batch,) = run.shard(models.CASES["gpt"].batches(1, 8))
    run.step(batch)
    parameter = next(iter(run.model.parameters()))
    for read in (lambda: parameter.norm(), lambda: parameter.to_local() + 1, lambda: parameter.full_tensor()):
        with pytest.raises(RuntimeError, match="swapped tensor"):
            read()
    with run.swap.mapped(run.optimizer), torch.no_grad():
        parameter.mul_(0.5)
        halved = parameter.full_tensor()
        assert halved.norm() > 0
    run.step(batch)
    run.close()
    assert 0 < (parameter.full_tensor() - halved).norm() < halved.norm()
    with pytest.raises(RuntimeError, match="was closed"):
        run.step(batch)
