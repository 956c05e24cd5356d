"""What PyTorch's ways to meet lack: RANK under mpiexec and srun; an end where a file is another store's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlparse

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


def before_a_file(free: Callable[[str, float], None]) -> None:
    """Call `free` with the path and the seconds before ranks meet by `file://`. May be called again."""
    handlers = find(HANDLERS)
    if handlers is None or hasattr(handlers["file"], "__wrapped__"):
        return
    original = handlers["file"]

    @functools.wraps(original)
    def meet(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[Any]:
        free(urlparse(url).path, 300.0 if timeout is None else timeout.total_seconds())
        given = {} if timeout is None else {"timeout": timeout}
        yield from original(url, **given, **kwargs)

    handlers["file"] = meet
