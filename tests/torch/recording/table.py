"""Makes docs/reference/pytorch-table.md: `rows` sums up the records of a run, `render` makes the page.

The results in between, results.json, are kept: the page can be checked against them without a run. They tell
Unisono's own tests and PyTorch's suite apart, so that a run of the one leaves what the other found.
"""

import json
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
PAGE = HERE.parents[2] / "docs" / "reference" / "pytorch-table.md"
OURS = "unisono/torch/process_group.py"  # a process that was never here made no group of Unisono's
ON_GLOO = "real-gloo"
SUITE_TEST = "suite "  # begins the names of tests of PyTorch's: "suite gloo x3 test_broadcast"

PARTS = ("own", "suite")  # of a row: what Unisono's tests found, and what PyTorch's

STATES = ("works", "differs", "not yet", "no group", "needs a GPU", "not tested")

HEAD = """# torch.distributed over Unisono

This page lists every function and class of `torch.distributed`, and what PyTorch builds on a process group,
for PyTorch {torch}. `make test-torch` generates it. It records what each test runs, of Unisono's own tests
and of PyTorch's distributed test suite, on CPU tensors. Each row names one test; many have dozens.

- **works**: tests that pass run it.
- **differs**, **not yet**: see the remark.
- **no group**: it uses no process group.
- **needs a GPU**: it cannot run without one.
- **not tested**: no test runs it.
"""

SUITE = """## PyTorch's own distributed test suite

{passed} of its {total} tests pass over Unisono, {gloo} over Gloo on the same machine. Of the tests that pass
over Gloo, {missing} fail over Unisono. The other tests need GPUs, or PyTorch itself skips them.

PyTorch reserves many tests for certain backends, so the suite runs in several ways: as `unisono`; as `gloo`
(`UNISONO_REPLACE=gloo`); and, for tests that did not run in these ways, as `mpi`: the all-to-all on CPUs, and
groups that PyTorch tests on 8 ranks, or on 3 with MPI. Tests that need 4 ranks run on 4.

| run | ranks | passed | failed | skipped |
|---|---|---|---|---|
"""


def outcomes_of_pytest(junit: Path) -> dict[str, str]:
    """Read what pytest says of each test, and of each check in it: "passed", "skipped" or "failed"."""
    found = {}
    for case in ET.parse(junit).getroot().iter("testcase"):
        module = case.get("classname", "").replace(".", "/")
        ends = {child.tag for child in case}
        outcome = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
        found[f"{module}.py::{case.get('name')}"] = outcome
        for check in case.iter("property"):  # see test_checks.py
            found[f"{module}.py::{case.get('name')} {check.get('name')}"] = check.get("value", "")
    return found


def seen_by(folder: Path) -> dict[str, set[str]]:
    """Read what the recorder wrote: per test, what it ran in processes that had a group of Unisono's."""
    seen: dict[str, set[str]] = {}
    for path in folder.glob("calls-*.txt"):
        lines = [line.split("\t") for line in path.read_text().splitlines()]
        if any(place.startswith(OURS) for _, place, *_ in lines):
            for test, place, *detail in lines:
                seen.setdefault(test, set()).add(f"{place} {' '.join(detail)}".strip())
    return seen


def rows(features: Any, seen: dict[str, set[str]], outcomes: dict[str, str]) -> list[dict[str, Any]]:
    """Return for each feature, per part, how many tests that ran it passed and failed, and one of them."""
    tests_of: dict[str, list[str]] = {}
    for test in sorted(seen, key=lambda test: (len(seen[test]), test)):
        for key in seen[test]:
            tests_of.setdefault(key, []).append(test)
    made = []
    for section, name, keys in features:
        tests = list(dict.fromkeys(test for key in sorted(keys) for test in tests_of.get(key, ())))
        parts = {part: _summed(tests, part, outcomes) for part in PARTS}
        made.append({"section": section, "name": name, **parts})
    return made


def _summed(tests: list[str], part: str, outcomes: dict[str, str]) -> dict[str, Any]:
    """Sum up one part of a row."""
    mine = [test for test in tests if test.startswith(SUITE_TEST) == (part == "suite")]
    passed, failed = ([test for test in mine if outcomes.get(test) == end] for end in ("passed", "failed"))
    return {"passed": len(passed), "failed": len(failed), "example": next(iter(passed or failed), "")}


def with_the_suite_of(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `rows` with what PyTorch's suite found `before`, for a run without it."""
    found = {(row["section"], row["name"]): row["suite"] for row in before}
    return [{**row, "suite": found.get((row["section"], row["name"]), row["suite"])} for row in rows]


def count(row: dict[str, Any], end: str) -> int:
    """Return how many tests that ran a row have "passed" or "failed", of both parts."""
    return sum(row[part][end] for part in PARTS)


def example(row: dict[str, Any]) -> str:
    """Return the test to name: one that passes before one that fails, one of Unisono's before PyTorch's."""
    for end in ("passed", "failed"):
        for part in PARTS:
            if row[part][end]:
                return str(row[part]["example"])
    return ""


def state(row: dict[str, Any], notes: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Return one of STATES, and what to know."""
    for name in (f"{row['section']}: {row['name']}", row["name"]):
        if name in notes:
            return notes[name]
    if count(row, "passed"):
        return "works", ""
    return ("not yet", "its tests fail") if count(row, "failed") else ("not tested", "")


def render(
    results: dict[str, Any], notes: dict[str, tuple[str, str]], reasons: dict[str, dict[str, str]]
) -> str:
    """Return the page."""
    states = {id(row): state(row, notes) for row in results["rows"]}
    counts = Counter(found for found, _ in states.values())
    text = HEAD.format(torch=results["torch"])
    text += "\nRows: " + ", ".join(f"{each} {counts[each]}" for each in STATES)
    text += ".\n\n" + _suite(results["suite"], reasons)
    for section in dict.fromkeys(row["section"] for row in results["rows"]):
        text += f"\n## {section}\n\n| | state | a test that runs it | remark |\n|---|---|---|---|\n"
        for row in results["rows"]:
            if row["section"] == section:
                found, remark = states[id(row)]
                text += f"| `{row['name']}` | {found} | {_short(example(row))} | {remark} |\n"
    return text


def _suite(suite: dict[str, dict[str, str]], reasons: dict[str, dict[str, str]]) -> str:
    here = passes(suite, on_gloo=False)
    gloo = passes(suite, on_gloo=True)
    text = SUITE.format(
        passed=len(here), total=len(suite), gloo=len(gloo), missing=len(gloo - here) or "none"
    )
    for run in dict.fromkeys(run for ways in suite.values() for run in ways):
        ends = Counter(ways[run].partition(":")[0] for ways in suite.values() if run in ways)
        way, _, size = run.partition(" x")
        what = "over Gloo" if way == ON_GLOO else f"as `{way}`"
        text += f"| {what} | {size} | {ends['passed']} | {ends['failed']} | {ends['skipped']} |\n"
    listed = [(test, way, why) for test, ways in sorted(reasons.items()) for way, why in ways.items()]
    text += "\nFailed:\n\n" if listed else ""
    return text + "".join(f"- `{test}` as `{way}`: {why}.\n" for test, way, why in listed)


def passes(suite: dict[str, dict[str, str]], *, on_gloo: bool) -> set[str]:
    """Return the tests of PyTorch's suite that pass in some way, over Gloo or over Unisono."""
    return {
        test
        for test, ways in suite.items()
        if any(end == "passed" and run.startswith(ON_GLOO) == on_gloo for run, end in ways.items())
    }


def _short(test: str) -> str:
    if not test:
        return ""
    if test.startswith(SUITE_TEST):
        return f"PyTorch's `{test.rpartition(' ')[2]}`"
    return f"`{test.rpartition('::')[2]}`"


def write(results: dict[str, Any], notes: Any, reasons: Any) -> None:
    """Keep the results, and make the page of them."""
    lines = {key: value for key, value in results.items() if key not in ("suite", "rows")}
    text = json.dumps(lines)[:-1] + ',\n"suite": {\n'
    text += ",\n".join(f"{json.dumps(test)}: {json.dumps(ways)}" for test, ways in results["suite"].items())
    text += '\n},\n"rows": [\n' + ",\n".join(json.dumps(row) for row in results["rows"]) + "\n]}\n"
    RESULTS.write_text(text)
    PAGE.write_text(render(results, notes, reasons))
