"""Trains every animal of the zoo under every plan on two ranks, beside one process, and says what came of it.

| word | meaning |
|---|---|
| same | every loss and the first norm are those of one process, to 1e-5 |
| lossy | the plan computes in low precision; losses are within 5e-2 |
| refused | an error of Unisono's own, raised by all ranks |
| WRONG | trained, with other losses or with ranks that differ |
| RAW | another library's error |
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import unisono.parallel as up
from parallel.plain_training import apart

from . import animals

with contextlib.suppress(ImportError):  # once, not in every rank
    import transformers.models.auto.modeling_auto  # noqa: F401

STEPS = 4
PLANS: dict[str, up.Plan] = {
    "data": up.Plan(data=2),
    "zero=1": up.Plan(data=2, zero=1),
    "zero=2": up.Plan(data=2, zero=2, micro_batches=2),
    "zero=3": up.Plan(data=2, zero=3),
    "recompute": up.Plan(data=2, recompute=True),
    "bf16": up.Plan(data=2, precision="bf16"),
    "tensor": up.Plan(tensor=2),
    "tensor zero=1": up.Plan(tensor=2, zero=1),
    "tensor zero=3": up.Plan(tensor=2, zero=3, micro_batches=2),
    "tensor recompute": up.Plan(tensor=2, recompute=True),
    "tensor bf16": up.Plan(tensor=2, precision="bf16"),
    "pipeline": up.Plan(pipeline=2, micro_batches=2),
    "expert": up.Plan(data=2, expert=2),
    "expert zero=3": up.Plan(data=2, expert=2, zero=3, micro_batches=2),
    "context": up.Plan(context=2),
}


class Cell(NamedTuple):
    """What came of one animal under one plan."""

    animal: str
    plan: str
    word: str
    text: str
    seconds: float


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batches(animal: animals.Animal) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [animal.batch(generator) for _ in range(STEPS)]


def made(animal: animals.Animal) -> torch.nn.Module:
    torch.manual_seed(0)
    return animal.make()


def alone(animal: animals.Animal) -> tuple[list[float], float]:
    """The losses of one process, and the first norm."""
    model, losses, norms = made(animal), [], []
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    for inputs, targets in batches(animal):
        optimizer.zero_grad()
        output = (
            model(**inputs)
            if isinstance(inputs, dict)
            else model(*inputs)
            if isinstance(inputs, tuple)
            else model(inputs)
        )
        loss = animal.loss(output, targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms[0]


def under(
    name: str, animal: animals.Animal, plan: up.Plan, wanted: tuple[list[float], float]
) -> tuple[str, str]:
    """Train by a plan; return the word and its reason."""
    given = batches(animal)
    loss = animal.loss
    run = up.parallelize(
        made(animal), dataclasses.replace(plan, clip=1e9), optimizer=sgd, loss=loss, sample=given[0][0],
    )  # fmt: skip
    losses, norms = [], []
    for batch in run.shard(copy.deepcopy(given)):
        losses.append(run.step(batch))
        norms.append(run.grad_norm or 0.0)
    far = max(abs(a - b) for a, b in zip(losses, wanted[0], strict=True))
    norm = abs(norms[0] - wanted[1]) / max(wanted[1], 1.0)
    ranks = apart(run)
    shares = "" if run.cut is None else f", cut {run.cut.parameters[0] / max(run.cut.parameters[1], 1):.0%}"
    text = f"losses {far:.1e}, norm {norm:.1e}, ranks {ranks:.1e}{shares}"
    run.close()
    if plan.precision != "f32":
        return ("lossy" if far < 5e-2 and ranks < 1e-5 else "WRONG"), text
    return ("same" if far < 1e-5 and norm < 1e-4 and ranks < 1e-5 else "WRONG"), text


def cell(name: str, plan: str, wanted: tuple[list[float], float]) -> Cell:
    start = time.perf_counter()
    try:
        word, text = under(name, animals.ANIMALS[name], PLANS[plan], wanted)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = "/unisono/" in frames[-1].filename and isinstance(error, (ValueError, TypeError, RuntimeError))
        word = "refused" if ours else "RAW"
        text = f"{type(error).__name__}: {str(error).strip()[:600]}"
        if not ours:
            text += f" at {frames[-1].filename}:{frames[-1].lineno}"
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, (word, text))
    worst = max(words, key=lambda pair: ("same", "lossy", "refused", "RAW", "WRONG").index(pair[0]))
    return Cell(name, plan, *worst, time.perf_counter() - start)


def main(rank: int, size: int, folder: Path, names: str, plans: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("unisono", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for name in names.split(","):
        wanted = alone(animals.ANIMALS[name])
        for plan in plans.split(","):
            found = cell(name, plan, wanted)
            if rank == 0:
                print(
                    f"{found.animal}\t{found.plan}\t{found.word}\t{found.seconds:.1f}\t{found.text}".replace(
                        "\n", " "
                    ),
                    flush=True,
                )
    dist.destroy_process_group()
