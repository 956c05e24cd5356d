"""Data parallel training as written for GPUs: nccl, a sampler, one device per rank, a checkpoint by rank 0.

unisono run --virtual-gpus 4 examples/virtual/ddp.py
torchrun --nproc-per-node 4 examples/virtual/ddp.py       # the same on real GPUs
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)

    torch.manual_seed(0)
    x = torch.randn(256, 20)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=16, sampler=sampler, pin_memory=True)

    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).cuda()
    parallel = DistributedDataParallel(model, device_ids=[local_rank])
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    loss = torch.zeros((), device="cuda")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            inputs, labels = inputs.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            loss = nn.functional.cross_entropy(parallel(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {mean.item():.3f}, {torch.cuda.max_memory_allocated()} bytes on a GPU"
            )

    path = [os.path.join(tempfile.gettempdir(), f"ddp-{os.getpid()}.pt")]
    dist.broadcast_object_list(path, src=0)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), path[0])
    dist.barrier()
    state = torch.load(path[0], map_location=f"cuda:{local_rank}", weights_only=True)
    model.load_state_dict(state)
    assert all(value.device.index == local_rank for value in state.values())
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(path[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
