"""How the process group calls its Group: blocking, as a Work, or several calls as one.

`Collectives` translates PyTorch's arguments and calls these.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .arguments import PLAIN, PLAIN_OR_NONE, REDUCE_OPS, TensorArguments, reduce_op, single
from .completed_work import DONE
from .hooks import watched
from .option_offsets import ASYNC, reader
from .profiling import ProfilerEvent, is_on, is_watched
from .sparse import SparseAllReduce
from .work import CoalescedWork, TransferWork, UnisonoWork, seconds

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from unisono.engine.group.native import NativeGroup
    from unisono.torch_internals.c10d import Work

    from .completed_work import CompletedReceive
    from .cuda import CudaGroup
    from .futures import WorkFutures
    from .work import EngineWork

    Method = TypeVar("Method", bound=Callable[..., Any])


def fast_path(
    collective: str,
    kind: Any,
    *,
    tensors: int = 1,
    opts_at: int | None = None,
    fits: Callable[..., bool] | None = None,
) -> Callable[[Method], Method]:
    """Make a fast path for calls that the Group remembers: no list, no copy.

    Programs repeat the same `dist.all_reduce(x)` many times. A call that is new, has a timeout or an unusual
    tensor goes to the method; the Group then remembers it.

    Args:
        kind: the class of PyTorch's options for this method.
        tensors: how many arguments are tensors: 0; 1, in place; 2, output and input.
        opts_at: the place of the options, where it is not behind the tensors.
        fits: (process group, options, the method's arguments) -> whether the Group can take them unchanged.
    """
    read = reader(kind)
    at = tensors if opts_at is None else opts_at

    def decorate(plain_method: Method) -> Method:
        method = watched(plain_method)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            opts = args[at] if len(args) > at else kwargs.get("opts")
            if len(args) >= at and (plain := read(opts)) >= 0:
                out = args[0] if tensors else None
                if type(out) is list and len(out) == 1:
                    out = out[0]
                given = args[1] if tensors == 2 else None
                if (
                    type(out) in PLAIN_OR_NONE
                    and type(given) in PLAIN_OR_NONE
                    and not is_watched()
                    and (fits is None or fits(self, opts, *args))
                ):
                    op, root, later = REDUCE_OPS[plain & 255], (plain & ASYNC - 1) >> 8, plain >= ASYNC
                    # no algorithm, not reproducible, no timeout
                    made = self._repeat(collective, out, given, op, root, None, False, later, None)
                    if made is None:
                        return DONE
                    if made is not NotImplemented:
                        result = [] if out is None else [out]
                        return self._handed_out(self._work(made, result, self._futures))
            return method(self, *args, **kwargs)

        return cast("Method", call)

    return decorate


class GroupCalls:
    """The base class of the methods that move data."""

    _group: NativeGroup
    _repeat: Callable[..., Any]  # these three: see `_native.GroupBase`
    _send_now: Callable[..., object]
    _recv_now: Callable[..., object]
    _cuda: CudaGroup
    _futures: WorkFutures
    _received: CompletedReceive
    _rank: int
    _size: int
    _batch: list[UnisonoWork] | None
    _backend: str  # the backend's name
    _work: type[UnisonoWork] = UnisonoWork
    _moves_cuda = False  # the memory of virtual GPUs: see virtual/nccl.py
    _like_nccl = False  # with NCCL's limits and results for that memory
    _coalescing = False  # inside a call that makes several calls of the Group, with one event
    _recent: deque[UnisonoWork]

    # ---- several calls in one ----

    def _start_coalescing(self, device: torch.device | None) -> None:
        """Begin to collect the works that are returned."""
        if device is not None and device.type == "cuda" and not self._moves_cuda:
            self._cuda.group._start_coalescing(device)
        else:
            self._batch = []

    def _end_coalescing(self, device: torch.device | None) -> Work:
        """Return one Work for all since `_start_coalescing`."""
        if device is not None and device.type == "cuda" and not self._moves_cuda:
            work: Work = self._cuda.group._end_coalescing(device)
            return work
        batch, self._batch = self._batch or [], None
        return self._each(batch)

    # ---- calls ----

    def _run(
        self,
        method: Callable[..., Any],
        opts: Any,
        result: list[Tensor],
        call: TensorArguments,
        *args: Any,
        **kwargs: Any,
    ) -> Work:
        """Call the Group, blocking or asynchronously as PyTorch asks."""
        timeout = seconds(opts.timeout)
        event = self._event(call.what, call.inputs)
        if event or opts.asyncOp:
            native = method(*args, **kwargs, async_op=True, timeout=timeout)
            after = event.ends_with(native, self._futures, call.after) if event else call.after
            work = self._work(native, result, self._futures, after)
            if opts.asyncOp:
                return self._handed_out(work)
            work.wait()
            return DONE
        method(*args, **kwargs, timeout=timeout)
        if call.after:
            call.after()
        return DONE

    def _transfer(
        self, what: str, method: Callable[..., EngineWork], tensors: Any, peer: int | None, tag: int
    ) -> Work:
        """Start a send or a receive. If it can complete at once, it does."""
        x = single(what, tensors)
        if type(x) in PLAIN and not is_on() and peer is not None:
            at_once = self._send_now if what == "send" else self._recv_now
            if at_once(x, peer, tag, None) is not None:
                if what == "send":
                    return DONE
                self._received.keep(x)
                return self._received
        call = TensorArguments(what)
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
        native = CoalescedWork([work] if isinstance(work, UnisonoWork) else [])
        together = UnisonoWork(native, list(inputs), self._futures, event.ends_with(native, self._futures))
        if work is not DONE:
            return together
        together.wait()
        return DONE

    def _event(self, what: str, inputs: Sequence[Tensor] | None) -> ProfilerEvent | None:
        """Begin an event, such as "unisono:all_reduce", if PyTorch's profiler is on."""
        if self._coalescing or not is_on():
            return None
        return ProfilerEvent(f"{self._backend}:{what}", inputs or ())

    def _each(self, works: Sequence[Any]) -> Work:
        pending = [work for work in works if work is not DONE]
        if not pending:
            return DONE
        result = [x for work in pending for x in work.outputs]
        return UnisonoWork(CoalescedWork(pending), result, self._futures)

    def _handed_out(self, work: UnisonoWork) -> UnisonoWork:
        if self._batch is not None:
            self._batch.append(work)
        # C++ code that keeps a Work does not keep its Python object. Without that, `wait` is PyTorch's own
        # and never returns. `Join(divide_by_initial_world_size=False)` does so with a count of one element.
        if sum(x.numel() for x in work.outputs) <= 16:
            self._recent.append(work)
        return work

    def _sparse_sum(self, x: Tensor, opts: Any) -> Work:
        adding = SparseAllReduce(self._group, x, reduce_op(opts.reduceOp), seconds(opts.timeout))
        natives = adding.start(opts.asyncOp)
        if not opts.asyncOp:
            adding.finish()
            return DONE
        parts = [UnisonoWork(native, [], self._futures) for native in natives]
        return self._handed_out(UnisonoWork(CoalescedWork(parts), [x], self._futures, adding.finish))
