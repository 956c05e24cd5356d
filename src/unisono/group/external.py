"""A `Group` over another library: MPI, Gloo or NCCL carry its bytes, see `unisono.backends`.

The methods, argument checks, result shapes, objects and subgroups are those of every `Group`. Only what runs a
checked call is another. What the library cannot do is refused by a `NotSupported` before a byte moves.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

from unisono import _native
from unisono._native import Status
from unisono.backends.driver import Call, Driver, Pending, unsupported
from unisono.bootstrap.rendezvous import Rendezvous
from unisono.buffers import DTYPES, ITEMSIZES, DeviceArray, dtype_code, is_tensor
from unisono.costs.choice import Choice
from unisono.diagnosis.cause import at_failure
from unisono.errors import GroupError, Mismatch, Timeout, message
from unisono.group.group import Group, end_group
from unisono.group.layout import Extents
from unisono.group.planning import Planner, check_algorithm, check_op, check_reducible
from unisono.group.work import DoneWork, Kept, MessageWork, Work, seconds
from unisono.kinds import kind_of
from unisono.plans import ALGORITHMS, StepFunction, make
from unisono.reduction import Op, ReduceOp

__all__ = ["ExternalGroup", "ExternalPlanner"]

CLOSING_S = 1.0
"""How long a rank that closes waits for the operations it has under way."""

MOST_SAID = 300
"""So many characters of a library's error text are shown; the rest is in the exception it comes from."""

_NUMBERS = (bool, int, float, complex)
_OBJECT_FORM = 1 << 8
Seconds = float | timedelta | None


class ExternalPlanner(Planner):
    """Checks the calls of one rank, and hands them to its driver."""

    def __init__(self, driver: Driver, name: str, timeout_s: float, hosts: tuple[str, ...]) -> None:
        engine = cast("_native.Engine", driver)
        super().__init__(engine, name, driver.rank, driver.size, timeout_s, hosts, reproducible=False)
        self._usual_s = timeout_s
        self._under_way: list[_ExternalWork | ExternalMessage] = []

    @property
    def driver(self) -> Driver:
        """The driver, in the place of the engine.

        Raises:
            GroupClosed: the group was closed.
        """
        return cast("Driver", self.engine)

    def close(self) -> _native.Engine | None:
        """See `Planner.close`. What is under way gets a moment to end."""
        end = time.monotonic() + CLOSING_S
        works, self._under_way = self._under_way, []
        for work in works:
            while not work.done() and time.monotonic() < end:
                time.sleep(1e-3)
        return super().close()

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
    ) -> ExternalCall:
        """See `Planner.plan`: the same checks, and what the driver needs to run it."""
        root = self.member(kind, root, "the root")
        check_algorithm(kind, algorithm)
        number = None
        if self.driver.device != "cpu" and isinstance(out, _NUMBERS):
            import numpy as np

            out = number = np.array([out])
        out, given = self.seen(kind, out, number is not None), self.seen(kind, given)
        laid, keep, result = self.lay_out(kind, out, given, root)
        result = _unwrapped(result) if number is None else number.item
        check_op(kind, op)
        check_reducible(kind, laid.dtype, op)
        self._refuse(kind, algorithm, reproducible)
        dtype = DTYPES[laid.dtype]
        sides = (self._flat(extents, dtype, keep) for extents in (laid.target, laid.source))
        even = kind_of(kind).layout != "all_gather_v"
        call = Call(kind_of(kind).plan, dtype, op, root, even, *sides)
        return ExternalCall(self, kind, [call], keep, result)

    def agree(self, kind: str, ranks: tuple[int, ...]) -> Any:  # noqa: ARG002
        """Nothing: the libraries do not compare what ranks say."""
        return lambda later, timeout: None  # noqa: ARG005

    def own_list(
        self, collective: str, pieces: list[Any], keep: Any, op: Op, root: int, reproducible: bool
    ) -> Any:
        """The calls for a list of buffers, one after the other; a list, for there may be none."""
        name = f"{collective}_coalesced"
        check_op(name, op)
        self._refuse(name, None, reproducible)
        calls = []
        for piece in pieces:
            check_reducible(name, piece.dtype, op)
            dtype = DTYPES[piece.dtype]
            sides = (self._flat(extents, dtype, keep) for extents in (piece.out, piece.given))
            calls.append(Call(collective, dtype, op, root, True, *sides))
        return [ExternalCall(self, name, calls, keep, None)] if calls else []

    def seen(self, kind: str, array: Any, internal: bool = False) -> Any:
        """An array, or a list of them, as the checks can look at it.

        Raises:
            ValueError: it is in other memory than the backend moves.
        """
        device = self.driver.device
        if array is None or device == "cpu":
            return array
        if isinstance(array, (list, tuple)):
            return [self.seen(kind, one, internal) for one in array]
        if is_tensor(array):
            if array.device.type != device:
                raise ValueError(
                    f"{kind}: a tensor is on {array.device}; backend {self.driver.name!r} moves {device.upper()} "
                    f"memory. Copy it with .{device}() first"
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
        places = {one.extent[:2]: one.tensor for one in _device_arrays(keep)}
        return [places[extent].detach().reshape(-1) for extent in extents]

    def _refuse(self, kind: str, algorithm: str | StepFunction | None, reproducible: bool) -> None:
        """Raises NotSupported: the driver's library chooses how an operation is done."""
        if isinstance(algorithm, str):
            plan = kind_of(kind).plan
            if algorithm not in ALGORITHMS[plan]:
                make(plan, algorithm, self.size, 0, self.hosts)  # which says so
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
        """Seconds for an operation; None: as long as the library waits of itself."""
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

    # ---- the rest ----------------------------------------------------------------------------------------

    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> Choice:  # noqa: ARG002
        """Refuse: see `Planner.choice`."""
        raise unsupported(self.driver, "choice()", "the library does not say which algorithm it takes")

    def keep(self, work: _ExternalWork | ExternalMessage) -> None:
        """Keep what is under way, with its buffers."""
        self._under_way = [one for one in self._under_way if not one.done()]
        self._under_way.append(work)

    @contextlib.contextmanager
    def translating(self, kind: str) -> Iterator[None]:
        """Makes the library's errors Unisono's.

        Raises:
            Timeout, Mismatch, GroupError: an operation failed.
        """
        driver = self.driver
        try:
            yield
        except driver.failures as failure:
            where = f"group={self.name} rank={self.rank}/{self.size} backend={driver.name}"
            said = " / ".join(line.strip() for line in str(failure).strip().splitlines())[:MOST_SAID]
            text = message(
                f"{kind} failed",
                where=where,
                observed=said or type(failure).__name__,
                remedy=f"Backend {driver.name!r} does not tell which rank is the cause.",
            )
            if driver.is_mismatch(failure):
                raise Mismatch(text) from failure
            raise (Timeout if driver.is_timeout(failure) else GroupError)(text) from failure


class ExternalCall:
    """A checked call, or several that are one for the caller."""

    def __init__(
        self,
        planner: ExternalPlanner,
        kind: str,
        calls: list[Call],
        keep: Any,
        result: Callable[[], Any] | None,
    ) -> None:
        self._planner, self._kind, self._calls, self._keep, self._result = planner, kind, calls, keep, result

    def __call__(self, later: bool, timeout: Seconds) -> Any:
        """Run it, and return what its caller gets; or start it, and return the work."""
        planner = self._planner
        planner.refuse_timeout(timeout)
        work = _ExternalWork(planner, self._kind, self._keep, self._result, timeout)
        work.start(self._calls, later)
        if later:
            planner.keep(work)
            return work
        return work.outcome()


class _ExternalWork(Work):
    """Collectives under way. They go on while somebody waits for them, or asks."""

    def __init__(
        self,
        planner: ExternalPlanner,
        kind: str,
        keep: Any,
        result: Callable[[], Any] | None,
        timeout: Seconds,
    ) -> None:
        self._planner, self._kind, self._keep, self._result = planner, kind, keep, result
        self._limit_s = planner.limit_s(timeout)
        self._pending: list[Pending] = []
        self._error: GroupError | None = None

    def start(self, calls: list[Call], later: bool) -> None:
        """Start all of them."""
        with self._planner.translating(self._kind):
            for call in calls:
                self._pending.append(self._planner.driver.start(call, later))

    def done(self) -> bool:
        """See `Work.done`."""
        try:
            while self._pending:
                with self._planner.translating(self._kind):
                    if not self._pending[0].done():
                        return False
                    self._end_first()
        except GroupError as error:
            self._error, self._pending = error, []
        return True

    def wait(self, timeout: Seconds = None) -> None:
        """See `Work.wait`."""
        limit_s = self._limit_s if timeout is None else seconds(timeout, math.inf)
        end = None if limit_s is None else time.monotonic() + limit_s
        while self._pending:
            left_s = None if end is None else max(0.0, end - time.monotonic())
            try:
                with self._planner.translating(self._kind):
                    ended = self._pending[0].wait(left_s)
                    if ended:
                        self._end_first()
            except GroupError as error:
                self._error, self._pending = error, []
                raise
            if not ended:
                where = f"group={self._planner.name} rank={self._planner.rank}/{self._planner.size}"
                what = f"{self._kind} is not done after {limit_s:.3f} s"
                raise Timeout(message(what, where=where, remedy="It goes on; wait again."))
        if self._error is not None:
            raise self._error

    def _end_first(self) -> None:
        self._pending.pop(0).finish()
        if not self._pending:
            for array in _device_arrays(self._keep):
                array.give_back()
            self._keep = None

    def outcome(self) -> Any:
        """Wait; then what the call returns."""
        self.wait()
        return None if self._result is None else self._result()

    result = outcome

    def let_go(self) -> None:
        """The library keeps its buffers."""

    def _what(self) -> str:
        return f"{self._kind} of group {self._planner.name!r}"


class ExternalMessage(MessageWork):
    """A send or a receive by the library."""

    __slots__ = (
        "_array", "_buffered", "_cancelled", "_dtype", "_error", "_limit_s", "_name", "_pending", "_planner",
        "_rank", "_settled", "_tag",
    )  # fmt: skip

    def __init__(
        self,
        planner: ExternalPlanner,
        name: str,
        array: Any,
        dtype: int,
        rank: int,
        tag: int,
        timeout: Seconds,
        keep: Any,
        receiving: bool,
    ) -> None:
        self._planner, self._name, self._array, self._dtype = planner, name, array, dtype
        self._rank, self._tag, self._keep, self._receiving = rank, tag, keep, receiving
        self._limit_s = planner.limit_s(timeout)
        self._begun = self._settled = self._cancelled = False
        self._error: GroupError | None = None
        self._pending: Pending
        # Two ranks that both send first must not wait for each other, whatever the library keeps for them.
        self._buffered = name in ("send", "send_object") and planner.driver.device == "cpu"

    def start(self) -> None:
        """See `MessageWork.start`."""
        driver = self._planner.driver
        is_object = self._name.endswith("_object")
        array = driver.copy(self._array) if self._buffered else self._array
        with self._planner.translating(self._name):
            move = driver.receive if self._receiving else driver.send
            self._pending = move(array, self._rank, self._tag, is_object)
        self._begun = True
        if self._buffered:
            self._planner.keep(self)

    def _what(self) -> str:
        other = f"rank {self._rank}" if self._rank >= 0 else "any rank"
        return f"{self._name}, {other} of group {self._planner.name!r}"

    def done(self) -> bool:
        """See `Work.done`."""
        if self._begun and not self._settled:
            try:
                with self._planner.translating(self._name):
                    if self._pending.done():
                        self._settle()
            except GroupError as error:
                self._fail(error)
        return self._settled

    def wait(self, timeout: Seconds = None) -> None:
        """See `Work.wait`."""
        if not self._settled:
            limit_s = self._limit_s if timeout is None else seconds(timeout, math.inf)
            try:
                with self._planner.translating(self._name):
                    if not self._pending.wait(limit_s):
                        raise Timeout(f"{self._what()}: not done after {limit_s:.3f} s. It goes on; wait again.")
                    self._settle()
            except Timeout:
                raise
            except GroupError as error:
                self._fail(error)
        if self._error is not None:
            raise self._error

    def _settle(self) -> None:
        self._pending.finish()
        self._settled = True
        for array in _device_arrays(self._keep):
            array.give_back()
        item = ITEMSIZES[self._dtype]
        if self._receiving and not self._cancelled and self._pending.nbytes % item:
            raise Mismatch(
                f"{self._what()}: a message of {self._pending.nbytes} bytes came, which is no whole number of "
                f"{DTYPES[self._dtype]}"
            )
        self._keep = None

    def _fail(self, error: GroupError) -> None:
        self._error, self._settled = error, True

    def let_go(self) -> None:
        """The library keeps its buffers."""

    def failure(self) -> BaseException:
        """See `MessageWork.failure`."""
        return self._error or GroupError(f"{self._what()} failed")

    def wait_or_abort(self, timeout_s: float) -> int:  # noqa: ARG002
        """See `MessageWork.wait_or_abort`; the error is raised here."""
        if not self._buffered:
            self.wait()
        return 0

    @property
    def status(self) -> Status | None:
        """See `Work.status`."""
        if not self._receiving or not self.done() or self._error is not None or self._cancelled:
            return None
        return self.came()

    def came(self) -> Status:
        """See `MessageWork.came`."""
        form = self._dtype | (_OBJECT_FORM if self._name.endswith("_object") else 0)
        status = Status.__new__(Status)
        status.__setstate__((self._pending.source, self._pending.tag, self._pending.nbytes, form))
        return status

    def cancel(self) -> bool:
        """See `Work.cancel`."""
        if not self._receiving or self.done():
            return False
        self._cancelled = self._settled = self._pending.cancel()
        return self._cancelled

    @property
    def cancelled(self) -> bool:
        """See `Work.cancelled`."""
        return self._cancelled

    @property
    def source(self) -> int:
        """See `MessageWork.source`."""
        return self._pending.source if self.done() else self._rank


class ExternalGroup(Group):
    """A `Group` whose operations another library runs; made by `init_process_group(backend=...)`.

    Every method has the signature and the checks of `Group`. What the library cannot do raises `NotSupported`.
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

    def _form(self, chosen: tuple[int, ...]) -> Group | None:
        self._subgroups += 1
        with self._planner.translating("subgroup"):
            driver = self._planner.driver.subgroup(chosen, self._subgroups)
        if driver is None:
            return None
        members = tuple(self._members[rank] for rank in chosen)
        return ExternalGroup(driver, f"{self.name}/{self._subgroups}", self.timeout_s, members)

    def _run_all(self, planned: list[Any], async_op: bool, timeout: Seconds) -> Work | None:
        if not planned:
            return DoneWork() if async_op else None
        return cast("Work | None", planned[0](async_op, timeout))

    def abort(self) -> None:
        """Refuse, see `Driver.abort`."""
        self._planner.driver.abort()

    def _irecv_whole(self, x: Any, src: int | None, tag: int) -> MessageWork:
        return self.irecv(x, src, tag)


def _device_arrays(keep: Any) -> Iterator[DeviceArray]:
    """Those among what a call keeps alive."""
    if isinstance(keep, DeviceArray):
        yield keep
    elif isinstance(keep, (list, tuple)):
        for one in keep:
            yield from _device_arrays(one)


def _unwrapped(result: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """A result that was allocated, as its caller knows it."""
    if result is None:
        return None

    def unwrapped() -> Any:
        made = result()
        return made.tensor if isinstance(made, DeviceArray) else made

    return unwrapped
