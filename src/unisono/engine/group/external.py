"""A `Group` over another library: MPI, Gloo or NCCL moves its bytes, see `unisono.engine.backends`.

The methods, argument checks, result shapes, objects and subgroups are those of every `Group`. Another library
runs a checked call. What it cannot do raises `NotSupported` before a byte moves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import Lock
from typing import Any, NoReturn, SupportsIndex

from unisono._native import Status
from unisono.engine.backends.driver import NO_DTYPE, LibraryDriver
from unisono.engine.bootstrap.rendezvous import Rendezvous
from unisono.engine.group import objects
from unisono.engine.group.external_planning import ExternalPlanner
from unisono.engine.group.external_work import object_status
from unisono.engine.group.group import Group, Seconds
from unisono.engine.group.messages import addressed, checked, run
from unisono.errors import Mismatch

_OBJECT = 0x756E_6F62_6A65_6374  # the first number of an object's first message


class ExternalGroup(Group):
    """A `Group` whose operations another library runs; made by `init_process_group(backend=...)`.

    Every method has the signature and the checks of `Group`. What the library cannot do is `NotSupported`.
    """

    _planner: ExternalPlanner

    def __init__(
        self,
        driver: LibraryDriver,
        name: str,
        timeout_s: float,
        members: tuple[int, ...] | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        host = os.uname().nodename
        hosts = (host,) * driver.size
        super().__init__(ExternalPlanner(driver, name, timeout_s, hosts), None, hosts, members, rendezvous)
        self._in_order: dict[tuple[bool, int, int], Lock] = {}
        self._hosts = tuple(self.all_gather_object(host))
        driver.issued = 0

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self._planner.driver.name

    def _probe(self, rank: int, tag: int, timeout_s: float) -> Status:  # noqa: ARG002
        self._planner.refuse("probe()", NO_DTYPE)

    def _iprobe(self, rank: int, tag: int) -> Status | None:  # noqa: ARG002
        self._planner.refuse("iprobe()", NO_DTYPE)

    def _recv_any(
        self,
        src: SupportsIndex | None,  # noqa: ARG002
        tag: int,  # noqa: ARG002
        timeout: Seconds,  # noqa: ARG002
    ) -> objects.ReceivedBytes:
        self._planner.refuse("recv_bytes()", NO_DTYPE)

    # An object is one message where the library has a matched probe. Otherwise it is two, its length and its
    # bytes: threads that exchange objects with one rank and tag take turns.

    def _send_encoded(self, encoded: bytes, dst: int, tag: int, timeout: Seconds) -> None:
        planner = self._planner
        parts = (
            [encoded] if planner.driver.matched_probe else [objects.lengths([_OBJECT, len(encoded)]), encoded]
        )
        works = [checked(planner, "send_object", part, dst, tag, timeout, receiving=False) for part in parts]
        place = False, planner.member("send_object", dst), tag
        with self._in_order.setdefault(place, Lock()):
            run(planner, timeout, *works)

    def _recv_encoded(self, src: SupportsIndex | None, tag: int, timeout: Seconds) -> objects.ReceivedBytes:
        planner = self._planner
        rank, tag = addressed(planner, "recv_object", src, tag, receiving=True)
        if planner.driver.matched_probe:
            planner.refuse_message(rank, tag, timeout)
            with planner.translating("recv_object"):
                found, source, tag = planner.driver.receive_object(rank, tag)
                return found, object_status(source, tag, found.size)
        with self._in_order.setdefault((True, rank, tag), Lock()):
            head = objects.lengths([0, 0])
            status = self._receive(head, src, tag, timeout)
            if head[0] != _OBJECT:
                raise Mismatch(
                    f"recv_object: rank {status.source} sent a message that is no object, tag {status.tag}"
                )
            encoded = objects.allocate(head[1])
            self._receive(encoded, status.source, status.tag, timeout)
        return encoded, object_status(status.source, status.tag, encoded.size)

    def _receive(self, part: Any, src: SupportsIndex | None, tag: int, timeout: Seconds) -> Status:
        work = checked(self._planner, "recv_object", part, src, tag, timeout, receiving=True)
        run(self._planner, timeout, work)
        return work.receive_status()

    def _agree(self, chosen: tuple[int, ...]) -> None:
        """See `Group._agree`. Do nothing: the libraries do not compare the ranks' calls."""

    def _connect(self, chosen: tuple[int, ...], name: str, members: tuple[int, ...]) -> Group | None:
        with self._planner.translating("subgroup"):
            driver = self._planner.driver.subgroup(chosen, self._subgroups)
        return None if driver is None else ExternalGroup(driver, name, self.timeout_s, members)

    def _shrink(self, exclude: Sequence[int], timeout_s: float) -> Group:  # noqa: ARG002
        self._planner.refuse("shrink()", "its ranks cannot go on without one of them")

    def _last_seen(self, rank: int) -> str:  # noqa: ARG002
        self._planner.refuse("last_seen()", "its ranks keep no record of their calls")

    def _fail_function(self, kind: str, error: Exception) -> NoReturn:  # noqa: ARG002
        raise error  # the other ranks wait for this one, which ends: see docs/backends.md

    def _abort(self) -> None:
        # No call of these libraries ends an operation of other ranks and leaves the process.
        self._planner.refuse("abort()", "it cannot end the operations of other ranks")
