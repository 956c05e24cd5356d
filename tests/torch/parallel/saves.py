"""Checkpoints: save under one plan, go on under another. `main(rank, size, folder, shared, *jobs)`.

Jobs are JSON: what to do, the plan, the model.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import unisono.parallel as up
from parallel import models
from parallel.group_of_a_job import process_group

STEPS, ROWS = 6, 12
COMPRESSIONS = {
    "none": None,
    "both": up.PowerSGD(rank={"*norm*": "exact", "*fc*": 8, "*.weight": "int8"}, start=1, errors="1-6-9"),
}


def trained(run: up.Run, batches: list[Any]) -> list[float]:
    return [run.step(batch) for batch in run.shard(batches)]


def main(rank: int, size: int, folder: Path, shared: str, *jobs: str) -> None:
    warnings.filterwarnings("error", message=".*returned a view tensor")
    warnings.filterwarnings("ignore", message=".*TypedStorage")
    with process_group(rank, size, folder):
        losses = [work(Path(shared), json.loads(job)) for job in jobs]
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def work(shared: Path, job: dict[str, Any]) -> list[float]:
    case = models.CASES[job["model"]]
    batches = case.batches(STEPS, ROWS)
    run = up.parallelize(
        models.make(job["model"]),
        up.Plan(**job["plan"], compression=COMPRESSIONS[job.get("compression", "none")]),
        optimizer=lambda p: models.optimizer(job.get("optimizer", "adamw"), p),
        loss=case.loss,
        sample=batches[0][0],
    )
    if job["do"] == "all":
        return trained(run, batches)
    if job["do"] == "first":
        losses = trained(run, batches[:2])
        run.save(shared, keep=2)
        losses += trained(run, batches[2:3])
        run.save(shared, keep=2, background=True)
        run.wait()
        return losses
    run.load(shared)
    assert run.steps == 3
    return trained(run, batches[3:])
