"""The processes of a job: starting one that cannot outlive the launcher, publishing how it ended, ending all.

It relies on three properties of the kernel:

- PR_SET_PDEATHSIG: a rank gets SIGKILL when its parent dies, whatever the parent died of.
- PR_SET_CHILD_SUBREAPER: orphans below us become our children, also daemonized ones.
- A process number is not given away again before its parent has reaped it, so signalling
  our own un-reaped children never reaches another process.

The status board says which rank runs, and how one ended, in memory that every rank can read. It is a memfd of
16-byte records, one per local rank, each four aligned 32-bit integers:

    pid | state (0 not started, 1 running, 2 exited, 3 ended by a signal) | code | reserved

Only the launcher writes. `state` is stored last, so a reader of 2 or 3 reads the right code.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from unisono.engine.base.timeouts import LONGEST_S

NOT_STARTED, RUNNING, EXITED, SIGNALED = range(4)

_FIELDS = 4
_RECORD_NBYTES = 4 * _FIELDS
# Values of <linux/fcntl.h>; the fcntl module does not name them on every Python.
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4


AFTER_FAILURE_S = 3.0  # from SIGTERM to SIGKILL
AFTER_SIGNAL_S = 1.8  # time for ranks to end by themselves after Ctrl-C or SIGTERM
AFTER_INTERRUPT_S = 0.3  # from SIGTERM to SIGKILL after Ctrl-C; the job has to end within 3 s
STRAYS_S = 0.5  # time for the ranks' remaining children to end by themselves
STRAYS_IN_A_HURRY_S = 0.3  # the same after Ctrl-C: a resource tracker first removes shared memory
KILL_AGAIN = [(0.02, signal.SIGKILL)] * 250  # killing a process makes its children ours
KILL_ON_S = 0.5  # the interval after that: a slow death may give us more children
TELL_S = 10.0  # a process that SIGKILL has not ended by then is reported,
LEAVE_S = 60.0  # and by then left alone: it waits in the kernel, or belongs to another user
RELAY = "unisono.engine.bootstrap.tls_relay"
RELAY_S = 8  # times the timeout for silent hosts: a relay itself gives up earlier, see tls_relay.LINGER
TRACKER_S = 4.0  # time for a resource tracker to remove shared memory before it is killed

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper(enable: bool = True) -> bool:
    """Adopt every orphaned descendant of this process from now on; enable=False: no longer.

    Returns: whether the system does so; a sandbox or an emulator may not.
    """
    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(enable), 0, 0, 0) == 0)


def start(
    command: Sequence[str], environ: Mapping[str, str], *, stdin: int | None, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own. It is killed when the calling thread ends.

    The terminal sends no signals to another session: the process gets each signal once, from the launcher.
    """
    return subprocess.Popen(
        command,
        env=environ,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=_die_with_parent(),  # noqa: PLW1509 - there are no threads, see there
    )


def _die_with_parent() -> Callable[[], None]:
    """Make the function that runs between fork and exec.

    A preexec_fn is safe here: the caller has one thread, so no other thread can hold a lock at the fork, and
    the function looks up nothing. A small program that makes the call and then executes the rank would cost
    the start of an interpreter per rank (15 ms each).
    """
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call above
            os._exit(1)

    return bind


def signal_rank(pid: int, number: int) -> None:
    """Signal a rank that is not reaped yet, and its process group.

    SIGKILL goes to the rank only. Its group contains multiprocessing's resource tracker, which removes the
    rank's shared memory after the rank's end; the rest of the group is ended as strays.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has changed its user
        if number == signal.SIGKILL:
            os.kill(pid, number)
        else:
            os.killpg(pid, number)


def children() -> list[int]:
    """Return the direct children of this process, zombies included.

    It is a snapshot: a new child may be missing. Use it to choose whom to signal; `waitid` tells whether any
    child is left.
    """
    me = os.getpid()
    try:
        with open(f"/proc/self/task/{me}/children", "rb") as listing:
            return [int(pid) for pid in listing.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if _parent_of(pid) == me]


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:
        return -1


def signal_strays(number: int, waited_s: float, spared: Collection[int] = ()) -> None:
    """Signal every child that is not `spared`, the resource trackers of multiprocessing last.

    A tracker ends by itself after it has removed its rank's shared memory. On a busy machine it may run late,
    and no other process knows the names of that memory.

    Args:
        waited_s: how long these children have had to end by themselves.
    """
    for pid in children():
        if pid in spared or (waited_s < TRACKER_S and _runs(pid, "multiprocessing.resource_tracker")):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):  # of another user (`sudo x &`)
            os.kill(pid, number)


def relays() -> list[int]:
    """The children that still deliver, over TLS, what a rank sent before its end. They end by themselves."""
    return [pid for pid in children() if _runs(pid, RELAY)]


def _runs(pid: int, module: str) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as cmdline:
            return module.encode() in cmdline.read()
    except OSError:
        return False


def end_children(patience_s: float = 0.0, give_up_s: float = 5.0) -> None:
    """SIGKILL and reap every child, then the orphans that become our children, until there is none.

    The time is bounded, because nothing ends a process in an uninterruptible wait of the kernel.

    Args:
        patience_s: time for them to end by themselves first.
        give_up_s: time for them to die; each is killed at least once.
    """
    began = time.monotonic()
    waited_s = 0.0
    while waited_s <= patience_s + give_up_s:
        waited_s = time.monotonic() - began
        if waited_s >= patience_s:
            signal_strays(signal.SIGKILL, waited_s)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


class SignalEscalation:
    """Signals that become due one after another until all processes have ended; the last one repeats.

    Each delay begins when the signal before it was sent. So the processes get their full time even if the
    launcher was stopped for a while.

    Example: Escalation((0, SIGINT), (2, SIGTERM)): SIGINT now, SIGTERM 2 s after it, then every 0.5 s.
    """

    def __init__(self, *steps: tuple[float, signal.Signals]) -> None:
        self._steps = collections.deque(steps)
        self._killed = False
        self._reported = False
        self._killing_s = 0.0  # delays that have passed since the first SIGKILL
        self.due = time.monotonic() + steps[0][0] if steps else None  # when the next is (monotonic seconds)

    @property
    def killing(self) -> bool:
        """Whether SIGKILL was sent; there is no stronger signal."""
        return self._killed

    def pop(self, now: float) -> signal.Signals | None:
        """Take the signal that is due, if one is."""
        if self.due is None or now < self.due:
            return None
        delay_s, number = self._steps.popleft()
        self._killing_s += delay_s if self._killed else 0.0
        self._killed |= number == signal.SIGKILL
        if not self._steps:
            self._steps.append((KILL_ON_S, number))
        self.due = now + self._steps[0][0]
        return number

    @property
    def in_vain(self) -> bool:
        """Leave the remaining processes alone from now on."""
        return self._killing_s >= LEAVE_S

    def to_be_reported(self) -> bool:
        """Whether SIGKILL has had no effect for so long that it should be reported. True once."""
        if self._reported or self._killing_s < TELL_S:
            return False
        self._reported = True
        return True


def ends_of_strays(killed_after_s: float | None = None) -> SignalEscalation:
    """The signals for processes that ranks left behind; the first one asks, unless they are to be killed."""
    if killed_after_s is not None:
        return SignalEscalation((killed_after_s, signal.SIGKILL), *KILL_AGAIN)
    return SignalEscalation((STRAYS_S, signal.SIGTERM), (STRAYS_S, signal.SIGKILL), *KILL_AGAIN)


def ends_of_relays(peer_timeout_s: float) -> SignalEscalation:
    """The signals for relays that have not ended by themselves."""
    patience_s = min(RELAY_S * peer_timeout_s, LONGEST_S)
    return SignalEscalation((patience_s, signal.SIGTERM), (STRAYS_S, signal.SIGKILL), *KILL_AGAIN)


def undying(pid: int) -> str:
    """Name a process and its state, "pid 4121 (python3, state D)"; D is a wait in the kernel."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            head, _, rest = stat.read().decode(errors="replace").rpartition(")")
    except OSError:
        return f"pid {pid}"
    return f"pid {pid} ({head.partition('(')[2]}, state {rest.split()[0]})"


class StatusBoard:
    """The launcher's side of the board.

    `fd` is a read-only descriptor made for the ranks. `name` contains it and its inode, by which a rank
    recognises the board.
    """

    def __init__(self, size: int) -> None:
        owned = os.memfd_create("unisono-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(owned, size * _RECORD_NBYTES)
            fcntl.fcntl(owned, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            self._map = mmap.mmap(owned, size * _RECORD_NBYTES)
            self.fd = os.open(f"/proc/self/fd/{owned}", os.O_RDONLY | os.O_CLOEXEC)
            self.name = f"{self.fd}:{os.fstat(self.fd).st_ino}"
        finally:
            os.close(owned)
        self._fields = memoryview(self._map).cast("i")

    def started(self, rank: int, pid: int) -> None:
        """Record that `rank` runs as process `pid`."""
        self._fields[rank * _FIELDS + 1] = NOT_STARTED  # of a rank that replaces another one
        self._fields[rank * _FIELDS] = pid
        self._fields[rank * _FIELDS + 1] = RUNNING

    def ended(self, rank: int, *, code: int, signaled: bool) -> None:
        """Record the exit code of `rank`, or the number of the signal that ended it."""
        self._fields[rank * _FIELDS + 2] = code
        self._fields[rank * _FIELDS + 1] = SIGNALED if signaled else EXITED

    def close(self) -> None:
        """Release the memory; the ranks keep their mappings."""
        self._fields.release()
        self._map.close()
        os.close(self.fd)
