"""One rank of a job that measures: rank 0 writes what all of them have found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from unisono.torch.control_data import on_rank_0  # also registers the backend

__all__ = ["measure_as_rank"]


def measure_as_rank(measure: Callable[[], Any]) -> None:
    """Measure, and write what comes of it as JSON. The file is the first argument of the command line."""
    dist.init_process_group("unisono")
    try:
        found = measure()
        on_rank_0(lambda: Path(sys.argv[1]).write_bytes(msgspec.json.encode(found)))
    finally:
        dist.destroy_process_group()
