"""A `Group` over another library: MPI, Gloo or NCCL moves its bytes, see `unisono.engine.backends`.

The methods, argument checks, result shapes, objects and subgroups are those of every `Group`. Another library
runs a checked call. What it cannot do raises `NotSupported` before a byte moves.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, SupportsIndex, cast

from unisono import _native
from unisono._native import Returned, Status
from unisono.engine.backends.driver import NATIVE, Call, Driver, keep_for_ever, unsupported
from unisono.engine.bootstrap.rendezvous import Rendezvous
from unisono.engine.costs.choice import Choice
from unisono.engine.diagnosis.cause import at_failure
from unisono.engine.group import objects
from unisono.engine.group.coalesced import no_calls
from unisono.engine.group.external_work import ExternalCall, ExternalMessage, ExternalWork, device_arrays
from unisono.engine.group.group import Group, end_group
from unisono.engine.group.layout import Extents
from unisono.engine.group.messages import checked, run
from unisono.engine.group.planning import Planner, check_algorithm, check_op, check_reducible
from unisono.engine.group.results import NOTHING, Made
from unisono.engine.group.work import Kept, MessageWork, seconds
from unisono.engine.memory.buffers import DTYPES, DeviceArray, is_tensor
from unisono.engine.operations.kinds import kind_of
from unisono.engine.operations.reduction import Op
from unisono.errors import Aborted, GroupError, Mismatch, Timeout, UnisonoError, message
from unisono.plans import ALGORITHMS, StepFunction, make

__all__ = ["ExternalGroup", "ExternalPlanner"]

CLOSING_S = 1.0
"""How long `close` waits for the operations under way."""

MOST_SAID = 300
"""The most characters shown of a library's error text; the rest is in the original exception."""

_NUMBERS = (bool, int, float, complex)
Seconds = float | timedelta | None


class ExternalPlanner(Planner):
    """Checks the calls of one rank, and passes them to its driver."""

    def __init__(self, driver: Driver, name: str, timeout_s: float, hosts: tuple[str, ...]) -> None:
        engine = cast("_native.Engine", driver)
        super().__init__(engine, name, driver.rank, driver.size, timeout_s, hosts, reproducible=False)
        self._usual_s = timeout_s
        self._under_way: list[ExternalWork | ExternalMessage] = []
        self._pid = os.getpid()

    @property
    def driver(self) -> Driver:
        """The driver, which takes the place of the engine.

        Raises:
            GroupClosed: the group was closed.
        """
        return cast("Driver", self.engine)

    def close(self) -> _native.Engine | None:
        """See `Planner.close`. Waits up to CLOSING_S for operations under way."""
        works, self._under_way = self._under_way, []
        if os.getpid() == self._pid and not self._all_end(works):
            keep_for_ever(self._engine, works)
        return super().close()

    def _all_end(self, works: list[ExternalWork | ExternalMessage]) -> bool:
        """Whether all of them end within CLOSING_S; receives are cancelled where the library can."""
        end = time.monotonic() + CLOSING_S
        for work in works:
            with contextlib.suppress(*self.driver.failures):
                work.cancel()
            while not work.done():
                if time.monotonic() >= end:
                    return False
                time.sleep(1e-3)
        return True

    # ---- collectives -----------------------------------------------------------------------------------

    def plan(  # type: ignore[override]
        self,
        kind: str,
        out: Any,
        given: Any,
        op: Op,
        root: int,
        algorithm: str | StepFunction | None,
        reproducible: bool,
        codec: Any = None,
        between_hosts: Any = None,
        feedback: Any = None,
        max_error: Any = None,
    ) -> ExternalCall:
        """See `Planner.plan`: the same checks, and a call for the driver."""
        if any(each is not None for each in (codec, between_hosts, feedback, max_error)):
            self.codings  # noqa: B018 (raises)
        root = self.member(kind, root, "the root")
        check_algorithm(kind, algorithm)
        number = None
        if self.driver.device != "cpu" and isinstance(out, _NUMBERS):
            import numpy as np

            out = number = np.array([out])
        out, given = self.seen(kind, out, number is not None), self.seen(kind, given)
        laid, keep, made = self.lay_out(kind, out, given, root)
        if number is not None:
            made = Made(number, Returned.NUMBER)
        check_op(kind, op)
        check_reducible(kind, laid.dtype, op)
        self._refuse(kind, algorithm, reproducible)
        dtype = DTYPES[laid.dtype]
        sides = (self._flat(extents, dtype, keep) for extents in (laid.target, laid.source))
        even = kind_of(kind).layout != "all_gather_v"
        call = Call(kind_of(kind).plan, dtype, op, root, even, *sides)
        return ExternalCall(self, kind, [call], keep, made)

    @property
    def codings(self) -> Any:
        """Raises NotSupported: the library does not encode values."""
        raise unsupported(self.driver, "codecs", "the library moves values as they are", NATIVE)

    def agree(self, kind: str, ranks: tuple[int, ...]) -> Any:  # noqa: ARG002
        """Do nothing: the libraries do not compare the ranks' calls."""
        return lambda later, timeout: None  # noqa: ARG005

    def own_list(
        self, collective: str, pieces: list[Any], keep: Any, op: Op, root: int, reproducible: bool
    ) -> Any:
        """The call for a list of buffers, one after another."""
        name = f"{collective}_coalesced"
        check_op(name, op)
        self._refuse(name, None, reproducible)
        calls = []
        for piece in pieces:
            check_reducible(name, piece.dtype, op)
            dtype = DTYPES[piece.dtype]
            sides = (self._flat(extents, dtype, keep) for extents in (piece.out, piece.given))
            calls.append(Call(collective, dtype, op, root, True, *sides))
        return ExternalCall(self, name, calls, keep, NOTHING) if calls else no_calls

    def seen(self, kind: str, array: Any, internal: bool = False) -> Any:
        """An array, or a list of them, in a form that the checks can read.

        Raises:
            ValueError: it is in memory that the backend does not move.
        """
        device = self.driver.device
        if array is None or device == "cpu":
            return array
        if isinstance(array, (list, tuple)):
            return [self.seen(kind, one, internal) for one in array]
        if is_tensor(array):
            if array.device.type != device:
                raise ValueError(
                    f"{kind}: a tensor is on {array.device}; backend {self.driver.name!r} moves "
                    f"{device.upper()} memory. Copy it with .{device}() first"
                )
            return DeviceArray(array)
        if internal or kind.endswith("_object") or kind == "split":
            return DeviceArray(self.driver.stage(array), host=array)
        raise ValueError(
            f"{kind}: a {type(array).__name__} is in CPU memory; backend {self.driver.name!r} moves "
            f"{device.upper()} memory, as torch tensors"
        )

    def _flat(self, extents: Extents, dtype: str, keep: Any) -> list[Any]:
        """Buffers as the driver's arrays."""
        driver = self.driver
        if driver.device == "cpu":
            return [driver.flat(address, numel, dtype) for address, numel in extents]
        places = {one.extent[:2]: one.tensor for one in device_arrays(keep)}
        return [places[extent].detach().reshape(-1) for extent in extents]

    def _refuse(self, kind: str, algorithm: str | StepFunction | None, reproducible: bool) -> None:
        """Raises NotSupported: the driver's library chooses how an operation is done."""
        if isinstance(algorithm, str):
            plan = kind_of(kind).plan
            if algorithm not in ALGORITHMS[plan]:
                make(plan, algorithm, self.size, 0, self.hosts)  # raises for an unknown name
            raise unsupported(self.driver, f"algorithm={algorithm!r}", "the library chooses the algorithm")
        if algorithm is not None:
            why = "the library runs its own algorithms only"
            raise unsupported(self.driver, "an algorithm of the caller's", why)
        if reproducible:
            why = "the library chooses in which order contributions are combined"
            raise unsupported(self.driver, "reproducible=True", why)

    def refuse_timeout(self, timeout: Seconds) -> None:
        """Raises NotSupported: the library waits for ever."""
        if timeout is not None and not self.driver.deadlines:
            why = "no operation of the library takes a deadline"
            raise unsupported(self.driver, "timeout=", why)

    def limit_s(self, timeout: Seconds) -> float | None:
        """Seconds for an operation; None: as long as the library waits."""
        if timeout is None and self.timeout_s == self._usual_s:
            return None
        return seconds(timeout, self.timeout_s)

    # ---- messages ----------------------------------------------------------------------------------------

    def own_message(
        self,
        name: str,
        place: tuple[int, int, int],
        rank: int,
        tag: int,
        timeout: Seconds,
        keep: Any,
        receiving: bool,
    ) -> ExternalMessage:
        """The work of a checked message."""
        driver = self.driver
        self.refuse_timeout(timeout)
        if rank == driver.rank and not driver.to_itself:
            raise unsupported(driver, "a message to oneself", "it connects a rank with the others only")
        if rank < 0 and not driver.any_source:
            raise unsupported(driver, "a receive from anybody", "its receives name their source")
        if tag < 0 and not driver.any_tag:
            raise unsupported(driver, "ANY_TAG", "its receives name their tag")
        if tag > driver.most_tag:
            raise unsupported(driver, f"tag={tag}", f"its largest tag is {driver.most_tag}")
        (array,) = self._flat([place[:2]], DTYPES[place[2]], keep)
        return ExternalMessage(self, name, array, place[2], rank, tag, timeout, keep, receiving)

    # ---- other -------------------------------------------------------------------------------------------

    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> Choice:  # noqa: ARG002
        """Refuse: see `Planner.choice`."""
        why = "the library does not say which algorithm it takes"
        raise unsupported(self.driver, "choice()", why, NATIVE)

    def keep(self, work: ExternalWork | ExternalMessage) -> None:
        """Keep a work and its buffers until it has ended."""
        self._under_way = [one for one in self._under_way if not one.done()]
        self._under_way.append(work)

    @contextlib.contextmanager
    def translating(self, kind: str) -> Iterator[None]:
        """Translates the library's errors into Unisono's.

        Raises:
            Timeout, Mismatch, GroupError: an operation failed.  Aborted: the group was closed meanwhile.
            RuntimeError: this is a forked child, which does not have the library's threads.
        """
        where = f"group={self.name} rank={self.rank}/{self.size}"
        if self._engine is None:
            raise Aborted(message(f"{kind} failed: this rank closed the group during the call", where=where))
        driver = self.driver
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this group belongs to process {self._pid}; a process that was forked from it makes a group "
                "of its own"
            )
        try:
            yield
        except UnisonoError:  # a subclass of RuntimeError, which the libraries raise
            raise
        except driver.failures as failure:
            said = " / ".join(line.strip() for line in str(failure).strip().splitlines())[:MOST_SAID]
            text = message(
                f"{kind} failed",
                where=f"{where} backend={driver.name}",
                observed=said or type(failure).__name__,
                remedy=f"Backend {driver.name!r} does not tell which rank is the cause.",
            )
            if driver.is_mismatch(failure):
                raise Mismatch(text) from failure
            raise (Timeout if driver.is_timeout(failure) else GroupError)(text) from failure


class ExternalGroup(Group):
    """A `Group` whose operations another library runs; made by `init_process_group(backend=...)`.

    Every method has the signature and the checks of `Group`. What the library cannot do is `NotSupported`.
    """

    def __init__(
        self,
        driver: Driver,
        name: str,
        timeout_s: float,
        members: tuple[int, ...] | None = None,
        meeting: Rendezvous | None = None,
    ) -> None:
        host = os.uname().nodename
        self._hosts = (host,) * driver.size
        self._planner: ExternalPlanner = ExternalPlanner(driver, name, timeout_s, self._hosts)
        _native.Calls.__init__(self, self._planner, None, timeout_s)
        self._store = None
        self._members = tuple(range(driver.size)) if members is None else members
        self._subgroups = 0
        self._kept = Kept()
        self._finalizer = weakref.finalize(self, end_group, self._planner, self._kept, meeting, os.getpid())
        at_failure(self, self._finalizer)
        self._hosts = tuple(self.all_gather_object(host))
        driver.issued = 0

    @property
    def backend(self) -> str:
        """The name of the backend."""
        return self._planner.driver.name

    @property
    def timeout_s(self) -> float:
        """See `Group.timeout_s`; infinite where the library has no deadlines."""
        return self._planner.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float | timedelta) -> None:
        limit_s = seconds(value, 0.0)
        self._planner.refuse_timeout(limit_s)
        self._planner.timeout_s = limit_s

    @property
    def reproducible(self) -> bool:
        """False."""
        return False

    @reproducible.setter
    def reproducible(self, value: bool) -> None:
        self._planner._refuse("barrier", None, value)

    def send_object(
        self, obj: Any, dst: int, tag: int = 0, *, pickle: bool = False, timeout: Seconds = None
    ) -> None:
        """See `Group.send_object`. The library moves two messages: the length, and the bytes."""
        encoded = objects.encoded("send_object", obj, pickle)
        for part in (objects.length(encoded), encoded):
            work = checked(self._planner, "send_object", part, dst, tag, timeout, receiving=False)
            run(self._kept, self._planner, timeout, work)

    def recv_object(
        self, src: SupportsIndex | None = None, tag: int = 0, *, pickle: bool = False, timeout: Seconds = None
    ) -> Any:
        """See `Group.recv_object`."""
        length = objects.lengths([0])
        head = self._receive(length, src, tag, timeout)
        encoded = objects.allocate(length[0])
        self._receive(encoded, head.source, head.tag, timeout)
        return objects.decoded(encoded, pickle=pickle)

    def _receive(self, part: Any, src: SupportsIndex | None, tag: int, timeout: Seconds) -> Status:
        work = checked(self._planner, "recv_object", part, src, tag, timeout, receiving=True)
        run(self._kept, self._planner, timeout, work)
        return work.came()

    def _form(self, chosen: tuple[int, ...]) -> Group | None:
        self._subgroups += 1
        with self._planner.translating("subgroup"):
            driver = self._planner.driver.subgroup(chosen, self._subgroups)
        if driver is None:
            return None
        members = tuple(self._members[rank] for rank in chosen)
        return ExternalGroup(driver, f"{self.name}/{self._subgroups}", self.timeout_s, members)

    def abort(self) -> None:
        """Refuse, see `Driver.abort`."""
        self._planner.driver.abort()

    def _irecv_whole(self, x: Any, src: int | None, tag: int) -> MessageWork:
        return self.irecv(x, src, tag)
