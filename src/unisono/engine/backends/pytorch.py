"""Gloo and NCCL, through PyTorch's process groups.

The groups are private: `torch.distributed` itself need not be initialized, and does not change. Operations
that only move bytes use uint8, because Gloo knows few dtypes.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from unisono.engine.backends.driver import CompletedRequest, LibraryCall, LibraryDriver, LibraryRequest
from unisono.engine.backends.reduction_fallback import reduce_gathered
from unisono.engine.backends.torch_requests import (
    GlooMessageRequest,
    GlooRequest,
    GlooWaitRequest,
    TorchMessageRequest,
    TorchRequest,
)
from unisono.engine.backends.torch_store import EngineStore
from unisono.engine.operations.reduction import PremulSum, ReduceOp
from unisono.engine.store import PrefixStore, Store

Tensor = torch.Tensor
_OF_BOOL = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class TorchDriver(LibraryDriver):
    """One rank of a process group of PyTorch."""

    failures = (RuntimeError, ValueError)
    any_tag = to_itself = False
    short_messages = False
    _started: ClassVar[type[TorchRequest]] = TorchRequest
    _scattered: ClassVar[type[TorchRequest]] = TorchRequest  # of a reduce_scatter
    _message: ClassVar[type[TorchMessageRequest]]
    widened: ClassVar[dict[str, str]] = {"bool": "uint8", "int16": "int32"}
    """The type in which elements are reduced, if it is another one; the result is rounded once."""
    hands_on_nan = True
    """MIN and MAX of the library do."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._meeting, self._timeout_s = store, timeout_s
        self._keys = EngineStore(store)  # the process group does not keep it alive
        self._group: Any = self._open(self._keys, timedelta(seconds=timeout_s))

    @abstractmethod
    def _open(self, keys: EngineStore, timeout: timedelta) -> Any:
        """The process group of the library."""

    def flat(self, address: int, numel: int, dtype: str) -> Tensor:
        """See `LibraryDriver.flat`."""
        kind = getattr(torch, dtype)
        if numel == 0:
            return torch.empty(0, dtype=kind)
        return torch.frombuffer((ctypes.c_char * (numel * kind.itemsize)).from_address(address), dtype=kind)

    def copy(self, x: Tensor) -> Tensor:
        """See `LibraryDriver.copy`."""
        return x.clone()

    def start(self, call: LibraryCall, later: bool) -> LibraryRequest:  # noqa: ARG002  (all of them are asynchronous)
        """See `LibraryDriver.start`."""
        self.issued += 1
        started: LibraryRequest = getattr(self, f"_{call.kind}")(call)
        return started

    def stage(self, array: Any) -> Tensor:
        """See `LibraryDriver.stage`."""
        return torch.tensor(array, device=self.device)

    def is_timeout(self, failure: Exception) -> bool:
        """See `LibraryDriver.is_timeout`."""
        return "imed out" in str(failure) or "imeout" in str(failure)

    # ---- reductions --------------------------------------------------------------------------------------

    def _all_reduce(self, call: LibraryCall) -> LibraryRequest:
        x = call.out[0]
        return self._reduced(call, x, x)

    def _reduce(self, call: LibraryCall) -> LibraryRequest:
        x = call.out[0]
        return self._reduced(call, x, x if self.rank == call.root else None)

    def _reduce_scatter(self, call: LibraryCall) -> LibraryRequest:
        return self._reduced(call, _joined(call.sendbuf), call.out[0])

    def _reduced(self, call: LibraryCall, x: Tensor, out: Tensor | None) -> LibraryRequest:
        """Reduce `x`, which does not change unless it is `out`."""
        op = call.op
        base = ReduceOp.SUM if isinstance(op, PremulSum) or op is ReduceOp.AVG else op
        work = self._contribution(call, x)
        loses = base in (ReduceOp.MIN, ReduceOp.MAX) and call.dtype in _FLOATS and not self.hands_on_nan
        if loses or (work.is_complex() and base is not ReduceOp.SUM):
            return self._gathered(
                work, lambda parts: self._store(call, reduce_gathered(torch, parts, base), out)
            )
        if work is x and x is not out:
            work = work.clone()  # the library may use it as scratch memory
        if not work.numel():
            return CompletedRequest()
        moved = torch.view_as_real(work).view(-1) if work.is_complex() else work
        combined = _OF_BOOL.get(base, base) if call.dtype == "bool" else base
        operation = getattr(dist.ReduceOp, combined.name)
        started: LibraryRequest = self._reduce_by[call.kind](self, call, work, moved, operation, out)
        return started

    def _all_reduce_by(
        self, call: LibraryCall, work: Tensor, moved: Tensor, op: Any, out: Tensor | None
    ) -> LibraryRequest:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        started = self._group.allreduce([moved], options)
        return self._started(started, (moved, work), lambda: self._store(call, work, out))

    def _reduce_to(
        self, call: LibraryCall, work: Tensor, moved: Tensor, op: Any, out: Tensor | None
    ) -> LibraryRequest:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = op, call.root
        started = self._group.reduce([moved], options)
        return self._started(started, (moved, work), lambda: self._store(call, work, out))

    def _reduce_scatter_by(
        self, call: LibraryCall, work: Tensor, moved: Tensor, op: Any, out: Tensor | None
    ) -> LibraryRequest:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        result = torch.empty(moved.numel() // self.size, dtype=moved.dtype, device=moved.device)
        started = self._group._reduce_scatter_base(result, moved, options)
        whole = torch.view_as_complex(result.view(-1, 2)) if work.is_complex() else result
        return self._scattered(started, (moved, work, result), lambda: self._store(call, whole, out))

    _reduce_by: ClassVar[dict[str, Any]] = {
        "all_reduce": _all_reduce_by,
        "reduce": _reduce_to,
        "reduce_scatter": _reduce_scatter_by,
    }

    def _contribution(self, call: LibraryCall, x: Tensor) -> Tensor:
        wide = self.widened.get(call.dtype)
        work = x if wide is None else x.to(getattr(torch, wide))
        return work * call.op.factor if isinstance(call.op, PremulSum) else work

    def _store(self, call: LibraryCall, result: Tensor, out: Tensor | None) -> None:
        """Store a result in the caller's buffer: this rank's block of a larger one."""
        if out is None:
            return
        if result.numel() > out.numel():
            result = result[self.rank * out.numel() : (self.rank + 1) * out.numel()]
        if call.op is ReduceOp.AVG:
            result = result / self.size
        if result.data_ptr() != out.data_ptr() or result.dtype != out.dtype:
            out.copy_(result)

    def _scan(self, call: LibraryCall) -> LibraryRequest:
        return self._prefix(call, self.rank + 1)

    def _exclusive_scan(self, call: LibraryCall) -> LibraryRequest:
        return self._prefix(call, self.rank)

    def _prefix(self, call: LibraryCall, count: int) -> LibraryRequest:
        """PyTorch has no scan."""
        x, op = call.out[0], call.op
        base = ReduceOp.SUM if isinstance(op, PremulSum) else op
        if call.dtype == "bool":
            base = _OF_BOOL.get(base, base)

        def combine(parts: Sequence[Tensor]) -> None:
            if count:
                self._store(call, reduce_gathered(torch, parts[:count], base), x)

        return self._gathered(self._contribution(call, x), combine)

    def _gathered(self, x: Tensor, combine: Callable[[Sequence[Tensor]], None]) -> LibraryRequest:
        """Gather `x` of all ranks, then combine them."""
        whole = torch.empty(self.size * x.numel(), dtype=x.dtype, device=x.device)
        if not x.numel():
            return CompletedRequest()
        started = self._group._allgather_base(_octets(whole), _octets(x.contiguous()))
        return self._started(started, (whole, x), lambda: combine(whole.chunk(self.size)))

    # ---- moves -------------------------------------------------------------------------------------------

    def _broadcast(self, call: LibraryCall) -> LibraryRequest:
        x = _octets(call.out[0])
        if not x.numel():
            return CompletedRequest()
        options = dist.BroadcastOptions()
        options.rootRank = call.root
        return self._started(self._group.broadcast([x], options), x)

    def _barrier(self, call: LibraryCall) -> LibraryRequest:  # noqa: ARG002
        return self._started(self._group.barrier(dist.BarrierOptions()), None)

    def _all_gather(self, call: LibraryCall) -> LibraryRequest:
        if not call.even:
            return self._all_gather_uneven(call)
        x = _octets(call.sendbuf[0])
        if not x.numel():
            return CompletedRequest()
        whole, finish = _room(call.out)
        if _overlap(whole, x):
            x = x.clone()
        return self._started(self._group._allgather_base(whole, x), (whole, x), finish)

    def _all_gather_uneven(self, call: LibraryCall) -> LibraryRequest:
        """Blocks are padded to the largest: all ranks know all sizes."""
        outs, x = [_octets(block) for block in call.out], _octets(call.sendbuf[0])
        if len(outs) == 1:
            outs = list(outs[0].chunk(self.size)) if self.size > 1 else outs
        most = max(block.numel() for block in outs)
        if not most:
            return CompletedRequest()
        padded = torch.zeros(most, dtype=torch.uint8, device=x.device)
        padded[: x.numel()] = x
        whole = torch.empty(most * self.size, dtype=torch.uint8, device=x.device)

        def cut() -> None:
            for block, part in zip(outs, whole.chunk(self.size), strict=True):
                block.copy_(part[: block.numel()])

        return self._started(self._group._allgather_base(whole, padded), (whole, padded), cut)

    def _gather(self, call: LibraryCall) -> LibraryRequest:
        x = _octets(call.sendbuf[0])
        sent = [x.numel() if rank == call.root else 0 for rank in range(self.size)]
        if self.rank != call.root:
            return self._exchange(None, x, [0] * self.size, sent)
        if _overlap(call.out[0], x):
            x = x.clone()
        whole, finish = _room(call.out)
        return self._exchange(whole, x, _sizes(call.out, self.size), sent, finish)

    def _scatter(self, call: LibraryCall) -> LibraryRequest:
        out = _octets(call.out[0])
        got = [out.numel() if rank == call.root else 0 for rank in range(self.size)]
        if self.rank != call.root:
            return self._exchange(out, None, got, [0] * self.size)
        whole = _octets(_joined(call.sendbuf))
        if _overlap(whole, out):
            whole = whole.clone()
        return self._exchange(out, whole, got, _sizes(call.sendbuf, self.size))

    def _all_to_all(self, call: LibraryCall) -> LibraryRequest:
        whole, finish = _room(call.out)
        given = _octets(_joined(call.sendbuf))
        return self._exchange(
            whole, given, _sizes(call.out, self.size), _sizes(call.sendbuf, self.size), finish
        )

    def _exchange(
        self,
        out: Tensor | None,
        given: Tensor | None,
        got: list[int],
        sent: list[int],
        finish: Callable[[], None] | None = None,
    ) -> LibraryRequest:
        """All-to-all of bytes. got, sent: how many from, to each rank."""
        device = (given if out is None else out).device  # type: ignore[union-attr]
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        out, given = nothing if out is None else out, nothing if given is None else given
        started = self._group.alltoall_base(out, given, got, sent)
        return self._started(started, (out, given), finish)

    # ---- messages ----------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int, tag: int, is_object: bool) -> LibraryRequest:  # noqa: ARG002
        """See `LibraryDriver.send`."""
        x = _octets(x)
        return self._message(self._group.send([x], dst, tag), x, dst, tag)

    def receive(self, x: Tensor, src: int, tag: int, is_object: bool) -> LibraryRequest:  # noqa: ARG002
        """See `LibraryDriver.receive`."""
        x = _octets(x)
        anybody = src < 0
        work = self._group.recv_anysource([x], tag) if anybody else self._group.recv([x], src, tag)
        return self._message(work, x, src, tag)

    # ---- the group -----------------------------------------------------------------------------------------

    def subgroup(self, ranks: tuple[int, ...], number: int) -> TorchDriver | None:
        """See `LibraryDriver.subgroup`."""
        if self.rank not in ranks:
            return None
        keys = PrefixStore(f"subgroup/{number}/{'_'.join(map(str, ranks))}", self._meeting)
        return type(self)(keys, ranks.index(self.rank), len(ranks), self._timeout_s)


class GlooDriver(TorchDriver):
    """Gloo, which moves CPU memory."""

    name = "gloo"
    deadlines = True
    _started = GlooRequest
    _scattered = GlooWaitRequest
    _message = GlooMessageRequest
    hands_on_nan = False
    widened: ClassVar[dict[str, str]] = {**TorchDriver.widened, "float16": "float32", "bfloat16": "float32"}

    def _open(self, keys: EngineStore, timeout: timedelta) -> Any:
        # Under UNISONO_REPLACE=gloo the name means Unisono: this takes PyTorch's own.
        gloo: Any = dist.ProcessGroupGloo
        gloo = getattr(gloo, "original", gloo)
        return gloo(keys, self.rank, self.size, timeout)


class NcclDriver(TorchDriver):
    """NCCL, which moves CUDA memory; also that of virtual GPUs."""

    name, device = "nccl", "cuda"
    _message = TorchMessageRequest
    any_source = False
    most_tag = 0

    def _open(self, keys: EngineStore, timeout: timedelta) -> Any:
        nccl: Any = dist.ProcessGroupNCCL  # type: ignore[attr-defined,unused-ignore]
        options = nccl.Options()
        options._timeout = timeout
        return nccl(keys, self.rank, self.size, options)


def _octets(x: Tensor) -> Tensor:
    if x.dtype is torch.uint8:
        return x
    if not x.numel():
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return (torch.view_as_real(x).view(-1) if x.is_complex() else x).view(torch.uint8)


def _joined(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _sizes(blocks: list[Tensor], count: int) -> list[int]:
    """The bytes of each block."""
    return [blocks[0].nbytes // count] * count if len(blocks) == 1 else [block.nbytes for block in blocks]


def _room(blocks: list[Tensor]) -> tuple[Tensor, Callable[[], None] | None]:
    """The bytes of all blocks as one, and a function that copies the blocks out at the end."""
    outs = [_octets(block) for block in blocks]
    if len(outs) == 1:
        return outs[0], None
    whole = torch.empty(sum(block.numel() for block in outs), dtype=torch.uint8, device=outs[0].device)

    def cut() -> None:
        start = 0
        for block in outs:
            block.copy_(whole[start : start + block.numel()])
            start += block.numel()

    return whole, cut


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two of them share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
