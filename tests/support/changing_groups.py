"""Groups that change, with ranks that are threads: what they must still do, and newcomers."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

import ranks
import unisono as un
from effort import HANG_S


def check(group: un.Group) -> None:
    """Every kind of operation, with known results."""
    x = np.arange(1000) + group.rank
    group.all_reduce(x)
    assert (x == np.arange(1000) * group.size + sum(range(group.size))).all()
    large = np.full(300_000, float(group.rank))
    group.all_reduce(large)
    assert (large == sum(range(group.size))).all()
    assert group.all_gather_object(group.rank) == list(range(group.size))
    got = np.empty(3)
    group.sendrecv(np.full(3, float(group.rank)), (group.rank + 1) % group.size, got)
    assert (got == (group.rank - 1) % group.size).all()


def on(size: int, per_host: int, work: Callable[[un.Group], Any], **options: Any) -> list[Any]:
    """Run `work` on ranks that have a membership."""
    return ranks.threads(size, work, per_host=per_host, **options)


def with_newcomer(
    size: int,
    per_host: int,
    work: Callable[[un.Group, "Future[Any]"], Any],
    come: Callable[[list[str]], Any],
    *host: str,
) -> Any:
    """Run `work(group, came)` on ranks that listen, and `come(addresses)` beside; what that has returned.

    came: its future. host: where the ranks listen.
    """
    addresses: list[str] = []
    listening = threading.Event()

    def comes() -> Any:
        listening.wait(HANG_S)
        return come(addresses)

    def listens(group: un.Group) -> None:
        found = group.listen(*host)
        if group.rank == 0:
            addresses.extend(found)
            listening.set()
        work(group, came)

    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(comes)
        on(size, per_host, listens)
        return came.result(HANG_S)
