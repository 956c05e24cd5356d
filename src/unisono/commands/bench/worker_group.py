"""One side of a comparison: a set of long-lived worker processes, one per rank.

While one side works, the other sides' workers block in a read of their socket: no spinning, no
polling. A side is a context manager, which ends its processes in every case.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.commands.bench.start_barrier import barrier_memory
from unisono.engine.environment import env
from unisono.errors import UnisonoError, message

__all__ = ["BenchError", "WorkerGroup", "connection_over", "reserved_port"]

ANSWER_TIMEOUT_S = 180.0
AFTER_ERROR_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
GAP_TIMEOUT_S = 60.0  # between two pieces of one answer


class BenchError(UnisonoError):
    """A measured side failed; the message names side, rank and what it was doing."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port that the system gives to no other process, except to a server that reuses addresses."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(holder.getsockname()[1])


def connection_over(sock: socket.socket) -> Connection:
    """`sock` as a connection; reading an incomplete answer raises BlockingIOError."""
    whole = int(GAP_TIMEOUT_S)
    gap = struct.pack("ll", whole, int((GAP_TIMEOUT_S - whole) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, gap)
    return Connection(sock.detach())


class WorkerGroup:
    """`size` workers that run contender `name`; see worker.py for the commands.

    Where several sides run the same contender, `contender` says which, and `name` tells the sides apart.

    Args:
        worker: what Python runs as a rank, before the arguments FD PARENT_PID.
    """

    def __init__(
        self, name: str, size: int, worker: Sequence[str] = ("-m", "unisono.commands.bench.worker")
    ) -> None:
        self.name = self.contender = name
        self.size = size
        self.worker = worker
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.pids: list[int] = []

    def __enter__(self) -> WorkerGroup:
        try:
            self._start_workers()
            self._join()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.connections:
                self.ask({"do": "close"}, timeout_s=CLOSE_TIMEOUT_S)
                for process in self.processes:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=CLOSE_TIMEOUT_S)
        finally:
            self.kill()

    def _join(self) -> None:
        with barrier_memory(self.size) as place, self._meeting_point() as address:
            join = {"do": "join", "side": self.contender, "size": self.size, "start_barrier": place}
            join["address"] = address
            self._ask_each([{**join, "rank": rank} for rank in range(self.size)])

    def ask(self, command: dict[str, Any], *, timeout_s: float = ANSWER_TIMEOUT_S) -> list[dict[str, Any]]:
        """Send one command to every rank; return the answers in rank order.

        Raises:
            BenchError: a rank reported an exception, died, or did not answer in time.
        """
        return self._ask_each([command] * self.size, timeout_s)

    def time_block(self, calls: int, warmup: int) -> NDArray[np.float64]:
        """Microseconds of each call on each rank. Shapes: [ranks, calls]."""
        answers = self.ask({"do": "block", "calls": calls, "warmup": warmup})
        samples: NDArray[np.int64] = np.stack([answer["samples"] for answer in answers])
        return samples / 1e3

    def kill(self) -> None:
        """End the workers and reap them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for connection in self.connections:
            connection.close()
        self.connections.clear()

    def _start_workers(self) -> None:
        for rank in range(self.size):
            self._start_worker(rank)
        self.pids = [process.pid for process in self.processes]

    @contextmanager
    def _meeting_point(self) -> Iterator[str]:
        """HOST:PORT where the ranks can meet, kept for them until they have."""
        with reserved_port() as port:
            yield f"127.0.0.1:{port}"

    def _command(self, rank: int, words: list[str]) -> list[str]:  # noqa: ARG002  (for ranks elsewhere)
        """The command by which Python runs `words` as this rank."""
        return [sys.executable, *words]

    def _start_worker(self, rank: int) -> None:
        environ = env.copy()
        environ.pop("UNISONO_REPLACE", None)  # "gloo" is to be Gloo here
        ours, theirs = socket.socketpair()
        with theirs:
            self.connections.append(connection_over(ours))
            command = self._command(rank, [*self.worker, str(theirs.fileno()), str(os.getpid())])
            self._start(command, environ, (theirs.fileno(),))

    def _start(self, command: list[str], environ: dict[str, str], pass_fds: tuple[int, ...] = ()) -> None:
        """Start one process of the side."""
        self.processes.append(
            subprocess.Popen(
                command,
                env=environ,
                pass_fds=pass_fds,
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the report's
                start_new_session=True,  # Ctrl-C is for the command, which ends the workers
            )
        )

    def _ask_each(
        self, commands: list[dict[str, Any]], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Send a command to each rank and collect every answer, before the next command."""
        if not self.connections:
            raise BenchError(f"{self.name} has ended: see its first error")
        for rank, command in enumerate(commands):
            self._send(rank, command)
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size:
            missing = [rank for rank in range(self.size) if rank not in answers]
            ready = wait([self.connections[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in missing:
                if self.connections[rank] in ready:
                    answers[rank] = self._receive(rank, commands[rank])
            if any("error" in answer for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + AFTER_ERROR_TIMEOUT_S)
        self._raise_first(answers, commands, timeout_s)
        return [answers[rank] for rank in range(self.size)]

    def _raise_first(
        self, answers: dict[int, dict[str, Any]], commands: list[dict[str, Any]], timeout_s: float
    ) -> None:
        """Raise what a rank reported; a side that did not answer in full, or not all of a block, is ended."""
        failed = next((rank for rank in sorted(answers) if "error" in answers[rank]), None)
        silent = next((rank for rank in range(self.size) if rank not in answers), None)
        where = self._where(failed if failed is not None else silent or 0, commands[0])
        if silent is not None or (failed is not None and commands[0]["do"] == "block"):
            self.kill()  # its ranks are no longer at the same call
        if failed is not None:
            raise BenchError(f"{where} raised {answers[failed]['error']}")
        if silent is not None:
            raise BenchError(f"{where} did not answer within {timeout_s:.0f} s")

    def _send(self, rank: int, command: dict[str, Any]) -> None:
        try:
            self.connections[rank].send_bytes(json.dumps(command).encode())
        except OSError:
            raise self._died(rank, command) from None

    def _receive(self, rank: int, command: dict[str, Any]) -> dict[str, Any]:
        """One answer; the samples of a block come in a frame of their own."""
        try:
            answer: dict[str, Any] = json.loads(self.connections[rank].recv_bytes())
            if answer.get("samples"):
                answer["samples"] = np.frombuffer(self.connections[rank].recv_bytes(), np.int64)
        except BlockingIOError:
            self.kill()
            what = f"{self._where(rank, command)} stopped in the middle of its answer"
            raise BenchError(message(what, observed=f"nothing for {GAP_TIMEOUT_S:g} s")) from None
        except (EOFError, OSError):
            raise self._died(rank, command) from None
        return answer

    def _where(self, rank: int, command: dict[str, Any]) -> str:
        return f"{self.name} rank {rank}/{self.size} (pid {self.pids[rank]}) at '{command['do']}'"

    def _died(self, rank: int, command: dict[str, Any]) -> BenchError:
        """The error for a worker whose socket closed; ends the whole side."""
        where = self._where(rank, command)
        try:
            code: int | None = self.processes[min(rank, len(self.processes) - 1)].wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        ended = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return BenchError(message(f"{where} ended with {ended}", remedy="What it printed is above."))
