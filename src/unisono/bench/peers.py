"""The libraries that Unisono is compared with, and what to install when one is missing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from unisono.bench.mpi_side import MPIS, Mpi, MpiSide
from unisono.bench.side import Side

__all__ = ["PEERS", "Peer", "choose_peers", "choose_side", "torch_missing"]

INSTALL_TORCH = "pip install torch"


@dataclass(frozen=True)
class Peer:
    """One peer: the module that must be importable in its workers (None: nothing to install)."""

    name: str
    what: str
    module: str | None = None
    install: str = ""
    mpi: Mpi | None = None

    def side(self, size: int) -> Side:
        """Its `size` processes, not started yet."""
        return (Side if self.mpi is None else MpiSide)(self.name, size)

    def missing(self) -> str | None:
        """A line that says what to install, None when the peer can run."""
        if self.mpi is not None:
            if self.mpi.site() is not None:
                return None
            return f"the peer {self.name} needs the environment {self.mpi.home.name}: make bench-peers"
        if self.module is None or find_spec(self.module) is not None:
            return None
        return f"the peer {self.name} needs the package {self.module}: {self.install}"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("gloo", "torch.distributed over Gloo", "torch", INSTALL_TORCH),
        Peer("memcpy", "one memcpy of the same size per rank, all at once"),
        Peer(
            "limit",
            "the machine's limit: the bytes that the operation has to read and write, all ranks at once",
        ),
        Peer("shared", "Unisono with arrays of unisono.empty"),
        *(Peer(mpi.name, mpi.what, mpi=mpi) for mpi in MPIS.values()),
    )
}


def choose_peers(names: str) -> list[Peer]:
    """Peers from a comma list such as "gloo,memcpy"; "" is none.

    Raises:
        ValueError: an unknown peer, or one whose package is missing.
    """
    chosen = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        peer = PEERS.get(name)
        if peer is None:
            raise ValueError(f"unknown peer {name!r}: choose from {', '.join(PEERS)}")
        if (missing := peer.missing()) is not None:
            raise ValueError(missing)
        if peer not in chosen:
            chosen.append(peer)
    return chosen


def torch_missing() -> str | None:
    """A line that says how to get torch, None when it is there."""
    return None if find_spec("torch") else f"--interface torch needs the package torch: {INSTALL_TORCH}"


def choose_side(interface: str) -> str:
    """The name of Unisono's own contender for an interface.

    Raises:
        ValueError: the interface is torch, and torch is missing.
    """
    if interface == "torch" and (missing := torch_missing()) is not None:
        raise ValueError(missing)
    return "unisono-torch" if interface == "torch" else "unisono"
