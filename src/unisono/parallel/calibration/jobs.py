"""`unisono calibrate --compute`: times the operators of training, in jobs of its own; keeps the figures.

    unisono run -n RANKS -m unisono.parallel.calibration.jobs NAME FILE [SO_FAR]

is a rank of such a job. It measures what NAME says; rank 0 writes what all of them have found into FILE.
SO_FAR is a file, too: the `ComputeCalibration` of this machine so far.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from unisono.engine.costs.machine import identity
from unisono.parallel.calibration.operators import measure_operators
from unisono.parallel.calibration.runtime import measure_runtime
from unisono.parallel.calibration.shared_steps import measure_shared_steps
from unisono.planner.compute_calibration import (
    ComputeCalibration,
    LoadedCompute,
    Measurement,
    RuntimeCosts,
    SharedSteps,
    compute_file,
    keep_compute,
    middle,
    recall_compute,
)
from unisono.planner.operator_costs import OperatorCosts
from unisono.torch.control_data import on_rank_0  # also registers the backend

if TYPE_CHECKING:
    from unisono.engine.environment.env import Settings

LIMIT_S = 900
"""Of one job: a machine that is busy with other programs takes far longer than its ten seconds or twenty."""

MOST_CORES = 8
"""On more of them no job with two ranks a core is measured: it would take their memory."""

PASSES = 3
"""Over the jobs that train together."""

BUSY = 0.5
"""Programs that run on the average of the last minute: with more of them the machine is not quiet."""

SHOWN = (
    ("product of 512 x 512 x 512", "product", "", (512, 512, 512), 2 * 512.0**3, "GFLOP/s"),
    ("the same in bf16", "product", "bf16", (512, 512, 512), 2 * 512.0**3, "GFLOP/s"),
    ("attention, 256 tokens", "attention", "", (256, 3e7), 1.5e7, "GFLOP/s"),
    ("convolution, 32 channels", "convolution", "", (32, 3e7), 3e7, "GFLOP/s"),
    ("adding, 3 MB", "light", "", (3e6,), 3e6, "GB/s"),
    ("GELU, 1 MB", "heavy", "", (2.5e5,), 2e6, "GB/s"),
    ("norm, 1 MB", "norm", "", (2.5e5,), 2e6, "GB/s"),
)

MEASURES: dict[str, tuple[type[Any], Callable[..., Any]]] = {
    "operators": (OperatorCosts, measure_operators),
    "the runtime": (RuntimeCosts, measure_runtime),
    "steps": (SharedSteps, measure_shared_steps),
}
_DECODE: dict[object, Callable[[bytes], Any]] = {
    kind: msgspec.json.Decoder(kind).decode
    for kind in (OperatorCosts, RuntimeCosts, SharedSteps, ComputeCalibration)
}


class ComputeCalibrationError(RuntimeError):
    """A job of the calibration failed; the text has its last lines."""


def calibrated(
    settings: Settings, *, refresh: bool, again: bool = False, say: Callable[[str], object]
) -> LoadedCompute:
    """The figures of this machine and this PyTorch; measured where there are none.

    Args:
        refresh: measure though there are figures, and forget these.  again: measure once more, and take the
            medians of all times.  say: is told when a job is done.
    Raises:
        ComputeCalibrationError: a job failed.
    """
    found = recall_compute(settings, str(torch.__version__))
    if found.calibration.measured_here and not (refresh or again):
        return found
    measured = _measured(say)
    if again and found.calibration.times:
        now = measured.measured
        measured = msgspec.structs.replace(found.calibration.with_time(measured.times[0]), measured=now)
    return _keep(measured, settings)


def _keep(calibration: ComputeCalibration, settings: Settings) -> LoadedCompute:
    try:
        file = compute_file(settings, calibration.torch)
        if file is None:
            return LoadedCompute(calibration, "measured now, not kept: UNISONO_CALIBRATION=none")
        keep_compute(calibration, file)
    except OSError as error:
        return LoadedCompute(calibration, f"measured now, not kept: {error}")
    return LoadedCompute(calibration, str(file))


def _measured(say: Callable[[str], object]) -> ComputeCalibration:
    """Operators on one rank, and on a rank for each core; the runtime of two; steps of ranks together."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    if load > BUSY:
        say(f"other programs are running (load {load:.1f}): figures of ranks with several threads get worse")
    between = [round(cores**0.5)] if cores >= 16 else []
    counts = sorted({1, *between, cores})
    every = [_job(ranks, "operators", say) for ranks in counts]
    runtime = _job(2, "the runtime", say)
    measured = datetime.now(timezone.utc).isoformat(timespec="seconds")
    found = ComputeCalibration(identity(), str(torch.__version__), measured, cores, tuple(every), runtime)
    together = sorted({max(2, cores), max(2, 2 * cores)}) if cores <= MOST_CORES else [cores]
    passes = [  # minutes apart: a machine becomes faster and slower
        [_job(ranks, "steps", say, found) for ranks in together] for _ in range(PASSES)
    ]
    shared = tuple(map(middle, zip(*passes, strict=True)))
    return found.with_time(Measurement(found.settings, runtime, shared))


def _job(
    ranks: int, name: str, say: Callable[[str], object], so_far: ComputeCalibration | None = None
) -> Any:
    """Run one job; its rank 0 writes what it has measured. It may read what was measured before."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks)]
        command += ["-m", "unisono.parallel.calibration.jobs", name, str(file)]
        if so_far is not None:
            (before := Path(folder, "so_far.json")).write_bytes(msgspec.json.encode(so_far))
            command.append(str(before))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ComputeCalibrationError(f"{ranks} ranks took more than {LIMIT_S} s to measure") from error
        if done.returncode or not file.exists():
            last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
            raise ComputeCalibrationError(
                f"{ranks} ranks could not measure (exit code {done.returncode}):\n{last}"
            )
        found = _DECODE[MEASURES[name][0]](file.read_bytes())
    say(f"{name}, {ranks} {'rank' if ranks == 1 else 'ranks'}: {time.monotonic() - began:.0f} s")
    return found


def compute_lines(found: LoadedCompute) -> list[str]:
    """The figures as text."""
    one = found.calibration
    heads = [f"{each.ranks} x {each.threads}" for each in one.settings]
    lines = [
        f"{one.cores} cores, PyTorch {one.torch}; operators measured {_times(one)}",
        f"{'ranks x threads':34}" + "".join(f"{head:>12}" for head in heads),
    ]
    for text, kind, low, point, work, unit in SHOWN:
        rates = [work / each.at(kind, *point, low=low) / 1e9 for each in one.settings]
        lines.append(f"{text:34}" + "".join(f"{rate:12.1f}" for rate in rates) + f"   {unit} of a rank")
    for text, name in (("autograd, an operator forward", "forward_s"), ("backward", "backward_s")):
        times = [getattr(each, name) * 1e6 for each in one.settings]
        lines.append(f"{text:34}" + "".join(f"{each:12.2f}" for each in times) + "   us")
    for phase in ("forward", "backward", "update"):
        shares = [each.scale.get(phase, 1.0) for each in one.settings]
        lines.append(f"{phase + ', of its operators':34}" + "".join(f"{each:12.2f}" for each in shares))
    runtime = msgspec.structs.asdict(one.runtime)
    names = ", ".join(
        f"{name.removesuffix('_s')} {value * 1e6:.0f}" for name, value in runtime.items() if value > 1e-8
    )
    lines.append(f"the runtime, us: {names}; a byte of a unit {one.runtime.unit_byte_s * 1e9:.2f} ns")
    lines += [line for each in one.shared for line in _steps_lines(each)]
    return [*lines, f"kept in {found.source}" if "/" in found.source else found.source]


def _times(one: ComputeCalibration) -> str:
    if not one.measured:
        return "never: a roofline"
    return one.measured if len(one.times) < 2 else f"{len(one.times)} times, the last {one.measured}"


def _steps_lines(one: SharedSteps) -> list[str]:
    more = {
        "a step": one.step_s, "without data ranks": one.alone_s, "sharded": one.sharded_s,
        "an operator computed again": one.again_s, "replayed": one.replay_s,
        "a module with weights in two passes": one.split_s,
        "a collective": one.turn_s, "a message": one.message_s,
        "a parameter of a unit in 16 bits": one.low_parameter_s,
    }  # fmt: skip
    kinds = f"under tensor {one.cut_scale:.2f}, in a pipeline {one.stage_scale:.2f}"
    return [
        f"steps of {one.ranks} ranks: operators {one.scale:.2f} of their sum, {kinds}",
        "    more, in us: " + ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in more.items()),
    ]


def _measure_as_rank(name: str, file: str, *so_far: str) -> None:
    dist.init_process_group("unisono")
    try:
        found = MEASURES[name][1](*(_DECODE[ComputeCalibration](Path(each).read_bytes()) for each in so_far))
        on_rank_0(lambda: Path(file).write_bytes(msgspec.json.encode(found)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _measure_as_rank(*sys.argv[1:])
