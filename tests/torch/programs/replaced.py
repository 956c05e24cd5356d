"""What asks for gloo under UNISONO_REPLACE=gloo, in one process group after another. Run by test_replace.py.

It imports nothing of Unisono: that is the point. `replaced.py PORT`: not at the store of torchrun, but here.
"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def is_ours(group) -> bool:
    return type(group).__name__ == "ProcessGroupUnisono"


def summed(group=None) -> float:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return x[0].item()


def main() -> None:
    if len(sys.argv) > 1:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert not [name for name in sys.modules if name.startswith("unisono.engine.group")]
    for number, backend in enumerate(("gloo", dist.Backend.GLOO, "GLOO", "cpu:gloo,cuda:nccl", None)):
        dist.init_process_group(backend, timeout=timedelta(seconds=300))
        world = dist.group.WORLD
        assert is_ours(world), backend
        assert summed() == size
        if number < 3:
            assert dist.get_backend() == dist.Backend.GLOO == "gloo"
            dist.monitored_barrier(timeout=timedelta(seconds=300))
        assert world.name() == world._get_backend_name() == "gloo"
        assert "in place of gloo" in repr(world)
        assert dist.is_gloo_available()
        assert dist.is_backend_available("gloo")
        part = dist.new_group(backend="gloo")
        assert is_ours(part)
        assert dist.get_backend(part) == "gloo"
        assert summed(part) == size
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7), part)
        assert part.options._timeout == timedelta(seconds=7)
        mesh = init_device_mesh("cpu", (size,))
        assert is_ours(mesh.get_group())
        real = dist.new_group(backend="original_gloo")  # PyTorch's own, for comparison
        assert not is_ours(real)
        assert type(real._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo
        assert summed(real) == size
        ours = dist.new_group(backend="unisono")
        assert dist.get_backend(ours) == "unisono"
        every = [None] * size
        dist.all_gather_object(every, rank)
        assert every == list(range(size))
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    print("fine", flush=True)
    os._exit(0)  # threads of PyTorch's Gloo outlive Python's end and now and then abort the process


if __name__ == "__main__":
    main()
