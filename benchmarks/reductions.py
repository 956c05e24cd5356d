"""What `out=` gains over a copy and a reduction in place, and reduction functions beside mpi4py's.

    python benchmarks/reductions.py                          Unisono alone, on two ranks
    python benchmarks/reductions.py --against .venv-mpich    in turns with mpi4py in that environment

Each turn is a job of its own; a figure is the fastest of all turns. On a busy machine only the ratio says
something.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (4, 1024, 16384, 262144, 1048576, 16777216)  # bytes of float32
WINDOWS = 25


def window(run: Callable[[], Any], barrier: Callable[[], Any], nbytes: int) -> float:
    """Seconds of a call."""
    calls = max(2, min(500, (1 << 23) // (nbytes + 16384)))
    barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls


def of_unisono() -> tuple[dict[str, Callable[[Any, Any], Any]], Callable[[], Any], int]:
    """Calls by name, a barrier, and the rank."""
    import unisono as un

    world = un.init_process_group()
    ufunc, function = un.op(np.add), un.op(lambda a, b: a + b)

    def copied(x: Any, out: Any) -> None:
        out[...] = x
        world.all_reduce(out)

    calls: dict[str, Callable[[Any, Any], Any]] = {
        "copy, in place": copied,
        "out=": lambda x, out: world.all_reduce(x, out=out),
        "op(np.add)": lambda x, out: world.all_reduce(x, ufunc, out=out),
        "op(lambda)": lambda x, out: world.all_reduce(x, function, out=out),
    }
    return calls, world.barrier, world.rank


def of_mpi4py() -> tuple[dict[str, Callable[[Any, Any], Any]], Callable[[], Any], int]:
    """The same, of mpi4py."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def add(a: Any, b: Any, _: Any) -> None:
        into = np.frombuffer(b, np.float32)
        np.add(np.frombuffer(a, np.float32), into, out=into)

    op = MPI.Op.Create(add, commute=True)
    calls = {"Op.Create": lambda x, out: comm.Allreduce(x, out, op)}
    return calls, comm.Barrier, comm.Get_rank()


def rank_of(library: str) -> None:
    """One rank of a turn; rank 0 prints the seconds."""
    calls, barrier, rank = of_unisono() if library == "unisono" else of_mpi4py()
    found: dict[str, dict[int, float]] = {name: {} for name in calls}
    for nbytes in SIZES:
        x, out = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
        for _ in range(WINDOWS):  # in turns: what disturbs one call disturbs all
            for name, call in calls.items():
                seconds = window(lambda call=call, x=x, out=out: call(x, out), barrier, nbytes)
                found[name][nbytes] = min(seconds, found[name].get(nbytes, seconds))
    if rank == 0:
        print(json.dumps(found), flush=True)


def turn(library: str, ranks: int, against: str) -> dict[str, dict[str, float]]:
    """Run a job; its figures."""
    here = [str(Path(__file__).resolve()), "--library", library]
    if library == "unisono":
        words = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), *here]
    else:
        words = [f"{against}/bin/mpiexec", "-n", str(ranks), f"{against}/bin/python", *here]
    printed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return json.loads(printed[printed.index("{") : printed.rindex("}") + 1])


def main() -> None:
    """Run turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", default="", help="an environment with mpi4py and an MPI")
    parser.add_argument("--library", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.library:
        rank_of(given.library)
        return
    best: dict[str, dict[str, float]] = {}
    for _ in range(given.rounds):
        for library in ("unisono", *(["mpi4py"] if given.against else [])):
            for name, row in turn(library, given.ranks, given.against).items():
                known = best.setdefault(name, row)
                best[name] = {size: min(known[size], seconds) for size, seconds in row.items()}
    print(f"all_reduce of float32 on {given.ranks} ranks, us")
    print(f"{'bytes':>10}" + "".join(f"{name:>16}" for name in best))
    for size in next(iter(best.values())):
        print(f"{size:>10}" + "".join(f"{row[size] * 1e6:>16.1f}" for row in best.values()))


if __name__ == "__main__":
    main()
