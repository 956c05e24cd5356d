"""DDP's communication hooks, model averaging, and optimizers that talk."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, as_functional_optim
from torch.nn.parallel import DistributedDataParallel

from checks.training import STEPS, assert_close, assert_same_everywhere, mine, model, single, train


def check_built_in_hooks(rank, size):
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        net = model()
        ddp = DistributedDataParallel(net, bucket_cap_mb=0.001)
        ddp._register_builtin_comm_hook(kind)
        train(ddp, *mine(rank, size))
        assert_same_everywhere(net)
        for a, b in zip(net.parameters(), single(size).parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-2, atol=1e-2)


def check_a_hook_by_its_type(rank, size):
    net = model()
    ddp = DistributedDataParallel(net)
    register_ddp_comm_hook(DDPCommHookType.ALLREDUCE, ddp, state=None)
    train(ddp, *mine(rank, size))
    assert_close(net, single(size))


def check_no_communication_at_all(rank, size):
    net = model()
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    train(ddp, *mine(rank, size))
    alone = model()
    train(alone, *mine(rank, size))
    assert_close(net, alone)


def check_post_local_sgd(rank, size):
    net = model()
    ddp = DistributedDataParallel(net)
    alone = dist.new_subgroups(group_size=1)[0]
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), averager)
    train(ddp, *mine(rank, size), optimizer=optimizer)
    averager.average_parameters(list(net.parameters()))
    assert all(torch.isfinite(p).all() for p in net.parameters())


def check_model_averaging(rank, size):
    net = model()
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(float(rank))
            p.grad = torch.zeros_like(p)  # PyTorch averages what has a gradient
    averagers.PeriodicModelAverager(period=1).average_parameters(list(net.parameters()))
    assert all(torch.allclose(p, torch.full_like(p, (size - 1) / 2)) for p in net.parameters())
    if size == 2:  # periods of groups of 2
        by_level = {1: 2}
        averager = hierarchical_model_averager.HierarchicalModelAverager(by_level)
        averager.average_parameters(list(net.parameters()))
        assert_same_everywhere(net)


def check_zero_optimizer_within_the_hook(rank, size):
    for with_zero in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        net = model()
        ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        hook = with_zero(default_hooks.allreduce_hook, ddp, optimizer)
        ddp.register_comm_hook(None, hook)
        train(ddp, *mine(rank, size), optimizer=optimizer)
        assert_same_everywhere(net)


def check_an_optimizer_that_steps_in_the_hook(rank, size):
    net = model()
    ddp = DistributedDataParallel(net)
    state = optimizer_overlap_hooks._OptimizerHookState(
        as_functional_optim(torch.optim.SGD, lr=0.1), net.parameters()
    )
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)
    ddp.register_comm_hook(None, hook)
    x, y = mine(rank, size)
    for step in range(STEPS):
        ddp.zero_grad()
        torch.nn.functional.mse_loss(ddp(x[step]), y[step]).backward()
    assert_close(net, single(size))


def check_copies_of_a_model_are_independent(rank, size):
    net = model()
    one, other = DistributedDataParallel(net), DistributedDataParallel(copy.deepcopy(net))
    train(one, *mine(rank, size))
    assert_close(other.module, model())
