"""Random plans in a pool of memory that just holds them, by a dry run: arguments SEED COUNT [MODEL ...].

All must run. One in five also runs in a pool of 98 % of the predicted tensors, which must be too small. The
last line says how much of its pool a plan has reserved: the rest is what `up.plan` spares for fragmentation.
"""

import gc
import os
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "torch"))
import unisono.parallel as up
from planned_models import KINDS, adamw
from unisono.parallel.graph.containers import mapped
from unisono.parallel.planning.allocator import SPARE
from unisono.parallel.planning.candidates import plans
from unisono.parallel.planning.dry_run import DryRun
from unisono.parallel.planning.task import TrainingTask

BATCH, MIB, BELOW, EVERY = 64, 1 << 20, 0.98, 5
HOST = torch.device("cpu")


def drawn(drawer: random.Random, ranks: int, names: list[str]) -> tuple[str, up.Plan]:
    """A model and a plan, which need not go together."""
    name = drawer.choice(names)
    plan = drawer.choice([each for each in plans(ranks, BATCH, {}, host=ranks) if each.micro_batches <= 4])
    if plan.pipeline > 1 and isinstance(KINDS[name][0](), nn.Sequential):
        plan = replace(plan, cuts=tuple(sorted(drawer.sample(range(1, 6), plan.pipeline - 1))))
    more: dict[str, Any] = {}
    if drawer.random() < 0.3:
        more["precision"] = "bf16"
    if plan.pipeline > 1 and drawer.random() < 0.3 and not plan.recompute and plan.zero < 2:
        more["schedule"] = drawer.choice(["gpipe", "zb-h1"])
    if plan.data > 1 and not plan.zero and drawer.random() < 0.3:
        more["local_steps"] = 2
    elif plan.data == plan.ranks and not plan.zero and "precision" not in more and drawer.random() < 0.5:
        more["swap"] = "memory"
    return name, replace(plan, **more)


def least(task: TrainingTask, plan: up.Plan) -> tuple[int, int]:
    """The smallest whole MiB in which a dry run fits, and the bytes of its tensors.

    Raises:
        ValueError: the plan does not go with the model.
    """
    peaks = DryRun(task, plan).peaks()
    tensors = max(peak.nbytes for peak in peaks)
    low, high = tensors // MIB - 1, int(max(peak.reserved for peak in peaks) / (1 - SPARE)) // MIB + 4
    while high - low > 1:
        middle = (low + high) // 2
        fits = not any(peak.exceeded for peak in DryRun(task, plan, middle * MIB).peaks())
        low, high = (low, middle) if fits else (middle, high)
    return high, tensors


def train(name: str, plan: up.Plan, sample: Any, pool: int) -> tuple[str, float]:
    """Three steps in a pool of so many bytes; return the error of some rank, and the largest share of the
    pool that a rank has reserved.
    """
    make, loss, _ = KINDS[name]
    with torch.device("meta"):
        model = make()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    rows = max(1, BATCH // plan.data // plan.micro_batches)
    pieces = plan.pipeline > 1 and isinstance(model, nn.Sequential)
    micro = None if pieces else mapped(sample[0], lambda tensor: tensor[:rows])
    torch.cuda.set_per_process_memory_fraction(pool / total)
    error = ""
    try:
        run = up.parallelize(model, plan, optimizer=adamw, loss=loss, seed=0, sample=micro)
        given = mapped(sample, lambda tensor: tensor.cuda())
        for _ in range(3):
            run.step(given)
    except RuntimeError as wrong:
        error = str(wrong).splitlines()[0]
    torch.cuda.set_per_process_memory_fraction(1.0)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (error, torch.cuda.max_memory_reserved() / pool))
    return next((error for error, _ in told if error), ""), max(share for _, share in told)


def main(seed: int, count: int, names: list[str]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:unisono,cuda:nccl")
    torch.set_default_device("cuda")
    drawer, rank = random.Random(seed), dist.get_rank()
    ran, small, refused, shares = 0, 0, 0, list[float]()
    while len(shares) < count:
        name, plan = drawn(drawer, dist.get_world_size(), names)
        make, loss, batch = KINDS[name]
        with HOST:
            sample = batch(BATCH // plan.data)
        with torch.device("meta"):
            model = make()
        task = TrainingTask(model, sample, BATCH, adamw, loss)
        found: list[Any] = [None]
        if rank == 0:
            try:
                found = [least(task, plan)]
            except ValueError as wrong:
                found = [str(wrong).splitlines()[0]]
        dist.broadcast_object_list(found, src=0, device=HOST)
        if isinstance(found[0], str):  # they do not go together
            continue
        pool, tensors = found[0]
        error, share = train(name, plan, sample, pool * MIB)
        shares.append(share)
        ran += not error
        says = error or f"ran, {share:.1%} reserved"
        if len(shares) % EVERY == 0:
            below, _ = train(name, plan, sample, int(tensors * BELOW))
            small, refused = small + 1, refused + bool(below)
            says += "" if below else "; RAN BELOW"
        if rank == 0:
            print(f"{name} {plan} in {pool} MiB: {says}", flush=True)
    if rank == 0:
        print(f"{ran} of {count} plans that fit ran")
        print(f"{refused} of {small} did not run in {BELOW:.0%} of the bytes of their tensors")
        print(f"reserved of the pool: median {statistics.median(shares):.1%}, least {min(shares):.1%}")
    dist.destroy_process_group()


main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or list(KINDS))
