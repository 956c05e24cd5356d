"""The public calls of a group as data: how a rank makes one, and what it must give.

A call's data follow from its number and the rank alone, so every rank knows what all others give.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import unisono as un
from unisono.plans import ALGORITHMS

DTYPES = ("uint8", "int32", "int64", "float32", "float64")
OPS = (un.SUM, un.MIN, un.MAX)
FOLDS: dict[Any, Callable[..., Any]] = {un.SUM: np.add, un.MIN: np.minimum, un.MAX: np.maximum}

IN_PLACE = ("all_reduce", "broadcast", "reduce", "scan", "exclusive_scan", "barrier")
BLOCKS = ("all_gather", "all_gather_v", "gather", "scatter", "reduce_scatter", "all_to_all")
OBJECTS = ("broadcast_object", "all_gather_object", "gather_object", "scatter_object")
COALESCED = (
    "all_reduce_coalesced",
    "broadcast_coalesced",
    "all_gather_coalesced",
    "reduce_scatter_coalesced",
)
GROUPS = ("subgroup", "split")
COLLECTIVES = (*IN_PLACE, *BLOCKS, *OBJECTS, *COALESCED, *GROUPS)
MESSAGE = "message"

ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "scan", "exclusive_scan", "reduce_scatter")
QUEUED = (*IN_PLACE, *BLOCKS, *COALESCED)
PLAIN_OF = {name: name.removesuffix("_object").removesuffix("_coalesced") for name in COLLECTIVES}


@dataclass(frozen=True)
class Call:
    """One call. number: tells calls of a program apart; its data follow from it.

    numels: elements of each buffer, one but for coalesced calls; dtypes: theirs.
    root: also the sender of a message, `peer` its receiver.  spread: a list of arrays instead of one.
    """

    kind: str
    number: int
    dtypes: tuple[str, ...] = ("int32",)
    numels: tuple[int, ...] = (3,)
    op: un.ReduceOp = un.SUM
    root: int = 0
    algorithm: str | None = None
    members: tuple[int, ...] = ()
    peer: int = 1
    tag: int = 0
    is_object: bool = False
    spread: bool = False
    queued: bool = False

    @property
    def plain(self) -> str:
        """The collective that a call of objects or of several buffers is made of."""
        return PLAIN_OF.get(self.kind, self.kind)

    def alike(self) -> tuple[object, ...]:
        """What ranks must agree in; () for a call that says nothing to the others."""
        if self.kind in COALESCED and not self.numels:
            return ()
        parts: list[object] = [self.kind]
        if self.kind == "subgroup":
            parts.append(self.members)
        if self.kind in (*IN_PLACE, *BLOCKS, *COALESCED) and self.kind != "barrier":
            parts += [self.dtypes, self.numels]
        if self.kind in ALGORITHMS:
            parts.append(self.algorithm)
        if self.plain in ROOTED:
            parts.append(self.root)
        if self.plain in REDUCING and self.kind not in OBJECTS:
            parts.append(self.op)
        return tuple(parts)

    def needs(self, rank: int, size: int) -> set[int]:
        """The ranks without whose part this one cannot return."""
        everybody = set(range(size))
        needed: set[int] = set()
        if self.alike() == ():
            pass
        elif self.plain in ("broadcast", "scatter"):
            needed = {self.root}
        elif self.plain in ("reduce", "gather"):
            needed = everybody if rank == self.root else set()
        elif self.plain in ("scan", "exclusive_scan"):
            needed = set(range(rank))
        elif self.kind == "subgroup":
            needed = everybody if rank in self.members else set()
        else:
            needed = everybody
        return needed - {rank}


def data(number: int, rank: int, numel: int, dtype: str, block: int = 0) -> np.ndarray:
    """What a rank gives for a block of a call: small numbers, whose sums every dtype holds."""
    return ((np.arange(numel) % 3 + 1) * (rank + 1) + number % 5 + 2 * block).astype(dtype)


class Turn:
    """One rank's way through one call. outputs: what it got, complete once `works` are done."""

    def __init__(self, group: un.Group, call: Call, rank: int, size: int) -> None:
        self.group, self.call, self.rank, self.size = group, call, rank, size
        self.works: list[Any] = []
        self.outputs: list[Any] = []
        self.how: dict[str, Any] = {}
        if call.queued and call.kind in QUEUED:
            self.how["async_op"] = True
        if call.algorithm and call.kind in ALGORITHMS:
            self.how["algorithm"] = call.algorithm

    def make(self) -> None:
        """Make the call; on a rank that takes no part in a message, nothing."""
        if self.call.kind == MESSAGE:
            self._message()
        elif self.call.kind in OBJECTS:
            self.outputs = [self._object()]
        elif self.call.kind in COALESCED:
            self._coalesced()
        elif self.call.kind in GROUPS:
            self.outputs = [self._group()]
        else:
            self._plain()

    def _plain(self) -> None:
        call, group = self.call, self.group
        if call.kind == "barrier":
            return self._keep(group.barrier(**self.how))
        dtype, numel = call.dtypes[0], call.numels[0]
        x = data(call.number, self.rank, numel, dtype)
        if call.kind in IN_PLACE:
            self.outputs = [x]
            where = {"broadcast": {"src": call.root}, "reduce": {"dst": call.root}}.get(call.kind, {})
            op = {"op": call.op} if call.kind in REDUCING else {}
            return self._keep(getattr(group, call.kind)(x, **where, **op, **self.how))
        rows = self._rows(numel, dtype)
        if call.kind == "reduce_scatter":
            self.outputs = [np.zeros(numel, dtype)]
            return self._keep(group.reduce_scatter(self.outputs[0], rows, call.op, **self.how))
        if call.kind == "scatter":
            self.outputs = [np.zeros(numel, dtype)]
            inputs = rows if self.rank == call.root else None
            return self._keep(group.scatter(self.outputs[0], inputs, call.root, **self.how))
        out = self._empty(numel, dtype)
        if call.kind == "gather":
            out = out if self.rank == call.root else None
            self.outputs = [out]
            return self._keep(group.gather(x, out, call.root, **self.how))
        self.outputs = [out]
        given = rows if call.kind == "all_to_all" else x
        return self._keep(getattr(group, call.kind)(out, given, **self.how))

    def _coalesced(self) -> None:
        call, group = self.call, self.group
        pairs = list(zip(call.numels, call.dtypes, strict=True))
        xs = [data(call.number + i, self.rank, numel, dtype) for i, (numel, dtype) in enumerate(pairs)]
        self.outputs = xs
        if call.plain == "all_reduce":
            return self._keep(group.all_reduce_coalesced(xs, call.op, **self.how))
        if call.plain == "broadcast":
            return self._keep(group.broadcast_coalesced(xs, call.root, **self.how))
        if call.plain == "all_gather":
            self.outputs = [np.zeros((self.size, numel), dtype) for numel, dtype in pairs]
            return self._keep(group.all_gather_coalesced(self.outputs, xs, **self.how))
        self.outputs = [np.zeros(numel, dtype) for numel, dtype in pairs]
        rows = [self._block_rows(call.number + i, numel, dtype) for i, (numel, dtype) in enumerate(pairs)]
        return self._keep(group.reduce_scatter_coalesced(self.outputs, rows, call.op, **self.how))

    def _object(self) -> Any:
        call, group = self.call, self.group
        if call.kind == "broadcast_object":
            return group.broadcast_object(thing(call, self.rank), call.root)
        if call.kind == "all_gather_object":
            return group.all_gather_object(thing(call, self.rank))
        if call.kind == "gather_object":
            return group.gather_object(thing(call, self.rank), call.root)
        given = [thing(call, rank) for rank in range(self.size)] if self.rank == call.root else None
        return group.scatter_object(given, call.root)

    def _group(self) -> Any:
        call = self.call
        if call.kind == "split":
            made = self.group.split((self.rank + call.number) % 2, key=-self.rank)
        else:
            made = self.group.subgroup(call.members)
        if made is None:
            return None
        with made:
            x = np.array([self.rank + 1])
            made.all_reduce(x)
            return made.members, made.rank, int(x[0])

    def _message(self) -> None:
        call, group = self.call, self.group
        if self.rank == call.root:
            if call.is_object:
                return group.send_object(thing(call, self.rank), call.peer, call.tag)
            x = data(call.number, self.rank, call.numels[0], call.dtypes[0])
            if call.queued:
                return self._keep(group.isend(x, call.peer, call.tag))
            return group.send(x, call.peer, call.tag)
        if self.rank != call.peer:
            return None
        if call.is_object:
            self.outputs = [group.recv_object(call.root, call.tag)]
            return None
        self.outputs = [np.zeros(call.numels[0], call.dtypes[0])]
        if call.queued:
            return self._keep(group.irecv(self.outputs[0], call.root, call.tag))
        group.recv(self.outputs[0], call.root, call.tag)
        return None

    def _keep(self, work: Any) -> None:
        if work is not None:
            self.works.append(work)

    def _rows(self, numel: int, dtype: str) -> Any:
        rows = self._block_rows(self.call.number, numel, dtype)
        return list(rows) if self.call.spread else rows

    def _block_rows(self, number: int, numel: int, dtype: str) -> np.ndarray:
        return np.stack([data(number, self.rank, numel, dtype, block) for block in range(self.size)])

    def _empty(self, numel: int, dtype: str) -> Any:
        out = np.zeros((self.size, numel), dtype)
        return list(out) if self.call.spread or self.call.kind == "all_gather_v" else out


def thing(call: Call, rank: int) -> Any:
    """An object of a rank."""
    return {"from": rank, "number": call.number, "x": [rank] * (call.number % 4)}


def expected(call: Call, rank: int, size: int) -> list[Any]:
    """What the outputs of a rank's turn hold when all ranks make this call."""
    everybody, root = range(size), call.root
    if call.kind == MESSAGE:
        if rank != call.peer or call.root == call.peer:
            return []
        mine = data(call.number, call.root, call.numels[0], call.dtypes[0])
        return [thing(call, call.root) if call.is_object else mine]
    if call.kind in GROUPS:
        return [_expected_group(call, rank, size)]
    if call.kind in OBJECTS:
        things = [thing(call, one) for one in everybody]
        if call.kind == "broadcast_object":
            return [things[root]]
        if call.kind == "scatter_object":
            return [things[rank]]
        return [things if call.kind == "all_gather_object" or rank == root else None]
    if call.kind == "barrier":
        return []
    single = call.kind not in COALESCED
    pairs = zip(call.numels, call.dtypes, strict=True)
    return [
        _expected_buffer(call, call.number + (0 if single else i), rank, size, numel, dtype)
        for i, (numel, dtype) in enumerate(pairs)
    ]


def _expected_buffer(call: Call, number: int, rank: int, size: int, numel: int, dtype: str) -> Any:
    def fold(parts: list[np.ndarray]) -> np.ndarray:
        total = parts[0]
        for part in parts[1:]:
            total = FOLDS[call.op](total, part)
        return total

    parts = [data(number, one, numel, dtype) for one in range(size)]
    name = call.plain
    if name == "broadcast":
        return parts[call.root]
    if name in ("all_gather", "all_gather_v") or (name == "gather" and rank == call.root):
        return np.stack(parts)
    if name == "gather":
        return None
    if name == "scatter":
        return data(number, call.root, numel, dtype, rank)
    if name == "all_to_all":
        return np.stack([data(number, one, numel, dtype, rank) for one in range(size)])
    if name == "reduce_scatter":
        return fold([data(number, one, numel, dtype, rank) for one in range(size)])
    if name == "scan":
        return fold(parts[: rank + 1])
    if name == "exclusive_scan":
        return fold(parts[:rank]) if rank else parts[0]
    return fold(parts) if name == "all_reduce" or rank == call.root else parts[rank]


def _expected_group(call: Call, rank: int, size: int) -> Any:
    members: tuple[int, ...] = call.members
    if call.kind == "split":
        mine = (rank + call.number) % 2
        members = tuple(one for one in reversed(range(size)) if (one + call.number) % 2 == mine)
    if rank not in members:
        return None
    return members, members.index(rank), sum(one + 1 for one in members)


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Whether two lists of outputs are equal."""
    return len(found) == len(wanted) and all(
        one is None
        if two is None
        else np.array_equal(one, two)
        if isinstance(two, np.ndarray)
        else one == two
        for one, two in zip(found, wanted, strict=True)
    )
