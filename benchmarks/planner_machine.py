"""Steps of models under plans on this machine: said before they run, then measured in turns.

    python benchmarks/planner.py machine --rounds 5
    unisono run -n 2 benchmarks/planner_machine.py MODEL ROUNDS FILE     one model; rank 0 writes FILE

A round runs a few steps of each plan, one plan after the other. A figure is the median over rounds of the
round's median; with --cores, which a busy machine disturbs less, the least of a core's. First
`unisono calibrate` and `unisono calibrate --compute` measure the machine. Costs are fitted on no model here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from published import verdict

STEPS = 4
"""Of a plan in a round; the first is left out."""

PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"data": 2},
        {"data": 2, "zero": 1},
        {"data": 2, "zero": 3},
        {"data": 2, "zero": 2, "micro_batches": 2},
        {"data": 2, "recompute": True},
        {"tensor": 2},
        {"pipeline": 2, "micro_batches": 4},
    ],
    4: [
        {"data": 4},
        {"data": 4, "zero": 3},
        {"data": 2, "tensor": 2},
        {"data": 2, "pipeline": 2, "micro_batches": 4},
        {"tensor": 2, "pipeline": 2, "micro_batches": 4},
        {"data": 2, "tensor": 2, "zero": 1},
    ],
}
MODELS = ("gpt", "llama", "encoder", "cnn", "mlp", "tables")


class Row(NamedTuple):
    """One plan of one model. Seconds; `cores_s`: of a rank on its core, without waits."""

    model: str
    ranks: int
    plan: str
    predicted_s: float
    busy_s: float  # predicted, without waits, of a rank alone on its core
    measured_s: float
    cores_s: float
    problem: str = ""

    def error(self, *, cores: bool) -> float:
        """Predicted over measured, less one."""
        return (self.busy_s / self.cores_s if cores else self.predicted_s / self.measured_s) - 1


# ---- one model, in a job ----


def measured(name: str, rounds: int) -> list[Row]:
    """Predict each plan of a model on the ranks of this job, run all of them in turns; rows on rank 0."""
    import torch
    import torch.distributed as dist
    from planner_models import MAKERS

    import unisono.parallel as up

    make = MAKERS[name]

    def adamw(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=1e-3)

    torch.manual_seed(0)
    model, batch, loss = make()
    predictor = up.StepPredictor(model, batch, loss=loss, optimizer=adamw)
    ranks = dist.get_world_size()
    crowd = max(1.0, ranks / len(os.sched_getaffinity(0)))
    runs: dict[str, Any] = {}
    said: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for fields in PLANS[ranks]:
        plan = up.Plan(**fields)
        torch.manual_seed(0)
        try:
            said[str(plan)] = predictor.forecast(plan)  # before anything runs
            sample = batch[0] if plan.tensor > 1 else None
            run = up.parallelize(make()[0], plan, optimizer=adamw, loss=loss, sample=sample)
            own = next(iter(run.shard([batch])))
            run.step(own)
            runs[str(plan)] = run, own
        except ValueError as error:
            problems[str(plan)] = str(error).splitlines()[0][:90]
    taken: dict[str, list[tuple[float, float]]] = {plan: [] for plan in runs}
    for _ in range(rounds):
        for plan, (run, own) in runs.items():
            taken[plan].append(_round(run, own))
    rows = []
    for plan, forecast in said.items():
        if plan in runs:
            clock, cores = zip(*taken[plan], strict=True)
            busy = (forecast.total - forecast.kinds["waiting"]) / crowd
            found = statistics.median(clock), min(cores)
            rows.append(Row(name, ranks, plan, forecast.total, busy, *found))
    return rows + [
        Row(name, ranks, plan, math.nan, math.nan, math.nan, math.nan, why) for plan, why in problems.items()
    ]


def _round(run: Any, batch: Any) -> tuple[float, float]:
    """Medians of a round's steps: seconds on the clock, and on the core of the busiest rank."""
    import torch
    import torch.distributed as dist

    found = []
    for _ in range(STEPS):
        dist.barrier()
        began, busy = time.perf_counter(), time.process_time()
        run.step(batch)
        found.append((time.perf_counter() - began, time.process_time() - busy))
    both = torch.tensor([statistics.median(column) for column in zip(*found[1:], strict=True)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return float(both[0]), float(both[1])


# ---- all models ----


def machine(rounds: int, *, cores: bool = False) -> bool:
    """All models on two and four ranks; print each row, the errors, the misses, and the choices."""
    rows: list[Row] = []
    for name in MODELS:
        for ranks in PLANS:
            rows += _job(name, ranks, rounds)
            print("\n".join(_lines(rows[-len(PLANS[ranks]) :], cores=cores)), flush=True)
    return _verdicts(rows, cores=cores)


def _job(name: str, ranks: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), __file__, name, str(rounds)]
        subprocess.run([*command, str(file)], check=True, stdout=subprocess.DEVNULL)
        return [Row(*each) for each in json.loads(file.read_text())]


def _lines(rows: list[Row], *, cores: bool) -> Iterator[str]:
    for row in rows:
        head = f"    {row.model:8} {row.ranks}  {row.plan:44}"
        if row.problem:
            yield f"{head} not run: {row.problem}"
            continue
        said, took = (row.busy_s, row.cores_s) if cores else (row.predicted_s, row.measured_s)
        yield f"{head} {said * 1e3:8.2f} ms ({took * 1e3:8.2f})  {row.error(cores=cores):+.1%}"


def _verdicts(rows: list[Row], *, cores: bool) -> bool:
    run = [row for row in rows if not row.problem]
    errors = sorted(abs(row.error(cores=cores)) for row in run)
    median, most = statistics.median(errors), errors[math.ceil(0.95 * len(errors)) - 1]
    missed = [row for row in run if abs(row.error(cores=cores)) > 0.10]
    print(f"  {len(missed)} of {len(run)} are off by more than 10 %:")
    print("\n".join(_lines(sorted(missed, key=lambda row: -abs(row.error(cores=cores))), cores=cores)))
    held = verdict("median error 10 %", median <= 0.10, f"{median:.1%}, p95 {most:.1%}")
    lost = {}
    for name, ranks in dict.fromkeys((row.model, row.ranks) for row in run):
        here = [row for row in run if (row.model, row.ranks) == (name, ranks)]
        best, chosen = min(here, key=lambda r: r.measured_s), min(here, key=lambda r: r.predicted_s)
        lost[name, ranks] = chosen.measured_s / best.measured_s - 1
        print(f"    {name} on {ranks}: {chosen.plan} is chosen, {lost[name, ranks]:+.1%}; best {best.plan}")
    worst = max(lost.values())
    return verdict("each chosen plan within 5 % of the best", worst <= 0.05, f"worst {worst:.1%}") and held


def main() -> None:
    """One model, as a rank of a job."""
    import torch.distributed as dist

    import unisono.torch  # noqa: F401  (registers the backend)

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("rounds", type=int)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    dist.init_process_group("unisono")
    rows = measured(args.model, args.rounds)
    if dist.get_rank() == 0:
        args.file.write_text(json.dumps(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
