"""Datatypes and collectives against NumPy: rows of one table, each on every communicator."""

import functools
import itertools

import numpy as np

from unisono import MPI

world = MPI.COMM_WORLD
rng = np.random.default_rng(7)


def spelled(x: np.ndarray) -> list[object]:
    kind = MPI.Datatype.fromcode(x.dtype.char)
    return [x, [x, kind], (x, x.size, kind), [x, (x.size, 0), x.dtype.char], [x, x.size, 0, kind]]


def contribution(rank: int, n: int, code: str) -> np.ndarray:
    values = np.random.default_rng(100 * rank + n).integers(1, 5, n)
    return values.astype(code)


def check_reductions(comm: MPI.Intracomm) -> None:
    rows = [(MPI.SUM, np.add), (MPI.PROD, np.multiply), (MPI.MAX, np.maximum), (MPI.MIN, np.minimum)]
    for (op, oracle), code, n in itertools.product(rows, "bHilLqfdgFD", (0, 1, 5)):
        if code in "FD" and op in (MPI.MAX, MPI.MIN):
            continue
        parts = [contribution(rank, n, code) for rank in range(comm.size)]
        expected = functools.reduce(oracle, parts)
        for sendbuf in spelled(parts[comm.rank])[:2]:
            out = np.zeros(n, code)
            comm.Allreduce(sendbuf, out, op)
            np.testing.assert_array_equal(out, expected)
            request = comm.Iallreduce(sendbuf, again := np.zeros(n, code), op)
            request.Wait()
            np.testing.assert_array_equal(again, expected)
        root = n % comm.size
        out = np.zeros(n, code)
        comm.Reduce(parts[comm.rank], out if comm.rank == root else None, op, root)
        if comm.rank == root:
            np.testing.assert_array_equal(out, expected)
        comm.Scan(parts[comm.rank], out, op)
        np.testing.assert_array_equal(out, functools.reduce(oracle, parts[: comm.rank + 1]))


def check_order(comm: MPI.Intracomm) -> None:
    """An operation that does not commute: products of matrices, in the order of ranks."""

    def multiply(inbuf: MPI.buffer, inoutbuf: MPI.buffer, kind: MPI.Datatype) -> None:
        left, right = (np.frombuffer(one, "l").reshape(-1, 2, 2) for one in (inbuf, inoutbuf))
        right[:] = left @ right

    op = MPI.Op.Create(multiply, commute=False)
    parts = [np.array([[1, rank + 1], [rank, 1]]) for rank in range(comm.size)]
    for root in range(comm.size):
        out = np.zeros((2, 2), "l")
        comm.Reduce(parts[comm.rank], out, op, root)
        if comm.rank == root:
            np.testing.assert_array_equal(out, functools.reduce(np.matmul, parts))
    assert comm.allreduce(str(comm.rank)) == "".join(map(str, range(comm.size)))
    assert comm.exscan(str(comm.rank)) == ("".join(map(str, range(comm.rank))) or None)
    op.Free()


def check_movements(comm: MPI.Intracomm) -> None:
    counts = [rank + 1 for rank in range(comm.size)]
    starts = [sum(counts[:rank]) for rank in range(comm.size)]
    mine = np.full(counts[comm.rank], comm.rank, "i")
    everything = np.repeat(np.arange(comm.size, dtype="i"), counts)
    out = np.full(sum(counts), -1, "i")
    comm.Allgatherv(mine, [out, counts, starts, MPI.INT])
    np.testing.assert_array_equal(out, everything)
    for root in range(comm.size):
        out[:] = -1
        comm.Gatherv(mine, [out, counts], root)
        np.testing.assert_array_equal(out, everything if comm.rank == root else -1)
        part = np.empty(counts[comm.rank], "i")
        comm.Scatterv([everything, counts], part, root)
        np.testing.assert_array_equal(part, mine)
    apart = MPI.INT.Create_resized(0, 8).Commit()  # every other place; rank 0 gives nothing
    fewer, places = [rank * 2 for rank in range(comm.size)], [rank * rank for rank in range(comm.size)]
    spread, own = np.full(2 * comm.size**2, -1, "i"), np.full(fewer[comm.rank], comm.rank, "i")
    expected = spread.copy()
    for rank, (place, n) in enumerate(zip(places, fewer, strict=True)):
        expected[2 * place : 2 * (place + n) : 2] = rank
    comm.Allgatherv(own, [spread, fewer, places, apart])
    np.testing.assert_array_equal(spread, expected)
    part = np.empty(fewer[comm.rank], "i")
    comm.Scatterv([spread, fewer, places, apart] if comm.rank == 0 else None, part)
    np.testing.assert_array_equal(part, own)
    comm.Gatherv(part, [spread := np.full_like(expected, -1), fewer, places, apart])
    np.testing.assert_array_equal(spread, expected if comm.rank == 0 else -1)
    sent = np.repeat(np.arange(comm.size) + 100 * comm.rank, counts)  # rank + 1 numbers to each rank
    got = np.empty(comm.size * counts[comm.rank], int)
    comm.Alltoallv([sent, counts], [got, counts[comm.rank]])
    np.testing.assert_array_equal(got, np.repeat(100 * np.arange(comm.size) + comm.rank, comm.rank + 1))
    apart.Free()
    table = np.arange(comm.size**2).reshape(comm.size, comm.size)
    row = table[comm.rank].copy()
    comm.Alltoall(MPI.IN_PLACE, row)
    np.testing.assert_array_equal(row, table[:, comm.rank])
    requests = [comm.Ibcast(one := np.full(3, comm.rank), root) and (one, root) for root in range(comm.size)]
    assert len(requests) == comm.size
    comm.Barrier()


def check_datatypes(comm: MPI.Intracomm) -> None:
    """Each type sends a part of an array; the oracle is an index of NumPy."""
    n = 6
    rows = [
        (MPI.INT.Create_vector(n, 1, n), np.s_[:, 0]),
        (MPI.INT.Create_subarray([n, n], [2, 3], [1, 2]), np.s_[1:3, 2:5]),
        (MPI.INT.Create_subarray([n, n], [2, 3], [1, 2], MPI.ORDER_F), None),
        (MPI.INT.Create_indexed([2, 1], [4, 0]), (np.array([0, 0, 0]), np.array([4, 5, 0]))),
        (MPI.INT.Create_vector(3, 2, 4).Create_resized(0, 4), None),
        (MPI.Datatype.Create_struct([1, 2], [4, 16], [MPI.INT, MPI.SHORT]), None),
    ]
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for number, (kind, index) in enumerate(rows):
        kind.Commit()
        source, target = np.arange(n * n, dtype="i").reshape(n, n), np.full((n, n), -1, "i")
        comm.Sendrecv([source, 1, kind], ahead, number, [target, 1, kind], behind, number)
        packed = np.zeros(kind.size, np.uint8)
        kind.Pack(source, packed, 0, comm) if kind.extent == source.nbytes else None
        places = np.zeros(n * n, np.int8)
        layout = kind._state.layout
        places_of_bytes = np.unique(layout.offsets // 4)
        places[places_of_bytes] = 1
        whole = places.reshape(n, n).astype(bool)
        if index is not None:
            expected = np.full((n, n), -1, "i")
            expected[index] = source[index]
            np.testing.assert_array_equal(target, expected)
        np.testing.assert_array_equal(target[~whole], -1)
        kind.Free()


def check_items_with_gaps(comm: MPI.Intracomm) -> None:
    """A function of the program, and MAXLOC, see items as they lie in memory."""
    pair = np.dtype([("value", "f8"), ("index", "i4")], align=True)
    for n in (1, 3, 4):
        values = (np.arange(n)[:, None] * 7 + np.arange(comm.size) * 5) % 11.0
        sent, got = np.zeros(n, pair), np.zeros(n, pair)
        sent["value"], sent["index"] = values[:, comm.rank], comm.rank
        comm.Allreduce([sent, n, MPI.DOUBLE_INT], [got, n, MPI.DOUBLE_INT], MPI.MAXLOC)
        assert got["value"].tolist() == values.max(1).tolist()
        assert got["index"].tolist() == values.argmax(1).tolist()

        def add(a: memoryview, b: memoryview, _kind: MPI.Datatype) -> None:
            np.frombuffer(b, pair)["value"] += np.frombuffer(a, pair)["value"]

        operation = MPI.Op.Create(add, commute=True)
        comm.Allreduce([sent, n, MPI.DOUBLE_INT], [got, n, MPI.DOUBLE_INT], operation)
        assert got["value"].tolist() == values.sum(1).tolist()
        operation.Free()


def check_external32() -> None:
    for kind, ends in ((MPI.SHORT, []), (MPI.LONG_DOUBLE, []), (MPI.COMPLEX, [4]), (MPI.DOUBLE_INT, [8])):
        raw, packed = rng.integers(0, 256, kind.extent, np.uint8), np.zeros(kind.size, np.uint8)
        kind.Pack_external("external32", raw, packed, 0)
        assert (packed == np.hstack([part[::-1] for part in np.split(raw[: kind.size], ends)])).all()
        kind.Unpack_external("external32", packed, 0, back := np.zeros_like(raw))
        assert (back[: kind.size] == raw[: kind.size]).all()


def check_mistakes(comm: MPI.Intracomm) -> None:
    """A wrong argument raises, and the communicator goes on."""
    x = np.zeros(4)
    rows = [
        (lambda: comm.Send(x, comm.size), MPI.Exception, MPI.ERR_RANK),
        (lambda: comm.Send(x, 0, -5), MPI.Exception, MPI.ERR_TAG),
        (lambda: comm.Bcast(x, comm.size), MPI.Exception, MPI.ERR_ROOT),
        (lambda: comm.Send([x, 5, MPI.DOUBLE], comm.rank), ValueError, None),
        (lambda: comm.Send([x, MPI.DATATYPE_NULL], comm.rank), ValueError, None),
        (lambda: comm.Send(object(), comm.rank), TypeError, None),
        (lambda: comm.Send("dtype", 0), TypeError, None),
        (lambda: comm.Allreduce(x, np.zeros(3)), ValueError, None),
        (lambda: comm.Allreduce(x, np.zeros(4), MPI.BAND), MPI.Exception, MPI.ERR_OP),
        (lambda: comm.Recv(b"abc", comm.rank), BufferError, None),
        (lambda: comm.Recv(x, None), TypeError, None),
        (lambda: comm.Irecv(x, None), TypeError, None),
        (lambda: comm.recv(source=None), TypeError, None),
        (lambda: comm.irecv(source=None), TypeError, None),
        (lambda: comm.scatter([1] * (comm.size + 1), comm.rank), ValueError, None),
        (lambda: MPI.COMM_NULL.Barrier(), MPI.Exception, MPI.ERR_COMM),
        # A float counts as a rank, a tag or a root, and nowhere else: mpi4py refuses these, too.
        (lambda: comm.Send([x, 3.1, MPI.DOUBLE], comm.rank), TypeError, None),
        (lambda: comm.Alltoallv([x, np.array([3.1] * comm.size)], [x, 0]), TypeError, None),
        (lambda: comm.Get_group().Incl([0.0]), TypeError, None),
        (lambda: comm.Create_graph([1.0], [0]), TypeError, None),
        (lambda: comm.Create_cart([comm.size], ["periodic"]), TypeError, None),
        (lambda: MPI.INT.Create_indexed([1.0], [0]), TypeError, None),
    ]
    assert comm.bcast(comm.rank, 0.0) == 0
    assert comm.sendrecv(7, float(comm.rank), 3.0, source=np.float64(comm.rank), recvtag=3.0) == 7
    assert comm.Get_group().Range_incl([(0.0, comm.size / 1, 2.0 * comm.size)]).size == 1
    line = comm.Create_cart([comm.size], [True])
    assert line.Get_coords(float(comm.rank)) == [comm.rank]
    assert line.Shift(0.0, 1.0)[1] == (comm.rank + 1) % comm.size
    for call, error, code in rows:
        try:
            call()
        except error as found:
            assert code is None or found.Get_error_class() == code, found
        else:
            raise AssertionError(f"no error in row {call.__code__.co_firstlineno}")
        comm.Barrier()
    if comm.size > 1 and comm.rank < 2:
        if comm.rank == 0:
            comm.Send(np.arange(10.0), 1)
            comm.Send(np.arange(4.0), 1)
        else:
            try:
                comm.Recv(x, 0)
            except MPI.Exception as found:
                assert found.Get_error_class() == MPI.ERR_TRUNCATE
            comm.Recv(x, 0)
            np.testing.assert_array_equal(x, np.arange(4.0))
    comm.Barrier()


def check_contexts() -> None:
    """Messages of one communicator are no messages of another; requests move while others wait."""
    twin = world.Dup()
    half = world.Split(world.rank % 2, -world.rank)
    assert half.rank == sum(r % 2 == world.rank % 2 for r in range(world.rank + 1, world.size))
    ahead, behind = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sends = [comm.isend(name, ahead, 3) for name, comm in (("twin", twin), ("world", world))]
    status = MPI.Status()
    assert world.recv(status=status) == "world"
    assert (status.source, status.tag) == (behind, 3)
    assert twin.recv() == "twin"
    MPI.Request.waitall(sends)
    barrier = twin.Ibarrier()  # rank 0 gets on only because the others move it while they wait elsewhere
    if world.rank == 0:
        barrier.Wait()
        for rank in range(1, world.size):
            world.send("on", rank)
    else:
        assert world.recv(source=0) == "on"
        barrier.Wait()
    members = world.Get_group().Incl(range(0, world.size, 2))
    if world.rank % 2 == 0:
        few = world.Create_group(members)
        assert few.allgather(world.rank) == list(range(0, world.size, 2))
        few.Free()
    for _ in range(12):  # past the calls before a communicator gets a group of the engine
        assert half.allreduce(1) == half.size
        half.Barrier()
    if world.size > 1:
        others = [rank for rank in reversed(range(world.size)) if (rank + world.rank) % 2]
        inter = half.Create_intercomm(0, world, others[0], 9)
        assert inter.allgather(world.rank) == others
        merged = inter.Merge(high=bool(world.rank % 2))
        assert merged.size == world.size
        for comm in (inter, merged):
            comm.Free()
    for comm in (twin, half):
        comm.Free()


def check_sizes_that_differ() -> None:
    """Counts that differ between the ranks of a collective are an error, never wrong numbers."""
    twin = world.Dup()  # its first collectives are schedules of messages
    for sent, expected in ((2, 5), (5, 2)):
        buf = np.ones(sent if world.rank == 0 else expected)
        try:
            twin.Bcast(buf, 0)
        except MPI.Exception as found:
            assert found.Get_error_class() == MPI.ERR_TRUNCATE and world.rank > 0
        else:
            assert world.rank == 0
    world.Barrier()


def check_synchronous_send() -> None:
    """A synchronous send ends when its receive is posted, not before."""
    if world.size == 1:
        request = world.Issend(np.ones(2), 0)
        assert not request.Test()
        world.Recv(np.zeros(2), 0)
        request.Wait()
    elif world.rank == 0:
        request = world.Issend(np.ones(2), 1)
        world.Send(b"posted", 1, 1)
        assert not request.Test()
        world.Send(b"now", 1, 2)
        request.Wait()
    elif world.rank == 1:
        world.Recv(bytearray(6), 0, 1)
        world.Recv(bytearray(3), 0, 2)
        assert world.Iprobe(0, 0)
        world.Recv(np.zeros(2), 0, 0)
    world.Barrier()


def check_a_message_of_parts() -> None:
    """It is sent when all its parts are ready."""
    sent, got = np.arange(6.0) + world.rank, np.zeros(6)
    ahead, behind = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    send, receive = world.Psend_init(sent, 3, ahead, 5), world.Precv_init(got, 3, behind, 5)
    MPI.Prequest.Startall([send, receive])
    send.Pready_list([2, 0])
    send.Pready(1)
    MPI.Request.Waitall([send, receive])
    assert receive.Parrived(0)
    assert got.tolist() == (np.arange(6.0) + behind).tolist()
    send.Free()
    receive.Free()


def check_one_buffer_of_many_receives() -> None:
    """As benchmarks of bandwidth do: what the buffer then has is one of the messages."""
    ahead, behind = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    for nbytes in (1, 5000, 300_000):
        sent, got = np.full(nbytes, world.rank, np.uint8), bytearray(nbytes)
        receives = [world.Irecv([got, nbytes, MPI.BYTE], behind, 9) for _ in range(20)]
        sends = [world.Isend([sent, nbytes, MPI.BYTE], ahead, 9) for _ in range(20)]
        MPI.Request.Waitall(sends + receives)
        assert got == bytes([behind]) * nbytes


for comm in (world, MPI.COMM_SELF):
    check_reductions(comm)
    check_order(comm)
    check_movements(comm)
    check_datatypes(comm)
    check_items_with_gaps(comm)
    check_mistakes(comm)
check_external32()
check_contexts()
if world.size <= 2:
    check_sizes_that_differ()
check_synchronous_send()
check_one_buffer_of_many_receives()
check_a_message_of_parts()
print("all is well")
