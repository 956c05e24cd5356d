"""One rank of PyTorch on a test's host: DDP and FSDP2 against one process. Run by test_groups_on_hosts.py.

`torch_program.py HOSTS`: how many there are.
"""

import sys
from datetime import timedelta

import torch.distributed as dist

import inside
import unisono.torch  # noqa: F401
from checks import sharded, training


def main() -> None:
    dist.init_process_group("unisono", timeout=timedelta(seconds=600))
    rank, size = dist.get_rank(), dist.get_world_size()
    world = inside.group_of(dist.group.WORLD)
    assert len({world.host_of(r) for r in range(size)}) == int(sys.argv[1])
    training.check_ddp_equals_one_process(rank, size)
    sharded.check_fully_shard(rank, size)
    sharded.check_tensor_parallel(rank, size)
    dist.destroy_process_group()
    print("fine", flush=True)


if __name__ == "__main__":
    main()
