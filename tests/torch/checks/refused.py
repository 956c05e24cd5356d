"""What a call refuses before a byte moves: types, shared outputs, tensors that are more than bytes."""

import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp

import unisono as un
from unisono.torch_internals.version_names import reduce_scatter_single


def check_each_dtype_has_a_name_of_its_own(rank, size):
    pairs = [
        ("uint32", "float8_e5m2"), ("uint16", "uint8"), ("uint64", "uint32"), ("uint16", "complex32"),
        ("float8_e4m3fn", "float8_e5m2"), ("uint4", "uint8"), ("int8", "int4"), ("bits8", "uint8"),
    ]  # fmt: skip
    calls = [
        lambda out, x, group: dist.all_gather(list(out.view(size, -1)), x, group=group),
        lambda out, x, group: dist.all_to_all_single(out[: len(x)], x, group=group),
        lambda _, x, group: dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group),
    ]
    for number, pair in enumerate(pairs):
        dtype = getattr(torch, pair[min(rank, 1)])
        group = dist.new_group(range(size))
        nbytes = 8 * size * (1 if number % 2 else dtype.itemsize)  # as many bytes, as many elements
        with pytest.raises(un.Mismatch, match=pair[0]):
            out, x = (torch.zeros(each, dtype=torch.uint8).view(dtype) for each in (size * nbytes, nbytes))
            calls[number % 3](out, x, group)
            dist.barrier(group)


def check_a_message_that_does_not_fill_its_tensor_is_told_so(rank, size):
    """Over Gloo the rest of the tensor keeps what it was, silently."""
    group = dist.new_group(range(size))
    if rank == 0:
        dist.send(torch.ones(2), 1, group=group)
    if rank == 1:
        with pytest.raises(un.Mismatch, match=r"float32\[2\].* into an array of the size that is sent"):
            dist.recv(torch.zeros(4), 0, group=group)


def check_outputs_that_share_memory_are_refused(rank, size):
    def refused(call, *arguments):
        with pytest.raises(ValueError, match="share memory"):
            call(*arguments)

    for dtype in (torch.float32, torch.int64, torch.bool, torch.uint16, torch.float8_e5m2):
        row = torch.zeros(1, 8 * size, dtype=torch.uint8).view(dtype)[:, : 2 * size]
        one, plain = row.expand(2, -1), torch.zeros(2, row.shape[1], dtype=torch.uint8).to(dtype)
        windows = plain.view(-1).as_strided((3, 2), (1, 1))
        for x in (one, windows, plain.view(-1)[:1].expand(4)):
            if dtype in (torch.float32, torch.int64):
                refused(dist.all_reduce, x)
            if rank:
                refused(dist.broadcast, x, 0)
            refused(dist.recv, x, (rank + 1) % size)
            refused(dist.scatter, x, [x] * size if rank == 0 else None, 0)
        refused(dist.all_gather, [one] + [plain] * (size - 1), plain)
        turned = plain.t()
        refused(dist.all_gather, [turned] * size, turned.contiguous())
        refused(dist.all_to_all, [turned] * size, [turned] * size)
        wide = torch.zeros(4, 4 * size, dtype=torch.uint8).to(dtype)
        columns = [wide[:, 3 * each : 3 * each + 4] for each in range(size)]
        refused(dist.all_gather, columns, columns[0].contiguous())
        apart = [wide[:, each::size] for each in range(size)]
        dist.all_gather(apart, apart[0].contiguous())
    dist.broadcast(torch.ones(1).expand(3) if rank == 0 else torch.zeros(3), 0)  # the root only reads


def check_one_rank_with_an_output_that_shares_memory(rank, size):
    if rank == 0:
        with pytest.raises(ValueError, match="share memory"):
            dist.all_reduce(torch.ones(1).expand(3))
    x = torch.ones(3)
    dist.all_reduce(x)  # no byte of the other call has moved
    assert x.tolist() == [size] * 3


def check_tensors_that_are_more_than_their_bytes_are_refused(rank, size):
    plain, two = torch.ones(2, 2), [torch.ones(2), torch.ones(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of prototypes
        refused = [
            torch.masked.masked_tensor(plain, plain > 0),
            plain.to_sparse_csr(),
            torch._efficientzerotensor((2, 2)),
            torch.nested.nested_tensor(two),
            torch.nested.nested_tensor(two, layout=torch.jagged),
            torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        ]
    for x in refused:
        for call in (
            lambda x: dist.all_reduce(x),
            lambda x: dist.broadcast(x, 0),
            lambda x: dist.all_gather([x] * size, x),
            lambda x: dist.send(x, (rank + 1) % size),
            lambda x: dist.irecv(x, (rank + 1) % size),
            lambda x: dist.reduce_scatter(x, [x] * size),
        ):
            with pytest.raises(TypeError):
                call(x)
    negative = torch._neg_view(plain.clone())
    dist.all_reduce(negative)
    assert negative.tolist() == [[-size, -size]] * 2


def check_a_coalescing_block_that_raises_leaves_nothing(rank, size):
    for device in (None, torch.device("cpu")):
        with pytest.raises(KeyError), dist._coalescing_manager(device=device, async_ops=True):
            raise KeyError
        x = torch.ones(100)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert x[0] == size
        gone = weakref.ref(work)
        del work
        assert gone() is None


def check_average_of_integers_is_refused_in_every_reduction(rank, size):
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        x = torch.arange(size, dtype=dtype)
        with pytest.raises(TypeError, match="AVG has no meaning"):
            dist.all_reduce(x, ReduceOp.AVG)
        with pytest.raises(TypeError, match="AVG has no meaning"):
            dist.all_reduce(x, ReduceOp.AVG, async_op=True)
        with pytest.raises(TypeError, match="AVG has no meaning"):
            dist.reduce(x, 0, ReduceOp.AVG)
        with pytest.raises(TypeError, match="AVG has no meaning"):
            dist.reduce_scatter(x[:1].clone(), list(x.split(1)), ReduceOp.AVG)
        with pytest.raises(TypeError, match="AVG has no meaning"):
            reduce_scatter_single(x[:1].clone(), x, ReduceOp.AVG)
        with pytest.raises(TypeError, match="AVG has no meaning"):
            functional.all_reduce(x, "avg", dist.group.WORLD)
        with pytest.raises(TypeError, match="AVG has no meaning"), dist._coalescing_manager():
            dist.all_reduce(x, ReduceOp.AVG)
        assert torch.equal(x, torch.arange(size, dtype=dtype))
