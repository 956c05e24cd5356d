"""docs/reference/pytorch-table.md is made from the committed results of `make test-torch`, all explained."""

import json

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
