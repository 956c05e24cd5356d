"""Random plans in a pool of memory that just holds them, by a dry run: arguments SEED COUNT [MODEL ...].

All must run. One in five also runs in a pool of 98 % of the predicted tensors, which must be too small. The
last line says how much of its pool a plan has reserved: the rest is what `up.plan` spares for fragmentation.
Models: those of planned_models.py and of the zoo; of Hugging Face's a few, where transformers are installed.
Larger ones are asked for: "gpt of 101 MB".
"""

import gc
import importlib.util
import os
import random
import statistics
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "torch"))
import unisono.parallel as up
from planned_models import KINDS, LARGE, adamw, with_stages
from unisono.parallel.costs.task import TrainingTask
from unisono.parallel.planning.candidates import plans
from unisono.parallel.planning.dry_run import DryRun
from unisono.parallel.planning.memory_account import SPARE
from zoo.animals import ANIMALS
from zoo.census_plans import not_applicable

BATCH, MIB, BELOW, EVERY = 64, 1 << 20, 0.98, 5
HOST = torch.device("cpu")
EMPTY = KINDS | LARGE  # models without values
OWN = (
    "nano", "multi-query", "encoder", "transformer", "mixer", "soft-experts", "resnet", "scan", "lstm",
    "translator", "dlrm", "two-losses", "sliced",
)  # fmt: skip
FOREIGN = ("gpt2", "llama", "mixtral", "qwen2-moe", "bert", "t5", "vit", "mamba")


def known() -> list[str]:
    """The models that are here."""
    return [*KINDS, *OWN, *(FOREIGN if importlib.util.find_spec("transformers") else ())]


def task_of(name: str, rows: int) -> TrainingTask:
    """A model and a batch of so many rows. Those of the zoo have values, and are on the GPU."""
    if name in EMPTY:
        make, loss, batch = EMPTY[name]
        with HOST:
            sample = batch(rows)
        with torch.device("meta"):
            model = make()
        return TrainingTask(model, sample, BATCH, adamw, loss)
    animal = ANIMALS[name]
    torch.manual_seed(0)
    with HOST:
        few, model = animal.batch(torch.Generator().manual_seed(1)), animal.make()
    many = tree_map_only(
        torch.Tensor, lambda t: t.repeat(-(-rows // len(t)), *[1] * (t.dim() - 1))[:rows], few
    )
    return TrainingTask(model.cuda(), many, BATCH, adamw, animal.loss)


def _is_sequential(name: str) -> bool:
    with torch.device("meta"):
        return isinstance(EMPTY[name][0](), nn.Sequential)


def drawn(drawer: random.Random, ranks: int, names: list[str]) -> tuple[str, up.Plan]:
    """A model and a plan, which need not go together.

    Raises:
        ValueError: fields of the plan do not go together.
    """
    name, axes = drawer.choice(names), ("context", "expert")
    every = [each for each in plans(ranks, BATCH, {}, host=ranks, axes=axes) if each.micro_batches <= 4]
    plan = drawer.choice([each for each in every if (each.pipeline > 1) is (drawer.random() < 0.5)])
    more: dict[str, Any] = {"clip": 1.0} if drawer.random() < 0.3 else {}
    if plan.pipeline > 1 and name in EMPTY and _is_sequential(name):
        more["cuts"] = tuple(sorted(drawer.sample(range(1, 6), min(5, plan.stages - 1))))
    if drawer.random() < 0.3:
        more["precision"] = drawer.choice(["bf16", "fp16"])
    if plan.schedule == "1f1b" and plan.pipeline > 1 and drawer.random() < 0.2:
        more["schedule"] = "gpipe"
    if plan.data > 1 and not plan.zero and drawer.random() < 0.3:
        more["local_steps"] = 2
    elif plan.data == plan.ranks and not plan.zero and "precision" not in more and drawer.random() < 0.5:
        more["swap"] = "memory"
    plan = replace(plan, **more)
    if name not in EMPTY and (why := not_applicable(name, plan)):
        raise ValueError(why)
    return name, plan


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


def limit(pool: int | None) -> None:
    """Let PyTorch's allocator have so many bytes; None: all."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if pool is None else pool / total)


def train(name: str, plan: up.Plan, pool: int) -> tuple[str, float]:
    """Three steps in a pool of so many bytes; return the error of some rank, and the largest share of the
    pool that a rank has reserved.
    """
    task = task_of(name, BATCH // plan.data)
    plan, model, sample, loss = with_stages(plan, task), task.model, task.sample, task.loss
    del task  # a run replaces parameters
    rows = max(1, BATCH // plan.data // plan.micro_batches)
    empty = any(value.is_meta for value in model.parameters())
    micro = None
    if not (empty and plan.cuts):
        micro = tree_map_only(torch.Tensor, lambda tensor: tensor[:rows].cuda(), sample[0])
    limit(pool if empty else None)  # a model with values is whole before it is shared
    error = ""
    try:
        run = up.parallelize(model, plan, optimizer=adamw, loss=loss, seed=0 if empty else None, sample=micro)
        given = tree_map_only(torch.Tensor, torch.Tensor.cuda, sample)
        del model, micro
        if not empty:
            limit(pool)
        for _ in range(3):
            run.step(given)
    except RuntimeError as wrong:
        error = str(wrong).splitlines()[0]
    share = torch.cuda.max_memory_reserved() / pool
    run = given = None
    limit(None)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (error, share))
    return next((error for error, _ in told if error), ""), max(share for _, share in told)


def priced(name: str, plan: up.Plan) -> Any:
    """Rank 0's `least` of a plan, on all ranks; a text: why they do not go together."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [least(task_of(name, BATCH // plan.data), plan)]
        except ValueError as wrong:
            found = [str(wrong).splitlines()[0]]
    dist.broadcast_object_list(found, src=0, device=HOST)
    return found[0]


def main(seed: int, count: int, names: list[str]) -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:unisono,cuda:nccl")
    torch.set_default_device("cuda")
    warnings.simplefilter("ignore")
    drawer, rank = random.Random(seed), dist.get_rank()
    ran, small, refused, shares = 0, 0, 0, list[float]()
    while len(shares) < count:
        try:
            name, plan = drawn(drawer, dist.get_world_size(), names)
        except ValueError:  # its fields do not go together
            continue
        found = priced(name, plan)
        if isinstance(found, str):
            continue
        pool, tensors = found
        error, share = train(name, plan, pool * MIB)
        shares.append(share)
        ran += not error
        says = error or f"ran, {share:.1%} reserved"
        if len(shares) % EVERY == 0:
            below, _ = train(name, plan, int(tensors * BELOW))
            small, refused = small + 1, refused + bool(below)
            says += "" if below else "; RAN BELOW"
        if rank == 0:
            print(f"{name} {plan} in {pool} MiB ({tensors / MIB:.1f} of tensors): {says}", flush=True)
    if rank == 0:
        print(f"{ran} of {count} plans that fit ran")
        print(f"{refused} of {small} did not run in {BELOW:.0%} of the bytes of their tensors")
        print(f"reserved of the pool: median {statistics.median(shares):.1%}, least {min(shares):.1%}")
    dist.destroy_process_group()


main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or known())
