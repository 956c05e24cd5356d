"""The names of worlds for which ranks wait in one store, and ranks that wait for each other in vain.

A world has a name, and ranks of different names never meet. A rank that has waited for a while writes its
name into the store. So an error can show all names, and one is found at once where nobody can come any more:
two ranks of one job wait under different names, and neither process has a thread that could come to the
other's world. Ranks whose numbers the caller chose may be those of processes that have nothing in common.
"""

from __future__ import annotations

import sys
import threading

import msgspec

from unisono.engine.store import PrefixStore, Store
from unisono.errors import message

WAITING = "unisono/meet/waiting"
MOST_NAMES = 8
"""The most names that a text lists."""


class WaitingWorld(msgspec.Struct, frozen=True, array_like=True):
    """A world for which ranks wait.

    Attributes:
        rank: the first that said so.
        alone: the first that can come to no other world: a rank of the job, whose process has no other
            thread. None: there is none.
    """

    generation: int
    rank: int
    alone: int | None


_decode_worlds = msgspec.msgpack.Decoder(dict[str, WaitingWorld]).decode


def keys_of(base: Store, part: str, name: str, generation: int) -> PrefixStore:
    """The keys of one world in a store. part: "meet" for its rendezvous, "world" for its own keys."""
    escaped = name.replace("%", "%25").replace("/", "%2F")
    return PrefixStore(f"unisono/{part}/{escaped}/{generation}", base)


def note(base: Store, name: str, generation: int, rank: int, job: bool) -> dict[str, WaitingWorld]:
    """Write that this rank waits; returns the worlds of other names whose ranks have not met.

    job: its number is that of its process in the job.
    """
    alone = rank if job and _only_thread() else None
    while True:
        held = base.peek(WAITING) or b""
        worlds = _decode_worlds(held) if held else {}
        mine = worlds.get(name)
        if mine is None or mine.generation != generation:
            mine = WaitingWorld(generation, rank, alone)
        elif mine.alone is None:
            mine = msgspec.structs.replace(mine, alone=alone)
        desired = msgspec.msgpack.encode({**worlds, name: mine})
        if desired == held or base.compare_set(WAITING, held, desired) == desired:
            break
    others = {other: world for other, world in worlds.items() if other != name}
    return {other: world for other, world in others.items() if _verdict(base, other, world) != b"ok"}


def in_vain(base: Store, name: str, generation: int, rank: int, others: dict[str, WaitingWorld]) -> str:
    """Why this rank of the job and one of another name wait in vain, written for that one, too; "": they may
    not.
    """
    if not _only_thread():
        return ""
    mine = keys_of(base, "meet", name, generation)
    for other, world in others.items():
        theirs = keys_of(base, "meet", other, world.generation)
        if world.alone is None or world.alone == rank or theirs.check([f"rank/{rank}"]):
            continue
        if mine.check([f"rank/{world.alone}"]) or theirs.peek("verdict") is not None:
            continue
        text = message(
            f"ranks wait for groups of different names: rank {world.alone} for {other!r}, "
            f"rank {rank} for {name!r}",
            where=base.describe(),
            remedy="Give init_process_group the same group_name= on all ranks, in the same order.",
        )
        theirs.compare_set("verdict", b"", text)
        return text
    return ""


def listed(others: dict[str, WaitingWorld]) -> str:
    """The names as text: "rank 0 waited for the group 'actor'"."""
    each = [f"rank {world.rank} waited for the group {name!r}" for name, world in others.items()]
    return "; ".join(each[:MOST_NAMES]) + ("; ..." if len(each) > MOST_NAMES else "")


def _verdict(base: Store, name: str, world: WaitingWorld) -> bytes | None:
    return keys_of(base, "meet", name, world.generation).peek("verdict")


def _only_thread() -> bool:
    """Whether this process has no other thread that may run Python code, apart from Unisono's own."""
    own = {each.ident for each in threading.enumerate() if each.name.startswith("unisono")}
    running = {each.ident for each in threading.enumerate()} | sys._current_frames().keys()
    return running - own <= {threading.get_ident()}
