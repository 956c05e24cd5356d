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
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType

from unisono.errors import LaunchError, message
from unisono.launch.job import Job
from unisono.launch.process import become_subreaper, end_children
from unisono.launch.supervisor import FORWARDED, STRAYS_IN_A_HURRY_S, Supervisor

__all__ = ["run"]


def run(job: Job, base: Mapping[str, str]) -> int:
    """Run `job` to its end and return the exit code: that of the first failure, 128 + n for signal n.

    Forks: call it from a process with one thread.

    Args:
        base: the environment the ranks start from.
    Raises:
        LaunchError: MASTER_PORT is taken, or the store cannot listen. Nothing was started then.
    """
    _open_standard_descriptors()
    with _reserved_port(job.master_port) as master_port:
        life_read, life_write = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # started without one (`>&-`)
                stream.flush()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        supervisor = os.fork()
        if supervisor == 0:
            os.close(life_write)
            os._exit(_supervise(job, base, life_read, master_port))
        os.close(life_read)
        with _signals_forwarded_to(supervisor):
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            try:
                return _attend(supervisor, life_write)
            finally:
                os.close(life_write)  # a supervisor that still waits for the store's address ends by this
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(supervisor, 0)


def _open_standard_descriptors() -> None:
    """Open /dev/null where 0, 1 or 2 is closed, before something else is opened there and gets our output."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _supervise(job: Job, base: Mapping[str, str], life_read: int, master_port: int) -> int:
    """The life of the supervisor process. The first line from the front is the store's address."""
    try:
        os.setsid()
        supervisor = Supervisor(job, base, life_read)
        store = os.read(life_read, 256).decode().strip()
        return supervisor.run(store, master_port) if store else 1
    except BaseException:  # noqa: BLE001 - nobody is above us in this process: say it, then leave
        traceback.print_exc()
        return 1


def _attend(supervisor: int, life_write: int) -> int:
    """Host the store until the supervisor has ended."""
    from unisono.store import StoreServer

    become_subreaper()
    try:
        with contextlib.closing(StoreServer("127.0.0.1", 0)) as server:
            with contextlib.suppress(BrokenPipeError):
                os.write(life_write, f"127.0.0.1:{server.port}\n".encode())
            status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
        if status < 0:
            end_children(STRAYS_IN_A_HURRY_S)
    finally:
        become_subreaper(False)
    if status >= 0:
        return status
    name = signal.Signals(-status).name
    sys.stderr.write(f"unisono run: the launcher was killed by {name}; the ranks are gone\n")
    return 128 - status


@contextlib.contextmanager
def _signals_forwarded_to(supervisor: int) -> Iterator[None]:
    """Pass each signal on to the supervisor, which knows what it means.

    What was ignored when we were started (nohup, `&` in a script) stays ignored.
    """

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, number)
            if number == signal.SIGTSTP:
                os.kill(os.getpid(), signal.SIGSTOP)  # stop as asked; this returns when we are continued
                os.kill(supervisor, signal.SIGCONT)

    numbers = [n for n in FORWARDED if n != signal.SIGCONT and signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
