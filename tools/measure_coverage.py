"""Measure which lines of Python and C++ the engine's tests run; write the table into docs/coverage.md.

    make coverage                          all of the engine's tests, a quarter of an hour on two cores
    make coverage ARGS=tests/unit          these only; no page is written and no floor is checked
    make coverage ARGS=--report            the table of what was measured last

It has an environment and a build of its own, `.venv-coverage` and `build-coverage`. A killed process does not
report: lines that only killed ranks run count as not run. PyTorch is not installed; packages that need it
have no floor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv-coverage" / "bin"
BUILD = ROOT / "build-coverage"
PAGE = ROOT / "docs" / "coverage.md"
TESTS = ["tests/unit", "tests/conformance", "tests/plans", "tests/multiproc"]

# The engine's packages, and the percentage of lines that the tests have to run: two points below a whole run.
FLOORS = {
    "csrc/kernels": 92, "csrc/protocol": 90, "csrc/transport": 92, "csrc/p2p": 90, "csrc/engine": 94,
    "csrc/calibrate": 97, "csrc/python": 81, "plans": 97, "engine/base": 85, "engine/memory": 78,
    "engine/operations": 92, "engine/environment": 94, "engine/store": 94, "engine/encoding": 95,
    "engine/costs": 95, "engine/bootstrap": 93, "engine/diagnosis": 93, "engine/group": 79,
}  # fmt: skip


def run(*words: str) -> int:
    """Run a program of the environment."""
    return subprocess.run([str(BIN / words[0]), *words[1:]], cwd=ROOT, check=False).returncode


def build() -> None:
    """Build the engine with counters, where that has not been done."""
    if not BIN.exists():
        subprocess.run([sys.executable, "-m", "venv", str(BIN.parent)], check=True)
    pip = ["python", "-m", "pip", "install", "-q"]
    tools = "scikit-build-core nanobind typing_extensions cmake ninja coverage>=7.10 gcovr>=8"
    engine = "-C build-dir=build-coverage -C install.strip=false -C cmake.define.UNISONO_COVERAGE=ON"
    if run(*pip, *tools.split()) or run(*pip, "--no-build-isolation", "-e", ".[test]", *engine.split()):
        sys.exit("coverage: the build failed")


def measure(tests: list[str]) -> int:
    """Run the tests; what an earlier run counted is removed."""
    for old in [*BUILD.rglob("*.gcda"), *BUILD.glob("python*")]:
        old.unlink()
    slow = ["-o", "timeout=600", "-o", "faulthandler_timeout=500"]
    return run(
        "python", "-m", "coverage", "run", "-m", "pytest", "-n", "2", "--dist", "loadfile", *slow, *tests
    )


def lines_by_package() -> dict[str, tuple[int, int]]:
    """Return for each package its lines of code, and how many of them ran."""
    run("python", "-m", "coverage", "combine", "-q", "--append")
    run("python", "-m", "coverage", "json", "-q", "-i", "-o", str(BUILD / "python.json"))
    ignored = [
        "--gcov-ignore-errors=all",
        "--gcov-ignore-parse-errors=all",
        "--merge-mode-functions=separate",
    ]
    run("gcovr", *ignored, "--filter", "csrc/", "--json-summary", str(BUILD / "cpp.json"), str(BUILD))
    lines: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for name, file in json.loads((BUILD / "python.json").read_text())["files"].items():
        package = str(Path(name).parent.relative_to("src/unisono"))
        lines[package] += file["summary"]["num_statements"]
        ran[package] += file["summary"]["covered_lines"]
    for file in json.loads((BUILD / "cpp.json").read_text())["files"]:
        package = str(Path(file["filename"]).parent)
        lines[package] += file["line_total"]
        ran[package] += file["line_covered"]
    return {package: (lines[package], ran[package]) for package in sorted(lines)}


def table(packages: dict[str, tuple[int, int]]) -> str:
    """Return the floors and what was measured as a table."""
    rows = [
        f"| `{package}` | {packages[package][0]:,} | {share(packages[package]):.1f} | {floor} |"
        for package, floor in FLOORS.items()
    ]
    return "\n".join(["| package | lines of code | run, % | floor, % |", "|---|---|---|---|", *rows])


def share(counted: tuple[int, int]) -> float:
    """Return the percentage of lines that ran."""
    return 100 * counted[1] / max(counted[0], 1)


def main() -> None:
    """Build, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--report", action="store_true", help="the table of what was measured last")
    parser.add_argument("tests", nargs="*", help="tests of pytest in place of the engine's")
    arguments = parser.parse_args()
    failed = 0
    if not arguments.report:
        build()
        failed = measure(arguments.tests or TESTS)
    packages = lines_by_package()
    gone = FLOORS.keys() - packages.keys()
    if gone:
        sys.exit(f"coverage: nothing was measured for {', '.join(sorted(gone))}, which have a floor")
    text = table(packages)
    print(text)
    if arguments.tests:
        sys.exit(failed)
    head, _, _ = PAGE.read_text().partition("| package |")
    PAGE.write_text(head + text + "\n")
    low = [package for package, floor in FLOORS.items() if share(packages[package]) < floor]
    if failed or low:
        sys.exit(f"coverage: FAILED; below the floor: {', '.join(low) or 'none'}; pytest ended with {failed}")


if __name__ == "__main__":
    main()
