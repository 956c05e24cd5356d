"""Arguments of wrong classes, on rank 0 alone: an error at once, and the communicator goes on.

It also runs with mpi4py and MPICH: MPI_OF=mpi4py mpiexec -n 2 python wrong_classes.py.
"""

import os

import numpy as np

if os.environ.get("MPI_OF") == "mpi4py":
    from mpi4py import MPI
else:
    from unisono import MPI

world = MPI.COMM_WORLD
null, nowhere, x, y = MPI.REQUEST_NULL, MPI.PROC_NULL, np.zeros(4), np.zeros(4)
whole = np.zeros(4 * world.size)
info, request = MPI.INFO_NULL, MPI.Request
MESSAGES = [
    lambda c: c.Send("text", 0), lambda c: c.Send(x, dest="1"), lambda c: c.Send(x, 0, None),
    lambda c: c.Send(x, nowhere, "1"), lambda c: c.Isend(x, [0]), lambda c: c.isend(1, None),
    lambda c: c.send(1, nowhere, "t"), lambda c: c.Recv(x, 0, 0, 5), lambda c: c.Recv(x, nowhere, 0, "s"),
    lambda c: c.Irecv(x, "0"), lambda c: c.recv(None, 0, 0, 5), lambda c: c.Iprobe(0, 0, 5),
    lambda c: c.Probe(nowhere, "a"), lambda c: c.Improbe(0, 0, 5), lambda c: c.Sendrecv(x, 0, 0, y, 0, 0, 5),
    lambda c: c.sendrecv(1, 0, 0, None, 0, 0, 5), lambda c: c.Sendrecv_replace(y, 0, 0, 0, 0, 5),
    lambda c: c.Recv_init(x, nowhere, "0"), lambda c: c.Psend_init(x, 1, "a"), lambda _: request.Waitall(5),
    lambda _: request.Waitall([null, None]), lambda _: request.waitall([null], [5]),
    lambda _: request.Waitany([5]), lambda _: request.testsome(["a"]), lambda _: null.Wait(5),
    lambda _: null.test(5), lambda _: MPI.Prequest.Startall([5]),
]  # fmt: skip
COLLECTIVES = [
    lambda c: c.Bcast(None), lambda c: c.Bcast("text"), lambda c: c.Bcast(x, "0"),
    lambda c: c.Ibcast(x, None), lambda c: c.bcast(1, [0]), lambda c: c.gather(1, "0"),
    lambda c: c.scatter(5), lambda c: c.alltoall(5),
    lambda c: c.Reduce(x, y, 3), lambda c: c.Reduce(x, y, max), lambda c: c.Allreduce(x, y, None),
    lambda c: c.Allreduce(x, y, np.add), lambda c: c.Iallreduce(x, y, 3), lambda c: c.Scan(x, y, 3),
    lambda c: c.Reduce_scatter(x, y, "a"), lambda c: c.Allreduce_init(x, y, 3), lambda c: c.Gatherv(x, 5),
    lambda c: c.Gatherv(x, [whole, [4] * c.size], "0"), lambda c: c.Allgatherv(5, whole),
    lambda c: c.Barrier(1), lambda c: c.Get_rank(1),
]  # fmt: skip
OBJECTS = [
    lambda c: c.Split("a"), lambda c: c.Split(0, None), lambda c: c.Split_type(MPI.COMM_TYPE_SHARED, "a"),
    lambda c: c.Split_type(MPI.COMM_TYPE_SHARED, 0, 5), lambda c: c.Dup(5), lambda c: c.Create([0]),
    lambda c: c.Create_group(5), lambda c: c.Create_cart([c.size], "a"), lambda c: c.Compare(None),
    lambda c: c.Create_intercomm(0, 5, 0), lambda c: c.Create_intercomm("a", c, 0), lambda c: c.Set_name(5),
    lambda c: c.Set_info(5), lambda c: c.Get_attr("a"), lambda c: c.Get_group().Compare(5),
    lambda c: MPI.Group.Union(c.Get_group(), 5), lambda _: MPI.Datatype.Create_struct([1], [0], [5]),
    lambda _: MPI.INT.Pack_size(1, 5), lambda _: MPI.Status().Get_count(5), lambda _: MPI.Free_mem(5),
    lambda c: MPI.Win.Create(x, "a", info, c), lambda c: MPI.Win.Create(x, 1, 5, c),
    lambda c: c.Call_errhandler("a"),
    lambda _: MPI.Win.Allocate(8, 1, info, 5), lambda _: MPI.File.Open(5, "a"),
]  # fmt: skip
OURS = [  # of which mpi4py learns at the first combination, if ever
    lambda c: c.reduce(1, op=3), lambda c: c.allreduce(1, op=None), lambda c: c.scan(1, op="sum"),
    lambda c: c.exscan(1, op=MPI.OP_NULL), lambda _: MPI.Status().Set_cancelled("a"),
    lambda c: c.Create_errhandler(5),
    lambda _: MPI.Grequest.Start(5), lambda _: MPI.Grequest.Start(None, None, "cancel"),
]  # fmt: skip


def refused(call: object, comm: MPI.Comm, place: str) -> None:
    try:
        call(comm)
    except (TypeError, MPI.Exception) as error:
        assert str(error), place
    else:
        raise AssertionError(f"no error: {place}")


def check_usable(comm: MPI.Comm, place: str) -> None:
    total, all_of, n = np.full(1, comm.rank + 1), np.zeros(comm.size, int), comm.size
    comm.Allreduce(MPI.IN_PLACE, total)
    comm.Allgatherv(np.full(1, comm.rank), [all_of, [1] * n])
    assert total == n * (n + 1) // 2 and all_of.tolist() == list(range(n)), place
    assert comm.allgather(comm.rank) == list(range(n)) and comm.bcast(comm.rank, n - 1) == n - 1, place


twin = world.Dup()  # its first collectives are schedules of messages
for comm in (twin, world):
    for name, rows in {
        "messages": MESSAGES,
        "collectives": COLLECTIVES,
        "objects": OBJECTS,
        "ours": OURS,
    }.items():
        for number, call in enumerate(rows):
            if comm.rank == 0 and not (rows is OURS and os.environ.get("MPI_OF")):
                refused(call, comm, f"{name} {number}")
            check_usable(comm, f"after {name} {number}")
print("all is well")
