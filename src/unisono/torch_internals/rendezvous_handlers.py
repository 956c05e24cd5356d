"""What PyTorch's ways to meet lack: RANK under mpiexec and srun; an end where a file is another store's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlparse

from .probe import PrivateName, find

HANDLERS = PrivateName(
    "torch.distributed.rendezvous:_rendezvous_handlers",
    purpose="let ranks meet that mpiexec or srun has started, and keep another store's file away",
    without="under mpiexec and srun set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; take a new file",
)

Handler = Callable[[str, float, Callable[[], Iterator[Any]]], Iterator[Any]]
"""The URL, seconds, and PyTorch's own way -> store, rank and number of ranks, in this order."""


def meet_by_launcher(meeting: Callable[[float], tuple[Any, int, int] | None]) -> None:
    """Ask `meeting` where PyTorch misses a variable; None: no launcher is known. May be called again."""

    def meet(_url: str, seconds: float, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        try:
            yield from own()
        except ValueError:
            found = meeting(seconds)
            if found is None:
                raise
            yield found

    _replace("env", meet)


def before_a_file(free: Callable[[str, float], None]) -> None:
    """Call `free` with the path and the seconds before ranks meet by `file://`. May be called again."""

    def meet(url: str, seconds: float, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        free(urlparse(url).path, seconds)
        yield from own()

    _replace("file", meet)


def _replace(scheme: str, meet: Handler) -> None:
    handlers = find(HANDLERS)
    if handlers is None or hasattr(handlers[scheme], "__wrapped__"):
        return
    original = handlers[scheme]

    @functools.wraps(original)
    def handler(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[Any]:
        given = {} if timeout is None else {"timeout": timeout}
        seconds = 300.0 if timeout is None else timeout.total_seconds()
        yield from meet(url, seconds, lambda: original(url, **given, **kwargs))

    handlers[scheme] = handler
