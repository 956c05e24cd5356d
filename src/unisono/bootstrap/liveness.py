"""The processes of a host whose ranks are making a group: whoever waits for one of them hears of a death."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable

from unisono.bootstrap.membership import Card, Roster, born
from unisono.errors import RendezvousError, message

__all__ = ["Lives"]

END_S = 1.0  # from the end of a dying process's connections to its own


class Lives:
    """Watches the mates of a rank that are other processes.

    Raises:
        RendezvousError: one of them has ended already.  OSError: one cannot be watched.
    """

    def __init__(self, roster: Roster, mates: list[int]) -> None:
        self._size = len(roster.cards)
        self._cards: dict[int, Card] = {}  # by descriptor
        try:
            for mate in mates:
                if roster.cards[mate].pid != os.getpid():
                    self._watch(roster.cards[mate])
        except BaseException:
            self.close()
            raise

    def _watch(self, card: Card) -> None:
        try:
            self._cards[os.pidfd_open(card.pid)] = card
            if born(card.pid) == card.born:
                return
        except (ProcessLookupError, FileNotFoundError):
            pass
        except OSError as error:  # which says nothing of that rank
            text = f"cannot watch the process of rank {card.rank} (pid {card.pid}): {error.strerror}"
            raise OSError(error.errno, text) from error
        raise RendezvousError(_ended(card))

    def wait_for(self, sock: socket.socket, deadline: float) -> None:
        """Wait until there is something to read, or nothing more will come.

        Raises:
            RendezvousError: a process has ended.  TimeoutError: the deadline came first.
        """
        poll = select.poll()
        for fd in (sock.fileno(), *self._cards):
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(1000 * max(0.0, deadline - time.monotonic()))]
        if not ready:
            raise TimeoutError
        if sock.fileno() not in ready:
            raise RendezvousError(_ended(self._cards[ready[0]]))

    def check(self, joined: Callable[[int], bool] = lambda rank: False) -> None:  # noqa: ARG005
        """Raise RendezvousError when one of them has ended; but for those that had `joined` the group, which
        is told of that as of any later end.
        """
        poll = select.poll()
        for fd in self._cards:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0):
            if not joined(self._cards[fd].rank):
                raise RendezvousError(_ended(self._cards[fd]))

    def check_end(self, rank: int) -> None:
        """Raise RendezvousError when `rank`, whose connection has ended, does so as well: a moment later."""
        for fd, card in self._cards.items():
            if card.rank == rank:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                if poll.poll(1000 * END_S):
                    raise RendezvousError(_ended(card))

    def detach(self) -> list[int]:
        """By rank: a descriptor that tells of its death, -1 where there is none; the caller's from now on."""
        cards, self._cards = self._cards, {}
        fds = {card.rank: fd for fd, card in cards.items()}
        return [fds.get(rank, -1) for rank in range(self._size)]

    def close(self) -> None:
        """Watch no more."""
        for fd in self._cards:
            os.close(fd)
        self._cards = {}


def _ended(card: Card) -> str:
    return message(
        f"rank {card.rank} (pid {card.pid}) ended while the group was being made",
        remedy=f"Look at rank {card.rank}'s output.",
    )
