"""In pytest's process: starts ranks, gives them a test, waits for all of them, ends those that hang.

A rank that has died or hung is replaced before the next test; the groups of all are then made anew.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import pytest

from unisono.engine.base.timeouts import LONGEST_S
from unisono.engine.diagnosis.fault_text import signal_name
from unisono.engine.environment import env
from unisono.engine.membership.contact import process_state
from unisono.testing import RankRequest
from unisono.testing.marker import RanksMarker, settings
from unisono.testing.merge import RankResult, merged
from unisono.testing.rank import END_S, STACKS, hear, say

LIMIT_S = 300.0  # of a test, where neither the marker nor pytest-timeout says one
GRACE_S = 5.0  # for the other ranks, once one has not passed
STACKS_S = 0.5  # for a rank that hangs to write its stacks
ANSWER_S = 60  # for the template to import what conftest files do, and for the rest of a message

SHARE = 0.8
"""Of a test's limit, the timeout of its groups: their own Timeout, which names the late rank, comes first."""

MOST_OUTPUT_NBYTES = 16 << 10
"""Of what a rank prints in a test, the last bytes that its report shows."""

_OF_PYTEST = re.compile(r'File ".*/(_pytest|pluggy|unisono/testing)/|File "<frozen runpy>')
_IMPORTED_ONCE = ("torch", "torch.distributed", "unisono.torch")
"""Where tests have imported them, or need them for `process_group`. The engine, and NumPy, always are."""

_NO_OPTIONS: dict[str, Any] = {
    "capture": "no", "collectonly": False, "deselect": None, "dist": "no", "distload": False,
    "failedfirst": False, "keyword": "", "lf": False, "looponfail": False, "markexpr": "", "maxfail": 0,
    "newfirst": False, "no_cov": True, "numprocesses": None, "stepwise": False, "trace": False, "tx": [],
    "usepdb": False, "xmlpath": None,
}  # fmt: skip
"""What pytest itself does with all tests, and not a rank."""


class RankHandle(NamedTuple):
    """A process. `files`: the beginning of the names of its files."""

    number: int
    pid: int
    pidfd: int
    channel: Connection
    files: str

    def close(self) -> None:
        """Close what this process has of it."""
        os.close(self.pidfd)
        self.channel.close()

    def said(self, timeout_s: float | None = 0) -> dict[str, Any] | None:
        """Its next message; None if it has died. timeout_s: None waits until either."""
        return hear(self.channel) if self.channel in wait([self.channel, self.pidfd], timeout_s) else None

    def read(self, kind: str) -> str:
        """What it has written in this test, "out" or "stacks": the end of it, if it is much."""
        with open(f"{self.files}.{kind}", "rb") as file:
            left_out = max(os.fstat(file.fileno()).st_size - MOST_OUTPUT_NBYTES, 0)
            file.seek(left_out)
            text = file.read().decode(errors="replace")
        return f"[{left_out} bytes before are left out]\n{text}" if left_out else text

    def where(self) -> str:
        """The stacks of its threads, without pytest's frames."""
        if process_state(self.pid) in "tT":
            return "it is stopped, by SIGSTOP or a debugger\n"
        os.kill(self.pid, STACKS)
        end, before, found = time.monotonic() + STACKS_S, "", ""
        while time.monotonic() < end and not (found and found == before):
            time.sleep(0.02)
            before, found = found, self.read("stacks")
        return "".join(line for line in found.splitlines(True) if not _OF_PYTEST.search(line))


class Pool:
    """The ranks of one kind, and the template they are forked from."""

    def __init__(self, session: pytest.Session, gpus: int) -> None:
        self._config = config = session.config
        folder = config._tmp_path_factory.mktemp("ranks")  # type: ignore[attr-defined]
        self._names = (f"{folder}/{number}" for number in itertools.count())
        self._ranks: dict[int, RankHandle] = {}
        self._generation = 0
        self._broken = False
        self._died_idle: set[int] = set()
        self._last = ""
        streams = (f"/proc/{os.getpid()}/fd/0", f"/proc/{os.getpid()}/fd/1")
        self._debug = streams if config.option.usepdb else ()
        self.dead = False
        self._control, theirs = _pipe()
        self._template = subprocess.Popen(
            # -u: a rank may be killed, and what it has printed is there.
            [sys.executable, "-u", "-m", "unisono.testing.rank", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=config.invocation_params.dir,
            env=_environ(gpus, config.option),
            start_new_session=True,  # Ctrl-C is for pytest alone
        )
        theirs.close()
        try:
            self._ask(**_beginning(session, gpus))
        except BaseException:
            self._kill()
            raise

    def run(self, item: pytest.Item, chosen: RanksMarker, limit_s: float, keep: int) -> list[RankResult]:
        """Run a test on the first ranks; how each of them ended, in order."""
        self._generation += self._broken
        self._broken = False
        limit_s = math.inf if self._debug else limit_s
        try:
            ranks = [self._ranks.get(number) or self._fork(number) for number in range(chosen.ranks)]
            run = RankRequest(
                nodeid=item.nodeid,
                path=str(item.path),
                rank=0,
                ranks=chosen.ranks,
                hosts=chosen.hosts,
                backend=chosen.backend,
                generation=self._generation,
                keep=keep,
                until=time.time() + SHARE * min(limit_s, LONGEST_S),
                folder=next(self._names),
                port=_free_port(),
                debug=self._debug,
            )
            self._died_idle = {rank.number for rank in ranks if wait([rank.pidfd], 0)}
            for rank in ranks:
                for kind in ("out", "stacks"):
                    os.truncate(f"{rank.files}.{kind}", 0)
                with contextlib.suppress(OSError):  # it has died; its end is found below
                    say(rank.channel, run=run._replace(rank=rank.number))
            found = self._await(ranks, limit_s)
            self._last = item.nodeid
        except BaseException:
            self._kill()
            raise
        return [found[rank.number] for rank in ranks]

    def close(self) -> list[str]:
        """End the ranks, and the fixtures of their sessions; the errors of these."""
        errors = []
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):
                say(rank.channel, end=True)
        for rank in self._ranks.values():
            said = rank.said(END_S)
            error = rank.read("out") if said is None else said["error"]
            errors += [f"rank {rank.number}, at the end of its session: {error}"] if error or not said else []
        self._kill(END_S)
        return errors

    def _await(self, ranks: list[RankHandle], limit_s: float) -> dict[int, RankResult]:
        found: dict[int, RankResult] = {}
        deadline, hung = time.monotonic() + limit_s, "limit"
        why = f"it had not ended after {limit_s:g} s, the limit of the test"
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
                selector.register(rank.pidfd, selectors.EVENT_READ, rank)
            while len(found) < len(ranks):
                left_s = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0)
                ready = {key.data.number: key.data for key, _ in selector.select(left_s)}
                for number, rank in ready.items():
                    said = rank.said()
                    if said is not None and "debug" in said:
                        self._lend_terminal(rank, said["debug"])
                        deadline = max(deadline, time.monotonic() + GRACE_S)
                        continue
                    selector.unregister(rank.channel)
                    selector.unregister(rank.pidfd)
                    found[number] = self._ended(rank) if said is None else self._answered(rank, said)
                    grace = time.monotonic() + GRACE_S
                    if not found[number].passed and grace < deadline:
                        deadline, hung = grace, "grace"
                        why = f"it had not ended {GRACE_S:g} s after rank {number} had"
                if not ready and time.monotonic() >= deadline:
                    late = [(rank, rank.where()) for rank in ranks if rank.number not in found]
                    for rank, stacks in late:
                        found[rank.number] = self._ended(rank, why, hung, stacks)
        return found

    def _answered(self, rank: RankHandle, said: dict[str, Any]) -> RankResult:
        self._broken |= said.pop("spoiled")
        deserialize = self._config.hook.pytest_report_from_serializable
        said["reports"] = [deserialize(config=self._config, data=data) for data in said["reports"]]
        return RankResult(rank.number, rank.pid, printed=rank.read("out"), **said)

    def _ended(self, rank: RankHandle, why: str = "", hung: str = "", stacks: str = "") -> RankResult:
        """Kill a rank, or find how it has died."""
        self._broken = True
        del self._ranks[rank.number]
        rank.close()
        code = self._ask(end=rank.pid)["status"]
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        moment = f"after {self._last}" if rank.number in self._died_idle else "in the middle of the test"
        died = why or f"it {how} {moment}"
        return RankResult(
            rank.number, rank.pid, printed=rank.read("out"), died=died, hung=hung, stacks=stacks
        )

    def _lend_terminal(self, rank: RankHandle, error: str) -> None:
        """Let a rank debug its error on the terminal of pytest, one rank at a time."""
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        capture.suspend_global_capture(in_=True)
        print(f"\nrank {rank.number} (pid {rank.pid}) failed: {error}", flush=True)  # noqa: T201
        say(rank.channel, terminal=True)
        rank.said(None)
        capture.resume_global_capture()

    def _fork(self, number: int) -> RankHandle:
        ours, theirs = _pipe()
        files = next(self._names)
        for kind in ("out", "stacks"):
            open(f"{files}.{kind}", "wb").close()
        say(self._control, files=files, captured=self._config.option.capture != "no")
        reduction.send_handle(self._control, theirs.fileno(), self._template.pid)
        theirs.close()
        pid = self._told()["pid"]
        self._ranks[number] = RankHandle(number, pid, os.pidfd_open(pid), ours, files)
        return self._ranks[number]

    def _ask(self, **request: Any) -> dict[str, Any]:
        with contextlib.suppress(OSError):  # it has ended, which is told below
            say(self._control, **request)
        return self._told()

    def _told(self) -> dict[str, Any]:
        answer = hear(self._control)
        if answer is None or "error" in answer:
            why = answer["error"] if answer else f"it has ended, or has not answered for {ANSWER_S} s"
            pytest.fail(f"the process that ranks are forked from has failed: {why}", pytrace=False)
        return answer

    def _kill(self, grace_s: float = 0.0) -> None:
        """End all processes, those that tests have started included."""
        self.dead = True
        for rank in self._ranks.values():
            rank.close()
        self._control.close()
        pid, end = self._template.pid, time.monotonic() + grace_s
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < end:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # its zombie keeps the number
        self._template.wait()


class Pools(dict[int, Pool]):
    """The pools of a pytest process, by the number of their virtual GPUs; made when a test needs them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def run_test(self, item: pytest.Item, nextitem: pytest.Item | None, limit_s: float | None) -> None:
        """Run a marked test, and log its reports."""
        outcomes: list[RankResult] = []

        def run() -> None:
            chosen = settings(item)
            gpus = chosen.virtual_gpus or self._config.option.virtual_gpus
            if gpus not in self or self[gpus].dead:
                self[gpus] = Pool(item.session, gpus)
            limit = chosen.timeout or limit_s or LIMIT_S
            outcomes.extend(self[gpus].run(item, chosen, limit, _shared(item, nextitem)))

        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        ran = pytest.CallInfo.from_call(run, "setup")
        # What earlier tests have set up in this process, and the next one does not need.
        end = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
        reports = merged(item, outcomes)
        reports += [pytest.TestReport.from_item_and_call(item, call) for call in (ran, end) if call.excinfo]
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        for text in dict.fromkeys(json.dumps(each) for one in outcomes for each in one.warnings):
            self._warn(item.nodeid, **json.loads(text))
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        for one in outcomes:
            if one.leave:
                pytest.exit(f"rank {one.rank}: {one.leave}")

    def close(self) -> None:
        """End all ranks."""
        for pool in self.values():
            for error in () if pool.dead else pool.close():
                self._warn("", "builtins", "UserWarning", error, "runtest", __file__, 0)

    def _warn(
        self, nodeid: str, module: str, category: str, message: str, when: Any, filename: str, lineno: int
    ) -> None:
        """Report a warning of a rank as one of this process."""
        kind = getattr(sys.modules.get(module), category, UserWarning)
        found = warnings.WarningMessage(message, kind, filename, lineno)
        how = {"warning_message": found, "nodeid": nodeid, "when": when, "location": None}
        self._config.hook.pytest_warning_recorded.call_historic(kwargs=how)


def _shared(item: pytest.Item, nextitem: pytest.Item | None) -> int:
    """How many nodes of a test's chain, from the session on, the next test of ranks is in, too."""
    if not hasattr(item.config, "workerinput"):  # a worker of pytest-xdist knows only the next test
        later = itertools.dropwhile(lambda one: one is not item, item.session.items)
        nextitem = next((one for one in list(later)[1:] if one.get_closest_marker("ranks")), None)
    chain = nextitem.listchain() if nextitem is not None else []
    pairs = zip(item.listchain()[:-1], chain, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))


def _beginning(session: pytest.Session, gpus: int) -> dict[str, Any]:
    """What a rank's session begins with: the settings and the options of this one."""
    config = session.config
    modules = ["unisono.engine.group"]
    if any("process_group" in getattr(item, "fixturenames", ()) for item in session.items):
        modules += _IMPORTED_ONCE
    options = {name: value for name, value in vars(config.option).items() if _plain(value)}
    known = {name: value for name, value in _NO_OPTIONS.items() if name in options}
    plugins = [*config.option.plugins, "no:terminal"]
    return {
        "path": sys.path,
        "modules": modules + [name for name in _IMPORTED_ONCE if name in sys.modules],
        "options": {**options, **known, "virtual_gpus": gpus, "plugins": plugins},
        "args": [str(arg) for arg in config.args],
    }


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (str, int, float))


def _environ(gpus: int, options: Any) -> dict[str, str]:
    environ = env.copy()
    environ.setdefault("OMP_NUM_THREADS", "1")  # as launchers do
    environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a conftest may ask for GPUs, and ranks still be forked
    if gpus:
        from unisono.virtual.environment import set_for_children

        how = {"poison": not options.no_poison, "check_streams": options.check_streams}
        set_for_children(environ, gpus, options.gpu_memory or "0", **how)
    return environ


def _pipe() -> tuple[Connection, Connection]:
    ours, theirs = Pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as end:  # a process may be stopped within a message
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", ANSWER_S, 0))
    return ours, theirs


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
