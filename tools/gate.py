"""Count the instructions of four calls; fail where one has 5 % more than `tools/gate.json` says.

    make gate                   compare, in half a minute
    make gate ARGS=--update     write the figures of this machine's software into tools/gate.json
    PYTHONPATH=.venv-torch-2.13/lib/python3.11/site-packages make gate      with another PyTorch

Instructions, not seconds: a busy machine does not change them. `count_instructions.c` steps through the calls
of one rank. This needs no performance counters, which virtual machines lack, and no Valgrind, under which
PyTorch takes half a minute to load. A figure holds for one combination of Python, NumPy, PyTorch, the
engine's compiler, C library and processor. Without a figure, or where nothing can be counted, the gate says
so and passes.

CPython keeps the attributes of types in a table of 4,096 places, found by the version of the type and the
address of the name. Where two attributes of a call meet in one place, each call has 400 instructions more: by
chance, after any change of what is imported. So a case with too many is counted again after some new types,
which move the versions, and its smallest figure counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from unisono import _native

TOOLS = Path(__file__).parent
FIGURES = TOOLS / "gate.json"
CASES = {
    "repeated": "all_reduce of 4 bytes, repeated",
    "new": "all_reduce of a new size",
    "torch": "PyTorch's all_reduce of 4 bytes, repeated",
    "bucket": "DDP's bucket: all_reduce and its future",
}
WITH_TORCH = ("torch", "bucket")
ALLOWED = 1.05
TIMEOUT_S = 180
NEW_TYPES = (0, 1, 7)  # each try of a case
KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
SET = {
    "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "UNISONO_CALIBRATION": "none", "UNISONO_PLACEMENT": "0",
}  # fmt: skip


def version(package: str) -> str:
    """Return the version of an installed package, or nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def software(case: str) -> str:
    """Return what a figure holds for."""
    engine = Path(_native.__file__).read_bytes()
    compilers = re.findall(rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+", engine)
    about = Path("/proc/cpuinfo").read_text()
    processor = [re.search(rf"{word}\s*: (\S+)", about) for word in ("vendor_id", "cpu family", "model")]
    names = [f"CPython {platform.python_version()}", f"NumPy {version('numpy')}"]
    names += [f"PyTorch {version('torch')}"] if case in WITH_TORCH else []
    names += [name.decode() for name in sorted(set(compilers))]
    names += [" ".join(platform.libc_ver()), " ".join(found[1] for found in processor if found)]
    return ", ".join(names)


def counter(folder: str) -> Path | str:
    """Return the program that counts, or why there is none."""
    if platform.machine() != "x86_64":
        return f"nothing is counted on {platform.machine()}"
    program = Path(folder) / "count"
    try:
        subprocess.run(["cc", "-O2", "-o", str(program), str(TOOLS / "count_instructions.c")], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"there is no C compiler ({error})"
    if subprocess.run([str(program), "true"], check=False).returncode:
        return "this machine forbids ptrace"
    return program


def count(program: Path, case: str, types: int = 0) -> int:
    """Return the instructions of one call: the fewest, as a call that is interrupted or waits has more."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ} | SET
    with tempfile.TemporaryDirectory() as folder:
        command = [str(program), sys.executable, str(TOOLS / "gate_rank.py"), case, folder, "0", str(types)]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True
        )
    return min(map(int, done.stdout.split()))


def count_call(program: Path, case: str, brackets: int, expected: int | None) -> int:
    """Return the instructions of one call, without what counting itself takes."""
    found = []
    for types in NEW_TYPES:
        found.append(count(program, case, types) - brackets)
        if expected is None or found[-1] <= expected * ALLOWED:
            break
    return min(found)


def main() -> None:
    """Count, then compare or update."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--update", action="store_true", help="write what is counted into tools/gate.json")
    update = parser.parse_args().update
    figures = json.loads(FIGURES.read_text())
    too_many = []
    with tempfile.TemporaryDirectory() as folder:
        program = counter(folder)
        if isinstance(program, str):
            print(f"gate: passed; NOTHING COUNTED: {program}")
            return
        brackets = count(program, "empty")
        for case, words in CASES.items():
            if case in WITH_TORCH and not version("torch"):
                print(f"gate: {words}: NOT COUNTED, PyTorch is not installed")
                continue
            key = software(case)
            expected = figures.setdefault(case, {}).get(key)
            found = count_call(program, case, brackets, expected)
            if update:
                figures[case][key] = found
            if expected is None:
                print(f"gate: {words}: {found:,} instructions; NOT COMPARED, no figure for {key}")
                continue
            change = f"{found / expected - 1:+.1%}"
            print(f"gate: {words}: {found:,} instructions, expected {expected:,} ({change})")
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
