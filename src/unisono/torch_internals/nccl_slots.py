"""Where PyTorch keeps NCCL, so that something else takes its place."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .probe import PrivateName, find, need

__all__ = ["NAMES", "replace_nccl"]

HIGH, LOW = "torch.distributed.distributed_c10d", "torch._C._distributed_c10d"
PLACES = (HIGH, "torch.distributed", LOW)

NAMES = {
    "module": PrivateName(
        LOW, purpose="put a stand-in for NCCL in its place", without="virtual GPUs cannot run"
    ),
    "nccl2": PrivateName(
        HIGH + ":_create_nccl2_process_group",
        purpose="put the stand-in for NCCL in the place of ProcessGroupNCCL2, too",
        without="nothing: there is none",
        since="2.14",
    ),
}


def replace_nccl(stand_in: Any, *, timeout: timedelta, hash_tensors: Callable[..., int]) -> None:
    """Put a class in the place of PyTorch's NCCL.

    timeout: NCCL's default. hash_tensors: a number of the contents of tensors, which PyTorch logs.
    """
    low: Any = need(NAMES["module"])
    high: Any = importlib.import_module(HIGH)
    newer = ("ProcessGroupNCCL2", "ProcessGroupNCCLLazy") if find(NAMES["nccl2"]) is not None else ()
    for module in map(importlib.import_module, PLACES):
        for name in ("ProcessGroupNCCL", *newer):
            setattr(module, name, stand_in)
    low._hash_tensors = hash_tensors
    high._NCCL_AVAILABLE = True
    high.default_pg_nccl_timeout = low._DEFAULT_PG_NCCL_TIMEOUT = timeout
