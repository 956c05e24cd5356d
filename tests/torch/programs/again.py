"""Groups made and destroyed again and again in one process. Run by suite.py."""

import os
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import unisono.torch  # noqa: F401


def use(size: int) -> None:
    """Use the group in every way that starts a thread or opens a descriptor, then destroy it."""
    x = torch.ones(100)
    dist.all_reduce(x)
    future = dist.all_reduce(x, async_op=True).get_future()
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    assert future.wait()[0][0] == size * size
    dist.destroy_process_group()


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def main(rank: int, size: int, folder: Path) -> None:
    ours = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=300)}
    store = dist.FileStore(str(folder / "store"), size)
    counts = []
    for _ in range(4):  # the same store, hence the same keys
        dist.init_process_group("unisono", store=store, **ours)
        use(size)
        counts.append(held())
    assert len(set(counts[1:])) == 1, counts
    for name in ("a", "b"):  # a new address each time
        dist.init_process_group("unisono", init_method=f"file://{folder / name}", **ours)
        use(size)
    print("fine")
