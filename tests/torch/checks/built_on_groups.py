"""What PyTorch builds on a process group: FSDP1, checkpoints, torch.compile, pipeline schedules."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from checks.training import assert_close, assert_same_everywhere, mine, model, single, train, train_with


@pytest.mark.filterwarnings("ignore")
def check_fsdp1(rank, size):
    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    train(net, *mine(rank, size))
    with FullyShardedDataParallel.summon_full_params(net):
        assert_close(net.module, single(size))


def check_compiled_functional_collectives(rank, size):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return functional.all_gather_tensor(total + 1, 0, dist.group.WORLD)

    out = step(torch.ones(3))
    assert torch.equal(out, torch.full((3 * size,), 2.0 * size + 1))


def check_compiled_ddp(rank, size):
    net = model()
    train(torch.compile(DistributedDataParallel(net), backend="aot_eager"), *mine(rank, size))
    assert_same_everywhere(net)
    assert_close(net, single(size))


def check_all_reduce_inside_a_compiled_function(rank, size):
    @torch.compile(backend="aot_eager")
    def step(x):
        y = x + 1
        dist.all_reduce(y)
        return y * 2

    assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0 * size))


def bf16_hook(state, bucket):
    """What PyTorch's bf16_compress_hook does, which DDP takes only in a build with NCCL or XCCL."""
    return default_hooks._compress_hook(torch.bfloat16, None, bucket)


def check_more_communication_hooks(rank, size):
    pytorchs_own = default_hooks.bf16_compress_hook
    if not dist.is_nccl_available():
        with pytest.raises(TypeError, match="NCCL"):
            DistributedDataParallel(model()).register_comm_hook(None, pytorchs_own)
    hooks = {
        pytorchs_own if dist.is_nccl_available() else bf16_hook: None,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook): None,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook): powerSGD_hook.PowerSGDState(
            None, start_powerSGD_iter=2
        ),
    }
    train_with(hooks, rank, size)


def check_checkpoint_saved_by_some_and_loaded_by_others(rank, size):
    path = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(path, 0)
    whole = torch.arange(24.0).reshape(12, 2)
    every, pair = init_device_mesh("cpu", (size,)), dist.new_group([0, 1])
    mesh_of_two = torch.distributed.DeviceMesh.from_group(pair, "cpu") if rank < 2 else None
    dcp.save({"x": distribute_tensor(whole, every, [Shard(0)]), "step": 7}, checkpoint_id=path[0])
    if mesh_of_two is not None:  # by two of them, cut along the other dimension
        state = {"x": distribute_tensor(torch.zeros(12, 2), mesh_of_two, [Shard(1)]), "step": 0}
        dcp.load(state, checkpoint_id=path[0], process_group=pair)
        assert torch.equal(state["x"].full_tensor(), whole)
        assert state["step"] == 7
    alone = {"x": torch.zeros(12, 2), "step": 0}
    dcp.load(alone, checkpoint_id=path[0], no_dist=True)
    assert torch.equal(alone["x"], whole)
    dist.barrier()
    if rank == 0:
        assert any(Path(path[0]).iterdir())


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]


def run_schedule(kind, rank, size, per_rank: int, places) -> None:
    """Train a step of a pipeline of size * per_rank stages and compare its gradients with one process's."""
    count = size * per_rank
    own = [index for index in range(count) if places(index) == rank]
    stages = [PipelineStage(layers(count)[i], i, count, torch.device("cpu")) for i in own]
    x = torch.randn(8 * size, 6, generator=torch.Generator().manual_seed(1))
    target = x.flip(-1)
    one_or_many = stages[0] if per_rank == 1 else stages
    schedule = kind(one_or_many, n_microbatches=2 * size, loss_fn=nn.functional.mse_loss)
    losses: list[torch.Tensor] = []
    arguments = (x,) if 0 in own else ()
    options = {"target": target, "losses": losses} if count - 1 in own else {}
    schedule.step(*arguments, **options)
    whole = nn.Sequential(*layers(count))
    loss = nn.functional.mse_loss(whole(x), target)
    loss.backward()
    for index, stage in zip(own, stages, strict=True):
        for a, b in zip(stage.submod.parameters(), whole[index].parameters(), strict=True):
            assert torch.allclose(a.grad, b.grad, atol=1e-6), (kind.__name__, index)
    if losses:
        assert torch.allclose(torch.stack(losses).mean(), loss, atol=1e-6)


def check_pipeline_1f1b(rank, size):
    run_schedule(schedules.Schedule1F1B, rank, size, 1, lambda index: index)


def check_pipeline_interleaved(rank, size):
    run_schedule(schedules.ScheduleInterleaved1F1B, rank, size, 2, lambda index: index % size)


def check_pipeline_zero_bubble(rank, size):
    run_schedule(schedules.ScheduleInterleavedZeroBubble, rank, size, 2, lambda index: index % size)


def check_pipeline_v_zero_bubble(rank, size):
    run_schedule(
        schedules.ScheduleZBVZeroBubble, rank, size, 2, lambda i: i if i < size else 2 * size - 1 - i
    )


def check_sync_batch_norm_is_pytorchs_for_gpus(rank, size):
    net = nn.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="expected input tensor to be on"):
        net(torch.ones(2, 3))


def check_split_group(rank, size):
    if not callable(getattr(dist.distributed_c10d, "_maybe_attach_flight_recorder", None)):
        # before 2.15 PyTorch splits groups of devices only
        with pytest.raises(RuntimeError, match="No device associated"):
            dist.split_group(split_ranks=[[0, 1]])
        return
    half = dist.split_group(split_ranks=[[1, 0]], group_desc="half")
    if rank > 1:
        assert half is dist.GroupMember.NON_GROUP_MEMBER
        return
    x = torch.tensor([rank + 1.0])
    dist.broadcast(x, group=half, group_src=0)
    assert (half.rank(), half.size(), x.item(), half.group_desc) == (1 - rank, 2, 2.0, "half")
    dist.destroy_process_group(half)
