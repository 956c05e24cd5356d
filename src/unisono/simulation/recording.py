"""A program from what the ranks of a real run have recorded (`unisono run --record FILE`).

What lies between two calls of a rank is compute: the wall-clock time, or the processor time of the process
where that is less, because a rank that waits for a core does not compute. A call without an algorithm of the
caller has none here, either: `simulate_program` chooses, as the engine would on that network.

`scaled` makes more of them: a job on more replicas of what was recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from unisono.engine.base.validation import instance, listed, whole
from unisono.engine.encoding.call_events import CallEvent, RankRecording, read_part
from unisono.simulation.items import Call, Compute, Item, Program, RecvFrom, SendTo, Wait

__all__ = ["program_of", "read_parts", "scaled"]

MOST_RANKS = 1 << 14


def read_parts(file: str | Path) -> list[RankRecording]:
    """What all ranks have written beside FILE: FILE.rank0, FILE.rank1 ...

    Raises:
        ValueError: a rank's part is missing or damaged; the message names the file.  OSError: as `open`.
    """
    found: list[RankRecording] = []
    size = 1
    while len(found) < size:
        part = Path(f"{file}.rank{len(found)}")
        try:
            data = part.read_bytes()
        except FileNotFoundError:
            raise ValueError(
                f"{part} is missing: rank {len(found)} was killed, made no group, or ran on another machine"
            ) from None
        try:
            recording = read_part(data)
        except ValueError as error:
            raise ValueError(f"{part} is no recording: {error}") from None
        if recording.rank != len(found) or not 1 <= recording.size <= MOST_RANKS:
            raise ValueError(f"{part} is the recording of rank {recording.rank} of {recording.size}")
        size = recording.size
        found.append(recording)
    return found


def program_of(recordings: Sequence[RankRecording], name: str = "recorded") -> Program:
    """The program of all ranks.

    Raises:
        ValueError: a group has ranks that the job does not have.
    """
    recordings = listed(recordings, "recordings")
    size = len(recordings)
    groups: dict[tuple[str, tuple[int, ...]], int] = {}
    for recording in recordings:
        for event in instance(recording, RankRecording, "a recording").events:
            if event.group[1]:
                groups.setdefault(event.group, len(groups))
    for key in groups:
        for rank in key[1]:
            whole(rank, f"a rank of the recorded group {key[0]!r}", 0, size - 1)
    ranks = [list(_items(recording.events, groups)) for recording in recordings]
    members = [() if each == tuple(range(size)) else each for _, each in groups]
    return Program(ranks=ranks, groups=members or [()], name=name)


def _items(events: Sequence[CallEvent], groups: dict[tuple[str, tuple[int, ...]], int]) -> Iterator[Item]:
    before: CallEvent | None = None
    issued: set[int] = set()
    for event in events:
        if before is not None:
            gap = min(event.begin_ns - before.end_ns, event.cpu_begin_ns - before.cpu_end_ns)
            if gap > 0:
                yield Compute(gap * 1e-9)
        before = event
        if event.name == "none":
            continue
        if event.name == "wait":
            if event.waits in issued:
                yield Wait(str(event.waits))
        elif event.name == "send":
            yield SendTo(event.peer, float(event.nbytes))
        elif event.name == "recv":
            yield RecvFrom(event.peer)
        else:
            issued.add(event.handle)
            handle = str(event.handle) if event.handle else ""
            group = groups[event.group]
            yield Call(event.name, event.algorithm, float(event.nbytes), group, event.root, handle)


def scaled(program: Program, size: int, replica: int) -> Program:
    """The same job on more replicas, or fewer: `size` ranks, in replicas of `replica` successive ranks.

    A group within a replica is there once for each replica. A group of the ranks at the same places in all
    replicas gets those of all replicas. New replicas do what the first one does. Bytes stay as they are.

    Raises:
        ValueError: the sizes do not fit, or a group is neither of the two.
    Example:
        Recorded on 4 ranks with groups (0, 1), (2, 3) of a tensor-parallel replica and (0, 2), (1, 3) of the
        replicas: scaled(program, 512, replica=2) has 256 groups of two ranks, and 2 groups of 256.
    """
    before = len(instance(program, Program, "program").ranks)
    replica = whole(replica, "replica", 1, before)
    size = whole(size, "size", replica, MOST_RANKS)
    if before % replica or size % replica:
        raise ValueError(f"{before} recorded ranks and {size} ranks are no whole replicas of {replica}")
    groups: list[tuple[int, ...]] = []
    numbers: dict[tuple[int, int], int] = {}  # (group, replica) -> its new number
    for number, given in enumerate(program.groups):
        group = tuple(given) or tuple(range(before))
        copies = list(_copies(group, number, before, size, replica))
        for at in range(size // replica if copies else 0):
            numbers[number, at] = len(groups) + (at if len(copies) > 1 else 0)
        groups += copies
    ranks = [
        [_moved(item, rank // replica, replica, numbers) for item in program.ranks[rank % replica]]
        for rank in range(size)
    ]
    return Program(ranks=ranks, groups=groups, name=program.name)


def _copies(
    group: tuple[int, ...], number: int, before: int, size: int, replica: int
) -> Iterator[tuple[int, ...]]:
    """The groups that stand for one."""
    first = group[0] // replica
    if all(rank // replica == first for rank in group):
        if first:  # the same group of a later replica; that of the first one makes all copies
            return
        for at in range(size // replica):
            yield tuple(at * replica + rank for rank in group)
        return
    places = [rank for rank in group if rank < replica]
    if sorted(group) != sorted(at * replica + rank for at in range(before // replica) for rank in places):
        raise ValueError(
            f"group {number}, {group}, is neither within a replica of {replica} ranks nor over all"
        )
    yield tuple(at * replica + rank for at in range(size // replica) for rank in places)


def _moved(item: Item, at: int, replica: int, numbers: dict[tuple[int, int], int]) -> Item:
    """What the first replica does, done by another one."""
    if isinstance(item, Call):
        return msgspec.structs.replace(item, group=numbers[item.group, at])
    if isinstance(item, (SendTo, RecvFrom)):
        if item.peer >= replica:
            raise ValueError(f"a message to or from rank {item.peer} leaves the replica of {replica} ranks")
        return msgspec.structs.replace(item, peer=item.peer + at * replica)
    return item
