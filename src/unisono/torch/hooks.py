"""PyTorch's hooks around collectives: pre- and post-hooks, the NaN check, the flight recorder, abort hooks.

PyTorch 2.14 and later call the hooks of a group in their C++ dispatcher, which the methods of our group
bypass. So the first hook changes the group's class: from then on each call goes through the dispatcher. It
calls the hooks and then a backend of PyTorch, the `DispatcherBackend`, which calls the group's own method. A
group without hooks pays nothing.

Profilers and TorchDispatchModes, such as CommDebugMode, watch the dispatcher, too. A call goes through it
while one of them is on (`watched`); the group's class stays.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast
from weakref import proxy

import torch

from unisono.errors import UnisonoError, message
from unisono.torch_internals.c10d import (
    AllToAllOptions,
    Backend,
    GatherOptions,
    ProcessGroup,
    all_to_all_by_operator,
    set_backend,
)
from unisono.torch_internals.hooks import have_hooks
from unisono.torch_internals.profiler import is_watched

from .arguments import options
from .cuda import first_tensor
from .work import UnisonoWork

# mypy must pass with and without PyTorch installed.
# mypy: disallow-subclassing-any=False, warn-unused-ignores=False

Method = TypeVar("Method", bound=Callable[..., Any])

COLLECTIVES = (
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "all_gather_single",
    "allgather_coalesced", "all_gather_single_coalesced", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all_single",
    "alltoall", "send", "recv", "recv_anysource", "barrier",
)  # fmt: skip

OLD_NAMES = (
    "_allgather_base", "allgather_into_tensor_coalesced", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "alltoall_base",
)  # fmt: skip


class AbortHooks:
    """The abort hooks of one group, and each thread's call that is on its way through the dispatcher."""

    def __init__(self) -> None:
        self._abort: dict[int, Callable[[], None]] = {}
        self._aborted = False
        self._thread = threading.local()

    def add(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Register a function to call before the group is aborted."""
        self._abort[hook_id] = hook

    def remove(self, hook_id: int) -> None:
        """Forget a function; none is there under that number: nothing happens."""
        self._abort.pop(hook_id, None)

    def before_abort(self) -> None:
        """Call the abort hooks, in the order of their numbers, once."""
        if self._aborted:
            return
        self._aborted = True
        for _, hook in sorted(self._abort.items(), key=lambda item: item[0]):
            hook()

    def renew(self) -> None:
        """Call the abort hooks again at the next abort: the group has new ranks."""
        self._aborted = False

    @property
    def inside(self) -> bool:
        """Whether this thread is in a call that has passed the dispatcher."""
        return getattr(self._thread, "depth", 0) > 0

    @contextmanager
    def passing(self) -> Iterator[list[Any]]:
        """A call begins; gives the list into which the bridge puts the group's own Work."""
        outer = getattr(self._thread, "works", None)
        works: list[Any] = []
        self._thread.works = works
        try:
            yield works
        finally:
            self._thread.works = outer

    def run(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call the group's own method, from the bridge."""
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        try:
            work = method(*args)
        finally:
            self._thread.depth -= 1
        works = getattr(self._thread, "works", None)
        if works is not None:
            works.append(work)
        return work


class DispatcherBackend(Backend):  # type: ignore[misc]
    """The backend that PyTorch's dispatcher calls after the hooks; it calls the group's own methods."""

    # All of them: PyTorch asks an inherited property by itself, without end.
    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False
    supports_completion_hooks = False
    _supports_time_estimate = False

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = proxy(group)  # the group's C++ object keeps this one

    def getBackendName(self) -> str:  # noqa: N802
        """Return "unisono", also where the group replaces Gloo."""
        return str(self._group.getBackendName())

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the group's timeout."""
        self._group.set_timeout(timeout)

    def abort(self) -> None:
        """Abort the group."""
        self._group.abort()


def _backend_method(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        group = self._group
        return group._hooks.run(getattr(group._direct, name), group, *args)

    call.__name__ = name
    call.__doc__ = f"Call the hooks, and `{name}` of the group between them."
    return call


for _name in COLLECTIVES:
    setattr(DispatcherBackend, _name, _backend_method(_name))
DispatcherBackend.allreduce_sparse = _backend_method("allreduce")  # type: ignore[attr-defined]


def _via_dispatcher(name: str, base: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A method that calls PyTorch's own, or `base`, which calls the dispatcher."""
    base = base or getattr(ProcessGroup, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._hooks.inside:  # the group calls itself, as for coalesced calls
            return getattr(self._direct, name)(self, *args, **kwargs)
        with self._hooks.passing() as works:
            try:
                work = base(self, *args, **kwargs)
            except UnisonoError:
                self._hooks.before_abort()
                raise
        return works[0] if works else work  # ours: PyTorch's copy of it in C++ knows `wait` only

    # pybind11 takes a call from a frame of this name as one of the base class's method.
    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    return call


def _all_to_all(
    group: Any,
    output: Any,
    given: Any,
    output_sizes: Any,
    input_sizes: Any,
    opts: Any = None,
    timeout: timedelta | None = None,
) -> Any:
    opts = options(AllToAllOptions, opts, timeout=timeout)
    sizes = output_sizes, input_sizes
    return all_to_all_by_operator(group, output, given, *sizes, opts.asyncOp, opts.timeout)


def watched(method: Method) -> Method:
    """Make a collective pass PyTorch's dispatcher while something watches it there."""
    name = method.__name__
    if not hasattr(ProcessGroup, name) or not have_hooks():  # before 2.14 no backend can be written in Python
        return method
    # C++ finds this one in the class under a second name, and would call it again.
    through = _via_dispatcher(name, _all_to_all if name == "all_to_all_single" else None)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_watched() or self._hooks.inside:
            return method(self, *args, **kwargs)
        first = first_tensor(args or tuple(kwargs.values()))
        if first is not None and first.layout is not torch.strided:  # its operators are for dense tensors
            return method(self, *args, **kwargs)
        while args and args[-1] is None:  # a default of ours; PyTorch's method may not have it
            args = args[:-1]
        self._bridge()
        return through(self, *args, **{name: value for name, value in kwargs.items() if value is not None})

    return cast("Method", call)


class HookMethods:
    """The methods of a process group that register hooks."""

    _hooks: AbortHooks
    _dispatcher_backend: Any = None
    _direct: Any = property(type)  # the class whose methods the bridge calls

    supports_abort_hooks = True

    def register_pre_hook(self, hook_id: int, hook: Callable[..., None]) -> None:
        """Call `hook(PreHookArgs)` before every collective and message. PyTorch 2.14 and later."""
        self.pass_dispatcher()
        base: Any = super()
        base.register_pre_hook(hook_id, hook)

    def register_post_hook(self, hook_id: int, hook: Callable[..., None]) -> None:
        """Call `hook(PostHookArgs)` after every collective and message was issued. PyTorch 2.14 and later."""
        self.pass_dispatcher()
        base: Any = super()
        base.register_post_hook(hook_id, hook)

    def register_abort_hook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call `hook()` once, before `abort`, and when a call of this group fails."""
        self.pass_dispatcher()
        self._hooks.add(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Forget an abort hook."""
        self._hooks.remove(hook_id)

    def pass_dispatcher(self) -> None:
        """From now on calls go through PyTorch's dispatcher, which calls the hooks.

        Raises:
            NotImplementedError: this PyTorch has no such hooks.
        """
        group: Any = self
        if isinstance(group, _PassesDispatcher):
            return
        if not have_hooks():
            raise NotImplementedError(
                message(
                    f"process groups of PyTorch {torch.__version__} have no hooks",
                    remedy="Use PyTorch 2.14 or later.",
                )
            )
        self._bridge()
        group.__class__ = dispatcher_class(type(self))

    def _bridge(self) -> None:
        """Give PyTorch's dispatcher a backend that calls this group."""
        if self._dispatcher_backend is None:
            self._make_bridge()

    def _renew_dispatcher_backend(self) -> None:
        """Give PyTorch's dispatcher a bridge with the group's present rank and size, where it has one."""
        if self._dispatcher_backend is not None:
            self._make_bridge()

    def _make_bridge(self) -> None:
        group: Any = self
        self._dispatcher_backend = DispatcherBackend(group)
        kind: Any = ProcessGroup.BackendType.CUSTOM
        set_backend(group, kind, self._dispatcher_backend, group._device_types)


class _PassesDispatcher:
    """A group all of whose calls pass PyTorch's dispatcher."""


def dispatcher_class(direct: Any) -> type:
    """Return a subclass of a group's class whose collectives go through PyTorch's dispatcher."""

    class AbortHookWork(direct._work):  # type: ignore[misc, name-defined]
        """A Work that reports a failure to the abort hooks."""

        __slots__ = ("hooks",)

        def wait(self, timeout: timedelta | None = None) -> bool:
            try:
                return bool(super().wait(timeout))
            except UnisonoError:
                self.hooks.before_abort()
                raise

    def made(self: Any, *args: Any) -> UnisonoWork:
        work = AbortHookWork(*args)
        work.hooks = self._hooks
        return work

    def gather_single(self: Any, output: Any, given: Any, opts: Any = None) -> Any:
        """As `gather`: the dispatcher finds no `gather_single` in a backend written in Python."""
        opts = options(GatherOptions, opts)
        here = opts.rootRank == self._rank
        outputs = [list(direct.parts_of(self, output, given))] if here else []
        return self.gather(outputs, [given.reshape(-1)], opts)

    there = [name for name in COLLECTIVES if hasattr(ProcessGroup, name)]
    old = {name: getattr(ProcessGroup, name) for name in OLD_NAMES if hasattr(ProcessGroup, name)}
    methods = {name: _via_dispatcher(name) for name in there}
    methods |= {"gather_single": gather_single, "gather_into_tensor": gather_single}
    return type(
        direct.__name__, (_PassesDispatcher, direct), {**methods, **old, "_direct": direct, "_work": made}
    )
