"""What programs consist of, as data: `program` runs them, JSON keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from unisono.engine.base.validation import instance, not_negative, whole

__all__ = [
    "Call",
    "Compute",
    "Item",
    "Program",
    "RecvFrom",
    "SendTo",
    "Wait",
    "check",
    "check_types",
    "read_program",
    "write_program",
]

MOST_BYTES = 256 << 20


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """The rank computes for so many seconds."""

    seconds: float


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A collective of a group.

    Attributes:
        algorithm: a name of the catalogue; "": as the engine would choose for these hosts.
        nbytes: as for `simulate`.  group: its number in `Program.groups`.  root: a rank of the group.
        handle: "": the rank waits for the end. A name: it goes on, and `Wait` waits.
    """

    collective: str
    algorithm: str
    nbytes: float
    group: int = 0
    root: int = 0
    handle: str = ""


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """The rank waits for the latest call with this handle."""

    handle: str


class SendTo(msgspec.Struct, frozen=True, tag="send"):
    """A message to a rank; the sender goes on. Messages between two ranks keep their order."""

    peer: int
    nbytes: float


class RecvFrom(msgspec.Struct, frozen=True, tag="recv"):
    """The next message of a rank."""

    peer: int


Item = Compute | Call | Wait | SendTo | RecvFrom
ITEMS = (Compute, Call, Wait, SendTo, RecvFrom)


class Program(msgspec.Struct, frozen=True):
    """What all ranks do.

    Attributes:
        ranks: the items of each rank; one list only: all ranks do the same.
        groups: their ranks; an empty one has all ranks. The first one is the default of `Call`.
        name: for people.
    """

    ranks: Sequence[Sequence[Item]]
    groups: Sequence[Sequence[int]] = ((),)
    name: str = "program"

    def of(self, rank: int) -> Sequence[Item]:
        """The items of a rank."""
        return self.ranks[rank if len(self.ranks) > 1 else 0]


_decode = msgspec.json.Decoder(Program).decode


def read_program(path: str | Path) -> Program:
    """A program from JSON, as `write_program` writes it.

    Raises:
        ValueError: it is no program.  OSError: it cannot be read.
    """
    with Path(path).open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path}: is larger than {MOST_BYTES >> 20} MiB")
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no program: {error}") from None


def write_program(program: Program, path: str | Path) -> None:
    """Write a program as JSON.

    Raises:
        TypeError: it is no program, or an item has another type.  OSError: the file cannot be written.
    """
    check_types(program)
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(program), indent=1))


def check_types(program: Program) -> None:
    """Refuse items of other types: a struct does not check its fields.

    Raises:
        TypeError: the message names the rank and the item.  ValueError: there are no ranks.
    """
    instance(program, Program, "program")
    instance(program.name, str, "the name of the program")
    for rank, items in enumerate(instance(program.ranks, (list, tuple), "the ranks of the program")):
        for number, item in enumerate(instance(items, (list, tuple), f"the items of rank {rank}")):
            instance(item, ITEMS, f"{program.name}: rank {rank}, item {number}")
    if not program.ranks:
        raise ValueError(f"{program.name}: the program has no ranks")
    for number, group in enumerate(instance(program.groups, (list, tuple), "the groups of the program")):
        instance(group, (list, tuple), f"group {number}")


def check(program: Program, groups: Sequence[Sequence[int]], size: int) -> None:
    """Refuse items that cannot be run on `size` ranks; groups: with all their ranks.

    Raises:
        TypeError, ValueError: the message names the rank and the item.
    """
    for number, group in enumerate(groups):
        for rank in group:
            whole(rank, f"a rank of group {number}", 0, size - 1)
        if len(set(group)) != len(group):
            raise ValueError(f"group {number} has a rank twice")
    several = len(program.ranks) > 1
    for rank, items in enumerate(program.ranks):
        handles: set[str] = set()
        for number, item in enumerate(items):
            _check_item(f"{program.name}: rank {rank}, item {number}", item, groups, handles, size)
            if isinstance(item, (SendTo, RecvFrom)) and (item.peer == rank or not several):
                reason = f"rank {item.peer} to itself" if several else "a list that is not one rank's own"
                raise ValueError(f"{program.name}: rank {rank}, item {number}: a message of {reason}")


def _check_item(
    where: str, item: Item, groups: Sequence[Sequence[int]], handles: set[str], size: int
) -> None:
    if isinstance(item, Compute):
        not_negative(item.seconds, f"{where}: seconds")
    elif isinstance(item, Call):
        group = groups[whole(item.group, f"{where}: group", 0, len(groups) - 1)]
        not_negative(item.nbytes, f"{where}: nbytes")
        whole(item.root, f"{where}: root", 0, len(group) - 1)
        handles.add(instance(item.handle, str, f"{where}: handle"))
    elif isinstance(item, Wait):
        if instance(item.handle, str, f"{where}: handle") not in handles:
            raise ValueError(f"{where} waits for {item.handle!r}, which no call before has as its handle")
    else:
        whole(item.peer, f"{where}: peer", 0, size - 1)
        if isinstance(item, SendTo):
            not_negative(item.nbytes, f"{where}: nbytes")
