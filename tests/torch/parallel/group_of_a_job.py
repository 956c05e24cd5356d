"""The process group of the ranks of a job of `suite.Forks`: they meet in a file of the job's folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import unisono.torch  # noqa: F401


@contextmanager
def process_group(rank: int, size: int, folder: Path, limit_s: float = 150) -> Iterator[None]:
    """A group, and one thread for each operator. What raises leaves the group as it is."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("unisono", store=store, rank=rank, world_size=size, timeout=limit)
    yield
    dist.destroy_process_group()
