"""A program that starts itself: what the new ranks and the old ones tell each other. Prints "all is well"."""

import sys
import time

import numpy as np

from unisono import MPI

comm, parent = MPI.COMM_WORLD, MPI.Comm.Get_parent()
rank, size = comm.Get_rank(), comm.Get_size()


def child() -> None:
    assert parent.remote_size == int(sys.argv[2])
    message = parent.bcast(None, root=0)
    for _ in range(8):  # soon by the engine
        assert comm.allreduce(rank) == size * (size - 1) // 2
    assert message == {"to": "children"}
    merged = parent.Merge(high=True)
    assert merged.group.Translate_ranks()[-size:] == list(range(size))
    assert merged.allgather(("child", rank))[-1] == ("child", size - 1)
    x = np.full(50_000, float(rank))
    merged.Send(x, dest=0, tag=rank)
    window = MPI.Win.Create(None, comm=merged)
    window.Fence()
    window.Put([np.array([1.0 + rank]), MPI.DOUBLE], 0, rank * 8)
    window.Fence()
    window.Free()
    merged.Free()
    part = comm.Split(0, -rank)
    two_jobs = part.Create_intercomm(size - 1, parent, 0)
    assert two_jobs.allgather(rank) == list(range(two_jobs.remote_size))
    two_jobs.Disconnect()
    parent.Disconnect()
    assert not MPI.Comm.Get_parent()
    if sys.argv[1] == "fails later":
        raise SystemExit(3)
    if sys.argv[1] == "never ends":
        MPI.Finalize()
        time.sleep(3600)


def with_new_ranks(kind: str) -> None:
    errcodes: list[int] = []
    arguments = [__file__, kind, str(size)]
    inter = comm.Spawn(sys.executable, arguments, 2, root=size - 1, errcodes=errcodes)
    assert (inter.size, inter.remote_size, errcodes) == (size, 2, [0, 0])
    assert inter.remote_group.Translate_ranks([0, 1], comm.group) == [MPI.UNDEFINED] * 2
    inter.bcast({"to": "children"}, root=MPI.ROOT if rank == 0 else MPI.PROC_NULL)
    merged = inter.Merge(high=False)
    assert merged.group.Translate_ranks() == [*range(size), MPI.UNDEFINED, MPI.UNDEFINED]
    assert merged.group.Translate_ranks([0, size - 1, size], comm.group) == [0, size - 1, MPI.UNDEFINED]
    assert merged.allgather(("parent", rank))[-2:] == [("child", 0), ("child", 1)]
    if rank == 0:
        for source in (1, 0):
            room = np.empty(50_000)
            merged.Recv(room, source=size + source, tag=source)
            assert (room == source).all()
    memory = np.zeros(2)
    window = MPI.Win.Create(memory if rank == 0 else None, comm=merged)
    window.Fence()
    window.Fence()
    assert memory.tolist() == ([1.0, 2.0] if rank == 0 else [0.0, 0.0])
    window.Free()
    merged.Free()
    two_jobs = comm.Create_intercomm(0, inter, 0)
    assert two_jobs.allgather(rank) == [1, 0]
    two_jobs.Disconnect()
    inter.Disconnect()
    assert not inter


def without_them() -> None:
    for command, arguments in (("/there/is/none", []), (sys.executable, ["/there/is/none"])):
        try:
            comm.Spawn(command, arguments, 2)
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_SPAWN
        else:
            raise AssertionError(command)
        assert comm.allreduce(1) == size


if parent:
    child()
else:
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    if how == "":
        without_them()
    with_new_ranks(how or "works")
    sys.stdout.write("all is well\n")
