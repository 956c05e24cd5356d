"""Run mpi4py's own test suite against `unisono.mpi`, and print a table: `make test-mpi4py`.

The suite is fetched from the package index, and is not kept in the repository. A test passes when it passes
on every rank. Each file is a job of its own; one that hangs is ended, and tests that did not end are "hung".

    python tools/test_mpi4py.py --ranks 2 4 test_cco test_comm                      # some files
    python tools/test_mpi4py.py --mpiexec PREFIX/bin/mpiexec --python PREFIX/bin/python   # mpi4py itself
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import unittest
from collections import Counter
from pathlib import Path

VERSION = "4.1.2"
ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "mpi4py"
OUTCOMES = ("passed", "skipped", "failed", "hung")


def fetch() -> Path:
    """The folder of the suite."""
    folder = CACHE / f"mpi4py-{VERSION}" / "test"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        wanted = ["--no-binary", ":all:", "--no-deps", "--dest", str(CACHE), f"mpi4py=={VERSION}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
        with tarfile.open(CACHE / f"mpi4py-{VERSION}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
    return folder


class Recorder(unittest.TestResult):
    """Writes the outcome of each test at once: a rank may not live to the end."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed by the end of the rank

    def _write(self, outcome: str, test: unittest.TestCase, why: str = "") -> None:
        self._file.write(json.dumps([outcome, test.id(), why]) + "\n")
        self._file.flush()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._write("hung", test)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write("passed", test)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write("skipped", test, reason)

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        self._write("failed", test, self._exc_info_to_string(err, test))

    addError = addFailure

    def addExpectedFailure(self, test: unittest.TestCase, err: object) -> None:
        self._write("passed", test)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: object) -> None:
        if err is not None:
            self._write("failed", test, self._exc_info_to_string(err, test))


def worker(folder: str, results: str, limit_s: float, module: str) -> None:
    """One rank: run a file of the suite."""
    import faulthandler

    faulthandler.dump_traceback_later(limit_s, exit=True)
    sys.path.insert(0, folder)
    for absent in ("cupy", "numba"):
        sys.modules[absent] = None  # type: ignore[assignment]
    from mpi4py import MPI

    recorder = Recorder(f"{results}.{MPI.COMM_WORLD.Get_rank()}")
    unittest.defaultTestLoader.loadTestsFromName(module).run(recorder)


def outcomes(results: Path, ranks: int) -> dict[str, tuple[str, str]]:
    """The worst outcome of each test over all ranks, and why."""
    found: dict[str, tuple[str, str]] = {}
    for rank in range(ranks):
        path = results.with_name(f"{results.name}.{rank}")
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        here: dict[str, tuple[str, str]] = {}
        for line in lines:
            outcome, test, why = json.loads(line)
            if here.get(test, ("hung", ""))[0] != "failed":
                here[test] = (outcome, why)
        for test, one in here.items():
            found[test] = max(found.get(test, one), one, key=lambda each: _rank_of(each[0]))
    return found


def _rank_of(outcome: str) -> int:
    return ("skipped", "passed", "hung", "failed").index(outcome)


def run_file(
    options: argparse.Namespace, folder: Path, module: str, ranks: int
) -> dict[str, tuple[str, str]]:
    """Run one file on some ranks."""
    work = CACHE / "results"
    work.mkdir(parents=True, exist_ok=True)
    results = work / f"{module}-{ranks}"
    for old in work.glob(f"{results.name}.*"):
        old.unlink()
    rank = [str(Path(__file__)), "--worker", str(folder), str(results), str(options.limit_s), module]
    if options.mpiexec:
        command = [options.mpiexec, "-n", str(ranks), options.python, *rank]
    else:
        command = [sys.executable, "-m", "unisono", "run", "--replace", "mpi4py", "-n", str(ranks), *rank]
    with (work / f"{results.name}.log").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(command, cwd=work, stdout=log, stderr=log, env=environment)
        try:
            job.wait(options.limit_s + 60)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
    found = outcomes(results, ranks)
    if not found and job.returncode:  # such as an error at its import
        found = {module: ("failed", (work / f"{results.name}.log").read_text(errors="replace"))}
    return found


def main() -> int:
    """Run the suite; returns 1 if a test does not pass."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", help="parts of names of files; none: all")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--limit-s", type=float, default=600, help="seconds that a file may take")
    parser.add_argument("--mpiexec", default="", help="run mpi4py itself with this launcher")
    parser.add_argument("--python", default=sys.executable, help="the Python that has mpi4py")
    options = parser.parse_args()
    folder = fetch()
    modules = [path.stem for path in sorted(folder.glob("test_*.py"))]
    if options.files:
        modules = [module for module in modules if any(part in module for part in options.files)]
    left = 0
    for ranks in options.ranks:
        total: Counter[str] = Counter()
        reasons: list[str] = []
        print(f"{ranks} ranks".ljust(26), *(one.rjust(8) for one in OUTCOMES))
        for module in modules:
            found = run_file(options, folder, module, ranks)
            counts = Counter(outcome for outcome, _ in found.values())
            total += counts
            print(module.ljust(26), *(str(counts[one]).rjust(8) for one in OUTCOMES), flush=True)
            for test, (outcome, why) in found.items():
                if outcome in ("failed", "hung"):
                    reasons.append(f"  {test}: {why.strip().splitlines()[-1] if why.strip() else outcome}")
        print("all".ljust(26), *(str(total[one]).rjust(8) for one in OUTCOMES))
        print(*reasons, sep="\n")
        left += len(reasons)
    return 1 if left else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])
    else:
        sys.exit(main())
