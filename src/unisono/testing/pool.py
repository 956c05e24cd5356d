"""In pytest's process: starts ranks, gives them a test, waits for all of them, ends those that hang.

A rank that has died or hung is replaced before the next test; the groups of all are then made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from unisono.engine.base.timeouts import LONGEST_S
from unisono.engine.environment import env
from unisono.testing.channel import Channel, pair
from unisono.testing.marker import Settings, settings
from unisono.testing.merge import Outcome, merged
from unisono.testing.rank import END_S, STACKS

if TYPE_CHECKING:
    from typing import BinaryIO

LIMIT_S = 300.0  # of a test, where neither the marker nor pytest-timeout says one
GRACE_S = 5.0  # for the other ranks, once one has not passed
STACKS_S = 0.5  # for a rank that hangs to write its stacks
ANSWER_S = 60.0  # for the template to import what conftest files do

SHARE = 0.8
"""Of a test's limit, the timeout of its groups: their own Timeout, which names the late rank, comes first."""

MOST_OUTPUT_NBYTES = 64 << 10
"""Of what a rank prints in a test, the last bytes that its report shows."""

_OF_PYTEST = re.compile(r'File ".*/(_pytest|pluggy|unisono/testing)/|File "<frozen runpy>')
_IMPORTED_ONCE = ("torch", "torch.distributed", "unisono.torch")
"""Where the tests have imported them, too. The engine, and NumPy, are always."""

_NO_OPTIONS = {
    "capture": "no", "collectonly": False, "deselect": None, "dist": "no", "distload": False,
    "failedfirst": False, "keyword": "", "lf": False, "looponfail": False, "markexpr": "", "maxfail": 0,
    "newfirst": False, "no_cov": True, "numprocesses": None, "stepwise": False, "trace": False, "tx": [],
    "usepdb": False, "xmlpath": None,
}  # fmt: skip
"""What pytest itself does with all tests, and not a rank."""


class Rank(NamedTuple):
    """A process. `out` is None where pytest captures nothing."""

    number: int
    pid: int
    pidfd: int
    channel: Channel
    out: BinaryIO | None
    stacks: BinaryIO

    def close(self) -> None:
        """Close what this process has of it."""
        os.close(self.pidfd)
        self.channel.close()
        for file in (self.out, self.stacks):
            if file is not None:
                file.close()

    def said(self, wait_s: float | None = 0) -> dict[str, Any] | None:
        """Its next message; None if it has died. wait_s: None waits until either."""
        with selectors.DefaultSelector() as selector:
            for one in (self.channel, self.pidfd):
                selector.register(one, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(wait_s)]
        return self.channel.receive() if self.channel in ready else None

    def printed(self) -> str:
        """What it has printed in this test: the end of it, if it is much."""
        if self.out is None:
            return ""
        size = os.fstat(self.out.fileno()).st_size
        left_out = max(size - MOST_OUTPUT_NBYTES, 0)
        text = os.pread(self.out.fileno(), MOST_OUTPUT_NBYTES, left_out).decode(errors="replace")
        return f"[{left_out} bytes before are left out]\n{text}" if left_out else text

    def where(self) -> str:
        """The stacks of its threads."""
        with contextlib.suppress(OSError):
            with open(f"/proc/{self.pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] in "tT":
                    return "(it is stopped, by SIGSTOP or a debugger)\n"
            os.kill(self.pid, STACKS)
        end, before = time.monotonic() + STACKS_S, 0
        while time.monotonic() < end:
            time.sleep(0.02)
            size = os.fstat(self.stacks.fileno()).st_size
            if size and size == before:
                break
            before = size
        lines = os.pread(self.stacks.fileno(), MOST_OUTPUT_NBYTES, 0).decode(errors="replace").splitlines(True)
        return "".join(line for line in lines if not _OF_PYTEST.search(line))


class Pool:
    """The ranks of one kind, and the template they are forked from."""

    def __init__(self, config: pytest.Config, gpus: int) -> None:
        self._config = config
        self._base = config._tmp_path_factory.getbasetemp() / f"ranks{gpus}-{id(self)}"  # type: ignore[attr-defined]
        self._base.mkdir()
        self._ranks: dict[int, Rank] = {}
        self._forked = 0
        self._tests = 0
        self._generation = 0
        self._broken = False
        self._debug = bool(config.option.usepdb)
        self._control, theirs = pair(ANSWER_S)
        self._template = subprocess.Popen(
            [sys.executable, "-m", "unisono.testing.rank", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=config.invocation_params.dir,
            env=_environ(gpus, config.option),
            start_new_session=True,  # Ctrl-C is for pytest alone
        )
        theirs.close()
        try:
            self._ask(_session(config, gpus))
        except BaseException:
            self._kill()
            raise

    def run(self, item: pytest.Item, chosen: Settings, limit_s: float, keep: int) -> list[Outcome]:
        """Run a test on the first ranks; how each of them ended, in order."""
        self._tests += 1
        if self._broken:
            self._generation += 1
            self._broken = False
        request: dict[str, Any] = {
            "nodeid": item.nodeid,
            "path": str(item.path),
            "generation": self._generation,
            "keep": keep,
            "debug": self._debug,
            "folder": str(self._base / f"test{self._tests}"),
        }
        limit_s = math.inf if self._debug else limit_s
        meeting = str(self._base / f"meeting{self._tests}")
        try:
            ranks = [self._ranks.get(number) or self._fork(number) for number in range(chosen.ranks)]
            until = time.time() + SHARE * min(limit_s, LONGEST_S)
            shared = (chosen.hosts, chosen.backend, until, meeting, _free_port())
            for rank in ranks:
                for file in (rank.out, rank.stacks):
                    if file is not None:
                        os.ftruncate(file.fileno(), 0)
                with contextlib.suppress(OSError):  # it has died; its end is found below
                    rank.channel.send({**request, "run": (rank.number, chosen.ranks, *shared)})
            found = self._await(ranks, limit_s)
        except BaseException:
            self._kill()
            raise
        return [found[rank.number] for rank in ranks]

    def close(self) -> list[str]:
        """End the ranks, and the fixtures of their sessions; the errors of these."""
        errors = []
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):
                rank.channel.send({"end": True})
        for rank in self._ranks.values():
            said = rank.channel.receive()
            if said is None or said["error"]:
                errors.append(f"rank {rank.number} at its end: {said['error'] if said else rank.printed()}")
        self._kill(END_S)
        return errors

    @property
    def closed(self) -> bool:
        """Whether its processes have ended."""
        return self._template.returncode is not None

    def _await(self, ranks: list[Rank], limit_s: float) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        started = time.monotonic()
        deadline, why = started + limit_s, f"it had not ended after {limit_s:g} s, the limit of the test"
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(rank.channel, selectors.EVENT_READ, rank)
                selector.register(rank.pidfd, selectors.EVENT_READ, rank)
            while len(found) < len(ranks):
                wait = None if math.isinf(deadline) else max(deadline - time.monotonic(), 0)
                ready = {key.data.number: key.data for key, _ in selector.select(wait)}
                for number, rank in ready.items():
                    said = rank.said()
                    if said is not None and "debug" in said:
                        self._lend_terminal(rank, said["debug"])
                        continue
                    selector.unregister(rank.channel)
                    selector.unregister(rank.pidfd)
                    found[number] = self._ended(rank) if said is None else self._answered(rank, said)
                    grace = time.monotonic() + GRACE_S
                    if not found[number].passed and grace < deadline and not self._debug:
                        deadline = grace
                        why = f"it had not ended {GRACE_S:g} s after rank {number} had"
                if not ready and time.monotonic() >= deadline:
                    late = [rank for rank in ranks if rank.number not in found]
                    stacks = [rank.where() for rank in late]
                    for rank, stack in zip(late, stacks, strict=True):
                        found[rank.number] = self._ended(rank, why, stack)
        return found

    def _answered(self, rank: Rank, said: dict[str, Any]) -> Outcome:
        self._broken |= said["spoiled"]
        deserialize = self._config.hook.pytest_report_from_serializable
        return Outcome(
            rank.number,
            rank.pid,
            [deserialize(config=self._config, data=data) for data in said["reports"]],
            warnings=said["warnings"],
            printed=rank.printed(),
            missing=said["missing"],
            leave=said["exit"],
        )

    def _ended(self, rank: Rank, hung: str = "", stacks: str = "") -> Outcome:
        """Kill a rank, or find how it has died."""
        self._broken = True
        del self._ranks[rank.number]
        code = self._ask({"end": rank.pid})["status"]
        died = hung or (
            f"it was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"it ended with exit code {code} in the middle of the test"
        )
        printed = rank.printed()
        rank.close()
        return Outcome(rank.number, rank.pid, printed=printed, died=died, hung=bool(hung), stacks=stacks)

    def _lend_terminal(self, rank: Rank, error: str) -> None:
        """Let a rank debug its error on the terminal of pytest, one rank at a time."""
        capture = self._config.pluginmanager.get_plugin("capturemanager")
        capture.suspend_global_capture(in_=True)
        try:
            print(f"\nrank {rank.number} (pid {rank.pid}) failed: {error}", flush=True)  # noqa: T201
            rank.channel.send({"terminal": True}, [0, 1])
            rank.said(None)
        finally:
            capture.resume_global_capture()

    def _fork(self, number: int) -> Rank:
        ours, theirs = pair(END_S)
        captured = self._config.option.capture != "no"
        out = _file() if captured else None
        stacks = _file()
        outputs = [out.fileno(), out.fileno()] if out is not None else [1, 2]
        self._forked += 1
        request = {"fork": number, "basetemp": str(self._base / f"rank{number}-{self._forked}")}
        pid = self._ask(request, [theirs.fileno(), *outputs, stacks.fileno()])["pid"]
        theirs.close()
        self._ranks[number] = Rank(number, pid, os.pidfd_open(pid), ours, out, stacks)
        return self._ranks[number]

    def _ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> dict[str, Any]:
        self._control.send(request, descriptors or [])
        answer = self._control.receive()
        if answer is None or "error" in answer:
            why = answer["error"] if answer else f"it has ended, or has not answered for {ANSWER_S:g} s"
            raise RuntimeError(f"the process that ranks are forked from has failed: {why}")
        return answer

    def _kill(self, grace_s: float = 0.0) -> None:
        """End all processes, those that tests have started included."""
        for rank in self._ranks.values():
            rank.close()
        self._ranks.clear()
        self._control.close()
        pid, end = self._template.pid, time.monotonic() + grace_s
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and time.monotonic() < end:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # its zombie keeps the number
        self._template.wait()


class Pools:
    """The pools of a pytest process, by the number of their virtual GPUs; made when a test needs them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._made: dict[int, Pool] = {}

    def get(self, gpus: int) -> Pool:
        """The pool of ranks with so many virtual GPUs."""
        if gpus not in self._made or self._made[gpus].closed:
            self._made[gpus] = Pool(self._config, gpus)
        return self._made[gpus]

    def close(self) -> None:
        """End all ranks."""
        for pool in self._made.values():
            for error in () if pool.closed else pool.close():
                found = warnings.WarningMessage(error, UserWarning, __file__, 0)
                _record(self._config, found, "", "runtest")


def run_test(pools: Pools, item: pytest.Item, nextitem: pytest.Item | None, limit_s: float | None) -> None:
    """Run a marked test, and log its reports."""
    outcomes: list[Outcome] = []

    def run() -> None:
        chosen = settings(item)
        pool = pools.get(chosen.virtual_gpus or item.config.option.virtual_gpus)
        limit = chosen.timeout or limit_s or LIMIT_S
        outcomes.extend(pool.run(item, chosen, limit, _shared(item, nextitem)))

    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    ran = pytest.CallInfo.from_call(run, "setup")
    # What earlier tests have set up in this process, and the next one does not need.
    end = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    reports = merged(item, outcomes)
    reports += [pytest.TestReport.from_item_and_call(item, call) for call in (ran, end) if call.excinfo]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    for text in dict.fromkeys(json.dumps(each) for one in outcomes for each in one.warnings):
        _warn_again(item, json.loads(text))
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    for one in outcomes:
        if one.leave:
            pytest.exit(f"rank {one.rank}: {one.leave}")


def _shared(item: pytest.Item, nextitem: pytest.Item | None) -> int:
    """How many nodes of a test's chain, from the session on, the next test of ranks is in, too."""
    if "workerinput" not in vars(item.config):
        later = iter(item.session.items)
        next(one for one in later if one is item)
        nextitem = next((one for one in later if one.get_closest_marker("ranks")), None)
    if nextitem is None:
        return 0
    pairs = zip(item.listchain()[:-1], nextitem.listchain(), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))


def _warn_again(item: pytest.Item, said: dict[str, Any]) -> None:
    """Report a warning of a rank as one of this process."""
    kind = getattr(sys.modules.get(said["module"]), said["category"], UserWarning)
    _record(
        item.config,
        warnings.WarningMessage(said["message"], kind, said["filename"], said["lineno"]),
        item.nodeid,
        said["when"],
    )


def _record(config: pytest.Config, found: warnings.WarningMessage, nodeid: str, when: Any) -> None:
    how = {"warning_message": found, "nodeid": nodeid, "when": when, "location": None}
    config.hook.pytest_warning_recorded.call_historic(kwargs=how)


def _session(config: pytest.Config, gpus: int) -> dict[str, Any]:
    """What a rank's session begins with: the settings and the options of this one."""
    options = {name: value for name, value in vars(config.option).items() if _plain(value)}
    known = {name: value for name, value in _NO_OPTIONS.items() if name in vars(config.option)}
    plugins = [*config.option.plugins, "no:terminal", "no:timeout"]
    return {
        "path": sys.path,
        "modules": ["unisono.engine.group"] + [name for name in _IMPORTED_ONCE if name in sys.modules],
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


def _file() -> BinaryIO:
    file = tempfile.TemporaryFile()  # noqa: SIM115  (closed with its rank)
    fcntl.fcntl(file.fileno(), fcntl.F_SETFL, os.O_APPEND)  # it can be emptied at any time
    return file


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
