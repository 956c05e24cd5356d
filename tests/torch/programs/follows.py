"""The first of three ranks dies when all have agreed whose store they use. The others go on at once.

Run by suite.py.
"""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono.engine.group
from unisono.engine.backends.torch_store import TorchStore
from unisono.errors import PeerLost
from unisono.torch.process_group import ProcessGroupUnisono
from unisono.torch.reconfiguration import follow

MOST_S = 60.0  # of the group's timeout of 300 s


def main(rank: int, size: int, folder: Path) -> None:
    store = TorchStore(dist.FileStore(str(folder / "store"), size), timeout_s=300)
    group = unisono.engine.group.connect(store, rank, size, name="ranks", timeout_s=300)
    alone = {"rank": 0, "world_size": 1, "store": dist.HashStore(), "timeout": timedelta(seconds=300)}
    dist.init_process_group("unisono", **alone)
    meet = ProcessGroupUnisono._meet

    def late(*given, **named):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        return meet(*given, **named)

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupUnisono, "_meet", late)
        with pytest.raises(PeerLost) as lost:
            follow(group)
    assert lost.value.rank == 0
    following = group.shrink()
    follow(following)
    follow(following)  # it is the present one: nothing happens
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == size - 1
    assert time.monotonic() - began < MOST_S
    dist.destroy_process_group()
    print("fine")
