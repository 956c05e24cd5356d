"""Random plans in a pool of memory that just holds them, by a dry run: arguments SEED COUNT. All must run."""

import gc
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "torch"))
import unisono.parallel as up
from planned_models import MODELS, adamw
from unisono.parallel.planning.allocator import SPARE
from unisono.parallel.planning.candidates import plans
from unisono.parallel.planning.dry_run import DryRun
from unisono.parallel.planning.task import TrainingTask

BATCH, MIB = 16, 1 << 20


def drawn(drawer: random.Random, ranks: int) -> tuple[str, up.Plan]:
    name = drawer.choice(list(MODELS))
    plan = drawer.choice([each for each in plans(ranks, BATCH, {}, host=ranks) if each.micro_batches <= 4])
    if plan.pipeline > 1:
        plan = replace(plan, cuts=(drawer.randint(1, 4),) if plan.pipeline == 2 else None)
    if drawer.random() < 0.3:
        plan = replace(plan, precision="bf16")
    return name, plan


def least(task: TrainingTask, plan: up.Plan) -> int:
    """The smallest whole MiB in which a dry run fits."""
    most = max(peak.reserved for peak in DryRun(task, plan).peaks())
    low, high = 0, int(most / (1 - SPARE)) // MIB + 4
    while high - low > 1:
        middle = (low + high) // 2
        fits = not any(peak.exceeded for peak in DryRun(task, plan, middle * MIB).peaks())
        low, high = (low, middle) if fits else (middle, high)
    return high


def main(seed: int, count: int) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:unisono,cuda:nccl")
    torch.set_default_device("cuda")
    rank, total = dist.get_rank(), torch.cuda.get_device_properties(0).total_memory
    drawer, ran = random.Random(seed), 0
    for _ in range(count):
        name, plan = drawn(drawer, dist.get_world_size())
        make, loss, batch = MODELS[name]
        with torch.device("cpu"):
            sample = batch(BATCH // plan.data)
        with torch.device("meta"):
            model = make()
        limit: list[Any] = [None]
        if rank == 0:
            limit = [least(TrainingTask(model, sample, BATCH, adamw, loss), plan)]
        dist.broadcast_object_list(limit, src=0, device=torch.device("cpu"))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit[0] * MIB / total)
        error = ""
        try:
            run = up.parallelize(model, plan, optimizer=adamw, loss=loss, seed=0)
            given = tuple(each.cuda() for each in sample)
            for _ in range(3):
                run.step(given)
        except RuntimeError as wrong:
            error = str(wrong).splitlines()[0]
        torch.cuda.set_per_process_memory_fraction(1.0)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, error)
        ran += not any(told)
        if rank == 0:
            print(f"{name} {plan} in {limit[0]} MiB: {next(filter(None, told), 'ran')}", flush=True)
        run = given = model = None  # its memory ends here
    if rank == 0:
        print(f"{ran} of {count} plans that fit ran")
    dist.destroy_process_group()


main(int(sys.argv[1]), int(sys.argv[2]))
