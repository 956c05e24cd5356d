"""What a worker does: it takes calls from the master, makes them, and returns results or exceptions."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from unisono import MPI
from unisono.mpi4py import pkl5

CALL, RESULT = 1, 2
"""Tags of the messages: from the master, and to it."""

MAIN = "__worker__"
"""The name of the master's script in a worker, where `if __name__ == "__main__"` must not hold."""

_here = threading.local()


class RemoteTraceback(Exception):
    """The cause of an exception that a worker raised: its traceback there."""


class WorkerFailure:
    """An exception on its way to the master."""

    def __init__(self, error: BaseException, comm: Any) -> None:
        where = f"### Worker {comm.Get_rank()} of {comm.Get_size()} on {MPI.Get_processor_name()}\n"
        self.text = f'\n{where}"""\n{"".join(traceback.format_exception(error))}"""'
        self.error = error.with_traceback(None)
        self.error.__cause__ = self.error.__context__ = None

    def rebuilt(self) -> BaseException:
        """The exception, with the worker's traceback as its cause."""
        self.error.__cause__ = RemoteTraceback(self.text)
        return self.error


def get_comm_workers() -> Any:
    """The communicator of all workers, in a call that one of them makes.

    Raises:
        RuntimeError: this is no worker.
    """
    try:
        return _here.comm
    except AttributeError:
        raise RuntimeError("communicator is not accessible: this process is no worker") from None


def working(comm: Any) -> None:
    """Let `get_comm_workers` in this thread return `comm`; None: it is no worker any more."""
    if comm is None:
        del _here.comm
    else:
        _here.comm = comm


def serve(comm: Any, master: int, workers: Any) -> None:
    """Make calls until the master says that there are no more.

    Args:
        comm: communicator of master and workers.  workers: of the workers alone.
    """
    working(workers)
    try:
        while (answer := _answer(comm, master)) is not None:
            try:
                message = pkl5.dumps(answer)
            except Exception as error:  # noqa: BLE001 (a result that cannot be pickled: the master is told)
                message = pkl5.dumps(WorkerFailure(error, comm))
            comm.Send([message, MPI.BYTE], master, RESULT)
    finally:
        working(None)


def _answer(comm: Any, master: int) -> Any:
    """The result of the next call in a tuple, or a WorkerFailure; None: it was the last."""
    message, _ = pkl5.receive(comm, master, CALL)
    try:
        call = pkl5.loads(message)
        if call is None:
            return None
        function, args, kwargs = call
        return (function(*args, **kwargs),)
    except BaseException as error:  # noqa: BLE001 (whatever a task raises belongs to its future)
        return WorkerFailure(error, comm)


def prepared(options: Mapping[str, Any]) -> dict[str, Any]:
    """What workers need of the options of an executor, and of the master's script."""
    main = sys.modules["__main__"]
    sys.modules.setdefault(MAIN, main)  # results may be of its classes
    found = {name: options[name] for name in ("path", "wdir", "env", "globals") if name in options}
    if options.get("main", True):
        spec = getattr(main, "__spec__", None)
        found["module"] = None if spec is None else spec.name
        found["script"] = getattr(main, "__file__", None)
    return found


def prepare(given: Mapping[str, Any]) -> None:
    """Do in a worker what the options ask for, and load the master's script under another name."""
    sys.path.extend(given.get("path", ()))
    if "wdir" in given:
        os.chdir(given["wdir"])
    os.environ.update(given.get("env", {}))  # noqa: TID251 (the user's variables, for the user's functions)
    if sys.modules["__main__"].__name__ == MAIN:
        return
    module = ModuleType(MAIN)
    module.__dict__.update(given.get("globals", {}), __name__=MAIN)
    code = _code(module, given.get("module"), given.get("script"))
    sys.modules["__main__"] = sys.modules[MAIN] = module
    if code is not None:
        exec(code, module.__dict__)  # noqa: S102 (the user's own script)


def _code(module: ModuleType, name: str | None, script: str | None) -> Any:
    """The code of the master's script; None if there is none, as of an interactive session."""
    if name:
        spec = importlib.util.find_spec(name)
        module.__file__, module.__package__ = spec.origin, spec.parent  # type: ignore[union-attr]
        return spec.loader.get_code(name)  # type: ignore[union-attr]
    if not script or not os.path.isfile(script):
        return None
    sys.path[0] = os.path.realpath(os.path.dirname(script))
    module.__file__ = script
    with open(script, "rb") as file:
        return compile(file.read(), script, "exec")


def initialize(function: Callable[..., object], args: tuple[Any, ...]) -> bool:
    """Whether the initializer of an executor returns."""
    try:
        function(*args)
    except BaseException:  # noqa: BLE001 (the executor is broken, and says so)
        traceback.print_exc()
        return False
    return True
