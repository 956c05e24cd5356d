"""MPI.File on three ranks, against a model of the file in memory."""

import os
import resource
import sys
import threading

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
folder = sys.argv[1]
NAME = os.path.join(folder, "data")
NEW = MPI.MODE_CREATE | MPI.MODE_RDWR | MPI.MODE_DELETE_ON_CLOSE


def error_of(call, *args):
    """The class of the error that a call raises, or 0."""
    try:
        call(*args)
    except MPI.Exception as error:
        return error.Get_error_class()
    return 0


def settle(file):
    """Let all ranks see what all have written."""
    file.Sync()
    comm.Barrier()


def random_type(rng):
    """(a filetype that interleaves with those of the other ranks, the bytes of one item that it covers)."""
    unit = int(rng.integers(1, 40))
    blocks = int(rng.integers(1, 30))
    per_rank = np.sort(rng.permutation(blocks * size)[: blocks * size]).reshape(blocks, size)
    owner = rng.permuted(np.tile(np.arange(size), (blocks, 1)), axis=1)
    mine = per_rank[owner == rank]
    kind = MPI.BYTE.Create_indexed_block(unit, [int(one) * unit for one in mine])
    covered = (mine[:, None] * unit + np.arange(unit)).ravel()
    return kind.Create_resized(0, blocks * size * unit).Commit(), covered, blocks * size * unit


def check_views():
    """Random views, written by all and read by each, against bytes of the whole file."""
    rng = np.random.default_rng(5)  # the same on all ranks
    file = MPI.File.Open(comm, NAME, NEW)
    for turn in range(30):
        file.Set_view(0)
        file.Set_size(0)
        kind, covered, extent = random_type(rng)
        displacement, items = int(rng.integers(0, 50)), int(rng.integers(1, 6))
        start = int(rng.integers(0, covered.size + 1))
        where = (np.arange(items + 2)[:, None] * extent + covered).ravel() + displacement
        where = where[start : start + items * covered.size]
        data = np.random.default_rng([turn, rank]).integers(1, 255, where.size, np.uint8)
        file.Set_view(displacement, MPI.BYTE, kind)
        status = MPI.Status()
        if turn % 3:
            file.Write_at_all(start, data, status)
        else:
            file.Seek(start)
            file.Write(data, status)
            assert file.Get_position() == start + data.size
        assert status.Get_count(MPI.BYTE) == data.size
        assert file.Get_byte_offset(start) == where[0]
        settle(file)
        parts = comm.allgather((where, data))
        model = np.zeros(max(part[0].max() for part in parts) + 1, np.uint8)
        for places, written in parts:
            model[places] = written
        assert (np.fromfile(NAME, np.uint8) == model).all(), turn
        back = np.zeros(data.size + 7, np.uint8)
        file.Read_at(offset=start, buf=back, status=status)
        assert (back[: data.size] == data).all()
        file.Seek(0, MPI.SEEK_END)
        seen = (np.arange(1 + model.size // extent)[:, None] * extent + covered).ravel() + displacement
        assert file.Get_position() == (seen < model.size).sum()
        comm.Barrier()
    file.Close()


def check_pointers():
    """Shared, ordered, split and non-blocking access, and the ends of a file."""
    file = MPI.File.Open(comm, NAME, NEW)
    file.Set_view(0, MPI.INT, MPI.INT)
    file.Write_ordered(np.full(rank + 1, rank, "i"))
    assert file.Get_position_shared() == size * (size + 1) // 2
    comm.Barrier()
    for _ in range(20):
        file.Write_shared(np.full(2, 10 + rank, "i"))
    settle(file)
    whole = np.fromfile(NAME, "i")
    assert whole[:6].tolist() == [0, 1, 1, 2, 2, 2]
    assert sorted(whole[6:].tolist()) == sorted([10 + r for r in range(size) for _ in range(40)])
    assert (whole[6::2] == whole[7::2]).all()
    comm.Barrier()
    file.Seek_shared(0)
    mine = np.zeros(rank + 1, "i")
    file.Read_ordered(mine)
    assert (mine == rank).all()
    comm.Barrier()
    file.Seek(0)
    one, two = np.zeros(3, "i"), np.zeros(3, "i")
    requests = [file.Iread(one), file.Iread(two), file.Iwrite_at(1000 + rank, np.array([rank], "i"))]
    MPI.Request.Waitall(requests)
    assert (*one, *two) == (0, 1, 1, 2, 2, 2)
    file.Write_at_all_begin(2000 + rank, np.array([7], "i"))
    assert error_of(file.Read_all_begin, one) == MPI.ERR_IO
    file.Write_at_all_end(np.array([7], "i"))
    settle(file)
    status = MPI.Status()
    file.Read_at(2000 + size - 1, np.zeros(5, "i"), status)
    assert status.Get_count(MPI.INT) == 1
    file.Set_view(0, MPI.INT, MPI.INT, "external32")
    file.Write_at_all(rank, np.array([rank + 1], "i"))
    settle(file)
    assert np.fromfile(NAME, ">i4", size).tolist() == [1, 2, 3]
    file.Close()


def check_errors():
    """Each error has its class, on the ranks whose error it is; of `Open` on all."""
    nowhere = os.path.join(folder, "none", "data")
    assert error_of(MPI.File.Open, comm, nowhere, MPI.MODE_RDONLY) == MPI.ERR_NO_SUCH_FILE
    assert error_of(MPI.File.Open, comm, NAME, MPI.MODE_RDONLY | MPI.MODE_CREATE) == MPI.ERR_AMODE
    amode = MPI.MODE_RDWR if rank else MPI.MODE_RDONLY
    assert error_of(MPI.File.Open, comm, NAME, amode) == MPI.ERR_NOT_SAME
    only_rank_0 = folder if rank == 0 else nowhere
    assert error_of(MPI.File.Open, comm, only_rank_0, MPI.MODE_RDONLY) in (
        MPI.ERR_BAD_FILE,
        MPI.ERR_NO_SUCH_FILE,
    )
    with open(NAME, "wb"):
        comm.Barrier()
    missing = NAME if rank < 2 else nowhere
    assert error_of(MPI.File.Open, comm, missing, MPI.MODE_RDONLY) == MPI.ERR_NO_SUCH_FILE
    file = MPI.File.Open(comm, NAME, MPI.MODE_RDONLY)
    assert error_of(file.Write, b"x") == MPI.ERR_READ_ONLY
    assert error_of(file.Set_size, 3) == MPI.ERR_READ_ONLY
    assert error_of(file.Seek, -1) == MPI.ERR_ARG
    assert error_of(file.Read_at, -1, bytearray(1)) == MPI.ERR_ARG
    assert error_of(file.Set_view, 0, MPI.INT, MPI.BYTE) == MPI.ERR_ARG
    file.Close()
    assert error_of(file.Close) == MPI.ERR_FILE
    comm.Barrier()
    if rank == 0:
        MPI.File.Delete(NAME)
        assert error_of(MPI.File.Delete, NAME) == MPI.ERR_NO_SUCH_FILE
    comm.Barrier()
    full = MPI.File.Open(MPI.COMM_SELF, "/dev/full", MPI.MODE_WRONLY)
    assert error_of(full.Write, b"x") == MPI.ERR_NO_SPACE
    assert error_of(full.Iwrite(b"x").Wait) == MPI.ERR_NO_SPACE
    full.Close()


def check_a_full_disk():
    """Rank 1 may write 1,000 bytes: alone it fails alone; of exchanged pieces all ranks hear."""
    file = MPI.File.Open(comm, NAME, NEW)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    data = np.full(5000, rank, np.uint8)
    assert error_of(file.Write_at_all, 5000 * rank, data) == (MPI.ERR_NO_SPACE if rank == 1 else 0)
    stripes = MPI.BYTE.Create_vector(1 << 14, 64, 64 * size).Create_resized(0, size << 20).Commit()
    file.Set_view(64 * rank, MPI.BYTE, stripes)
    many = np.zeros(5 << 20, np.uint8)
    assert error_of(file.Write_all, many) == MPI.ERR_NO_SPACE
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    file.Close()


def check_threads():
    """Threads of all ranks append at the shared pointer, then at their rank's: no piece is lost or torn."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    file = MPI.File.Open(comm, NAME, NEW)
    for call, threads in (("Write_shared", 4 * size), ("Write", 4)):
        settle(file)
        file.Set_size(0)
        file.Seek(0)
        first = rank * 4 + 1 if call == "Write_shared" else 1
        if call == "Write" and rank:
            continue  # one rank's pointer is enough
        several = [
            threading.Thread(target=write_often, args=(getattr(file, call), first + k)) for k in range(4)
        ]
        for each in several:
            each.start()
        for each in several:
            each.join()
        if call == "Write_shared":
            settle(file)
        pieces = np.fromfile(NAME, np.uint8).reshape(-1, 8)
        assert (pieces == pieces[:, :1]).all()
        assert np.bincount(pieces[:, 0]).tolist() == [0] + [100] * threads
    sys.setswitchinterval(switch)
    comm.Barrier()
    file.Close()


def write_often(write, number):
    """100 pieces of 8 bytes."""
    for _ in range(100):
        write(np.full(8, number, np.uint8))


def check_the_end():
    """A read of small pieces at the file's end leaves the rest of the buffer as it was."""
    file = MPI.File.Open(comm, NAME, NEW)
    if rank == 0:
        file.Write_at(0, np.ones(10, np.uint8))
    settle(file)
    file.Set_view(0, MPI.BYTE, MPI.BYTE.Create_vector(4, 1, 4).Create_resized(0, 16).Commit())
    for start, expected in ((0, [1, 1, 1, 9, 9, 9, 9, 9]), (100, [9] * 8)):
        found, status = np.full(8, 9, np.uint8), MPI.Status()
        file.Read_at(start, found, status)
        assert found.tolist() == expected
        assert status.Get_count(MPI.BYTE) == expected.count(1)
    file.Close()


check_views()
check_pointers()
check_threads()
check_the_end()
check_errors()
check_a_full_disk()
print("files ok", flush=True)
