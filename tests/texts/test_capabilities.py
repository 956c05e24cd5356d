"""`make test-texts`: each capability of docs/capabilities.md runs as the page says, and prints what it says.

In `make test` only the page is compared with the table.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from capabilities import CAPABILITIES, Capability, page

from effort import HANG_S
from unisono.commands.bench.libraries import MPIS
from unisono.commands.doctor.trial import AS_ROOT

ROOT = Path(__file__).resolve().parents[2]
MPICH = MPIS["mpich"]
RUN = [(number, row) for number, row in enumerate(CAPABILITIES, 1) if row.program]


def command(row: Capability) -> list[str]:
    """What the page shows, with this Python."""
    words = row.command()
    if words[0] == "mpiexec":
        return [str(MPICH.home / "bin" / "mpiexec"), *MPICH.flags, *words[1:3], sys.executable, *words[3:]]
    return [sys.executable, *(["-m", "unisono"] if words[0] == "unisono" else []), *words[1:]]


def ran(row: Capability) -> subprocess.CompletedProcess[str]:
    libraries = MPICH.environ() if row.launcher == "mpiexec" else {}
    environ = {**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1", **row.environ, **libraries}
    return subprocess.run(
        command(row), env=environ, cwd=ROOT, timeout=HANG_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip


def why_not(row: Capability) -> str:
    if row.needs and importlib.util.find_spec(row.needs) is None:
        return f"needs {row.needs}"
    return (
        "needs MPICH (make test-texts installs it)" if row.launcher == "mpiexec" and MPICH.missing() else ""
    )


@pytest.mark.texts
@pytest.mark.torch
@pytest.mark.parametrize(
    "row", [row for _, row in RUN], ids=[f"{number}-{row.program}" for number, row in RUN]
)
def test_it_prints_what_the_page_says(row: Capability) -> None:
    if reason := why_not(row):
        pytest.skip(reason)
    done = ran(row)
    printed = " ".join(done.stdout.replace("[rank 0] ", "").split())
    shown = f"{shlex.join(command(row))} ended with {done.returncode}:\n{done.stdout[-4000:]}"
    if row.refused:
        assert done.returncode != 0, f"it works now: remove refused= of {row.what!r}\n{shown}"
        assert row.refused in printed, shown
        pytest.xfail(f"refused today: {row.refused}")
    assert done.returncode == 0, shown
    for line in row.prints:
        assert " ".join(line.split()) in printed, f"{line!r} is not in what {shown}"


def test_the_page_is_that_of_the_table() -> None:
    written = (ROOT / "docs" / "capabilities.md").read_text()
    assert written == page(), "python tests/texts/capabilities.py > docs/capabilities.md"


def test_each_row_has_a_program_or_a_reason() -> None:
    for row in CAPABILITIES:
        assert row.by_design or (row.program and row.write), row.what
        assert not (row.by_design and row.refused), row.what
        assert "|" not in row.what + row.write + row.by_design + "".join(row.prints), row.what
