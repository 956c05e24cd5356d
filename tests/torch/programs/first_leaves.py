"""Rank 0, whose process has PyTorch's store, ends before rank 1 has deleted the keys of the rendezvous.

Run by test_torch_launch.py, on two ranks, each a fork.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unisono.engine.bootstrap import engine

forget = engine._forget


def forget_late(store: Any, membership: Any, served: Any) -> None:
    first = Path("/proc", str(membership.peers[0].pid))
    while first.exists():
        time.sleep(0.01)
    forget(store, membership, served)


if os.environ["RANK"] == "1":
    engine._forget = forget_late
dist.init_process_group("unisono")
print("fine", dist.get_rank())
