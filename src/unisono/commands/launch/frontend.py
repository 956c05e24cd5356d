"""The process the user started: it owns the signals and the store, and watches the supervisor.

Two processes, so that no single kill leaves anything behind:

    shell ── front ── supervisor ── rank 0, rank 1, ... ── their data loader workers, ...

    the front dies       the supervisor sees its end of the life pipe close, and ends everything
    the supervisor dies  the ranks get SIGKILL (PR_SET_PDEATHSIG),
                         their orphans become children of the front, which ends them

The supervisor and every rank have sessions of their own. So a Ctrl-C of the terminal reaches only the front,
which forwards it once. The store's threads run here: the supervisor has only one thread while it forks, and a
busy store does not delay it.

With several nodes the front meets the other fronts. It tells them when the job ends here, and tells its
supervisor when it has ended there. `nodes` lists the messages.
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
import traceback
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from unisono.commands.launch.failures import exit_status, foreign_report
from unisono.commands.launch.job import MEET_S, Assignment, Job
from unisono.commands.launch.process import STRAYS_IN_A_HURRY_S, become_subreaper, end_children
from unisono.commands.launch.supervisor import FORWARDED, STOPPING, Supervisor
from unisono.engine.environment import env
from unisono.errors import LaunchError, StoreError, message

if TYPE_CHECKING:
    from types import FrameType

    from unisono.commands.launch.nodes import NodeExit, NodeRendezvous, SupervisorMessages
    from unisono.engine.store import StoreServer

GOODBYE_S = 10.0  # how long node 0 serves the store after its own end, at most, so that others can read it


def run(job: Job, base: Mapping[str, str]) -> int:
    """Run `job` to its end and return the exit code: that of the first failure, 128 + n for signal n.

    Forks: call it from a process with one thread.

    Args:
        base: the environment the ranks start from.
    Raises:
        LaunchError: the system is too old, MASTER_PORT is taken, the store cannot listen, or the rendezvous
            of the nodes failed. Then no rank was started.
    """
    _open_standard_descriptors()
    _check_pidfds()
    with _reserved_port(job.master_port if job.nnodes == 1 else 0) as master_port:
        life_read, life_write = os.pipe()
        news_read, news_write = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # started without one (`>&-`)
                stream.flush()
        on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored: no exit code
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        supervisor = os.fork()
        if supervisor == 0:
            os.close(life_write)
            os.close(news_read)
            os._exit(_supervise(job, base, life_read, news_write if job.nnodes > 1 else -1))
        os.close(life_read)
        os.close(news_write)
        signals = SignalForwarder(supervisor)
        with signals.forwarding(), os.fdopen(news_read) as messages:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)
                if job.nnodes == 1:
                    return _attend_alone(job, life_write, master_port, signals)
                return _attend_all(job, base, life_write, messages, master_port, signals)
            except StartupInterrupt as interrupted:
                return 128 + interrupted.number
            finally:
                os.close(life_write)  # ends a supervisor that still waits for its assignment
                signals.wait()
                if on_child is not None:  # None: installed by C code, Python cannot restore it
                    signal.signal(signal.SIGCHLD, on_child)


def _open_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed. Otherwise the next opened file would get our output."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _check_pidfds() -> None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise LaunchError(
            message(
                "unisono run cannot watch its processes",
                observed=f"pidfd_open: {error.strerror}",
                remedy="It takes Linux 5.3, and a container that does not forbid this call.",
            )
        ) from None


def _supervise(job: Job, base: Mapping[str, str], life_read: int, news_write: int) -> int:
    """The body of the supervisor process. The first line from the front is the assignment."""
    try:
        os.setsid()
        supervisor = Supervisor(job, base, life_read, news_write)
        line, _, more = os.read(life_read, 4096).partition(b"\n")  # `more`: the job has already ended
        return supervisor.run(Assignment(**json.loads(line)), ended=bool(more)) if line else 1
    except BaseException:  # noqa: BLE001 - the outermost frame of this process: report it, then exit
        traceback.print_exc()
        return 1


def _attend_alone(job: Job, life_write: int, master_port: int, signals: SignalForwarder) -> int:
    """Host the store until the supervisor has ended."""
    from unisono.engine.store import StoreServer

    with _adopting_orphans():
        with _in_main_thread_only():
            server = StoreServer("127.0.0.1", 0, token=job.token, tls=job.tls)
        with contextlib.closing(server):
            store = f"127.0.0.1:{server.port}"
            _assign(life_write, Assignment(store, master_port, 0, job.world_size))
            return _outcome(signals.wait())


def _attend_all(
    job: Job,
    base: Mapping[str, str],
    life_write: int,
    messages: IO[str],
    master_port: int,
    signals: SignalForwarder,
) -> int:
    """The same with other nodes. After its end, of any kind, a signal raises nothing any more."""
    try:
        return _attend(job, base, life_write, messages, master_port, signals)
    finally:
        signals.direct = False


@contextlib.contextmanager
def _reserved_port(port: int) -> Iterator[int]:
    """Keep `port` (0: a free one) for the ranks: bound, never listening.

    Linux then gives it to no other process by chance. A rank that sets SO_REUSEADDR can still listen there,
    as torch's TCPStore and every asyncio server do.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("", port))
        except OSError as error:
            raise LaunchError(
                message(
                    f"port {port} cannot be used as MASTER_PORT",
                    observed=error.strerror or str(error),
                    remedy="Choose another with --master-port, or leave it out to get a free one.",
                )
            ) from None
        yield holder.getsockname()[1]


class StartupInterrupt(Exception):
    """A signal arrived when there was no supervisor to forward it to."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class SignalForwarder:
    """Forwards each signal to the supervisor, which handles it.

    Signals that were ignored at the start (nohup, `&` in a script) stay ignored. While `direct` is set no
    rank runs, and the first signal ends this process's wait instead.
    """

    def __init__(self, supervisor: int) -> None:
        self._supervisor = supervisor
        self._pidfd = os.pidfd_open(supervisor)  # its pid may be reused after `wait` has returned
        self._status: int | None = None
        self._interrupted = False
        self.direct = False

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self.direct and number in STOPPING and not self._interrupted:
            self._interrupted = True  # a second signal does not interrupt the clean-up
            raise StartupInterrupt(number)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
            if number in STOPPING:  # a stopped supervisor cannot handle it
                signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)  # stop as asked; this returns when we are continued
                signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)

    @contextlib.contextmanager
    def forwarding(self) -> Iterator[None]:
        """Catch the signals in this block."""
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
                os.close(self._pidfd)

    def wait(self) -> int:
        """Wait for the end of the supervisor and forward signals; returns its exit code, -n for signal n.

        It does not wait in `waitpid`: a signal right before that call, or to another thread, would not end
        it, and its handler would not run. Such a signal also writes a byte to a socket, which stays until it
        is read.
        """
        events = select.poll()
        events.register(self._pidfd, select.POLLIN)
        events.register(self._wake_read, select.POLLIN)
        while self._status is None:
            ready = [fd for fd, _ in events.poll()]
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)  # the handlers run between this and the next poll
            if self._pidfd in ready:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self._supervisor, 0)[1])
        return self._status


@contextlib.contextmanager
def _in_main_thread_only() -> Iterator[None]:
    """Threads started in this block get no signals, so that these end the main thread's wait."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Adopt the processes that a killed supervisor leaves."""
    become_subreaper()
    try:
        yield
    finally:
        become_subreaper(False)


def _assign(life_write: int, assignment: Assignment) -> None:
    """Let the supervisor begin."""
    with contextlib.suppress(BrokenPipeError):
        os.write(life_write, json.dumps(dataclasses.asdict(assignment)).encode() + b"\n")


def _outcome(status: int) -> int:
    """The exit code for the shell, from the supervisor's. If it was killed, its processes are ended."""
    if status >= 0:
        return status
    end_children(STRAYS_IN_A_HURRY_S)
    name = signal.Signals(-status).name
    sys.stderr.write(f"unisono run: the launcher was killed by {name}; the ranks are gone\n")
    return 128 - status


def _attend(
    job: Job,
    base: Mapping[str, str],
    life_write: int,
    messages: IO[str],
    master_port: int,
    signals: SignalForwarder,
) -> int:
    """Meet the other nodes, run the job here to its end, and agree with the others on how it ended.

    Raises:
        LaunchError, StoreError, AuthenticationError: the rendezvous of the nodes failed.
        Interrupted: a signal ended the wait.
    """
    from unisono.commands.launch.nodes import NodeRendezvous, SupervisorMessages
    from unisono.engine.store import TCPStore

    signals.direct = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(_adopting_orphans())
        if job.node_rank == 0:
            with _in_main_thread_only():
                stack.enter_context(contextlib.closing(_serve(job, base)))
        options: dict[str, Any] = {"timeout_s": MEET_S, "token": job.token, "tls": job.tls}
        store = stack.enter_context(TCPStore(job.master_addr, job.master_port, **options))
        nodes = NodeRendezvous(job, store)
        stack.callback(nodes.close)
        assignment = nodes.meet(master_port)
        signals.direct = False
        _assign(life_write, assignment)
        with _in_main_thread_only():
            nodes.watch(lambda: _tell(life_write))
            reader = SupervisorMessages(messages, nodes)
        status = _outcome(signals.wait())
        signals.direct = True
        if job.elastic:  # the other nodes go on, or have gone before
            if status and nodes.end is not None and not reader.failure:
                _say(f"unisono run: the job was ended: {nodes.end.text}")
            _say(reader.report)
            return status
        reader.thread.join(2.0)
        if status and not reader.reported:  # it could not report how it ended
            nodes.announce("the launcher was killed", status)
        ends = nodes.report_end(reader.failure, reader.stopped)
        if job.node_rank == 0:
            nodes.await_reports(1.5 if reader.stopped else GOODBYE_S)
        return _conclude(job, nodes, ends, reader, status)


def _serve(job: Job, base: Mapping[str, str]) -> StoreServer:
    """The store of all nodes, on the master's address; if that is a router's, on this host's own address."""
    from unisono.engine.bootstrap.interfaces import local_address
    from unisono.engine.store import StoreServer

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


def _conclude(
    job: Job, nodes: NodeRendezvous, ends: list[NodeExit], messages: SupervisorMessages, status: int
) -> int:
    """Print which rank of all nodes failed first, and return its exit code."""
    end = nodes.end
    if messages.stopped:
        return status
    stopped = [one for one in ends if one.status]
    if stopped or (end is not None and end.status > 128 and not any(one.failure for one in ends)):
        where = (
            f"node {stopped[0].node} (host {stopped[0].host})"
            if stopped
            else f"node {end.node if end else 0}"
        )
        _say("unisono run: the job was interrupted on " + where)
        return stopped[0].status if stopped else (end.status if end else 1)
    failed = [one for one in ends if one.failure is not None]
    if not failed:
        if end is not None:
            _say(f"unisono run: the job was ended: {end.text}")
            return status or end.status
        return status
    first = min(
        failed,
        key=lambda one: (one.failure.consequence, one.failure.failed_at) if one.failure else (True, 0.0),
    )
    assert first.failure is not None
    if first.node == job.node_rank:
        _say(messages.report)
    else:
        _say(foreign_report(first.failure, first.node, first.host))
        _say(messages.follow)
    if end is not None and first.failure.consequence:
        _say(f"unisono run: the job was ended: {end.text}")
    return exit_status(first.failure)


def _say(text: str) -> None:
    if text:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
