"""More of FSDP: states of optimizers, mixed precision, offloading, methods beside forward."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import optimizer as states_of_optimizers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checks.states import folder
from checks.training import mine, model, single, train

Wrapped = fsdp.FullyShardedDataParallel


def wrapped(*, net: nn.Module | None = None, **options) -> Wrapped:
    return Wrapped(net or model(), device_id=torch.device("cpu"), use_orig_params=True, **options)


def trained(rank: int, size: int, **options) -> tuple[Wrapped, torch.optim.Optimizer]:
    net = wrapped(**options)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    train(net, *mine(rank, size), optimizer=optimizer)
    return net, optimizer


def moments(rank: int, size: int, kind, config, of_optimizer) -> None:
    """Save the optimizer's state in one form, give it to another optimizer, and compare them whole."""
    net, optimizer = trained(rank, size)
    with Wrapped.state_dict_type(net, kind, config, of_optimizer):
        assert type(Wrapped.get_state_dict_type(net).optim_state_dict_config) is type(of_optimizer)
        found = Wrapped.optim_state_dict(net, optimizer)
        again = torch.optim.Adam(net.parameters(), lr=0.01)
        again.load_state_dict(Wrapped.optim_state_dict_to_load(net, again, found))
    one, two = (Wrapped.full_optim_state_dict(net, o, rank0_only=False)["state"] for o in (optimizer, again))
    for name, state in one.items():
        assert torch.equal(state["exp_avg"], two[name]["exp_avg"])


@pytest.mark.filterwarnings("ignore")
def check_full_states_of_an_optimizer(rank, size):
    whole = fsdp.FullOptimStateDictConfig(rank0_only=False)
    moments(rank, size, fsdp.StateDictType.FULL_STATE_DICT, fsdp.FullStateDictConfig(), whole)


@pytest.mark.filterwarnings("ignore")
def check_sharded_states_of_an_optimizer(rank, size):
    of_optimizer = fsdp.ShardedOptimStateDictConfig()
    moments(rank, size, fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(), of_optimizer)


@pytest.mark.filterwarnings("ignore")
def check_local_states(rank, size):
    net = Wrapped(model(), device_id=torch.device("cpu"))
    local, of_optimizer = fsdp.LocalStateDictConfig(), fsdp.LocalOptimStateDictConfig()
    with Wrapped.state_dict_type(net, fsdp.StateDictType.LOCAL_STATE_DICT, local, of_optimizer):
        net.load_state_dict(net.state_dict())


@pytest.mark.filterwarnings("ignore")
def check_states_by_number_instead_of_by_name(rank, size):
    net, optimizer = trained(rank, size)
    by_name = Wrapped.full_optim_state_dict(net, optimizer, rank0_only=False)
    by_number = Wrapped.rekey_optim_state_dict(by_name, fsdp.OptimStateKeyType.PARAM_ID, model())
    plain = model()
    alone = torch.optim.Adam(plain.parameters(), lr=0.01)
    alone.load_state_dict(by_number)
    assert set(by_number["state"]) == set(range(len(list(plain.parameters()))))


@pytest.mark.filterwarnings("ignore")
def check_a_checkpoint_of_a_sharded_optimizer(rank, size):
    # PyTorch wants CUDA of a rank that has no part of a tensor, unless the group is called "gloo".
    path, (net, optimizer) = folder(rank), trained(rank, size, net=nn.Linear(8, 6))
    with Wrapped.state_dict_type(net, fsdp.StateDictType.SHARDED_STATE_DICT):
        saved = {"model": net.state_dict(), "optimizer": Wrapped.optim_state_dict(net, optimizer)}
        dcp.save_state_dict(saved, dcp.FileSystemWriter(path))
        weights = {"model": net.state_dict()}
        dcp.load_state_dict(weights, dcp.FileSystemReader(path))
        loaded = states_of_optimizers.load_sharded_optimizer_state_dict(
            weights["model"], "optimizer", dcp.FileSystemReader(path)
        )["optimizer"]
    assert set(loaded["state"]) == set(saved["optimizer"]["state"])


def check_a_checkpoint_that_is_not_there(rank, size):
    with pytest.raises(dcp.CheckpointException, match="ranks:dict_keys"):
        dcp.load({"x": torch.zeros(1)}, checkpoint_id=f"{folder(rank)}/none")


@pytest.mark.filterwarnings("ignore")
def check_mixed_precision_of_fsdp1(rank, size):
    halves = fsdp.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses = train(wrapped(mixed_precision=halves), *mine(rank, size))
    assert losses[-1] < 2


@pytest.mark.filterwarnings("ignore")
def check_offloading_of_fsdp1(rank, size):
    net = wrapped(cpu_offload=fsdp.CPUOffload(offload_params=False))
    train(net, *mine(rank, size))
    with Wrapped.summon_full_params(net):
        for a, b in zip(net.module.parameters(), single(size).parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


class Two(nn.Module):
    """A method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)

    def twice(self, x):
        return self.inner(self.inner(x))


def check_a_method_beside_forward(rank, size):
    net, plain = Two(), Two()
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    fsdp.register_fsdp_forward_method(net, "twice")
    x = torch.ones(2, 4)
    assert torch.allclose(net.twice(x), plain.twice(x))
    handle = net.unshard(async_op=True)
    assert isinstance(handle, fsdp.UnshardHandle)
    handle.wait()


def check_offloading_of_fsdp2(rank, size):
    net = model()
    policy = fsdp.CPUOffloadPolicy(pin_memory=False)
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (size,)), offload_policy=policy)
    train(net, *mine(rank, size))
    for a, b in zip(net.parameters(), single(size).parameters(), strict=True):
        assert torch.allclose(a.full_tensor(), b, rtol=1e-4, atol=1e-5)


def check_two_modules_that_share_their_streams(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    nets = [fsdp.fully_shard(Two(), mesh=mesh) for _ in range(2)]
    fsdp.share_comm_ctx(nets)
    x = torch.ones(2, 4)
    nets[1](nets[0](x)).sum().backward()
    plain = [Two(), Two()]
    plain[1](plain[0](x)).sum().backward()
    for net, want in zip(nets, plain, strict=True):
        assert torch.allclose(net.inner.weight.grad.full_tensor(), want.inner.weight.grad, atol=1e-5)


def check_parameters_that_are_dtensors_of_the_whole_mesh(rank, size):
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("data", "tensor"))
    net, plain = Two(), Two()
    for name, p in list(net.inner.named_parameters()):
        setattr(net.inner, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), Shard(0)])))
    fsdp.fully_shard(net, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="data"))
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b)
    dist.barrier()
