"""The workers of an executor, as the master sees them: who is idle, and who works at what.

    Tasks      the queue of the calls that no worker has begun
    Threads    workers that are threads of this process
    Crew       workers that are ranks: one thread sends tasks to idle ones, one takes results

Nothing polls. Several executors may share a crew.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future
from typing import Any

from unisono import MPI
from unisono.mpi4py import pkl5
from unisono.mpi4py.futures.worker import CALL, RESULT, WorkerFailure, initialize, prepare, working


class Session:
    """The tasks of one executor. `broken`: why it takes no more."""

    def __init__(self) -> None:
        self.broken = ""


class Task:
    """A call on one worker, or on each (`everyone`), and the future of its result."""

    def __init__(self, session: Session, future: Future[Any], call: Any, everyone: bool = False) -> None:
        self.session, self.future, self.call, self.everyone = session, future, call, everyone
        self.ranks: list[int] = []  # where it runs
        self.returned: list[int] = []

    def begins(self) -> bool:
        """Whether it is to run: neither cancelled nor of a broken executor."""
        if self.session.broken:
            self.fail(BrokenExecutor(self.session.broken))
            return False
        return self.future.set_running_or_notify_cancel()

    def fail(self, error: BaseException) -> None:
        """Give the future an exception, unless it is done."""
        if self.future.running() or (not self.future.done() and self.future.set_running_or_notify_cancel()):
            self.future.set_exception(error)


class Tasks:
    """The queue of calls that no worker has begun, and the threads that take from it."""

    size = 0

    def __init__(self, *threads: Callable[[], None]) -> None:
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._broken = ""
        self._threads = [threading.Thread(target=one, daemon=True, name="mpi4py.futures") for one in threads]
        for thread in self._threads:
            thread.start()

    def open(self, script: Any, initializer: Any, initargs: tuple[Any, ...]) -> Session:
        """A session of an executor; each worker loads its script, and calls the initializer."""
        raise NotImplementedError

    def submit(self, session: Session, future: Future[Any], call: Any, everyone: bool = False) -> None:
        """Let the next idle worker make a call; or every worker, when all are idle."""
        task = Task(session, future, call, everyone)
        with self._changed:
            if not self._broken:
                self._tasks.append(task)
                self._changed.notify_all()
                return
        task.fail(BrokenExecutor(self._broken))

    def cancel(self, session: Session) -> None:
        """Cancel the tasks of a session that no worker has begun."""
        with self._changed:
            gone = [task for task in self._tasks if task.session is session and not task.everyone]
            self._tasks = deque(task for task in self._tasks if task not in gone)
        for task in gone:
            task.future.cancel()
            task.future.set_running_or_notify_cancel()

    def close(self) -> None:
        """Let the workers finish all tasks, and leave."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()


class Threads(Tasks):
    """Workers that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ready = threading.Event()
        super().__init__(*[self._work] * size)

    def open(self, script: Any, initializer: Any, initargs: tuple[Any, ...]) -> Session:  # noqa: ARG002
        """The only session: threads are of one executor."""
        self._session, self._initializer = Session(), (initializer, initargs)
        self._ready.set()
        return self._session

    def close(self) -> None:
        """Let the threads finish all tasks."""
        self._ready.set()
        super().close()

    def _work(self) -> None:
        self._ready.wait()
        working(MPI.COMM_SELF)
        initializer, initargs = self._initializer
        if initializer is not None and not initialize(initializer, initargs):
            self._session.broken = "initializer failed"
        while (task := self._next()) is not None:
            if not task.begins():
                continue
            function, args, kwargs = task.call
            try:
                task.future.set_result(function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 (its future raises it)
                task.future.set_exception(error)

    def _next(self) -> Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._closing)
            return self._tasks.popleft() if self._tasks else None


class Crew(Tasks):
    """The ranks of `comm` but `master`, which is this process."""

    def __init__(self, comm: Any, master: int) -> None:
        self._comm = comm
        self._idle = deque(rank for rank in range(comm.Get_size()) if rank != master)
        self.size = len(self._idle)
        self._busy: dict[int, Task] = {}
        self._prepared = self._all_sent = False
        super().__init__(self._send, self._receive)

    def open(self, script: Any, initializer: Any, initargs: tuple[Any, ...]) -> Session:
        """A session of an executor; the script is loaded once, and None if workers run it themselves."""
        session = Session()
        with self._changed:
            first, self._prepared = not self._prepared, True
        if first and script is not None:
            self._everywhere(session, (prepare, (script,), {}))
        if initializer is not None:
            self._everywhere(session, (initialize, (initializer, initargs), {}))
        return session

    def _everywhere(self, session: Session, call: Any) -> None:
        future: Future[Any] = Future()
        future.add_done_callback(lambda done: _note_failure(session, done))
        self.submit(session, future, call, everyone=True)

    def close(self) -> None:
        """Let the workers finish all tasks, and leave. A second call does nothing."""
        super().close()
        while self._idle and not self._broken:
            self._comm.Send([pkl5.dumps(None), MPI.BYTE], self._idle.popleft(), CALL)

    def _next(self) -> Task | None:
        """Wait for a task and idle workers for it; None: there are no more tasks."""
        with self._changed:
            while True:
                if self._broken or (self._closing and not self._tasks):
                    self._all_sent = True
                    self._changed.notify_all()
                    return None
                enough = self.size if self._tasks and self._tasks[0].everyone else 1
                if self._tasks and len(self._idle) >= enough:
                    task = self._tasks.popleft()
                    task.ranks = [self._idle.popleft() for _ in range(enough)]
                    return task
                self._changed.wait()

    def _send(self) -> None:
        while (task := self._next()) is not None:
            if not self._begin(task):
                self._release(task.ranks)

    def _begin(self, task: Task) -> bool:
        if not task.begins():
            return False
        try:
            message = pkl5.dumps(task.call)
        except BaseException as error:  # noqa: BLE001 (its future raises it)
            task.future.set_exception(error)
            return False
        with self._changed:
            self._busy.update(dict.fromkeys(task.ranks, task))
            self._changed.notify_all()
        try:
            for rank in task.ranks:
                self._comm.Send([message, MPI.BYTE], rank, CALL)
        except Exception as error:  # noqa: BLE001 (a worker is lost: all futures say so)
            self._give_up(error)
        return True

    def _receive(self) -> None:
        while self._working():
            try:
                message, rank = pkl5.receive(self._comm, MPI.ANY_SOURCE, RESULT)
            except Exception as error:  # noqa: BLE001 (a worker is lost: all futures say so)
                self._give_up(error)
                return
            with self._changed:
                task = self._busy.pop(rank)
            task.returned.append(rank)
            _finish(task, message)
            if len(task.returned) == len(task.ranks):
                self._release(task.ranks)

    def _working(self) -> bool:
        """Wait until a worker has a task; False: none will have one any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._busy or self._broken or self._all_sent)
            return bool(self._busy) and not self._broken

    def _release(self, ranks: list[int]) -> None:
        with self._changed:
            self._idle.extend(ranks)
            self._changed.notify_all()

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            self._broken = str(error) or type(error).__name__
            left = {*self._busy.values(), *self._tasks}
            self._busy.clear()
            self._tasks.clear()
            self._changed.notify_all()
        for task in left:
            task.fail(BrokenExecutor(self._broken))


def _finish(task: Task, message: Any) -> None:
    """Give the future of a task what a worker has returned; of one for everyone, the first failure or all."""
    try:
        answer = pkl5.loads(message)
    except BaseException as error:  # noqa: BLE001 (a result that cannot be unpickled here)
        task.fail(error)
        return
    if isinstance(answer, WorkerFailure):
        task.fail(answer.rebuilt())
    elif task.future.done():
        return
    elif answer[0] is False or not task.everyone or len(task.returned) == len(task.ranks):
        task.future.set_result(answer[0])


def _note_failure(session: Session, done: Future[Any]) -> None:
    if done.exception() is not None:
        session.broken = f"a worker could not load the script: {done.exception()!r}"
    elif done.result() is False:
        session.broken = "initializer failed"
