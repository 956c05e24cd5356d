"""`process_group` over Unisono, over Gloo and on virtual GPUs, and programs that make their own."""

import os

import pytest
import torch
import torch.distributed as dist

import unisono as un


@pytest.mark.ranks(2, backend=["unisono", "gloo"])
def test_backends(process_group, group, backend):
    assert dist.get_backend() == backend
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2, 2, 2]
    group.all_reduce(x)
    assert x.tolist() == [4, 4, 4]


@pytest.mark.ranks(2, backend=["unisono", "gloo"])
def test_one_rank_fails(process_group, rank):
    if rank == 0:
        raise KeyError("the cause")
    dist.all_reduce(torch.ones(3))


@pytest.mark.ranks(2, backend="gloo")
def test_one_rank_dies(process_group, rank):
    if rank == 0:
        os._exit(3)


@pytest.mark.ranks(2)
def test_subgroups_do_not_stay(process_group):
    assert dist.get_pg_count() == 1
    dist.new_group([0])


@pytest.mark.ranks(2)
def test_is_the_only_one(process_group):
    assert dist.get_pg_count() == 1


@pytest.mark.ranks(2)
def test_makes_its_own():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    with un.init_process_group() as group:
        assert group.size == 2
        group.barrier()


@pytest.mark.ranks(2, virtual_gpus=2, backend="nccl")
def test_virtual_gpus(process_group, rank):
    x = torch.ones(3, device="cuda")
    dist.all_reduce(x)
    assert (x.device.index, x.sum().item()) == (rank, 6)
