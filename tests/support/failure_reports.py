"""Reports a failure and its reason at once; shows a traceback that many tests share only once.

Without this the reason of the first failure comes after the last test, and one fault below hundreds of tests
fills thousands of lines.
"""

import pytest

AT_ONCE = 10  # different failures; the others appear in pytest's own list


class FailureReports:
    """A pytest plugin for the process that prints reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._first: dict[str, str] = {}  # traceback -> the test that had it first

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Handle every report before pytest does."""
        if not report.failed:
            return
        text = str(report.longrepr)
        first = self._first.setdefault(text, report.nodeid)
        if first != report.nodeid:
            report.longrepr = f"as {first}: {reason(report, text)}"
        elif len(self._first) <= AT_ONCE:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid}: {reason(report, text)}", red=True)


def reason(report: pytest.TestReport, text: str) -> str:
    """One line: the exception's message. Of `pytest.fail(traceback)` the traceback's last line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else text).strip().splitlines() or ["no reason"]
    return lines[-1] if lines[0].startswith("Failed: ") or not crash else lines[0]


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin; workers of pytest-xdist pass their reports on and print nothing."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailureReports(config))
