"""`python -m mpi4py.bench helloworld` and `ringtest`: what one starts first after an installation."""

from __future__ import annotations

import argparse
import sys
from array import array
from typing import Any

from unisono import MPI


def helloworld(comm: Any, args: list[str] | None = None, verbose: bool = True) -> str:
    """Each rank prints its line, in the order of ranks."""
    parser = argparse.ArgumentParser(prog="python -m mpi4py.bench helloworld")
    parser.add_argument("-q", "--quiet", action="store_false", dest="verbose", default=verbose)
    shown = parser.parse_args(args).verbose
    rank, size = comm.Get_rank(), comm.Get_size()
    text = (
        f"Hello, World! I am process {rank:{len(str(size - 1))}d} of {size} on {MPI.Get_processor_name()}.\n"
    )
    comm.Barrier()
    if rank > 0:
        comm.Recv([None, "B"], rank - 1)
    if shown:
        sys.stdout.write(text)
        sys.stdout.flush()
    if rank < size - 1:
        comm.Send([None, "B"], rank + 1)
    comm.Barrier()
    return text


def ringtest(comm: Any, args: list[str] | None = None, verbose: bool = True) -> float:
    """Time a message of `--size` bytes that goes around the ring of ranks; seconds on each rank."""
    parser = argparse.ArgumentParser(prog="python -m mpi4py.bench ringtest")
    parser.add_argument("-q", "--quiet", action="store_false", dest="verbose", default=verbose)
    for short, name, default in (("-n", "--size", 1), ("-s", "--skip", 0), ("-l", "--loop", 1)):
        parser.add_argument(short, name, type=int, default=default)
    asked = parser.parse_args(args)
    rank, size = comm.Get_rank(), comm.Get_size()
    message, came = array("B", [42]) * asked.size, array("B", [0]) * asked.size
    began = MPI.Wtime()
    for turn in range(asked.skip + asked.loop):
        if turn == asked.skip:
            began = MPI.Wtime()
        _around(comm, message, came)
    took_s: float = MPI.Wtime() - began
    if came != message:
        raise RuntimeError(f"rank {rank}: the message has changed on its way")
    if rank == 0 and asked.verbose:
        sys.stdout.write(
            f"time for {asked.loop} loops = {took_s:g} seconds ({size} processes, {asked.size} bytes)\n"
        )
        sys.stdout.flush()
    return took_s


def _around(comm: Any, message: Any, came: Any) -> None:
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        comm.Sendrecv(message, 0, 0, came, 0, 0)
        return
    if rank == 0:
        comm.Send(message, 1)
    comm.Recv(came, (rank - 1) % size)
    if rank > 0:
        comm.Send(came, (rank + 1) % size)


def main() -> None:
    """Run the command that the command line names, on all ranks."""
    commands = {"helloworld": helloworld, "ringtest": ringtest}
    parser = argparse.ArgumentParser(prog="python -m mpi4py.bench")
    parser.add_argument("command", choices=sorted(commands))
    parser.add_argument("args", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    commands[asked.command](MPI.COMM_WORLD, asked.args)
