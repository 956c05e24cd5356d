"""One rank of one side: waits quietly for commands, runs blocks of calls, sends the samples back.

Started by `unisono bench` with one end of a socket pair; the frames on it are JSON, answers to
"block" are followed by one frame of int64 nanoseconds. The worker ends when the socket closes,
and the kernel ends it when the starting process dies in the middle of a block.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.commands.bench.cases import OPERATIONS, BenchCase, CaseBuffers, allocate, count_wrong, fill
from unisono.commands.bench.contenders import (
    UNJOINED,
    Call,
    Contender,
    MemcpyContender,
    SharedContender,
    UnisonoContender,
)
from unisono.commands.bench.start_barrier import StartBarrier

__all__ = ["BenchWorker", "CaseWorker", "die_with", "join", "main", "serve", "time_calls"]

PR_SET_PDEATHSIG = 1

Answer = dict[str, Any]


class BenchWorker:
    """A joined rank: a command calls the method of its name, with the command's arguments.

    A program with commands of its own derives from it. A block times `call`. "samples" of an answer are sent
    as bytes.
    """

    COMMANDS: tuple[str, ...] = ("block", "close")

    def __init__(self, command: dict[str, Any], contender: Contender | None = None) -> None:
        """`command`: the "join"."""
        self.rank: int = command["rank"]
        self.size: int = command["size"]
        self.contender = contender or join(command["side"], self.rank, self.size, command["address"])
        self.call: Call = lambda: None

    def obey(self, do: str, arguments: dict[str, Any]) -> Answer:
        """Run one command; return the answer."""
        if do not in self.COMMANDS:
            raise ValueError(f"unknown command {do!r}")
        answer: Answer = getattr(self, do)(**arguments)
        return answer

    def block(self, calls: int, warmup: int) -> Answer:
        """Time a block of calls."""
        return {"samples": time_calls(self.call, calls, warmup, None)}

    def close(self) -> Answer:
        """Leave the group."""
        self.contender.close()
        return {}


class CaseWorker(BenchWorker):
    """A rank with the case that is bound at the moment."""

    COMMANDS = (*BenchWorker.COMMANDS, "bind", "choice", "check")

    def __init__(self, command: dict[str, Any], contender: Contender | None = None) -> None:
        super().__init__(command, contender)
        self.line_up = StartBarrier(command["start_barrier"], self.rank, self.size)
        self.case: BenchCase | None = None
        self.buffers = CaseBuffers(None, None)

    def bind(self, case: dict[str, Any]) -> Answer:
        """Bind a case to new buffers."""
        self.case, self.call, self.buffers = None, lambda: None, CaseBuffers(None, None)
        found = BenchCase(**case)
        shared = isinstance(self.contender, SharedContender)
        buffers = allocate(found, self.rank, SharedContender.empty if shared else np.empty)
        self.call = self.contender.bind(found, buffers)
        self.case, self.buffers = found, buffers
        self._clear()
        return {}

    def choice(self) -> Answer:
        """The library's algorithm for the case."""
        return self.contender.choice(self._bound())

    def check(self) -> Answer:
        """Run the operation once on known data, and count wrong values; leave zeros."""
        case = self._bound()
        if isinstance(self.contender, MemcpyContender):
            self.call()
            return {"wrong": 0}
        fill(case, self.rank, self.buffers)
        self.call()
        wrong = count_wrong(case, self.rank, self.buffers)
        self._clear()
        return {"wrong": wrong}

    def block(self, calls: int, warmup: int) -> Answer:
        """Time a block; ranks that may run ahead of each other line up before every call."""
        synchronizing = OPERATIONS[self._bound().operation].synchronizing
        return {"samples": time_calls(self.call, calls, warmup, None if synchronizing else self.line_up)}

    def _bound(self) -> BenchCase:
        if self.case is None:
            raise ValueError("nothing is bound")
        return self.case

    def _clear(self) -> None:
        """Write zeros, which no number of repetitions changes. Also the first touch of the memory."""
        for array in (self.buffers.inp, self.buffers.out):
            if array is not None:
                array.fill(0)


def join(name: str, rank: int, size: int, address: str) -> Contender:
    """Make this process rank `rank` of the side called `name` (see peers.SIDES), which meets at HOST:PORT."""
    if name in UNJOINED:
        return UNJOINED[name](rank)
    if name in ("unisono", "shared"):
        return (UnisonoContender if name == "unisono" else SharedContender)(rank, size, address)
    from unisono.commands.bench.torch_contender import TorchContender

    backend = "unisono" if name == "unisono-torch" else name
    return TorchContender(backend, rank, size, address)


def main(argv: list[str] | None = None, begin: Callable[[dict[str, Any]], BenchWorker] = CaseWorker) -> int:
    """Run `worker.py FD PARENT_PID`; `begin` makes the object for the commands after "join"."""
    descriptor, parent = (int(word) for word in (argv or sys.argv[1:]))
    die_with(parent)
    with Connection(descriptor) as controller:
        try:
            serve(controller, begin)
        except (EOFError, ConnectionError):  # the command is gone
            return 1
    return 0


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux; elsewhere the socket tells)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(1)


def serve(controller: Connection, begin: Callable[[dict[str, Any]], BenchWorker]) -> None:
    """Answer commands until "close"; an exception becomes an answer, the controller decides."""
    rank: BenchWorker | None = None
    do = ""
    while do != "close":
        command = json.loads(controller.recv_bytes())
        answer: Answer = {}
        samples: NDArray[np.int64] | None = None
        do = command.pop("do")
        try:
            if do == "join":
                rank = begin(command)
            elif rank is None:
                raise ValueError(f"the first command must be 'join', got {do!r}")
            else:
                answer = rank.obey(do, command)
                samples = answer.pop("samples", None)
        except Exception as error:  # noqa: BLE001  (told to the controller, which ends or goes on)
            answer = {"error": f"{type(error).__name__}: {error}"}
        controller.send_bytes(json.dumps(answer | ({} if samples is None else {"samples": True})).encode())
        if samples is not None:
            controller.send_bytes(samples.tobytes())


def time_calls(
    call: Call, calls: int, warmup: int, line_up: Callable[[], object] | None
) -> NDArray[np.int64]:
    """Time `calls` calls after `warmup` unmeasured ones; nanoseconds each.

    Without `start_barrier` the samples are the gaps between successive returns, so together they are the
    whole block and nothing between two calls is lost. With it (operations that a rank may leave
    before the others have come) each call starts from there, unmeasured, so that no rank runs ahead.
    Python's garbage collector runs before, not in between.
    """
    gc.collect()
    gc.disable()
    try:
        return _timed(call, calls, warmup, line_up)
    finally:
        gc.enable()


def _timed(call: Call, calls: int, warmup: int, line_up: Callable[[], object] | None) -> NDArray[np.int64]:
    clock = time.perf_counter_ns
    for _ in range(warmup):
        call()
    if line_up is None:
        stamps = [0] * (calls + 1)
        stamps[0] = clock()
        for index in range(1, calls + 1):
            call()
            stamps[index] = clock()
        returns = np.array(stamps, np.int64)
        gaps: NDArray[np.int64] = returns[1:] - returns[:-1]
        return gaps
    samples = [0] * calls
    for index in range(calls):
        line_up()
        started = clock()
        call()
        samples[index] = clock() - started
    return np.array(samples, np.int64)


if __name__ == "__main__":
    sys.exit(main())
