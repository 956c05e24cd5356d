"""Tests that start real launchers (`make test-launchers`). At the end: which, and what was left out."""

import os

import pytest

import started

LAUNCHERS = ("MASTER_", "SLURM_", "PMI_", "OMPI_", "PMIX_", "RANK", "WORLD_SIZE", "LOCAL_", "JOB_COMPLETION_")


def pytest_configure(config: pytest.Config) -> None:
    """Make room for the list."""
    config.stash[started.VERSIONS] = {}


@pytest.fixture(autouse=True)
def no_place_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the environment tells ranks where to meet, or that another launcher started them."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List what was started, and what could not be."""
    if versions := config.stash[started.VERSIONS]:
        terminalreporter.section("launchers that were started")
        for name, version in sorted(versions.items()):
            terminalreporter.write_line(f"{name}: {version}")
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
    if reasons:
        terminalreporter.section("NOT TESTED HERE", sep="!", red=True, bold=True)
        for reason in sorted(set(reasons)):
            text = f"{reasons.count(reason)} tests: {reason.removeprefix('Skipped: ')}"
            terminalreporter.write_line(text, red=True)
