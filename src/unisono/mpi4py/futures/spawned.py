"""`python -m unisono.mpi4py.futures.spawned`: a worker that an executor has started."""

from __future__ import annotations

from unisono import MPI
from unisono.mpi4py.futures.worker import serve

if __name__ == "__main__":
    parent = MPI.Comm.Get_parent()
    comm = parent.Merge(high=True)
    serve(comm, 0, MPI.COMM_WORLD)
    comm.Disconnect()
    parent.Disconnect()
