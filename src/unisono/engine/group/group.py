"""`Group`: ranks that communicate, and every operation they have.

`Group` is what the engine's groups (native.py) and those over another library (external.py) have in common:
signatures, checks and texts. Its abstract methods are all that differs.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from functools import partial, reduce
from itertools import accumulate
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import msgspec

from unisono import _native
from unisono._native import Status
from unisono.engine.base.validation import flag, listed, positive, whole
from unisono.engine.bootstrap.rendezvous import Rendezvous
from unisono.engine.costs.tuner import AlgorithmChoice
from unisono.engine.diagnosis.close_reason import close_reason, error_reason, reason_at_failure
from unisono.engine.group import objects
from unisono.engine.group.messages import (
    RecvFrom,
    SendTo,
    addressed,
    begin,
    checked,
    read,
    run,
    together,
)
from unisono.engine.group.planning import Planner
from unisono.engine.group.signature import collective
from unisono.engine.group.work import MessageWork, Work, seconds
from unisono.engine.operations.functions import of_values
from unisono.engine.operations.reduction import Op, ReduceOp
from unisono.errors import NotSupported
from unisono.plans import StepFunction

if TYPE_CHECKING:
    from types import ModuleType

    from unisono.codecs.codec import Codec
    from unisono.codecs.low_rank import LowRank
    from unisono.engine.group.codec_arguments import CodecChoice
    from unisono.engine.group.departure import Departure
    from unisono.engine.windows.queue import Queue
    from unisono.engine.windows.window import Window

    CodecName = Codec | str | None

SUM = ReduceOp.SUM
MOST_BYTES = 1 << 62
MOST_SIZE = (1 << 63) - 1
"""The largest limit of a group's size; the ranks tell each other theirs."""
Seconds = float | timedelta | None
Algorithm = str | StepFunction | None


class Group(_native.GroupBase):
    """Ranks that communicate. Made by `init_process_group`; also a context manager that closes it.

    There is no hidden default group: the group is the object you call. Several threads may use it. Their
    operations run one after another, and the order must be the same on all ranks.

    Arrays are NumPy arrays of any strides, contiguous torch CPU tensors, or other contiguous CPU buffers. The
    collectives share these arguments and errors:

    Args:
        algorithm: a name of `unisono.plans.ALGORITHMS`, or a function (rank, size, root) -> the steps of that
            rank, which is proved before it runs; None chooses by size, ranks and hosts.
        reproducible: contributions are combined in the order of ranks, in one accumulation, whatever the
            size and placement. The bits are those of NumPy's fold from rank 0 to p-1 (16-bit floats are
            widened and rounded once). An `algorithm` with another order is refused.
        codec: a codec of `unisono.codecs`, or its name: how edges encode float32. Sums are in float32, and
            all ranks get the same bits; `error_bound` gives the error. "auto": the codec that the cost model
            finds fastest, with an error of at most `max_error` of the largest possible result; on one host
            none. `un.LowRank(rank)` is one of `all_reduce` for matrices.
        between_hosts: True: only edges between hosts carry codes; False: all edges do. None: True where
            there are several hosts.
        feedback: a float32 buffer as long as the data that is sent, see `unisono.codecs.feedback_for`. The
            encoding error is kept there and added in the next call. Not for PRODUCT, MIN and MAX. With
            `un.LowRank` its `feedback_for(x)`.
        out: where the result goes; `x` is only read, and need not be copied first. As long as `x`, and no
            part of it. None: `x`. Not with a codec, and not with a function or a file as the algorithm.
        async_op: return a `Work` at once. Do not use the buffers until it is done.
        timeout: seconds (or a timedelta) for the whole operation; None: the group's.
    Raises:
        ValueError, TypeError: a wrong argument; no byte has moved and the group can still be used.
        Timeout, PeerLost, Mismatch, Aborted: the operation failed; the group is aborted.

    Attributes:
        rank: of this process, 0..size-1.  size: number of ranks.  name: for error texts.
        timeout_s: seconds for an operation without a timeout of its own.
        reproducible: all reductions run as with reproducible=True; set it on all ranks.
        sequence: collectives issued by this rank up to now, including those under way.

    The error of an operation that nobody waits for is not lost: it aborts the group, and the next call
    raises it.
    """

    # Abstract for mypy only: a native base class excludes ABCMeta.
    _planner: Planner[Any]

    def __init__(
        self,
        planner: Planner[Any],
        engine: _native.Engine | None,
        hosts: tuple[str, ...],
        members: tuple[int, ...] | None,
        rendezvous: Rendezvous | None,
        original: Group | None = None,
    ) -> None:
        """engine: which repeats calls; None: none does.  hosts: the name of each rank's.  rendezvous: to
        end.  original: the group of which it is a duplicate."""
        super().__init__(planner, engine, planner.timeout_s, planner.context, original)
        self._planner = planner
        self._hosts = hosts
        self._members = tuple(range(planner.size)) if members is None else members
        self._subgroups = 0
        self._object_turn = threading.RLock()  # an object call is two operations: its threads take turns
        # Also at exit: the other ranks must learn that this rank has left, and no thread may remain.
        self._finalizer = weakref.finalize(self, _end, planner, rendezvous, os.getpid())
        reason_at_failure(self, self._finalizer)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._planner.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._planner.size

    @property
    def name(self) -> str:
        """The group's name, as in error texts."""
        return self._planner.name

    @property
    def timeout_s(self) -> float:
        """Seconds for an operation without a timeout of its own."""
        return self._planner.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float | timedelta) -> None:
        limit_s = seconds(value, 0.0)
        self._planner.refuse_timeout(limit_s)
        self._planner.timeout_s = limit_s
        self._forget(limit_s)

    @property
    def sequence(self) -> int:
        """How many collectives this rank has called, including asynchronous ones.

        The call with the same number is the same call on every rank.

        Raises:
            GroupClosed: the group was closed.
        """
        issued: int = self._planner.runner.issued
        return issued

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    @property
    def reproducible(self) -> bool:
        """Whether all reductions combine contributions in the order of ranks."""
        return self._planner.reproducible

    @reproducible.setter
    def reproducible(self, value: bool) -> None:
        value = flag(value, "reproducible")
        self._planner.refuse_choice("barrier", None, value)
        self._planner.reproducible = value
        self._forget(self.timeout_s)

    @property
    def link_bytes_per_s(self) -> float:
        """The bandwidth of a host's link in the cost model: from the calibration, or set by the program.

        It decides the algorithms between hosts and codec="auto". Set the same value on all ranks, between
        calls.
        Example: group.link_bytes_per_s = 1e9 / 8  # 1 Gbit/s
        """
        return self._planner.machine.tcp

    @link_bytes_per_s.setter
    def link_bytes_per_s(self, value: float) -> None:
        rate, planner = positive(value, "link_bytes_per_s"), self._planner
        planner.machine = msgspec.structs.replace(planner.machine, tcp=rate)
        self._place(planner.hosts)

    @property
    def members(self) -> tuple[int, ...]:
        """The world ranks of this group: members[i] is the world rank of rank i of the group."""
        return self._members

    # ---- the membership -----------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """0 for a group that met; each group that `shrink` or `admit` makes of it has the next number."""
        return 0

    @property
    def left(self) -> tuple[Departure, ...]:
        """The ranks of the group before that are not in this one: who, why, and their newest calls.

        Ranks are numbered as in the group that they left.
        """
        return ()

    @property
    def previous_ranks(self) -> tuple[int | None, ...]:
        """previous_ranks[i] is the number that rank i had in the group before; None: it is new."""
        return tuple(range(self.size))

    def shrink(self, exclude: Sequence[int] = (), *, timeout: Seconds = None) -> Group:
        """The next group, of the ranks that are left; this group is closed.

        Every living rank calls it, after a `PeerLost`, a `Timeout` or any other fault, or when the ranks
        agree to exclude some. The ranks agree on who is left over the memory and the connections that they
        have. They keep their order; `previous_ranks`, `left` and `generation` tell what has changed.

        Out are ranks that have ended, closed the group, are stopped, are cut off, or have not called it
        within the timeout. Such a rank gets `Evicted` at its next call. If a group is split, the side with
        more than half of its ranks goes on, or with half and the lowest rank; the other one gets `Evicted`.

        Args:
            exclude: ranks to evict, the same list on every rank. An excluded rank need not call it.
            timeout: seconds that a running rank has to call it.
        Raises:
            Evicted: the others go on without this rank.
            ValueError, TypeError: no ranks of this group; or ranks gave different lists: then all raise it.
            Timeout: no agreement came about.  NotSupported: a group of another backend.
        Example (p=4, rank 2 was killed): group.shrink() is a group of 3 with previous_ranks (0, 1, 3)
        """
        return self._shrink(exclude, self._planner.seconds(timeout))

    @abstractmethod
    def _shrink(self, exclude: Sequence[int], timeout_s: float) -> Group: ...

    @property
    def elastic(self) -> bool:
        """Whether an operation also ends because a rank is stopped, or does not answer for a second.

        Otherwise only its timeout ends it: a job that is stopped as a whole then continues. Set it on all
        ranks.
        """
        return False

    @elastic.setter
    def elastic(self, value: bool) -> None:  # noqa: ARG002
        self._refuse_membership("elastic")

    def listen(self, address: str = "", port: int = 0) -> tuple[str, ...]:
        """Let newcomers come: the first rank of each host listens. Returns all addresses; all ranks call it.

        Args:
            address: of this host, for other hosts to reach; "": as when the group met.
            port: 0 picks a free one.
        Raises:
            StoreError: the address cannot be bound.
        """
        return self._listen(address, port)

    def waiting(self, maximum: int | None = None) -> int:
        """How many newcomers wait for `admit`; the same number on every rank, and all of them call it.

        Args:
            maximum: newcomers that would make the group larger are not counted.
        """
        return self._waiting(None if maximum is None else whole(maximum, "maximum", 1, MOST_SIZE))

    def admit(self, *, maximum: int | None = None, timeout: Seconds = None) -> Group:
        """Take in the newcomers that wait, see `join`: the next group, whose last ranks they are.

        Every rank calls it, between other calls. If nobody waits, it returns this group. Otherwise this
        group is closed once all ranks have made the next one.

        Args:
            maximum: the largest size of the next group; further newcomers wait for the next call.
        Raises:
            RendezvousError: the next group could not be made; this one goes on.
            PeerLost, Timeout: a rank was lost before.
        Example: group = group.admit()
        """
        maximum = None if maximum is None else whole(maximum, "maximum", 1, MOST_SIZE)
        return self._admit(maximum, self._planner.seconds(timeout))

    def _listen(self, address: str, port: int) -> tuple[str, ...]:  # noqa: ARG002
        self._refuse_membership("listen()")

    def _waiting(self, maximum: int | None) -> int:  # noqa: ARG002
        self._refuse_membership("waiting()")

    def _admit(self, maximum: int | None, timeout_s: float) -> Group:  # noqa: ARG002
        self._refuse_membership("admit()")

    def _refuse_membership(self, what: str) -> NoReturn:
        raise NotSupported(f"a group of this backend has no {what}: its membership is fixed", what=what)

    # ---- collectives: every rank calls them, in the same order --------------------------------------

    @collective(out="x", sendbuf="out")
    def all_reduce(
        self,
        x: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        algorithm: Algorithm = None,
        reproducible: bool = False,
        codec: CodecName | LowRank = None,
        between_hosts: bool | None = None,
        feedback: Any = None,
        max_error: float | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Reduce `x` over the group, in place or into `out`; every rank gets the same bits. For a number it
        returns a number.

        Shapes: x [numel], the same numel and dtype on every rank.
        Cost: one_shot 1 round, p-1 reads; two_shot 2 rounds; ring 2(p-1) rounds and 2(p-1)/p * nbytes sent.
        Example (p=2): [1, 2] and [3, 4] -> [4, 6] on both.
        """

    @collective(out="x")
    def broadcast(
        self,
        x: Any,
        src: int = 0,
        *,
        algorithm: Algorithm = None,
        codec: CodecName = None,
        between_hosts: bool | None = None,
        feedback: Any = None,
        max_error: float | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Copy `x` of rank `src` into `x` of every rank.

        Shapes: x [numel], the same numel and dtype on every rank.
        Example (p=2, src=0): [1, 2] and [0, 0] -> [1, 2] on both.
        """

    @collective(out="x", sendbuf="out")
    def reduce(
        self,
        x: Any,
        dst: int = 0,
        op: Op = SUM,
        *,
        out: Any = None,
        algorithm: Algorithm = None,
        reproducible: bool = False,
        codec: CodecName = None,
        between_hosts: bool | None = None,
        max_error: float | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Reduce `x` over the group into `x` of rank `dst`, or its `out`; no other rank's buffer changes.

        Shapes: x [numel], the same numel and dtype on every rank; out as x, not used on other ranks.
        Example (p=2, dst=0): [1, 2] and [3, 4] -> [4, 6] and [3, 4].
        """

    @collective(out="x", sendbuf="out")
    def scan(
        self,
        x: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        algorithm: Algorithm = None,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Reduce `x` over the ranks up to this one, in place or into `out`.

        Example (p=3): [1], [2], [3] -> [1], [3], [6].
        """

    @collective(out="x", sendbuf="out")
    def exclusive_scan(
        self,
        x: Any,
        op: Op = SUM,
        *,
        out: Any = None,
        algorithm: Algorithm = None,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Reduce `x` over the ranks below this one, in place or into `out`; that of rank 0 does not change.

        Example (p=3): [1], [2], [3] -> [1], [1], [3].
        """

    @collective()
    def barrier(
        self, *, algorithm: Algorithm = None, async_op: bool = False, timeout: Seconds = None
    ) -> Work | None:
        """Wait until every rank has called it."""

    @collective(out="out", sendbuf="x")
    def all_gather(
        self,
        out: Any = None,
        x: Any = None,
        *,
        algorithm: Algorithm = None,
        codec: CodecName = None,
        between_hosts: bool | None = None,
        max_error: float | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Gather `x` of every rank into `out` on every rank. `all_gather(x)` allocates and returns `out`.

        Shapes: x [numel], the same on every rank; out [p, numel], or a list of p arrays [numel].
        `x` may be this rank's own block of `out`. An allocated `out` has shape [p, *x.shape].
        Example (p=2): [1], [2] -> [[1], [2]] on both.
        """

    @collective(out="out", sendbuf="x")
    def all_gather_v(
        self,
        out: Sequence[Any],
        x: Any,
        *,
        algorithm: Algorithm = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Work | None:
        """`all_gather` where `x` has another size on each rank: `out` is a list of p arrays of those sizes.

        Every rank passes the same list of sizes.
        """

    @collective(out="out", sendbuf="x")
    def gather(
        self,
        x: Any,
        out: Any = None,
        dst: int = 0,
        *,
        algorithm: Algorithm = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Gather `x` of every rank into `out` on rank `dst`. There `gather(x)` allocates and returns `out`.

        Shapes: x [numel]; out on `dst` [p, numel] or a list of p arrays, elsewhere None. The sizes of a list
        may differ from rank to rank, with algorithm="direct" or None.
        """

    @collective(out="out", sendbuf="inputs")
    def scatter(
        self,
        out: Any,
        inputs: Any = None,
        src: int = 0,
        *,
        algorithm: Algorithm = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Work | None:
        """Send block i of `inputs` on rank `src` to rank i.

        Shapes: out [numel]; inputs on `src` [p, numel] or a list of p arrays, elsewhere None. The sizes of a
        list may differ from rank to rank, with algorithm="direct" or None.
        """

    @collective(out="out", sendbuf="inputs")
    def reduce_scatter(
        self,
        out: Any = None,
        inputs: Any = None,
        op: Op = SUM,
        *,
        algorithm: Algorithm = None,
        reproducible: bool = False,
        codec: CodecName = None,
        between_hosts: bool | None = None,
        feedback: Any = None,
        max_error: float | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Reduce block i of `inputs` over the group into `out` of rank i. The inputs do not change.
        `reduce_scatter(inputs)` allocates and returns `out`.

        Shapes: out [numel], inputs [p, numel] or a list of p arrays [numel], the same on every rank.
        `out` may be this rank's own block of `inputs`.
        Example (p=2): [[1], [2]] and [[3], [4]] -> [4] and [6].
        """

    @collective(out="out", sendbuf="inputs")
    def all_to_all(
        self,
        out: Any = None,
        inputs: Any = None,
        *,
        algorithm: Algorithm = None,
        codec: CodecName = None,
        between_hosts: bool | None = None,
        feedback: Any = None,
        max_error: float | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Send block i of `inputs` to rank i, which stores it in the sender's block of its `out`.
        `all_to_all(inputs)` allocates and returns `out`.

        Shapes: out and inputs [p, numel] each, or lists of p arrays. The sizes of a list may differ: block i
        of `inputs` has the size of the block that rank i expects from this rank.
        Example (p=2): [[1], [2]] and [[3], [4]] -> [[1], [3]] and [[2], [4]].
        """

    # ---- many buffers in one call, of any sizes and dtypes, the same list on every rank -------------

    @collective(out="xs", coalesced=True)
    def all_reduce_coalesced(
        self,
        xs: Sequence[Any],
        op: Op = SUM,
        *,
        reproducible: bool = False,
        codec: CodecName = None,
        between_hosts: bool | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Work | None:
        """`all_reduce` of each of `xs`."""

    @collective(out="xs", coalesced=True)
    def broadcast_coalesced(
        self,
        xs: Sequence[Any],
        src: int = 0,
        *,
        codec: CodecName = None,
        between_hosts: bool | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Work | None:
        """`broadcast` of each of `xs`."""

    @collective(out="outs", sendbuf="xs", coalesced=True)
    def all_gather_coalesced(
        self,
        outs: Sequence[Any],
        xs: Sequence[Any],
        *,
        codec: CodecName = None,
        between_hosts: bool | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Work | None:
        """`all_gather` of xs[i] into outs[i], for every i."""

    @collective(out="outs", sendbuf="inputs", coalesced=True)
    def reduce_scatter_coalesced(
        self,
        outs: Sequence[Any],
        inputs: Sequence[Any],
        op: Op = SUM,
        *,
        reproducible: bool = False,
        codec: CodecName = None,
        between_hosts: bool | None = None,
        async_op: bool = False,
        timeout: Seconds = None,
    ) -> Work | None:
        """`reduce_scatter` of inputs[i] into outs[i], for every i."""

    # ---- messages: two ranks call them; they may overlap any collective -----------------------------

    def send(
        self, x: Any, dst: int, tag: int = 0, *, codec: CodecName = None, timeout: Seconds = None
    ) -> None:
        """Send `x` to rank `dst`. Returns when `x` may be changed; it may not have been received yet.

        codec: how the float32 values of `x` are encoded; the receiver gives the same codec.
        """
        if codec is not None:
            _codec_messages().transfer_encoded(self._planner, "send", x, dst, tag, timeout, codec)
        elif self._send(x, dst, tag, timeout) is None:
            work = checked(self._planner, "send", x, dst, tag, timeout, receiving=False)
            run(self._planner, timeout, work)

    def recv(
        self,
        x: Any,
        src: SupportsIndex | None = None,
        tag: int = 0,
        *,
        codec: CodecName = None,
        timeout: Seconds = None,
    ) -> Status:
        """Receive into `x` from rank `src`, or from any rank (None); returns the message's `Status`.

        A message may be shorter than `x`: then it fills the first `status.numel` elements.

        Args:
            tag: of the message; `ANY_TAG` accepts any.
            codec: of the sender's `send`. Such a message has to fill `x`.
        Raises:
            Mismatch: the message is longer than `x`, or has another dtype or codec.
        Example: status = group.recv(x); group.send(reply, status.source, status.tag)
        """
        if codec is not None:
            receive_status: Status = _codec_messages().transfer_encoded(
                self._planner, "recv", x, src, tag, timeout, codec
            )
            return receive_status
        status: Status | None = self._recv(x, src, tag, timeout)
        if status is not None:
            return status
        work = checked(self._planner, "recv", x, src, tag, timeout, receiving=True)
        run(self._planner, timeout, work)
        return work.receive_status()

    def isend(
        self, x: Any, dst: int, tag: int = 0, *, synchronous: bool = False, timeout: Seconds = None
    ) -> MessageWork:
        """Begin to send `x`. Do not change `x` until the work is done.

        synchronous: the work is done only when a receive has matched the message, as in MPI_Ssend.
        """
        if synchronous:
            return begin(
                checked(self._planner, "isend", x, dst, tag, timeout, receiving=False, synchronous=True)
            )
        work: MessageWork | None = self._isend(x, dst, tag, timeout)
        return work or begin(checked(self._planner, "isend", x, dst, tag, timeout, receiving=False))

    def irecv(self, x: Any, src: int | None = None, tag: int = 0, *, timeout: Seconds = None) -> MessageWork:
        """Begin to receive into `x`; when done, the work's `status` is what `recv` returns.

        `work.cancel()` cancels it while no message has matched it.
        """
        work: MessageWork | None = self._irecv(x, src, tag, timeout)
        return work or begin(checked(self._planner, "irecv", x, src, tag, timeout, receiving=True))

    def sendrecv(
        self, x: Any, dst: int, out: Any, src: int | None = None, tag: int = 0, *, timeout: Seconds = None
    ) -> Status:
        """Send `x` to `dst` and receive into `out` from `src` at the same time; returns the `Status`.

        `x` and `out` may share memory: a copy of `x` is sent then, as in MPI_Sendrecv_replace.
        """
        status: Status | None = self._sendrecv(x, dst, tag, timeout, out, src)
        if status is not None:
            return status
        receive = read(self._planner, "sendrecv", out, src, tag, timeout, receiving=True)
        send = read(self._planner, "sendrecv", x, dst, tag, timeout, receiving=False)
        incoming, outgoing = together(self._planner, (receive, send))
        run(self._planner, timeout, incoming, outgoing)
        return incoming.receive_status()

    def _irecv_whole(self, x: Any, src: int | None, tag: int) -> MessageWork:
        """`irecv`, but a message that does not fill `x` is a Mismatch.

        For PyTorch's receives, which tell no size. Gloo leaves the rest of `x` as it was, and says nothing.
        """
        work: MessageWork | None = self._irecv_all(x, src, tag, None)
        return work or begin(checked(self._planner, "irecv", x, src, tag, None, receiving=True, exact=True))

    def probe(self, src: SupportsIndex | None = None, tag: int = 0, *, timeout: Seconds = None) -> Status:
        """Wait for a message from rank `src` (None: any rank), do not receive it, and return its `Status`.

        Raises:
            Timeout: none arrived. Nothing has changed; the group continues.
            PeerLost: that rank, or every other one, has ended or left without a message.
        Example: status = group.probe(tag=ANY_TAG); x = np.empty(status.numel, status.dtype)
            group.recv(x, status.source, status.tag)
        """
        status: Status | None = self._peek(None, src, tag, None)
        if status is not None:
            return status
        rank, tag = addressed(self._planner, "probe", src, tag, receiving=True)
        return self._probe(rank, tag, self._planner.seconds(timeout))

    def iprobe(self, src: SupportsIndex | None = None, tag: int = 0) -> Status | None:
        """The `Status` of the message that a `recv` from rank `src` (None: any rank) would get now, or None.

        Raises:
            PeerLost: see `probe`.
        """
        status: Status | None = self._peek(None, src, tag, None)
        return status or self._iprobe(*addressed(self._planner, "iprobe", src, tag, receiving=True))

    @abstractmethod
    def _probe(self, rank: int, tag: int, timeout_s: float) -> Status: ...

    @abstractmethod
    def _iprobe(self, rank: int, tag: int) -> Status | None: ...

    def batch(self, messages: Sequence[SendTo | RecvFrom], *, timeout: Seconds = None) -> list[MessageWork]:
        """Begin to send and receive all of `messages`; returns their works, in the same order.

        All are checked before the first is posted, and receives are posted first. So every list completes
        whose sends and receives match across ranks, in any order. A send whose `x` shares memory with a
        receive sends a copy.

        Raises:
            ValueError: two receives share memory.

        Example (p=2): un.wait_all(group.batch([SendTo(x, peer), RecvFrom(y, peer)]))
        """
        arguments = []
        messages = listed(messages, "batch: messages")
        for number, one in enumerate(messages):
            if not isinstance(one, SendTo | RecvFrom):
                raise TypeError(
                    f"batch: message {number} is a {type(one).__name__}, expected SendTo or RecvFrom"
                )
            receiving = isinstance(one, RecvFrom)
            peer = one.src if isinstance(one, RecvFrom) else one.dst
            arguments.append(read(self._planner, "batch", one.x, peer, one.tag, timeout, receiving=receiving))
        works = together(self._planner, arguments)
        for number in sorted(range(len(works)), key=lambda number: isinstance(messages[number], SendTo)):
            begin(works[number])
        return works

    # ---- windows ------------------------------------------------------------------------------------

    def window(self, array: Any = None) -> Window:
        """Let all ranks read, write and update `array` of every rank, without the owner's help.

        Every rank calls it, with an array of any size and dtype of its own, or None. Arrays of
        `unisono.empty` are the fastest.

        Raises:
            ValueError, TypeError: no contiguous array that can be written to.
            RendezvousError: ranks of different hosts cannot reach each other.
            NotSupported: a group of another backend.
        Example: window = group.window(np.zeros(4)); window.put(x, rank=1); window.fence()
        """
        return self._window(array)

    def _window(self, array: Any) -> Window:  # noqa: ARG002
        raise NotSupported("a group of this backend has no windows", what="window()")

    def queue(
        self,
        writer: int = 0,
        readers: Sequence[int] | None = None,
        *,
        bytes: int = 64 << 20,  # noqa: A002  (of the memory, as in the size of a buffer)
        keep: str = "all",
        spin_s: float = 20e-6,
        join: bool = True,
        pickle: bool = False,
    ) -> Queue:
        """A queue: `writer` puts messages, which `readers` read in place. Every rank calls it.

        On one host messages are in shared memory, each once. Each other host gets one copy.

        Args:
            readers: the ranks that may read; None: all but the writer.
            bytes: the room for messages, on each host; a message may be as large.
            keep: "all": each reader gets every message in order, and `put` waits for the slowest one.
                "latest": a reader gets the newest message only, and `put` waits for nobody.
            spin_s: how long a waiting call polls, in seconds; then it sleeps until it is woken.
            join: whether this rank reads from the beginning; otherwise after `Queue.join()`.
            pickle: as in `broadcast_object`.
        Raises:
            ValueError, TypeError: a wrong argument, or other ones on another rank; on all ranks.
            MemoryError: a host has not so much memory.  NotSupported: a group of another backend.
        Example: queue = group.queue(); queue.put(x) if group.rank == 0 else queue.get()
        """
        return self._queue(writer, readers, bytes, keep, spin_s, join, pickle)

    def _queue(self, *terms: Any) -> Queue:  # noqa: ARG002
        raise NotSupported("a group of this backend has no queues", what="queue()")

    # ---- objects ------------------------------------------------------------------------------------

    def broadcast_object(
        self, obj: Any = None, src: int = 0, *, pickle: bool = False, timeout: Seconds = None
    ) -> Any:
        """The object of rank `src`, on every rank."""
        sends = self.rank == self._planner.member("broadcast_object", src)
        encoded = objects.encode("broadcast_object", obj, pickle) if sends else b""
        sent = objects.packets([encoded]) if sends else None
        with self._object_turn:
            follows, (received,) = self._exchange("broadcast_object", sent, src, timeout)
            if follows:
                received = encoded if sends else objects.allocate(received)
                self._move("broadcast_object", received, None, src, timeout)
        return obj if sends else objects.decode_object(received, pickle=pickle)

    def all_gather_object(self, obj: Any, *, pickle: bool = False, timeout: Seconds = None) -> list[Any]:
        """The objects of all ranks, in the order of ranks, on every rank."""
        return self._gather_all("all_gather_object", obj, pickle, timeout)

    def gather_object(
        self, obj: Any, dst: int = 0, *, pickle: bool = False, timeout: Seconds = None
    ) -> list[Any] | None:
        """The objects of all ranks, in the order of ranks, on rank `dst`; elsewhere None."""
        return self._gather_to("gather_object", obj, dst, pickle, timeout)

    def scatter_object(
        self,
        objs: Sequence[Any] | None = None,
        src: int = 0,
        *,
        pickle: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Object i of the list of rank `src`, on rank i."""
        sends = self.rank == self._planner.member("scatter_object", src)
        objs = self._one_for_each("scatter_object", objs) if sends else []
        parts = [objects.encode("scatter_object", obj, pickle) for obj in objs]
        with self._object_turn:
            sent = objects.packets(parts) if sends else None
            follows, (received,) = self._exchange("scatter_object", sent, src, timeout)
            if follows:
                received = objects.allocate(received)
                arrays = [objects.as_array(part) for part in parts] if sends else None
                self._move("scatter_object", received, arrays, src, timeout)
        return objs[src] if sends else objects.decode_object(received, pickle=pickle)

    def all_to_all_object(
        self, objs: Sequence[Any], *, pickle: bool = False, timeout: Seconds = None
    ) -> list[Any]:
        """Object i of the list goes to rank i. Returns the objects for this rank, in the order of ranks.

        Example (p=2): all_to_all_object([(rank, 0), (rank, 1)]) -> [(0, rank), (1, rank)]
        """
        objs = self._one_for_each("all_to_all_object", objs)
        parts = [objects.encode("all_to_all_object", obj, pickle) for obj in objs]
        with self._object_turn:
            sent = objects.packets(parts)
            follows, received = self._exchange("all_to_all_object", sent, 0, timeout)
            if follows:
                received = [objects.allocate(length) for length in received]
                arrays = [objects.as_array(part) for part in parts]
                self._move("all_to_all_object", received, arrays, 0, timeout)
        return [objects.decode_object(part, pickle=pickle) for part in received]

    def _one_for_each(self, kind: str, objs: Sequence[Any] | None) -> list[Any]:
        given = None if objs is None else listed(objs, f"{kind}: objs")
        if given is None or len(given) != self.size:
            found = "None" if given is None else f"{len(given)} objects"
            raise ValueError(f"{kind}: got {found}, expected {self.size}: one for every rank")
        return given

    def reduce_object(
        self, obj: Any, op: Op = SUM, dst: int = 0, *, pickle: bool = False, timeout: Seconds = None
    ) -> Any:
        """The objects of all ranks, combined in the order of ranks, on rank `dst`; elsewhere None.

        Rank `dst` gets all objects and calls the function p-1 times.

        Args:
            op: SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR of Python values, or `un.op(f)` with any f(a, b); it
                may join values of different lengths.
        Raises:
            Aborted: the function raised on rank `dst`; the other ranks raise it in their next call.
        Example (p=3): reduce_object([rank]) -> [0, 1, 2] on rank 0.
        """
        return self._combined("reduce_object", obj, op, dst, pickle, timeout)

    def all_reduce_object(
        self, obj: Any, op: Op = SUM, *, pickle: bool = False, timeout: Seconds = None
    ) -> Any:
        """As `reduce_object`, on every rank.

        Raises:
            Aborted: the function raised; all ranks raise it.
        Example (p=2): all_reduce_object({rank: "x"}, un.op(lambda a, b: a | b)) -> {0: "x", 1: "x"}
        """
        found = self._combined("all_reduce_object", obj, op, 0, pickle, timeout)
        return self.broadcast_object(found, 0, pickle=pickle, timeout=timeout)

    def scan_object(self, obj: Any, op: Op = SUM, *, pickle: bool = False, timeout: Seconds = None) -> Any:
        """The objects of the ranks up to this one, combined in the order of ranks. See `all_reduce_object`.

        Example (p=3): scan_object("abc"[rank]) -> "a", "ab", "abc"
        """
        found = self._combined("scan_object", obj, op, 0, pickle, timeout)
        return self.scatter_object(found, 0, pickle=pickle, timeout=timeout)

    def _combined(self, kind: str, obj: Any, op: Op, dst: int, pickle: bool, timeout: Seconds) -> Any:
        """All objects combined on rank `dst`; for a scan the list of all results."""
        function = of_values(kind, op)
        parts = self._gather_to(kind, obj, dst, pickle, timeout, op)
        if parts is None:
            return None
        try:
            return list(accumulate(parts, function)) if kind == "scan_object" else reduce(function, parts)
        except Exception as error:  # noqa: BLE001  (it is raised)
            self._fail_function(kind, error)

    @abstractmethod
    def _fail_function(self, kind: str, error: Exception) -> NoReturn:
        """Raise the error of a function of objects, on all ranks if the library can."""

    def send_object(
        self, obj: Any, dst: int, tag: int = 0, *, pickle: bool = False, timeout: Seconds = None
    ) -> None:
        """Send an object to rank `dst`."""
        self._send_encoded(objects.encode("send_object", obj, pickle), dst, tag, timeout)

    def recv_object(
        self,
        src: SupportsIndex | None = None,
        tag: int = 0,
        *,
        pickle: bool = False,
        with_status: bool = False,
        timeout: Seconds = None,
    ) -> Any:
        """Receive an object from rank `src`, or from any rank (None).

        Args:
            tag: of the message; `ANY_TAG` accepts any.
            with_status: return the object and the message's `Status`.
        Raises:
            Mismatch: the message is an array.
        Example: task, status = group.recv_object(tag=un.ANY_TAG, with_status=True)
        """
        encoded, status = self._recv_encoded(src, tag, timeout)
        obj = objects.decode_object(encoded, pickle=pickle)
        return (obj, status) if with_status else obj

    def recv_bytes(
        self, src: SupportsIndex | None = None, tag: int = 0, *, timeout: Seconds = None
    ) -> objects.ReceivedBytes:
        """Receive the next message from rank `src`, or from any rank (None), whatever its size and dtype.

        No other thread can take it in between, as it could after a `probe`.

        Args:
            tag: of the message; `ANY_TAG` accepts any.
        Returns:
            Its bytes, a writable array of uint8, and its `Status`. Those of an object are its encoding.
        Example: data, status = group.recv_bytes(); x = data.view(status.dtype)
        """
        return self._recv_any(src, tag, timeout)

    def irecv_object(
        self,
        src: SupportsIndex | None = None,
        tag: int = 0,
        *,
        pickle: bool = False,
        timeout: Seconds = None,
    ) -> MessageWork:
        """Begin to receive an object; the work's `result()` is the object, its `status` the message's."""
        decode = partial(objects.decode_object, pickle=pickle)
        return self._begin_sized("irecv_object", src, tag, timeout, decode)

    def irecv_bytes(
        self, src: SupportsIndex | None = None, tag: int = 0, *, timeout: Seconds = None
    ) -> MessageWork:
        """Begin to receive the next message, whatever its size and dtype, see `recv_bytes`.

        The work's `result()` is the array of its bytes. `work.cancel()` returns False once a message has
        matched: so a program learns whether one has come, and no other receive gets it.
        """
        return self._begin_sized("irecv_bytes", src, tag, timeout, None)

    def _begin_sized(
        self, name: str, src: SupportsIndex | None, tag: int, timeout: Seconds, decode: Any
    ) -> MessageWork:
        rank, tag = addressed(self._planner, name, src, tag, receiving=True)
        return begin(self._planner.sized_message(name, rank, tag, self._planner.seconds(timeout), decode))

    @abstractmethod
    def _send_encoded(self, encoded: bytes, dst: int, tag: int, timeout: Seconds) -> None: ...

    @abstractmethod
    def _recv_encoded(
        self, src: SupportsIndex | None, tag: int, timeout: Seconds
    ) -> objects.ReceivedBytes: ...

    @abstractmethod
    def _recv_any(self, src: SupportsIndex | None, tag: int, timeout: Seconds) -> objects.ReceivedBytes: ...

    def _gather_all(self, kind: str, obj: Any, pickle: bool, timeout: Seconds) -> list[Any]:
        return self._collect(kind, kind, obj, None, pickle, timeout) or []

    def _gather_to(
        self, kind: str, obj: Any, dst: int, pickle: bool, timeout: Seconds, op: Op = SUM
    ) -> list[Any] | None:
        root = self._planner.member(kind, dst)
        return self._collect(kind, "gather_object_bytes", obj, root, pickle, timeout, op)

    def _collect(
        self, kind: str, second: str, obj: Any, root: int | None, pickle: bool, timeout: Seconds,
        op: Op = SUM,
    ) -> list[Any] | None:  # fmt: skip
        """The objects of all ranks, on the root; on all if it is None. second: moves objects that follow."""
        encoded = objects.encode(kind, obj, pickle)
        gets, root = root in (None, self.rank), root or 0
        with self._object_turn:
            follows, parts = self._exchange(kind, objects.packets([encoded]), root, timeout, op)
            if follows:
                parts = [objects.allocate(length) for length in parts] if gets else None
                self._move(second, parts, objects.as_array(encoded), root, timeout, op)
        return [objects.decode_object(part, pickle=pickle) for part in parts] if gets else None

    def _exchange(
        self, kind: str, sent: bytearray | None, root: int, timeout: Seconds, op: Op = SUM
    ) -> tuple[bool, Any]:
        more = self.size, objects.NotEncoded, None, op, root, None, False, False, timeout
        return _native.exchange_packets(self._call, kind, sent, *more)

    def _move(self, kind: str, out: Any, sendbuf: Any, root: int, timeout: Seconds, op: Op = SUM) -> None:
        """One of the operations of an object call: packets, then bytes. op: ranks compare it."""
        self._call(kind, out, sendbuf, op, root, None, False, False, timeout)

    # ---- groups of some of the ranks ----------------------------------------------------------------

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of this group's ranks, in the order given; None on the ranks that are not in it.

        Every rank of this group calls it, with the same ranks. The members of the new group wait until all
        have called it; the other ranks do not. The new group numbers its own operations, and is closed
        separately.

        Example (p=4): subgroup([2, 0]) is a group on ranks 0 and 2, whose ranks there are 1 and 0.
        """
        chosen = self._check_ranks(ranks)
        self._agree(chosen)
        return self._form(chosen)

    @abstractmethod
    def _agree(self, chosen: tuple[int, ...]) -> None:
        """Compare the ranks' lists."""

    def _form(self, chosen: tuple[int, ...]) -> Group | None:
        """Make the group of the ranks on which all have agreed."""
        self._subgroups += 1
        members = tuple(self._members[rank] for rank in chosen)
        return self._connect(chosen, f"{self.name}/{self._subgroups}", members)

    @abstractmethod
    def _connect(self, chosen: tuple[int, ...], name: str, members: tuple[int, ...]) -> Group | None:
        """The subgroup of these ranks; None where this rank is none of them."""

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Split this group into one group for every `color`; None for a rank whose color is None.

        Ranks of the new groups are in the order of `key`, then of their ranks here. Every rank calls it.

        Example (p=4): split(rank % 2) makes groups of ranks 0, 2 and of ranks 1, 3.
        """
        wishes = self._gather_all("split", (color, key), False, None)
        colors = sorted({wish[0] for wish in wishes if wish[0] is not None})
        mine: Group | None = None
        first = self._subgroups
        try:
            for one in colors:  # every rank counts all of them, so that their numbers agree
                chosen = [rank for rank, wish in enumerate(wishes) if wish[0] == one]
                group = self._form(tuple(sorted(chosen, key=lambda rank: (wishes[rank][1], rank))))
                mine = mine or group
        finally:
            self._subgroups = first + len(colors)  # also where making one of them failed
        return mine

    def duplicate(self) -> Group:
        """A group of the same ranks, whose messages are apart from those of this one. Every rank calls it.

        It needs no connections or threads of its own, and takes about 0.1 ms: both groups share
        one engine. So the collectives of a group and its duplicates are one sequence, in the same order on
        every rank; a fault ends all of them; and they end with the original. A tag is at most 524,287.
        `subgroup` makes a group that depends on nothing.

        Raises:
            ValueError: 4,095 duplicates are open.  NotSupported: a group of another backend.
        Example: a library takes group.duplicate(): its receives never get the messages of its caller.
        """
        return self._duplicate()

    def _duplicate(self) -> Group:
        self._refuse_membership("duplicate()")

    def _check_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        self._planner.check_open()
        chosen = tuple(
            self._planner.member("subgroup", rank) for rank in listed(ranks, "subgroup: ranks", self.size)
        )
        if not chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"subgroup: ranks are {list(chosen)}, expected at least one, each once")
        return chosen

    # ---- information, and the end -------------------------------------------------------------------

    def host_of(self, rank: int) -> str:
        """The name of the host on which a rank runs. Ranks are on one host when they share memory. Hosts with
        equal names get numbers: "node", "node#2".
        """
        return self._hosts[self._planner.member("host_of", rank)]

    def choice(self, collective: str, nbytes: int, algorithm: str | None = None) -> AlgorithmChoice:
        """The algorithm that a collective takes here, and its time by the cost model.

        Args:
            nbytes: of the whole buffer; of the larger one where input and output differ.
            algorithm: the algorithm to price; None: the one that a call would take.
        Raises:
            ValueError: there is no such collective or algorithm.
        """
        return self._planner.choice(collective, whole(nbytes, "nbytes", 0, MOST_BYTES), algorithm)

    def error_bound(
        self,
        collective: str,
        data: Any,
        codec: Codec | str,
        *,
        op: Op = SUM,
        algorithm: str | None = None,
        between_hosts: bool | None = None,
        feedback: Any = None,
        root: SupportsIndex = 0,
    ) -> float:
        """The largest error of a result with this codec, on any rank.

        The bound follows from the proved plan: what is encoded, how often, and what float32 rounds. No byte
        moves.

        Args:
            data: the largest magnitude of any rank's contribution; or float32 values that contain it.
            feedback: the same for the feedback buffer.
            root: of a broadcast or a reduce.
        Returns:
            A magnitude; infinite where a value may overflow, or `data` is not finite.
        Raises:
            ValueError, TypeError: as in the call.  PlanError: the plan cannot carry these codes.
        Example (p=2): error_bound("all_reduce", 1.0, "bf16") is 0.0117: 2**-8 for the value sent to the rank
            that adds, 2**-7 for the sum that it sends back, and the rounding of float32.
        """
        at = self._planner.member("error_bound", root, "the root")
        return self._planner.codings.bound(
            collective, data, codec, op, algorithm, between_hosts, feedback, at
        )

    def explain(
        self,
        collective: str,
        nbytes: int,
        *,
        max_error: float,
        op: Op = SUM,
        between_hosts: bool | None = None,
    ) -> tuple[CodecChoice, ...]:
        """The gain of each codec for a float32 buffer, and which one codec="auto" takes.

        Args:
            nbytes: as in `choice`.  max_error: as in a call.
        Raises:
            ValueError, TypeError: there is no such collective, or it has no codecs.
        Example: print(*group.explain("all_reduce", 64 << 20, max_error=0.01), sep="\n")
        """
        return self._planner.codings.explain(
            collective, whole(nbytes, "nbytes", 0, MOST_BYTES), op, between_hosts, max_error
        )

    def last_seen(self, rank: int) -> str:
        """The newest operation of a rank, as in error texts: "in barrier #40", "after barrier #40"."""
        return self._last_seen(self._planner.member("last_seen", rank))

    @abstractmethod
    def _last_seen(self, rank: int) -> str: ...

    def abort(self) -> None:
        """End every operation of the group, on every rank, with an error; then only `close` works."""
        self._abort()

    @abstractmethod
    def _abort(self) -> None: ...

    def close(self) -> None:
        """Leave the group. It never blocks for long, always works, and may be called twice.

        Other ranks can still receive what this rank has sent. A rank that waits for more from it gets
        `PeerLost`, whose text names the exception that is under way here, if any.
        """
        self._leave(error_reason())

    def _leave(self, error: BaseException | None) -> None:
        alive = self._finalizer.detach()
        if alive is None:
            return
        self._close()
        _, _, (planner, rendezvous, pid), _ = alive
        try:
            _close(planner, rendezvous, pid, error)
        finally:
            self._release()

    def _unreported(self) -> BaseException | None:
        """The error of an asynchronous collective that no call and no wait has raised yet."""
        return None

    def _place(self, hosts: tuple[int, ...]) -> None:
        """Plan as if the ranks were on these hosts (one number for each rank); the same on every rank."""
        self._planner.place(hosts)
        self._forget(self.timeout_s)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Close. If the block raised nothing, raise the error of asynchronous work that no wait raised."""
        unheard = self._unreported() if kind is None else None
        self._leave(error)  # not what a handler around the block has caught before
        if unheard is not None:
            raise unheard
        return None

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.rank} of {self.size}"
        return f"<Group {self.name!r}: {state}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Group belongs to one process and cannot be pickled")


def _codec_messages() -> ModuleType:
    from unisono.engine.group import codec_messages  # most programs need no codecs

    return codec_messages


def _end(planner: Planner[Any], rendezvous: Rendezvous | None, pid: int) -> None:
    """Close a group that the program did not close: it is garbage, or the program ends."""
    _close(planner, rendezvous, pid, error_reason())


def _close(
    planner: Planner[Any], rendezvous: Rendezvous | None, pid: int, error: BaseException | None
) -> None:
    if os.getpid() != pid:  # a forked child's copy: only the parent may leave the group
        planner.abandon()
        return
    try:
        planner.leave(close_reason(error))
    finally:  # also after Ctrl-C
        if rendezvous is not None:
            rendezvous.close(failed=error is not None)
