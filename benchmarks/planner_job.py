"""One model on the ranks of this job: its plans are predicted, then run. planner_machine.py starts it.

    unisono run -n 2 benchmarks/planner_job.py seconds MODEL FILE [ROUNDS] [--plans PLANS]
    unisono run -n 2 --virtual-gpus 2 --no-poison benchmarks/planner_job.py memory MODEL FILE

Rank 0 writes a row for each plan to FILE, that which `up.plan` chose first. With `--plans` there are only
these (listed_plans.py). `seconds`: all plans take turns; a figure is the median over rounds of the median of
a round's steps, of the slowest rank. `memory`: the peak of a step on the fullest rank, as PyTorch's allocator
counts it on virtual GPUs.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from listed_plans import plans_of
from planner_machine import PLANS, MachineRow
from planner_models import load

import unisono.parallel as up
import unisono.torch  # noqa: F401  (registers the backend)
from unisono.parallel.batches import cut_rows, rows_of
from unisono.parallel.costs.forecast import StepForecast
from unisono.parallel.graph.containers import mapped
from unisono.parallel.planning.machine import measure

STEPS, MOST_STEPS, ROUND_SECONDS = 4, 100, 0.1
"""Of a plan in a round: at least 4 steps, and as many as fill the time. The first quarter is left out."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def on_rank_0(ask: Callable[[], Any]) -> Any:
    """What rank 0 finds, on all ranks: a value, or the first line of its error."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [(ask(), "")]
        except ValueError as error:
            told = [(None, str(error).splitlines()[0][:100])]
    dist.broadcast_object_list(told, src=0)
    return told[0]


class PlannedModel:
    """A model, its batch, and the plans that are compared."""

    def __init__(self, name: str, device: str, listed: str) -> None:
        self.name, self.device, self.listed = name, device, listed
        torch.manual_seed(0)
        with torch.device("cpu"):
            self.make, self.batch, self.loss = load(name)
        self.rows, self.ranks = rows_of(self.batch), dist.get_world_size()

    def choice(self) -> up.ModelChoice | None:
        """What a user gets; None: nothing, and why is printed, or plans are listed."""
        if self.listed:
            return None
        with torch.device(self.device):
            model = self.make()
        try:
            return up.plan(model, sample=self.batch, optimizer=adamw, loss=self.loss)
        except ValueError as error:
            print(f"{self.name}: {error}", flush=True)
            return None

    def plans(self, choice: up.ModelChoice | None) -> list[up.Plan]:
        """The chosen one, and those that are compared with it."""
        if self.listed:
            return plans_of(self.listed, self.ranks)
        every = [] if choice is None else [choice.plan]
        every += [up.Plan(**fields) for fields in PLANS[self.ranks]]
        return list({str(plan): plan for plan in every}.values())

    def run(self, plan: up.Plan) -> tuple[up.Run, Any]:
        """A run, and this rank's rows of the batch."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.make()
        micro = cut_rows(self.batch, 0, max(1, self.rows // plan.data // plan.micro_batches))
        inputs = mapped(micro if self.loss is None else micro[0], lambda tensor: tensor.to(self.device))
        run = up.parallelize(
            model,
            plan,
            optimizer=adamw,
            loss=self.loss,
            sample=inputs if plan.tensor > 1 or plan.pipeline > 1 else None,
        )
        own = next(iter(run.shard([self.batch])))
        return run, mapped(own, lambda tensor: tensor.to(self.device))

    def row(self, plan: up.Plan, **found: Any) -> MachineRow:
        """A row about a plan."""
        return MachineRow(self.name, "", str(plan), **found)


# ---- seconds ----


def seconds(name: str, rounds: int, listed: str) -> list[MachineRow]:
    """Predict every plan, then run all of them in turns."""
    model = PlannedModel(name, "cpu", listed)
    choice = model.choice()
    hosts = measure("cpu", 0).hosts
    predictor = up.StepPredictor(
        model.make(), model.batch, loss=model.loss, optimizer=adamw, hosts=hosts, trial=True
    )
    said: dict[up.Plan, StepForecast] = {}
    rows = []
    for plan in model.plans(choice):
        if choice is not None and plan == choice.plan:
            said[plan], _ = on_rank_0(lambda: choice.forecast)
            continue
        found, problem = on_rank_0(functools.partial(predictor.forecast, plan))
        if found is None:
            rows.append(model.row(plan, problem=problem))
        else:
            said[plan] = found
    runs: dict[up.Plan, Any] = {}
    for plan in said:
        try:
            runs[plan] = model.run(plan)
            runs[plan][0].step(runs[plan][1])
        except ValueError as error:
            runs.pop(plan, None)
            rows.append(model.row(plan, problem=str(error).splitlines()[0][:100]))
    taken: dict[up.Plan, list[float]] = {plan: [] for plan in runs}
    for _ in range(rounds):
        for plan, (run, own) in runs.items():
            taken[plan].append(_round(run, own, said[plan].total))
    chosen = [
        model.row(
            plan, predicted=said[plan].total, measured=statistics.median(taken[plan]),
            chosen=choice is not None and plan == choice.plan, parts=dict(said[plan].seconds),
        )
        for plan in runs
    ]  # fmt: skip
    return chosen + rows


def _round(run: Any, batch: Any, expected: float) -> float:
    """The median of a round's steps, of the slowest rank. All ranks expect the same seconds of one."""
    found = []
    count = max(STEPS, min(MOST_STEPS, round(ROUND_SECONDS / expected)))
    for _ in range(count):
        dist.barrier()
        began = time.perf_counter()
        run.step(batch)
        found.append(time.perf_counter() - began)
    slowest = torch.tensor([statistics.median(found[count // 4 :])])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


# ---- memory ----


def memory(name: str, listed: str) -> list[MachineRow]:
    """The peak of the fullest rank under every plan, as said and as counted."""
    model = PlannedModel(name, "cuda", listed)
    choice = model.choice()
    rows = []
    for plan in model.plans(choice):
        try:
            rows.append(_peak(model, plan, chosen=choice is not None and plan == choice.plan))
        except ValueError as error:
            rows.append(model.row(plan, problem=str(error).splitlines()[0][:100]))
    return rows


def _peak(model: PlannedModel, plan: up.Plan, *, chosen: bool) -> MachineRow:
    with torch.device("meta"):
        blank = model.make()
    priced = up.plan(blank, sample=model.batch, optimizer=adamw, loss=model.loss, price=plan, memory="1000G")
    del blank
    gc.collect()
    before = torch.cuda.memory_allocated()
    run, own = model.run(plan)
    run.step(own)
    torch.cuda.reset_peak_memory_stats()
    run.step(own)
    seen: list[Any] = [None] * model.ranks
    dist.all_gather_object(seen, torch.cuda.max_memory_allocated() - before)
    said = priced.chosen.peak.nbytes
    del run, own
    gc.collect()
    return model.row(plan, predicted=float(said), measured=float(max(seen)), chosen=chosen)


def main() -> None:
    """A rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("seconds", "memory"))
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--plans", default="")
    args = parser.parse_args()
    if args.what == "memory":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:unisono,cuda:nccl")
        torch.set_default_device("cuda")
        rows = memory(args.model, args.plans)
    else:
        dist.init_process_group("unisono")
        rows = seconds(args.model, args.rounds, args.plans)
    if dist.get_rank() == 0:
        args.file.write_text(json.dumps([row._asdict() for row in rows]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
