"""The collectives of `torch.distributed.ProcessGroup`, each a translation of one Group call.

PyTorch has two generations of names (`_allgather_base` and `all_gather_single`) and two ways to call each
method, f(tensors, opts) and f(tensor, op, timeout). Every method here takes both. No algorithm lives here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unisono.errors import message
from unisono.torch_internals.c10d import (
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

from .arguments import TensorArguments, options, single
from .cuda import any_device
from .group_calls import GroupCalls, fast_path
from .hooks import watched

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch import Tensor

    from unisono.codecs.codec import Codec
    from unisono.torch_internals.c10d import Work

    from .monitored_barrier import MonitoredBarrier


def _equal_parts(
    group: GroupCalls, _: Any, output: Tensor, given: Tensor, output_sizes: Any, input_sizes: Any, *__: Any
) -> bool:
    """Whether both first dimensions are cut into one equal part per rank: the Group counts elements only."""
    if output_sizes or input_sizes or not output.dim() or not given.dim():
        return False
    return not (len(output) % group._size or len(given) % group._size)


def _on_host(group: GroupCalls, opts: Any, *_: Any) -> bool:
    """Whether this group runs the barrier: the options have no CUDA device, or it moves CUDA memory."""
    return opts.device is None or opts.device.type != "cuda" or group._moves_cuda


class Collectives(GroupCalls):
    """The part of the process group that moves data, through `_group`."""

    _monitored: MonitoredBarrier

    # ---- reductions ----

    @fast_path("all_reduce", AllreduceOptions)
    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        """Reduce one tensor over the group, in place."""
        x = tensors[0] if type(tensors) is list and len(tensors) == 1 else single("all_reduce", tensors)
        opts = options(AllreduceOptions, opts, reduceOp=opts if op is None else op, timeout=timeout)
        if x.is_cuda and not self._moves_cuda:
            passed_on: Work = self._cuda.group.allreduce([x], opts)
            return passed_on
        if x.layout is torch.sparse_coo:
            return self._sparse_sum(x, opts)
        call = TensorArguments("all_reduce")
        op = call.op(opts.reduceOp, x, self._size, self._like_nccl)
        return self._run(self._group.all_reduce, opts, [x], call, call.inout(x), op)

    def all_reduce_coded(self, x: Tensor, codec: Codec, feedback: Tensor | None = None) -> Work:
        """Begin to sum a dense f32 CPU tensor over the group, in place, with encoded edges.

        Args:
            codec, feedback: see `Group.all_reduce`.
        """
        opts = AllreduceOptions()
        opts.asyncOp = True
        call = TensorArguments("all_reduce")
        buffer = call.inout(x)
        call.inputs = [x.new_empty(codec.nbytes(x.numel()), dtype=torch.uint8)]  # for its event
        return self._run(self._group.all_reduce, opts, [x], call, buffer, codec=codec, feedback=feedback)

    @any_device
    @watched
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Reduce several tensors over the group, each in place."""
        opts = options(AllreduceCoalescedOptions, opts)
        return self._coalesced(
            "all_reduce",
            tensors,
            lambda: [self.allreduce([x], _single_options(AllreduceOptions, opts)) for x in tensors],
        )

    @any_device
    @fast_path("reduce", ReduceOptions)
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
        x = single("reduce", tensors)
        opts = options(
            ReduceOptions, opts, rootRank=opts if root is None else root, reduceOp=op, timeout=timeout
        )
        call = TensorArguments("reduce")
        here = opts.rootRank == self._rank
        op = call.op(opts.reduceOp, x, self._size, self._like_nccl, here=here)
        buffer = call.inout(x) if here else call.read(x)
        return self._run(self._group.reduce, opts, [x], call, buffer, dst=opts.rootRank, op=op)

    @any_device
    @watched
    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        """Reduce a list of tensors; rank i gets the i-th. They may have several sizes, as over Gloo."""
        opts = options(ReduceScatterOptions, opts, reduceOp=opts if op is None else op, timeout=timeout)
        out = single("reduce_scatter", output_tensors)
        inputs = input_tensors if isinstance(input_tensors[0], torch.Tensor) else input_tensors[0]
        if (
            len(inputs) == self._size
            and len({x.numel() for x in inputs}) > 1
            and out.numel() == inputs[self._rank].numel()
        ):
            return self._reduce_each(out, inputs, opts)
        call = TensorArguments("reduce_scatter")
        buffers = [call.read(x) for x in inputs]
        op = call.op(opts.reduceOp, out, self._size, self._like_nccl)
        return self._run(self._group.reduce_scatter, opts, [out], call, call.write(out), buffers, op)

    def _reduce_each(self, out: Tensor, inputs: Sequence[Tensor], opts: Any) -> Work:
        """Reduce the i-th tensor to rank i, each on its own: they have several sizes."""

        def reduce_one(root: int, x: Tensor) -> Work:
            each = _single_options(ReduceOptions, opts)
            each.rootRank = root
            if root == self._rank:
                x = out.detach().copy_(x.detach().view_as(out))
            return self.reduce([x], each)

        return self._coalesced(
            "reduce_scatter", inputs, lambda: [reduce_one(root, x) for root, x in enumerate(inputs)]
        )

    @any_device
    @fast_path("reduce_scatter", ReduceScatterOptions, tensors=2)
    def reduce_scatter_single(
        self, output: Tensor, given: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Reduce a tensor; rank i gets its i-th part."""
        opts = options(ReduceScatterOptions, opts, reduceOp=opts, timeout=timeout)
        call = TensorArguments("reduce_scatter")
        op = call.op(opts.reduceOp, output, self._size, self._like_nccl)
        out, read = call.write(output), call.read(given)
        return self._run(self._group.reduce_scatter, opts, [output], call, out, read, op)

    _reduce_scatter_base = reduce_scatter_single

    @any_device  # not `watched`: PyTorch's C++ finds it under its older name, and would call it again
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

    @any_device
    @fast_path("broadcast", BroadcastOptions)
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Work:
        """Copy the root's tensor to all ranks."""
        x = single("broadcast", tensors)
        opts = options(BroadcastOptions, opts, rootRank=opts if root is None else root, timeout=timeout)
        call = TensorArguments("broadcast")
        buffer = call.read(x) if opts.rootRank == self._rank else call.inout(x)
        return self._run(self._group.broadcast, opts, [x], call, buffer, src=opts.rootRank)

    @any_device
    @watched
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Collect the tensors of all ranks on the root."""
        opts = options(GatherOptions, opts, rootRank=opts if root is None else root, timeout=timeout)
        outputs = flat(output_tensors)
        x, call = single("gather", input_tensors), TensorArguments("gather")
        out = call.write_each(outputs) or None
        return self._run(self._group.gather, opts, outputs, call, call.read(x), out, dst=opts.rootRank)

    @any_device
    def gather_single(self, output: Tensor | None, given: Tensor, opts: Any = None) -> Work:
        """Collect the tensors of all ranks in one tensor on the root, stacked or concatenated."""
        opts = options(GatherOptions, opts)
        call = TensorArguments("gather")
        parts = self.parts_of(output, given) if opts.rootRank == self._rank else []
        out = [call.write(part) for part in parts] or None
        result = [output] if parts and output is not None else []
        return self._run(self._group.gather, opts, result, call, call.read(given), out, dst=opts.rootRank)

    gather_into_tensor = gather_single

    def parts_of(self, output: Tensor | None, given: Tensor) -> Sequence[Tensor]:
        """Cut the output of a gather into one flat part per rank.

        Raises:
            ValueError: it is not as large as `given` from every rank, or not contiguous.
        """
        numel = given.numel()
        if output is None or output.numel() != self._size * numel or not output.is_contiguous():
            shown = "none" if output is None else f"a tensor of {output.numel()} elements"
            raise ValueError(
                message(
                    "gather_single: the output does not fit",
                    observed=f"{shown}"
                    + ("" if output is None or output.is_contiguous() else ", not contiguous"),
                    expected=f"a contiguous tensor of {self._size} x {numel}",
                )
            )
        return [part.view(-1) for part in output.view(self._size, numel)]

    @any_device
    @watched
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Send the i-th of the root's tensors to rank i."""
        opts = options(ScatterOptions, opts, rootRank=opts if root is None else root, timeout=timeout)
        out, call = single("scatter", output_tensors), TensorArguments("scatter")
        inputs = [call.read(each) for each in flat(input_tensors)] or None
        return self._run(self._group.scatter, opts, [out], call, call.write(out), inputs, src=opts.rootRank)

    # ---- all to all ----

    @any_device
    @watched
    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Collect the tensors of all ranks, in a list, on every rank."""
        opts = options(AllgatherOptions, opts, timeout=timeout)
        outputs = flat(output_tensors)
        x, call = single("all_gather", input_tensors), TensorArguments("all_gather")
        out = call.write_each(outputs)
        return self._run(self._group.all_gather, opts, outputs, call, out, call.read(x))

    @any_device
    @fast_path("all_gather", AllgatherOptions, tensors=2)
    def all_gather_single(
        self, output: Tensor, given: Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Collect the tensors of all ranks, stacked or concatenated, on every rank."""
        opts = options(AllgatherOptions, opts, timeout=timeout)
        call = TensorArguments("all_gather")
        return self._run(self._group.all_gather, opts, [output], call, call.write(output), call.read(given))

    _allgather_base = all_gather_single

    @any_device  # likewise
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Collect several tensors of all ranks, each into one output."""
        _same_length("all_gather", outputs, inputs)
        opts = options(AllgatherOptions, opts)
        pairs = zip(outputs, inputs, strict=True)
        return self._coalesced(
            "all_gather", inputs, lambda: [self.all_gather_single(out, x, opts) for out, x in pairs]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @any_device
    @watched
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Collect several tensors of all ranks: output_lists[rank][i] is that rank's inputs[i]."""
        opts = options(AllgatherOptions, opts)
        for outputs in output_lists:
            _same_length("all_gather", outputs, inputs)
        columns = zip(zip(*output_lists, strict=True), inputs, strict=True)
        return self._coalesced(
            "all_gather", inputs, lambda: [self.allgather([list(outs)], [x], opts) for outs, x in columns]
        )

    @any_device
    @watched
    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Send inputs[i] to rank i and receive outputs[i] from it."""
        opts = options(AllToAllOptions, opts, timeout=timeout)
        call = TensorArguments("all_to_all")
        read = [call.read(x) for x in inputs]
        written = call.write_each(outputs)
        return self._run(self._group.all_to_all, opts, list(outputs), call, written, read)

    @any_device
    @fast_path("all_to_all", AllToAllOptions, tensors=2, opts_at=4, fits=_equal_parts)
    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Send the i-th part of `given` to rank i and receive the i-th part of `output` from it."""
        equal = not output_split_sizes and not input_split_sizes
        opts = options(AllToAllOptions, opts, timeout=timeout)
        call = TensorArguments("all_to_all")
        if not (equal or output.is_contiguous()):
            call.refuse_shared_memory([output])  # each part alone may not
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

    @fast_path("barrier", BarrierOptions, tensors=0, fits=_on_host)
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait until every rank has called it; with a CUDA device in the options, on that device."""
        opts = options(BarrierOptions, opts, timeout=timeout)
        if not _on_host(self, opts):
            passed_on: Work = self._cuda.group.barrier(opts)
            return passed_on
        return self._run(self._group.barrier, opts, [], TensorArguments("barrier"))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; see `MonitoredBarrier.wait`. A failure leaves the group usable."""
        timeout_s = self._group.timeout_s if timeout is None else timeout.total_seconds()
        self._monitored.wait(timeout_s, wait_all_ranks)

    # ---- point to point ----

    @any_device
    @watched
    def send(self, tensors: Any, dst: int, tag: int = 0) -> Work:
        """Send one tensor to a rank of the group."""
        return self._transfer("send", self._group.isend, tensors, dst, tag)

    @any_device
    @watched
    def recv(self, tensors: Any, src: int, tag: int = 0) -> Work:
        """Receive one tensor from a rank of the group."""
        return self._transfer("recv", self._group._irecv_whole, tensors, src, tag)

    @any_device
    @watched
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive one tensor from any rank; the Work knows its source."""
        return self._transfer("recv", self._group._irecv_whole, tensors, None, tag)


def flat(lists: Any) -> list[Tensor]:
    """[[a, b]] -> [a, b], [a, b] -> [a, b], [] -> []."""
    return list(lists[0] if lists and not isinstance(lists[0], torch.Tensor) else lists)


def _same_length(what: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    if len(outputs) != len(inputs):
        raise ValueError(f"{what}: {len(outputs)} outputs for {len(inputs)} inputs")


def _single_options(kind: Any, given: Any) -> Any:
    return options(kind, None, reduceOp=given.reduceOp, timeout=given.timeout, asyncOp=given.asyncOp)
