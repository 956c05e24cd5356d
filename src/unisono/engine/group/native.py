"""A `Group` that the engine runs, and how its ranks meet in a store."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from unisono import _native
from unisono._native import FaultKind, Status
from unisono.engine.base.limits import refuse_replaced_modules
from unisono.engine.base.validation import flag
from unisono.engine.bootstrap.engine import EngineSettings, open_engine
from unisono.engine.bootstrap.forming import Identity
from unisono.engine.bootstrap.rendezvous import Rendezvous
from unisono.engine.costs.machine import DEFAULTS, MachineCalibration
from unisono.engine.diagnosis import except_hook
from unisono.engine.diagnosis.call_site import call_site
from unisono.engine.diagnosis.close_reason import close_reason, error_reason, function_failure
from unisono.engine.diagnosis.fault_reader import last_operation, publish_close_reason, read_empty_probe
from unisono.engine.diagnosis.fault_text import MOST_MEMBERS, error, listed
from unisono.engine.environment import env
from unisono.engine.environment.event_log import LOG
from unisono.engine.group import objects
from unisono.engine.group.departure import Departure
from unisono.engine.group.group import Group, Seconds
from unisono.engine.group.group_log import log_group
from unisono.engine.group.membership import Former, Loop, MembershipGroup
from unisono.engine.group.messages import ANY_RANK, addressed, checked, run
from unisono.engine.group.native_planning import NativePlanner
from unisono.engine.group.notices import announce
from unisono.engine.group.parent_group import ParentGroup, making, watching
from unisono.engine.group.shrink import excluded_ranks
from unisono.engine.group.succession import shrink_group
from unisono.engine.group.work import seconds
from unisono.engine.memory.buffers import ITEMSIZES, pinned, view
from unisono.engine.store import PrefixStore, Store
from unisono.engine.store.base import close_in_children
from unisono.errors import GroupClosed, GroupError, NotSupported, RendezvousError

if TYPE_CHECKING:
    from unisono.engine.windows.queue import Queue
    from unisono.engine.windows.window import Window


class NativeGroup(MembershipGroup):
    """A `Group` of the engine; made by `init_process_group` or `connect`."""

    _planner: NativePlanner

    def __init__(
        self,
        engine: _native.Engine,
        rank: int,
        size: int,
        name: str,
        timeout_s: float,
        store: Store | None = None,
        rendezvous: Rendezvous | None = None,
        members: tuple[int, ...] | None = None,
        reproducible: bool = False,
        hosts: tuple[str, ...] = (),
        machine: MachineCalibration = DEFAULTS,
        settings: env.Settings | None = None,
        identity: Identity | None = None,
        former: Former | None = None,
    ) -> None:
        """settings: by which its subgroups meet, which may have a token that the environment has not.

        identity: from which the next group can be made.  former: what became of the group before.
        """
        hosts = hosts or (os.uname().nodename,) * size
        planner = NativePlanner(
            engine, name, rank, size, timeout_s, hosts, reproducible, machine, members or ()
        )
        planner.encrypted = identity is not None and identity.settings.network.tls
        self._store = store
        self._settings = settings
        self._identity = identity
        self._former = former or Former()
        self._attempts = 0
        self._loop: Loop | None = None
        self._changing = threading.Lock()
        if len(set(hosts)) > 1:
            close_in_children(planner.close_copies)
        super().__init__(planner, engine, hosts, members, rendezvous)
        LOG.add_group(self)
        if LOG.level:
            log_group(self)
        if settings is not None and settings.record:
            from unisono.engine.group.recording import record

            record(self, settings.record)

    @property
    def generation(self) -> int:
        """See `Group.generation`."""
        return 0 if self._identity is None else self._identity.generation

    @property
    def left(self) -> tuple[Departure, ...]:
        """See `Group.left`."""
        return self._former.left

    @property
    def previous_ranks(self) -> tuple[int | None, ...]:
        """See `Group.previous_ranks`."""
        return self._former.ranks or tuple(range(self.size))

    @property
    def elastic(self) -> bool:
        """See `Group.elastic`."""
        return self._planner.engine.elastic

    @elastic.setter
    def elastic(self, value: bool) -> None:
        self._planner.engine.elastic = flag(value, "elastic")

    def newcomers_here(self) -> int:
        """How many newcomers wait at this rank. Other ranks need not call it."""
        listener = self._planner.listener
        return 0 if listener is None else len(listener.waiting())

    def _listen(self, address: str, port: int) -> tuple[str, ...]:
        found: tuple[str, ...] = self._admission("listen").addresses_of(self, address, port)
        return found

    def _waiting(self, maximum: int | None) -> int:
        admission = self._admission("waiting")
        if self._loop is not None and maximum is None:
            maximum = self._loop.maximum
        number = len(admission.look_for_newcomers(self, maximum).taken)
        if self._loop is not None:
            self._loop.newcomers = number
        return number

    def _admit(self, maximum: int | None, timeout_s: float) -> Group:
        admission = self._admission("admit")
        newcomers = admission.look_for_newcomers(self, maximum)
        if not newcomers.taken:
            return self
        with self._change("admit"):
            following: MembershipGroup = admission.admitted(self, newcomers, time.monotonic() + timeout_s)
        return self._followed_by(following)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """See `Group`. In a loop of `elastic`, keep the group open for the next turn, and take its faults."""
        if self._loop is None:
            return super().__exit__(kind, error, trace)
        taken: bool = self._loop.leave(error or self._unreported())
        if not taken:
            super().__exit__(kind, error, trace)
        return taken

    def _admission(self, operation: str) -> ModuleType:
        if self._identity is None:
            raise NotSupported(f"{operation}: this group was made without a membership")
        from unisono.engine.group import admission  # most programs admit nobody

        return admission

    def _shrink(self, exclude: Sequence[int], timeout_s: float) -> Group:
        excluded = excluded_ranks(self, exclude)
        with self._change("shrink"):
            return self._followed_by(shrink_group(self, excluded, time.monotonic() + timeout_s))

    def _followed_by(self, following: MembershipGroup) -> MembershipGroup:
        """The next group, which listens for newcomers as this one did; its launcher learns of it."""
        if following._planner.listening is not None:
            self._admission("listen").listen_again(following)
        announce(following)
        return following

    @contextlib.contextmanager
    def _change(self, operation: str) -> Iterator[None]:
        """Only one thread makes the next group."""
        if not self._changing.acquire(blocking=False):
            raise RuntimeError(f"{operation}: another thread is making the next group of {self.name!r}")
        try:
            yield
        finally:
            self._changing.release()

    def _next(
        self,
        engine: _native.Engine,
        rank: int,
        store: Store | None,
        members: tuple[int, ...],
        hosts: tuple[str, ...],
        machine: MachineCalibration,
        identity: Identity,
        former: Former,
    ) -> NativeGroup:
        return NativeGroup(
            engine,
            rank,
            len(members),
            self.name,
            self.timeout_s,
            store,
            None,
            members,
            self.reproducible,
            hosts,
            machine,
            self._settings,
            identity,
            former,
        )

    def _hand_over(self) -> Rendezvous | None:
        alive = self._finalizer.detach()
        self._close()
        self._planner.leave("")
        self._release()
        rendezvous: Rendezvous | None = None if alive is None else alive[2][1]
        return rendezvous

    def _window(self, array: Any) -> Window:
        from unisono.engine.windows.opening import open_window  # most programs have none

        planner, ranks = self._planner, range(self.size)
        planner.check_open()
        base, numel, dtype = (0, 0, -1) if array is None else view(array, True, "array")
        extent = base, numel * ITEMSIZES[dtype], dtype
        gather, meeting = self.all_gather_object, self._meeting()
        return open_window(planner, ranks, gather, array, extent, pinned(array), meeting=meeting)

    def _queue(self, *terms: Any) -> Queue:
        from unisono.engine.windows.queue_opening import open_queue  # most programs have none

        self._planner.check_open()
        return open_queue(self._planner, self.all_gather_object, self._meeting(), *terms)

    def _meeting(self) -> tuple[Store, Identity] | None:
        """Where ranks of a window meet, and who is in this group."""
        return None if self._store is None or self._identity is None else (self._store, self._identity)

    def _probe(self, rank: int, tag: int, timeout_s: float) -> Status:
        planner, engine = self._planner, self._planner.engine
        fault, status = engine.probe(rank, planner.travelling(tag), timeout_s)
        if status is not None:
            return status
        if fault == FaultKind.TIMEOUT and not engine.faulted:
            raise error(read_empty_probe(planner.fault_context(engine, "probe", timeout_s)))
        raise planner.failure("probe", timeout_s, engine)

    def _iprobe(self, rank: int, tag: int) -> Status | None:
        engine = self._planner.engine
        fault, status = engine.look(rank, self._planner.travelling(tag))
        if fault:
            raise self._planner.failure("iprobe", self.timeout_s, engine)
        return status

    def _send_encoded(self, encoded: bytes, dst: int, tag: int, timeout: Seconds) -> None:
        if self._send_object(encoded, dst, tag, timeout) is None:
            work = checked(self._planner, "send_object", encoded, dst, tag, timeout, receiving=False)
            run(self._planner, timeout, work)

    def _recv_encoded(self, src: SupportsIndex | None, tag: int, timeout: Seconds) -> objects.ReceivedBytes:
        received: objects.ReceivedBytes | None = self._recv_object(None, src, tag, timeout)
        return received or self._recv_read("recv_object", self._recv_object, src, tag, timeout)

    def _recv_any(self, src: SupportsIndex | None, tag: int, timeout: Seconds) -> objects.ReceivedBytes:
        received: objects.ReceivedBytes | None = self._recv_bytes(None, src, tag, timeout)
        return received or self._recv_read("recv_bytes", self._recv_bytes, src, tag, timeout)

    def _recv_read(
        self, name: str, receive: Any, src: SupportsIndex | None, tag: int, timeout: Seconds
    ) -> objects.ReceivedBytes:
        """The same with arguments that only Python reads."""
        rank, tag = addressed(self._planner, name, src, tag, receiving=True)
        self._planner.check_open()
        source = None if rank == ANY_RANK else rank
        received: objects.ReceivedBytes | None = receive(None, source, tag, self._planner.seconds(timeout))
        if received is None:  # another thread closes the group
            raise GroupClosed(f"{name} failed: group {self.name!r} was closed by another thread")
        return received

    @property
    def _engine_settings(self) -> EngineSettings | None:
        """By which its ranks reach each other; the environment of a newcomer may name no such host."""
        return None if self._identity is None else self._identity.settings

    def _duplicate(self) -> Group:
        context = self._planner.contexts.agree(self)
        return DuplicateGroup(self._original, self._original._planner.duplicate(context))

    @property
    def _original(self) -> NativeGroup:
        """The group of which it is a duplicate; itself, if it is none."""
        return self

    def _agree(self, chosen: tuple[int, ...]) -> None:
        self._execute(self._planner.agree("subgroup", chosen), False, None)

    def _connect(self, chosen: tuple[int, ...], name: str, members: tuple[int, ...]) -> Group | None:
        if self.rank not in chosen:
            return None
        if self._store is None:
            raise GroupError(f"group {self.name!r} has no store in which a subgroup could meet")
        keys = PrefixStore(f"subgroup/{self._subgroups}/{'_'.join(map(str, chosen))}", self._store)
        try:
            return connect(
                keys,
                chosen.index(self.rank),
                len(chosen),
                name=name,
                timeout_s=self.timeout_s,
                members=members,
                reproducible=self.reproducible,
                parent=ParentGroup(self._planner, f"subgroup({list(chosen)})", chosen),
                settings=self._settings,
                engine_settings=self._engine_settings,
            )
        except RendezvousError as error:
            where = f"subgroup({list(chosen)}) of group {self.name!r}"
            raise RendezvousError(f"{where}: {error}", missing=error.missing) from None

    def _last_seen(self, rank: int) -> str:
        return last_operation(self._planner.engine.record_of(rank))

    def _abort(self) -> None:
        engine = self._planner.engine
        publish_close_reason(engine, close_reason(error_reason()) or f"a call of abort() at {call_site()}")
        engine.abort()

    def _fail_function(self, kind: str, error: Exception) -> NoReturn:
        engine = self._planner.engine
        publish_close_reason(engine, function_failure(error))
        engine.abort()
        raise self._planner.failure(kind, self.timeout_s) from error

    def _unreported(self) -> BaseException | None:
        """The error of an asynchronous collective that no call and no wait has raised yet."""
        if self.closed or self._planner.reported or not self._planner.engine.faulted:
            return None
        works = self._works
        if any(work.raised for work in works):
            return None
        return next((error for work in works if (error := work.exception()) is not None), None)


class DuplicateGroup(NativeGroup):
    """See `Group.duplicate`."""

    def __init__(self, original: NativeGroup, planner: NativePlanner) -> None:
        self._store, self._settings, self._identity = original._store, original._settings, None
        self._former, self._attempts, self._loop = Former(), 0, None
        self._changing = threading.Lock()
        self._of = original
        Group.__init__(self, planner, planner.engine, original._hosts, original._members, None, original)

    @property
    def _original(self) -> NativeGroup:
        return self._of

    def _meeting(self) -> tuple[Store, Identity] | None:
        return self._original._meeting()

    def _shrink(self, exclude: Sequence[int], timeout_s: float) -> Group:  # noqa: ARG002
        self._refuse_membership("shrink()")


def _naming(name: str, size: int, members: tuple[int, ...] | None) -> str:
    """A group that could not be made: its name, its ranks, and their numbers in the job."""
    if members is None or members == tuple(range(size)):
        return f"group {name!r} of {size} ranks"
    own = listed(range(size), MOST_MEMBERS)
    return f"group {name!r}, whose ranks {own} are ranks {listed(members, MOST_MEMBERS)} of the job"


def connect(
    store: Store,
    rank: int,
    size: int,
    *,
    name: str = "world",
    timeout_s: float | None = None,
    members: tuple[int, ...] | None = None,
    reproducible: bool = False,
    parent: ParentGroup | None = None,
    settings: env.Settings | None = None,
    engine_settings: EngineSettings | None = None,
) -> NativeGroup:
    """Make a group of ranks that already share a store and know their numbers. The caller keeps the store.

    All keys have the prefix `name`, which therefore must be new in the store.

    Args:
        parent: the group that contains all these ranks. If it ends, the waiting ends.
        settings: None: the environment's.
        engine_settings: those of the group that contains all these ranks; None: from `settings`.
    """
    refuse_replaced_modules()
    settings = settings or env.read(strict=False)
    if parent is not None:  # the launcher of an elastic job is told of the whole group only
        settings = settings._replace(elastic=None)
    except_hook.install(settings)
    LOG.configure(settings)
    timeout_s = seconds(timeout_s, settings.timeout_s)
    engine_settings = engine_settings or EngineSettings.of(settings)
    keys = PrefixStore(name, store)
    try:
        with making(size), watching(parent, keys) as rendezvous:
            opened = open_engine(
                rendezvous,
                rank,
                size,
                timeout_s=timeout_s,
                settings=engine_settings,
                served=None if parent is None else parent.has_first,
            )
    except RendezvousError as error:
        raise RendezvousError(f"{_naming(name, size, members)}: {error}", missing=error.missing) from None
    return NativeGroup(
        opened.engine,
        rank,
        size,
        name,
        timeout_s,
        keys,
        members=members,
        reproducible=reproducible,
        hosts=opened.hosts,
        machine=opened.machine,
        settings=settings,
        identity=Identity(opened.membership, engine_settings),
    )
