"""A rank: a pytest session that runs the tests it is given. And the process that ranks are forked from.

    python -m unisono.testing.rank DESCRIPTOR

That process, the template, reads pytest's settings and imports the conftest files and PyTorch once. A fork of
it costs milliseconds. It runs no test and starts no thread.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pdb
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from unisono.engine.diagnosis.except_hook import uncaught
from unisono.errors import GroupError, Mismatch, UnisonoError
from unisono.testing import GROUPS, RankRequest
from unisono.testing.groups import Groups

STACKS = signal.SIGRTMAX - 3  # qemu-user has not the last two
"""At this signal a rank writes the stacks of its threads."""

END_S = 5.0  # for the ranks to end their sessions

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def say(other: Connection, **message: Any) -> None:
    """Send a message, as JSON; the repr of what JSON does not know."""
    other.send_bytes(json.dumps(message, default=repr).encode())


def hear(other: Connection) -> dict[str, Any] | None:
    """The next message; None if the other end is closed, or stops in the middle of one."""
    try:
        found: dict[str, Any] = json.loads(other.recv_bytes())
    except (OSError, EOFError):
        return None
    return found


def template(control: Connection) -> None:
    """Read pytest's settings, then fork ranks and wait for them, until the other end is closed."""
    given = hear(control) or sys.exit(1)
    sys.path[:] = given["path"]
    gc.disable()
    for name in given["modules"]:
        with contextlib.suppress(ImportError):  # without PyTorch only the tests that need it fail
            importlib.import_module(name)
    config = pytest.Config.fromdictargs(given["options"], given["args"])
    gc.freeze()  # a collection in a rank would copy every page
    gc.enable()
    say(control, ready=os.getpid())
    pids: set[int] = set()
    while (request := hear(control)) is not None:
        if "files" in request:
            descriptor = reduction.recv_handle(control)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside a conftest's threads
                pid = os.fork()
            if pid == 0:
                control.close()
                _live(config, Connection(descriptor), **request)
            os.close(descriptor)
            pids.add(pid)
            say(control, pid=pid)
        else:
            pid = request["end"]
            pids.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # if it has ended, it is not reaped yet
            say(control, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    deadline = time.monotonic() + END_S
    while pids and time.monotonic() < deadline:
        pids = {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0.005)
    os.killpg(0, signal.SIGKILL)  # with what tests have started and left


def _live(config: pytest.Config, channel: Connection, files: str, captured: bool) -> None:
    """The life of a rank, from the fork to its end. files: the beginning of their names."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if captured:
            out = os.open(f"{files}.out", os.O_WRONLY | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
        faulthandler.register(STACKS, file=open(f"{files}.stacks", "ab"), all_threads=True)  # noqa: SIM115
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # ranks are no copies of each other
        config.option.basetemp = files
        if not hasattr(config, "workerinput"):  # plugins leave reports to pytest's own process, as with xdist
            config.workerinput = {"workerid": "master"}  # type: ignore[attr-defined]
        config.pluginmanager.register(_RankPlugin(config, channel), "unisono_rank")
        status = config.hook.pytest_cmdline_main(config=config)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        code = 0 if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.TESTS_FAILED) else 1
    except BaseException:  # noqa: BLE001  (the process ends here)
        traceback.print_exc()
    finally:
        os._exit(code)


class _RankPlugin:
    """A plugin of pytest: its loop runs the tests that the other end asks for, and sends their reports."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self._config = config
        self._channel = channel
        self._pid = os.getpid()
        self._groups = config.stash[GROUPS] = Groups()
        self._items: dict[str, pytest.Item] = {}
        self._reports: list[Any] = []
        self._warnings: list[dict[str, Any]] = []
        self._missing = ""
        self._failed = self._broken = False
        self._lost: Exception | None = None

    def pytest_collection(self) -> bool:
        """Collect nothing yet."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run tests until the other end is closed, or says so; then end the fixtures of the session."""
        while (request := hear(self._channel)) and "run" in request:
            answer = self._answer(session, RankRequest(*request["run"]))
            self._end_child(None)
            say(self._channel, **answer)
        error = ""
        try:
            session._setupstate.teardown_exact(None)
        except Exception:  # noqa: BLE001  (told)
            error = traceback.format_exc()
        self._groups.drop()
        if request:
            say(self._channel, error=error)
        return True

    @pytest.fixture
    def tmp_path(self) -> Path:
        """A folder that all ranks of the test share."""
        folder = Path(self._groups.run.folder)
        folder.mkdir(exist_ok=True)
        return folder

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Any:
        """Say whether an error follows from another rank's, and let no other rank wait for this one."""
        excinfo: Any = call.excinfo
        self._end_child(excinfo and excinfo.value)
        ours = excinfo is not None and isinstance(excinfo.value, UnisonoError)
        if ours and not self._config.option.fulltrace:
            # The frames of the test, as the launcher shows them. pytest reads them from the exception itself.
            outside = [entry for entry in excinfo.traceback if not str(entry.path).startswith(_PACKAGE)]
            if outside:
                outside[-1]._rawentry.tb_next = None
        report = yield
        if excinfo is not None and (report.outcome != "passed" or hasattr(report, "wasxfail")):
            fault = getattr(excinfo.value, "report", None)
            report.fault = f"{fault.kind} {fault.group} {fault.sequence}" if fault is not None else ""
            report.consequence = self._follows(excinfo.value)
            unused = not (report.skipped and report.when == "setup")  # by a mark, on all ranks
            self._failed = True
            self._broken |= self._groups.abandon(excinfo.value, unused=unused)
        return report

    def _end_child(self, error: BaseException | None) -> None:
        """End a process that a test has forked, and that has left the test: it must not answer, too."""
        if os.getpid() == self._pid:
            return
        code = 0 if error is None else 1
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            traceback.print_exception(error)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep a report for the answer."""
        self._reports.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the error of a file that cannot be collected here."""
        self._missing += report.longreprtext if report.failed else ""

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Keep a warning for the answer."""
        kind, said = warning_message.category, str(warning_message.message)
        names = {"module": kind.__module__, "category": kind.__qualname__, "message": said, "when": when}
        place = {"filename": warning_message.filename, "lineno": warning_message.lineno}
        self._warnings.append({**names, **place})

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        """With --pdb: ask for the terminal, and debug this rank on it."""
        excinfo = call.excinfo
        if excinfo is None or not self._groups.run.debug or self._follows(excinfo.value):
            return
        say(self._channel, debug=excinfo.exconly(tryshort=True).partition("\n")[0])
        if hear(self._channel):
            source, sink = self._groups.run.debug
            with open(source) as stdin, open(sink, "a") as stdout:
                debugger = pdb.Pdb(stdin=stdin, stdout=stdout)
                debugger.reset()
                debugger.interaction(None, excinfo.tb)
            say(self._channel, debugged=True)

    def _answer(self, session: pytest.Session, run: RankRequest) -> dict[str, Any]:
        self._reports, self._warnings, self._missing = [], [], ""
        self._failed = self._broken = False
        leave = ""
        try:
            self._run(session, run)
        except (pytest.exit.Exception, KeyboardInterrupt) as stop:
            leave = f"{type(stop).__name__}: {stop}"
        serialize = self._config.hook.pytest_report_to_serializable
        return {
            "reports": [serialize(config=self._config, report=report) for report in self._reports],
            "warnings": self._warnings,
            "missing": self._missing,
            "leave": leave,
            "spoiled": self._broken or self._groups.spoiled,
        }

    def _run(self, session: pytest.Session, run: RankRequest) -> None:
        self._groups.run = run
        if run.nodeid not in self._items:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pytest's own process has had them
                self._items |= {item.nodeid: item for item in session.perform_collect([run.path])}
        item = self._items.get(run.nodeid)
        if item is None:
            self._missing = self._missing or "this test was not found: its name differs between processes"
            return
        names = getattr(item, "fixturenames", ())
        self._groups.begin(run, process_group="process_group" in names)
        if not self._step(item, "setup", lambda: session._setupstate.teardown_exact(item)):
            return
        if "group" in names and not self._step(item, "setup", lambda: self._groups.group(use=False)):
            return
        kept: Any = item.listchain()[run.keep - 1] if run.keep else None
        item.ihook.pytest_runtest_protocol(item=item, nextitem=kept)
        if not self._failed:
            self._step(item, "teardown", self._settle)

    def _step(self, item: pytest.Item, when: Any, step: Callable[[], object]) -> bool:
        """Do a step beside the test; its error counts as one of the test."""

        def told() -> None:
            try:
                step()
            except UnisonoError as error:  # whose traceback shows no line of the test
                failure: Any = pytest.fail.Exception(f"{type(error).__name__}: {error}", pytrace=False)
                failure.report = getattr(error, "report", None)
                raise failure from None

        call = pytest.CallInfo.from_call(told, when)
        if call.excinfo is not None:
            self._reports.append(item.ihook.pytest_runtest_makereport(item=item, call=call))
        return call.excinfo is None

    def _settle(self) -> None:
        try:
            left = self._groups.settle()
        except Mismatch as error:
            self._broken = True
            if error.report is None or not error.report.failed:  # otherwise the test expected it
                raise
        except GroupError:
            self._broken = True
        except Exception as error:  # of Gloo or NCCL: likely because of another rank, which then says why
            self._broken = True
            self._lost = error
            raise
        else:
            if left:
                pytest.fail(left, pytrace=False)

    def _follows(self, error: BaseException) -> bool:
        return error is self._lost or uncaught(error, self._groups.run.rank, printed=True).lost


def main() -> None:
    """Run the template on the descriptor that is the first argument."""
    control = Connection(int(sys.argv[1]))
    try:
        template(control)
    except BaseException:
        say(control, error=traceback.format_exc())
        raise


if __name__ == "__main__":
    main()
