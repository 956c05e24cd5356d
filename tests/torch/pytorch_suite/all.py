"""What `make test-torch` runs: PyTorch's suite in every way, Unisono's tests of the adapter, the table.

Writes tests/torch/recording/results.json and docs/reference/pytorch-table.md. Fails if a test fails without a
reason in notes.py, or passes over Gloo and fails here.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from pytorch_suite import notes  # noqa: E402
from recording import table, torch_features  # noqa: E402

WAYS = ("unisono", "gloo", "mpi", "real-gloo")
LARGER = 4  # the ranks some tests ask for; those that ask for 8 run on 3 as mpi
WITH_LARGER = ("gloo", "real-gloo")

Suite = dict[str, dict[str, str]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "test-torch", help="logs and notes")
    parser.add_argument("--keep", action="store_true", help="use what is in the folder already")
    parser.add_argument(
        "--own", action="store_true", help="run Unisono's tests only; of PyTorch's suite keep results.json"
    )
    parser.add_argument(
        "--suite",
        action="store_true",
        help="run PyTorch's tests only, and write no page; fail if one fails here that passes over Gloo",
    )
    arguments = parser.parse_args()
    folder = arguments.folder / torch.__version__ if arguments.suite else arguments.folder
    calls = folder / "calls"
    calls.mkdir(parents=True, exist_ok=True)
    if not arguments.keep:
        for old in [*calls.glob("*.txt"), *folder.glob("*.json")]:
            old.unlink()
    if arguments.suite:
        return compare_with_gloo(run_suite(folder))
    started = time.monotonic()
    before = json.loads(table.RESULTS.read_text()) if arguments.own else {"suite": {}, "rows": []}
    suite: Suite = before["suite"] or run_suite(folder)
    outcomes = run_own(folder)
    outcomes |= {
        f"{table.SUITE_TEST}{run} {test}": end for test, ways in suite.items() for run, end in ways.items()
    }
    rows = table.rows(torch_features.features(), table.seen_by(calls), outcomes)
    rows = table.with_the_suite_of(before["rows"], rows)
    results = {"torch": torch.__version__.partition("+")[0], "suite": suite, "rows": rows}
    table.write(results, notes.NOTES, notes.REASONS)
    print(f"\n{report(suite, outcomes)}")
    print(f"{time.monotonic() - started:.0f} s; {table.PAGE.relative_to(ROOT)} is new")
    return int(bool(unexplained(suite) or "failed" in run_own_ends(outcomes)))


def run_suite(folder: Path) -> Suite:
    """Run PyTorch's suite in every way; per test, its outcome in each, a skip with its reason.

    As mpi, only what has not passed until then: the groups are made under Unisono's name there.
    """
    suite: Suite = {}
    for way in WAYS:
        left = [test for test, ways in suite.items() if "passed" not in ways.values()] if way == "mpi" else []
        run_one(folder, way, 3, left, suite)
        if way in WITH_LARGER:
            small = [test for test, ways in suite.items() if "world size of 4" in ways.get(f"{way} x3", "")]
            run_one(folder, way, LARGER, small, suite)
    return suite


def compare_with_gloo(suite: Suite) -> int:
    """Print what passes; return 1 if a test passes over Gloo and not here, in any way, without a reason."""
    here, gloo = table.passes(suite, on_gloo=False), table.passes(suite, on_gloo=True)
    worse = sorted(gloo - here - {*notes.REASONS, *notes.OLDER})
    print("\n".join(f"passes over Gloo only: {test}" for test in worse))
    explained = len(gloo - here) - len(worse)
    only = f"{len(worse)} over Gloo only" + (f" ({explained} more with a reason)" if explained else "")
    print(f"summary: {len(here)} passed, {len(here - gloo)} over Unisono only, {only}")
    return int(bool(worse))


def run_one(folder: Path, way: str, size: int, names: list[str], suite: Suite) -> None:
    """Run some or all of PyTorch's tests in one way, and enter the outcomes."""
    out = folder / f"{way}-{size}.json"
    if not out.exists():
        print(f"==> PyTorch's suite as {way}, {size} ranks", flush=True)
        command = [str(HERE / "run_pytorch_suite.py"), way, "--world-size", str(size), "--out", str(out)]
        subprocess.run(
            [sys.executable, *command, "--log", str(out.with_suffix(".log")), *names],
            env=recorded(folder),
            check=False,
        )
    for test, outcome in json.loads(out.read_text()).items():
        why = f": {outcome['reason']}" if outcome["outcome"] == "skipped" else ""
        suite.setdefault(test, {})[f"{way} x{size}"] = outcome["outcome"] + why


def run_own(folder: Path) -> dict[str, str]:
    """Run Unisono's own tests of the adapter."""
    junit = folder / "own.xml"
    if not (folder / "own.json").exists():
        print("==> Unisono's tests of the adapter", flush=True)
        command = ["-m", "pytest", "-q", "tests/torch", "--timeout=300"]
        command += [f"--junitxml={junit}", "-o", "junit_family=xunit1"]  # xunit2 has no properties of a test
        command += ["--ignore=tests/torch/test_pytorch_suite.py"]  # part of what has just been run
        command += [
            "--ignore=tests/torch/test_torch_ends.py"
        ]  # in its long form an hour, with no function of its own
        environ = {**recorded(folder), "UNISONO_TEST_LONG": "1"}  # on two and on three ranks
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environ, check=False)
        (folder / "own.json").write_text(json.dumps(table.outcomes_of_pytest(junit), indent=1))
    outcomes: dict[str, str] = json.loads((folder / "own.json").read_text())
    return outcomes


def recorded(folder: Path) -> dict[str, str]:
    """Return the environment in which every Python process notes what it runs."""
    paths = os.pathsep.join(filter(None, (str(table.HERE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "UNISONO_TESTS_RECORD": str(folder / "calls")}


def run_own_ends(outcomes: dict[str, str]) -> set[str]:
    return {end for test, end in outcomes.items() if not test.startswith(table.SUITE_TEST)}


def unexplained(suite: Suite) -> list[str]:
    """Return what fails without a reason, and what passes on Gloo and nowhere here."""
    failed = [
        f"{test} as {run}"
        for test, ways in suite.items()
        for run, end in ways.items()
        if end == "failed" and run.partition(" ")[0] not in {*notes.REASONS.get(test, ()), table.ON_GLOO}
    ]
    missing = table.passes(suite, on_gloo=True) - table.passes(suite, on_gloo=False)
    return failed + [f"{test}: passes on Gloo only" for test in sorted(missing - set(notes.REASONS))]


def report(suite: Suite, outcomes: dict[str, str]) -> str:
    """Return the summary."""
    here, gloo = table.passes(suite, on_gloo=False), table.passes(suite, on_gloo=True)
    own = [end for test, end in outcomes.items() if not test.startswith(table.SUITE_TEST)]
    lines = [
        f"PyTorch's suite: {len(suite)} tests",
        f"  {len(here & gloo)} pass here and on Gloo",
        f"  {len(here - gloo)} pass only here, {len(gloo - here)} only on Gloo",
        f"  {len(suite) - len(here | gloo)} on neither: they need GPUs, or PyTorch has switched them off",
        f"Unisono's tests of the adapter: {own.count('passed')} pass, {own.count('failed')} fail",
    ]
    for test, ways in notes.REASONS.items():
        lines += [f"  {test} as {way} fails: {why}" for way, why in ways.items()]
    return "\n".join(lines + [f"UNEXPLAINED: {each}" for each in unexplained(suite)])


if __name__ == "__main__":
    sys.exit(main())
