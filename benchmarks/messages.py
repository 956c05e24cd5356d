"""What messages cost: isend and irecv, sendrecv, probe, a halo exchange, the rate of messages; and objects.

    python benchmarks/messages.py                          Unisono alone, on two ranks: Group, and its MPI
    python benchmarks/messages.py --against .venv-mpich    in turns with mpi4py in that environment
    python benchmarks/messages.py --sizes ""               only what has no size: collectives of objects ...

Each library has processes of its own, which take turns; a figure is the fastest of `--rounds` turns, and of
the windows in each. On a busy machine only the ratio says something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

SIZES = "8,1024,32768,262144,1048576,4194304"
OBJECT = {"a": 1, "b": [1, 2, 3]}
ROWS, COLUMNS = 256, 256  # of the halo exchange: float64, one ghost cell on each side
WINDOW, WINDOWS = 64, 12
PAIR = [OBJECT, OBJECT]
# Group's method, mpi4py's, and what each of the two ranks gives.
COLLECTIVES: dict[str, tuple[str, str, object]] = {
    "broadcast": ("broadcast_object", "bcast", OBJECT),
    "gather": ("gather_object", "gather", OBJECT),
    "scatter": ("scatter_object", "scatter", PAIR),
    "all-gather": ("all_gather_object", "allgather", OBJECT),
    "all-to-all": ("all_to_all_object", "alltoall", PAIR),
    "reduce": ("reduce_object", "reduce", 3),
    "all-reduce": ("all_reduce_object", "allreduce", 3),
    "scan": ("scan_object", "scan", 3),
}


def collectives(owner: Any, library: int) -> dict[str, Callable[[], object]]:
    """The collectives of objects of a group (library 0) or a communicator (1)."""
    return {name: partial(getattr(owner, row[library]), row[2]) for name, row in COLLECTIVES.items()}


class UnisonoCalls:
    """The calls of Unisono."""

    def __init__(self) -> None:
        import unisono as un

        self.group = group = un.init_process_group()
        self.rank = group.rank
        self.barrier, self.send, self.recv = group.barrier, group.send, group.recv
        self.isend, self.irecv, self.probe = group.isend, group.irecv, group.probe
        self.send_object, self.recv_object = group.send_object, group.recv_object
        self.collectives = collectives(group, 0)

    def sendrecv(self, x: Any, peer: int, out: Any) -> None:
        """Both at the same time."""
        self.group.sendrecv(x, peer, out, peer)

    @staticmethod
    def wait(work: Any) -> None:
        """Wait for a send or a receive."""
        work.wait()


class Mpi4pyCalls:
    """The same of mpi4py."""

    def __init__(self) -> None:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        self.comm, self.rank = comm, comm.Get_rank()
        self.barrier, self.send, self.recv = comm.Barrier, comm.Send, comm.Recv
        self.isend, self.irecv, self.probe = comm.Isend, comm.Irecv, comm.Probe
        self.send_object = comm.send
        self.collectives = collectives(comm, 1)

    def recv_object(self, source: int) -> Any:
        """Any picklable object."""
        return self.comm.recv(source=source)

    def sendrecv(self, x: Any, peer: int, out: Any) -> None:
        """Both at the same time."""
        self.comm.Sendrecv(x, peer, 0, out, peer, 0)

    @staticmethod
    def wait(work: Any) -> None:
        """Wait for a send or a receive."""
        work.Wait()


def measured(calls: Any, run: Callable[[], object], nbytes: int) -> float:
    """Seconds of one run: the fastest window."""
    count = 40 if nbytes <= 32 << 10 else max(2, (1 << 20) // nbytes)
    best = float("inf")
    for window in range(WINDOWS):
        calls.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            run()
        if window:  # the first one warms up
            best = min(best, (time.perf_counter() - begin) / count)
    return best


def patterns(calls: Any, nbytes: int) -> dict[str, Callable[[], None]]:
    """What is measured for one size: name -> one run, on this rank."""
    peer, first = 1 - calls.rank, calls.rank == 0
    x, y = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
    window = WINDOW if nbytes <= 32 << 10 else 8
    outs, ins = [np.ones(nbytes, np.uint8) for _ in range(window)], [np.empty_like(x) for _ in range(window)]

    def ping_pong() -> None:
        if first:
            calls.send(x, peer)
            calls.recv(y, peer)
        else:
            calls.recv(y, peer)
            calls.send(x, peer)

    def asynchronous() -> None:
        works = calls.irecv(y, peer), calls.isend(x, peer)
        for work in works:
            calls.wait(work)

    def probed() -> None:
        calls.send(x, peer)
        calls.probe(peer, 0)
        calls.recv(y, peer)

    def flood() -> None:
        works = [calls.irecv(one, peer) for one in ins] + [calls.isend(one, peer) for one in outs]
        for work in works:
            calls.wait(work)

    return {
        "send + recv, there and back": ping_pong,
        "irecv + isend + 2 wait": asynchronous,
        "sendrecv": lambda: calls.sendrecv(x, peer, y),
        **({"send + probe + recv": probed} if nbytes <= 32 << 10 else {}),
        f"{window} irecv + {window} isend + wait": flood,
    }


def halo(calls: Any) -> Callable[[], None]:
    """Both ranks exchange a row and a packed column of their parts, in both directions."""
    peer, part = 1 - calls.rank, np.ones((ROWS + 2, COLUMNS + 2))
    ghosts = [np.empty(COLUMNS), np.empty(COLUMNS), np.empty(ROWS), np.empty(ROWS)]

    def exchange() -> None:
        edges = part[1, 1:-1], part[-2, 1:-1], part[1:-1, 1].copy(), part[1:-1, -2].copy()
        works = [calls.irecv(ghost, peer, tag) for tag, ghost in enumerate(ghosts)]
        works += [calls.isend(edge, peer, tag) for tag, edge in enumerate(edges)]
        for work in works:
            calls.wait(work)

    return exchange


def posted(calls: Any, count: int) -> Callable[[], None]:
    """`count` receives with tags of their own are posted, and met in the opposite order."""
    peer, x, ins = 1 - calls.rank, np.ones(8, np.uint8), np.empty((count, 8), np.uint8)

    def run() -> None:
        works = [calls.irecv(ins[tag], peer, tag) for tag in range(count)]
        calls.barrier()
        for tag in reversed(range(count)):
            calls.send(x, peer, tag)
        for work in works:
            calls.wait(work)

    return run


def work(library: str, sizes: str) -> None:
    """A rank: rank 0 prints name -> seconds as JSON."""
    calls = UnisonoCalls() if library == "unisono" else Mpi4pyCalls()
    peer, first = 1 - calls.rank, calls.rank == 0
    found: dict[str, float] = {}
    for nbytes in map(int, filter(None, sizes.split(","))):
        for name, run in patterns(calls, nbytes).items():
            found[f"{name}, {nbytes} B"] = measured(calls, run, nbytes)

    def objects() -> None:
        if first:
            calls.send_object(OBJECT, peer)
            calls.recv_object(peer)
        else:
            calls.recv_object(peer)
            calls.send_object(OBJECT, peer)

    found["an object, there and back"] = measured(calls, objects, 8)
    for name, run in calls.collectives.items():
        found[f"{name} of objects"] = measured(calls, run, 8)
    found[f"halo exchange, {ROWS} x {COLUMNS} f64"] = measured(calls, halo(calls), 2048)
    for count in (64, 4096):
        found[f"{count} posted receives, each"] = measured(calls, posted(calls, count), 1 << 20) / count
    if first:
        print(json.dumps(found))


def turn(library: str, launcher: list[str], python: list[str], sizes: str) -> dict[str, float]:
    """Run both ranks once."""
    command = [*launcher, *python, __file__, "--work", library.partition(" ")[0], "--sizes", sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    line = next(line for line in done.stdout.splitlines() if "{" in line)
    found: dict[str, float] = json.loads(line[line.index("{") :])
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", type=Path, help="an environment with mpi4py and an mpiexec")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default=SIZES, help="in bytes")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.sizes)
        return
    here = Path(sys.executable).parent
    sides: dict[str, tuple[list[str], list[str]]] = {
        "unisono": ([str(here / "unisono"), "run", "-n", "2"], []),
        "mpi4py by unisono": ([str(here / "unisono"), "run", "--replace", "mpi4py", "-n", "2"], []),
    }
    if args.against:
        there = args.against / "bin"
        sides["mpi4py"] = [str(there / "mpiexec"), "-n", "2"], [str(there / "python")]
    best: dict[str, dict[str, float]] = {library: {} for library in sides}
    for _ in range(args.rounds):
        for library, (launcher, python) in sides.items():
            for name, seconds in turn(library, launcher, python, args.sizes).items():
                best[library][name] = min(seconds, best[library].get(name, seconds))
    print(f"{'us':44s}" + "".join(f"{library:>20s}" for library in sides))
    for name in best["unisono"]:
        print(f"{name:44s}" + "".join(f"{best[library][name] * 1e6:20.2f}" for library in sides))


if __name__ == "__main__":
    main()
