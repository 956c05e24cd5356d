"""Each API takes the other's stores."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

import unisono as un
import unisono.torch


@pytest.mark.parametrize("kind", ["hash", "file", "prefix"])
def test_a_group_of_ours_meets_in_a_store_of_pytorchs(kind, tmp_path):
    stores = {
        "hash": lambda: dist.HashStore(),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 2),
        "prefix": lambda: dist.PrefixStore("job", dist.HashStore()),
    }
    shared = stores[kind]()

    def work(rank):
        x = np.full(3, rank + 1.0)
        with un.init_process_group(store=shared, rank=rank, world_size=2) as group:
            group.all_reduce(x)
        return x.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[3.0] * 3] * 2


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_a_group_of_pytorchs_meets_in_a_store_of_ours(backend):
    with un.HashStore() as store:
        dist.init_process_group(backend, store=unisono.torch.Store(store), rank=0, world_size=1)
        x = torch.ones(2)
        dist.all_reduce(x)
        dist.destroy_process_group()
        assert x.tolist() == [1.0, 1.0]
        assert store.keys()


def test_pytorch_meets_in_a_file_when_no_group_of_ours_has_it(tmp_path):
    """Its store reads one of ours for ever."""
    path = tmp_path / "meet"
    begin = {"init_method": f"file://{path}", "rank": 0, "world_size": 1, "timeout": timedelta(seconds=1)}
    with un.FileStore(path, 1) as store:
        store.set("key", b"value")
        left = path.read_bytes()
        with pytest.raises(un.StoreError, match="another group still have the file open"):
            dist.init_process_group("unisono", **begin)
    path.write_bytes(left)  # as a run leaves it that is killed
    dist.init_process_group("unisono", **begin)
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert x.tolist() == [1.0, 1.0]


def test_what_is_no_store_is_refused():
    for wrong in (1, "tcp://127.0.0.1:1", object()):
        with pytest.raises(TypeError, match="store is"):
            un.init_process_group(store=wrong)
    with pytest.raises(ValueError, match="multicast address"):
        un.init_process_group(init_method="tcp://224.66.41.62:23456", rank=0, world_size=2)


@pytest.mark.ranks(2, timeout=60)
def test_a_rank_that_failed_alone_tries_again(group, rank, tmp_path):
    begin = {"init_method": f"file://{tmp_path}/meet", "rank": rank, "world_size": 2}
    if rank == 1:
        with pytest.raises(un.RendezvousError, match="rank 0 did not"):
            dist.init_process_group("unisono", **begin, timeout=timedelta(seconds=0.2))
    group.barrier()
    dist.init_process_group("unisono", **begin)
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert x.tolist() == [2.0, 2.0]
