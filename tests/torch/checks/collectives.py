"""Every collective of torch.distributed against what it should give."""

import itertools
import warnings
from functools import reduce as fold

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from unisono.torch_internals.version_names import all_gather_single, reduce_scatter_single

NUMBERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FOLDS = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}
BITS = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or, ReduceOp.BXOR: torch.bitwise_xor}


def of(rank: int, dtype=torch.float32, shape=(5,)) -> torch.Tensor:
    """What `rank` brings: small numbers, different everywhere, exact in every dtype."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 2 * rank) % 4 + 1).to(dtype).reshape(shape)


def check_all_reduce_numbers(rank, size):
    for dtype, (op, two) in itertools.product(NUMBERS + FLOATS, FOLDS.items()):
        x = of(rank, dtype)
        dist.all_reduce(x, op)
        assert torch.equal(x, fold(two, [of(r, dtype) for r in range(size)])), (dtype, op)


def check_all_reduce_bits(rank, size):
    for dtype, (op, two) in itertools.product([*NUMBERS, torch.bool], BITS.items()):
        bring = [of(r, dtype) if dtype != torch.bool else of(r) > 2 for r in range(size)]
        x = bring[rank].clone()
        dist.all_reduce(x, op)
        assert torch.equal(x, fold(two, bring)), (dtype, op)


def check_tensors_that_are_read_where_they_are(rank, size):
    from unisono.torch import empty

    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in ((3, 5), (100, 1000), (0, 4)):
            x = empty(shape, dtype=dtype)
            assert (x.shape, x.dtype, x.is_contiguous()) == (torch.Size(shape), dtype, True)
            x.copy_(of(rank, dtype, shape))
            dist.all_reduce(x)
            assert torch.equal(x, fold(torch.add, [of(r, dtype, shape) for r in range(size)])), (dtype, shape)
    assert empty(2, 3).dtype == torch.get_default_dtype()


def check_all_reduce_average(rank, size):
    for dtype in FLOATS:
        x = of(rank, dtype)
        dist.all_reduce(x, ReduceOp.AVG)
        want = sum(of(r, torch.float64) for r in range(size)) / size
        assert torch.allclose(x.double(), want, rtol=1e-2), dtype


def check_average_of_booleans_is_refused(rank, size):
    with pytest.raises(TypeError, match="AVG"):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), ReduceOp.AVG)


def check_all_reduce_premultiplied(rank, size):
    for factor in (0.5, torch.tensor([0.5])):
        x = of(rank)
        dist.all_reduce(x, dist._make_nccl_premul_sum(factor))
        assert torch.allclose(x, sum(of(r) for r in range(size)) / 2)


def check_all_reduce_complex(rank, size):
    for dtype in (torch.complex64, torch.complex128):
        x = of(rank, dtype) * (1 + 2j)
        dist.all_reduce(x)
        assert torch.equal(x, sum(of(r, dtype) * (1 + 2j) for r in range(size)))
        work = dist.group.WORLD.allreduce([y := of(rank, dtype) * 1j])  # not viewed as real on the way
        work.wait()
        assert torch.equal(y, sum(of(r, dtype) * 1j for r in range(size)))
    with pytest.raises(ValueError, match="complex"):
        dist.all_reduce(x, ReduceOp.MAX)


def check_all_reduce_shapes(rank, size):
    for shape in [(), (0,), (1,), (3, 4, 5), (1_000_003,)]:
        x = of(rank, shape=shape)
        dist.all_reduce(x)
        assert torch.equal(x, sum(of(r, shape=shape) for r in range(size))), shape


def check_not_contiguous(rank, size):
    whole = of(rank, shape=(4, 6)).clone()
    views = (lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:3, 2:5], lambda x: x.to(memory_format=None))
    for view in views[:3]:
        x, bring = whole.clone(), [view(of(r, shape=(4, 6))) for r in range(size)]
        dist.all_reduce(view(x))
        want = whole.clone()
        view(want).copy_(sum(bring))
        assert torch.equal(x, want)
        work = dist.broadcast(view(x), 0, async_op=True)
        work.wait()
        outputs = [view(torch.zeros(4, 6)) for _ in range(size)]
        dist.all_gather(outputs, view(whole))
        assert all(torch.equal(out, each) for out, each in zip(outputs, bring, strict=True))
    image = of(rank, shape=(2, 3, 4, 5)).to(memory_format=torch.channels_last)
    dist.all_reduce(image)
    assert torch.equal(image, sum(of(r, shape=(2, 3, 4, 5)) for r in range(size)))


def check_broadcast(rank, size):
    for src, dtype in itertools.product(range(size), [*NUMBERS, *FLOATS, torch.bool, torch.complex64]):
        x = of(rank, dtype)
        dist.broadcast(x, src)
        assert torch.equal(x, of(src, dtype))


def check_dtypes_the_engine_does_not_reduce_still_move(rank, size):
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex32):
        x = torch.full((4,), rank + 1, dtype=torch.uint8).repeat(4).view(dtype)
        dist.broadcast(x, 1)
        assert torch.equal(x.view(torch.uint8), torch.full((16,), 2, dtype=torch.uint8))
    scalar = torch.tensor(rank, dtype=torch.uint16)
    dist.broadcast(scalar, 1)
    assert scalar.item() == 1


def check_reduce_leaves_others_alone(rank, size):
    for dst in range(size):
        x = of(rank)
        dist.reduce(x, dst)
        assert torch.equal(x, sum(of(r) for r in range(size)) if rank == dst else of(rank))


def check_all_gather(rank, size):
    for dtype in [*NUMBERS, *FLOATS, torch.bool, torch.complex64]:
        out = [torch.zeros(5, dtype=dtype) for _ in range(size)]
        dist.all_gather(out, of(rank, dtype))
        assert all(torch.equal(out[r], of(r, dtype)) for r in range(size))


def check_all_gather_single(rank, size):
    for shape in [(size * 2, 3), (size, 2, 3)]:
        out = torch.zeros(shape)
        all_gather_single(out, of(rank, shape=(2, 3)))
        assert torch.equal(out.reshape(size, 2, 3), torch.stack([of(r, shape=(2, 3)) for r in range(size)]))
    with pytest.raises(ValueError, match="equal blocks"):
        all_gather_single(torch.zeros(size * 2 + 1), torch.zeros(2))


def check_gather(rank, size):
    for dst in range(size):
        out = [torch.zeros(5) for _ in range(size)] if rank == dst else None
        dist.gather(of(rank), out, dst=dst)
        if out is not None:
            assert all(torch.equal(out[r], of(r)) for r in range(size))


def check_scatter(rank, size):
    for src in range(size):
        out = torch.zeros(5)
        dist.scatter(out, [of(r + src) for r in range(size)] if rank == src else None, src=src)
        assert torch.equal(out, of(rank + src))


def check_reduce_scatter(rank, size):
    # SPEC, C7: inputs[j] = ((rank + 1) * [1, 2]) ** (j + 1)
    inputs = [(torch.tensor([1.0, 2.0]) * (rank + 1)) ** (j + 1) for j in range(size)]
    out = torch.zeros(2)
    dist.reduce_scatter(out, inputs)
    assert torch.equal(out, sum((torch.tensor([1.0, 2.0]) * (r + 1)) ** (rank + 1) for r in range(size)))
    with pytest.raises(ValueError):
        dist.reduce_scatter(out, inputs[:-1])


def check_reduce_scatter_of_several_sizes(rank, size):
    for asynchronous in (False, True):
        for op, want in ((ReduceOp.SUM, sum(range(1, size + 1))), (ReduceOp.MAX, size), (ReduceOp.AVG, None)):
            inputs = [torch.full((each + 1,), rank + 1.0) for each in range(size)]
            out = torch.zeros(rank + 1)
            work = dist.reduce_scatter(out, inputs, op, async_op=asynchronous)
            if asynchronous:
                work.wait()
            assert out.tolist() == [(size + 1) / 2 if want is None else want] * (rank + 1)
            assert all((x == rank + 1).all() for x in inputs)
    with pytest.raises(ValueError, match="reduce_scatter"):
        dist.reduce_scatter(torch.zeros(size + 9), [torch.ones(each + 1) for each in range(size)])


def check_reduce_scatter_single(rank, size):
    for shape in [(size * 4,), (size, 4)]:
        out = torch.zeros(4)
        reduce_scatter_single(out, of(rank, shape=shape), ReduceOp.MAX)
        want = fold(torch.maximum, [of(r, shape=(size, 4)) for r in range(size)])[rank]
        assert torch.equal(out, want)


def check_all_to_all(rank, size):
    out = [torch.zeros(3) for _ in range(size)]
    dist.all_to_all(out, [of(10 * rank + r, shape=(3,)) for r in range(size)])
    assert all(torch.equal(out[r], of(10 * r + rank, shape=(3,))) for r in range(size))


def check_all_to_all_single(rank, size):
    out = torch.zeros(size * 2, 3)
    dist.all_to_all_single(out, of(rank, shape=(size * 2, 3)))
    assert torch.equal(
        out, torch.cat([of(r, shape=(size * 2, 3))[2 * rank : 2 * rank + 2] for r in range(size)])
    )
    with pytest.raises(ValueError, match="split"):
        dist.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1))


def check_all_to_all_single_uneven(rank, size):
    # rank r gives r + i + 1 rows to rank i
    given = [rank + i + 1 for i in range(size)]
    taken = [r + rank + 1 for r in range(size)]
    x = torch.cat([torch.full((n, 2), 10.0 * rank + i) for i, n in enumerate(given)])
    out = torch.zeros(sum(taken), 2)
    dist.all_to_all_single(out, x, taken, given)
    assert torch.equal(out, torch.cat([torch.full((n, 2), 10.0 * r + rank) for r, n in enumerate(taken)]))


def check_barrier(rank, size):
    dist.barrier()
    dist.barrier(device_ids=[0])
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.monitored_barrier()


def check_send_recv(rank, size):
    x = torch.zeros(5)
    if rank == 0:
        for r in range(1, size):
            dist.send(of(r), r, tag=r)
            assert dist.recv(x, r) == r
            assert torch.equal(x, of(r + 7))
    else:
        assert dist.recv(x, 0, tag=rank) == 0
        assert torch.equal(x, of(rank))
        dist.send(of(rank + 7), 0)


def check_both_send_first(rank, size):
    out = torch.zeros(300_000)
    right, left = (rank + 1) % size, (rank - 1) % size
    sent = dist.isend(of(rank, shape=out.shape), right)
    received = dist.irecv(out, left)
    received.wait()
    sent.wait()
    assert torch.equal(out, of(left, shape=out.shape))


def check_memory_of_a_receive_that_nobody_waits_for_goes_to_no_other_tensor(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for tag in range(100):
        dist.send(of(rank), right, tag=tag)
        dist.barrier()
        dist.irecv(torch.zeros(5), left, tag=tag)  # it has come, and the Work is dropped
        dist.send(torch.ones(5), right, tag=tag)
        dist.barrier()
        dist.irecv(torch.ones(5), left, tag=tag)
    x = torch.zeros(5)
    received = dist.irecv(x, left, tag=tag + 1)
    dist.send(of(rank), right, tag=tag + 1)
    received.wait()
    assert torch.equal(x, of(left))


def check_recv_from_anybody(rank, size):
    if rank:
        dist.send(of(rank), 0)
        return
    seen = set()
    for _ in range(size - 1):
        x = torch.zeros(5)
        source = dist.recv(x)
        assert torch.equal(x, of(source))
        seen.add(source)
    assert seen == set(range(1, size))


def check_batch_isend_irecv(rank, size):
    out = torch.zeros(5)
    right, left = (rank + 1) % size, (rank - 1) % size
    batch = [dist.P2POp(dist.irecv, out, left), dist.P2POp(dist.isend, of(rank), right)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert torch.equal(out, of(left))


def check_coalescing(rank, size):
    group = dist.group.WORLD
    for async_ops in (False, True):
        xs = [of(rank), of(rank + 1, shape=(3,))]
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        assert torch.equal(xs[0], sum(of(r) for r in range(size)))
        assert torch.equal(xs[1], sum(of(r + 1, shape=(3,)) for r in range(size)))
        outs = [torch.zeros(size, 5), torch.zeros(size * 3)]
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            all_gather_single(outs[0], of(rank))
            all_gather_single(outs[1], of(rank, shape=(3,)))
        manager.wait()
        assert torch.equal(outs[0], torch.stack([of(r) for r in range(size)]))
        outs = [torch.zeros(2), torch.zeros(1)]
        with dist._coalescing_manager(group, async_ops=async_ops) as manager:
            reduce_scatter_single(outs[0], of(rank, shape=(size, 2)))
            reduce_scatter_single(outs[1], of(rank, shape=(size,)))
        manager.wait()
        assert torch.equal(outs[0], sum(of(r, shape=(size, 2)) for r in range(size))[rank])


def check_coalescing_on_a_device(rank, size):
    xs = [of(rank), of(rank)]
    with dist._coalescing_manager(dist.group.WORLD, torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(xs[0], 0, async_op=True)
        dist.broadcast(xs[1], 1, async_op=True)
    manager.wait()
    assert torch.equal(xs[0], of(0))
    assert torch.equal(xs[1], of(1))


def check_deprecated_names(rank, size):
    group = dist.group.WORLD
    xs = [of(rank), of(rank, shape=(3,))]
    warnings.simplefilter("ignore", FutureWarning)  # which versions of PyTorch warn of which names differs
    dist.all_reduce_coalesced(xs)
    assert torch.equal(xs[1], sum(of(r, shape=(3,)) for r in range(size)))
    lists = [[torch.zeros(5), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [of(rank), of(rank, shape=(3,))])
    assert all(torch.equal(lists[r][1], of(r, shape=(3,))) for r in range(size))
    out = torch.zeros(size, 5)
    dist.all_gather_into_tensor(out, of(rank))
    dist.reduce_scatter_tensor(torch.zeros(2), of(rank, shape=(size, 2)))
    group._allgather_base(out, of(rank)).wait()
    group.allgather_into_tensor_coalesced([out], [of(rank)]).wait()
    group.reduce_scatter_tensor_coalesced([torch.zeros(2)], [of(rank, shape=(size, 2))]).wait()
    group.alltoall_base(torch.zeros(size), torch.zeros(size), [], []).wait()
    assert torch.equal(out[1], of(1))


def check_methods_called_directly(rank, size):
    group = dist.group.WORLD
    x = of(rank)
    group.allreduce(x, ReduceOp.MAX).wait()
    assert torch.equal(x, fold(torch.maximum, [of(r) for r in range(size)]))
    group.broadcast(x := of(rank), root=1).wait()
    assert torch.equal(x, of(1))
    group.reduce(x := of(rank), 0, ReduceOp.SUM).wait()
    assert torch.equal(x, of(rank) if rank else sum(of(r) for r in range(size)))
    outs = [torch.zeros(5) for _ in range(size)]
    group.allgather(outs, of(rank)).wait()
    assert torch.equal(outs[1], of(1))
    group.gather(outs if rank == 0 else [], of(rank), 0).wait()
    group.scatter(x, outs if rank == 0 else [], 0).wait()
    assert torch.equal(x, of(rank))
    group.reduce_scatter(x, [of(rank)] * size, op=ReduceOp.SUM).wait()
    assert torch.equal(x, sum(of(r) for r in range(size)))
    group.barrier().wait()


def check_what_cannot_work_is_refused_at_once(rank, size):
    with pytest.raises(TypeError, match="to_dense"):
        dist.broadcast(torch.eye(3).to_sparse(), 0)
    with pytest.raises(TypeError, match="no memory"):
        dist.broadcast(torch.zeros(3, device="meta"), 0)
    with pytest.raises(ValueError, match="list of 2"):
        dist.group.WORLD.allreduce([torch.zeros(1), torch.zeros(1)]).wait()
