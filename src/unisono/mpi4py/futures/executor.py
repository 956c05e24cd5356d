"""MPIPoolExecutor and MPICommExecutor: executors of concurrent.futures whose workers are ranks."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, as_completed
from typing import Any

from unisono import MPI
from unisono.mpi4py.futures.crew import Crew, Session, SpawnedCrew, Threads
from unisono.mpi4py.futures.worker import prepared, serve

shared: Crew | None = None
"""The workers of `python -m mpi4py.futures`, which all executors of the program use."""


class _Mapping(concurrent.futures.Executor):
    """`map` and `starmap` over `submit`."""

    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None,
        chunksize: int = 1, buffersize: int | None = None, unordered: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """The results of `map(fn, *iterables)`.

        Args:
            timeout: seconds for all results.  chunksize: calls in one task.
            buffersize: at most so many tasks whose results have not been taken.
            unordered: results as they come.
        Raises:
            TimeoutError: a result came too late.  Whatever fn raises.
        """
        return self.starmap(fn, zip(*iterables), timeout, chunksize, buffersize, unordered)  # noqa: B905

    def starmap(
        self, fn: Callable[..., Any], iterable: Iterable[tuple[Any, ...]], timeout: float | None = None,
        chunksize: int = 1, buffersize: int | None = None, unordered: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """The results of `itertools.starmap(fn, iterable)`; arguments as of `map`."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None:
            if not isinstance(buffersize, int):
                raise TypeError("buffersize must be an integer or None")
            if buffersize < 1 or unordered:
                wrong = "None if unordered" if unordered else "None or > 0"
                raise ValueError(f"buffersize must be {wrong}")
        if chunksize > 1:
            function = functools.partial(_chunk, fn)
            chunks = self.starmap(function, _chunks(iterable, chunksize), timeout, 1, buffersize, unordered)
            return itertools.chain.from_iterable(chunks)
        end = sys.maxsize if timeout is None else time.monotonic() + timeout
        calls = iter(iterable)
        futures = deque(self.submit(fn, *args) for args in itertools.islice(calls, buffersize))
        if unordered:
            return _as_they_come(futures, timeout)
        return _in_order(futures, end, (self.submit(fn, *args) for args in calls))


def _in_order(futures: deque[Future[Any]], end: float, more: Iterator[Future[Any]]) -> Iterator[Any]:
    try:
        while futures:
            future = futures.popleft()
            try:
                result = future.result(min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX))
            finally:
                future.cancel()
            futures.extend(itertools.islice(more, 1))
            yield result
    finally:
        for future in futures:
            future.cancel()


def _as_they_come(futures: Iterable[Future[Any]], timeout: float | None) -> Iterator[Any]:
    try:
        for future in as_completed(futures, timeout):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _chunk(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> list[Any]:
    return list(itertools.starmap(function, calls))


def _chunks(iterable: Iterable[Any], size: int) -> Iterator[tuple[tuple[Any, ...]]]:
    calls = iter(iterable)
    while chunk := tuple(itertools.islice(calls, size)):
        yield (chunk,)


class MPIPoolExecutor(_Mapping):
    """Makes calls on ranks: the workers of `python -m mpi4py.futures`.

    Args:
        max_workers: how many ranks mpi4py would start; here they start with the program.
        initializer, initargs: a call that each worker makes first.
        options: `path`, `wdir`, `env`, `globals`, `main=False`, as in mpi4py. Pickles are always sent with
            their buffers out of band, so `use_pkl5` changes nothing.
    """

    def __init__(
        self, max_workers: int | None = None, initializer: Any = None, initargs: Any = (), **options: Any
    ) -> None:
        _check(max_workers, initializer)
        self._asked = max_workers
        self._initializer = (initializer, tuple(initargs))
        self._options = options
        self._shutdown = False
        self._lock = threading.Lock()
        self._crew: Threads | None = None
        self._session = Session()
        self._pending: set[Future[Any]] = set()

    def bootup(self, wait: bool = True) -> MPIPoolExecutor:  # noqa: ARG002 (workers are there, or start now)
        """Start the workers now, not at the first call."""
        with self._lock:
            if self._shutdown:
                raise RuntimeError("cannot bootup after shutdown")
            self._start()
        return self

    @property
    def num_workers(self) -> int:
        """The number of workers; 0 after the end."""
        with self._lock:
            if self._shutdown or self._session.broken:
                return 0
            return self._start().size

    _max_workers = num_workers

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a worker call `fn(*args, **kwargs)`."""
        with self._lock:
            if self._session.broken:
                raise BrokenExecutor(self._session.broken)
            if self._shutdown:
                raise RuntimeError("cannot submit after shutdown")
            future = self._start().submit(self._session, (fn, args, kwargs))
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
            return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; wait for those under way, and cancel others if asked."""
        with self._lock:
            self._shutdown = True
            crew = self._crew
        if crew is None:
            return
        for future in tuple(self._pending) if cancel_futures else ():
            future.cancel()
        if wait:
            concurrent.futures.wait(tuple(self._pending))
        if crew is not shared:
            threading.Thread(target=crew.close).start() if not wait else crew.close()

    def _start(self) -> Threads:
        if self._crew is None:
            self._open(self._workers(), prepared(self._options))
        return self._crew  # type: ignore[return-value]

    def _workers(self) -> Threads:
        """The workers that have started with the program; otherwise new ones, by default one."""
        if shared is None:
            return SpawnedCrew(int(self._asked or 1))
        return shared if shared.size else Threads(1)

    def _open(self, crew: Threads, script: dict[str, Any] | None) -> None:
        self._session = crew.open(script, *self._initializer)
        self._crew = crew


class ThreadPoolExecutor(MPIPoolExecutor):
    """The same with threads of this process; one unless `max_workers` says otherwise."""

    def _workers(self) -> Threads:
        return Threads(int(self._asked or 1))


ProcessPoolExecutor = MPIPoolExecutor


def _check(max_workers: int | None, initializer: Any) -> None:
    if max_workers is not None and int(max_workers) <= 0:
        raise ValueError("max_workers must be greater than 0")
    if initializer is not None and not callable(initializer):
        raise TypeError("initializer must be a callable")


class MPICommExecutor:
    """`with MPICommExecutor(comm, root) as executor:` gives `root` an executor; the others are its workers.

    The others get None, and go on after the block when `root` has left it.
    """

    def __init__(self, comm: Any = None, root: int = 0, **options: Any) -> None:
        comm = MPI.COMM_WORLD if comm is None else comm
        if comm.Is_inter():
            raise ValueError("expecting an intracommunicator")
        if not 0 <= root < comm.Get_size():
            raise ValueError("expecting root in range(comm.size)")
        self._comm, self._root, self._options = comm, root, options
        self._executor: MPIPoolExecutor | None = None

    def __enter__(self) -> MPIPoolExecutor | None:
        """Make the executor; a worker returns at the end of the block at `root`."""
        if self._executor is not None:
            raise RuntimeError("__enter__")
        if shared is not None:
            self._executor = MPIPoolExecutor(**self._options)
            return self._executor
        comm = self._comm.Dup()
        at_root = comm.Get_rank() == self._root
        workers = comm.Split(MPI.UNDEFINED if at_root else 0)
        if not at_root:
            serve(comm, self._root, workers)
            workers.Free()
            comm.Free()
            return None
        self._executor = MPIPoolExecutor(**self._options)
        self._executor._open(Crew(comm, self._root) if comm.Get_size() > 1 else Threads(1), None)
        return self._executor

    def __exit__(self, *_error: object) -> bool:
        """End the executor. An exception of a worker's block is none: it has not run it."""
        executor, self._executor = self._executor, None
        if executor is None:
            return True
        executor.shutdown(wait=True)
        return False
