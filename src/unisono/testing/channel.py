"""Messages between pytest and its ranks: JSON, with descriptors, over a pair of Unix sockets."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from typing import Any

_LENGTH_NBYTES = 4
_MOST_DESCRIPTORS = 8


class Channel:
    """One end. Both ends are processes of this machine and user, which trust each other."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.descriptors: list[int] = []
        """Those that came with the last message; the receiver closes them."""

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message. What JSON does not know is sent as its repr.

        Raises:
            OSError: the other end is closed, or does not take it in time.
        """
        data = json.dumps(message, default=repr).encode()
        socket.send_fds(self._socket, [len(data).to_bytes(_LENGTH_NBYTES, "little")], descriptors)
        self._socket.sendall(data)

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if the other end is closed, or stops in the middle of one."""
        with contextlib.suppress(OSError):
            head, self.descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH_NBYTES, _MOST_DESCRIPTORS)
            if head:
                length = int.from_bytes(head + self._read(_LENGTH_NBYTES - len(head)), "little")
                message: dict[str, Any] = json.loads(self._read(length))
                return message
        return None

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = self._socket.recv(min(length - len(data), 1 << 20))
            if not part:
                raise ConnectionError("closed in the middle of a message")
            data += part
        return bytes(data)


def pair(timeout_s: float | None = None) -> tuple[Channel, socket.socket]:
    """A channel, with its other end, which goes to another process."""
    ours, theirs = socket.socketpair()
    ours.settimeout(timeout_s)
    return Channel(ours), theirs
