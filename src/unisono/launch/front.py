"""The process the user started: it owns the signals and the store, and watches the supervisor.

Two processes, so that no single kill leaves anything behind:

    shell ── front ── supervisor ── rank 0, rank 1, ... ── their data loader workers, ...

    the front dies       the supervisor sees its end of the life pipe close, and ends everything
    the supervisor dies  the ranks get SIGKILL (PR_SET_PDEATHSIG),
                         their orphans become children of the front, which ends them

The supervisor and every rank live in sessions of their own. A Ctrl-C of the terminal therefore reaches
the front only, which passes it on once. The store's threads live here: the supervisor stays alone
with one thread while it forks, and a busy store does not delay it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import IO

from unisono.errors import LaunchError, message
from unisono.launch.attend import (
    Interrupted,
    Signals,
    adopting_orphans,
    assign,
    attend,
    in_main_thread_only,
    outcome,
)
from unisono.launch.job import Assignment, Job
from unisono.launch.supervisor import FORWARDED, Supervisor

__all__ = ["run"]


def run(job: Job, base: Mapping[str, str]) -> int:
    """Run `job` to its end and return the exit code: that of the first failure, 128 + n for signal n.

    Forks: call it from a process with one thread.

    Args:
        base: the environment the ranks start from.
    Raises:
        LaunchError: the system is too old, MASTER_PORT is taken, the store cannot listen, or the nodes did
            not come together. Nothing was started then.
    """
    _open_standard_descriptors()
    _check_pidfds()
    with _reserved_port(job.master_port if job.nnodes == 1 else 0) as master_port:
        life_read, life_write = os.pipe()
        news_read, news_write = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # started without one (`>&-`)
                stream.flush()
        on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would lose the exit code
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        supervisor = os.fork()
        if supervisor == 0:
            os.close(life_write)
            os.close(news_read)
            os._exit(_supervise(job, base, life_read, news_write if job.nnodes > 1 else -1))
        os.close(life_read)
        os.close(news_write)
        signals = Signals(supervisor)
        with signals.forwarded(), os.fdopen(news_read) as news:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)
                if job.nnodes == 1:
                    return _attend_alone(job, life_write, master_port, signals)
                return _attend_all(job, base, life_write, news, master_port, signals)
            except Interrupted as interrupted:
                return 128 + interrupted.number
            finally:
                os.close(life_write)  # a supervisor that still waits for its assignment ends by this
                signals.wait()
                if on_child is not None:  # installed by C code: Python cannot put it back
                    signal.signal(signal.SIGCHLD, on_child)


def _open_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed, before something else is opened there and gets our output."""
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
    """The life of the supervisor process. The first line from the front is the assignment."""
    try:
        os.setsid()
        supervisor = Supervisor(job, base, life_read, news_write)
        line, _, more = os.read(life_read, 4096).partition(b"\n")  # `more`: the end is there already
        return supervisor.run(Assignment(**json.loads(line)), ended=bool(more)) if line else 1
    except BaseException:  # noqa: BLE001 - nobody is above us in this process: say it, then leave
        traceback.print_exc()
        return 1


def _attend_alone(job: Job, life_write: int, master_port: int, signals: Signals) -> int:
    """Host the store until the supervisor has ended."""
    from unisono.store import StoreServer

    with adopting_orphans():
        with in_main_thread_only():
            server = StoreServer("127.0.0.1", 0, token=job.token, tls=job.tls)
        with contextlib.closing(server):
            store = f"127.0.0.1:{server.port}"
            assign(life_write, Assignment(store, master_port, 0, job.world_size))
            return outcome(signals.wait())


def _attend_all(
    job: Job, base: Mapping[str, str], life_write: int, news: IO[str], master_port: int, signals: Signals
) -> int:
    """The same with other nodes; when that has ended, in whatever way, a signal raises nothing any more."""
    try:
        return attend(job, base, life_write, news, master_port, signals)
    finally:
        signals.direct = False


@contextlib.contextmanager
def _reserved_port(port: int) -> Iterator[int]:
    """Keep `port` (0: a free one) for the ranks: bound, never listening.

    Linux gives it to nobody else by chance, and still lets a rank listen there that sets
    SO_REUSEADDR, as torch's TCPStore and every asyncio server do.
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
