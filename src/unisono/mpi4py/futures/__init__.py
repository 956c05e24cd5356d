"""mpi4py.futures: executors whose workers are ranks of this job.

executor   MPIPoolExecutor and MPICommExecutor, with the interface of concurrent.futures
crew       the workers of a communicator: a thread of the master for each
worker     what a worker does: takes calls, makes them, returns results
combine    collect and compose: futures of futures
command    `python -m mpi4py.futures script.py`: rank 0 runs the script, the others work
"""

from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    InvalidStateError,
    TimeoutError,  # noqa: A004
    as_completed,
    wait,
)

from unisono.mpi4py.futures.combine import collect, compose
from unisono.mpi4py.futures.executor import (
    MPICommExecutor,
    MPIPoolExecutor,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from unisono.mpi4py.futures.worker import get_comm_workers

__all__ = [
    "ALL_COMPLETED", "FIRST_COMPLETED", "FIRST_EXCEPTION", "BrokenExecutor", "CancelledError", "Executor",
    "Future", "InvalidStateError", "MPICommExecutor", "MPIPoolExecutor", "ProcessPoolExecutor",
    "ThreadPoolExecutor", "TimeoutError", "as_completed", "collect", "compose", "get_comm_workers",
    "wait",
]  # fmt: skip
