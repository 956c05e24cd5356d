"""The membership of a group: its ranks, and which of them share a host.

Every rank puts its peer info into the store. Rank 0 gathers the peer info and publishes the membership; all
ranks read it. Two ranks are on one host when they can map the same memory. They then have one kernel, one
user, one network namespace (descriptors are passed through it) and one process namespace (deaths are seen in
it).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_

import msgspec

from unisono import _native
from unisono.engine.bootstrap.failures import GRACE_S, await_key
from unisono.engine.costs.machine import DEFAULTS, MachineCalibration
from unisono.engine.operations.kinds import KINDS
from unisono.engine.store import Store
from unisono.errors import RendezvousError, StoreTimeout, message
from unisono.plans import ALGORITHMS

_NONCE_BYTES = 32


class PeerVersion(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of the peer info in all versions of Unisono; a rank of another version can read them.

    Attributes:
        layout: the version of shared memory, frames, kinds of calls and algorithms; see `version`.
        name: of its host.
    """

    layout: int
    rank: int
    name: str


class PeerInfo(PeerVersion, frozen=True, array_like=True):
    """What a rank publishes about itself. A field more or less needs another `kMeaning` (region_layout.hpp).

    Attributes:
        start_ticks: start time of the process in clock ticks, so that a reused pid is recognised.
        network: equal for ranks that reach each other over loopback.
        memory_domain: equal for ranks that share memory.
        access_probe: the address that ranks of this host read to test access to its memory; 0: no test.
        cores: the cores on which it may run, as a hexadecimal bit mask.
    """

    pid: int
    start_ticks: int
    kernel: str
    network: str
    memory_domain: str
    access_probe: int
    cores: str

    @property
    def place(self) -> tuple[str, str, str]:
        """Equal for ranks that one launcher can have started."""
        return self.kernel, self.network, self.name


class Membership(msgspec.Struct, frozen=True, array_like=True):
    """The peer info of every rank, and the values that must be equal on all ranks.

    Attributes:
        nonce: a random number of this group; only clients of the store can read it.
        staging_bytes: staging memory per rank, from rank 0.
        machine: the calibration by which all ranks choose algorithms, from rank 0.
    """

    peers: list[PeerInfo]
    nonce: bytes
    staging_bytes: int
    machine: MachineCalibration

    def local_ranks(self, rank: int) -> list[int]:
        """The ranks of the host of `rank`, itself included, in order."""
        return [info.rank for info in self.peers if info.memory_domain == self.peers[rank].memory_domain]

    def pids(self) -> list[int]:
        """The process of every rank, each as its own host numbers it."""
        return [info.pid for info in self.peers]

    def on_one_host(self) -> bool:
        """Whether all ranks share memory."""
        return len({info.memory_domain for info in self.peers}) == 1

    def in_one_network(self) -> bool:
        """Whether every rank reaches every other one over loopback."""
        return len({info.network for info in self.peers}) == 1

    def cores(self, rank: int) -> int:
        """How many cores the ranks of the host of `rank` have together; all of them compute the same number.

        Hosts that share a machine divide its cores by their ranks. If some ranks have fewer cores each than
        others, the lower number counts for all.

        Example: of four ranks three are bound to core 0, the fourth to core 1 -> 1.
        """
        masks = [int(info.cores, 16) for info in self.peers if info.kernel == self.peers[rank].kernel]
        local_ranks = len(self.local_ranks(rank))
        bound = {
            places: sum(mask | places == places for mask in masks) for places in {*masks, reduce(or_, masks)}
        }
        return max(1, min(places.bit_count() * local_ranks // ranks for places, ranks in bound.items()))

    def names(self) -> tuple[str, ...]:
        """The name of every rank's host; hosts with equal names get a number."""
        seen: dict[str, list[str]] = {}
        names = []
        for info in self.peers:
            domains = seen.setdefault(info.name, [])
            if info.memory_domain not in domains:
                domains.append(info.memory_domain)
            number = domains.index(info.memory_domain)
            names.append(info.name if number == 0 else f"{info.name}#{number + 1}")
        return tuple(names)


_decode_peer_version = msgspec.msgpack.Decoder(PeerVersion).decode
_decode_peer_info = msgspec.msgpack.Decoder(PeerInfo).decode
_decode_membership = msgspec.msgpack.Decoder(str | Membership).decode


def local_peer_info(rank: int, ranks_per_host: int, zero_copy: bool = True) -> PeerInfo:
    """This process's peer info. At most `ranks_per_host` successive ranks share memory; 0: as many as
    possible.

    `zero_copy`: other ranks may read this process's memory, where the system allows it.
    """
    kernel = _kernel()
    network = f"{kernel} {os.stat('/proc/self/ns/net').st_ino}"
    memory_domain = f"{network} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    if ranks_per_host:
        memory_domain += f" {rank // ranks_per_host}"
    access_probe = _native.access_probe() if zero_copy else 0
    cores = f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"
    name, pid = os.uname().nodename, os.getpid()
    return PeerInfo(
        version(ALGORITHMS),
        rank,
        name,
        pid,
        process_start_time(pid),
        kernel,
        network,
        memory_domain,
        access_probe,
        cores,
    )


def version(algorithms: Mapping[str, Iterable[str]], kinds: Sequence[str] = KINDS) -> int:
    """The number that must be equal on all ranks: of the engine, of these algorithms by collective, and of
    the kinds of calls.

    It includes both lists because ranks exchange numbers of algorithms and of kinds, and one more or less
    changes the numbers of those after it. The numbers of algorithms follow their sorted names; those of kinds
    follow their order.
    """
    names = (f"{collective}/{name}" for collective in algorithms for name in algorithms[collective])
    return _native.LAYOUT ^ zlib.crc32(" ".join([*sorted(names), "|", *kinds]).encode())


def _kernel() -> str:
    """Identifies the running kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def process_start_time(pid: int) -> int:
    """The start time of a process, in clock ticks since the start of the kernel.

    It is that of the first thread: qemu-user shows a process a /proc/PID/stat of its own, with another time.
    """
    with open(f"/proc/{pid}/task/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def exchange_peer_info(
    store: Store,
    info: PeerInfo,
    size: int,
    deadline: float,
    staging_bytes: int,
    machine: MachineCalibration = DEFAULTS,
) -> Membership:
    """Publish this rank's peer info and read the membership.

    Raises:
        RendezvousError: peer info did not arrive in time, or is of another build; or a rank failed.
    """
    peers = gather(store, "peer_info", info.rank, size, msgspec.msgpack.encode(info), deadline)
    if info.rank == 0:
        if unlike := _version_mismatch(info, peers):
            store.set("membership", msgspec.msgpack.encode(unlike))
            raise RendezvousError(unlike)
        decoded = [_decode_peer_info(each) for each in peers]
        membership = Membership(decoded, os.urandom(_NONCE_BYTES), staging_bytes, machine)
        if not membership.in_one_network():
            membership = msgspec.structs.replace(membership, machine=machine.between_networks())
        store.set("membership", msgspec.msgpack.encode(membership))
        return membership
    try:
        value = await_key(store, "membership", size, deadline + GRACE_S)
    except StoreTimeout as error:
        missing = [each for each in range(1, size) if not store.check([f"peer_info/{each}"])]
        raise RendezvousError(
            message(
                "rank 0 did not publish who is in the group in time",
                observed=f"no peer info of rank {', '.join(map(str, missing))} either" if missing else "",
                remedy="Look at that rank's output, or raise timeout=.",
            )
        ) from error
    found: str | Membership = _decode_membership(value)
    if isinstance(found, str):  # the reason why there is none
        raise RendezvousError(found)
    return found


def _version_mismatch(first: PeerInfo, peers: list[bytes]) -> str:
    """The error for the first rank of another version; "": there is none."""
    for rank, info in enumerate(peers):
        build = _decode_version(rank, info)
        if build.layout != first.layout:
            return message(
                f"rank {rank} (host {build.name}) and rank 0 (host {first.name}) run different builds of "
                "Unisono, whose engines, kinds of calls or algorithms differ",
                observed=f"version {build.layout or 'unknown'} on rank {rank}",
                expected=f"{first.layout}, as on rank 0",
                remedy="Install the same build on all hosts.",
            )
    return ""


def _decode_version(rank: int, info: bytes) -> PeerVersion:
    try:
        return _decode_peer_version(info)
    except msgspec.DecodeError:  # a build from before `PeerVersion` existed
        return PeerVersion(0, rank, "unknown")


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
