"""The collectives of `torch.distributed.ProcessGroup`, each a translation of one Group call.

PyTorch has two generations of names (`_allgather_base` and `all_gather_single`) and two ways to call each
method, f(tensors, opts) and f(tensor, op, timeout). Every method here takes both. No algorithm lives here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from .arguments import PLAIN, REDUCE_OPS, Call, options, reduce_op, single
from .profiling import Event, is_on
from .work import DONE, Together, TransferWork, UnisonoWork, seconds

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch import Tensor
    from torch._C._distributed_c10d import Work

    from unisono.group import Group

    from .work import Futures, NativeWork

__all__ = ["Collectives"]


class Collectives:
    """The part of the process group that moves data. `_group` does the work."""

    _group: Group
    _futures: Futures
    _size: int
    _issued: int
    _batch: list[UnisonoWork] | None
    _coalescing = False  # within a call that is several calls of the Group, and one event
    _backend = "unisono"  # the name it goes by
    _recent: deque[UnisonoWork]

    # ---- reductions ----

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        """Reduce one tensor over the group, in place."""
        if type(opts) is not AllreduceOptions:
            opts = options(AllreduceOptions, opts, reduceOp=opts if op is None else op, timeout=timeout)
        x = tensors[0] if type(tensors) is list and len(tensors) == 1 else single("all_reduce", tensors)
        if type(x) in PLAIN and not opts.asyncOp and not is_on():
            # What `dist.all_reduce(x)` does all day: no list, no copy, no Work. The Group checks `x` itself.
            op, timeout = opts.reduceOp, opts.timeout
            number = hash(op)
            try:
                self._group.all_reduce(
                    x,
                    REDUCE_OPS[number] if number < 8 else reduce_op(op),
                    timeout=None if timeout.days < 0 else seconds(timeout),
                )
            except ValueError:
                pass  # no byte has moved: what is wrong with `x` can perhaps be helped below
            else:
                self._issued += 1
                return DONE
        call = Call("all_reduce")
        return self._run(self._group.all_reduce, opts, [x], call, call.inout(x), reduce_op(opts.reduceOp))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce several tensors over the group, each in place."""
        opts = options(AllreduceCoalescedOptions, opts)
        return self._coalesced(
            "all_reduce",
            tensors,
            lambda: [self.allreduce([x], _single_options(AllreduceOptions, opts)) for x in tensors],
        )

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Reduce one tensor to one rank; the others keep theirs."""
        opts = options(
            ReduceOptions, opts, rootRank=opts if root is None else root, reduceOp=op, timeout=timeout
        )
        x, call = single("reduce", tensors), Call("reduce")
        buffer = call.inout(x)
        return self._run(
            self._group.reduce, opts, [x], call, buffer, dst=opts.rootRank, op=reduce_op(opts.reduceOp)
        )

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        """Reduce a list of tensors; rank i gets the i-th."""
        opts = options(ReduceScatterOptions, opts, reduceOp=opts if op is None else op, timeout=timeout)
        out = single("reduce_scatter", output_tensors)
        inputs = input_tensors if isinstance(input_tensors[0], torch.Tensor) else input_tensors[0]
        call = Call("reduce_scatter")
        buffers = [call.read(x) for x in inputs]
        return self._run(
            self._group.reduce_scatter, opts, [out], call, call.write(out), buffers, reduce_op(opts.reduceOp)
        )

    def reduce_scatter_single(
        self, output: Tensor, given: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Reduce a tensor; rank i gets its i-th part."""
        opts = options(ReduceScatterOptions, opts, reduceOp=opts, timeout=timeout)
        call = Call("reduce_scatter")
        out, read = call.write(output), call.read(given)
        return self._run(
            self._group.reduce_scatter, opts, [output], call, out, read, reduce_op(opts.reduceOp)
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Reduce several tensors; rank i gets the i-th part of each."""
        _same_length("reduce_scatter", outputs, inputs)
        opts = options(ReduceScatterOptions, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._coalesced(
            "reduce_scatter", inputs, lambda: [self.reduce_scatter_single(out, x, opts) for out, x in pairs]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- one to all, all to one ----

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Work:
        """Copy the root's tensor into everybody's."""
        opts = options(BroadcastOptions, opts, rootRank=opts if root is None else root, timeout=timeout)
        x, call = single("broadcast", tensors), Call("broadcast", moves_only=True)
        return self._run(self._group.broadcast, opts, [x], call, call.inout(x), src=opts.rootRank)

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Collect everybody's tensor on the root."""
        opts = options(GatherOptions, opts, rootRank=opts if root is None else root, timeout=timeout)
        outputs = _flat(output_tensors)
        x, call = single("gather", input_tensors), Call("gather", moves_only=True)
        out = [call.write(each) for each in outputs] or None
        return self._run(self._group.gather, opts, outputs, call, call.read(x), out, dst=opts.rootRank)

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Give the i-th of the root's tensors to rank i."""
        opts = options(ScatterOptions, opts, rootRank=opts if root is None else root, timeout=timeout)
        out, call = single("scatter", output_tensors), Call("scatter", moves_only=True)
        inputs = [call.read(each) for each in _flat(input_tensors)] or None
        return self._run(self._group.scatter, opts, [out], call, call.write(out), inputs, src=opts.rootRank)

    # ---- all to all ----

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Collect everybody's tensor, in a list, everywhere."""
        opts = options(AllgatherOptions, opts, timeout=timeout)
        outputs = _flat(output_tensors)
        x, call = single("all_gather", input_tensors), Call("all_gather", moves_only=True)
        out = [call.write(each) for each in outputs]
        return self._run(self._group.all_gather, opts, outputs, call, out, call.read(x))

    def all_gather_single(
        self, output: Tensor, given: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Collect everybody's tensor, stacked or concatenated, everywhere."""
        opts = options(AllgatherOptions, opts, timeout=timeout)
        call = Call("all_gather", moves_only=True)
        return self._run(self._group.all_gather, opts, [output], call, call.write(output), call.read(given))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Collect several tensors of everybody, each into one output."""
        _same_length("all_gather", outputs, inputs)
        opts = options(AllgatherOptions, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._coalesced(
            "all_gather", inputs, lambda: [self.all_gather_single(out, x, opts) for out, x in pairs]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Collect several tensors of everybody: output_lists[rank][i] is that rank's inputs[i]."""
        opts = options(AllgatherOptions, opts)
        for outputs in output_lists:
            _same_length("all_gather", outputs, inputs)
        columns = zip(zip(*output_lists, strict=True), inputs, strict=True)
        return self._coalesced(
            "all_gather", inputs, lambda: [self.allgather([list(outs)], [x], opts) for outs, x in columns]
        )

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Give inputs[i] to rank i and take outputs[i] from it."""
        opts = options(AllToAllOptions, opts, timeout=timeout)
        call = Call("all_to_all", moves_only=True)
        read = [call.read(x) for x in inputs]
        written = [call.write(x) for x in outputs]
        return self._run(self._group.all_to_all, opts, list(outputs), call, written, read)

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Give the i-th part of `given` to rank i and take the i-th part of `output` from it."""
        opts = options(AllToAllOptions, opts, timeout=timeout)
        call = Call("all_to_all", moves_only=True)
        equal = not output_split_sizes and not input_split_sizes
        written = call.splits(output, output_split_sizes, self._size)
        read = call.splits(given, input_split_sizes, self._size)
        return self._run(
            self._group.all_to_all,
            opts,
            [output],
            call,
            call.write(output) if equal else [call.write(part) for part in written],
            call.read(given) if equal else [call.read(part) for part in read],
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait until every rank of the group is here. `device_ids` mean nothing on the CPU."""
        opts = options(BarrierOptions, opts, timeout=timeout)
        return self._run(self._group.barrier, opts, [], Call("barrier"))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: ARG002
        """Wait for every rank; the Timeout names those that did not come, all of them, on every rank."""
        self._issued += 1
        self._group.barrier(timeout=seconds(timeout))

    # ---- point to point ----

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send one tensor to a rank of the group."""
        return self._transfer("send", self._group.isend, tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive one tensor from a rank of the group."""
        return self._transfer("recv", self._group.irecv, tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive one tensor from whoever sends first; the Work knows from whom."""
        return self._transfer("recv", self._group.irecv, tensors, None, tag)

    # ---- several calls in one ----

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        """Begin to remember the works that are handed out."""
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Work:  # noqa: ARG002
        """Hand out one Work for all since `_start_coalescing`."""
        batch, self._batch = self._batch or [], None
        return self._each(batch)

    # ---- how a call is made ----

    def _run(
        self,
        method: Callable[..., Any],
        opts: Any,
        result: list[Tensor],
        call: Call,
        *args: Any,
        **kwargs: Any,
    ) -> Work:
        """Call the Group; at once, or as a Work when PyTorch wants to wait later."""
        self._issued += 1
        timeout = seconds(opts.timeout)
        event = self._event(call.what, call.inputs)
        if event or opts.asyncOp:
            native = method(*args, **kwargs, async_op=True, timeout=timeout)
            after = event.ends_with(native, self._futures, call.after) if event else call.after
            work = UnisonoWork(native, result, self._futures, after)
            if opts.asyncOp:
                return self._handed_out(work)
            work.wait()
            return DONE
        method(*args, **kwargs, timeout=timeout)
        if call.after:
            call.after()
        return DONE

    def _transfer(
        self, what: str, method: Callable[..., NativeWork], tensors: Any, peer: int | None, tag: int
    ) -> Work:
        """Start a send or a receive."""
        x, call = single(what, tensors), Call(what, moves_only=True)
        buffer = call.read(x) if what == "send" else call.write(x)
        event = self._event("recvAnySource" if peer is None else what, [x])
        native = method(buffer, peer, tag)
        after = event.ends_with(native, self._futures, call.after, ordered=False) if event else call.after
        return self._handed_out(TransferWork(native, [x], self._futures, after))

    def _coalesced(self, what: str, inputs: Sequence[Tensor], make: Callable[[], list[Any]]) -> Work:
        """Call the Group several times, as one Work and one event."""
        event = self._event(what, inputs)
        outer, self._coalescing = self._coalescing, True
        try:
            work = self._each(make())
        finally:
            self._coalescing = outer
        if not event:
            return work
        native = Together([work] if isinstance(work, UnisonoWork) else [])
        together = UnisonoWork(native, list(inputs), self._futures, event.ends_with(native, self._futures))
        if work is not DONE:
            return together
        together.wait()
        return DONE

    def _event(self, what: str, inputs: Sequence[Tensor] | None) -> Event | None:
        """Begin an event, such as "unisono:all_reduce", if PyTorch's profiler is on."""
        if self._coalescing or not is_on():
            return None
        return Event(f"{self._backend}:{what}", inputs or ())

    def _each(self, works: Sequence[Any]) -> Work:
        pending = [work for work in works if work is not DONE]
        if not pending:
            return DONE
        result = [x for work in pending for x in work.outputs]
        return UnisonoWork(Together(pending), result, self._futures)

    def _handed_out(self, work: UnisonoWork) -> UnisonoWork:
        if self._batch is not None:
            self._batch.append(work)
        # C++ that keeps a Work does not keep its Python half, without which `wait` is PyTorch's own, for
        # ever. `Join(divide_by_initial_world_size=False)` does so with a count of one element.
        if sum(x.numel() for x in work.outputs) <= 16:
            self._recent.append(work)
        return work


def _flat(lists: Any) -> list[Tensor]:
    """Take [[a, b]] and [a, b] alike; [] stays []."""
    return list(lists[0] if lists and not isinstance(lists[0], torch.Tensor) else lists)


def _same_length(what: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    if len(outputs) != len(inputs):
        raise ValueError(f"{what}: {len(outputs)} outputs for {len(inputs)} inputs")


def _single_options(kind: Any, given: Any) -> Any:
    return options(kind, None, reduceOp=given.reduceOp, timeout=given.timeout, asyncOp=given.asyncOp)
