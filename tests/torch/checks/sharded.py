"""Functional collectives, DTensor, FSDP2, pipelining: what runs over the group's C++ face."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checks.training import BATCH, mine, model, single, train


def check_functional_collectives(rank, size):
    group, ranks = dist.group.WORLD, list(range(size))
    x = torch.full((size, 2), float(rank))
    total = float(sum(ranks))
    assert torch.equal(functional.all_reduce(x, "sum", group), torch.full((size, 2), total))
    assert torch.equal(functional.broadcast(x, 1, group), torch.ones(size, 2))
    rows = functional.all_gather_tensor(x[:1], 0, group)
    assert torch.equal(rows, torch.tensor(ranks).float().reshape(-1, 1).expand(size, 2))
    scattered = functional.reduce_scatter_tensor(x, "sum", 0, group)
    assert torch.equal(scattered, torch.full((1, 2), total))
    swapped = functional.all_to_all_single(x, [1] * size, [1] * size, group)
    assert torch.equal(swapped, torch.tensor(ranks).float().reshape(-1, 1).expand(size, 2))
    permuted = functional.permute_tensor(x.flatten(), [(r + 1) % size for r in ranks], group)
    assert torch.equal(permuted, torch.full((size * 2,), float((rank - 1) % size)))
    averages = functional.all_reduce_coalesced([x, x], "avg", group)
    assert all(torch.equal(average, torch.full((size, 2), total / size)) for average in averages)


def check_a_lazy_result_can_be_reduced_again(rank, size):
    lazy = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert type(lazy) is functional.AsyncCollectiveTensor
    dist.all_reduce(lazy)
    assert lazy.tolist() == [size * size] * 2


def check_dtensor(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(size * 6.0).reshape(size * 2, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    again = sharded.redistribute(mesh, [Replicate()]).redistribute(mesh, [Shard(1)])
    assert torch.equal(again.full_tensor(), whole)
    product = distribute_tensor(whole, mesh, [Shard(0)]).t() @ distribute_tensor(whole, mesh, [Shard(0)])
    assert product.placements == (Partial(),)
    assert torch.allclose(product.full_tensor(), whole.t() @ whole)


def check_tensor_parallel(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6 * size), nn.ReLU(), nn.Linear(6 * size, 4))
    torch.manual_seed(0)
    split = nn.Sequential(nn.Linear(8, 6 * size), nn.ReLU(), nn.Linear(6 * size, 4))
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    out, want = split(x), plain(x)
    assert torch.allclose(out, want, atol=1e-5)
    out.sum().backward()
    want.sum().backward()
    assert torch.allclose(split[0].weight.grad.full_tensor(), plain[0].weight.grad, atol=1e-5)


def check_fully_shard(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, *mine(rank, size))
    for a, b in zip(net.parameters(), single(size).parameters(), strict=True):
        assert torch.allclose(a.full_tensor(), b, rtol=1e-4, atol=1e-5)


def check_pipeline(rank, size):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=nn.functional.mse_loss)
    x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(1))
    target, losses = torch.zeros(BATCH, 8), []
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(size)])
    loss = nn.functional.mse_loss(plain(x), target)
    loss.backward()
    assert torch.allclose(layers[rank].weight.grad, plain[rank].weight.grad, atol=1e-5)
    assert not losses or torch.allclose(torch.stack(losses).mean(), loss)
