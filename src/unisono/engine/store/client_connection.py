"""One connection to the store's server."""

from __future__ import annotations

import selectors
import socket
from collections import deque

from unisono.engine.store import wire
from unisono.engine.store.authenticator import ClientHandshake
from unisono.engine.store.operations import Op

__all__ = ["ClientConnection"]


class ClientConnection:
    """One connection: its received bytes, the keys it waits for, and the bytes still to be sent."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.reader = wire.FrameReader(wire.HELLO_LIMIT)
        self.caller = ClientHandshake()
        self.deadline: float | None = deadline
        self.parked: Op | None = None
        self.absent: set[str] = set()
        self.out: deque[memoryview] = deque()
        self.events = selectors.EVENT_READ
        self.last = False  # close when `out` is sent
        self.secure_next = False  # start TLS when `out` is sent

    @property
    def client(self) -> str:
        """Its name after authentication; empty before."""
        return self.caller.name
