"""What the programs of this folder share: a line of rank 0, and a value of all ranks."""

import os
from typing import Any

import torch.distributed as dist


def say(*words: Any) -> None:
    """Print a line on rank 0: the table of capabilities.py has it."""
    if os.environ.get("RANK", "0") == "0":
        print(*words, flush=True)


def of_all(value: Any) -> list[Any]:
    """The value of each rank of the default group of torch.distributed."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def refusal(call: Any, *errors: type[BaseException]) -> str:
    """The first line of the error that the call must raise."""
    try:
        call()
    except errors as error:
        return str(error).partition("\n")[0]
    raise AssertionError("it was not refused")
