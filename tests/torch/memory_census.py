"""The peak of a step as a dry run says it, beside that of virtual GPUs, for many models and plans.

    unisono run -n 2 --virtual-gpus 2 --no-poison tests/torch/memory_census.py zoo [MODEL[,PLAN] ...]
    unisono run -n 4 --virtual-gpus 4 --no-poison tests/torch/memory_census.py sweep [TEXT ...]

`zoo`: the models of tests/torch/zoo, which need `pip install transformers`, under those of its plans that
have so many ranks, and `autocast` on 2. `sweep`: the plans of `make test-parallel` that have so many (in all
240, of 1, 2, 4 and 8 ranks), or those with one of these texts in their line. One line for each: the peak of
the fullest rank, the error of the prediction, where the peak is. The last lines are a summary; a miss is
more than 5 % above, or 2 % below, and 4 KiB or more: a run has some numbers of its own, of 512 bytes each.
The process group keeps its last 16 results of up to 16 numbers: on a virtual GPU up to 8 KiB.
"""

import gc
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

import unisono.parallel as up
from inside_parallel import STEPS, DryRun, TrainingTask
from parallel import models, sweep
from planned_models import adamw, with_stages

KIB = 1 << 10
ABOVE, BELOW, LEAST = 0.05, -0.02, 4 * KIB


class Row(NamedTuple):
    """A model, a plan, and what a step takes. `batch`: of all ranks, on the CPU."""

    name: str
    plan: up.Plan
    make: Callable[[], nn.Module]
    batch: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def of_zoo(names: list[str], ranks: int) -> Iterator[Row]:
    from zoo.animals import ANIMALS
    from zoo.census_plans import PLANS, fitted, not_applicable

    plans = {**PLANS, "autocast": up.Plan(data=2, precision="autocast")}
    plans = {title: plan for title, plan in plans.items() if plan.ranks == ranks}
    if "swap" in plans:
        plans["swap"] = up.Plan(data=ranks, swap="memory")  # GPUs swap to the host
    for name, _, wanted in (each.partition(",") for each in names or ANIMALS):
        animal = ANIMALS[name]
        batch = animal.batch(torch.Generator("cpu").manual_seed(1))
        for title, plan in plans.items():
            if wanted in ("", title) and not not_applicable(name, plan):
                yield Row(f"{name}, {title}", fitted(name, plan), animal.make, batch, animal.loss, adamw)


def of_sweep(texts: list[str], ranks: int) -> Iterator[Row]:
    for trial in sweep.trials(ranks):
        if texts and not any(text in str(trial) for text in texts):
            continue
        case = models.CASES[trial.model]
        (batch,) = case.batches(1, trial.rows)

        def optimizer(parameters: Any, name: str = trial.optimizer) -> torch.optim.Optimizer:
            return models.optimizer(name, parameters)

        yield Row(str(trial), up.Plan(**trial.plan), case.make, batch, case.loss, optimizer)


def compare(row: Row) -> tuple[float, bool, str]:
    """The error of the prediction on the fullest rank, whether it is a miss, and a text about it."""
    plan, rank, size = row.plan, dist.get_rank(), dist.get_world_size()
    rows = next(iter(tensors(row.batch))).shape[0]
    before = settled()
    torch.manual_seed(0)
    model = row.make().cuda()
    given = tree_map_only(torch.Tensor, torch.Tensor.cuda, row.batch)
    places = size // plan.pipeline
    said, refused = None, ""
    task = TrainingTask(model, given, rows, row.optimizer, row.loss)
    plan = with_stages(plan, task)
    if rank % places == 0:
        try:
            said = DryRun(task, plan).peak_of(rank // places)
        except (ValueError, TypeError, RuntimeError) as error:
            refused = str(error).splitlines()[0][:200]
    del task  # it keeps the parameters that a run replaces
    told: list[Any] = [None] * size
    dist.all_gather_object(told, refused)
    if any(told):
        raise ValueError(next(filter(None, told)))
    count = max(1, rows // plan.data // plan.micro_batches)
    inputs = tree_map_only(torch.Tensor, lambda tensor: tensor[:count], given[0])
    run = up.parallelize(model, plan, optimizer=row.optimizer, loss=row.loss, sample=inputs, check=False)
    del inputs
    (given,) = run.shard([given])
    given = tree_map_only(torch.Tensor, torch.clone, given)  # rows of a batch keep the memory of all of it
    for _ in range(STEPS):  # which are watched: each sums every parameter
        run.step(given)
    gc.collect()  # building a run leaves cycles, which hold tensors until Python collects them
    torch.cuda.reset_peak_memory_stats()
    run.step(given)
    seen = torch.cuda.max_memory_allocated() - before
    mine = None if said is None else (said.nbytes, str(said.place))
    dist.all_gather_object(told, (seen, mine))
    fullest = max(range(size), key=lambda at: told[at][0])
    seen, (nbytes, place) = told[fullest][0], told[fullest // places * places][1]
    error = nbytes / seen - 1
    missed = not BELOW <= error <= ABOVE and abs(nbytes - seen) >= LEAST
    mark = "  MISS" if missed else ""
    return error, missed, f"{seen / KIB:>9.0f} KiB {error:>+7.2%}  {row.name}  {place}{mark}"


def tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, lambda tensor: found.append(tensor) or tensor, batch)
    return found


def settled() -> int:
    """Bytes in use, when what is no longer used has gone."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def main(kind: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:unisono,cuda:nccl")
    ranks, found, misses, refused = dist.get_world_size(), list[float](), 0, 0
    for row in of_zoo(names, ranks) if kind == "zoo" else of_sweep(names, ranks):
        try:
            error, missed, text = compare(row)
            found.append(error)
            misses += missed
        except (ValueError, TypeError, RuntimeError) as wrong:
            refused, text = refused + 1, f"refused  {row.name}: {str(wrong).splitlines()[0][:150]}"
        if dist.get_rank() == 0:
            print(text, flush=True)
    if dist.get_rank() == 0:
        print(f"{len(found)} predictions, {misses} missed, {refused} refused")
        if found:
            middle = statistics.median(map(abs, found))
            print(f"error: median {middle:.2%}, largest below {min(found):+.2%}, above {max(found):+.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
