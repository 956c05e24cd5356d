"""A process group of a given backend, and what programs do with it: asks_for_a_backend.py NAME."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.full((5,), rank + 1.0)
dist.all_reduce(x, async_op=True).wait()
ends = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    y = torch.ones(3)
    dist.all_reduce(y, group=ends)
    assert y.tolist() == [2.0] * 3
if rank == 0:
    dist.send(torch.arange(4.0), 1)
if rank == 1:
    z = torch.zeros(4)
    dist.recv(z, 0)
    assert z.tolist() == [0.0, 1.0, 2.0, 3.0]
seen = [None] * size
dist.all_gather_object(seen, rank)
assert seen == list(range(size))
dist.barrier()
print(f"{dist.get_backend()}: {x[0]:g} {type(dist.group.WORLD).__name__}")
dist.destroy_process_group()
