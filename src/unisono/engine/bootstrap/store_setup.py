"""Opens the store: serves it, or finds the process that serves it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import socket
import time
import warnings
from typing import TYPE_CHECKING, Any

import msgspec

from unisono.engine.bootstrap.init_method import InitMethod, RankAndSize
from unisono.engine.environment.env import Settings
from unisono.engine.store.tcp_client import NotOurServer, TCPStore
from unisono.errors import RendezvousError, StoreError, message

if TYPE_CHECKING:
    from unisono.engine.store import FileStore

PROBES = 16


def open_store(
    target: InitMethod, place: RankAndSize, deadline: float, settings: Settings
) -> FileStore | TCPStore:
    """The store of `init_method`, served or joined by this rank. Raises: see `rendezvous`."""
    left = max(0.0, deadline - time.monotonic())
    if target.scheme == "file":
        from unisono.engine.store import FileStore

        return FileStore(target.path, place.world_size, timeout_s=left)
    if target.scheme == "tcp":
        host, port = target.host, target.port
    else:
        host, port = settings.master_addr or "", settings.master_port or 0
    safe = StoreSecurity(settings.token, settings.tls)
    while True:
        try:
            if target.scheme == "env" and settings.store_address is not None:
                return safe.store(*settings.store_address, timeout_s=left, world_size=place.world_size)
            if target.scheme == "job":
                return _probe(target.host, target.job, place, deadline, safe)
            if target.scheme == "env" and settings.agent_store:
                job = f"torchrun {settings.job_id} {settings.restart_count} {host}:{port}"
                return _probe(host, job, place, deadline, safe, taken=port)
            if place.rank == 0:
                return _serve(host, port, deadline, safe)
            return safe.store(host, port, timeout_s=left, world_size=place.world_size)
        except StoreError as error:
            # The names of pods may appear after the pods start. Elsewhere an unknown name fails at once.
            unknown_name = isinstance(error.__cause__, socket.gaierror)
            if not (unknown_name and settings.kubernetes and time.monotonic() < deadline):
                raise
        time.sleep(0.5)


class StoreSecurity(msgspec.Struct, frozen=True):
    """How clients of the store are authenticated."""

    token: bytes
    tls: bool

    def store(self, host: str, port: int, **options: Any) -> TCPStore:
        """A `TCPStore` in which client and server prove that they know the token."""
        if options.get("is_server") and not self.token:
            _warn_if_open(host)
        return TCPStore(host, port, token=self.token, tls=self.tls, **options)


def _warn_if_open(host: str) -> None:
    from unisono.engine.bootstrap.interfaces import is_loopback

    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        if all(is_loopback(str(address[0])) for *_, address in found):
            return
        warnings.warn(
            message(
                f"this job has no token: any process that reaches {host} over the network can join it",
                remedy="Make one (openssl rand -hex 32 > FILE; chmod 600 FILE) and set UNISONO_TOKEN_FILE "
                "for every rank, or start the ranks with `unisono run`, which does.",
            ),
            stacklevel=2,
        )


def _serve(host: str, port: int, deadline: float, safe: StoreSecurity, job: str = "") -> TCPStore:
    """Serve a store on that port. If a store of the same job is already there, become its client.

    Claiming the rank then shows whether two processes have the same one. If a store is closing, wait for it.
    """
    give_up = min(deadline, time.monotonic() + 1.0)
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return safe.store(host, port, is_server=True, timeout_s=left, job=job)
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
            taken = error
        try:
            return safe.store(host, port, timeout_s=min(left, 5.0), job=job, retry=False)
        except NotOurServer as error:
            if error.reason != "closing" or time.monotonic() >= deadline:
                raise
        except StoreError:
            if time.monotonic() >= give_up:
                raise taken from None
        time.sleep(0.05)


def probe_ports(job: str) -> tuple[int, ...]:
    """Ports on which the store of `job` may be, in order; below the kernel's range for clients."""
    digest = hashlib.shake_128(job.encode()).digest(4 * PROBES)
    numbers = (int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(PROBES))
    return tuple(10_000 + number % 22_000 for number in numbers)


def _probe(
    host: str, job: str, place: RankAndSize, deadline: float, safe: StoreSecurity, taken: int = 0
) -> TCPStore:
    """Serve or find the store of this job on one of its ports; `taken` is the port of torchrun's agent."""
    ports = [each for each in probe_ports(job) if each != taken]
    while True:
        for each in ports:
            try:
                if place.rank == 0:
                    return _serve(host, each, min(deadline, time.monotonic() + 2.0), safe, job)
                return safe.store(host, each, timeout_s=1.0, job=job, retry=False)
            except StoreError as error:
                cause = error.__cause__
                if isinstance(cause, socket.gaierror) or getattr(cause, "errno", 0) == errno.EADDRNOTAVAIL:
                    raise
        if time.monotonic() >= deadline:
            raise RendezvousError(
                message(
                    f"no store of job {job!r} at {host} on any of the ports {ports}",
                    remedy="See whether rank 0 is alive, and whether its host is reachable on these ports.",
                )
            )
        time.sleep(0.05)
