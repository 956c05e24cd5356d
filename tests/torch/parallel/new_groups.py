"""Process groups one after the other in one process. Checks that run in turn have such groups, too."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import unisono.parallel as up
from inside_parallel import PlanMesh


def check_meshes_of_a_new_group_are_new(folder: Path) -> None:
    """DTensor keeps the meshes it has seen, and takes an equal one for a new one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for more in (1, 0):
        mesh = PlanMesh.of(up.Plan(data=size, expert=2), "cpu")
        for _ in range(more):
            dist.new_group()  # so that the groups of experts get another name
        experts = mesh.of_experts().axes
        for axes, last in ((mesh.axes, Replicate()), (experts, Shard(0))):
            value = DTensor.from_local(torch.ones(2), axes, [Replicate()] * 3 + [last])
            twice = value + value
            assert twice.device_mesh is axes
            assert twice.full_tensor().tolist() == [2.0] * (4 if axes is experts else 2)
        assert experts.get_local_rank(3) == rank % 2
        if more:
            dist.destroy_process_group()
            store = dist.FileStore(str(folder / "again"), size)
            dist.init_process_group("unisono", store=store, rank=rank, world_size=size)
