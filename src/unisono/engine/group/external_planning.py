"""Passes the checked calls of a group to another library's driver, see `unisono.engine.backends`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

from unisono._native import ResultKind
from unisono.engine.backends.driver import NATIVE, LibraryCall, LibraryDriver, keep_for_ever, unsupported
from unisono.engine.group.arguments import CallArguments, MessageArguments, check_op, check_reducible
from unisono.engine.group.buffer_layout import BufferLayout, Extents
from unisono.engine.group.call_results import NOTHING, CallResult
from unisono.engine.group.coalescing import CoalescedBuffers, no_calls
from unisono.engine.group.external_work import ExternalCall, ExternalMessageWork, device_arrays
from unisono.engine.group.planning import Planner
from unisono.engine.group.work import OutstandingMessages, seconds
from unisono.engine.memory.buffers import DTYPES, DeviceArray, is_tensor
from unisono.engine.operations.functions import UserOp
from unisono.engine.operations.kinds import kind_of
from unisono.engine.operations.reduction import ReduceOp
from unisono.errors import Aborted, GroupError, Mismatch, Timeout, UnisonoError, message
from unisono.plans import ALGORITHMS, CONTRACTS, StepFunction, make

CLOSING_S = 1.0
"""How long `close` waits for the operations under way."""

MOST_SAID = 300
"""The most characters shown of a library's error text; the rest is in the original exception."""

_NO_CODES = "codecs", "the library moves values as they are"
_NUMBERS = (bool, int, float, complex)
Seconds = float | timedelta | None


class ExternalPlanner(Planner[LibraryDriver]):
    """Passes the calls of one rank to its driver. What the library cannot do is `NotSupported`."""

    def __init__(self, driver: LibraryDriver, name: str, timeout_s: float, hosts: tuple[str, ...]) -> None:
        super().__init__(driver, name, driver.rank, driver.size, timeout_s, hosts)
        self.outstanding_messages = OutstandingMessages()
        self._usual_s = timeout_s
        self._pid = os.getpid()

    @property
    def driver(self) -> LibraryDriver:
        """The library's driver. Raises GroupClosed: the group was closed."""
        return self.runner

    @property
    def codings(self) -> NoReturn:
        """Raises NotSupported: the library does not encode values."""
        self.refuse(*_NO_CODES)

    def reason(self, call: CallArguments, nbytes: int, algorithm: str) -> str:  # noqa: ARG002
        """See `Planner.reason`."""
        return "the library chooses"

    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> NoReturn:  # noqa: ARG002
        """Raises NotSupported."""
        self.refuse("choice()", "the library does not say which algorithm it takes")

    def refuse(self, what: str, why: str, remedy: str = NATIVE) -> NoReturn:
        """Raises NotSupported: the library does not have `what`."""
        raise unsupported(self.driver, what, why, remedy)

    # ---- the end ---------------------------------------------------------------------------------------

    def leave(self, cause: str) -> None:  # noqa: ARG002  (no library tells it the other ranks)
        """See `Planner.leave`. Waits up to CLOSING_S for operations under way."""
        if self._runner is None:
            return
        works = self.outstanding_messages.works()
        if not self._all_end(works):
            keep_for_ever(self._runner, works)
        driver = self.drop()
        if driver is not None:
            driver.leave()
            self.outstanding_messages.close()

    def _all_end(self, works: list[Any]) -> bool:
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

    def lay_out(self, kind: str, out: Any, sendbuf: Any, root: int) -> tuple[BufferLayout, Any, CallResult]:
        """See `Planner.lay_out`."""
        if self.driver.device == "cpu" or not isinstance(out, _NUMBERS):
            return super().lay_out(kind, self.as_readable(kind, out), self.as_readable(kind, sendbuf), root)
        import numpy as np

        number = np.array([out])
        staged = DeviceArray(self.driver.stage(number), host=number)
        layout, pins, _ = super().lay_out(kind, staged, sendbuf, root)
        return layout, pins, CallResult(number, ResultKind.NUMBER)

    def bind(self, call: CallArguments, layout: BufferLayout, pins: Any, result: CallResult) -> ExternalCall:
        """See `Planner.bind`."""
        check_op(call.kind, call.op)
        self._check(call, layout.dtype)
        if layout.source and CONTRACTS[call.plan].in_place:
            self.refuse("out=", "its reductions are in place")
        even = kind_of(call.kind).layout != "all_gather_v"
        started = self._call(call, layout.dtype, even, (layout.target, layout.source), pins)
        return ExternalCall(self, call.kind, [started], pins, result)

    def bind_list(self, call: CallArguments, pieces: CoalescedBuffers) -> Any:
        """See `Planner.bind_list`: one call after another."""
        calls = []
        for piece in pieces.each:
            self._check(call, piece.dtype)
            calls.append(self._call(call, piece.dtype, True, (piece.out, piece.sendbuf), pieces.keep))
        made = NOTHING._replace(unpack=pieces.unpack)
        return ExternalCall(self, call.kind, calls, pieces.keep, made) if calls else no_calls

    def _check(self, call: CallArguments, dtype: int) -> None:
        if call.coding is not None:
            self.refuse(*_NO_CODES)
        if call.element is not None:
            self.refuse("reduction functions", "the library's operations are its own")
        check_reducible(call.kind, dtype, call.op)
        self.refuse_choice(call.kind, call.algorithm, call.reproducible)

    def _call(
        self, call: CallArguments, dtype: int, even: bool, sides: tuple[Extents, Extents], pins: Any
    ) -> LibraryCall:
        name = DTYPES[dtype]
        arrays = (self._flat(side, name, pins) for side in sides)
        op = (
            ReduceOp.SUM if isinstance(call.op, UserOp) else call.op
        )  # of objects: the library reduces nothing
        return LibraryCall(call.plan, name, op, call.root, even, *arrays)

    def as_readable(self, kind: str, array: Any) -> Any:
        """See `Planner.as_readable`.

        Raises:
            ValueError: it is in memory that the backend does not move.
        """
        device = self.driver.device
        if array is None or device == "cpu":
            return array
        if isinstance(array, (list, tuple)):
            return [self.as_readable(kind, one) for one in array]
        if is_tensor(array):
            if array.device.type != device:
                raise ValueError(
                    f"{kind}: a tensor is on {array.device}; backend {self.driver.name!r} moves "
                    f"{device.upper()} memory. Copy it with .{device}() first"
                )
            return DeviceArray(array)
        if kind.endswith("_object") or kind == "split":
            return DeviceArray(self.driver.stage(array), host=array)
        raise ValueError(
            f"{kind}: a {type(array).__name__} is in CPU memory; backend {self.driver.name!r} moves "
            f"{device.upper()} memory, as torch tensors"
        )

    def _flat(self, extents: Extents, dtype: str, pins: Any) -> list[Any]:
        """Buffers as the driver's arrays."""
        driver = self.driver
        if driver.device == "cpu":
            return [driver.flat(address, numel, dtype) for address, numel in extents]
        places = {one.extent[:2]: one.tensor for one in device_arrays(pins)}
        return [places[extent].detach().reshape(-1) for extent in extents]

    def refuse_choice(self, kind: str, algorithm: str | StepFunction | None, reproducible: bool) -> None:
        """See `Planner.refuse_choice`."""
        if isinstance(algorithm, str):
            plan = kind_of(kind).plan
            if algorithm not in ALGORITHMS[plan]:
                make(plan, algorithm, self.size, 0, self.hosts)  # raises for an unknown name
            self.refuse(f"algorithm={algorithm!r}", "the library chooses the algorithm", "")
        if algorithm is not None:
            self.refuse("an algorithm of the caller's", "the library runs its own algorithms only", "")
        if reproducible:
            why = "the library chooses in which order contributions are combined"
            self.refuse("reproducible=True", why, "")

    def refuse_timeout(self, timeout: Seconds) -> None:
        """See `Planner.refuse_timeout`."""
        if timeout is not None and not self.driver.deadlines:
            self.refuse("timeout=", "no operation of the library takes a deadline", "")

    def limit_s(self, timeout: Seconds) -> float | None:
        """Seconds for an operation; None: as long as the library waits."""
        if timeout is None and self.timeout_s == self._usual_s:
            return None
        return seconds(timeout, self.timeout_s)

    # ---- messages ----------------------------------------------------------------------------------------

    def message(self, transfer: MessageArguments) -> ExternalMessageWork:
        """See `Planner.message`."""
        self.refuse_message(transfer.rank, transfer.tag, transfer.timeout)
        if transfer.synchronous:
            self.refuse("synchronous=True", "its sends do not say whether they were received")
        extent = transfer.address, transfer.numel
        (array,) = self._flat([extent], DTYPES[transfer.dtype], transfer.keep)
        return ExternalMessageWork(self, transfer, array)

    def sized_message(self, name: str, *_: Any) -> NoReturn:
        """Raises NotSupported."""
        self.refuse(f"{name}()", "its receives know their size")

    def refuse_message(self, rank: int, tag: int, timeout: Seconds) -> None:
        """Raises NotSupported: the library has no such message.  ValueError, TypeError: wrong timeout."""
        driver = self.driver
        self.seconds(timeout)
        self.refuse_timeout(timeout)
        if rank == driver.rank and not driver.to_itself:
            self.refuse("a message to oneself", "it connects a rank with the others only", "")
        if rank < 0 and not driver.any_source:
            self.refuse("a receive from anybody", "its receives name their source", "")
        if tag < 0 and not driver.any_tag:
            self.refuse("ANY_TAG", "its receives name their tag", "")
        if tag > driver.most_tag:
            self.refuse(f"tag={tag}", f"its largest tag is {driver.most_tag}", "")

    @contextlib.contextmanager
    def translating(self, kind: str) -> Iterator[None]:
        """Translates the library's errors into Unisono's.

        Raises:
            Timeout, Mismatch, GroupError: an operation failed.  Aborted: the group was closed meanwhile.
            RuntimeError: this is a forked child, which does not have the library's threads.
        """
        where = f"group={self.name} rank={self.rank}/{self.size}"
        driver = self._runner
        if driver is None:
            raise Aborted(message(f"{kind} failed: this rank closed the group during the call", where=where))
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
