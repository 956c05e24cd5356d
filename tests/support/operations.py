"""One call of one operation with random choices, and its expected result from NumPy.

`begin` starts a call on one rank and returns a Turn: wait for it, then compare. Inputs are read-only, and
outputs are between guards, so that a write elsewhere is detected, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

import oracle
import unisono as un

PREMUL = "PREMUL_SUM"
FACTORS = (0.5, 1.0, 2.0, 3.0)
GUARD_BYTES = 64
GUARD = 0xA5
IN_ORDER = ("one_shot", "two_shot", "direct")  # algorithms that combine in the order of ranks

_make: ContextVar[Callable[..., np.ndarray]] = ContextVar("make", default=np.empty)


@contextmanager
def arrays_from(make: Callable[..., np.ndarray]) -> Iterator[None]:
    """Calls of this thread take their memory from this function of a shape and a dtype."""
    before = _make.set(make)
    yield
    _make.reset(before)


@dataclass(frozen=True)
class Call:
    """The call of every rank. `root` and `numel` are reduced to the group's range."""

    kind: str
    dtype: str
    op: un.ReduceOp | str
    shape: tuple[int, ...]
    root: int = 0
    algorithm: str | None = None
    form: str = "array"  # how blocks are passed: array, list, own (in place)
    shift: int = 0  # bytes by which the memory of this call is misaligned
    strided: bool = False  # first call with an output that repeats
    async_op: bool = False
    where: str = "world"
    tag: int = 0
    seed: int = 0

    @property
    def numel(self) -> int:
        """Elements of one buffer."""
        return int(np.prod(self.shape, dtype=np.int64))


class Turn:
    """One call on one rank: its memory, its works, and the final comparison."""

    def __init__(self, group: un.Group, call: Call, number: int) -> None:
        self.group, self.call, self.number = group, call, number
        self.rank, self.size = group.rank, group.size
        self.root = call.root % group.size
        self.works: list[Any] = []
        self.check: Callable[[], None] = lambda: None
        self.agreed: np.ndarray | None = None  # must have the same bits on every rank
        self._guarded: list[tuple[np.ndarray, int, int]] = []
        self._given: list[tuple[np.ndarray, bytes]] = []

    @property
    def what(self) -> tuple[Any, ...]:
        return (self.call, f"rank {self.rank} of {self.size}")

    def op(self, rank: int) -> Any:
        """The operation of `rank`: factors of PREMUL_SUM differ."""
        return un.premul_sum(self.factor(rank)) if self.call.op == PREMUL else self.call.op

    def factor(self, rank: int) -> float:
        return FACTORS[(self.call.seed + rank) % len(FACTORS)]

    def parts(self, numel: int, count: int | None = None, seed: int = 0) -> list[np.ndarray]:
        """The input of each rank."""
        return [self.part(rank, numel, seed) for rank in range(self.size if count is None else count)]

    def part(self, rank: int, numel: int, seed: int = 0) -> np.ndarray:
        """The input of one rank."""
        op = None if self.call.op == PREMUL else self.call.op
        return oracle.data(rank, numel, self.call.dtype, op, self.call.seed + seed)

    def expected(self, numel: int, count: int) -> np.ndarray:
        """The reduction of the inputs of the first `count` ranks."""
        if self.call.op == PREMUL:
            factors = [self.factor(rank) for rank in range(count)]
            return oracle.reduced(self.parts(numel, count), un.SUM, factors)
        return oracle.total(count, numel, self.call.dtype, self.call.op, self.call.seed)

    def room(self, like: np.ndarray) -> np.ndarray:
        """Memory between guards with a copy of `like`."""
        raw = _make.get()(like.nbytes + 2 * GUARD_BYTES + 16, np.uint8)
        raw.fill(GUARD)
        start = GUARD_BYTES + self.call.shift
        end = start + like.nbytes
        array = raw[start:end].view(like.dtype).reshape(like.shape)
        array[...] = like
        self._guarded.append((raw, start, end))
        return array

    def empty(self, like: np.ndarray) -> np.ndarray:
        """Memory of this shape with other values."""
        return self.room(np.ones_like(like))

    def given(self, values: np.ndarray) -> np.ndarray:
        """An input, which must not change."""
        array = self.room(values)
        array.flags.writeable = False
        self._given.append((array, array.tobytes()))
        return array

    def compare(self, found: np.ndarray, wanted: np.ndarray) -> None:
        exact = self.call.op != PREMUL and (self.call.algorithm in IN_ORDER or self.size <= 2)
        oracle.check(found, wanted.reshape(found.shape), exact, self.call.dtype, self.size, self.what)

    def same(self, found: Any, wanted: Any) -> None:
        """Moved bytes are the same bytes."""
        pairs = zip(list(found), list(wanted), strict=True) if isinstance(found, list) else [(found, wanted)]
        for one, other in pairs:
            assert one.tobytes() == np.ascontiguousarray(other).tobytes(), self.what

    def finish(self) -> None:
        """Compare everything, after all works are done."""
        self.check()
        for raw, start, end in self._guarded:
            assert (raw[:start] == GUARD).all() and (raw[end:] == GUARD).all(), ("wrote outside", self.what)
        for array, before in self._given:
            assert array.tobytes() == before, ("input changed", self.what)


# --- reductions ------------------------------------------------------------------------------------


def all_reduce(turn: Turn) -> None:
    call, mine = turn.call, turn.part(turn.rank, turn.call.numel)
    x = turn.agreed = turn.room(mine.reshape(call.shape))
    turn.works.append(
        turn.group.all_reduce(x, turn.op(turn.rank), algorithm=call.algorithm, async_op=call.async_op)
    )
    turn.check = lambda: turn.compare(x, turn.expected(call.numel, turn.size))


def reduce(turn: Turn) -> None:
    call, mine = turn.call, turn.part(turn.rank, turn.call.numel)
    mine = mine.reshape(call.shape)
    x = turn.room(mine) if turn.rank == turn.root else turn.given(mine)
    turn.works.append(
        turn.group.reduce(x, turn.root, turn.op(turn.rank), algorithm=call.algorithm, async_op=call.async_op)
    )
    if turn.rank == turn.root:
        turn.check = lambda: turn.compare(x, turn.expected(call.numel, turn.size))


def scan(turn: Turn) -> None:
    call, mine = turn.call, turn.part(turn.rank, turn.call.numel)
    x = turn.room(mine.reshape(call.shape))
    turn.works.append(
        turn.group.scan(x, turn.op(turn.rank), algorithm=call.algorithm, async_op=call.async_op)
    )
    turn.check = lambda: turn.compare(x, turn.expected(call.numel, turn.rank + 1))


def exclusive_scan(turn: Turn) -> None:
    call, mine = turn.call, turn.part(turn.rank, turn.call.numel)
    x = turn.room(mine.reshape(call.shape))
    turn.works.append(turn.group.exclusive_scan(x, turn.op(turn.rank), async_op=call.async_op))
    if turn.rank:
        turn.check = lambda: turn.compare(x, turn.expected(call.numel, turn.rank))
    else:
        turn.check = lambda: turn.same(x, mine)


def reduce_scatter(turn: Turn) -> None:
    call, numel = turn.call, turn.call.numel
    mine = turn.part(turn.rank, numel * turn.size).reshape(turn.size, numel)
    if call.form == "own":
        inputs: Any = turn.room(mine)
        out = inputs[turn.rank]
    else:
        inputs = [turn.given(row) for row in mine] if call.form == "list" else turn.given(mine)
        out = turn.empty(mine[0])
    turn.works.append(
        turn.group.reduce_scatter(
            out, inputs, turn.op(turn.rank), algorithm=call.algorithm, async_op=call.async_op
        )
    )
    turn.check = lambda: turn.compare(
        out, turn.expected(numel * turn.size, turn.size).reshape(turn.size, numel)[turn.rank]
    )


# --- moving bytes ----------------------------------------------------------------------------------


def broadcast(turn: Turn) -> None:
    call, parts = turn.call, turn.parts(turn.call.numel)
    mine = parts[turn.rank].reshape(call.shape)
    x = turn.given(mine) if turn.rank == turn.root else turn.room(mine)
    turn.works.append(turn.group.broadcast(x, turn.root, algorithm=call.algorithm, async_op=call.async_op))
    turn.check = lambda: turn.same(x, parts[turn.root])


def all_gather(turn: Turn) -> None:
    call, parts = turn.call, turn.parts(turn.call.numel)
    whole = np.stack(parts)
    out: Any = [turn.empty(row) for row in whole] if call.form == "list" else turn.empty(whole)
    if call.form == "own":
        out[turn.rank] = parts[turn.rank]
        x = out[turn.rank]
    else:
        x = turn.given(parts[turn.rank])
    turn.works.append(turn.group.all_gather(out, x, algorithm=call.algorithm, async_op=call.async_op))
    turn.check = lambda: turn.same(out, whole)


def lengths(turn: Turn) -> list[list[int]]:
    """Uneven sizes, some 0: [i][j] is the number of elements from rank i to rank j."""
    rng = np.random.default_rng(turn.call.seed)
    return rng.integers(0, turn.call.numel + 1, (turn.size, turn.size)).tolist()


def ragged(turn: Turn) -> list[np.ndarray]:
    return [turn.parts(numel)[rank] for rank, numel in enumerate(lengths(turn)[0])]


def all_gather_v(turn: Turn) -> None:
    parts = ragged(turn)
    out = [turn.empty(part) for part in parts]
    x = turn.given(parts[turn.rank])
    turn.works.append(
        turn.group.all_gather_v(out, x, algorithm=turn.call.algorithm, async_op=turn.call.async_op)
    )
    turn.check = lambda: turn.same(out, parts)


def gather(turn: Turn) -> None:
    parts = ragged(turn) if turn.call.form == "list" else turn.parts(turn.call.numel)
    out: Any = None
    if turn.rank == turn.root:
        listed = turn.call.form == "list"
        out = [turn.empty(part) for part in parts] if listed else turn.empty(np.stack(parts))
        turn.check = lambda: turn.same(out, parts if listed else np.stack(parts))
    x = turn.given(parts[turn.rank])
    turn.works.append(turn.group.gather(x, out, turn.root, **chosen(turn)))


def scatter(turn: Turn) -> None:
    parts = ragged(turn) if turn.call.form == "list" else turn.parts(turn.call.numel)
    inputs: Any = None
    if turn.rank == turn.root:
        listed = turn.call.form == "list"
        inputs = [turn.given(part) for part in parts] if listed else turn.given(np.stack(parts))
    out = turn.empty(parts[turn.rank])
    turn.works.append(turn.group.scatter(out, inputs, turn.root, **chosen(turn)))
    turn.check = lambda: turn.same(out, parts[turn.rank])


def all_to_all(turn: Turn) -> None:
    rank, size = turn.rank, turn.size
    if turn.call.form == "list":
        table = lengths(turn)
        rows = [[turn.parts(table[i][j], seed=j)[i] for j in range(size)] for i in range(size)]
        out: Any = [turn.empty(row[rank]) for row in rows]
        inputs: Any = [turn.given(block) for block in rows[rank]]
        wanted: Any = [row[rank] for row in rows]
    else:
        whole = [part.reshape(size, turn.call.numel) for part in turn.parts(turn.call.numel * size)]
        out, inputs = turn.empty(whole[rank]), turn.given(whole[rank])
        wanted = np.stack([row[rank] for row in whole])
    turn.works.append(turn.group.all_to_all(out, inputs, **chosen(turn)))
    turn.check = lambda: turn.same(out, wanted)


def barrier(turn: Turn) -> None:
    turn.works.append(turn.group.barrier(**chosen(turn)))


def chosen(turn: Turn) -> dict[str, Any]:
    """The options of a call whose blocks may differ in size: then the engine chooses."""
    algorithm = None if turn.call.form == "list" else turn.call.algorithm
    return {"algorithm": algorithm, "async_op": turn.call.async_op}


# --- messages ----------------------------------------------------------------------------------------


def shifted(turn: Turn) -> None:
    """Every rank sends to rank + `root` (to itself when that is 0), without waiting."""
    to, frm = (turn.rank + turn.root) % turn.size, (turn.rank - turn.root) % turn.size
    parts = turn.parts(turn.call.numel)
    x, out = turn.given(parts[turn.rank]), turn.empty(parts[frm])
    turn.works += [turn.group.irecv(out, frm, turn.call.tag), turn.group.isend(x, to, turn.call.tag)]
    turn.check = lambda: turn.same(out, parts[frm])


def sent_first(turn: Turn) -> None:
    """Every rank sends before any rank receives."""
    to, frm = (turn.rank + 1) % turn.size, (turn.rank - 1) % turn.size
    parts, tag = turn.parts(turn.call.numel), own_tag(turn)
    out = turn.empty(parts[frm])
    turn.group.send(turn.given(parts[turn.rank]), to, tag)
    status = turn.group.recv(out, frm, tag)
    assert status == frm
    turn.check = lambda: turn.same(out, parts[frm])


def sendrecv(turn: Turn) -> None:
    to, frm = (turn.rank - 1) % turn.size, (turn.rank + 1) % turn.size
    parts = turn.parts(turn.call.numel)
    x, out = turn.given(parts[turn.rank]), turn.empty(parts[frm])
    status = turn.group.sendrecv(x, to, out, frm, own_tag(turn))
    assert status == frm
    turn.check = lambda: turn.same(out, parts[frm])


def from_anybody(turn: Turn) -> None:
    """All ranks send to the root, which receives in order of arrival."""
    parts, tag = turn.parts(turn.call.numel), own_tag(turn)
    if turn.rank != turn.root:
        turn.works.append(turn.group.isend(turn.given(parts[turn.rank]), turn.root, tag))
        return
    inbox = [turn.empty(parts[0]) for _ in range(turn.size - 1)]
    turn.works += (receives := [turn.group.irecv(one, None, tag) for one in inbox])

    def check() -> None:
        sources = [work.source for work in receives]
        assert sorted([*sources, turn.root]) == list(range(turn.size)), turn.what
        turn.same(inbox, [parts[source] for source in sources])

    turn.check = check


def tags_crossed(turn: Turn) -> None:
    """Three messages, received in the reverse order."""
    to, frm = (turn.rank + 1) % turn.size, (turn.rank - 1) % turn.size
    mine = [turn.parts(turn.call.numel, seed=tag)[turn.rank] for tag in range(3)]
    wanted = [turn.parts(turn.call.numel, seed=tag)[frm] for tag in range(3)]
    turn.works += [turn.group.isend(turn.given(mine[t]), to, own_tag(turn) + t) for t in range(3)]
    inbox = [turn.empty(part) for part in wanted]
    turn.works += [turn.group.irecv(inbox[t], frm, own_tag(turn) + t) for t in (2, 0, 1)]
    turn.check = lambda: turn.same(inbox, wanted)


def objects(turn: Turn) -> None:
    mine = [{"rank": rank, "array": part} for rank, part in enumerate(turn.parts(turn.call.numel))]
    found = turn.group.all_gather_object(mine[turn.rank])
    found.append(turn.group.broadcast_object(mine[turn.rank], turn.root))
    for one, wanted in zip(found, [*mine, mine[turn.root]], strict=True):
        assert one["rank"] == wanted["rank"]
        turn.same(one["array"], wanted["array"])


def own_tag(turn: Turn) -> int:
    """A tag that no other call of the program has."""
    return 100 + 10 * turn.number


REDUCTIONS = [all_reduce, reduce, scan, exclusive_scan, reduce_scatter]
MOVES = [broadcast, all_gather, all_gather_v, gather, scatter, all_to_all, barrier]
MESSAGES = [shifted, sent_first, sendrecv, from_anybody, tags_crossed, objects]
OPERATIONS = {one.__name__: one for one in [*REDUCTIONS, *MOVES, *MESSAGES]}


def begin(group: un.Group, call: Call, number: int) -> Turn:
    """Start a call on this rank."""
    turn = Turn(group, call, number)
    OPERATIONS[call.kind](turn)
    turn.works = [work for work in turn.works if work is not None]
    return turn


def run(
    group: un.Group, kind: str, numel: int, dtype: str = "float32", op: un.ReduceOp = un.SUM, **more: Any
) -> None:
    """Make a call, wait for it, and compare. more: other fields of `Call`."""
    finish(begin(group, Call(kind, dtype, op, (numel,), **more), 0))


def finish(turn: Turn) -> None:
    """Wait for a call on this rank, and compare."""
    for work in turn.works:
        work.wait()
        assert work.done() and work.exception() is None
    turn.finish()
