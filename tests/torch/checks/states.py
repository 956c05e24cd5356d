"""What is saved: state dicts of FSDP1, FSDP2 and DDP, checkpoints in the background, offloading."""

import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from checks.training import assert_close, assert_same_everywhere, mine, model, single, train


def folder(rank: int) -> str:
    path = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(path, 0)
    return path[0]


def sharded(size: int, **options) -> torch.nn.Module:
    net = model()
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (size,)), **options)
    return net


def check_state_dicts_of_fsdp2(rank, size):
    net = sharded(size)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    train(net, *mine(rank, size), optimizer=optimizer)
    whole = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = states.get_state_dict(net, optimizer, options=whole)
    again = sharded(size)
    other = torch.optim.Adam(again.parameters(), lr=0.01)
    everybody = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(again, weights, options=everybody)
    states.set_optimizer_state_dict(again, other, moments, options=everybody)
    for a, b in zip(again.parameters(), net.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    one, two = (states.get_optimizer_state_dict(n, o)["state"] for n, o in ((net, optimizer), (again, other)))
    for name, moment in one.items():
        assert torch.equal(moment["exp_avg"].full_tensor(), two[name]["exp_avg"].full_tensor())


def check_checkpoint_in_the_background(rank, size):
    path, net = folder(rank), sharded(size)
    saved = {name: p.full_tensor().clone() for name, p in net.state_dict().items()}
    both = dist.new_group(backend="unisono")  # the thread that writes talks in a group of its own
    dcp.async_save(states.get_model_state_dict(net), checkpoint_id=path, process_group=both).result()
    train(net, *mine(rank, size))
    found = states.get_model_state_dict(net)
    dcp.load(found, checkpoint_id=path)
    states.set_model_state_dict(net, found)
    assert all(torch.equal(p.full_tensor(), saved[name]) for name, p in net.state_dict().items())


def check_mixed_precision_and_hooks_of_fsdp2(rank, size):
    precise = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = sharded(size, mp_policy=precise)
    losses = train(net, *mine(rank, size))
    assert losses[-1] == pytest.approx(single_losses(size)[-1], rel=0.2)
    handle = net.unshard(async_op=True)
    handle.wait()
    net.reshard()


def single_losses(size: int) -> list[float]:
    from checks.training import data

    return train(model(), *data(size))


def check_hybrid_sharding(rank, size):
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("copies", "shards"))
    net = model()
    fsdp.fully_shard(net, mesh=mesh)
    train(net, *mine(rank, size))
    for a, b in zip(net.parameters(), single(size).parameters(), strict=True):
        assert torch.allclose(a.full_tensor(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def check_strategies_of_fsdp1(rank, size):
    cpu = torch.device("cpu")
    for strategy in (fsdp.ShardingStrategy.SHARD_GRAD_OP, fsdp.ShardingStrategy.NO_SHARD):
        net = fsdp.FullyShardedDataParallel(
            model(), device_id=cpu, use_orig_params=True, sharding_strategy=strategy
        )
        train(net, *mine(rank, size))
        with fsdp.FullyShardedDataParallel.summon_full_params(net):
            assert_close(net.module, single(size))


@pytest.mark.filterwarnings("ignore")
def check_state_dicts_of_fsdp1(rank, size):
    wrapped = fsdp.FullyShardedDataParallel
    net = wrapped(model(), device_id=torch.device("cpu"), use_orig_params=True)
    train(net, *mine(rank, size))
    whole = fsdp.FullStateDictConfig(rank0_only=False)
    with wrapped.state_dict_type(net, fsdp.StateDictType.FULL_STATE_DICT, whole):
        weights = net.state_dict()
    for name, p in single(size).state_dict().items():
        assert torch.allclose(weights[name], p, rtol=1e-4, atol=1e-5)
    with wrapped.state_dict_type(net, fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig()):
        net.load_state_dict(net.state_dict())
    flat = wrapped(model(), device_id=torch.device("cpu"))
    with wrapped.state_dict_type(flat, fsdp.StateDictType.LOCAL_STATE_DICT, fsdp.LocalStateDictConfig()):
        flat.load_state_dict(flat.state_dict())


def check_state_dict_of_ddp_by_one_call(rank, size):
    net = DistributedDataParallel(model())
    train(net, *mine(rank, size))
    again = DistributedDataParallel(model())
    states.set_state_dict(again, [], model_state_dict=states.get_model_state_dict(net), optim_state_dict={})
    assert_close(again.module, net.module)
    assert_same_everywhere(again.module)
