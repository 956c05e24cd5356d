"""`process_group` over Unisono, over Gloo and on virtual GPUs, and programs that make their own."""

import os
from datetime import timedelta

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


@pytest.mark.ranks(2, backend=["unisono", "gloo"])
def test_one_rank_begins_alone(rank, backend, tmp_path):
    if rank == 0:
        where = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 2}
        with pytest.raises(RuntimeError):
            dist.init_process_group(backend, **where, timeout=timedelta(seconds=0.1))


@pytest.mark.ranks(2, backend=["unisono", "gloo"], timeout=60)
def test_all_begin(process_group):
    dist.barrier()


@pytest.fixture
def dies_in_setup(rank, tmp_path):
    if rank == 0:
        os._exit(3)
    where = {"init_method": f"file://{tmp_path}/store", "rank": 1, "world_size": 2}
    dist.init_process_group("gloo", **where, timeout=timedelta(seconds=0.1))


@pytest.mark.ranks(2)
def test_one_rank_dies_in_setup(dies_in_setup):
    pass


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
