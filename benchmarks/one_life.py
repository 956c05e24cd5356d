"""One life of a group of many ranks on this machine: start, all_reduce, a loss, shrink, close.

Run by survivors.py --once. All ranks are forked from one process that has imported NumPy and Unisono. They
begin each phase together: each waits at the end of a pipe, and costs nothing.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import unisono as un

PHASES = ("start", "all_reduce", "again", "detect", "shrink", "after", "close")
"""start: up to the group of each rank. again: a second all_reduce. detect: from SIGKILL to the PeerLost of
each rank. after: an all_reduce in the next group."""

GATES = ("start", "all_reduce", "again")
LIMIT_S = 600.0


class OneLife:
    """The processes of one group, and what they have measured."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ended = self._shared()
        self.cpu = self._shared()
        self._gates = {name: os.pipe() for name in GATES}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._pids: list[int] = []

    def _shared(self) -> np.ndarray:
        """Seconds by rank and phase, in memory that parent and ranks share; 0: not yet."""
        shape = (self.size, len(PHASES))
        return np.frombuffer(mmap.mmap(-1, 8 * shape[0] * shape[1])).reshape(shape)

    @contextmanager
    def ranks(self) -> Iterator[None]:
        """The processes of all ranks, which are ended afterwards."""
        _ = un.init_process_group, un.TCPStore  # loaded before the forks
        try:
            for rank in range(self.size):
                pid = os.fork()
                if pid == 0:
                    self._rank(rank)
                self._pids.append(pid)
            for reads, _ in self._gates.values():
                os.close(reads)
            yield
        finally:
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
            for pid in self._pids:
                os.waitpid(pid, 0)

    def _rank(self, rank: int) -> None:
        try:
            for _, writes in self._gates.values():
                os.close(writes)
            self._live(rank)
        except BaseException:  # noqa: BLE001 (the parent sees that this rank has not ended a phase)
            traceback.print_exc()
        finally:
            os._exit(0)

    def _live(self, rank: int) -> None:
        def ends(phase: str) -> None:
            self.cpu[rank, PHASES.index(phase)] = time.process_time()
            self.ended[rank, PHASES.index(phase)] = time.monotonic()

        def adds(group: un.Group) -> None:
            x = np.full(100, float(group.rank))
            group.all_reduce(x)
            assert (x == group.size * (group.size - 1) / 2).all()

        os.read(self._gates["start"][0], 1)
        place = f"tcp://127.0.0.1:{self._port}"
        group = un.init_process_group(init_method=place, rank=rank, world_size=self.size, timeout=LIMIT_S)
        ends("start")
        for phase in ("all_reduce", "again"):
            os.read(self._gates[phase][0], 1)
            adds(group)
            ends(phase)
        try:
            if rank == self.victim:
                signal.pause()
            group.barrier()
        except un.PeerLost:
            ends("detect")
        following = group.shrink()
        ends("shrink")
        adds(following)
        ends("after")
        following.close()
        ends("close")

    @property
    def victim(self) -> int:
        """The rank that is killed."""
        return self.size // 2

    def open(self, gate: str) -> float:
        """Let all ranks begin a phase; returns when."""
        os.close(self._gates[gate][1])
        return time.monotonic()

    def kill(self) -> float:
        """Kill a rank; returns when."""
        time.sleep(1.0)  # the others wait for it
        os.kill(self._pids[self.victim], signal.SIGKILL)
        return time.monotonic()

    def await_end(self, phase: str, began: float) -> tuple[float, float, float]:
        """Seconds of a phase up to its last rank, CPU seconds of all ranks in it, and when it ended.

        Raises:
            RuntimeError: a rank has failed, or not ended it in time.
        """
        at = PHASES.index(phase)
        lost = self.victim if at >= PHASES.index("detect") else -1
        these = [rank for rank in range(self.size) if rank != lost]
        end = began + LIMIT_S
        while not (done := self.ended[these, at] != 0).all():
            if time.monotonic() > end:
                missing = [rank for rank, yes in zip(these, done, strict=True) if not yes]
                raise RuntimeError(f"{phase}: no end of rank {missing[:20]} within {LIMIT_S:g} s")
            self._check(lost)
            time.sleep(0.0005 * self.size**0.5)
        before = self.cpu[these, at - 1] if at else 0.0
        last = float(self.ended[these, at].max())
        return last - began, float((self.cpu[these, at] - before).sum()), last

    def _check(self, lost: int) -> None:
        """Raise RuntimeError if a rank has ended before its life has."""
        for rank, pid in enumerate(self._pids):
            last = self.ended[rank, -1] != 0 or rank == lost
            if not last and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                raise RuntimeError(f"rank {rank} has ended early; its error is above")

    def pss_mib(self) -> float:
        """The proportional share of memory of a rank, shared memory of the group included: the mean of 16."""
        of = self._pids[:: max(1, self.size // 16)]
        return sum(map(_pss_kib, of)) / len(of) / 1024


def _pss_kib(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as facts:
        return next(int(line.split()[1]) for line in facts if line.startswith("Pss:"))


def live(size: int) -> Iterator[tuple[str, float, float, float]]:
    """(phase, seconds, CPU seconds of all ranks, MiB of a rank at its end or 0) of one life."""
    life = OneLife(size)
    with life.ranks():
        began = 0.0
        for phase in PHASES:
            began = life.open(phase) if phase in GATES else life.kill() if phase == "detect" else began
            seconds, cpu, began = life.await_end(phase, began)
            memory = life.pss_mib() if phase in GATES else 0.0
            yield phase, seconds, cpu, memory
