"""Where two jobs meet: a store that one rank serves, and the group of both sides.

about          what is published, a `Description`; set when all ranks of the publisher are ready
tickets        a counter of subscriptions; came/3: how many ranks subscription 3 has
meeting/3/...  where its ranks and those of the publisher form a group
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from unisono.codecs.codec import Codec
from unisono.codecs.codec import codec_of as named
from unisono.engine.base.validation import instance
from unisono.engine.bootstrap.engine import EngineSettings
from unisono.engine.environment import env
from unisono.engine.group.group import Group
from unisono.engine.group.native import NativeGroup, connect
from unisono.engine.publishing.boxes import Box, split
from unisono.engine.publishing.pieces import HeldPiece
from unisono.engine.store import PrefixStore, Store, StoreServer, TCPStore

ASK, ANSWER, DATA, OWN = range(4)
"""Tags: to a publisher; from it; arrays; among the ranks of a subscriber."""

CHUNK_BYTES = 8 << 20
"""Between hosts an array is sent in parts of about so many bytes: the next one is packed while one moves."""

AHEAD = 4
"""So many parts of each sender are under way at one time."""


class Description(msgspec.Struct, frozen=True, array_like=True):
    """What a subscriber has to know. held: by rank of the publisher. nbytes: of a slot, by rank."""

    name: str
    held: list[list[HeldPiece]]
    nbytes: list[int]


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """A version to be taken. changed: by rank and piece, the version in which it last changed."""

    version: int
    ask: int
    changed: list[list[int]]


decode_description = msgspec.msgpack.Decoder(Description).decode
decode_grant = msgspec.msgpack.Decoder(Grant).decode


def side(group: Group | None, ranks: Any) -> Any:
    """The ranks of this job: `group`, or those that `ranks` names, or this process alone."""
    return ranks or Alone() if group is None else instance(group, Group, "group")


def serve(host: str, port: int = 0) -> StoreServer:
    """A store of this process, with the job's token and TLS."""
    settings = env.read(strict=False)
    return StoreServer(host, port, token=settings.token, tls=settings.tls)


def store_at(address: tuple[str, int], timeout_s: float | None = None, *, retry: bool = False) -> TCPStore:
    """A client of such a store."""
    settings = env.read(strict=False)
    return TCPStore(
        *address,
        timeout_s=timeout_s or settings.timeout_s,
        token=settings.token,
        tls=settings.tls,
        retry=retry,
    )


def meet(
    store: Store, name: str, number: int, rank: int, size: int, host: str, timeout_s: float
) -> NativeGroup:
    """The group of a subscription: the publisher's ranks, then those of the subscriber."""
    settings = env.read(strict=False)._replace(status_fd=None, local_rank=None, local_world_size=None)
    return connect(
        PrefixStore(f"meeting/{number}", store), rank, size, name=name, timeout_s=timeout_s,
        settings=settings, engine_settings=EngineSettings.of(settings, host),
    )  # fmt: skip


def chunks(box: Box, itemsize: int) -> list[Box]:
    """The parts in which a box is sent; both sides compute them."""
    return split(box, math.ceil(box.numel * itemsize / CHUNK_BYTES))


def codec_of(name: str | None, dtype: str) -> Codec | None:
    """The codec of an array: float32 values are encoded, others sent as they are."""
    return None if name is None or dtype != np.dtype(np.float32).str else named(name)


def raw(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


class Alone:
    """The ranks of a job of one process."""

    rank, size = 0, 1

    def all_gather_object(self, obj: Any) -> list[Any]:
        """The object of the only rank."""
        return [obj]


def on_all(ranks: Any, call: str, act: Callable[[], Any]) -> list[Any]:
    """What `act` gives on each rank; where it fails on one, an error on all of them."""
    try:
        mine = True, act()
    except Exception as error:
        ranks.all_gather_object((False, f"{type(error).__name__}: {error}"))
        raise
    told = ranks.all_gather_object(mine)
    for rank, (done, what) in enumerate(told):
        if not done:
            raise ValueError(f"{call}: rank {rank} failed: {what}")
    return [what for _, what in told]
