"""Objects over a group: what is asked for by name, what is refused, and sizes beyond 32 bits."""

import gc
import itertools
import operator
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from effort import HANG_S, LONG
from loops import each, everywhere
from unisono import _native
from unisono.engine.group import objects

GIB = 1 << 30
PROGRAMS = Path(__file__).resolve().parent / "programs"


def test_pickle_is_used_when_asked_for_and_only_then() -> None:
    def work(group: un.Group) -> None:
        mine, right = Fraction(group.rank, 7), (group.rank + 1) % group.size
        everybody = [Fraction(rank, 7) for rank in range(group.size)]
        with pytest.raises(TypeError, match="pickle=True"):
            group.all_gather_object(mine)
        with pytest.raises(TypeError, match="pickle=True"):
            group.send_object(mine, right)
        assert group.all_gather_object(mine, pickle=True) == everybody
        assert group.broadcast_object(mine, 1, pickle=True) == everybody[1]
        assert group.gather_object(mine, 0, pickle=True) == (everybody if group.rank == 0 else None)
        assert group.scatter_object(everybody if group.rank == 2 else None, 2, pickle=True) == mine
        group.send_object(mine, right, pickle=True)
        assert group.recv_object((group.rank - 1) % group.size, pickle=True) == everybody[group.rank - 1]

    ranks.threads(3, work)


def test_receiver_that_did_not_ask_for_pickle_does_not_unpickle() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            group.broadcast_object(Fraction(1, 2), 0, pickle=True)
        else:
            with pytest.raises(ValueError, match="pickle"):
                group.broadcast_object(None, 0)
        group.barrier()

    ranks.threads(2, work)


@pytest.mark.skipif("UNISONO_SANITIZED" in os.environ, reason="a sanitizer reserves terabytes of addresses")
def test_too_large_an_object_is_named_by_its_sender_and_size() -> None:
    outputs = ranks.processes(2, PROGRAMS / "receives_more_than_its_memory.py")
    for output in outputs:
        assert "rank 1 ran out of memory" in output and "rank 0 sends an object, 1073741888 bytes" in output


@pytest.mark.slow
@pytest.mark.skipif(not LONG, reason="takes long; make test-long runs it")
def test_object_of_more_than_two_gigabytes() -> None:
    """Takes 7 GiB: the sender's pages of zeros are none, its encoded copy and what arrives are."""
    if "UNISONO_SANITIZED" in os.environ:
        pytest.skip("a sanitizer needs several times the memory")
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 9 * GIB:
        pytest.skip("needs 9 GiB of free memory")
    numel = 2 * GIB + 4321

    def work(group: un.Group) -> None:
        big = None
        if group.rank == 0:
            big = np.zeros(numel, np.uint8)
            big[-1] = 7
        got = group.broadcast_object({"big": big})["big"]
        assert (got.size, got[-1], got[numel // 2]) == (numel, 7, 0)
        del got
        if LONG and group.rank == 0:
            group.send_object(big, 1)
        elif LONG:
            got = group.recv_object(0)
            assert (got.size, got[-1]) == (numel, 7)
        group.barrier()

    ranks.threads(2, work, timeout_s=HANG_S)


LIMIT = objects.PACKET_NBYTES - 8
LENGTHS = (0, LIMIT - 40, *range(LIMIT - 12, LIMIT + 3), 5000)
"""Of a bytes object, whose encoding has some bytes more: on both sides of what a packet has room for."""


@each("size", [1, 2, 3, 5])
@each("pickle", [False, True])
@everywhere
def test_objects_of_all_lengths_arrive(size: int, pickle: bool) -> None:
    """Beside them go objects with few bytes: each rank in turn is the only one whose object has no room."""

    def thing(rank: int, length: int, longest: int) -> object:
        return [rank, bytes([rank]) * (length if rank == longest else 3), None]

    def work(group: un.Group) -> None:
        mine, ranks_ = group.rank, range(group.size)
        for turn, length in enumerate(LENGTHS):
            root, longest = turn % group.size, (turn // 2) % group.size
            everybody = [thing(rank, length, longest) for rank in ranks_]
            prefixes = list(itertools.accumulate(everybody, operator.add))
            own, at_root = everybody[mine], mine == root
            assert group.broadcast_object(own, root, pickle=pickle) == everybody[root]
            assert group.all_gather_object(own, pickle=pickle) == everybody
            assert group.gather_object(own, root, pickle=pickle) == (everybody if at_root else None)
            assert group.scatter_object(everybody if at_root else None, root, pickle=pickle) == own
            to_each = [(own, other) for other in ranks_]
            assert group.all_to_all_object(to_each, pickle=pickle) == [(one, mine) for one in everybody]
            reduced = group.reduce_object(own, dst=root, pickle=pickle)
            assert reduced == (prefixes[-1] if at_root else None)
            assert group.all_reduce_object(own, pickle=pickle) == prefixes[-1]
            assert group.scan_object(own, pickle=pickle) == prefixes[mine]

    ranks.threads(size, work)


def test_lists_of_the_wrong_length_are_refused_before_a_byte_moves() -> None:
    def work(group: un.Group) -> None:
        for given in (None, [], [1] * (group.size + 1)):
            with pytest.raises(ValueError, match="one for every rank"):
                group.all_to_all_object(given)
        assert group.all_to_all_object(range(group.size)) == [group.rank] * group.size
        assert group.scatter_object(iter("ab") if group.rank == 0 else None) == "ab"[group.rank]

    ranks.threads(2, work)


def of_threads(group: un.Group, call: Callable[[], None], count: int = 3) -> None:
    """Call it in several threads of a rank at once; raise the first error."""
    with ThreadPoolExecutor(count) as pool:
        for ended in [pool.submit(call) for _ in range(count)]:
            ended.result()


def test_object_calls_of_several_threads_do_not_mix() -> None:
    def work(group: un.Group) -> None:
        rank, everybody = group.rank, [f"{'x' * each}" for each in range(group.size)]
        mine = everybody[rank]

        def calls(one: Callable[[], object], expected: object) -> Callable[[], None]:
            def call() -> None:
                assert all(one() == expected for _ in range(20))

            return call

        of_threads(group, calls(lambda: group.all_gather_object(mine), everybody))
        of_threads(group, calls(lambda: group.broadcast_object(mine, 1), everybody[1]))
        of_threads(group, calls(lambda: group.gather_object(mine, 1), everybody if rank == 1 else None))
        given = everybody if rank == 0 else None
        of_threads(group, calls(lambda: group.scatter_object(given), mine))
        of_threads(group, calls(lambda: group.all_to_all_object([rank, rank]), [0, 1]))

    ranks.threads(2, work)


def test_a_mismatch_names_threads_where_several_call() -> None:
    def work(group: un.Group) -> None:
        def differs() -> None:
            with pytest.raises(un.Mismatch, match="Several threads of a rank have called this group"):
                group.all_reduce(np.ones(3, np.int32 if group.rank else np.float32))

        group.barrier()
        of_threads(group, differs, count=1)

    ranks.threads(2, work)

    def alone(group: un.Group) -> None:
        with pytest.raises(un.Mismatch) as raised:
            group.all_reduce(np.ones(3, np.int32 if group.rank else np.float32))
        assert "threads" not in str(raised.value)

    ranks.threads(2, alone)


class Unpickled:
    """Takes a while to unpickle, and fails where it is told to."""

    def __init__(self, fails: bool) -> None:
        time.sleep(0.1)
        if fails:
            raise ArithmeticError("told to")
        self.fails = fails

    def __reduce__(self) -> Any:
        return Unpickled, (self.fails,)


def test_a_result_is_the_object_however_often_and_by_whom_it_is_asked() -> None:
    # It was the encoded bytes for another thread meanwhile, and after an error.
    def work(group: un.Group) -> None:
        if group.rank == 0:
            one = Unpickled(False)
            group.send_object(one, 1, pickle=True)
            one.fails = True
            group.send_object(one, 1, pickle=True)
            return
        received = group.irecv_object(0, pickle=True)
        with ThreadPoolExecutor(2) as pool:
            results = [each.result() for each in [pool.submit(received.result) for _ in range(2)]]
        assert results[0] is results[1] and isinstance(results[0], Unpickled)
        received = group.irecv_object(0, pickle=True)
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                received.result()

    ranks.threads(2, work)


def test_a_finalizer_may_change_what_is_encoded() -> None:
    # Before Python 3.12 an allocation ran it while a list was read: a crash.
    class Changes:
        def __init__(self) -> None:
            self.self = self

        def __del__(self) -> None:
            given.clear()

    before = gc.get_threshold()
    try:
        for threshold in range(1, 8):
            given: list[Any] = [{1}] * 50 + [str(i) for i in range(2000)]
            gc.collect()
            Changes()
            gc.set_threshold(threshold)
            assert len(_native.decode_plain(_native.encode_plain(given))) in (0, 2050)
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)


def test_packets_are_those_of_the_list_itself() -> None:
    class Lies(list[bytes]):
        def __len__(self) -> int:
            return 2**56  # packets of 256 bytes: a size of 0, and a crash

    parts = [b"a", b"b" * 300]
    assert _native.pack_packets(Lies(parts)) == _native.pack_packets(parts)
    with pytest.raises(TypeError):
        _native.pack_packets((b"a",))  # type: ignore[arg-type]
