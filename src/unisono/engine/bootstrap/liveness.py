"""Watches the processes of one host while their ranks make a group, so that a death ends every wait."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import time
from collections.abc import Callable

from unisono.engine.bootstrap.peer_info import Membership, PeerInfo, process_start_time
from unisono.errors import RendezvousError, message

# Values of <linux/fcntl.h>, as in commands/launch/process.py.
_F_GET_SEALS, _SEALS = 1034, 0x2 | 0x4

VERIFIED = 64  # ranks whose start time a rank checks: the ones after it; so many others check each rank
END_S = 1.0  # from the end of a dying process's connections to the end of the process


class LivenessMonitor:
    """Watches the other processes among the ranks of this host.

    Raises:
        RendezvousError: one of them has ended already.  OSError: one cannot be watched.
    """

    def __init__(self, membership: Membership, local_ranks: list[int], rank: int) -> None:
        self._size = len(membership.peers)
        self._infos: dict[int, PeerInfo] = {}  # by descriptor
        try:
            own = local_ranks.index(rank)
            for place, other in enumerate([*local_ranks[own + 1 :], *local_ranks[:own]]):
                if membership.peers[other].pid != os.getpid():
                    self._watch(membership.peers[other], verified=place < VERIFIED)
        except BaseException:
            self.close()
            raise

    def _watch(self, info: PeerInfo, *, verified: bool) -> None:
        try:
            self._infos[os.pidfd_open(info.pid)] = info
            if not verified or process_start_time(info.pid) == info.start_ticks:
                return
        except (ProcessLookupError, FileNotFoundError):
            pass
        except OSError as error:  # the error does not name the rank
            text = f"cannot watch the process of rank {info.rank} (pid {info.pid}): {error.strerror}"
            raise OSError(error.errno, text) from error
        raise RendezvousError(_exit_text(info))

    def wait_for(self, sock: socket.socket, deadline: float, only: int | None = None) -> None:
        """Wait until the socket can be read, or has ended.

        Args:
            only: the rank whose end ends the wait; None: any.
        Raises:
            RendezvousError: a process has ended.  TimeoutError: the deadline has passed.
        """
        poll = select.poll()
        watched = [fd for fd, info in self._infos.items() if only in (None, info.rank)]
        for fd in (sock.fileno(), *watched):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(1000 * max(0.0, deadline - time.monotonic()))]
        if not ready:
            raise TimeoutError
        if sock.fileno() not in ready:
            raise RendezvousError(_exit_text(self._infos[ready[0]]))

    def check(self, joined: Callable[[int], bool] = lambda rank: False) -> None:  # noqa: ARG005
        """Raise RendezvousError when one of them has ended.

        Ranks that have `joined` the group are excluded: the engine reports their end.
        """
        poll = select.poll()
        for fd in self._infos:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0):
            if not joined(self._infos[fd].rank):
                raise RendezvousError(_exit_text(self._infos[fd]))

    def check_end(self, rank: int) -> None:
        """Raise RendezvousError if the process of `rank`, whose connection has ended, ends within END_S."""
        for fd, info in self._infos.items():
            if info.rank == rank:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                if poll.poll(1000 * END_S):
                    raise RendezvousError(_exit_text(info))

    def detach(self) -> list[int]:
        """The pidfds by rank, -1 where it is not watched. The caller closes them."""
        peers, self._infos = self._infos, {}
        fds = {info.rank: fd for fd, info in peers.items()}
        return [fds.get(rank, -1) for rank in range(self._size)]

    def close(self) -> None:
        """Stop watching."""
        for fd in self._infos:
            os.close(fd)
        self._infos = {}


def board(named: tuple[int, int] | None) -> int:
    """The descriptor of the launcher's status board; -1 without one.

    A child of a rank inherits UNISONO_STATUS_FD, and not the board: another file may have its number. The
    board has the inode that the launcher named. It is sealed, so it never becomes shorter than its mapping.
    """
    if named is None:
        return -1
    fd, inode = named
    try:
        sealed = fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS == _SEALS
        return fd if sealed and os.fstat(fd).st_ino == inode else -1
    except OSError:  # it is closed, or a file that cannot be sealed
        return -1


def _exit_text(info: PeerInfo) -> str:
    return message(
        f"rank {info.rank} (pid {info.pid}) ended while the group was being made",
        remedy=f"Look at rank {info.rank}'s output.",
    )
