"""PyTorch's own distributed suite over MPI (`UNISONO_REPLACE=mpi`), in one world for all tests.

    suite_over_mpi.py [--ranks 3] [--out FILE] [mpich openmpi intelmpi]

The tests are those that PyTorch runs for MPI, as it does: mpiexec starts the ranks, which run one test after
another. Where a test ends the job, or takes too long, the next job begins behind it. Prints what passed, what
PyTorch itself skips, and each failure; ends with 1 if one has no reason in REASONS.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from lane import MPIS, launcher

LIMIT_S = 60.0
"""For one test."""

REASONS: dict[str, str] = {}
"""Tests that fail, by why MPI, or PyTorch's test, makes them."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="libraries of MPI; default all")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", default="", help="tests whose name contains this")
    args = parser.parse_args()
    wrong = False
    for name in args.names or MPIS:
        ends = run(name, args.ranks, args.only)
        counts = {kind: sum(end.startswith(kind) for end in ends.values()) for kind in ("passed", "skipped")}
        failed = {test: end for test, end in ends.items() if not end.startswith(tuple(counts))}
        passed, skipped = counts.values()
        print(f"{name}: {passed} passed, {skipped} skipped by PyTorch, {len(failed)} failed")
        for test, end in failed.items():
            print(f"  {test}: {REASONS.get(test, 'FAILED: ' + end)}")
        wrong |= not failed.keys() <= REASONS.keys() or not passed
    return int(wrong)


def run(name: str, ranks: int, only: str) -> dict[str, str]:
    """How each test ended, over one library."""
    command, environ = launcher(name, ranks)
    ends: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "ends")
        for room in ("barrier", "test_dir"):
            Path(folder, room).mkdir()
        environ.update(BACKEND="mpi", UNISONO_REPLACE="mpi", INIT_METHOD="env://", TEMP_DIR=folder)
        while True:
            notes.write_text("")
            arguments = [str(Path(__file__).with_name("suite_ranks.py")), str(notes), only, *ends]
            with Path(folder, "log").open("w+") as log:
                job = subprocess.Popen([*command, *arguments], env=environ, stdout=log, stderr=log)
                came = watch(job, notes)
                log.seek(0)
                said = log.read()[-600:]
            before = len(ends)
            for line in came:
                test, _, end = line.partition("\t")
                ends[test] = end or f"ended the job, or took {LIMIT_S:g} s: {said}"
            if job.returncode == 0 or len(ends) == before:
                return ends if ends else {"all": said}


def watch(job: subprocess.Popen[bytes], notes: Path) -> list[str]:
    """Wait for its end; a job without progress is killed. What rank 0 has noted: a line a test."""
    seen = ""
    while True:
        try:
            job.wait(timeout=LIMIT_S)
            return notes.read_text().splitlines()
        except subprocess.TimeoutExpired:
            if notes.read_text() == seen:
                job.kill()
            seen = notes.read_text()


if __name__ == "__main__":
    sys.exit(main())
