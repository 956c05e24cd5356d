"""Ranks as threads that meet through `rendezvous`."""

import threading
import time
from collections.abc import Callable
from typing import Any

from effort import HANG_S, judge_time
from unisono.engine.bootstrap.rendezvous import Rendezvous, rendezvous
from unisono.engine.environment import env

NOTHING = env.Settings()


def meet(method: str | None = None, **changed: Any) -> Rendezvous:
    arguments: dict[str, Any] = {
        "store": None,
        "rank": -1,
        "world_size": -1,
        "timeout_s": HANG_S,
        "settings": NOTHING,
    }
    return rendezvous(method, **{**arguments, **changed})


def together(*ranks: Callable[[], Any]) -> list[Any]:
    """Run each of `ranks` in a thread of its own; return what each returned or raised."""
    results: list[Any] = [None] * len(ranks)

    def run(index: int) -> None:
        try:
            results[index] = ranks[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def closed_together(worlds: list[Rendezvous]) -> None:
    start = time.monotonic()
    results = together(*[world.close for world in worlds])
    assert results == [None] * len(worlds)
    judge_time(time.monotonic() - start, 4)


def env_of(port: int, rank: int, world_size: int, **more: str) -> env.Settings:
    named = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    return env.read({**named, **more})
