"""docs/reference/pytorch-table.md is made from the committed results of `make test-torch`, all explained."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from loops import each
from pytorch_suite import notes
from recording import table

RESULTS = json.loads(table.RESULTS.read_text())


def test_the_page_is_made_of_the_results():
    assert table.PAGE.read_text() == table.render(RESULTS, notes.NOTES, notes.REASONS)


def test_every_failure_has_its_reason():
    failed = {
        (test, run.partition(" ")[0])
        for test, ends in RESULTS["suite"].items()
        for run, end in ends.items()
        if end == "failed" and not run.startswith(table.ON_GLOO)
    }
    assert failed == {(test, way) for test, ways in notes.REASONS.items() for way in ways}


def test_what_passes_on_gloo_passes_here():
    on_gloo = table.passes(RESULTS["suite"], on_gloo=True)
    assert len(on_gloo) >= 90
    assert on_gloo <= table.passes(RESULTS["suite"], on_gloo=False)


@each("name", notes.NOTES)
def test_remarks_are_about_rows(name: str):
    assert name in {row["name"] for row in RESULTS["rows"]} | {
        f"{row['section']}: {row['name']}" for row in RESULTS["rows"]
    }


def part(passed: int = 0, failed: int = 0, example: str = "") -> dict[str, object]:
    return {"passed": passed, "failed": failed, "example": example}


@each(
    "own, suite, expected",
    [
        (part(1), part(0, 1), "works"),
        (part(0, 1), part(1), "works"),
        (part(0, 1), part(), "not yet"),
        (part(), part(0, 1), "not yet"),
        (part(), part(), "not tested"),
    ],
)
def test_states(own: dict[str, object], suite: dict[str, object], expected: str):
    row = {"section": "Functions", "name": "f", "own": own, "suite": suite}
    assert table.state(row, {})[0] == expected
    assert table.state(row, {"f": ("differs", "why")}) == ("differs", "why")


class Seen(NamedTuple):
    """A feature, as `torch_features.Feature`, which needs PyTorch."""

    section: str
    name: str
    keys: frozenset[str]


def test_a_run_without_pytorchs_suite_keeps_all_that_it_found():
    ours, fails, theirs, new = "t.py::ours", "suite gloo x3 test_a", "suite gloo x3 test_b", "t.py::new"
    features = [Seen("S", name, frozenset({name})) for name in "abc"]
    outcomes = {ours: "passed", new: "failed", fails: "failed", theirs: "passed"}
    all_of_it = table.rows(features, {ours: {"a"}, fails: {"a", "b"}, theirs: {"b"}}, outcomes)
    own = table.rows(features, {ours: {"a"}, new: {"a", "c"}}, outcomes)
    a, b, c = table.with_the_suite_of(all_of_it, own)
    assert (a["own"], a["suite"]) == (part(1, 1, ours), part(0, 1, fails))
    assert (b["own"], b["suite"]) == (part(), part(1, 1, theirs))
    assert (c["own"], c["suite"]) == (part(0, 1, new), part())
    assert [table.count(row, "failed") for row in (a, b, c)] == [2, 1, 1]
    assert [table.example(row) for row in (a, b, c)] == [ours, theirs, new]


@pytest.mark.parametrize("end", ["passed", "failed"])
def test_the_rows_know_what_pytorchs_suite_ran(end: str):
    """Every one of its tests makes a group."""
    ended = [
        test
        for test, ways in RESULTS["suite"].items()
        for run, how in ways.items()
        if how == end and not run.startswith(table.ON_GLOO)
    ]
    made = {row["name"]: row["suite"] for row in RESULTS["rows"]}["init_process_group"]
    assert made[end] == len(ended)
    assert made["example"].startswith(table.SUITE_TEST)
