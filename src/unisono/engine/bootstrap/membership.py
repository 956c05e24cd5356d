"""The membership of a group: its ranks, and which of them share a host.

Every rank puts its card into the store. Rank 0 gathers the cards and publishes the membership; all ranks read
it. Two ranks are on one host when they can map the same memory. They then have one kernel, one user, one
network namespace (descriptors are passed through it) and one process namespace (deaths are seen in it).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_

import msgspec

from unisono import _native
from unisono.engine.bootstrap.failures import GRACE_S, await_key
from unisono.engine.costs.machine import DEFAULTS, Calibration
from unisono.engine.store import Store
from unisono.errors import RendezvousError, StoreTimeout, message
from unisono.plans import ALGORITHMS

_NONCE_BYTES = 32


class Build(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a card in all versions of Unisono; a rank of another version can read them.

    Attributes:
        layout: the version of shared memory, frames and algorithms; see `version`.
        name: of its host.
    """

    layout: int
    rank: int
    name: str


class Card(Build, frozen=True, array_like=True):
    """What a rank publishes about itself.

    Attributes:
        born: start time of the process in clock ticks, so that a reused pid is recognised.
        network: equal for ranks that reach each other over loopback.
        home: equal for ranks that share memory.
        landmark: the address that ranks of this host read to test access to its memory; 0: no test.
        cores: the cores on which it may run, as a hexadecimal bit mask.
    """

    pid: int
    born: int
    kernel: str
    network: str
    home: str
    landmark: int
    cores: str


class Membership(msgspec.Struct, frozen=True, array_like=True):
    """All cards by rank, and the values that must be equal on all ranks.

    Attributes:
        nonce: a random number of this group; only clients of the store can read it.
        staging_bytes: staging memory per rank, from rank 0.
        machine: the calibration by which all ranks choose algorithms, from rank 0.
    """

    cards: list[Card]
    nonce: bytes
    staging_bytes: int
    machine: Calibration

    def local_ranks(self, rank: int) -> list[int]:
        """The ranks of the host of `rank`, itself included, in order."""
        return [card.rank for card in self.cards if card.home == self.cards[rank].home]

    def on_one_host(self) -> bool:
        """Whether all ranks share memory."""
        return len({card.home for card in self.cards}) == 1

    def in_one_network(self) -> bool:
        """Whether every rank reaches every other one over loopback."""
        return len({card.network for card in self.cards}) == 1

    def cores(self, rank: int) -> int:
        """How many cores the ranks of the host of `rank` have together; all of them compute the same number.

        Hosts that share a machine divide its cores by their ranks. If some ranks have fewer cores each than
        others, the lower number counts for all.

        Example: of four ranks three are bound to core 0, the fourth to core 1 -> 1.
        """
        masks = [int(card.cores, 16) for card in self.cards if card.kernel == self.cards[rank].kernel]
        local_ranks = len(self.local_ranks(rank))
        bound = {
            places: sum(mask | places == places for mask in masks) for places in {*masks, reduce(or_, masks)}
        }
        return max(1, min(places.bit_count() * local_ranks // ranks for places, ranks in bound.items()))

    def names(self) -> tuple[str, ...]:
        """The name of every rank's host; hosts with equal names get a number."""
        seen: dict[str, list[str]] = {}
        names = []
        for card in self.cards:
            homes = seen.setdefault(card.name, [])
            if card.home not in homes:
                homes.append(card.home)
            number = homes.index(card.home)
            names.append(card.name if number == 0 else f"{card.name}#{number + 1}")
        return tuple(names)


_decode_build = msgspec.msgpack.Decoder(Build).decode
_decode_card = msgspec.msgpack.Decoder(Card).decode
_decode_membership = msgspec.msgpack.Decoder(str | Membership).decode


def write_card(rank: int, ranks_per_host: int, lending: bool = True) -> Card:
    """This process's card. At most `ranks_per_host` successive ranks share memory; 0: as many as possible.

    `lending`: other ranks may read this process's memory, where the system allows it.
    """
    kernel = _kernel()
    network = f"{kernel} {os.stat('/proc/self/ns/net').st_ino}"
    home = f"{network} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    if ranks_per_host:
        home += f" {rank // ranks_per_host}"
    landmark = _native.landmark() if lending else 0
    cores = f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"
    name, pid = os.uname().nodename, os.getpid()
    return Card(version(ALGORITHMS), rank, name, pid, born(pid), kernel, network, home, landmark, cores)


def version(algorithms: Mapping[str, Iterable[str]]) -> int:
    """The number that must be equal on all ranks: of the engine, and of these algorithms by collective.

    It includes the catalogue because ranks exchange numbers of algorithms, and one algorithm more or less
    changes the numbers of those after it.
    """
    names = (f"{collective}/{name}" for collective in algorithms for name in algorithms[collective])
    return _native.LAYOUT ^ zlib.crc32(" ".join(sorted(names)).encode())


def _kernel() -> str:
    """Identifies the running kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def born(pid: int) -> int:
    """The start time of a process, in clock ticks since the start of the kernel."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def meet(
    store: Store, card: Card, size: int, deadline: float, staging_bytes: int, machine: Calibration = DEFAULTS
) -> Membership:
    """Publish this rank's card and read the membership.

    Raises:
        RendezvousError: a card did not arrive in time, or is of another build; or a rank failed.
    """
    cards = gather(store, "card", card.rank, size, msgspec.msgpack.encode(card), deadline)
    if card.rank == 0:
        if unlike := _unlike(card, cards):
            store.set("membership", msgspec.msgpack.encode(unlike))
            raise RendezvousError(unlike)
        decoded = [_decode_card(each) for each in cards]
        membership = Membership(decoded, os.urandom(_NONCE_BYTES), staging_bytes, machine)
        if not membership.in_one_network():
            membership = msgspec.structs.replace(membership, machine=machine.between_networks())
        store.set("membership", msgspec.msgpack.encode(membership))
        return membership
    try:
        value = await_key(store, "membership", size, deadline + GRACE_S)
    except StoreTimeout as error:
        missing = [each for each in range(1, size) if not store.check([f"card/{each}"])]
        raise RendezvousError(
            message(
                "rank 0 did not publish who is in the group in time",
                observed=f"no card of rank {', '.join(map(str, missing))} either" if missing else "",
                remedy="Look at that rank's output, or raise timeout=.",
            )
        ) from error
    found: str | Membership = _decode_membership(value)
    if isinstance(found, str):  # the reason why there is none
        raise RendezvousError(found)
    return found


def _unlike(first: Card, cards: list[bytes]) -> str:
    """The error for the first rank of another version; "": there is none."""
    for rank, card in enumerate(cards):
        build = _build(rank, card)
        if build.layout != first.layout:
            return message(
                f"rank {rank} (host {build.name}) and rank 0 (host {first.name}) run different builds of "
                "Unisono, whose engines or algorithms differ",
                observed=f"version {build.layout or 'unknown'} on rank {rank}",
                expected=f"{first.layout}, as on rank 0",
                remedy="Install the same build on all hosts.",
            )
    return ""


def _build(rank: int, card: bytes) -> Build:
    try:
        return _decode_build(card)
    except msgspec.DecodeError:  # a build from before `Build` existed
        return Build(0, rank, "unknown")


def gather(store: Store, what: str, rank: int, size: int, mine: bytes, deadline: float) -> list[bytes]:
    """Put `mine` into the store; on rank 0, return the values of all ranks.

    Raises:
        RendezvousError: a value did not arrive in time, or a rank failed.
    """
    if rank:
        store.set(f"{what}/{rank}", mine)
        return []
    found = [mine]
    for other in range(1, size):
        try:
            found.append(await_key(store, f"{what}/{other}", size, deadline))
        except StoreTimeout as error:
            missing = [each for each in range(1, size) if not store.check([f"{what}/{each}"])]
            raise RendezvousError(
                message(
                    f"rank {', '.join(map(str, missing or [other]))} did not join the group",
                    observed=f"{size - len(missing)} of {size} ranks",
                    expected="all",
                    remedy="Look at that rank's output, or raise timeout=.",
                )
            ) from error
    return found
