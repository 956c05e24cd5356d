"""PyTorch's own ways to train, unmodified, against one process that sees all the data."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH = 4, 6  # per rank


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def data(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, size * BATCH, 8, generator=generator)
    return x, x.sum(-1, keepdim=True).sin()


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, optimizer=None) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[step]), y[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mine(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = data(size)
    return x[:, rank::size].contiguous(), y[:, rank::size].contiguous()


def assert_same_everywhere(net: nn.Module) -> None:
    """Bit for bit."""
    flat = torch.cat([p.detach().reshape(-1).view(torch.int32) for p in net.parameters()])
    low, high = flat.clone(), flat.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    assert torch.equal(low, high)


def assert_close(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def single(size: int) -> nn.Module:
    net = model()
    train(net, *data(size))
    return net


def check_ddp_equals_one_process(rank, size):
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, {"static_graph": True}):
        net = model()
        if rank:  # DDP gives everybody rank 0's parameters
            for p in net.parameters():
                nn.init.zeros_(p)
        ddp = DistributedDataParallel(net, **options)
        train(ddp, *mine(rank, size))
        assert_same_everywhere(net)
        assert_close(net, single(size))


def check_ddp_buffers_and_unused_parameters(rank, size):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.used = nn.BatchNorm1d(8), nn.Linear(8, 1)
            self.rare = nn.Linear(8, 1)

        def forward(self, x):
            x = self.norm(x)
            return self.used(x) + self.rare(x) if rank == 0 else self.used(x)

    torch.manual_seed(rank)
    net = Branches()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    train(ddp, *mine(rank, size))
    assert_same_everywhere(net)


def check_no_sync(rank, size):
    net = model()
    ddp = DistributedDataParallel(net)
    x, y = mine(rank, size)
    with ddp.no_sync():
        nn.functional.mse_loss(ddp(x[0]), y[0]).backward()
    alone = model()
    nn.functional.mse_loss(alone(x[0]), y[0]).backward()
    assert torch.equal(net[0].weight.grad, alone[0].weight.grad)
    nn.functional.mse_loss(ddp(x[1]), y[1]).backward()
    whole, (xs, ys) = model(), data(size)
    for step in range(2):
        nn.functional.mse_loss(whole(xs[step]), ys[step]).backward()
    assert torch.allclose(net[0].weight.grad, whole[0].weight.grad, atol=1e-5)


def train_with(hooks, rank, size):
    for hook, state in hooks.items():
        net = model()
        ddp = DistributedDataParallel(net)
        ddp.register_comm_hook(state, hook)
        train(ddp, *mine(rank, size))
        assert_same_everywhere(net)
        assert all(torch.isfinite(p).all() for p in net.parameters())


def check_communication_hooks(rank, size):
    power = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    hooks = {default_hooks.allreduce_hook: None, default_hooks.fp16_compress_hook: None}
    train_with({**hooks, powerSGD_hook.powerSGD_hook: power}, rank, size)


def check_uneven_inputs(rank, size):
    for initial in (True, False):
        net = model()
        ddp = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with Join([ddp], divide_by_initial_world_size=initial):
            for _ in range(3 + rank):
                optimizer.zero_grad()
                ddp(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        assert_same_everywhere(net)


def check_zero_redundancy_optimizer(rank, size):
    net, plain = model(), model()
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    train(DistributedDataParallel(net), *mine(rank, size), optimizer=zero)
    train(plain, *data(size), optimizer=torch.optim.Adam(plain.parameters(), lr=0.01))
    assert_same_everywhere(net)
    assert_close(net, plain)


def check_distributed_sampler(rank, size):
    x = torch.arange(23).float().reshape(-1, 1)
    sampler = DistributedSampler(TensorDataset(x), shuffle=True, seed=5)
    loader = DataLoader(TensorDataset(x), batch_size=4, sampler=sampler)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = [value for (batch,) in loader for value in batch.flatten().tolist()]
        every = [None] * size
        dist.all_gather_object(every, seen)
        assert set().union(*every) == set(range(23))
        assert len({len(each) for each in every}) == 1
        orders.append(every)
    assert orders[0] != orders[1]


def check_averaged_metric_leaves_its_input_alone(rank, size):
    loss = torch.tensor(float(rank), requires_grad=True)
    shown = loss.detach().clone()
    dist.all_reduce(shown, dist.ReduceOp.AVG)
    assert loss.item() == rank
    assert shown.item() == sum(range(size)) / size


def check_checkpoint(rank, size):
    net = model()
    train(DistributedDataParallel(net), *mine(rank, size))
    path = [None]
    if rank == 0:
        import tempfile

        path[0] = tempfile.mkstemp(suffix=".pt")[1]
        torch.save(net.state_dict(), path[0])
    dist.broadcast_object_list(path, 0)
    dist.barrier()
    other = copy.deepcopy(model())
    other.load_state_dict(torch.load(path[0], map_location="cpu", weights_only=True))
    assert_close(net, other)
    dist.barrier()
    if rank == 0:
        import os

        os.remove(path[0])
