"""Count the instructions of three calls; fail where one has 5 % more than `tools/gate.json` says.

    make gate                   compare, in half a minute
    make gate ARGS=--update     write the figures of this machine's software into tools/gate.json

Instructions, not seconds: a busy machine does not change them. `count_instructions.c` steps through the calls
of one rank. This needs no performance counters, which virtual machines lack, and no Valgrind, under which
PyTorch takes half a minute to load. A figure holds for one combination of Python, NumPy, PyTorch, compiler, C
library and processor; where there is none, the gate says so and passes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

TOOLS = Path(__file__).parent
FIGURES = TOOLS / "gate.json"
CASES = {
    "repeated": "all_reduce of 4 bytes, repeated",
    "new": "all_reduce of a new size",
    "bucket": "DDP's bucket: all_reduce and its future",
}
ALLOWED = 1.05
TIMEOUT_S = 120
WORDS = {
    "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "UNISONO_CALIBRATION": "none", "UNISONO_PLACEMENT": "0",
}  # fmt: skip


def version(package: str) -> str:
    """Return the version of an installed package without its build, or nothing."""
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return ""


def software(case: str) -> str:
    """Return what a figure holds for."""
    compiler = subprocess.run(["c++", "-dumpfullversion"], capture_output=True, text=True, check=False)
    cpu = Path("/proc/cpuinfo").read_text()
    level = "v4" if "avx512vl" in cpu else "v3" if "avx2" in cpu else "v2"
    names = [f"CPython {platform.python_version()}", f"NumPy {version('numpy')}"]
    names += [f"PyTorch {version('torch')}"] if case == "bucket" else []
    return ", ".join(
        [*names, f"g++ {compiler.stdout.strip()}", " ".join(platform.libc_ver()), f"x86-64-{level}"]
    )


def count(counter: Path, case: str) -> int:
    """Return the instructions of one call: the lower quartile, as a call that waits has more."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(counter), sys.executable, str(TOOLS / "gate_rank.py"), case, folder, "0"]
        environment = {**os.environ, **WORDS}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
        )
    return int(statistics.quantiles(map(int, done.stdout.split()), n=4, method="inclusive")[0])


def main() -> None:
    """Count, then compare or update."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--update", action="store_true", help="write what is counted into tools/gate.json")
    update = parser.parse_args().update
    if platform.machine() != "x86_64":
        print(f"gate: passed; nothing is counted on {platform.machine()}")
        return
    figures = json.loads(FIGURES.read_text())
    too_many = []
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "count"
        subprocess.run(["cc", "-O2", "-o", str(counter), str(TOOLS / "count_instructions.c")], check=True)
        if subprocess.run([str(counter), "true"], check=False).returncode:
            print("gate: passed; this machine forbids ptrace, so nothing was counted")
            return
        brackets = count(counter, "empty")
        for case, words in CASES.items():
            if case == "bucket" and not version("torch"):
                print(f"gate: {words}: NOT COUNTED, PyTorch is not installed")
                continue
            key, found = software(case), count(counter, case) - brackets
            expected = figures[case].get(key)
            if update:
                figures[case][key] = found
            if expected is None:
                print(f"gate: {words}: {found:,} instructions; NOT COMPARED, no figure for {key}")
                continue
            print(
                f"gate: {words}: {found:,} instructions, expected {expected:,} ({found / expected - 1:+.1%})"
            )
            if found > expected * ALLOWED:
                too_many.append(words)
    if update:
        FIGURES.write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n")
    elif too_many:
        sys.exit(
            f"gate: FAILED; more than 5 % above tools/gate.json: {'; '.join(too_many)}.\n"
            "Make the call cheaper. If it must cost this, run `make gate ARGS=--update` and commit the file."
        )


if __name__ == "__main__":
    main()
