"""The last rank ends early, or worse; the others write down what they saw. Run by suite.py.

Each function is one way to fail: `how(last, folder)`, where `last` says that this is the rank that fails.
"""

import contextlib
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import unisono.torch  # noqa: F401
from unisono.errors import PeerLost


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def loop(last: bool, folder: Path) -> None:
    """Synchronous calls."""
    for step in range(1_000_000):
        if last and step == 50:
            die()
        dist.all_reduce(torch.ones(1000))


def works(last: bool, folder: Path) -> None:
    """Asynchronous calls, one of which the last rank does not make."""
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    if last:
        die()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    with contextlib.suppress(PeerLost):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), PeerLost)
    work.wait()  # raises it again


def unwaited(last: bool, folder: Path) -> None:
    """An asynchronous call fails and nobody waits for it; the next call, of whatever kind, tells."""
    dist.barrier()
    if last:
        die()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    del work
    dist.broadcast(torch.ones(10), 0)


def future(last: bool, folder: Path) -> None:
    """A future of a work that fails."""
    dist.barrier()
    if last:
        die()
    dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()


def train(net: nn.Module, last: bool) -> None:
    for step in range(1_000_000):
        if last and step == 5:
            die()
        net(torch.ones(2, 100, requires_grad=True)).sum().backward()


def ddp(last: bool, folder: Path) -> None:
    """In the middle of training."""
    train(DistributedDataParallel(nn.Linear(100, 100)), last)


def ddp_fp16(last: bool, folder: Path) -> None:
    """In the middle of training, with the hook that PyTorch has in C++."""
    net = DistributedDataParallel(nn.Linear(100, 100))
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(net, last)


def ddp_hook(last: bool, folder: Path) -> None:
    """In the middle of training, with a hook that PyTorch has in Python."""
    net = DistributedDataParallel(nn.Linear(100, 100))
    net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(net, last)


def ddp_own_hook(last: bool, folder: Path) -> None:
    """In the middle of training, with a hook of the user's."""
    net = DistributedDataParallel(nn.Linear(100, 100))

    def hook(state, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    net.register_comm_hook(None, hook)
    train(net, last)


def ddp_checkpoint(last: bool, folder: Path) -> None:
    """In the middle of training, with a backward pass within another."""
    train(DistributedDataParallel(Checkpointed(), static_graph=True), last)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(100, 100), nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=True))


def never(last: bool, folder: Path) -> None:
    """The last rank is alive and does not call."""
    dist.barrier()
    if last:
        while not (folder / "seen0").exists():
            time.sleep(0.01)
        os._exit(0)
    dist.group.WORLD.set_timeout(timedelta(seconds=3))
    work = dist.all_reduce(torch.ones(10), async_op=True)
    try:
        work.wait(timedelta(seconds=0.1))
    except TimeoutError:
        assert not work.is_completed()  # it goes on
    work.wait()


def mismatch(last: bool, folder: Path) -> None:
    """The last rank brings another size."""
    dist.all_reduce(torch.ones(10 + last))


def new_group_dead(last: bool, folder: Path) -> None:
    """The last rank dies in place of making a group."""
    dist.barrier()
    if last:
        die()
    dist.new_group(timeout=timedelta(hours=1))


def new_group_left(last: bool, folder: Path) -> None:
    """The last rank has left the world."""
    dist.barrier()
    if last:
        return
    dist.new_group(timeout=timedelta(hours=1))


def new_group_aborted(last: bool, folder: Path) -> None:
    """The world is aborted before, and the last rank gone."""
    dist.barrier()
    if last:
        return
    with contextlib.suppress(PeerLost):
        dist.barrier()
    dist.new_group([1, 0], timeout=timedelta(hours=1))


def split_left(last: bool, folder: Path) -> None:
    """The last rank has left the group that the others split."""
    dist.barrier()
    if last:
        return
    dist.group.WORLD.split_group([0, 1, 2], timeout=timedelta(hours=1))


def closed(last: bool, folder: Path) -> None:
    """A call after destroy_process_group."""
    group = dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    group.allreduce([torch.ones(1)]).wait()


def main(rank: int, size: int, folder: Path, how: str) -> None:
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "unisono", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300)
    )
    began = time.monotonic()
    seen = {"type": "nothing"}
    try:
        globals()[how](rank == size - 1, folder)
    except Exception as error:
        seen = {"type": type(error).__name__, "text": str(error), "rank": getattr(error, "rank", None)}
    seen["seconds"] = time.monotonic() - began
    path = folder / f"seen{rank}"
    path.with_suffix(".part").write_text(json.dumps(seen))
    path.with_suffix(".part").rename(path)
    if dist.is_initialized():
        dist.destroy_process_group()  # always works
