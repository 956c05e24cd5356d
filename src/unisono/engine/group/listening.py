"""Where newcomers meet a group: a store that the first rank of each host serves.

addresses      of all such stores: a newcomer reads it at once, and goes to another one if its own ends
joiners        a counter; joiner/3 is the card of a newcomer, answer/3 the `Invitation` that it gets
admit/...      where the ranks of the next group meet, as in bootstrap/
"""

from __future__ import annotations

import warnings

import msgspec

from unisono.engine.bootstrap.membership import Build
from unisono.engine.environment import env
from unisono.engine.store import TCPStore
from unisono.errors import message

__all__ = ["STORE_S", "Invitation", "Listener", "Report"]

STORE_S = 5.0
"""For one call to a store of a member, which answers at once or has ended."""


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """What a newcomer is told: where the next group meets, and as which rank of it. refused: or why not."""

    host: str = ""
    port: int = 0
    keys: str = ""
    rank: int = 0
    size: int = 0
    generation: int = 0
    name: str = ""
    timeout_s: float = 0.0
    reproducible: bool = False
    elastic: bool = False
    members: tuple[int, ...] = ()
    refused: str = ""


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What each rank knows before an admission: its own store, if it serves one, and who waits there."""

    address: tuple[str, int] | None = None
    keys: str = ""
    waiting: tuple[int, ...] = ()


_decode_build = msgspec.msgpack.Decoder(Build).decode


class Listener:
    """The store that this rank serves for newcomers."""

    def __init__(self, host: str, port: int, settings: env.Settings, layout: int) -> None:
        from unisono.engine.store import StoreServer  # a rank that does not listen needs no server

        self._server = StoreServer(host, port, token=settings.token, tls=settings.tls)
        self.address = self._server.host, self._server.port
        self._layout = layout
        self._settings = settings
        self._store = self.connect(STORE_S)
        self._done = 0

    def connect(self, timeout_s: float) -> TCPStore:
        """A client of it."""
        settings = self._settings
        return TCPStore(*self.address, token=settings.token, tls=settings.tls, timeout_s=timeout_s)

    def publish(self, addresses: list[str]) -> None:
        """Tell newcomers where else they may ask."""
        self._store.set("addresses", msgspec.msgpack.encode(addresses))

    def waiting(self) -> tuple[int, ...]:
        """The numbers of those that wait. A newcomer of another build is refused here."""
        numbers = []
        for number in range(self._done + 1, self._store.add("joiners", 0) + 1):
            card = self._store.peek(f"joiner/{number}")
            if card is None:
                continue
            if refused := self._refusal(card):
                warnings.warn(refused, stacklevel=2)
                self.answer(number, Invitation(refused=refused))
            elif not self._store.check([f"answer/{number}"]):
                numbers.append(number)
        return tuple(numbers)

    def _refusal(self, card: bytes) -> str:
        try:
            build = _decode_build(card)
        except msgspec.DecodeError:
            build = Build(0, 0, "unknown")
        if build.layout == self._layout:
            return ""
        return message(
            f"a newcomer of host {build.name} runs another build of Unisono than the group",
            observed=f"version {build.layout or 'unknown'}",
            expected=str(self._layout),
            remedy="Install the same build on all hosts.",
        )

    def answer(self, number: int, invitation: Invitation) -> None:
        """Invite a newcomer, or refuse it."""
        self._store.set(f"answer/{number}", msgspec.msgpack.encode(invitation))

    def close(self) -> None:
        """Stop listening."""
        self._store.close()
        self._server.close()
