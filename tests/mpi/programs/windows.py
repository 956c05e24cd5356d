"""`MPI.Win` as a program for mpi4py uses it; it also runs with mpi4py itself (MPI_OF=mpi4py). Prints "ok"."""

import importlib
import os

import numpy as np

MPI = importlib.import_module("mpi4py.MPI" if os.environ.get("MPI_OF") == "mpi4py" else "unisono.mpi")
comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
right, left = (rank + 1) % size, (rank - 1) % size


def derived_types() -> None:
    """A column of a matrix there, a row here; elements of a struct of pairs."""
    memory = np.zeros((4, 3))
    win = MPI.Win.Create(memory, memory.itemsize, comm=comm)
    column = MPI.DOUBLE.Create_vector(4, 1, 3)
    column.Commit()
    win.Fence()
    win.Put([np.arange(4.0) + rank, MPI.DOUBLE], right, (1, 1, column))
    win.Fence()
    assert memory[:, 1].tolist() == [left, left + 1, left + 2, left + 3], memory
    assert not memory[:, 0].any()
    back = np.empty(4)
    win.Get([back, MPI.DOUBLE], right, (1, 1, column))
    win.Fence()
    assert back.tolist() == [rank, rank + 1, rank + 2, rank + 3]
    win.Accumulate([np.ones(4), MPI.DOUBLE], right, (1, 1, column))
    win.Fence()
    assert memory[:, 1].tolist() == [left + 1, left + 2, left + 3, left + 4]
    win.Free()
    column.Free()


def operations() -> None:
    """Those that the engine knows, and those that it does not."""
    rows = (
        (MPI.SUM, "u8", 3, 4, 7), (MPI.MAX, "u8", 3, 2**63 + 1, 2**63 + 1), (MPI.MIN, "u2", 3, 4, 3),
        (MPI.PROD, "i1", 3, 4, 12), (MPI.BXOR, "u4", 3, 5, 6), (MPI.LAND, "i4", 3, 0, 0),
        (MPI.LXOR, "i4", 3, 0, 1), (MPI.REPLACE, "f4", 3, 4, 4), (MPI.NO_OP, "f4", 3, 4, 3),
        (MPI.SUM, "c16", 3, 4j, 3 + 4j), (MPI.SUM, "g", 3, 4, 7), (MPI.BOR, "i8", 1, 6, 7),
    )  # fmt: skip
    win = MPI.Win.Allocate(16, 1, comm=comm)
    np.frombuffer(win, np.uint8)[:] = 7  # a window is memory, as in mpi4py's tutorial
    assert bytes(win.tomemory()) == bytes([7]) * 16
    for op, code, old, new, expected in rows:
        dtype = np.dtype(code)
        cell, former = np.array([old], dtype), np.zeros(1, dtype)
        win.Lock(rank)
        win.Put(cell, rank)
        win.Unlock(rank)
        comm.Barrier()
        win.Lock(right, MPI.LOCK_SHARED)
        win.Get_accumulate(np.array([new], dtype), former, right, op=op)
        win.Unlock(right)
        comm.Barrier()
        win.Lock(right, MPI.LOCK_SHARED)
        win.Get(cell, right)
        win.Unlock(right)
        assert (former[0], cell[0]) == (old, expected), (op, code, former, cell)
        comm.Barrier()
    pair = np.zeros(1, np.dtype([("value", "f8"), ("index", "i4")], align=True))
    win.Fence()
    win.Put([pair, MPI.DOUBLE_INT], right)
    win.Fence()
    for target in range(size):
        mine = np.array([(float(rank), rank)], pair.dtype)
        win.Accumulate([mine, MPI.DOUBLE_INT], target, op=MPI.MAXLOC)
    win.Fence()
    win.Get([pair, MPI.DOUBLE_INT], right)
    win.Fence()
    assert (pair["value"][0], pair["index"][0]) == (size - 1, size - 1), pair
    win.Free()


def counters() -> None:
    """Fetch_and_op and Compare_and_swap by all ranks at one."""
    win = MPI.Win.Allocate(16 if rank == 0 else 0, 8, comm=comm)
    win.Lock_all()
    one, ticket = np.ones(1, "i8"), np.zeros(1, "i8")
    taken = []
    for _ in range(50):
        win.Fetch_and_op(one, ticket, 0)
        win.Flush(0)
        taken.append(int(ticket[0]))
    zero, mine, found = np.zeros(1, "i8"), np.full(1, rank + 1, "i8"), np.zeros(1, "i8")
    win.Compare_and_swap(mine, zero, found, 0, 1)
    win.Flush(0)
    win.Unlock_all()
    every, winners = comm.allgather(taken), comm.allgather(int(found[0]))
    assert sorted(ticket for some in every for ticket in some) == list(range(50 * size))
    assert winners.count(0) == 1
    win.Free()


def shared() -> None:
    """One piece of memory, in the order of ranks; it outlives its communicator."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    win = MPI.Win.Allocate_shared(8 * (node.rank + 1), 8, comm=node)
    own = np.frombuffer(win.tomemory(), "i8")
    assert own.size == node.rank + 1
    own[:] = node.rank
    win.Fence()
    first, unit = win.Shared_query(0)
    assert unit == 8
    whole = np.ndarray(node.size * (node.size + 1) // 2, "i8", MPI.buffer.fromaddress(
        MPI.Get_address(first), 4 * node.size * (node.size + 1)))  # fmt: skip
    assert whole.tolist() == [r for r in range(node.size) for _ in range(r + 1)], whole
    node.Free()
    win.Fence()
    win.Accumulate(np.array([10], "i8"), win.group_size - 1, win.group_size - 1)
    win.Fence()
    assert win.group_rank < win.group_size - 1 or own[-1] == win.group_rank + 10 * win.group_size, own
    win.Free()


def dynamic() -> None:
    """Memory that is attached later; what is not attached is an error of one call."""
    win = MPI.Win.Create_dynamic(comm=comm)
    memory = np.zeros(3, "i4")
    win.Attach(memory)
    places = comm.allgather(MPI.Get_address(memory))
    win.Lock(right)
    win.Put(np.full(2, rank, "i4"), right, places[right] + 4)
    win.Unlock(right)
    comm.Barrier()
    assert memory.tolist() == [0, left, left]
    if "MPI_OF" not in os.environ:  # MPICH ends the job
        try:
            win.Put(np.ones(2, "i4"), right, places[right] + 8)
            raise AssertionError("it was put outside")
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_RMA_RANGE
    comm.Barrier()
    win.Detach(memory)
    win.Free()


def part_of_the_ranks() -> None:
    """A window of half of the ranks, in another order; posts and starts."""
    some = comm.Split(rank % 2, -rank)
    memory = np.zeros(1)
    win = MPI.Win.Create(memory, 8, comm=some)
    others = win.Get_group().Excl([some.rank])
    win.Post(others)
    win.Start(others)
    for each in range(some.size):
        if each != some.rank:
            win.Accumulate(np.ones(1), each)
    win.Complete()
    win.Wait()
    assert memory[0] == some.size - 1
    win.Free()
    some.Free()


for check in (derived_types, operations, counters, shared, dynamic, part_of_the_ranks):
    check()
    comm.Barrier()
print("ok", flush=True)
