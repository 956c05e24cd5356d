"""Plans of the sweep, and the job that trains them one after the other: `main(rank, size, folder, which)`."""

import importlib.util
import itertools
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import unisono.parallel as up
from parallel import models, reference_training
from parallel.group_of_a_job import process_group
from unisono.torch_internals import find, fsdp

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv")
HAVE_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
NAMES = ("gpt", "mlp", "tied", "conv", *(("gpt2", "llama") if HAVE_TRANSFORMERS else ()))
TOLERANCE = 1e-5  # nats; seen in f32: 1.2e-6; bf16 and fp16 round in the parts of the plan: 1e-15
STEPS = 20
SCALE = 2.0**10


class Trial(NamedTuple):
    """One plan and what it trains."""

    model: str
    optimizer: str
    rows: int
    plan: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.model}, {self.optimizer}, {self.rows} rows: {up.Plan(**self.plan)}"


def trials(size: int) -> list[Trial]:
    """Every legal split of `size` ranks x ZeRO x precision; the rest of the plan takes turns."""
    turn = itertools.count(size)
    splits = [s for s in itertools.product((1, 2, 4, 8), repeat=3) if s[0] * s[1] * s[2] == size]
    asked = itertools.product(splits, (0, 1, 2, 3), ("f32", "bf16", "fp16"))
    return [
        trial for (split, zero, precision) in asked if (trial := _trial(next(turn), split, zero, precision))
    ]


def _trial(turn: int, split: tuple[int, int, int], zero: int, precision: str) -> Trial | None:
    data, tensor, pipeline = split
    asked = {"data": data, "tensor": tensor, "pipeline": pipeline, "zero": zero, "precision": precision}
    asked |= {"micro_batches": (1, 2, 3, 4)[turn % 4], "clip": (None, 0.5)[turn // 2 % 2]}
    if zero and data > 2 and turn % 2:
        asked["shard"] = 2
    for step in range(len(NAMES) * len(SCHEDULES)):
        name = NAMES[(turn + step) % len(NAMES)]
        plan = asked | {
            "schedule": SCHEDULES[(turn + step // 2) % len(SCHEDULES)],
            "recompute": turn % 3 == 0,
        }
        case = models.CASES[name]
        try:
            made = up.Plan(**plan)
        except ValueError:
            continue
        if made.stages <= case.pieces and tensor <= case.tensor:
            return Trial(name, ("sgd", "adamw")[turn // 3 % 2], (16, 13)[turn // 5 % 2], plan)
    return None


def fast(size: int) -> list[Trial]:
    """A few of 4, 2 and 1 ranks that together have every schedule, ZeRO stage, precision and own model."""
    kept, seen = [], set()
    for ranks, trial in ((count, trial) for count in (4, 2, 1) for trial in trials(count)):
        plan = up.Plan(**trial.plan)
        marks = {
            trial.model,
            f"zero {plan.zero}",
            plan.precision,
            f"shard {plan.shard}",
            f"tensor {plan.tensor}",
            f"ranks {ranks}",
        }
        marks |= {plan.schedule} if plan.pipeline > 1 else set()
        if marks - seen and trial.model not in ("gpt2", "llama"):
            kept += [trial] if ranks == size else []
            seen |= marks
    return kept


def main(rank: int, size: int, folder: Path, which: str) -> None:
    warnings.filterwarnings("error", message=".*returned a view tensor")
    with process_group(rank, size, folder):
        steps = STEPS if which == "all" else 5
        results = {}
        for trial in trials(size) if which == "all" else fast(size):
            losses = train(trial, steps)
            if rank == 0:
                results[str(trial)] = difference(trial, losses)
                print(f"{results[str(trial)]:.1e} {trial}", flush=True)
        if rank == 0:
            (folder / "results.json").write_text(json.dumps(results))


def train(trial: Trial, steps: int) -> list[float]:
    """The losses of a plan."""
    plan, case = up.Plan(**trial.plan), models.CASES[trial.model]
    run = up.parallelize(
        models.make(trial.model),
        plan,
        optimizer=lambda p: models.optimizer(trial.optimizer, p),
        loss=case.loss,
    )
    if run.scaler.active:
        run.scaler.scale = SCALE
    losses = [run.step(batch) for batch in run.shard(case.batches(steps, trial.rows))]
    assert run.skipped == 0, f"{run.skipped} steps overflowed"
    return losses


def difference(trial: Trial, losses: list[float]) -> float:
    """The largest difference from one process's losses."""
    plan = up.Plan(**trial.plan)
    alone = reference_training.losses(
        trial.model,
        trial.optimizer,
        plan.precision,
        len(losses),
        trial.rows,
        way(plan),
        plan.clip,
        SCALE if plan.precision == "fp16" else 1.0,
    )
    return max(abs(ours - theirs) for ours, theirs in zip(losses, alone, strict=True))


def way(plan: up.Plan) -> reference_training.Way:
    """In which parts one process computes: in f32, whole batches."""
    if plan.precision == "f32":
        return reference_training.Way()
    early, untied = plan.zero >= 2, plan.pipeline > 1
    leaves = find(fsdp.NAMES["leaf dtypes"]) is not None
    return reference_training.Way(
        plan.data,
        plan.micro_batches,
        early=early,
        untied=untied,
        first_untied=leaves and not early and plan.micro_batches > 1,
        tensor=plan.tensor,
    )
