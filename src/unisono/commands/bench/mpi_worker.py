"""One rank of an MPI side: started by mpiexec, driven like every other worker.

`mpi_worker.py SOCKET`: connects to the command's Unix socket, says which rank it is, then serves.
mpi4py is imported here and nowhere else; its buffers are NumPy arrays, its calls the upper-case ones.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from unisono.commands.bench.cases import REDUCE_OPS, BenchCase, CaseBuffers
from unisono.commands.bench.contenders import Call, Contender, pingpong
from unisono.commands.bench.worker import CaseWorker, die_with, serve

__all__ = ["MpiContender", "main"]

OPS = {name: name.upper() for name in REDUCE_OPS if name != "avg"} | {"product": "PROD"}


class MpiContender(Contender):
    """The MPI library that mpi4py finds in this process, on MPI_COMM_WORLD."""

    def __init__(self) -> None:
        self.mpi: Any = import_module("mpi4py.MPI")
        self.comm = self.mpi.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()

    def bind(self, case: BenchCase, buffers: CaseBuffers) -> Call:
        """Return the case's call.

        Raises:
            ValueError: MPI has no such reduction.
        """
        if case.op not in OPS:
            raise ValueError(f"MPI has no reduction {case.op}")
        comm, inp, out, root = self.comm, buffers.inp, buffers.out, case.root
        op, in_place = getattr(self.mpi, OPS[case.op]), self.mpi.IN_PLACE
        reduce = (in_place, inp) if self.rank == root else (inp, None)
        parts = case.parts
        mine = [parts[self.rank]] * self.size
        calls: dict[str, Call] = {
            "all_reduce": partial(comm.Allreduce, in_place, inp, op),
            "broadcast": partial(comm.Bcast, inp, root),
            "reduce": partial(comm.Reduce, *reduce, op, root),
            "all_gather": partial(comm.Allgather, inp, out),
            "reduce_scatter": partial(comm.Reduce_scatter_block, inp, out, op),
            "all_to_all": partial(comm.Alltoall, inp, out),
            "gather": partial(comm.Gather, inp, out, root),
            "scatter": partial(comm.Scatter, inp, out, root),
            "barrier": comm.Barrier,
            "send_recv": pingpong(self.rank, self.size, comm.Send, comm.Recv, inp, out),
            "scan": partial(comm.Scan, in_place, inp, op),
            "exclusive_scan": partial(comm.Exscan, in_place, inp, op),
            "all_gather_v": partial(comm.Allgatherv, inp, (out, parts)),
            "all_to_all_v": partial(comm.Alltoallv, (inp, parts), (out, mine)),
            "gather_v": partial(comm.Gatherv, inp, (out, parts), root),
            "scatter_v": partial(comm.Scatterv, (inp, parts), out, root),
        }
        if case.operation.endswith("_v") and self.rank != root:  # what is significant at the root only
            calls["gather_v"] = partial(comm.Gatherv, inp, None, root)
            calls["scatter_v"] = partial(comm.Scatterv, None, out, root)
        return calls[case.operation]

    def close(self) -> None:
        """Leave MPI; collective."""
        self.mpi.Finalize()


def main() -> int:
    """Run one rank until the command closes it or goes away."""
    die_with(os.getppid())
    contender = MpiContender()
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(sys.argv[1])
    with Connection(channel.detach()) as controller:
        controller.send_bytes(json.dumps({"rank": contender.rank, "pid": os.getpid()}).encode())
        try:
            serve(controller, lambda command: CaseWorker(command, contender))
        except (EOFError, ConnectionError):  # the command is gone
            contender.comm.Abort(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
