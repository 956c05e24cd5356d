"""The workers of an executor, as the master sees them: a thread of the master for each worker.

A thread takes a call from the queue of concurrent.futures, lets its worker make it, and waits for the result.
Several executors may share a crew.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from typing import Any

from unisono import MPI
from unisono.mpi4py import pkl5
from unisono.mpi4py.futures.worker import CALL, RESULT, WorkerFailure, initialize, prepare, working

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Session:
    """The tasks of one executor. `broken`: why it takes no more."""

    def __init__(self) -> None:
        self.broken = ""


class Threads:
    """Workers that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._opening = threading.Lock()
        self._pool = ThreadPoolExecutor(max(1, size), "mpi4py.futures", self._enter)

    def open(self, script: Any, initializer: Any, initargs: tuple[Any, ...]) -> Session:
        """A session of an executor; each worker loads its script, and calls the initializer."""
        session = Session()
        with self._opening:
            self._load(session, script)
            if initializer is not None:
                self._everywhere(session, (initialize, (initializer, initargs), {}))
        return session

    def submit(self, session: Session, call: Call) -> Future[Any]:
        """Let the next idle worker make a call."""
        return self._pool.submit(self._run, session, call)

    def close(self) -> None:
        """Let the workers finish all tasks, and leave. A second call does nothing."""
        self._pool.shutdown()

    def _load(self, session: Session, script: Any) -> None:
        """Threads have the script."""

    def _everywhere(self, session: Session, call: Call) -> None:
        """Let all workers make a call at the same time, before what is submitted after it."""
        together = threading.Barrier(self.size)
        for _ in range(self.size):  # one for each thread: it waits there for the others
            self._pool.submit(self._prepare, together, session, call)

    def _prepare(self, together: threading.Barrier, session: Session, call: Call) -> None:
        together.wait()
        try:
            if self._make(call) is False:
                session.broken = "initializer failed"
        except BaseException as error:  # noqa: BLE001 (the session's calls raise it)
            session.broken = f"a worker could not load the script: {error!r}"
        together.wait()

    def _run(self, session: Session, call: Call) -> Any:
        if session.broken:
            raise BrokenExecutor(session.broken)
        return self._make(call)

    def _enter(self) -> None:
        working(MPI.COMM_SELF)

    def _make(self, call: Call) -> Any:
        function, args, kwargs = call
        return function(*args, **kwargs)


class Crew(Threads):
    """The ranks of `comm` but `master`, which is this process."""

    def __init__(self, comm: Any, master: int) -> None:
        self._comm = comm
        self._ranks = [rank for rank in range(comm.Get_size()) if rank != master]
        self._left = iter(self._ranks)
        self._mine = threading.local()
        self._sending = threading.Lock()
        self._room: Any = b""
        self._broken = ""
        self._loaded = False
        super().__init__(len(self._ranks))

    def close(self) -> None:
        """Let the workers finish all tasks, and leave. A second call does nothing."""
        super().close()
        while self._ranks and not self._broken:
            self._comm.Send([pkl5.dumps(None), MPI.BYTE], self._ranks.pop(), CALL)

    def _load(self, session: Session, script: Any) -> None:
        """Once; a script of None: workers run it themselves."""
        if script is not None and not self._loaded:
            self._everywhere(session, (prepare, (script,), {}))
        self._loaded = True

    def _enter(self) -> None:
        self._mine.rank = next(self._left)

    def _make(self, call: Call) -> Any:
        with self._sending:  # in memory that was used before: that of new pages takes as long as the copy
            message = pkl5.dumps(call, self._room)
            self._room = max(self._room, message, key=len)
            self._transfer(self._comm.Send, [message, MPI.BYTE], self._mine.rank, CALL)
        result, _ = self._transfer(pkl5.receive, self._comm, self._mine.rank, RESULT)
        answer = pkl5.loads(result)
        if isinstance(answer, WorkerFailure):
            raise answer.rebuilt()
        return answer[0]

    def _transfer(self, call: Callable[..., Any], *args: Any) -> Any:
        """A call of `comm`; if it fails, a worker is lost, and the crew takes no more tasks."""
        if not self._broken:
            try:
                return call(*args)
            except Exception as error:  # noqa: BLE001 (all futures say so)
                self._broken = str(error) or type(error).__name__
        raise BrokenExecutor(self._broken)


class SpawnedCrew(Crew):
    """New ranks, which this process starts."""

    def __init__(self, size: int) -> None:
        command = ["-m", "unisono.mpi4py.futures.spawned"]
        self._parted: Any = MPI.COMM_SELF.Spawn(sys.executable, command, size)
        super().__init__(self._parted.Merge(high=False), 0)
        atexit.register(self.close)  # before MPI's end

    def close(self) -> None:
        """See `Crew.close`; they end."""
        super().close()
        atexit.unregister(self.close)
        parted, self._parted = self._parted, None
        if parted is not None and not self._broken:
            self._comm.Disconnect()
            parted.Disconnect()
