"""CUDA tensors are passed on to NCCL: which call goes where.

Only the making of NCCL's group is replaced, by one that writes down what it is asked; the tensors are fake
ones "on" cuda:0. What NCCL then does is in test_cuda.py, for machines with a GPU.
"""

from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from unisono.torch import cuda
from unisono.torch.completed_work import DONE
from unisono.torch_internals.version_names import all_gather_single, reduce_scatter_single


class Recorder:
    """Stands for the ProcessGroup over NCCL."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.calls.append(name)
            return "its backend" if name == "_get_backend" else DONE

        return call


@contextmanager
def recording():
    """A group of its own whose NCCL half is a Recorder."""
    recorder, real = Recorder(), cuda.open_nccl
    cuda.open_nccl = lambda store, rank, size, timeout: recorder
    group = dist.new_group()
    try:
        yield group, recorder
    finally:
        cuda.open_nccl = real
        dist.destroy_process_group(group)


def fake(*shape):
    with FakeTensorMode():
        return torch.empty(shape, device="cuda")


def check_every_collective_is_passed_on(rank, size):
    x, many = fake(size), [fake(1) for _ in range(size)]
    with recording() as (group, nccl):
        assert nccl.calls == []  # on first use, not before
        dist.all_reduce(x, group=group)
        group.broadcast([x], dist.BroadcastOptions()).wait()  # dist.broadcast asks CUDA for its version
        dist.reduce(x, 0, group=group)
        dist.all_gather(many, many[0], group=group)
        all_gather_single(x, many[0], group=group)
        dist.gather(many[0], many if rank == 0 else None, 0, group=group)
        dist.scatter(many[0], many if rank == 0 else None, 0, group=group)
        dist.reduce_scatter(many[0], many, group=group)
        reduce_scatter_single(many[0], x, group=group)
        dist.all_to_all(many, many, group=group)
        dist.all_to_all_single(x, x, group=group)
        dist.send(x, (rank + 1) % size, group=group)
        dist.recv(x, (rank - 1) % size, group=group)
        group.barrier(dist.BarrierOptions()).wait()  # of the CPU: not passed on
        options = dist.BarrierOptions()
        options.device = torch.device("cuda", 0)
        group.barrier(options).wait()
        new = {"allgather_base": "all_gather_single", "reduce_scatter_base": "reduce_scatter_single"}
        new["alltoall_base"] = "all_to_all_single"
        names = [name.strip("_") for name in nccl.calls]
        assert [new.get(name, name) for name in names] == [
            "allreduce", "broadcast", "reduce", "allgather", "all_gather_single", "gather", "scatter",
            "reduce_scatter", "reduce_scatter_single", "alltoall", "all_to_all_single", "send", "recv",
            "barrier",
        ]  # fmt: skip


def check_both_halves_of_one_group(rank, size):
    with recording() as (group, nccl):
        dist.all_reduce(y := torch.ones(1), group=group)
        assert y.item() == size
        assert nccl.calls == []
        dist.all_reduce(fake(2), group=group)
        dist.all_reduce(y, group=group)
        assert nccl.calls == ["allreduce"]
        assert group._get_backend("cuda:0") == "its backend"
        assert group._get_backend("cpu") is group
        with pytest.raises(ValueError, match="of one device"):
            dist.all_gather([torch.ones(1)] * (size - 1) + [fake(1)], torch.ones(1), group=group)


def check_without_cuda_the_error_says_what_is_missing(rank, size):
    if not cuda.why_not():
        return
    group = dist.group.WORLD
    assert group._device_types == [torch.device("cpu")]
    for call in (
        lambda: dist.all_reduce(fake(2)),
        lambda: dist.reduce(fake(2), 0),
        lambda: group._get_backend(torch.device("cuda")),
    ):
        with pytest.raises(
            RuntimeError, match="passed on to NCCL, which cannot be had: .*(built|is_available)"
        ):
            call()
    with pytest.raises(RuntimeError, match="no backend for device xpu"):
        group._get_backend("xpu")
    group.set_timeout(timedelta(seconds=300))
