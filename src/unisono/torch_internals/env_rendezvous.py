"""PyTorch's `env://`: it reads RANK only, which mpiexec and srun do not set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from .probe import PrivateName, find

HANDLERS = PrivateName(
    "torch.distributed.rendezvous:_rendezvous_handlers",
    purpose="let ranks meet that mpiexec or srun has started without RANK",
    without="under mpiexec and srun set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
)

Meeting = Callable[[float], tuple[Any, int, int] | None]
"""Seconds -> store, rank and number of ranks; None: no launcher is known."""


def meet_by_launcher(meeting: Meeting) -> None:
    """Ask `meeting` where PyTorch misses a variable. May be called again."""
    handlers = find(HANDLERS)
    if handlers is None or hasattr(handlers["env"], "__wrapped__"):
        return
    original = handlers["env"]

    @functools.wraps(original)
    def meet(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[Any]:
        given = {} if timeout is None else {"timeout": timeout}
        try:
            yield from original(url, **given, **kwargs)
        except ValueError:
            found = meeting(300.0 if timeout is None else timeout.total_seconds())
            if found is None:
                raise
            yield found

    handlers["env"] = meet
