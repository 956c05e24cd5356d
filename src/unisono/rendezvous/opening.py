"""Opening the store: serving it or finding who serves it."""

from __future__ import annotations

import errno
import hashlib
import socket
import time

from unisono.env import Settings
from unisono.errors import RendezvousError, StoreError, message
from unisono.rendezvous.target import Place, Target
from unisono.store import FileStore, NotOurServer, TCPStore

__all__ = ["open_store", "probe_ports"]

PROBES = 16


def open_store(target: Target, place: Place, deadline: float, settings: Settings) -> FileStore | TCPStore:
    """The store `target` leads to, served or joined by this rank; raises as `rendezvous` does."""
    left = max(0.0, deadline - time.monotonic())
    if target.scheme == "file":
        return FileStore(target.path, place.world_size, timeout_s=left)
    if target.scheme == "tcp":
        host, port = target.host, target.port
    else:
        host, port = settings.master_addr or "", settings.master_port or 0
    while True:
        try:
            if target.scheme == "env" and settings.store_address is not None:
                return TCPStore(*settings.store_address, timeout_s=left)
            if target.scheme == "env" and settings.agent_store:
                return _probe(host, port, place, deadline, settings)
            return _serve(host, port, deadline) if place.rank == 0 else TCPStore(host, port, timeout_s=left)
        except StoreError as error:
            # The names of pods may be published later than the pods start; elsewhere a bad name stays bad.
            unknown_name = isinstance(error.__cause__, socket.gaierror)
            if not (unknown_name and settings.kubernetes and time.monotonic() < deadline):
                raise
        time.sleep(0.5)


def _serve(host: str, port: int, deadline: float, job: str = "") -> TCPStore:
    """Serve a store on that port. If one of the same job is there already, be its client: the claim
    of the rank will tell which process it belongs to. One that is just closing is waited for.
    """
    give_up = min(deadline, time.monotonic() + 1.0)
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            return TCPStore(host, port, is_server=True, timeout_s=left, job=job)
        except StoreError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise
            taken = error
        try:
            return TCPStore(host, port, timeout_s=min(left, 5.0), job=job, retry=False)
        except NotOurServer as error:
            if error.reason != "closing" or time.monotonic() >= deadline:
                raise
        except StoreError:
            if time.monotonic() >= give_up:
                raise taken from None
        time.sleep(0.05)


def probe_ports(job: str) -> tuple[int, ...]:
    """Ports on which the store of `job` may be, in order; below those the kernel gives to clients."""
    digest = hashlib.shake_128(job.encode()).digest(4 * PROBES)
    numbers = (int.from_bytes(digest[4 * i : 4 * i + 4], "big") for i in range(PROBES))
    return tuple(10_000 + number % 22_000 for number in numbers)


def _probe(host: str, port: int, place: Place, deadline: float, settings: Settings) -> TCPStore:
    """Serve or find the store of this job where the master's port is taken by torchrun's agent."""
    job = f"torchrun {settings.job_id} {settings.restart_count} {host}:{port}"
    ports = [each for each in probe_ports(job) if each != port]
    while True:
        for each in ports:
            try:
                if place.rank == 0:
                    return _serve(host, each, min(deadline, time.monotonic() + 2.0), job)
                return TCPStore(host, each, timeout_s=1.0, job=job, retry=False)
            except StoreError as error:
                if isinstance(error.__cause__, socket.gaierror):
                    raise
        if time.monotonic() >= deadline:
            raise RendezvousError(
                message(
                    f"no store of job {job!r} at {host} on any of the ports {ports}",
                    remedy="See whether rank 0 is alive, and whether its host is reachable on these ports.",
                )
            )
        time.sleep(0.05)
