"""Collective communication for Python, between the processes of one machine.

    import numpy as np, unisono as un
    with un.init_process_group() as world:      # env://, as `unisono run -n 4 script.py` sets it
        x = np.ones(4, np.float32)
        world.all_reduce(x)

Names are loaded on first use, so that importing the package, as the launcher does, is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "unisono.codecs.low_rank": ("LowRank",),
    "unisono.engine.memory.arrays": ("empty",),
    "unisono.engine.group": (
        "ANY_TAG",
        "Departure",
        "Group",
        "RecvFrom",
        "SendTo",
        "Status",
        "Work",
        "init_process_group",
        "wait_all",
        "wait_any",
    ),
    "unisono.engine.group.elastic_loop": ("elastic", "join"),
    "unisono.engine.backends": ("is_available",),
    "unisono.engine.environment.event_log": ("log",),
    "unisono.engine.operations.functions": ("MAXLOC", "MINLOC", "op"),
    "unisono.engine.operations.reduction": ("ReduceOp", "premul_sum"),
    "unisono.engine.publishing.pieces": ("Piece",),
    "unisono.engine.publishing.publication": ("Publication", "publish"),
    "unisono.engine.publishing.subscription": ("Subscription", "subscribe"),
    "unisono.engine.store": ("FileStore", "HashStore", "PrefixStore", "Store", "StoreServer", "TCPStore"),
    "unisono.engine.windows.queue": ("Queue",),
    "unisono.engine.windows.window": ("Window",),
    "unisono.planner": ("plan",),
    "unisono.simulation": ("simulate",),
    "unisono.errors": (
        "Aborted",
        "AuthenticationError",
        "Evicted",
        "GroupClosed",
        "GroupError",
        "LaunchError",
        "Mismatch",
        "NotSupported",
        "PeerLost",
        "PlanError",
        "RendezvousError",
        "SimulationError",
        "StoreError",
        "StoreTimeout",
        "Timeout",
        "UnisonoError",
    ),
}
_ROOMS = {
    "codecs": "unisono.codecs",
    "compare": "unisono.compare",
    "networks": "unisono.networks",
    "MPI": "unisono.mpi",
}
_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

if TYPE_CHECKING:
    from unisono import codecs, compare, networks
    from unisono import mpi as MPI  # noqa: F401, N812
    from unisono.codecs.low_rank import LowRank
    from unisono.engine.backends import is_available
    from unisono.engine.environment.event_log import log
    from unisono.engine.group import (
        ANY_TAG,
        Departure,
        Group,
        RecvFrom,
        SendTo,
        Status,
        Work,
        init_process_group,
        wait_all,
        wait_any,
    )
    from unisono.engine.group.elastic_loop import elastic, join
    from unisono.engine.memory.arrays import empty
    from unisono.engine.operations.functions import MAXLOC, MINLOC, op
    from unisono.engine.operations.reduction import ReduceOp, premul_sum
    from unisono.engine.publishing.pieces import Piece
    from unisono.engine.publishing.publication import Publication, publish
    from unisono.engine.publishing.subscription import Subscription, subscribe
    from unisono.engine.store import FileStore, HashStore, PrefixStore, Store, StoreServer, TCPStore
    from unisono.engine.windows.queue import Queue
    from unisono.engine.windows.window import Window
    from unisono.errors import (
        Aborted,
        AuthenticationError,
        Evicted,
        GroupClosed,
        GroupError,
        LaunchError,
        Mismatch,
        NotSupported,
        PeerLost,
        PlanError,
        RendezvousError,
        SimulationError,
        StoreError,
        StoreTimeout,
        Timeout,
        UnisonoError,
    )
    from unisono.planner import plan
    from unisono.simulation import simulate

    SUM, AVG, PRODUCT, MIN = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN
    MAX, BAND, BOR, BXOR = ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR

__all__ = [
    "ANY_TAG",
    "AVG",
    "BAND",
    "BOR",
    "BXOR",
    "MAX",
    "MAXLOC",
    "MIN",
    "MINLOC",
    "PRODUCT",
    "SUM",
    "Aborted",
    "AuthenticationError",
    "Departure",
    "Evicted",
    "FileStore",
    "Group",
    "GroupClosed",
    "GroupError",
    "HashStore",
    "LaunchError",
    "LowRank",
    "Mismatch",
    "NotSupported",
    "PeerLost",
    "Piece",
    "PlanError",
    "PrefixStore",
    "Publication",
    "Queue",
    "RecvFrom",
    "ReduceOp",
    "RendezvousError",
    "SendTo",
    "SimulationError",
    "Status",
    "Store",
    "StoreError",
    "StoreServer",
    "StoreTimeout",
    "Subscription",
    "TCPStore",
    "Timeout",
    "UnisonoError",
    "Window",
    "Work",
    "__version__",
    "codecs",
    "compare",
    "elastic",
    "empty",
    "init_process_group",
    "is_available",
    "join",
    "log",
    "networks",
    "op",
    "plan",
    "premul_sum",
    "publish",
    "simulate",
    "subscribe",
    "wait_all",
    "wait_any",
]


if not TYPE_CHECKING:  # to a type checker a name that does not exist is an error

    def __getattr__(name: str) -> Any:
        if name in _OPS:
            value: Any = getattr(import_module("unisono.engine.operations.reduction").ReduceOp, name)
        elif name in _ROOMS:
            value = import_module(_ROOMS[name])
        else:
            home = next((home for home, names in _HOMES.items() if name in names), None)
            if home is None:
                raise AttributeError(f"module 'unisono' has no attribute {name!r}")
            value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
