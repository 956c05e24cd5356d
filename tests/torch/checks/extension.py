"""What PyTorch asks of process groups in Python (PythonProcessGroupExtensionTest), asked of ours."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d


def check_names(rank, size):
    group = dist.group.WORLD
    assert group.name() == group.getBackendName() == "unisono" == dist.Backend.UNISONO
    assert dist.is_backend_available("unisono")
    assert dist.is_backend_available("UNISONO")
    assert c10d.Backend._plugins["UNISONO"].extended_api
    assert group.supports_splitting


def check_backend_configs(rank, size):
    devices = {"cpu", "cuda"}
    for given in ("unisono", "UNISONO", "cpu:unisono,cuda:unisono"):
        assert set(dist.BackendConfig(given).get_device_backend_map()) >= devices
    mixed = dist.BackendConfig("cpu:unisono,cuda:nccl").get_device_backend_map()
    assert (mixed["cpu"], mixed["cuda"]) == ("unisono", "nccl")
    for wrong in ("cpu:gloo,cuda:nccl,", "cpu:gloo,cuda:nccl,cpu:unisono"):
        with pytest.raises(ValueError, match=r"(?i)backend|device|invalid"):
            dist.BackendConfig(wrong)


def check_the_backend_of_a_device_and_of_a_name(rank, size):
    group = dist.new_group()
    if hasattr(dist, "get_backend_impl"):
        name = str(c10d._get_process_group_name(group))
        backend = dist.get_backend_impl(name)
        assert backend is group.get_backend(torch.device("cpu"))
        assert backend.getBackendName() == "unisono"
    dist.destroy_process_group(group)


def check_ranks_of_a_group_and_of_the_world(rank, size):
    group = dist.new_group()
    assert c10d._canonicalize_group_rank(group, group_rank=size - 1, return_global=False) == size - 1
    assert c10d._canonicalize_group_rank(group, global_rank=0, return_global=True) == 0
    dist.destroy_process_group(group)


def check_messages(rank, size):
    x = torch.full((2, 2), float(rank))
    following, before = (rank + 1) % size, (rank - 1) % size
    sending = dist.isend(x, group_dst=following)
    dist.recv(y := torch.zeros(2, 2), group_src=before)
    sending.wait()
    assert (y == before).all()
    for wrong in ({"dst": rank}, {"group_dst": rank}, {"dst": following, "group_dst": following}, {}):
        with pytest.raises(ValueError, match=r"(?i)rank|dst"):
            dist.send(x, **wrong)
    with pytest.raises(ValueError, match=r"(?i)rank|src"):
        dist.recv(x, src=0, group_src=0)


def check_destroying_shuts_down_and_aborting_aborts(rank, size):
    for end in (dist.destroy_process_group, c10d._abort_process_group):
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()  # an abort also ends what others have not finished
        end(group)
        with pytest.raises(RuntimeError, match=r"closed|abort"):
            group.allreduce([torch.ones(1)]).wait()
        dist.barrier()
