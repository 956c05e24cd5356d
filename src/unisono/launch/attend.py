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
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from unisono import env
from unisono.errors import StoreError
from unisono.launch.ending import STRAYS_IN_A_HURRY_S
from unisono.launch.job import Assignment, Job
from unisono.launch.news import News
from unisono.launch.process import become_subreaper, end_children
from unisono.launch.summary import foreign_report
from unisono.launch.supervisor import FORWARDED, STOPPING

if TYPE_CHECKING:
    from types import FrameType

    from unisono.launch.nodes import Final, Nodes
    from unisono.store import StoreServer

__all__ = ["Interrupted", "Signals", "adopting_orphans", "assign", "attend", "in_main_thread_only", "outcome"]

GOODBYE_S = 10.0  # node 0 serves the store so long after its own end, at most, for the others to read from it


class Interrupted(Exception):
    """A signal ended what has no supervisor to pass it on to."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Passes each signal on to the supervisor, which knows what it means.

    What was ignored when we were started (nohup, `&` in a script) stays ignored. While `direct` is set no
    rank runs, and the first signal ends this process's waiting instead.
    """

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor
        self._lives = os.pidfd_open(supervisor)  # its number may be another's once `wait` has returned
        self._status: int | None = None
        self._interrupted = False
        self.direct = False

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self.direct and number in STOPPING and not self._interrupted:
            self._interrupted = True  # what is cleaned up then is not interrupted once more
            raise Interrupted(number)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._lives, number)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)  # stop as asked; this returns when we are continued
                signal.pidfd_send_signal(self._lives, signal.SIGCONT)

    @contextlib.contextmanager
    def forwarded(self) -> Iterator[None]:
        """Catch the signals in this block. Afterwards `wait` is over."""
        self._wake_read, wake_write = socket.socketpair()
        numbers = [n for n in FORWARDED if n != signal.SIGCONT and signal.getsignal(n) != signal.SIG_IGN]
        with self._wake_read, wake_write:
            self._wake_read.setblocking(False)
            wake_write.setblocking(False)
            previous_fd = signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
            previous = {number: signal.signal(number, self._forward) for number in numbers}
            try:
                yield
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(previous_fd)
                os.close(self._lives)

    def wait(self) -> int:
        """Wait for the end of the supervisor, passing signals on; its exit code, -n for signal n.

        Not in `waitpid`: a signal that comes right before that call, or to another thread, would not end it,
        and its handler would not run. What such a signal writes to the socket stays there until it is read.
        """
        events = select.poll()
        events.register(self._lives, select.POLLIN)
        events.register(self._wake_read, select.POLLIN)
        while self._status is None:
            ready = [fd for fd, _ in events.poll()]
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)  # the handlers run between this and the next poll
            if self._lives in ready:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self._supervisor, 0)[1])
        return self._status


@contextlib.contextmanager
def in_main_thread_only() -> Iterator[None]:
    """Threads started in this block get none of the signals: those are to end the main thread's waiting."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


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
            with in_main_thread_only():
                stack.enter_context(contextlib.closing(_serve(job, base)))
        options: dict[str, Any] = {"timeout_s": MEET_S, "token": job.token, "tls": job.tls}
        store = stack.enter_context(TCPStore(job.master_addr, job.master_port, **options))
        nodes = Nodes(job, store)
        stack.callback(nodes.close)
        assignment = nodes.meet(master_port)
        signals.direct = False
        assign(life_write, assignment)
        with in_main_thread_only():
            nodes.watch(lambda: _tell(life_write))
            reader = News(news, nodes)
        status = outcome(signals.wait())
        signals.direct = True
        reader.thread.join(2.0)
        if status and not reader.said:  # it had no time to say how it ended
            nodes.announce("the launcher was killed", status)
        finals = nodes.settle(reader.failure, reader.stopped)
        if job.node_rank == 0:
            nodes.await_settled(1.5 if reader.stopped else GOODBYE_S)
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


def _conclude(job: Job, nodes: Nodes, finals: list[Final], news: News, status: int) -> int:
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
