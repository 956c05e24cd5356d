"""A rank whose receive fails, because the message is too long, may use the memory that it sends at once."""

import time
from typing import Any

import numpy as np

from unisono import MPI

COMM = MPI.COMM_WORLD
RANK, OTHER = COMM.rank, 1 - COMM.rank


def sendrecv(sent: Any, got: Any) -> None:
    COMM.Sendrecv(sent, OTHER, 1, got, OTHER, 1)


def typed(sent: Any, got: Any) -> None:
    COMM.Sendrecv([sent, MPI.DOUBLE], OTHER, 1, [got, MPI.DOUBLE], OTHER, 1)


def waited(sent: Any, got: Any) -> None:
    COMM.Isendrecv(sent, OTHER, 1, got, OTHER, 1).Wait()


def tested(sent: Any, got: Any) -> None:
    request = COMM.Isendrecv(sent, OTHER, 1, got, OTHER, 1)
    while not request.Test():
        pass


def several(sent: Any, got: Any) -> None:
    MPI.Request.Waitall([COMM.Irecv(got, OTHER, 1), COMM.Isend(sent, OTHER, 1)])


for way in (sendrecv, typed, waited, tested, several):
    for n in (10, 100_000, 1_000_000):
        sent, got = np.full(n, float(RANK)), np.empty(3 if RANK == 0 else n)
        if RANK == 1:
            time.sleep(0.02)
        try:
            way(sent, got)
            assert RANK == 1, way
        except MPI.Exception as error:
            assert RANK == 0, way
            assert error.Get_error_class() == MPI.ERR_TRUNCATE, error
            sent[:] = -1
        COMM.Barrier()
        assert RANK == 0 or not got.any(), (way, n)
print("all is well")
