"""The argument checks of a group's calls, before its engine or library plans them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, Any, Generic, SupportsIndex, TypeVar

from unisono.engine.costs.machine import DEFAULTS, MachineCalibration
from unisono.engine.costs.tuner import AlgorithmChoice
from unisono.engine.group.arguments import (
    CallArguments,
    CodecArguments,
    MessageArguments,
    check_algorithm,
    check_op,
    element_type,
)
from unisono.engine.group.buffer_layout import (
    SIDES,
    BufferLayout,
    check_layout,
    names_of,
    with_call_name,
    writes_first,
)
from unisono.engine.group.call_results import CallResult, allocate
from unisono.engine.group.coalescing import CoalescedBuffers, check_buffers
from unisono.engine.group.work import MessageWork, Work, seconds
from unisono.engine.memory.buffers import pinned
from unisono.engine.memory.strided import is_strided, pack_sides
from unisono.engine.operations.functions import UserOp
from unisono.engine.operations.kinds import kind_of
from unisono.engine.operations.reduction import Op
from unisono.errors import GroupClosed
from unisono.plans import StepFunction

if TYPE_CHECKING:
    from unisono import _native
    from unisono.codecs.codec import Codec
    from unisono.codecs.low_rank import LowRank
    from unisono.engine.backends.driver import LibraryDriver
    from unisono.engine.group.codec_planning import CodecPlanner

Runner = TypeVar("Runner", "_native.Engine", "LibraryDriver")


WATCHES: dict[int, Callable[[str, int], None]] = {}
"""What is called before each new collective, by the thread's identity: `check(kind, size)`. It may raise."""


class Planner(ABC, Generic[Runner]):
    """Checks the calls and messages of one rank of one group. What runs them plans them in a subclass.

    `_native.GroupBase`, the base class of `Group`, calls `plan` or `plan_coalesced` for every call that it
    does not remember.

    Attributes:
        name, rank, size: of the group.  timeout_s: of an operation without its own.
        hosts: the number of the host of each rank, by which algorithms are chosen; the same on all ranks.
        reproducible: all reductions are reproducible.
        machine: the calibration by which algorithms are chosen; call `place` after a change.
        members: the number of every rank in the job; (): the same as in the group.
        context: of the messages of a duplicate.  most_tag: the largest one.
        logged: the kinds of calls that the log has.
    """

    members: tuple[int, ...] = ()
    context: int = 0
    most_tag: int = (1 << 31) - 1

    def __init__(
        self,
        runner: Runner,
        name: str,
        rank: int,
        size: int,
        timeout_s: float,
        host_names: tuple[str, ...],
        reproducible: bool = False,
        machine: MachineCalibration = DEFAULTS,
    ) -> None:
        self._runner: Runner | None = runner
        self.name = name
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.reproducible = reproducible
        self.machine = machine
        self.logged: set[tuple[object, ...]] = set()
        distinct = list(dict.fromkeys(host_names))
        self.place(tuple(distinct.index(name) for name in host_names))

    def place(self, hosts: tuple[int, ...]) -> None:
        """Plan for this placement from now on."""
        if len(hosts) != self.size:
            raise ValueError(f"got the hosts of {len(hosts)} ranks, expected {self.size}")
        self.hosts = tuple(hosts)

    def _watch(self, kind: str) -> None:
        if (check := WATCHES.get(threading.get_ident())) is not None:
            check(kind, self.size)

    # ---- a new call ------------------------------------------------------------------------------------

    def plan(
        self,
        kind: str,
        out: Any,
        sendbuf: Any,
        op: Op,
        root: int,
        algorithm: str | StepFunction | None,
        reproducible: bool,
        codec: Codec | LowRank | str | None = None,
        between_hosts: bool | None = None,
        feedback: Any = None,
        max_error: float | None = None,
    ) -> Any:
        """Check a call and bind it to its buffers; returns what `GroupBase._execute` runs.

        Args:
            kind: of the call, see `kinds`.
            out: its buffer, or its output.  sendbuf: its input, where it has one; see `buffer_layout`.
            codec, between_hosts, feedback, max_error: see `Group`.
        Raises:
            ValueError, TypeError: an argument is wrong.  GroupClosed: the group was closed.
        """
        if WATCHES:
            self._watch(kind)
        root = self.member(kind, root, "the root")
        check_algorithm(kind, algorithm)
        buffers = self.lay_out(kind, out, sendbuf, root)
        coding = None
        if codec is not None or between_hosts is not None or feedback is not None or max_error is not None:
            coding = CodecArguments(codec, between_hosts, feedback, max_error)
        in_order = reproducible or self.reproducible
        element = element_type(kind, buffers[0].dtype, (out, sendbuf)) if type(op) is UserOp else None
        call = CallArguments(kind, op, root, algorithm, in_order, coding, element)
        if coding is not None:
            from unisono.engine.group.low_rank_call import (
                LowRank,
                LowRankCall,
            )  # most programs need no codecs

            if isinstance(codec, LowRank):
                if buffers[2].unpack is not None:
                    raise ValueError(f"{kind}: x is not contiguous, as un.LowRank needs it")
                return LowRankCall(self, call, out, sendbuf, buffers[0].dtype)
        return self.bind(call, *buffers)

    @abstractmethod
    def bind(self, call: CallArguments, layout: BufferLayout, pins: Any, result: CallResult) -> Any:
        """Plan a call whose buffers are checked, see `check_layout`.

        Raises:
            ValueError, TypeError: another argument is wrong.  NotSupported: the library has no such thing.
        """

    def plan_coalesced(
        self,
        kind: str,
        outs: Any,
        sendbufs: Any,
        op: Op,
        root: int,
        reproducible: bool,
        codec: Any,
        between_hosts: Any,
    ) -> Any:
        """Check a coalesced call and bind it to its buffers, see `plan`."""
        self.check_open()
        if WATCHES:
            self._watch(kind)
        check_op(kind, op)
        if type(op) is UserOp:
            raise TypeError(f"{kind}: op is a function, which takes one buffer a call")
        root = self.member(kind, root, "the root")
        pieces = check_buffers(kind, outs, sendbufs, self.size, self.rank, root, codec, self.as_readable)
        coded = codec is not None or between_hosts is not None
        coding = CodecArguments(codec, between_hosts) if coded else None
        in_order = reproducible or self.reproducible
        return self.bind_list(CallArguments(kind, op, root, None, in_order, coding), pieces)

    @abstractmethod
    def bind_list(self, call: CallArguments, pieces: CoalescedBuffers) -> Any:
        """Plan a coalesced call whose buffers are checked, see `bind`."""

    @abstractmethod
    def message(self, transfer: MessageArguments) -> MessageWork:
        """The work of a checked message, not yet posted.

        Raises:
            GroupClosed: the group was closed.  NotSupported: the library has no such message.
        """

    @abstractmethod
    def sized_message(
        self,
        name: str,
        rank: int,
        tag: int,
        timeout_s: float,
        decode: Callable[[Any], Any] | None,
    ) -> MessageWork:
        """The work of a receive of any size, not yet posted.

        decode: makes the work's result of the bytes of an object; None: it is the bytes of any message.
        Raises:
            GroupClosed: the group was closed.  NotSupported: the library has no such message.
        """

    def refuse_shared_memory(self, name: str, address: int, nbytes: int) -> None:
        """Raises ValueError: a receive under way writes to this memory."""

    @property
    @abstractmethod
    def codings(self) -> CodecPlanner:
        """The codecs of calls. Raises NotSupported: the library has none."""

    @abstractmethod
    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> AlgorithmChoice:
        """The algorithm and the predicted time of a collective; `nbytes` of the whole buffer."""

    @abstractmethod
    def reason(self, call: CallArguments, nbytes: int, algorithm: str) -> str:
        """Why a call of `nbytes` per rank runs this algorithm, and the predicted time, for the log."""

    # ---- what runs the calls, and the end ----------------------------------------------------------------

    @property
    def runner(self) -> Runner:
        """The engine, or the library's driver.

        Raises:
            GroupClosed: the group was closed.
        """
        runner = self._runner  # read once: another thread may close the group
        if runner is None:
            raise GroupClosed(f"group {self.name!r} was closed; rank {self.rank} used it afterwards")
        return runner

    def check_open(self) -> None:
        """Raises GroupClosed: the group was closed."""
        self.runner  # noqa: B018

    @abstractmethod
    def leave(self, cause: str) -> None:
        """Close the group. cause: the exception that is the reason; "" for none."""

    def abandon(self) -> None:
        """In a forked child: drop the group without leaving it."""
        runner = self.drop()
        if runner is not None:
            runner.abandon()

    def drop(self) -> Runner | None:
        """Take the engine or the driver away; None if it was taken before."""
        runner, self._runner = self._runner, None
        return runner

    # ---- checks ----------------------------------------------------------------------------------------

    def lay_out(self, kind: str, out: Any, sendbuf: Any, root: int) -> tuple[BufferLayout, Any, CallResult]:
        """The checked buffers of a call, the objects that pin them, and the caller's result.

        Raises:
            ValueError, TypeError: see `plan`.
        """
        try:
            out = list(out) if type(out) is list else out
            sendbuf = list(sendbuf) if type(sendbuf) is list else sendbuf
            out, sendbuf, result = allocate(kind, out, sendbuf, self.size, self.rank, root)
            layout = kind_of(kind).layout
            if is_strided(out) or is_strided(sendbuf):
                writes, names = writes_first(layout, self.rank, root), names_of(layout, sendbuf)
                keeps = layout == "exclusive_scan" or (sendbuf is None and layout not in SIDES)
                out, sendbuf, unpack = pack_sides(out, sendbuf, writes, keeps, names)
                result = result._replace(unpack=unpack)
            # Before their addresses are read:
            pins = pinned(out), None if sendbuf is None else pinned(sendbuf)
            return check_layout(layout, out, sendbuf, self.size, self.rank, root), pins, result
        except (TypeError, ValueError) as error:
            raise with_call_name(kind, error) from None

    def as_readable(self, kind: str, array: Any) -> Any:  # noqa: ARG002
        """An array, or a list of them, in a form that the checks can read."""
        return array

    def member(self, operation: str, rank: SupportsIndex, name: str = "the rank") -> int:
        """A rank of this group as an int; it may be a NumPy integer, as from `argmax`.

        Raises:
            TypeError: it is no integer.  ValueError: there is no such rank.
        """
        try:
            number = index(rank)
        except TypeError:
            what = f"{operation}: {name} is {rank!r}, expected the number of a rank"
            raise TypeError(what) from None
        if not 0 <= number < self.size:
            raise ValueError(f"{operation}: rank {number} is not in group {self.name!r} of {self.size} ranks")
        return number

    def refuse_timeout(self, timeout: float | timedelta | None) -> None:
        """Raises NotSupported: the library has no deadlines."""

    def refuse_choice(self, kind: str, algorithm: str | StepFunction | None, reproducible: bool) -> None:
        """Raises NotSupported: the library chooses the algorithm, or the order of contributions."""

    def seconds(self, timeout: float | timedelta | None) -> float:
        """The seconds of a timeout argument; of the group's for None.

        Raises:
            ValueError, TypeError: it is no timeout.
        """
        return seconds(timeout, self.timeout_s)

    def describe(self, work: Work) -> str:
        """The repr of a work."""
        return Work.__repr__(work)
