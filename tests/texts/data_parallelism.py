"""DistributedDataParallel on virtual GPUs and CPUs, one process or many. `data_parallelism.py NAME`."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meeting_places import trained
from told import of_all, refusal, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from trained import alone, planned, same

import unisono as un
import unisono.parallel as up


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))


def data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(24, 10), torch.randint(3, (24,)))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1)


def join() -> torch.device:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    return torch.device("cuda", dist.get_rank())


def wrapped_early() -> None:
    """DDP around a model that is still on the CPU: what NCCL says; over Unisono it trains there."""
    join()
    say(refusal(lambda: DistributedDataParallel(net()), RuntimeError))
    ddp = DistributedDataParallel(net(), process_group=dist.new_group(backend="unisono"))
    ddp(torch.ones(2, 10) * (dist.get_rank() + 1)).square().sum().backward()
    first, second = of_all([parameter.grad.tolist() for parameter in ddp.parameters()])
    assert first == second
    say("over CPU ranks", [tuple(parameter.grad.shape) for parameter in ddp.parameters()])


def sampled() -> None:
    """DistributedSampler, set_epoch, Adam; then rank 0 saves, a barrier, and all load and go on."""
    device = join()
    rows, rank, size = data(), dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(rows, seed=0)
    ddp, seen, losses = DistributedDataParallel(net().to(device), device_ids=[device]), [], []
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen.append(list(sampler))
        for x, y in DataLoader(rows, 4, sampler=sampler):
            loss = nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append((mean / size).item())
    orders = of_all(seen)
    for epoch in range(3):
        assert sorted(row for ranks in orders for row in ranks[epoch]) == list(range(24))
    assert orders[0][0] != orders[0][1] != orders[0][2]
    assert losses[-1] < losses[0]
    weights = of_all(nn.utils.parameters_to_vector(ddp.parameters()).tolist())
    assert weights == weights[:1] * size
    say("each row once an epoch, another order in each, all ranks equal")
    path = Path(of_all(tempfile.mkdtemp())[0], "model.pt")
    if rank == 0:
        torch.save(ddp.state_dict(), path)
    dist.barrier()
    other = DistributedDataParallel(nn.Sequential(*net()).to(device), device_ids=[device])
    other.load_state_dict(torch.load(path, map_location=device, weights_only=True))
    x = rows.tensors[0].to(device)
    assert torch.equal(other(x), ddp(x))
    dist.barrier()
    say("all ranks load what rank 0 saved")


def averaged() -> None:
    """The mean loss of the ranks; a clone, because all_reduce changes what it gets."""
    dist.init_process_group("unisono")
    loss = torch.tensor(float(dist.get_rank() + 1))
    mean = loss.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    say("mean", mean.item(), "of", of_all(loss.item()))


def toy(rank: int, size: int, port: int, backend: str) -> None:
    """One rank of a program that starts its ranks itself; only its set-up names the library."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank))
    dist.init_process_group(backend, rank=rank, world_size=size)
    torch.cuda.set_device(rank)
    say(backend, trained(torch.device("cuda", rank)))
    dist.destroy_process_group()


def spawn() -> None:
    for backend in ("nccl", "gloo"):
        with un.TCPStore("127.0.0.1", 0, is_server=True) as taken:
            port = taken.port
        mp.spawn(toy, (2, port, backend), nprocs=2)


def buckets() -> None:
    """8 MiB of gradients in buckets of 1, 2 and 25 MB; a hook sees each."""
    dist.init_process_group("unisono")
    for cap in (1, 2, 25):
        seen: list[int] = []
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=cap)
        ddp.register_comm_hook(seen, hook)
        for _ in range(2):  # after the first step DDP makes the buckets anew
            seen.clear()
            ddp(torch.ones(1, 512)).sum().backward()
        say(cap, "MB:", len(seen), "buckets")


def hook(seen: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    seen.append(bucket.index())
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def processes() -> None:
    """One process for each replica has the losses of one process with all rows."""
    rows, loss_of = [data().tensors] * 3, nn.functional.cross_entropy
    run = planned(up.Plan(data=2), net(), sgd, loss_of)
    same([run.step(batch) for batch in run.shard(rows)], alone(net(), rows, sgd, loss_of))
    say("the losses of one process")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
