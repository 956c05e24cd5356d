"""The collectives of a group. Each checks its arguments and names its operation; the rest is one path."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from unisono.group.calls import Caller
from unisono.group.work import Work
from unisono.reduction import Op, ReduceOp

__all__ = ["Collectives"]

SUM = ReduceOp.SUM
Timeout = float | timedelta | None


class Collectives:
    """Operations that every rank of the group calls, in the same order.

    Arrays are NumPy arrays, torch CPU tensors or other contiguous CPU buffers. Of all operations:

    Args:
        algorithm: a name of `unisono.plans.ALGORITHMS`; None chooses by size, ranks and hosts.
        reproducible: contributions are combined in the order of ranks, in one accumulation, whatever the
            size and placement: the bits are those of NumPy's fold from rank 0 to p-1 (16-bit floats are
            widened and rounded once). An `algorithm` that does not is refused.
        async_op: return a `Work` at once. The buffers are the operation's until it is done.
        timeout: seconds (or a timedelta) for the whole operation; None: the group's.
    Raises:
        ValueError, TypeError: a wrong argument; no byte has moved and the group is fine.
        Timeout, PeerLost, Mismatch, Aborted: the operation failed; the group is aborted.
    """

    _caller: Caller

    def all_reduce(
        self,
        x: Any,
        op: Op = SUM,
        *,
        algorithm: str | None = None,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce `x` over the group; every rank gets the same bits, in place.

        Shapes: x [numel], the same numel and dtype on every rank.
        Cost: one_shot 1 round, p-1 reads; two_shot 2 rounds; ring 2(p-1) rounds and 2(p-1)/p * nbytes sent.
        Example (p=2): [1, 2] and [3, 4] -> [4, 6] on both.
        """
        return self._caller.call("all_reduce", x, None, op, 0, algorithm, reproducible, async_op, timeout)

    def broadcast(
        self,
        x: Any,
        src: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Copy `x` of rank `src` into `x` of every rank.

        Shapes: x [numel], the same numel and dtype on every rank.
        Example (p=2, src=0): [1, 2] and [0, 0] -> [1, 2] on both.
        """
        return self._caller.call("broadcast", x, None, SUM, src, algorithm, False, async_op, timeout)

    def reduce(
        self,
        x: Any,
        dst: int = 0,
        op: Op = SUM,
        *,
        algorithm: str | None = None,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce `x` over the group into `x` of rank `dst`; all other ranks' buffers stay as they were.

        Shapes: x [numel], the same numel and dtype on every rank.
        Example (p=2, dst=0): [1, 2] and [3, 4] -> [4, 6] and [3, 4].
        """
        return self._caller.call("reduce", x, None, op, dst, algorithm, reproducible, async_op, timeout)

    def scan(
        self,
        x: Any,
        op: Op = SUM,
        *,
        algorithm: str | None = None,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce `x` over the ranks up to this one, in place.

        Example (p=3): [1], [2], [3] -> [1], [3], [6].
        """
        return self._caller.call("scan", x, None, op, 0, algorithm, reproducible, async_op, timeout)

    def exclusive_scan(
        self,
        x: Any,
        op: Op = SUM,
        *,
        algorithm: str | None = None,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce `x` over the ranks below this one, in place; rank 0 keeps what it had.

        Example (p=3): [1], [2], [3] -> [1], [1], [3].
        """
        return self._caller.call("exclusive_scan", x, None, op, 0, algorithm, reproducible, async_op, timeout)

    def barrier(
        self, *, algorithm: str | None = None, async_op: bool = False, timeout: Timeout = None
    ) -> Work | None:
        """Wait until every rank has come here."""
        return self._caller.call("barrier", None, None, SUM, 0, algorithm, False, async_op, timeout)

    def all_gather(
        self,
        out: Any,
        x: Any,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Gather `x` of every rank into `out` on every rank.

        Shapes: x [numel], the same on every rank; out [p, numel], or a list of p arrays [numel].
        `x` may be this rank's own block of `out`.
        Example (p=2): [1], [2] -> [[1], [2]] on both.
        """
        return self._caller.call("all_gather", out, x, SUM, 0, algorithm, False, async_op, timeout)

    def all_gather_v(
        self,
        out: Sequence[Any],
        x: Any,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """As `all_gather`, for ranks whose `x` differ in size: `out` is a list of p arrays of those sizes.

        Every rank passes the same list of sizes.
        """
        return self._caller.call("all_gather_v", list(out), x, SUM, 0, algorithm, False, async_op, timeout)

    def gather(
        self,
        x: Any,
        out: Any = None,
        dst: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Gather `x` of every rank into `out` on rank `dst`.

        Shapes: x [numel]; out on `dst` [p, numel] or a list of p arrays (their sizes may differ, as the
        ranks' do, unless an algorithm other than direct is asked for), elsewhere None.
        """
        return self._caller.call("gather", out, x, SUM, dst, algorithm, False, async_op, timeout)

    def scatter(
        self,
        out: Any,
        inputs: Any = None,
        src: int = 0,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Hand block i of `inputs` on rank `src` to rank i.

        Shapes: out [numel]; inputs on `src` [p, numel] or a list of p arrays (their sizes may differ, as
        the ranks' do, unless an algorithm other than direct is asked for), elsewhere None.
        """
        return self._caller.call("scatter", out, inputs, SUM, src, algorithm, False, async_op, timeout)

    def reduce_scatter(
        self,
        out: Any,
        inputs: Any,
        op: Op = SUM,
        *,
        algorithm: str | None = None,
        reproducible: bool = False,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Reduce block i of `inputs` over the group into `out` of rank i. The inputs stay as they were.

        Shapes: out [numel], inputs [p, numel] or a list of p arrays [numel], the same on every rank.
        `out` may be this rank's own block of `inputs`.
        Example (p=2): [[1], [2]] and [[3], [4]] -> [4] and [6].
        """
        return self._caller.call(
            "reduce_scatter", out, inputs, op, 0, algorithm, reproducible, async_op, timeout
        )

    def all_to_all(
        self,
        out: Any,
        inputs: Any,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Work | None:
        """Hand block i of `inputs` to rank i, into its block of this rank's number.

        Shapes: out and inputs [p, numel] each, or lists of p arrays; in a list sizes may differ, when
        block i here has the size of this rank's block there.
        Example (p=2): [[1], [2]] and [[3], [4]] -> [[1], [3]] and [[2], [4]].
        """
        return self._caller.call("all_to_all", out, inputs, SUM, 0, algorithm, False, async_op, timeout)
