"""DTensor's factories, the styles of tensor parallelism, pipelines that PyTorch cuts itself."""

import torch
import torch.distributed.tensor as dtensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import SplitPoint, build_stage, pipe_split, pipeline, schedules
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, experimental
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from checks.built_on_groups import run_schedule


def check_factories(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    shape = (2 * size, 3)
    for make, fill in ((dtensor.ones, 1.0), (dtensor.zeros, 0.0)):
        assert torch.equal(
            make(shape, device_mesh=mesh, placements=[Shard(0)]).full_tensor(), torch.full(shape, fill)
        )
    made = dtensor.full(shape, 7.0, device_mesh=mesh, placements=[Shard(1)])
    assert torch.equal(made.full_tensor(), torch.full(shape, 7.0))
    assert dtensor.empty(shape, device_mesh=mesh, placements=[Shard(0)]).to_local().shape == (2, 3)


def transformer_like(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))


def check_sequence_parallel(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    plain, split = transformer_like(4 * size), transformer_like(4 * size)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(split, mesh, plan)
    x = torch.randn(2, 2 * size, 8, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(size, dim=1)[rank]
    out, want = split(mine), plain(x)
    assert torch.allclose(out, want.chunk(size, dim=1)[rank], atol=1e-5)
    out.sum().backward()
    want.sum().backward()
    assert torch.allclose(split[1].weight.grad.full_tensor(), plain[1].weight.grad, atol=1e-5)


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2


def check_inputs_and_outputs_prepared(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    x = torch.arange(2.0 * size)
    mine = x.chunk(size)[rank]
    into = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
    )
    assert torch.equal(parallelize_module(Doubles(), mesh, into)(mine), 2 * x)
    out = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    assert torch.equal(parallelize_module(Doubles(), mesh, out)(mine), 2 * x)
    both = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(0),
    )
    assert torch.equal(parallelize_module(Doubles(), mesh, both)(mine), 2 * mine)


def check_loss_parallel(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(4, 3 * size, generator=generator, requires_grad=True)
    target = torch.randint(3 * size, (4,), generator=generator)
    logits = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, distribute_tensor(target, mesh, [Replicate()]))
        loss.backward()
    want = nn.functional.cross_entropy(whole, target)
    want.backward()
    assert torch.allclose(loss.full_tensor(), want)
    assert torch.allclose(logits.grad.full_tensor(), whole.grad, atol=1e-6)


def check_local_map_and_implicit_replication(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(2.0 * size)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    local = experimental.local_map(lambda x: x + 1, out_placements=[Shard(0)], device_mesh=mesh)
    assert torch.equal(local(sharded).full_tensor(), whole + 1)
    with experimental.implicit_replication():
        assert torch.equal((sharded * torch.full((2 * size,), 3.0)).full_tensor(), 3 * whole)


def check_a_sharding_of_ones_own(rank, size):
    mesh = init_device_mesh("cpu", (size,))

    @experimental.register_sharding(torch.ops.aten.bernoulli.p)  # has none for a probability
    def _(x, p, generator=None):
        return [([Shard(0)], [Shard(0), None, None])]

    whole = torch.ones(2 * size, 3)
    out = torch.ops.aten.bernoulli.p(distribute_tensor(whole, mesh, [Shard(0)]), 1.0)
    assert out.placements == (Shard(0),)
    assert torch.equal(out.full_tensor(), whole)


class Cut(nn.Module):
    """`count` layers, cut by `pipe_split` after each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index:
                pipe_split()
            x = torch.tanh(layer(x))
        return x


def check_a_pipeline_cut_by_pytorch(rank, size):
    x = torch.randn(2 * size, 4, generator=torch.Generator().manual_seed(1))
    pipe = pipeline(Cut(size), mb_args=(x[:2],))
    named = pipeline(
        nn.Sequential(*[nn.Linear(4, 4) for _ in range(size)]),
        mb_args=(x[:2],),
        split_spec={str(index): SplitPoint.BEGINNING for index in range(1, size)},
    )
    assert pipe.num_stages == named.num_stages == size
    stage = build_stage(pipe.get_stage_module(rank), rank, pipe.info(), torch.device("cpu"))
    out = schedules.ScheduleGPipe(stage, n_microbatches=size).step(*([x] if rank == 0 else []))
    if rank == size - 1:
        with torch.no_grad():
            want = x
            for layer in Cut(size).layers:
                want = torch.tanh(layer(want))
        assert torch.allclose(out, want, atol=1e-6)


def check_more_schedules(rank, size):
    run_schedule(schedules.ScheduleLoopedBFS, rank, size, 2, lambda index: index % size)
    run_schedule(schedules.ScheduleDualPipeV, rank, size, 2, lambda i: i if i < size else 2 * size - 1 - i)
