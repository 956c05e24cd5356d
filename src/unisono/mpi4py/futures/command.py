"""`python -m mpi4py.futures script.py`: rank 0 runs the script, and the other ranks are its workers."""

from __future__ import annotations

import os
import sys

from unisono import MPI
from unisono.mpi4py.futures import executor
from unisono.mpi4py.futures.crew import Crew
from unisono.mpi4py.futures.worker import serve
from unisono.mpi4py.run import run_command_line

USAGE = """usage: python -m mpi4py.futures <script.py> [arg] ...
   or: python -m mpi4py.futures -m <module> [arg] ...
   or: python -m mpi4py.futures -c <command> [arg] ..."""


def main() -> None:
    """Run the script on rank 0, and serve its executors on the others."""
    comm = MPI.COMM_WORLD.Dup()
    workers = comm.Split(MPI.UNDEFINED if comm.Get_rank() == 0 else 0)
    if comm.Get_rank() > 0:
        serve(comm, 0, workers)
        return
    executor.shared = crew = Crew(comm, 0)
    try:
        wrong = _wrong(sys.argv[1:])
        if wrong is not None:
            (sys.stderr if wrong else sys.stdout).write(f"{wrong}\n{USAGE}\n".lstrip())
            sys.exit(1 if wrong else 0)
        run_command_line()
    finally:
        crew.close()
        executor.shared = None


def _wrong(args: list[str]) -> str | None:
    """What is wrong with the command line; None: nothing. "": it asks for help."""
    if not args:
        return "No path specified for execution"
    if args[0] in ("-h", "--help"):
        return ""
    if args[0] in ("-m", "-c"):
        return None if len(args) > 1 else f"Argument expected for option: {args[0]}"
    if args[0].startswith("-") and args[0] != "-":
        return f"Unknown option: {args[0]}"
    return None if args[0] == "-" or os.path.exists(args[0]) else f"Path does not exist: {args[0]}"
