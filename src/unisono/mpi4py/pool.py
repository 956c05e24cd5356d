"""mpi4py.util.pool: the interface of multiprocessing.Pool over the executors of mpi4py.futures."""

from __future__ import annotations

import operator
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

from unisono.mpi4py import futures

__all__ = ["ApplyResult", "AsyncResult", "MapResult", "Pool", "ThreadPool"]

Callback = Callable[[Any], object] | None


def _map(call: str, doc: str, take: Any, chunksize: int | None = None, **options: bool) -> Any:
    """A method that maps a function over calls on the workers. take: makes its value of their results."""
    default = chunksize

    def mapped(
        self: Pool, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None = default,
        *callbacks: Callback, **named: Callback,
    ) -> Any:  # fmt: skip
        return take(self, self._results(call, func, iterable, chunksize, **options), *callbacks, **named)

    mapped.__doc__ = doc
    return mapped


def _all(_pool: Pool, results: Iterator[Any]) -> list[Any]:
    return list(results)


def _lazily(_pool: Pool, results: Iterator[Any]) -> Iterator[Any]:
    return results


def _later(
    pool: Pool, results: Iterator[Any], callback: Callback = None, error_callback: Callback = None
) -> MapResult:
    return pool._gathered(results, callback, error_callback)


class Pool:
    """Workers that are ranks. Arguments as of multiprocessing.Pool, then those of MPIPoolExecutor."""

    Executor: Any = futures.MPIPoolExecutor

    def __init__(
        self, processes: int | None = None, initializer: Any = None, initargs: Any = (), **options: Any
    ) -> None:
        if processes is not None and processes < 1:
            raise ValueError("number of processes must be at least 1")
        for name in ("maxtasksperchild", "context"):
            if options.pop(name, None) is not None:
                warnings.warn(f"argument {name!r} is not supported", stacklevel=2)
        self.executor = self.Executor(processes, initializer=initializer, initargs=initargs, **options)
        self._gathering: Any = None  # threads that collect the results of map_async

    def apply(self, func: Callable[..., Any], args: Iterable[Any] = (), kwds: Mapping[str, Any] = {}) -> Any:
        """`func(*args, **kwds)`, on a worker."""
        return self.executor.submit(func, *args, **kwds).result()

    def apply_async(
        self, func: Callable[..., Any], args: Iterable[Any] = (), kwds: Mapping[str, Any] = {},
        callback: Callback = None, error_callback: Callback = None,
    ) -> ApplyResult:  # fmt: skip
        """The same, without waiting."""
        return ApplyResult(self.executor.submit(func, *args, **kwds), callback, error_callback)

    map = _map("map", "The list of `map(func, iterable)`, in tasks of `chunksize` calls.", _all)
    starmap = _map("starmap", "The list of `itertools.starmap(func, iterable)`.", _all)
    map_async = _map("map", "See `map`, without waiting.", _later)
    starmap_async = _map("starmap", "See `starmap`, without waiting.", _later)
    imap = _map("map", "An iterator of the results of `map(func, iterable)`, in order.", _lazily, 1)
    imap_unordered = _map("map", "An iterator of the results, as they come.", _lazily, 1, unordered=True)
    istarmap = _map("starmap", "An iterator of the results of `starmap`, in order.", _lazily, 1)
    istarmap_unordered = _map("starmap", "The same, as they come.", _lazily, 1, unordered=True)

    def close(self) -> None:
        """Take no more tasks."""
        self.executor.shutdown(wait=False)

    def terminate(self) -> None:
        """Take no more tasks, and cancel those that have not begun."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait for all tasks."""
        self.executor.shutdown(wait=True)
        if self._gathering is not None:
            self._gathering.shutdown(wait=True)
            self._gathering = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _results(
        self, call: str, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None,
        **options: bool,
    ) -> Iterator[Any]:  # fmt: skip
        """Of a call of the executor. Four tasks for each worker, unless a size is given."""
        if chunksize is None:
            if not operator.length_hint(iterable):
                iterable = list(iterable)
            tasks = 4 * max(1, self.executor.num_workers)
            chunksize = max(1, -(-operator.length_hint(iterable) // tasks))
        results: Iterator[Any] = getattr(self.executor, call)(func, iterable, chunksize=chunksize, **options)
        return results

    def _gathered(self, results: Iterator[Any], callback: Callback, error_callback: Callback) -> MapResult:
        if self._gathering is None:
            self._gathering = futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1))
        return MapResult(self._gathering.submit(list, results), callback, error_callback)


class ThreadPool(Pool):
    """The same with threads of this process."""

    Executor = futures.ThreadPoolExecutor


class AsyncResult:
    """The result of a call that may still run."""

    def __init__(
        self, future: Future[Any], callback: Callback = None, error_callback: Callback = None
    ) -> None:
        self.future = future
        self._event = threading.Event()
        self._callbacks = callback, error_callback
        future.add_done_callback(self._note)

    def _note(self, done: Future[Any]) -> None:
        callback, error_callback = self._callbacks
        try:
            error = TimeoutError() if done.cancelled() else done.exception()
            if error is None and callback is not None:
                callback(done.result())
            elif error is not None and error_callback is not None:
                error_callback(error)
        finally:
            self._event.set()

    def get(self, timeout: float | None = None) -> Any:
        """The result, or the exception of the call.

        Raises:
            TimeoutError: it did not come within `timeout` seconds, or was cancelled.
        """
        if not self._event.wait(timeout):
            raise TimeoutError
        try:
            return self.future.result()
        except CancelledError:
            raise TimeoutError from None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end, at most `timeout` seconds."""
        self._event.wait(timeout)

    def ready(self) -> bool:
        """Whether the call has ended."""
        return self._event.is_set()

    def successful(self) -> bool:
        """Whether the call has returned.

        Raises:
            ValueError: it has not ended.
        """
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return not self.future.cancelled() and self.future.exception() is None


class ApplyResult(AsyncResult):
    """What `apply_async` returns."""


class MapResult(AsyncResult):
    """What `map_async` and `starmap_async` return."""
