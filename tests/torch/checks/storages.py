"""A tensor's memory stays while an asynchronous call uses it, whatever the program does with the tensor."""

import gc

import pytest
import torch
import torch.distributed as dist

from unisono import _native
from unisono.torch_internals import storages

LARGE = 1 << 20  # elements: a call takes long enough to be under way, and free() gives the memory back


def begun(rank, size):
    """Asynchronous calls of every kind: a tensor that one uses, and its work."""
    x = torch.ones(LARGE)
    yield x, dist.all_reduce(x, async_op=True)
    x = torch.ones(LARGE)
    yield x, dist.all_gather([torch.empty(LARGE) for _ in range(size)], x, async_op=True)
    x = torch.empty(size * LARGE)
    yield x, dist.all_gather_into_tensor(x, torch.ones(LARGE), async_op=True)
    x = torch.ones(LARGE)
    with dist._coalescing_manager(async_ops=True) as together:
        dist.all_reduce(x)
    yield x, together
    x = torch.ones(LARGE)
    if rank < 2:
        yield x, (dist.isend if rank else dist.irecv)(x, 1 - rank)


def another_storage(x):
    x.data = torch.zeros(3)


def set_to(x):
    x.set_(torch.zeros(3))


def swapped(x):
    torch.utils.swap_tensors(x, torch.zeros(3))


def dropped(x):
    x.untyped_storage()  # nothing: the caller drops it


def check_another_storage_leaves_the_old_one(rank, size):
    for change in (another_storage, set_to, swapped, dropped):
        for x, work in begun(rank, size):
            change(x)
            del x
            gc.collect()
            work.wait()


def check_a_gradient_may_be_dropped(rank, size):
    parameter = torch.nn.Parameter(torch.zeros(LARGE))
    parameter.grad = torch.ones(LARGE)
    work = dist.all_reduce(parameter.grad, async_op=True)
    parameter.grad = None
    gc.collect()
    work.wait()


def check_a_storage_under_way_is_not_resized(rank, size):
    group = dist.new_group()
    ways = (lambda x: x.untyped_storage().resize_(0), lambda x: x.resize_(4 * LARGE))
    for resize in ways:
        x = torch.ones(LARGE)
        if rank == 0:  # the others begin when rank 0 has tried
            work = dist.all_reduce(x, group=group, async_op=True)
            with pytest.raises(RuntimeError, match="not resizable"):
                resize(x)
            dist.barrier()
        else:
            dist.barrier()
            work = dist.all_reduce(x, group=group, async_op=True)
        work.wait()
        assert x[0] == size
        resize(x)


def check_a_storage_may_be_resized_once_its_works_are_done(rank, size):
    x = torch.ones(8)
    works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
    while not all(work.is_completed() for work in works):
        pass
    x.untyped_storage().resize_(0)
    y = torch.ones(8)
    dist.all_reduce(y, async_op=True)
    dist.barrier()
    dist.barrier()  # the first work is over, and this call lets it go
    y.untyped_storage().resize_(0)


def check_an_array_of_a_tensor_keeps_its_storage(rank, size):
    x = torch.ones(8)
    array = x.numpy()
    dist.all_reduce(x, async_op=True).wait()
    with pytest.raises(RuntimeError, match="not resizable"):
        x.untyped_storage().resize_(0)
    assert array[0] == size


def check_the_places_are_found(rank, size):
    assert min(storages.places()) > 0


def check_what_only_looks_like_a_tensor_is_left_alone(rank, size):
    class Other:
        def untyped_storage(self):
            return b"\1" * 64  # its bytes were taken as an address

    _native.StorageHold(Other())
