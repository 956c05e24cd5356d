"""What the front process does while its supervisor runs the ranks: pass signals on, and speak for this node.

On one machine that is little. With several nodes the front meets the others, tells them when something ends
here, and tells its supervisor when something has ended there. See `nodes` for what is said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from unisono import env
from unisono.errors import StoreError
from unisono.launch.job import Assignment, Job
from unisono.launch.process import become_subreaper, end_children
from unisono.launch.summary import Failure, foreign_report
from unisono.launch.supervisor import FORWARDED, STRAYS_IN_A_HURRY_S

if TYPE_CHECKING:
    from types import FrameType

    from unisono.launch.nodes import Final, Nodes
    from unisono.store import StoreServer

__all__ = ["Interrupted", "Signals", "adopting_orphans", "assign", "attend", "outcome"]

GOODBYE_S = 10.0  # node 0 serves the store so long after its own end, at most, for the others to read from it


class Interrupted(Exception):
    """A signal ended what has no supervisor to pass it on to."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Passes each signal on to the supervisor, which knows what it means.

    What was ignored when we were started (nohup, `&` in a script) stays ignored. While `direct` is set no
    rank runs, and the signal ends this process's waiting instead.
    """

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor
        self.direct = False

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self.direct and number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            raise Interrupted(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._supervisor, number)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)  # stop as asked; this returns when we are continued
                os.kill(self._supervisor, signal.SIGCONT)

    @contextlib.contextmanager
    def forwarded(self) -> Iterator[None]:
        """Catch the signals in this block."""
        numbers = [n for n in FORWARDED if n != signal.SIGCONT and signal.getsignal(n) != signal.SIG_IGN]
        previous = {number: signal.signal(number, self._forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of what a killed supervisor leaves."""
    become_subreaper()
    try:
        yield
    finally:
        become_subreaper(False)


def assign(life_write: int, assignment: Assignment) -> None:
    """Let the supervisor begin."""
    with contextlib.suppress(BrokenPipeError):
        os.write(life_write, json.dumps(dataclasses.asdict(assignment)).encode() + b"\n")


def outcome(status: int) -> int:
    """The exit code for the shell, from the supervisor's; what a killed one left is ended."""
    if status >= 0:
        return status
    end_children(STRAYS_IN_A_HURRY_S)
    name = signal.Signals(-status).name
    sys.stderr.write(f"unisono run: the launcher was killed by {name}; the ranks are gone\n")
    return 128 - status


def attend(
    job: Job,
    base: Mapping[str, str],
    supervisor: int,
    life_write: int,
    news: IO[str],
    master_port: int,
    signals: Signals,
) -> int:
    """Meet the other nodes, see the job through on this one, agree with the others on how it ended.

    Raises:
        LaunchError, StoreError, AuthenticationError: the nodes did not come together.
        Interrupted: a signal ended the waiting.
    """
    from unisono.launch.nodes import MEET_S, Nodes
    from unisono.store import TCPStore

    signals.direct = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(adopting_orphans())
        if job.node_rank == 0:
            stack.enter_context(contextlib.closing(_serve(job, base)))
        options: dict[str, Any] = {"timeout_s": MEET_S, "token": job.token, "tls": job.tls}
        store = stack.enter_context(TCPStore(job.master_addr, job.master_port, **options))
        nodes = Nodes(job, store)
        stack.callback(nodes.close)
        assignment = nodes.meet(master_port)
        signals.direct = False
        assign(life_write, assignment)
        nodes.watch(lambda: _tell(life_write))
        reader = _News(news, nodes)
        status = outcome(os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]))
        signals.direct = True
        reader.thread.join(2.0)
        if status and not reader.said:  # it had no time to say how it ended
            nodes.announce("the launcher was killed", status)
        finals = nodes.settle(reader.failure, reader.stopped)
        if job.node_rank == 0:
            nodes.await_settled(0.5 if reader.stopped else GOODBYE_S)
        return _conclude(job, nodes, finals, reader, status)


def _serve(job: Job, base: Mapping[str, str]) -> StoreServer:
    """The store of all nodes, on the master's address; where that is a router's, on this host's own."""
    from unisono.rendezvous.interfaces import local_address
    from unisono.store import StoreServer

    try:
        return StoreServer(job.master_addr, job.master_port, token=job.token, tls=job.tls)
    except StoreError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRNOTAVAIL:
            raise
    address = local_address(None, env.read({k: v for k, v in base.items() if "SOCKET_IFNAME" in k}))
    return StoreServer(address, job.master_port, token=job.token, tls=job.tls)


def _tell(life_write: int) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        os.write(life_write, b"end\n")


class _News:
    """Reads, in a thread, what the supervisor says, and passes on what the other nodes must know at once."""

    def __init__(self, news: IO[str], nodes: Nodes) -> None:
        self.failure: Failure | None = None
        self.stopped = 0
        self.report = self.follow = ""
        self.said = False
        self._news = news
        self._nodes = nodes
        self.thread = threading.Thread(target=self._read, name="unisono-news", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for line in self._news:
            found = json.loads(line)
            self.said = True
            if "stopped" in found:
                self.stopped = 128 + int(found["stopped"])
                self._nodes.announce(signal.Signals(found["stopped"]).name, self.stopped)
            elif "failed" in found:
                self._nodes.announce(found["failed"], 1)
            else:
                self.failure = Failure(*found["failure"]) if found["failure"] else None
                self.report, self.follow = found["report"], found["follow"]


def _conclude(job: Job, nodes: Nodes, finals: list[Final], news: _News, status: int) -> int:
    """Print which rank of all nodes failed first, and return its exit code."""
    end = nodes.end
    if news.stopped:
        return status
    stopped = [final for final in finals if final.stopped]
    if stopped or (end is not None and end.status > 128 and not any(final.failure for final in finals)):
        where = (
            f"node {stopped[0].node} (host {stopped[0].host})"
            if stopped
            else f"node {end.node if end else 0}"
        )
        _say("unisono run: the job was interrupted on " + where)
        return stopped[0].stopped if stopped else (end.status if end else 1)
    failed = [final for final in finals if final.failure is not None]
    if not failed:
        if end is not None:
            _say(f"unisono run: the job was ended: {end.text}")
            return status or end.status
        return status
    first = min(failed, key=lambda final: final.failure[3:5] if final.failure else (True, 0.0))
    assert first.failure is not None
    if first.node == job.node_rank:
        _say(news.report)
    else:
        _say(foreign_report(first.failure, first.node, first.host))
        _say(news.follow)
    if end is not None and first.failure.consequence:
        _say(f"unisono run: the job was ended: {end.text}")
    return first.failure.status


def _say(text: str) -> None:
    if text:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
