"""Ranks that `dist.shrink_group` takes out of a group, and what the others do then. Run by suite.py.

Each function is one scenario, `how(rank, size, ...)`. A rank that is done prints "fine".
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import SHRINK_ABORT

import unisono.torch as ut
from programs.every_call import check
from unisono.errors import Aborted, Evicted, GroupError, PeerLost, UnisonoError
from unisono.torch.process_group import ProcessGroupUnisono
from unisono.torch_internals.hooks import have_hooks

TIMEOUT = timedelta(seconds=300)


def store(rank: int, folder: Path) -> dist.TCPStore:
    """A store that ends with rank 0."""
    port = folder / "port"
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "part").write_text(str(served.port))
        (folder / "part").rename(port)
        return served
    while not port.exists():
        time.sleep(0.001)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(group: dist.ProcessGroup | None = None) -> PeerLost:
    """Call until the loss of a rank is found."""
    with pytest.raises(PeerLost) as found:
        for _ in range(1_000_000):
            dist.all_reduce(torch.ones(1000), group=group)
    return found.value


def check_world(size: int, rank: int) -> None:
    """The shrunk world, and groups made in it."""
    world = dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert world.group_desc == "default:shrunken"
    assert isinstance(world, ProcessGroupUnisono), world
    check(world, list(range(size)))
    ranks = [0, size - 1] if size > 1 else [0]
    for part in (dist.new_group(ranks), dist.new_group()):
        if part is not dist.GroupMember.NON_GROUP_MEMBER:
            check(part, ranks if part.size() == len(ranks) else list(range(size)))
    dist.barrier()


def by_will(rank: int, size: int) -> None:
    """A healthy group without rank 1; its subgroups end."""
    part = dist.new_group([0, 2])
    timeout = dist.group.WORLD.options._timeout
    dist.barrier()
    if rank == 1:
        with pytest.raises((Evicted, Aborted)) as told:  # Aborted: the others' call took more than a second
            dist.all_reduce(torch.ones(1))
        while isinstance(told.value, Aborted):
            with pytest.raises((Evicted, Aborted)) as told:
                dist.all_reduce(torch.ones(1))
        assert "excluded" in str(told.value)
        with pytest.raises(RuntimeError, match="should not call"):
            dist.shrink_group([1])
        dist.destroy_process_group()
        return
    old = dist.group.WORLD
    made = dist.shrink_group([1])
    assert made is dist.group.WORLD
    assert made.options._timeout == timeout
    with pytest.raises(RuntimeError):
        old.allreduce([torch.ones(1)]).wait()
    if rank in (0, 2):
        with pytest.raises(RuntimeError):
            part.allreduce([torch.ones(1)]).wait()
    check_world(size - 1, rank - (rank > 1))


def twice(rank: int, size: int) -> None:
    """Rank 0, with the job's store, goes; then again the rank 0 of those that are left; then all but one."""
    dist.barrier()
    for gone in range(size - 1):
        if rank == gone:
            time.sleep(0.2 * gone)
            return
        options = Backend.Options("unisono", timedelta(seconds=309 + gone))
        dist.shrink_group([0], pg_options=options)
        assert dist.group.WORLD.options._timeout == timedelta(seconds=309 + gone)
        check_world(size - 1 - gone, rank - 1 - gone)


def destroyed_first(rank: int, size: int) -> None:
    """The excluded ranks leave in order, before the others shrink."""
    dist.all_reduce(torch.ones(1))
    if rank in (0, 2):
        dist.destroy_process_group()
        return
    time.sleep(0.3)
    dist.shrink_group([0, 2])
    check_world(size - 2, (rank - 1) // 2)


def killed(rank: int, size: int) -> None:
    """Rank 0, which also serves the store, dies in the middle of a call; later another one."""
    lost = [0, 1]
    for number in range(2):
        if dist.get_rank() == lost[number]:
            threading.Timer(0.05, die).start()
        error = fail()
        assert error.rank == lost[number], error
        with pytest.raises(RuntimeError, match="SHRINK_ABORT on every rank"):
            dist.shrink_group([lost[number]])
        before = dist.get_rank()
        dist.shrink_group([lost[number]], shrink_flags=SHRINK_ABORT)
        check_world(size - 1 - number, before - (before > lost[number]))


def killed_unnoticed(rank: int, size: int) -> None:
    """A rank dies while nobody calls it."""
    dist.barrier()
    if rank == 2:
        die()
    time.sleep(0.3)
    dist.shrink_group([2])
    check_world(size - 1, rank - (rank > 2))


def pending(rank: int, size: int) -> None:
    """Calls under way end with an error, in every thread that waits for them."""
    last = size - 1
    dist.barrier()
    if rank == last:
        time.sleep(1)  # it computes
        with pytest.raises(GroupError):
            dist.all_reduce(torch.ones(1))
        return
    x = torch.ones(1_000_000)
    works = [
        dist.all_reduce(x, async_op=True),
        dist.irecv(torch.ones(1), last),
        dist.all_reduce(torch.ones(1), async_op=True),
    ]
    future = works[2].get_future()
    found: list[BaseException] = []

    def wait() -> None:
        try:
            works[0].wait()
        except UnisonoError as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    with pytest.raises(RuntimeError, match="calls under way: 3"):
        dist.shrink_group([last])
    assert not works[0].is_completed()
    keys = dist.distributed_c10d._get_default_store()
    keys.set(f"refused/{rank}", "")
    keys.wait([f"refused/{each}" for each in range(last)])
    dist.shrink_group([last], shrink_flags=SHRINK_ABORT)
    thread.join(300)
    assert found
    for work in works:
        assert work.is_completed()
        with pytest.raises(UnisonoError):
            work.wait()
    with pytest.raises(RuntimeError):
        future.wait()
    check_world(size - 1, rank)


def subgroup(rank: int, size: int) -> None:
    """A subgroup loses its rank 0; the world stays as it is."""
    part = dist.new_group([1, 2, 3])
    dist.barrier()
    if rank > 1:
        name = part.group_name
        part = dist.shrink_group([0], group=part)
        assert part.group_desc == f"{name}:shrunk"
        check(part, [2, 3])
    dist.barrier()
    check(dist.group.WORLD, list(range(size)))
    if rank == 1:
        with pytest.raises(Evicted):
            part.allreduce([torch.ones(1)]).wait()
        return
    if rank == 2:
        alone = dist.shrink_group([1], group=part)
        check(alone, [2])
        dist.destroy_process_group(alone)
    if rank == 3:
        time.sleep(0.2)


def subgroup_killed(rank: int, size: int) -> None:
    """A rank dies: its subgroup shrinks, and then the world."""
    part = dist.new_group([1, 2, 3])
    dist.barrier()
    if rank == 1:
        die()
    if rank > 1:
        assert fail(part).rank == 0
        part = dist.shrink_group([0], group=part, shrink_flags=SHRINK_ABORT)
        check(part, [2, 3])
    fail()
    dist.shrink_group([1], shrink_flags=SHRINK_ABORT)
    check_world(size - 1, rank - (rank > 1))


def disagree(rank: int, size: int) -> None:
    """Lists that differ are an error on all ranks, and the group goes on."""
    dist.barrier()
    told: dist.Store = dist.distributed_c10d._get_default_store()
    if rank != 3:
        with pytest.raises(ValueError, match="disagree"):
            dist.shrink_group([3] if rank else [3, 2])
        told.add("told", 1)
    while told.add("told", 0) < 3:  # to wait in another call for a rank that is in this one ends the group
        time.sleep(0.01)
    dist.all_reduce(torch.ones(1))
    if rank != 3:
        dist.shrink_group([3])
        check_world(size - 1, rank)


def further(rank: int, size: int) -> None:
    """A rank that nobody has excluded is lost, too: all say so, and can call again."""
    dist.barrier()
    if rank == 1:
        die()
    if rank == 2:
        time.sleep(0.2)
        die()
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 2 .*is lost, too") as found:
            dist.shrink_group([1], shrink_flags=SHRINK_ABORT)
        assert found.value.rank == 2
    assert dist.get_world_size() == size
    with pytest.raises(RuntimeError):  # not with half of its ranks
        dist.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="disagree"):
        dist.shrink_group([1, 2] if rank else [1])
    dist.shrink_group([1, 2], shrink_flags=SHRINK_ABORT)
    check_world(size - 2, rank // 3)


def during(rank: int, size: int, seed: str) -> None:
    """A rank dies at any moment of the call: some may have the group that still has it, others may not."""
    dist.barrier()
    if rank == 1:
        return
    if rank == 2:
        threading.Timer(random.Random(seed).random() * 0.03, die).start()
    excluded = [1]
    while dist.get_world_size() > 2:
        try:
            dist.shrink_group(excluded, shrink_flags=SHRINK_ABORT)
            excluded = []
            while dist.get_world_size() > 2:
                dist.all_reduce(torch.ones(1000))
        except PeerLost as error:
            excluded = [*excluded, error.rank]
    check_world(2, rank // 3)


def store_ends(rank: int, size: int) -> None:
    """Rank 2 dies when it has agreed. Rank 0 finds that and ends its store before rank 3 connects."""
    dist.barrier()
    if rank == 1:
        return
    connect, before = ProcessGroupUnisono._store_at, {0: list, 2: die, 3: lambda: time.sleep(1)}[rank]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PeerLost, match="rank 2 .*is lost, too"):
        patch.setattr(ProcessGroupUnisono, "_store_at", lambda *at, **more: before() or connect(*at, **more))
        dist.shrink_group([1], shrink_flags=SHRINK_ABORT)
    dist.shrink_group([1, 2], shrink_flags=SHRINK_ABORT)
    check_world(2, rank // 3)


def hooked(rank: int, size: int) -> None:
    """Hooks of the group end with it; the new one takes others."""
    if not have_hooks():
        return
    before, aborts, after = [], [], []
    old = dist.group.WORLD
    old.register_pre_hook(0, lambda given: before.append(given.name))
    old.register_abort_hook(0, lambda: aborts.append(rank))
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        return
    made = dist.shrink_group([1], shrink_flags=SHRINK_ABORT)
    seen = len(before)
    assert seen
    assert aborts == [rank]
    check_world(size - 1, rank - (rank > 1))
    assert len(before) == seen
    made.register_pre_hook(0, lambda given: after.append(given.name))
    check_world(size - 1, rank - (rank > 1))
    assert after


def ends_at_once(rank: int, size: int) -> None:
    """The ranks do nothing with the shrunk group."""
    dist.barrier()
    if rank:
        dist.shrink_group([0])


def wrong(rank: int, size: int) -> None:
    """Wrong arguments, of PyTorch's function and of the method behind it."""
    group = dist.group.WORLD
    for given in ([], [0, 0], [size], [-1]):
        with pytest.raises(ValueError):
            dist.shrink_group(given)
        with pytest.raises(ValueError):
            group.shrink(given)
    with pytest.raises(ValueError):
        group.shrink([rank])
    for given in (1, None, ["1"], [1.5]):
        with pytest.raises(TypeError):
            dist.shrink_group(given)
        with pytest.raises(TypeError):
            group.shrink(given)
    other = [(rank + 1) % size]
    for flags in (2, -1):
        with pytest.raises(ValueError):
            dist.shrink_group(other, shrink_flags=flags)
        with pytest.raises(ValueError):
            group.shrink(other, flags)
    with pytest.raises(TypeError, match="Options"):
        dist.shrink_group(other, pg_options=5)
    check(group, list(range(size)))
    dist.destroy_process_group()
    with pytest.raises(UnisonoError):
        group.shrink(other)
    with pytest.raises(UnisonoError):
        group.shrink(other, SHRINK_ABORT)


def reconfigured(rank: int, size: int) -> None:
    """A shrunk group is reconfigured, and a reconfigured one shrunk."""
    handles: list[str] = [""] * size
    dist.all_gather_object(handles, ut.get_reconfigure_handle())
    ut.reconfigure(1, handles).wait()
    if rank == 1:
        time.sleep(0.5)
        return
    dist.shrink_group([1])
    check_world(size - 1, rank - (rank > 1))
    handles = [""] * (size - 1)
    dist.all_gather_object(handles, ut.get_reconfigure_handle())
    ut.reconfigure(2, handles[::-1]).wait()
    assert dist.get_rank() == size - 2 - (rank - (rank > 1))
    check(dist.group.WORLD, list(range(size - 1)))
    dist.barrier()


def run(way: str, *more: str) -> None:
    how: Callable[..., None] = globals()[way]
    how(dist.get_rank(), dist.get_world_size(), *more)
    if dist.is_initialized():
        dist.destroy_process_group()
    print("fine")


def main(rank: int, size: int, folder: Path, way: str, backend: str = "unisono", *more: str) -> None:
    if backend == "gloo":
        os.environ["UNISONO_REPLACE"] = "gloo"
        ut._register()
    place = {"rank": rank, "world_size": size, "store": store(rank, folder)}
    dist.init_process_group(backend, timeout=TIMEOUT, **place)
    run(way, *more)


if __name__ == "__main__":
    dist.init_process_group("unisono", timeout=TIMEOUT)
    run(*sys.argv[1:])
