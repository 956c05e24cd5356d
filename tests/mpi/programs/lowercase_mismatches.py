"""The ranks call different things: rank 1 the second one of a pair."""

import sys

from unisono import MPI

comm = MPI.COMM_WORLD
CALLS = {
    "bcast": lambda: comm.bcast("x"),
    "bcast from 1": lambda: comm.bcast("x", 1),
    "gather": lambda: comm.gather("x"),
    "gather to 1": lambda: comm.gather("x", 1),
    "reduce to 1": lambda: comm.reduce("x", root=1),
    "scatter": lambda: comm.scatter(["x"] * comm.size),
    "allgather": lambda: comm.allgather("x"),
    "alltoall": lambda: comm.alltoall(["x"] * comm.size),
    "allreduce": lambda: comm.allreduce("x"),
    "scan": lambda: comm.scan("x"),
    "exscan": lambda: comm.exscan("x"),
    "Barrier": lambda: comm.Barrier(),
}
CALLS[sys.argv[2 if comm.rank == 1 else 1]]()
comm.Barrier()
