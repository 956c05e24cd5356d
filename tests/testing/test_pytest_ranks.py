"""`@pytest.mark.ranks`: pytest runs the suites of this folder, and what it reports is compared."""

import itertools
import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import pages
from effort import HANG_S, judge_time
from launching import wait_until
from loops import each
from unisono.testing.marker import settings

ROOT = Path(__file__).parents[2]
SUITES = Path(__file__).with_name("suites")
QUIET = ["-p", "no:cacheprovider", "-p", "writes_reports", "-c", str(SUITES / "pytest.ini"), "--noconftest"]


class Ran(NamedTuple):
    """A run of pytest: its text, and of each test its phases, (when, outcome, reason, output, its time)."""

    code: int
    text: str
    reports: dict[str, list[list[Any]]]

    def outcome(self, test: str) -> str:
        """The worst of the phases of a test."""
        found = [outcome for _, outcome, *_ in self.reports[test]]
        return next((one for one in ("failed", "skipped") if one in found), "passed")

    def said(self, test: str) -> str:
        """Reasons and output of a test."""
        return "\n".join(f"{reason}\n{output}" for _, _, reason, output, _ in self.reports[test]).strip()


def command(suite: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *QUIET, str(SUITES / f"{suite}.py"), *words]


def environ(folder: Path) -> dict[str, str]:
    names = {"REPORTS": str(folder / "reports"), "LOG": str(folder / "log"), "COLUMNS": "120"}
    names["PYTHONPATH"] = os.pathsep.join([str(SUITES), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **names, "PYTEST_ADDOPTS": f"--basetemp={folder}/tests"}


def ran(folder: Path, suite: str, *words: str) -> Ran:
    done = subprocess.run(
        command(suite, *words), env=environ(folder), capture_output=True, text=True, timeout=HANG_S
    )
    reports: dict[str, list[list[Any]]] = {}
    written = folder / "reports"
    for line in written.read_text().splitlines() if written.exists() else ():
        test, *phase = json.loads(line)
        reports.setdefault(test, []).append(phase)
    return Ran(done.returncode, done.stdout + done.stderr, reports)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return ran(tmp_path_factory.mktemp("outcomes"), "outcomes")


# The outcome of each test, and what its report says, in this order.
EXPECTED = {
    "test_sum": "passed",
    "test_lists[1-ranks-1]": "passed",
    "test_lists[3-ranks-5]": "passed",
    "test_hosts": "passed",
    "test_assertion": r"failed ^=== rank 1 of 2 .*rank 1 is wrong.*assert 1 == 0.*=== rank 0 of 2 .* then "
    r"failed, too: .*Aborted: barrier failed: rank 1 aborted .* AssertionError.*rank 1 prints this",
    "test_mismatch": r"failed ^=== rank 0 of 3 .*Mismatch.*likewise rank 1 of 3.*, rank 2 of 3.*"
    r"rank 0  #1 all_reduce\(float64\[4\].* at .*outcomes.py:\d+.*rank 2  #1 barrier",
    "test_expected_mismatch": "passed",
    "test_one_call_more": r"failed ^=== rank 0 .*Mismatch: ranks called.*likewise rank 1.*broadcast\(",
    "test_message_left": "failed rank 0 has not received a message of rank 1: tag 7, 32 bytes",
    "test_exit": r"failed ^=== rank 1 of 3 .*ended with exit code 3.*=== rank 0 .*=== rank 2 .*last words",
    "test_killed": r"failed ^=== rank 2 of 3 .*was killed by SIGKILL.*PeerLost",
    "test_hang": r"failed ^=== rank 1 of 2 .*after 2 s, the limit.*outcomes.py\", line \d+ in test_hang.*"
    r"=== rank 0 .*Timeout: barrier timed out.*rank 1 never arrived.*outcomes.py:\d+ in test_hang",
    "test_stopped": "failed ^=== rank 1 of 2 .*after 2 s.*it is stopped",
    "test_limit_of_pytest_timeout": "failed after 2 s, the limit.* in test_limit_of_pytest_timeout",
    "test_works_again": "passed",
    "test_skip_of_one": r"skipped not here \(rank 1 of 2\)",
    "test_skipif": "skipped nowhere",
    "test_xfail_of_one": "skipped the known one",
    "test_xpass": r"failed XPASS\(strict\)\] mended",
    "test_much_output": r"failed ^=== rank 0 of 2 .*of rank 0.*\d{7} bytes before are left out.*the end of 0",
    "test_subtests": "failed contains 1 failed subtest",
    "test_fixture_of_one_fails": "failed ^=== rank 1 of 2 .*no such thing",
    "test_fixture_of_one_skips": "skipped not on rank 1",
    "test_warning": "passed",
    "test_every_rank_differs": "failed ^=== rank 0 .* 0 == 9.*=== rank 1 .* 1 == 9.*=== rank 2 .* 2 == 9",
    "test_closes_the_group": "passed",
    "test_group_is_new": "passed",
    "test_without_marker": r"failed the fixture 'group' needs @pytest.mark.ranks\(n\)",
}  # fmt: skip


@each("test", EXPECTED)
def test_report(test: str, outcomes: Ran) -> None:
    outcome, _, words = EXPECTED[test].partition(" ")
    said = outcomes.said(test)
    assert outcomes.outcome(test) == outcome, said
    bad = [one for _, one, *_ in outcomes.reports[test] if one != "passed"]
    assert len(bad) <= 1 + ("subtests" in test), said  # a test fails once
    assert re.search(words, said, re.DOTALL), said
    assert "native_planning" not in said  # a frame of ours


def test_a_process_that_a_test_forks_reports_nothing(tmp_path: Path) -> None:
    # It was a second rank, which answered for the tests that followed.
    found = ran(tmp_path, "forks_and_leaves")
    failed = sorted(test for test in found.reports if found.outcome(test) == "failed")
    assert failed == ["test_after[True0]", "test_after[True1]"], found.text
    assert len(found.reports) == 7
    assert "in the child" in found.said("test_forks[raises]")


def test_session_report(outcomes: Ran) -> None:
    """Warnings of ranks come once; no process is left, not even one that a killed rank has started."""
    assert outcomes.text.count("UserWarning: mind the gap") == 1
    assert "FAILED" in outcomes.text
    assert "rank 1 of 2: AssertionError: rank 1 is wrong" in outcomes.text
    assert not left_of("600")


def left_of(argument: str) -> list[int]:
    """Processes of `sleep ARGUMENT`."""
    found = subprocess.run(["pgrep", "-fx", f"sleep {argument}"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def test_fixtures_live_in_ranks(tmp_path: Path) -> None:
    done = ran(tmp_path, "fixtures")
    assert {done.outcome(test) for test in done.reports} == {"passed"}, done.text
    lines = (tmp_path / "log").read_text().splitlines()
    for what in ("session up", "module up", "module down", "session down"):
        pids = [line for line in lines if line.startswith(what)]
        assert len(pids) == len({*pids}) == 3, lines  # of two ranks, and once in pytest itself
    assert done.code == 0


def test_workers_of_xdist_have_ranks(tmp_path: Path) -> None:
    done = ran(tmp_path, "outcomes", "-n", "2", "-k", "sum or lists or assertion or killed or subtests")
    found = {test: done.outcome(test) for test in done.reports}
    expected = {test: EXPECTED[test].partition(" ")[0] for test in found if test in EXPECTED}
    assert len(found) == 8
    assert found.items() >= expected.items()
    assert re.search(EXPECTED["test_assertion"].partition(" ")[2], done.said("test_assertion"), re.DOTALL)


def test_examples_of_docstrings(tmp_path: Path) -> None:
    done = ran(tmp_path, "examples", "--doctest-modules")
    assert [done.outcome(name) for name in ("examples.mean", "examples.number")] == ["passed", "failed"]
    assert re.search(
        "=== rank 1 of 2 .*Expected:\n    0\nGot:\n    1", done.said("examples.number"), re.DOTALL
    )


def test_file_that_only_ranks_cannot_import(tmp_path: Path) -> None:
    done = ran(tmp_path, "not_in_ranks")
    assert done.outcome("test") == "failed"
    assert "=== rank 0 of 2" in done.said("test")
    assert "ImportError: not in a rank" in done.said("test")


def test_warm_ranks_take_milliseconds(tmp_path: Path) -> None:
    """From the end of a test to the end of the next one, which calls a barrier."""
    done = ran(tmp_path, "warm")
    ends = [phases[-1][-1] for phases in done.reports.values()]
    median_s = statistics.median(b - a for a, b in itertools.pairwise(ends))
    print(f"a test on four ranks takes {median_s * 1e3:.1f} ms")
    judge_time(median_s, 0.02)


@pytest.mark.torch
def test_process_groups_and_what_docs_and_examples_show(tmp_path: Path) -> None:
    """One run for all: each imports PyTorch, and so do its ranks."""
    page = (ROOT / "docs" / "testing.md").read_text()
    shown = [ROOT / "examples" / "test_on_ranks.py"]
    for number, block in enumerate(block for block in pages.blocks(page) if block.language == "py"):
        shown.append(tmp_path / f"test_shown{number}.py")
        shown[-1].write_text(block.text)
    done = ran(tmp_path, "about_torch", *map(str, shown))
    failed = {test for test in done.reports if done.outcome(test) != "passed"}
    why = {"fails[unisono]": "KeyError: 'the cause'", "fails[gloo]": "KeyError"}
    why |= dict.fromkeys(["dies", "dies_in_setup"], "exit code 3")
    assert failed == {f"test_one_rank_{how}" for how in why}, done.text
    assert "18 passed" in done.text, done.text
    for how, words in why.items():
        said = done.said(f"test_one_rank_{how}")
        assert said.startswith("=== rank 0 of 2")
        assert words in said
        assert [one for _, one, *_ in done.reports[f"test_one_rank_{how}"]].count("failed") == 1, said


@each(
    "args, kwargs, words",
    [
        ([], {}, "needs one number"),
        ([[]], {}, "the list of ranks is empty"),
        ([0], {}, "ranks is 0, expected 1..1024"),
        (["2"], {}, "ranks is '2', expected a whole number"),
        ([3], {"hosts": 2}, "3 ranks are no multiple of 2 hosts"),
        ([2], {"backend": "mpich"}, "got 'mpich', expected unisono, gloo, nccl"),
        ([2], {"gpus": 2}, "there is no gpus="),
        ([2], {"timeout": 0}, "timeout is 0"),
    ],
)
def test_wrong_markers(args: list[Any], kwargs: dict[str, Any], words: str, request: Any) -> None:
    request.node.add_marker(pytest.mark.ranks(*args, **kwargs), append=False)
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        settings(request.node)


def test_a_wrong_marker_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARKER", json.dumps([[0], {}]))
    done = ran(tmp_path, "wrong_marker")
    assert done.code == 4
    assert "wrong_marker.py::test: ranks is 0, expected 1..1024" in done.text


def test_debugger_on_the_rank_that_fails(tmp_path: Path) -> None:
    """The rank that has failed debugs on the terminal; the one that only follows does not."""
    terminal, end = pty.openpty()
    with subprocess.Popen(
        command("outcomes", "--pdb", "-k", "test_assertion"),
        env=environ(tmp_path),
        stdin=end, stdout=end, stderr=end,
    ) as process:  # fmt: skip
        os.close(end)
        text = until_says(terminal, "(Pdb) ")
        assert re.search(r"rank 1 \(pid \d+\) failed: AssertionError: rank 1 is wrong", text), text
        os.write(terminal, b"print('rank is', rank * 5)\n")
        assert "rank is 5" in until_says(terminal, "(Pdb) ")
        os.write(terminal, b"c\n")
        assert "1 failed" in until_says(terminal, "\n===", "seconds", " in ")
        assert process.wait(HANG_S) == 1
    os.close(terminal)


def until_says(terminal: int, *any_of: str) -> str:
    """Read a terminal until one of these comes, or its end."""
    text = ""
    while not any(words in text for words in any_of):
        try:
            text += os.read(terminal, 1 << 16).decode()
        except OSError:  # the other end is closed
            break
    return text


@each("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_pytest(sent: int, tmp_path: Path) -> None:
    with subprocess.Popen(
        command("outcomes", "-k", "test_limit_of_pytest_timeout", "-p", "no:timeout"),
        env={**environ(tmp_path), "OUTLIVES": str(sent)},
        stdout=subprocess.DEVNULL,
    ) as process:
        mark = f"OUTLIVES={sent}".encode()
        wait_until(lambda: len(marked(mark)) >= 3)
        time.sleep(0.5)
        process.send_signal(sent)
        process.wait(HANG_S)
        wait_until(lambda: not marked(mark))


def marked(mark: bytes) -> list[int]:
    """Processes with these words in their environment."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found


def test_nothing_is_imported_for_other_tests(tmp_path: Path) -> None:
    ran(tmp_path, "examples")
    imported = (tmp_path / "reports.modules").read_text().split()
    ours = {name for name in imported if name.startswith("unisono")}
    assert ours == {"unisono", "unisono.testing", "unisono.testing.plugin"}
    assert "multiprocessing.connection" not in imported
