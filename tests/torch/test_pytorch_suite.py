"""PyTorch's own distributed test suite, as far as it runs here, with Unisono in the place of Gloo and of MPI.

Only the tests that results.json knows to run without a GPU. `make test-torch` runs all of them, in all ways.
"""

import functools
import importlib
import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from effort import LONG
from python_runs import ran
from pytorch_suite import notes
from recording import table

pytest.importorskip("expecttest", reason="PyTorch's tests need it")

RUN = Path(__file__).resolve().parent / "pytorch_suite" / "run_pytorch_suite.py"
WAYS = ("gloo", "mpi")
KNOWN = json.loads(table.RESULTS.read_text())
# Others of the suite do the same with one thing changed: a profiler, the operator of a reduction, the dtype,
# a group of all ranks, the view of a gradient, a tag, a hook of a hook; or one collective by itself, as
# checks/collectives.py. `make test-long` runs them.
FURTHER = re.compile(
    r"_profiler$|(reduce|coalesced|group)_(product|min|max)$|^test_all_(gather|to_all)_.*complex$|"
    r"^(?!test_barrier_timeout|test_destroy).*_full_group(_sum)?$|_grad_is_view$|_complex$|_async$|_twice$|"
    r"_tags?$|_hook$|_gloo_subgroup$|_coalesced_simple$|"
    r"^test_(broadcast|scatter|gather|all_gather|reduce_sum|all_reduce_sum|isend|irecv|barrier)$"
)


def runs(way: str) -> list[str]:
    """List the tests that run on 3 ranks in this way, and for MPI those that run in no other."""
    others = ("unisono x3", "gloo x3") if way == "mpi" else ()
    return [
        test
        for test, ends in KNOWN["suite"].items()
        if ends.get(f"{way} x3") == "passed"
        and not any(ends.get(other) == "passed" for other in others)
        and (LONG or not FURTHER.search(test))
    ]


@functools.cache
def first_outcomes() -> dict[str, dict[str, dict[str, str]]]:
    """Run all of each way, both at a time: the forks of each wait for each other most of the time."""
    with ThreadPoolExecutor(len(WAYS)) as pool:
        return dict(zip(WAYS, pool.map(lambda way: run(way, runs(way)), WAYS), strict=True))


def outcomes(way: str) -> dict[str, dict[str, str]]:
    ends = first_outcomes()[way]
    for _ in range(2):
        late = [name for name in notes.TIGHT if ends.get(name, {}).get("outcome") == "failed"]
        if late:
            ends |= run(way, late)
    return ends


def run(way: str, names: list[str]) -> dict[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out.json"), Path(folder, "log")
        done = ran(RUN, way, "--out", out, "--log", log, *names)
        if not out.exists():
            pytest.fail(done.stdout + log.read_text(errors="replace"), pytrace=False)
        return json.loads(out.read_text())


@pytest.mark.parametrize("way", WAYS)
def test_pytorch(way: str, subtests: pytest.Subtests):
    ends = outcomes(way)
    for name in runs(way):
        end = ends.get(name, {"outcome": "not run", "reason": ""})
        if end["outcome"] != "passed" and way not in {
            *notes.REASONS.get(name, ()),
            *notes.OLDER.get(name, ()),
        }:
            with subtests.test(name=name):
                pytest.fail(f"{end['outcome']}: {end['reason']}", pytrace=False)


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != KNOWN["torch"], reason=f"the table is about torch {KNOWN['torch']}"
)
@pytest.mark.filterwarnings("ignore")  # PyTorch warns of itself when its modules are imported
def test_the_table_has_all_that_torch_distributed_exports():
    torch_features = importlib.import_module("recording.torch_features")  # takes a second
    listed = {(row["section"], row["name"]) for row in KNOWN["rows"]}
    assert {(feature.section, feature.name) for feature in torch_features.features()} == listed
