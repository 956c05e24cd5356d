"""Process groups whose ranks change: PyTorch's functions for fault tolerance, `reconfigure` and its handles.

Each process has a handle, a text that it sends to the others by any way of its own. `reconfigure(uuid,
handles)` makes the group of the processes with these handles. It can be called again: without the handle of a
process that died, or with that of a new one.

A handle is the address of a small store in that process, and the token that opens it. The processes meet in
the store of the first handle, so the job's own store and rank 0 of an earlier group may be gone.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from unisono.engine.backends.torch_store import EngineStore
from unisono.engine.base.validation import listed, whole
from unisono.engine.bootstrap.interfaces import local_address
from unisono.engine.environment import env
from unisono.engine.store import TCPStore
from unisono.engine.store.address import address_text
from unisono.errors import RendezvousError, StoreError, message

from .completed_work import DONE
from .subgroups import GroupCounter
from .work import seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from unisono.engine.group.native import NativeGroup
    from unisono.torch_internals import c10d

__all__ = [
    "Handle",
    "Reconfigurable",
    "Unconnected",
    "follow",
    "get_reconfigure_handle",
    "reconfigure",
    "store_of_rank_0",
    "supports_reconfigure",
]

PATTERN = re.compile(r"unisono://(?:\[([0-9a-f:.]+)\]|([0-9.]+)):([0-9]{1,5})/([0-9a-f]{32})")
UUIDS = (-(2**63), 2**64 - 1)


class Handle(NamedTuple):
    """Where the store of a process listens, and its token. Keep it as secret as the job's token."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"unisono://{address_text(self.host, self.port)}/{self.token}"

    @classmethod
    def parse(cls, given: object) -> Handle:
        """Read a handle.

        Raises:
            ValueError: it is no handle of Unisono.
        """
        found = PATTERN.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            raise ValueError(_wrong("a handle is not one of Unisono's", _without_token(given)))
        six, four, port, token = found.groups()
        try:
            return cls(str(ipaddress.ip_address(six or four)), whole(int(port), "port", 1, 65535), token)
        except ValueError as error:
            raise ValueError(_wrong("a handle has no valid address", _without_token(given))) from error


class Unconnected:
    """Stands for the parts of a process group that has no ranks yet: calls raise, ending does nothing."""

    timeout_s = 0.0

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the process group has it."""

    def close(self) -> None:
        """Do nothing."""

    shutdown = abort = close

    def _repeat(self, *args: Any) -> Any:  # noqa: ARG002
        raise self._error()

    _send_now = _recv_now = _see_received = _repeat

    def __getattr__(self, name: str) -> Any:
        raise self._error()

    def _error(self) -> RuntimeError:
        return RuntimeError(
            message(
                "this process group has no ranks: reconfigure has not been called, or has failed",
                remedy="Exchange the handles of get_reconfigure_handle(), then call reconfigure.",
            )
        )


class Reconfigurable:
    """The methods of a process group that change its ranks."""

    _timeout: timedelta
    _group: NativeGroup
    _endpoint: TCPStore | None = None  # the store of this process's handle
    _meeting: TCPStore | None = None  # that of the first handle, if it is another process's
    _revoked = False  # aborted by this process, and to be reconfigured
    _token = ""
    _uuids: frozenset[int] = frozenset()

    @property
    def supports_reconfigure(self) -> bool:
        """True: every group can be reconfigured."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Return this process's handle; the same one until the group is shut down."""
        if self._endpoint is None:
            settings = env.read(strict=False)
            self._token = secrets.token_hex(16)
            self._endpoint = TCPStore(
                local_address(settings.master_addr, settings),
                0,
                is_server=True,
                token=self._token.encode(),
                timeout_s=self._timeout.total_seconds(),
            )
        return str(Handle(self._endpoint.host, self._endpoint.port, self._token))

    def reconfigure(self, opts: Any) -> c10d.Work:
        """Make the group anew, of the processes whose handles are listed. Returns a completed Work.

        Calls of the earlier group that are not complete fail.

        Args:
            opts: PyTorch's ReconfigureOptions. `uuid`: a number that this group has not used; the same in
                every process. `handles`: a list, in the order of ranks, or a set, which Unisono sorts; the
                same in every process. `timeout`: for all processes to come; default: the group's.
        Raises:
            ValueError: this process's handle is missing, a handle occurs twice, or is none.
            RuntimeError: the number was already used.
            RendezvousError: a process did not come in time, or that of the first handle has ended.
        """
        uuid = whole(opts.uuid, "uuid", *UUIDS)
        handles = _in_order(opts.handles)
        timeout_s = seconds(opts.timeout) or self._timeout.total_seconds()
        own = self.get_reconfigure_handle()
        if own not in handles:
            raise ValueError(
                _wrong("handles lack this process's own", f"{len(handles)} handles of other processes")
            )
        if uuid in self._uuids:
            raise RuntimeError(
                message(f"reconfigure: uuid {uuid} was already used", remedy="Give each call a new one.")
            )
        self._uuids |= {uuid}
        self._disconnect()
        try:
            store = self._meet(handles, str(uuid), timeout_s)
            self._connect(store, handles.index(own), len(handles), timedelta(seconds=timeout_s))
        except StoreError as error:
            raise RendezvousError(
                message(
                    "reconfigure: the process of the first handle is lost, in whose store all meet",
                    where=f"uuid={uuid}",
                    observed=str(error),
                    remedy="Leave its handle out, and give a new uuid.",
                )
            ) from error
        return DONE

    def follow(self, group: NativeGroup) -> None:
        """Become the process group of an engine's group, such as the next one after a shrink.

        All ranks of `group` call this, which owns it from then on. Calls of the earlier group that are not
        complete fail. To follow the present group again does nothing.

        Raises:
            GroupError: a rank was lost meanwhile; the next group may be followed.
            StoreError: this rank cannot reach the store of rank 0, and no rank is lost.
        """
        if group is self._group:
            return
        own = self.get_reconfigure_handle()
        handles = group.all_gather_object(own)
        self._disconnect()
        with store_of_rank_0(group):
            store = self._meet(handles, f"generation {group.generation}", group.timeout_s)
            counter = GroupCounter(store, group.rank, None)
        self._take_over(group, store, counter)

    def _meet(self, handles: list[str], uuid: str, timeout_s: float) -> EngineStore:
        """Return the part of the first process's store that is for this group."""
        store = self._store_at(handles[0], f"reconfigured/{uuid}/", timeout_s)
        digest = f"{len(handles)} {hashlib.sha256(chr(10).join(handles).encode()).hexdigest()}"
        there = store.compare_set("handles", "", digest).decode()
        if there != digest:
            raise RuntimeError(
                message(
                    "reconfigure: another process was given other handles for this uuid",
                    where=f"uuid={uuid}",
                    observed=f"{there.partition(' ')[0]} there, {len(handles)} here, or another order",
                    remedy="Give every process the same list.",
                )
            )
        return store

    def _store_at(self, handle: str, prefix: str, timeout_s: float) -> EngineStore:
        """Return a part of the store of a handle: this process's own, or another's, to which it connects.

        A server that is not there has ended: it listened before there was a handle.
        """
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None
        if self._endpoint is not None and handle == self.get_reconfigure_handle():
            return EngineStore(self._endpoint, prefix)
        host, port, token = Handle.parse(handle)
        self._meeting = TCPStore(host, port, token=token.encode(), timeout_s=timeout_s, retry=False)
        return EngineStore(self._meeting, prefix)

    def _leave_meetings(self) -> None:
        """Close this process's store, and the connection to another's."""
        meeting, self._meeting = self._meeting, None
        endpoint, self._endpoint = self._endpoint, None
        for store in filter(None, (meeting, endpoint)):
            store.close(linger_s=0.0)

    def _disconnect(self) -> None:
        """End the group of the present ranks."""
        raise NotImplementedError

    def _connect(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        """Make the group of the new ranks."""
        raise NotImplementedError

    def _take_over(self, group: NativeGroup, store: c10d.Store, counter: GroupCounter) -> None:
        """Be the process group of a group that has been made."""
        raise NotImplementedError


@contextmanager
def store_of_rank_0(group: NativeGroup) -> Iterator[None]:
    """All ranks of an engine's group use the store in its rank 0 inside; returns when all have.

    Raises:
        PeerLost: rank 0 has ended, or has found a loss and closed its store.
        StoreError: this rank cannot use the store, and no rank is lost.
    """
    try:
        yield
    except StoreError:
        group.barrier()
        raise
    group.barrier()


def supports_reconfigure(group: c10d.ProcessGroup | None = None) -> bool:
    """Whether the group can be reconfigured; None: the default group. As `dist._supports_reconfigure`."""
    return bool(_found(group).supports_reconfigure)


def get_reconfigure_handle(group: c10d.ProcessGroup | None = None) -> str:
    """Return this process's handle in that group, for the others. As `dist._get_reconfigure_handle`."""
    return str(_found(group).get_reconfigure_handle())


def reconfigure(
    uuid: int,
    handles: list[str] | set[str],
    group: c10d.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> c10d.Work:
    """Make the group anew, of the processes with these handles. As `dist._reconfigure`, on every PyTorch.

    Args:
        uuid: a number that this group has not used; the same in every process.
        handles: in the order of the new ranks; a set is sorted. The same in every process.
        group: None: the default group.
        timeout: for all processes to come; None: the group's.
    Raises:
        ValueError: this process's handle is missing, a handle occurs twice, or is none.
        RuntimeError: the number was already used, or another process was given other handles.
        RendezvousError: a process did not come in time, or that of the first handle has ended.
    Example, after rank 1 of 3 died: reconfigure(7, [handles[0], handles[2]]); rank 2 is then rank 1.
    """
    work: c10d.Work = _found(group).reconfigure(ReconfigureOptions(uuid, handles, timeout))
    return work


class ReconfigureOptions(NamedTuple):
    """The same as PyTorch's ReconfigureOptions, which PyTorch before 2.14 does not have."""

    uuid: int
    handles: list[str] | set[str]
    timeout: timedelta | None = None


def follow(group: NativeGroup) -> None:
    """Make the default process group that of an engine's group. All ranks of it call this.

    Raises:
        GroupError: a rank was lost meanwhile; the next group may be followed.
        StoreError: this rank cannot reach the store of rank 0, and no rank is lost.
    """
    _found(None).follow(group)


def _found(group: c10d.ProcessGroup | None) -> Any:
    found: Any = dist.GroupMember.WORLD if group is None else group
    if found is None:
        raise ValueError(
            message("there is no default group", remedy="Call torch.distributed.init_process_group first.")
        )
    if not isinstance(found, Reconfigurable):
        raise TypeError(
            message(
                f"a group of {type(found).__name__} is none of Unisono's", remedy="Use backend 'unisono'."
            )
        )
    return found


def _in_order(handles: Any) -> list[str]:
    """Return checked handles; a set is sorted, so that every process has the same order."""
    if isinstance(handles, (set, frozenset)):
        handles = sorted(map(str, handles))
    if isinstance(handles, str):
        raise TypeError(_wrong("handles is one text, expected a list or a set of them", repr(handles)[:80]))
    found = [str(Handle.parse(each)) for each in listed(handles, "handles")]
    if not found:
        raise ValueError(_wrong("there are no handles", "an empty list"))
    if len(set(found)) < len(found):
        twice = next(each for each in found if found.count(each) > 1)
        raise ValueError(_wrong("a handle occurs twice", twice.rpartition("/")[0]))
    return found


def _without_token(handle: Any) -> str:
    return repr(str(handle).rpartition("/")[0] or handle)[:80]


def _wrong(what: str, observed: str) -> str:
    return message(
        f"reconfigure: {what}",
        observed=observed,
        expected="the handle of each process, as get_reconfigure_handle() returned it there",
    )
