"""What `make test-gpu-programs` runs: programs of other libraries, unchanged, on 2, 4 and 8 virtual GPUs.

    python tests/clients/run_gpu_programs.py                  every program
    python tests/clients/run_gpu_programs.py timm --gpus 2 4

The losses have to equal those of the same program on one GPU, whose batch is that of all. Ends with 1 where a
program fails or its losses differ.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent / "gpu_programs"
LIMIT_S = 1800
UNISONO = ("-m", "unisono", "run", "-n", "{gpus}", "--virtual-gpus", "{gpus}")
ALONE = ("-m", "unisono", "run", "-n", "1", "--virtual-gpus", "{gpus}")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "{gpus}")
ACCELERATE = ("-m", "accelerate.commands.launch", "--num_processes", "{gpus}")


@dataclass(frozen=True)
class GpuProgram:
    """A program and how it is started.

    Attributes:
        tolerance: of its numbers; half precision rounds other sums.
        gpus: on how many it can run.
    """

    name: str
    distribution: str
    program: tuple[str, ...]
    launcher: tuple[str, ...] = UNISONO
    tolerance: float = 2e-5
    gpus: tuple[int, ...] = (2, 4, 8)


def torchtitan(way: str, gpus: tuple[int, ...] = (2, 4, 8)) -> GpuProgram:
    """Make the program of one way. It starts torchtitan itself, whose log rounds to four digits."""
    program = ("torchtitan_program.py", way, "{gpus}")
    return GpuProgram(f"torchtitan {way}", "torchtitan", program, (), 4e-4, gpus)


def torchvision(way: str, tolerance: float) -> GpuProgram:
    """Make the program of one of torchvision's training scripts."""
    return GpuProgram(
        f"torchvision {way}", "torchvision", ("torchvision_program.py", way), tolerance=tolerance
    )


# fmt: off
GPU_PROGRAMS = (
    GpuProgram("Lightning starts its ranks", "lightning", ("lightning_program.py", "{gpus}"), ALONE, 5e-3),
    GpuProgram("Lightning by torchrun", "lightning", ("lightning_program.py", "{gpus}"), TORCHRUN, 5e-3),
    GpuProgram("accelerate launch", "accelerate", ("accelerate_program.py", "{gpus}"), ACCELERATE, 5e-3),
    GpuProgram("timm", "timm", ("models_of_libraries.py", "timm")),
    GpuProgram("open_clip", "open_clip_torch", ("models_of_libraries.py", "open_clip")),
    GpuProgram(
        "torchvision detection", "torchvision", ("models_of_libraries.py", "torchvision"), tolerance=0.2
    ),
    torchvision("classification", 1e-2), torchvision("segmentation", 1e-3), torchvision("video", 1e-3),
    torchtitan("fsdp"), torchtitan("tp"), torchtitan("pp"),
    torchtitan("cp", (2, 4)), torchtitan("all", (4, 8)),
    GpuProgram("trl SFT", "trl", ("trl_program.py", "sft", "{gpus}"), ACCELERATE, 1e-3),
    GpuProgram("trl GRPO", "trl", ("trl_program.py", "grpo", "{gpus}"), UNISONO, 1e-3),
    # its gradients are sums over all pictures, of which more GPUs have more
    GpuProgram("ultralytics", "ultralytics", ("ultralytics_program.py", "{gpus}"), (), 1e-3),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="run programs whose name contains one of these")
    parser.add_argument("--gpus", nargs="*", type=int, default=[2, 4, 8])
    arguments = parser.parse_args()
    failures = []
    for program in GPU_PROGRAMS:
        if arguments.names and not any(name.lower() in program.name.lower() for name in arguments.names):
            continue
        alone, wrong = run_once(program, 1)
        for gpus in [] if wrong else sorted({*arguments.gpus} & {*program.gpus}):
            losses, wrong = run_once(program, gpus)
            wrong = wrong or differ(losses, alone, program.tolerance)
            print(f"{program.name}, {gpus} GPUs: {wrong or losses}", flush=True)
            failures += [f"{program.name}, {gpus} GPUs: {wrong}"] if wrong else []
        failures += [f"{program.name}, 1 GPU: {wrong}"] if wrong and not alone else []
    print("\n".join(failures) or "all programs: the losses are those of one GPU")
    return int(bool(failures))


def differ(losses: list[float], alone: list[float], tolerance: float) -> str:
    """What is wrong with losses; "" where they are near those of one GPU."""
    near = len(losses) == len(alone) and all(
        abs(one - other) <= tolerance * abs(other) for one, other in zip(losses, alone, strict=True)
    )
    return "" if near else f"its losses differ from those on one GPU: {losses} and {alone}"


def run_once(program: GpuProgram, gpus: int) -> tuple[list[float], str]:
    """Run it once: its losses, and why it failed."""
    try:
        importlib.metadata.version(program.distribution)
    except importlib.metadata.PackageNotFoundError:
        return [], f"{program.distribution} is not installed"
    first, *rest = (word.format(gpus=gpus) for word in program.program)
    launcher = [word.format(gpus=gpus) for word in program.launcher]
    command = [sys.executable, *launcher, str(PROGRAMS / first), *rest]
    environ = {**os.environ, "UNISONO_VIRTUAL_GPUS": str(gpus)}  # Unisono's own launcher sets it anew
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        return [], f"no end after {LIMIT_S} s: {(error.stdout or b'')[-2000:]!r}"
    found = [
        line.partition("GPU_PROGRAM ")[2] for line in done.stdout.splitlines() if "GPU_PROGRAM [" in line
    ]
    if not found or done.returncode:
        return [], f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}"
    return json.loads(found[-1]), ""


if __name__ == "__main__":
    sys.exit(main())
