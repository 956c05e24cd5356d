"""GOAL programs on LogGOPSim's network: one latency for all pairs, whole nanoseconds, the same integers.

Source: Hoefler, Schneider, Lumsdaine, "LogGOPSim: simulating large-scale applications in the LogGOPS model",
HPDC 2010.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono._native import simulate_goal
from unisono.engine.base.validation import listed, whole
from unisono.errors import SimulationError

__all__ = ["ANY", "Operation", "loggops"]

ANY = -1
"""The peer or the tag of a receive that takes any."""

KINDS = {"send": 1, "recv": 2, "calc": 3}
_ANY, _MOST = (1 << 32) - 1, (1 << 63) - 1


class Operation(NamedTuple):
    """An operation of a rank.

    Attributes:
        kind: "send", "recv" or "calc".  size: bytes; of "calc" nanoseconds.
        peer: the other rank; ANY in a "recv".  tag: has to agree; ANY in a "recv".
        cpu, nic: the processor and the network card of the rank that it occupies, 0 to 255.
        requires: operations of this rank, by number, that must have ended.  irequires: that must have begun.
    """

    kind: str
    size: int
    peer: int = ANY
    tag: int = 0
    cpu: int = 0
    nic: int = 0
    requires: tuple[int, ...] = ()
    irequires: tuple[int, ...] = ()


def loggops(
    schedule: Sequence[Sequence[Operation]],
    *,
    L: int = 2500,  # noqa: N803  # the model's names
    o: int = 1500,
    g: int = 1000,
    G: int = 6,  # noqa: N803
    O: int = 0,  # noqa: N803, E741
    S: int = 65535,  # noqa: N803
) -> list[int]:
    """When each rank is done, in nanoseconds.

    Args:
        schedule: the operations of each rank.
        L: latency.  o, O: what a message and a further byte of it occupy a processor.  g, G: the same of a
            network card.  S: messages of more bytes wait until their receiver asks for them.
    Raises:
        SimulationError: operations never end.  ValueError: an operation is wrong.
    Example:
        >>> loggops([[Operation("send", 8, peer=1)], [Operation("recv", 8, peer=0)]])
        [1500, 5542]
    """
    schedule = [listed(given, "the operations of a rank") for given in listed(schedule, "schedule")]
    size = len(schedule)
    model = [whole(value, name, 0, 1 << 40) for value, name in zip((L, o, g, G, O, S), "LogGOS", strict=True)]
    ranks = [
        [
            _checked(operation, f"rank {rank}, operation {number}", size)
            for number, operation in enumerate(given)
        ]
        for rank, given in enumerate(schedule)
    ]
    _check_sum(ranks, *model)
    ends, _, stuck = simulate_goal(ranks, model)
    if stuck:
        rank, number = stuck[0]
        raise SimulationError(
            f"rank {rank}, operation {number}, {schedule[rank][number]}: waits for ever "
            f"({len(stuck)} operations of {len({rank for rank, _ in stuck})} ranks never end)"
        )
    return list(ends)


_Numbers = tuple[int, int, int, int, int, int, list[int], list[int]]


def _check_sum(ranks: list[list[_Numbers]], *model: int) -> None:
    """Refuse times that do not fit, even if everything happens one after the other."""
    latency, o, g, per_byte, o_per_byte, _ = model
    count = nbytes = calculated = 0
    for kind, size, *_ in (each for given in ranks for each in given):
        count += 1
        nbytes += 0 if kind == KINDS["calc"] else size
        calculated += size if kind == KINDS["calc"] else 0
    if count * (latency + 2 * (o + g)) + 2 * nbytes * (per_byte + o_per_byte) + calculated > _MOST:
        raise ValueError(
            f"the schedule may take more than {_MOST} ns: {count} operations, {nbytes} bytes and "
            f"{calculated} ns of calculations"
        )


def _checked(operation: Operation, where: str, size: int) -> _Numbers:
    names = getattr(operation, "_fields", ())
    if "irequires" not in names:  # TraceAction of unisono.schedules is another class
        raise TypeError(f"{where}: is a {type(operation).__name__}, expected an Operation")
    kind = KINDS.get(str(operation.kind))
    if kind is None:
        raise ValueError(f"{where}: kind is {operation.kind!r}, expected {', '.join(KINDS)}")
    takes = operation.kind == "recv"
    peer = whole(operation.peer, f"{where}: peer", ANY if takes or kind == 3 else 0, size - 1)
    tag = whole(operation.tag, f"{where}: tag", ANY if takes else 0, _ANY - 1)
    return (
        kind,
        whole(operation.size, f"{where}: size", 0, _MOST),
        _ANY if peer == ANY else peer,
        _ANY if tag == ANY else tag,
        whole(operation.cpu, f"{where}: cpu", 0, 255),
        whole(operation.nic, f"{where}: nic", 0, 255),
        [whole(n, f"{where}: requires", 0, _ANY) for n in listed(operation.requires, "requires")],
        [whole(n, f"{where}: irequires", 0, _ANY) for n in listed(operation.irequires, "irequires")],
    )
