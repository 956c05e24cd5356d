"""How the process group makes a call of its Group: at once, as a Work, several as one.

`Collectives` translates PyTorch's arguments and calls these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.autograd import profiler

from .arguments import reduce_op
from .sparse import SparseSum
from .work import DONE, Together, TransferWork, UnisonoWork, seconds

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Work

    from unisono.group import Group

    from .arguments import Call
    from .cuda import CudaGroup
    from .work import Futures, NativeWork

__all__ = ["Calling"]


class Calling:
    """What every method of the process group that moves data is made with."""

    _group: Group
    _cuda: CudaGroup
    _futures: Futures
    _size: int
    _batch: list[UnisonoWork] | None
    _recent: deque[UnisonoWork]

    # ---- several calls in one ----

    def _start_coalescing(self, device: torch.device | None) -> None:
        """Begin to remember the works that are handed out."""
        if device is not None and device.type == "cuda":
            self._cuda.group._start_coalescing(device)
        else:
            self._batch = []

    def _end_coalescing(self, device: torch.device | None) -> Work:
        """Hand out one Work for all since `_start_coalescing`."""
        if device is not None and device.type == "cuda":
            work: Work = self._cuda.group._end_coalescing(device)
            return work
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
        """Call the Group; while PyTorch's profiler is on, as an event "unisono:all_reduce"."""
        if not profiler._is_profiler_enabled:
            return self._called(method, opts, result, call, *args, **kwargs)
        with profiler.record_function(f"unisono:{call.what}") as event:
            work = self._called(method, opts, result, call, *args, **kwargs)
            if work is not DONE:  # the event goes on until the work is complete
                event._call_end_callbacks_on_future(work.get_future())
        return work

    def _called(
        self,
        method: Callable[..., Any],
        opts: Any,
        result: list[Tensor],
        call: Call,
        *args: Any,
        **kwargs: Any,
    ) -> Work:
        """Call the Group; at once, or as a Work when PyTorch wants to wait later."""
        timeout = seconds(opts.timeout)
        if opts.asyncOp:
            native = method(*args, **kwargs, async_op=True, timeout=timeout)
            return self._handed_out(UnisonoWork(native, result, self._futures, call.after))
        method(*args, **kwargs, timeout=timeout)
        if call.after:
            call.after()
        return DONE

    def _transfer(self, native: NativeWork, result: list[Tensor], call: Call) -> Work:
        return self._handed_out(TransferWork(native, result, self._futures, call.after))

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

    def _sparse_sum(self, x: Tensor, opts: Any) -> Work:
        adding = SparseSum(self._group, x, reduce_op(opts.reduceOp), seconds(opts.timeout))
        natives = adding.start(opts.asyncOp)
        if not opts.asyncOp:
            adding.finish()
            return DONE
        parts = [UnisonoWork(native, [], self._futures) for native in natives]
        return self._handed_out(UnisonoWork(Together(parts), [x], self._futures, adding.finish))
