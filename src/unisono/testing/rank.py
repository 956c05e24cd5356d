"""A rank: a pytest session that runs the tests it is given. And the process that ranks are forked from.

    python -m unisono.testing.rank DESCRIPTOR

That process, the template, reads pytest's settings and imports the conftest files and PyTorch once. A fork of
it costs milliseconds. It knows no tests and makes no threads.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from unisono.engine.diagnosis.except_hook import uncaught
from unisono.errors import GroupError, Mismatch, UnisonoError
from unisono.testing.channel import Channel
from unisono.testing.groups import Groups, Run
from unisono.testing.plugin import GROUPS

STACKS = signal.SIGRTMAX - 1
"""At this signal a rank writes the stacks of its threads."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

END_S = 5.0  # for the ranks to end their sessions


def template(control: Channel) -> None:
    """Read pytest's settings, then fork ranks and wait for them, until the other end is closed."""
    given = control.receive()
    if given is None:
        return
    sys.path[:0] = [path for path in given["path"] if path not in sys.path]
    gc.disable()
    for name in given["modules"]:
        importlib.import_module(name)
    config = pytest.Config.fromdictargs(given["options"], given["args"])
    gc.freeze()  # a collection in a rank would copy every page
    gc.enable()
    control.send({"ready": os.getpid()})
    pids: set[int] = set()
    while (request := control.receive()) is not None:
        if "fork" in request:
            channel, *files = control.descriptors
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside a conftest's threads
                pid = os.fork()
            if pid == 0:
                control.close()
                _live(config, Channel(socket.socket(fileno=channel)), files, request)
            for descriptor in control.descriptors:
                os.close(descriptor)
            pids.add(pid)
            control.send({"pid": pid})
        else:
            pids.discard(request["end"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(request["end"], signal.SIGKILL)  # one that has ended is not reaped yet
            control.send({"status": os.waitstatus_to_exitcode(os.waitpid(request["end"], 0)[1])})
    deadline = time.monotonic() + END_S
    while pids and time.monotonic() < deadline:
        pids = {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0.005)
    os.killpg(0, signal.SIGKILL)  # with what tests have started and left


def _live(config: pytest.Config, channel: Channel, files: list[int], given: dict[str, Any]) -> None:
    """The life of a rank, from the fork to its end."""
    code = 1
    try:
        out, err, stacks = files
        for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, err)):
            os.dup2(source, descriptor)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]  (a rank may be killed)
        faulthandler.register(STACKS, file=stacks, all_threads=True)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # ranks are no copies of each other
        config.option.basetemp = given["basetemp"]
        config.pluginmanager.register(_Rank(config, channel), "unisono_rank")
        status = config.hook.pytest_cmdline_main(config=config)
        threading._shutdown()  # type: ignore[attr-defined]  (pools end their workers)
        atexit._run_exitfuncs()
        code = 0 if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.TESTS_FAILED) else 1
    except BaseException:  # noqa: BLE001  (the process ends here)
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


class _Told(pytest.fail.Exception):
    """An error of ours outside of a test's own code."""

    def __init__(self, what: str, error: UnisonoError) -> None:
        super().__init__(f"{what}\n{type(error).__name__}: {error}", pytrace=False)
        self.report = getattr(error, "report", None)


class _Rank:
    """A plugin of pytest: its loop runs the tests that the other end asks for, and sends their reports."""

    def __init__(self, config: pytest.Config, channel: Channel) -> None:
        self._config = config
        self._channel = channel
        self._groups = config.stash[GROUPS] = Groups()
        self._generation = 0
        self._items: dict[str, pytest.Item] = {}
        self._request: dict[str, Any] = {}
        self._reports: list[Any] = []
        self._warnings: list[dict[str, Any]] = []
        self._missing = ""
        self._failed = False
        self._broken = False

    def pytest_collection(self) -> bool:
        """Collect nothing yet."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run tests until the other end is closed."""
        while (request := self._channel.receive()) is not None and "nodeid" in request:
            self._channel.send(self._answer(session, request))
        self._end(session, tell=request is not None)
        return True

    @pytest.fixture
    def tmp_path(self) -> Path:
        """A folder that all ranks of the test share."""
        folder = Path(self._request["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Say whether an error follows from another rank's, and let no other rank wait for this one."""
        if call.excinfo is not None and isinstance(call.excinfo.value, UnisonoError):
            _hide_own_frames(call.excinfo, self._config)
        report = yield
        if call.excinfo is not None:
            self._explain(report, call.excinfo.value)
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep a report for the answer."""
        self._reports.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the errors of a file that cannot be collected here."""
        if report.failed:
            self._missing = report.longreprtext

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Keep a warning for the answer."""
        kind = warning_message.category
        self._warnings.append(
            {
                "when": when,
                "module": kind.__module__,
                "category": kind.__qualname__,
                "message": str(warning_message.message),
                "filename": warning_message.filename,
                "lineno": warning_message.lineno,
            }
        )

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        """With --pdb: ask for the terminal, and debug this rank on it."""
        error = call.excinfo.value if call.excinfo is not None else None
        if error is None or not self._request.get("debug") or self._consequence(error):
            return
        self._channel.send({"debug": f"{type(error).__name__}: {error}".partition("\n")[0]})
        if self._channel.receive() is None:
            return
        from pdb import Pdb

        source, sink = self._channel.descriptors
        with open(source) as stdin, open(sink, "w") as stdout:
            debugger = Pdb(stdin=stdin, stdout=stdout)
            debugger.reset()
            debugger.interaction(None, error.__traceback__)
        self._channel.send({"debugged": True})

    def _answer(self, session: pytest.Session, request: dict[str, Any]) -> dict[str, Any]:
        self._request, self._reports, self._warnings = request, [], []
        self._missing, self._failed, self._broken, left = "", False, False, ""
        try:
            self._run(session, request)
        except (pytest.exit.Exception, KeyboardInterrupt) as stop:
            left = f"{type(stop).__name__}: {stop}"
        serialize = self._config.hook.pytest_report_to_serializable
        return {
            "reports": [serialize(config=self._config, report=report) for report in self._reports],
            "warnings": self._warnings,
            "missing": self._missing,
            "exit": left,
            "spoiled": self._broken or self._groups.spoiled,
        }

    def _run(self, session: pytest.Session, request: dict[str, Any]) -> None:
        if request["generation"] != self._generation:
            self._groups.drop()
            self._generation = request["generation"]
        item = self._items.get(request["nodeid"]) or self._collected(session, request)
        if item is None:
            return
        names = getattr(item, "fixturenames", ())
        self._groups.begin(Run(*request["run"]), process_group="process_group" in names)
        if not self._step(item, "setup", lambda: session._setupstate.teardown_exact(item)):
            return
        if "group" in names and not self._step(item, "setup", self._groups.prepare):
            return
        keep = request["keep"]
        item.config.hook.pytest_runtest_protocol(
            item=item, nextitem=item.listchain()[keep - 1] if keep else None
        )
        if not self._failed:
            self._step(item, "teardown", self._settle)

    def _settle(self) -> None:
        try:
            left = self._groups.settle()
        except Mismatch as error:
            self._broken = True
            if error.report is None or not error.report.failed:  # otherwise the test expected it
                raise _Told("by the end of this test its ranks have not made the same calls", error) from None
        except GroupError:
            self._broken = True
        else:
            if left:
                pytest.fail(left, pytrace=False)

    def _step(self, item: pytest.Item, when: Any, step: Any) -> bool:
        """Do a step beside the test; its error counts as one of the test."""

        def told() -> None:
            try:
                step()
            except UnisonoError as error:
                raise _Told("its group cannot be made", error) from None

        call = pytest.CallInfo.from_call(told, when)
        if call.excinfo is None:
            return True
        report = item.config.hook.pytest_runtest_makereport(item=item, call=call)
        self._reports.append(report)
        return False

    def _collected(self, session: pytest.Session, request: dict[str, Any]) -> pytest.Item | None:
        for item in session.perform_collect([request["path"]]):
            self._items[item.nodeid] = item
        found = self._items.get(request["nodeid"])
        if found is None and not self._missing:
            self._missing = "the rank has not found this test: its name must be the same in every process"
        return found

    def _explain(self, report: Any, error: BaseException) -> None:
        if report.outcome == "passed" and not hasattr(report, "wasxfail"):
            return
        fault = getattr(error, "report", None)
        report.consequence = self._consequence(error)
        report.fault = f"{fault.kind} {fault.group} {fault.sequence}" if fault is not None else ""
        self._failed = True
        self._groups.abandon(error, unused=not (report.skipped and report.when == "setup"))

    def _consequence(self, error: BaseException) -> bool:
        return uncaught(error, self._groups.rank, printed=True).lost

    def _end(self, session: pytest.Session, *, tell: bool) -> None:
        """Tear the fixtures of the session down."""
        error = ""
        try:
            session._setupstate.teardown_exact(None)
        except Exception:  # noqa: BLE001  (told)
            error = traceback.format_exc()
        self._groups.drop()
        if tell:
            self._channel.send({"error": error})


def _hide_own_frames(excinfo: Any, config: pytest.Config) -> None:
    """Leave the frames of the tests, as the launcher does; `--full-trace` shows all."""
    outside = [entry for entry in excinfo.traceback if not str(entry.path).startswith(_PACKAGE)]
    if outside and not config.option.fulltrace:
        excinfo.traceback = type(excinfo.traceback)(outside)


def main() -> None:
    """Run the template on the descriptor that is the first argument."""
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        template(control)
    except BaseException:  # noqa: BLE001  (the other end tells it)
        control.send({"error": traceback.format_exc()})
        raise


if __name__ == "__main__":
    main()
