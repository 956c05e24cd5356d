"""Where newcomers meet a group: a store that the first rank of each host serves.

addresses      of all such stores: a newcomer reads it at once, and goes to another one if its own ends
joiners        a counter; joiner/3 is the peer info of a newcomer, client/3 its name as a client of this
               store, answer/3 the `Invitation` that it gets
admit/...      where the ranks of the next group meet, as in bootstrap/
"""

from __future__ import annotations

import msgspec

from unisono.engine.bootstrap.peer_info import PeerVersion
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
    """What each rank knows before an admission.

    Attributes:
        address, keys, waiting: its own store, if it serves one; where the next group may meet in it; who
            waits there.
        least, most: how few and how many ranks the group may have for this rank; 0: any number.
    """

    address: tuple[str, int] | None = None
    keys: str = ""
    waiting: tuple[int, ...] = ()
    least: int = 0
    most: int = 0


_decode_build = msgspec.msgpack.Decoder(PeerVersion).decode


class Listener:
    """The store that this rank serves for newcomers."""

    def __init__(self, host: str, port: int, settings: env.Settings, layout: int) -> None:
        from unisono.engine.store import StoreServer  # a rank that does not listen needs no server

        self._server = StoreServer(host, port, token=settings.token, tls=settings.tls)
        self.address = self._server.host, self._server.port
        self._layout = layout
        self._settings = settings
        try:
            self._store = self.connect(STORE_S)
        except BaseException:
            self._server.close()
            raise
        self._counted = 0
        self._open: list[int] = []  # newcomers without an answer
        self._answered: list[int] = []

    def connect(self, timeout_s: float) -> TCPStore:
        """A client of it."""
        settings = self._settings
        return TCPStore(*self.address, token=settings.token, tls=settings.tls, timeout_s=timeout_s)

    def publish(self, addresses: list[str]) -> None:
        """Tell newcomers where else they may ask."""
        self._store.set("addresses", msgspec.msgpack.encode(addresses))

    def waiting(self) -> tuple[int, ...]:
        """The numbers of those that wait. A newcomer of another build is refused here."""
        came = self._store.add("joiners", 0)
        self._open += range(self._counted + 1, came + 1)
        self._counted = came
        self._forget_the_gone()
        numbers = []
        for number in list(self._open):
            info = self._store.peek(f"joiner/{number}")
            if info is None:
                continue
            if self.gone(number) or self._store.check([f"answer/{number}"]):
                self._close(number)
            elif refused := self._refusal(info):
                self.answer(number, Invitation(refused=refused))
            else:
                numbers.append(number)
        return tuple(numbers)

    def gone(self, number: int) -> bool:
        """Whether a newcomer that waited has ended, or has been taken in."""
        client = self._store.peek(f"client/{number}")
        return client is None or not self._server.has(client.decode())

    def _forget_the_gone(self) -> None:
        for number in list(self._answered):
            if self.gone(number):
                self._answered.remove(number)
                for key in ("joiner", "client", "answer"):
                    self._store.delete_key(f"{key}/{number}")

    def _close(self, number: int) -> None:
        self._open.remove(number)
        self._answered.append(number)

    def _refusal(self, info: bytes) -> str:
        try:
            build = _decode_build(info)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            build = PeerVersion(0, 0, "unknown")
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
        self._close(number)
        self._store.set(f"answer/{number}", msgspec.msgpack.encode(invitation))

    def close(self) -> None:
        """Stop listening."""
        self._store.close()
        self._server.close()
