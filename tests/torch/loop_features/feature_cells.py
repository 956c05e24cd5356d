"""Tries features under one plan on its ranks, beside one process: a line of JSON for each.

| word | meaning |
|---|---|
| same | what the feature shows is that of one process, to 1e-5 |
| lossy | likewise, to what low precision rounds |
| refused | an error of Unisono's own, raised by all ranks |
| WRONG | other numbers |
| RAW | another library's error |
"""

import json
import logging
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import unisono.parallel as up
import unisono.torch  # noqa: F401
from loop_features.feature_loops import Alone, Loops, Planned
from loop_features.features import FEATURES, LOW
from unisono.parallel import sharded_parameters

PLANS = {
    "data": up.Plan(data=2),
    "zero1": up.Plan(data=2, zero=1),
    "zero2": up.Plan(data=2, zero=2),
    "zero3": up.Plan(data=2, zero=3),
    "hybrid": up.Plan(data=4, zero=3, shard=2),
    "tensor": up.Plan(tensor=2),
    "sequence": up.Plan(tensor=2, sequence=True),
    "1f1b": up.Plan(pipeline=2, micro_batches=2),
    "interleaved": up.Plan(pipeline=2, micro_batches=2, schedule="interleaved"),
    "zb-h1": up.Plan(pipeline=2, micro_batches=2, schedule="zb-h1"),
    "zbv": up.Plan(pipeline=2, micro_batches=2, schedule="zbv"),
    "context": up.Plan(context=2),
    "expert": up.Plan(data=2, expert=2),
    "tensor+zero3": up.Plan(data=2, tensor=2, zero=3),
    "pipeline+tensor": up.Plan(pipeline=2, tensor=2, micro_batches=2),
    "bf16": up.Plan(data=2, precision="bf16"),
}
WORDS = ("same", "lossy", "refused", "RAW", "WRONG")
TOLERANCE, LOW_TOLERANCE = 1e-5, 5e-2


class Cell(NamedTuple):
    """What came of a feature under a plan."""

    feature: str
    plan: str
    word: str
    text: str
    seconds: float


def shown(feature: str, loops: Loops) -> list[Any]:
    torch.manual_seed(11)  # what the loop itself draws
    return [detached(one) for one in FEATURES[feature](loops)]


def detached(value: Any) -> Any:
    """As it is now: the next step changes weights."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: detached(one) for name, one in value.items()}
    return [detached(one) for one in value] if isinstance(value, (list, tuple)) else value


def distance(found: Any, wanted: Any) -> float:
    """The largest difference; an empty dict is another rank's."""
    if isinstance(wanted, dict):
        if not found and dist.get_rank() > 0:
            return 0.0
        assert set(found) == set(wanted), f"names differ: {sorted(set(found) ^ set(wanted))}"
        return max(distance(found[name], wanted[name]) for name in wanted)
    if isinstance(wanted, list):
        assert len(found) == len(wanted), f"{len(found)} values, expected {len(wanted)}"
        return max((distance(a, b) for a, b in zip(found, wanted, strict=True)), default=0.0)
    if isinstance(wanted, Tensor):
        assert found.shape == wanted.shape, f"shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
        return float((found.double() - wanted.double()).abs().max()) if wanted.numel() else 0.0
    far = abs(found - wanted)
    return float(far) if far == far else float("inf")


def tried(feature: str, plan: up.Plan, folder: Path) -> tuple[str, str]:
    wanted = shown(feature, Alone(folder, plan))
    found = shown(feature, Planned(folder, plan))
    far = distance(found, wanted)
    low = feature in LOW or plan.precision != "f32"
    word = "same" if far < TOLERANCE else "lossy" if low and far < LOW_TOLERANCE else "WRONG"
    return word, f"{far:.1e}" + (f" found {found}, wanted {wanted}"[:1500] if word == "WRONG" else "")


def cell(feature: str, title: str, plan: up.Plan, folder: Path) -> Cell:
    start = time.perf_counter()
    try:
        word, text = tried(feature, plan, folder)
    except AssertionError as error:
        word, text = "WRONG", str(error)[:600]
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = "/unisono/" in frames[-1].filename and isinstance(error, (ValueError, TypeError, RuntimeError))
        word = "refused" if ours else "RAW"
        text = f"{type(error).__name__}: {str(error).strip()[:900]}"
        if not ours:
            text += " at " + " < ".join(f"{one.filename}:{one.lineno}" for one in frames[:-6:-1])
    words: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(words, (word, text))
    worst = max(words, key=lambda pair: WORDS.index(pair[0]))
    return Cell(feature, title, *worst, time.perf_counter() - start)


def main(rank: int, size: int, folder: Path, title: str, names: str = "") -> None:
    """Print a line for each feature under a plan."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sharded_parameters.SMALL_MODEL_BYTES = 0  # units as large models have them
    for feature in names.split(",") if names else FEATURES:
        here = folder / feature
        here.mkdir(exist_ok=True)
        store = dist.FileStore(str(here / "store"), size)
        limit = timedelta(seconds=400)
        dist.init_process_group("unisono", store=store, rank=rank, world_size=size, timeout=limit)
        found = cell(feature, title, PLANS[title], here)
        if rank == 0:
            print(json.dumps(found), flush=True)
        dist.destroy_process_group()
