"""Steps of models under plans on this machine: said before they run, then measured.

    python benchmarks/planner.py machine --models gpt,cnn --layouts 2,4 --minutes 12 --record FILE
    python benchmarks/planner.py machine --models mixtral --layouts 2 --plans "expert=2;data=2,swap=disk"

A layout is a number of ranks on this machine, or 2x2: two hosts of two ranks, network namespaces with links
of 1 Gbit/s and a core each, which need root. Each model runs on each layout: the plan that `up.plan` chooses,
and those of PLANS (planner_job.py); with `--plans` only the listed ones (listed_plans.py). Memory is compared
on virtual GPUs. Every job adds a line to the record, and jobs that are in it are not run again: so the
benchmark goes on where it stopped. Where the machine was not calibrated, `unisono calibrate` and `calibrate
--compute` run first. Costs are fitted on no model here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from published import verdict

from unisono.engine.costs.machine import NO_FILE
from unisono.engine.environment import env

HERE = Path(__file__).resolve().parent
RECORD = HERE.parent / ".cache" / "planner" / "machine.jsonl"
RATE = "1gbit"
LIMIT_S = 600
"""Of a job."""

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
        {"data": 4, "zero": 3, "shard": 2},
        {"data": 2, "tensor": 2},
        {"data": 2, "pipeline": 2, "micro_batches": 4},
        {"tensor": 2, "pipeline": 2, "micro_batches": 4},
        {"data": 2, "tensor": 2, "zero": 1},
    ],
}
LAYOUTS = {"2": 2, "4": 4, "2x2": 4}
"""Layout -> its ranks."""

WHAT = ("seconds", "memory")

MODELS = ("gpt", "llama", "cnn", "mlp", "encoder", "tables")
FOREIGN = (
    "gpt2", "qwen2", "mixtral", "bert", "t5", "vit", "resnet", "resnet-bn", "unet", "mixer", "lstm", "dlrm",
    "soft-experts", "transformer",
)  # fmt: skip


class MachineRow(NamedTuple):
    """A plan of a model: seconds of a step, or bytes of the fullest rank. `parts`: predicted, by cause."""

    model: str
    layout: str
    plan: str
    predicted: float = math.nan
    measured: float = math.nan
    chosen: bool = False
    parts: dict[str, float] | None = None
    problem: str = ""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


class MachineJob(NamedTuple):
    """One model on one layout; `what`: seconds or memory. `plans`: that are listed; "": the usual ones."""

    model: str
    layout: str
    what: str
    plans: str = ""


# ---- jobs ----


def jobs(models: Sequence[str], layouts: Sequence[str], plans: str, what: Sequence[str]) -> list[MachineJob]:
    """Each model's seconds on every layout, then its memory."""
    return [
        MachineJob(model, layout, each, plans)
        for each in WHAT
        if each in what
        for layout in layouts
        if each == "seconds" or "x" not in layout
        for model in models
    ]


def wrong_plan(plans: str, layouts: Sequence[str]) -> str:
    """What is wrong with listed plans on one of the layouts; "": nothing."""
    from listed_plans import plans_of  # which imports PyTorch

    try:
        for layout in layouts:
            plans_of(plans, LAYOUTS[layout])
    except ValueError as error:
        return str(error)
    return ""


def ran(job: MachineJob, rounds: int) -> list[MachineRow]:
    """Run a job; its rows, or one that says why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        words = [
            str(HERE / "planner_job.py"),
            job.what,
            job.model,
            str(file),
            str(rounds),
            "--plans",
            job.plans,
        ]
        ranks = LAYOUTS[job.layout]
        try:
            if "x" in job.layout:
                _on_hosts(words)
            elif job.what == "memory":
                _run(["-n", str(ranks), "--virtual-gpus", str(ranks), "--no-poison", *words])
            else:
                _run(["-n", str(ranks), *words])
            rows = [MachineRow(**each) for each in json.loads(file.read_text())]
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            rows = [MachineRow(job.model, "", "", problem=str(error).strip().splitlines()[-1][:160])]
    return [row._replace(layout=job.layout) for row in rows]


def _unisono(*words: str) -> list[str]:
    return [sys.executable, "-m", "unisono", *words]


def _run(words: list[str]) -> None:
    _finished([subprocess.Popen(_unisono("run", *words), **_PIPES)])


_PIPES: dict[str, Any] = {
    "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True
}  # fmt: skip


def _finished(launchers: list[subprocess.Popen[str]]) -> None:
    """Wait for the launchers of a job.

    Raises:
        RuntimeError: one failed.  TimeoutExpired: it took too long.
    """
    try:
        for each in launchers:
            _, errors = each.communicate(timeout=LIMIT_S)
            if each.returncode:
                raise RuntimeError(errors or f"exit code {each.returncode}")
    finally:
        for each in launchers:
            each.kill()


def _on_hosts(words: list[str]) -> None:
    """A job on two hosts of two ranks, each host with a core and a link of its own."""
    from turns import network

    cores = sorted(os.sched_getaffinity(0))
    with network(2, RATE) as (net, token):
        launchers = []
        for number, host in enumerate(net):
            where = ["--nnodes", "2", "--node-rank", str(number), "--master-addr", net[0].address]
            command = _unisono("run", *where, "--token-file", token, "-n", "2", *words)
            pinned = ["taskset", "-c", str(cores[number % len(cores)]), *command]
            launchers.append(host.start(pinned, **_PIPES))
        _finished(launchers)


# ---- calibration ----


def calibrate(layouts: Sequence[str]) -> None:
    """Measure the machine where it was not measured: as a whole, and as hosts of one core.

    UNISONO_CALIBRATION=none in the environment asks for the defaults and the roofline.
    """
    if env.read().calibration == NO_FILE:
        return
    if any("x" not in layout for layout in layouts):
        _calibrated([])
    if any("x" in layout for layout in layouts):
        core = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
        if _calibrated(core)["wire"] == 0.0:
            print("  calibrating the links between hosts", flush=True)
            _on_hosts(["-m", "unisono", "calibrate", "--hosts"])


TELLS = """
import json, torch
from unisono.engine.costs.machine import recall
from unisono.engine.environment import env
from unisono.planner.compute_calibration import recall_compute
settings = env.read()
machine, compute = recall(settings).calibration, recall_compute(settings, str(torch.__version__)).calibration
print(json.dumps({"engine": machine.measured_here, "compute": compute.measured_here, "wire": machine.wire}))
"""


def _calibrated(prefix: list[str]) -> dict[str, Any]:
    """Calibrate what is missing under a prefix of the command; what there is."""
    told = subprocess.run([*prefix, sys.executable, "-c", TELLS], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(told.stdout)
    for name, flags in (("engine", []), ("compute", ["--compute"])):
        if not found[name]:
            print(f"  {' '.join([*prefix, 'unisono calibrate', *flags])}", flush=True)
            subprocess.run([*prefix, *_unisono("calibrate", *flags)], check=True, stdout=subprocess.DEVNULL)
    return found


# ---- the benchmark ----


def machine(
    models: Sequence[str],
    layouts: Sequence[str],
    *,
    rounds: int,
    minutes: float,
    record: Path,
    plans: str = "",
    what: Sequence[str] = WHAT,
) -> bool:
    """Run what the record lacks, as long as there is time; print every row of it, and the verdicts."""
    until = time.monotonic() + 60 * minutes
    wanted = jobs(models, layouts, plans, what)
    kept = recorded(record)
    calibrate(layouts)
    for job in wanted:
        if job not in kept and time.monotonic() < until:
            kept[job] = ran(job, rounds)
            record.parent.mkdir(parents=True, exist_ok=True)
            with record.open("a") as file:
                file.write(json.dumps([job, kept[job]]) + "\n")
            print("\n".join(lines(kept[job], job.what)), flush=True)
    left = [job for job in wanted if job not in kept]
    if left:
        print(f"  no time for {len(left)} of {len(wanted)} jobs: the same command goes on with them")
    return _verdicts({job: kept[job] for job in wanted if job in kept}, chosen=not plans)


def recorded(record: Path) -> dict[MachineJob, list[MachineRow]]:
    """The jobs of a record. A line that was cut off does not count."""
    found = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            job, rows = json.loads(line)
            found[MachineJob(*job)] = [MachineRow(*row) for row in rows]
    return found


def lines(rows: Sequence[MachineRow], what: str) -> Iterator[str]:
    """A line for each plan."""
    scale, unit = (1e3, "ms") if what == "seconds" else (1 / (1 << 20), "MiB")
    for row in rows:
        head = f"  {'*' if row.chosen else ' '} {row.model:9} {row.layout:4} {row.plan:58}"
        if row.problem:
            yield f"{head} not run: {row.problem}"
        else:
            said, took = row.predicted * scale, row.measured * scale
            yield f"{head} {said:8.2f} {unit} ({took:8.2f})  {row.error:+.1%}"


def _verdicts(found: dict[MachineJob, list[MachineRow]], *, chosen: bool) -> bool:
    times = [row for job, rows in found.items() for row in rows if job.what == "seconds" and not row.problem]
    peaks = [row for job, rows in found.items() for row in rows if job.what == "memory" and not row.problem]
    failed = [row for rows in found.values() for row in rows if not row.plan]
    held = verdict("every job ran", not failed, f"{len(failed)} of {len(found)} did not")
    if times:
        held &= _of_times(times)
        held &= not chosen or _of_choices(times)
    if peaks:
        held &= _of_peaks(peaks)
    return held


def _of_times(rows: list[MachineRow]) -> bool:
    errors = sorted(abs(row.error) for row in rows)
    median, most = statistics.median(errors), errors[math.ceil(0.95 * len(errors)) - 1]
    missed = sorted((row for row in rows if abs(row.error) > 0.10), key=lambda row: -abs(row.error))
    print(f"  {len(missed)} of {len(rows)} steps are off by more than 10 %:")
    print("\n".join(lines(missed, "seconds")))
    return verdict("step, median error 10 %", median <= 0.10, f"{median:.1%}, p95 {most:.1%}")


def _of_choices(rows: list[MachineRow]) -> bool:
    held, lost = True, []
    for model, layout in dict.fromkeys((row.model, row.layout) for row in rows):
        here = [row for row in rows if (row.model, row.layout) == (model, layout)]
        best, chosen = min(here, key=lambda row: row.measured), next((r for r in here if r.chosen), None)
        if chosen is None:
            print(f"    {model} on {layout}: up.plan chose nothing that ran")
            held = False
            continue
        lost.append(chosen.measured / best.measured - 1)
        print(f"    {model} on {layout}: {chosen.plan} is chosen, {lost[-1]:+.1%}; best {best.plan}")
    worst = max(lost, default=math.inf)
    within = sum(each <= 0.05 for each in lost)
    return (
        verdict("chosen within 5 % of the best", worst <= 0.05, f"{within} of {len(lost)}, worst {worst:.1%}")
        and held
    )


def _of_peaks(rows: list[MachineRow]) -> bool:
    missed = [row for row in rows if not -0.02 <= row.error <= 0.05]
    print(f"  {len(missed)} of {len(rows)} peaks are more than 2 % too low or 5 % too high:")
    print("\n".join(lines(sorted(missed, key=lambda row: -abs(row.error)), "memory")))
    low, high = min(row.error for row in rows), max(row.error for row in rows)
    return verdict("memory, -2 % to 5 %", not missed, f"{low:+.1%} to {high:+.1%}")
