"""Random programs of calls, and the ranks that run them: threads, with groups made once and reused."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

import operations
import oracle
import ranks
import unisono as un
from operations import PREMUL, Call
from unisono.errors import PlanError
from unisono.plans import ALGORITHMS, make

GROUPS = ("world", "subgroup", "split")
MOST_RANKS = 9
# Around boundaries: inline and staged messages, one-shot and two-shot, one segment, several.
EDGES = [5, 10, 11, 20, 21, 40, 41, 64, 65, 1000, 2049, 4097, 16_385, 32_769, 65_536, 65_537, 140_000]


@dataclass(frozen=True)
class Program:
    """The calls of `size` ranks, in order; `seed` decides the order of waiting for works."""

    size: int
    calls: tuple[Call, ...]
    seed: int


# --- making them -------------------------------------------------------------------------------------


@cache
def fitting(kind: str, size: int) -> tuple[str, ...]:
    """The algorithms of an operation that support this number of ranks."""
    found = []
    for name in ALGORITHMS.get(kind, ()):
        try:
            make(kind, name, size)
        except PlanError:
            continue
        found.append(name)
    return tuple(found)


def group_size(where: str, size: int) -> int:
    """The size of the smallest group of this kind in a world of `size`."""
    return {"world": size, "subgroup": (size + 1) // 2, "split": size // 2 or 1}[where]


def algorithms(kind: str, where: str, size: int) -> list[str | None]:
    sizes = {group_size(where, size), (size + 1) // 2 if where == "split" else group_size(where, size)}
    return [None, *sorted(set.intersection(*(set(fitting(kind, one)) for one in sizes)))]


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    small = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    return small | st.integers(0, 70).map(lambda numel: (numel,)) | st.sampled_from(EDGES).map(lambda n: (n,))


PAIRS = [*oracle.pairs(), *((dtype, PREMUL) for dtype in (*oracle.FLOATS, *oracle.COMPLEX))]
IN_BLOCKS = ("reduce_scatter", "all_gather", "all_gather_v", "gather", "scatter", "all_to_all", "objects")


@st.composite
def calls(
    draw: Callable[..., Any],
    size: int,
    kinds: Sequence[str] = tuple(operations.OPERATIONS),
    groups: Sequence[str] = GROUPS,
    most_numel: int = EDGES[-1],
) -> Call:
    """A valid call."""
    kind, where = draw(st.sampled_from(kinds)), draw(st.sampled_from(groups))
    dtype, op = draw(st.sampled_from(PAIRS))
    if "scan" in kind and op is un.AVG:
        op = un.SUM
    shape = draw(shapes())
    if np.prod(shape, dtype=int) > most_numel:
        shape = (most_numel,)
    if kind in IN_BLOCKS and np.prod(shape, dtype=int) > 1000:
        shape = (shape[0] // size,)
    return Call(
        kind,
        dtype,
        op,
        shape,
        root=draw(st.integers(0, MOST_RANKS - 1)),
        algorithm=draw(st.sampled_from(algorithms(kind, where, size))),
        form=draw(st.sampled_from(["array", "list", "own"])),
        shift=draw(st.sampled_from([0, 0, 0, 1, 2, 4, 8])),
        strided=draw(st.integers(0, 9)) == 7,
        async_op=draw(st.booleans()),
        where=where,
        tag=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def programs(draw: Callable[..., Any], most_calls: int = 6) -> Program:
    size = draw(st.integers(1, MOST_RANKS))
    return Program(
        size, tuple(draw(st.lists(calls(size), min_size=1, max_size=most_calls))), draw(st.integers(0, 99))
    )


# --- running them ------------------------------------------------------------------------------------


class Crew:
    """Ranks as threads of this process, with a world, a subgroup and a split of it."""

    def __init__(self, size: int) -> None:
        self.worlds = ranks.groups(size)
        self._threads = ThreadPoolExecutor(size)
        self._groups: list[dict[str, un.Group]] = [{} for _ in self.worlds]
        self._together(self._make)

    def _make(self, rank: int) -> None:
        world = self.worlds[rank]
        made = {
            "world": world,
            "subgroup": world.subgroup(range(0, world.size, 2)[::-1]),
            "split": world.split(rank % 2, key=-rank),
        }
        self._groups[rank] = {name: group for name, group in made.items() if group is not None}

    def run(self, program: Program) -> None:
        """Every rank runs the program; results that must be equal on all ranks are compared at the end."""
        results = self._together(lambda rank: play(program, self._groups[rank]))
        for number, call in enumerate(program.calls):
            agreed: dict[tuple[int, ...], bytes] = {}
            for by_number in results:
                if number in by_number:
                    members, bits = by_number[number]
                    assert agreed.setdefault(members, bits) == bits, ("ranks differ", call)

    def _together(self, work: Callable[[int], Any]) -> list[Any]:
        """Run `work(rank)` on every rank at once; raises the first error by time."""
        failures: list[BaseException] = []
        lock = threading.Lock()

        def guarded(rank: int) -> Any:
            try:
                return work(rank)
            except BaseException as error:
                with lock:
                    failures.append(error)
                for group in {**self._groups[rank], "world": self.worlds[rank]}.values():
                    group.abort()
                return None

        results = list(self._threads.map(guarded, range(len(self.worlds))))
        if failures:
            raise failures[0]
        return results

    def close(self) -> None:
        """Close every group, and end the threads."""
        for groups in self._groups:
            for group in groups.values():
                group.close()
        for world in self.worlds:
            world.close()
        self._threads.shutdown()


class Crews:
    """Crews by size, each made at its first use. A failed one is not used again."""

    def __init__(self) -> None:
        self._crews: dict[int, Crew] = {}

    def run(self, program: Program) -> None:
        """Run a program on its number of ranks."""
        if program.size not in self._crews:
            self._crews[program.size] = Crew(program.size)
        try:
            self._crews[program.size].run(program)
        except BaseException:
            self._crews.pop(program.size).close()
            raise

    def close(self) -> None:
        """Close all."""
        for crew in self._crews.values():
            crew.close()


@contextmanager
def crews() -> Iterator[Crews]:
    """Crews that are closed at the end."""
    made = Crews()
    try:
        yield made
    finally:
        made.close()


def play(program: Program, groups: dict[str, un.Group]) -> dict[int, tuple[tuple[int, ...], bytes]]:
    """Run a program on one rank; by call, the members of its group and the bits they must share."""
    turns = []
    for number, call in enumerate(program.calls):
        if group := groups.get(call.where):
            if call.strided:
                _call_strided(group, call)
            turns.append(operations.begin(group, call, number))
    waits = [(turn, work) for turn in turns for work in turn.works]
    random.Random(program.seed).shuffle(waits)
    for turn, work in waits:
        work.wait()
        assert work.done() and work.exception() is None
        _check_issue_order(turns, turn)
    for turn in turns:
        turn.finish()
    return {
        turn.number: (turn.group.members, turn.agreed.tobytes()) for turn in turns if turn.agreed is not None
    }


def _call_strided(group: un.Group, call: Call) -> None:
    """Call with an output whose elements share memory: a ValueError on every rank, before a byte moves."""
    good = np.zeros(4, oracle.NUMPY_DTYPES[call.dtype])
    bad, rows = (
        np.lib.stride_tricks.as_strided(good.copy(), (4,), (0,)),
        np.zeros((group.size, 4), good.dtype),
    )
    calls: list[Callable[[], Any]] = [
        lambda: group.all_reduce(bad),
        lambda: group.scan(bad),
        lambda: group.all_gather_v([bad] * group.size, good),
        lambda: group.reduce_scatter(bad, rows),
        lambda: group.irecv(bad, group.rank),
        lambda: group.sendrecv(good, group.rank, bad, group.rank),
    ]
    try:
        calls[call.seed % len(calls)]()
    except ValueError as error:
        assert "share memory" in str(error), error
    else:
        raise AssertionError(f"an output that repeats was taken: {call}")


def _check_issue_order(turns: list[operations.Turn], ended: operations.Turn) -> None:
    """When a collective has ended, those that were begun before it in its group have too."""
    if ended.call.kind in {one.__name__ for one in operations.MESSAGES}:
        return
    for turn in turns[: turns.index(ended)]:
        if turn.group is ended.group and turn.call.kind not in {one.__name__ for one in operations.MESSAGES}:
            assert all(work.done() for work in turn.works), ("overtaken", turn.call, ended.call)
