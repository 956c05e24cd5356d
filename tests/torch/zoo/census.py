"""Trains every animal of the zoo under every plan on its ranks, beside one process, and says what came of it.

| word | meaning |
|---|---|
| same | every loss and the first norm are those of one process, to 1e-5 |
| lossy | the plan computes in low precision; losses are within 5e-2, or within twice the distance of one
          process under PyTorch's autocast |
| refused | an error of Unisono's own, raised by all ranks |
| WRONG | trained, with other losses or with ranks that differ |
| RAW | another library's error |

Under the launcher with `--virtual-gpus 4` it takes the plans of virtual GPUs, over "nccl".
"""

import contextlib
import copy
import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

import unisono.parallel as up
from inside_parallel import TYPES
from parallel.plain_training import apart
from zoo import animals
from zoo.cells import Cell
from zoo.census_plans import GPU_PLANS, PLANS, fitted

with contextlib.suppress(ImportError):  # once, not in every rank
    import transformers.models.auto.modeling_auto  # noqa: F401

STEPS = 4
Curve = tuple[list[float], float]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batches(animal: animals.Animal) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [animal.batch(generator) for _ in range(STEPS)]


def made(animal: animals.Animal) -> torch.nn.Module:
    torch.manual_seed(0)
    return animal.make()


def on(device: torch.device, given: Any) -> Any:
    """Tensors of a batch, on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), given)


def alone(animal: animals.Animal, low: str = "") -> Curve:
    """The losses of one process on the CPU, and the first norm. low: type of PyTorch's autocast."""
    autocast = torch.autocast("cpu", TYPES[low]) if low else contextlib.nullcontext()
    model, losses, norms = made(animal), [], []
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    for inputs, targets in batches(animal):
        optimizer.zero_grad()
        with autocast:
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


def apart_by_rounding(animal: animals.Animal, low: str, wanted: Curve) -> float:
    """How far one process gets from its own losses by low precision alone: a BatchNorm amplifies rounding."""
    return max(abs(a - b) for a, b in zip(alone(animal, low)[0], wanted[0], strict=True))


def under(name: str, plan: up.Plan, wanted: Curve, device: torch.device) -> tuple[str, str]:
    """Train by a plan; return the word and its reason."""
    animal = animals.ANIMALS[name]
    given = on(device, batches(animal))
    model = made(animal).to(device)
    run = up.parallelize(model, fitted(name, plan), optimizer=sgd, loss=animal.loss, sample=given[0][0])
    losses, norms = [], []
    for batch in run.shard(copy.deepcopy(given)):
        losses.append(run.step(batch))
        norms.append(run.grad_norm or 0.0)
    run.close()  # what is swapped comes back
    far = max(abs(a - b) for a, b in zip(losses, wanted[0], strict=True))
    norm = abs(norms[0] - wanted[1]) / max(wanted[1], 1.0)
    ranks = apart(run)
    share = "" if run.cut is None else f", cut {run.cut.parameters[0] / max(run.cut.parameters[1], 1):.0%}"
    text = f"losses {far:.1e}, norm {norm:.1e}, ranks {ranks:.1e}{share}"
    if plan.precision != "f32":
        near = far < 5e-2 or far < 2 * apart_by_rounding(animal, plan.precision, wanted)
        return ("lossy" if near and ranks < 1e-5 else "WRONG"), text
    return ("same" if far < 1e-5 and norm < 1e-4 and ranks < 1e-5 else "WRONG"), text


def cell(name: str, title: str, plan: up.Plan, wanted: Curve, device: torch.device) -> Cell:
    start = time.perf_counter()
    try:
        word, text = under(name, plan, wanted, device)
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
    return Cell(name, title, *worst, time.perf_counter() - start, device.type.replace("cuda", "gpu"))


def train(names: str, titles: str, plans: dict[str, up.Plan], device: torch.device) -> None:
    """Print a line for each cell; one group of ranks is there."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in names.split(","):
        wanted = alone(animals.ANIMALS[name])
        for title in titles.split(","):
            found = cell(name, title, plans[title], wanted, device)
            if dist.get_rank() == 0:
                print(found.line(), flush=True)
    dist.destroy_process_group()


def main(rank: int, size: int, folder: Path, names: str, titles: str) -> None:
    dist.init_process_group("unisono", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    train(names, titles, PLANS, torch.device("cpu"))


def on_gpus(names: str, titles: str) -> None:
    """This rank of a job of the launcher, on its GPU."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    train(names, titles, GPU_PLANS, device)


if __name__ == "__main__":
    on_gpus(*sys.argv[1:])
