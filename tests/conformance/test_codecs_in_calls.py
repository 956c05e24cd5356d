"""Codecs inside calls: the same bits on all ranks, errors within the plan's bound, what ranks agree on."""

from typing import Any

import numpy as np
import pytest

import inside
import ranks
import unisono as un
from effort import cases
from loops import each
from unisono.codecs import Codec

CODECS = [
    un.codecs.bf16,
    un.codecs.fp16,
    un.codecs.fp8_e4m3,
    un.codecs.fp8_e5m2,
    un.codecs.f169,
    un.codecs.u0610,
    un.codecs.int8(),
    un.codecs.int4(),
    un.codecs.int8(16),
    un.codecs.int4(1024),
]
SIZES = (0, 1, 7, 1000, 33001)
PLACEMENTS = cases([(0, 1), (0, 1, 0, 1, 1), (0, 0, 0, 1, 1, 2)], long=[(0, 0, 1, 1)])


def contributions(codec: Codec, size: int, numel: int) -> list[np.ndarray]:
    rng = np.random.default_rng(numel)
    drawn = [rng.standard_normal(numel).astype(np.float32) * np.float32(0.3) for _ in range(size)]
    return drawn if codec.signed else [np.abs(x) for x in drawn]


def within(found: np.ndarray, exact: Any, bound: float) -> None:
    assert np.abs(found - exact).max(initial=0) <= bound


def calls(group: un.Group, codec: Codec, numel: int, **how: Any) -> list[bytes]:
    """Every collective once; what has to be the same on all ranks."""
    xs = contributions(codec, group.size, numel)
    mine, root = xs[group.rank], group.size - 1
    total = np.sum(xs, axis=0, dtype=np.float64) if numel else np.zeros(0)
    largest = float(max(np.abs(x).max(initial=0) for x in xs))
    between = how.get("between_hosts")

    def bound(collective: str, op: un.ReduceOp = un.SUM) -> float:
        return group.error_bound(collective, largest, codec, op=op, between_hosts=between, root=root)

    x = mine.copy()
    group.all_reduce(x, codec=codec, **how)
    within(x, total, bound("all_reduce"))
    average = mine.copy()
    group.all_reduce(average, un.AVG, codec=codec, **how)
    within(average, total / group.size, bound("all_reduce", un.AVG))
    most = mine.copy()
    group.all_reduce(most, un.MAX, codec=codec, **how)
    within(most, np.max(xs, axis=0), bound("all_reduce", un.MAX))
    copied = mine.copy()
    group.broadcast(copied, root, codec=codec, **how)
    within(copied, xs[root], bound("broadcast"))
    gathered = np.empty((group.size, numel), np.float32)
    group.all_gather(gathered, mine, codec=codec, **how)
    within(gathered, xs, bound("all_gather"))

    reduced = mine.copy()
    group.reduce(reduced, root, codec=codec, **how)
    if group.rank == root:
        within(reduced, total, bound("reduce"))
    else:
        assert (reduced == mine).all()
    given = np.array([np.roll(mine, block) for block in range(group.size)])
    kept, out = given.copy(), np.empty(numel, np.float32)
    group.reduce_scatter(out, given, codec=codec, **how)
    within(out, np.roll(total, group.rank), bound("reduce_scatter"))
    exchanged = np.empty_like(given)
    group.all_to_all(exchanged, given, codec=codec, **how)
    within(exchanged, [np.roll(each, group.rank) for each in xs], bound("all_to_all"))
    assert (given == kept).all()
    return [each.tobytes() for each in (x, average, most, copied, gathered)]


def same_on_all(size: int, work: Any, **options: Any) -> None:
    first, *others = ranks.threads(size, work, **options)
    assert all(other == first for other in others)


@each("size", cases([1, 2, 5], long=[3]))
def test_all_ranks_get_the_same_bits(size: int) -> None:
    def work(group: un.Group) -> list[bytes]:
        found = []
        for codec in CODECS:
            for numel in SIZES if size < 4 else SIZES[2:4]:
                found += calls(group, codec, numel)
            found += calls(group, codec, 100)  # again, the quick way
        return found

    same_on_all(size, work)


@each("hosts", PLACEMENTS)
def test_all_ranks_get_the_same_bits_on_hosts(hosts: tuple[int, ...]) -> None:
    def work(group: un.Group) -> list[bytes]:
        inside.place(group, hosts)
        found = []
        for codec in CODECS:
            for between in (None, False):
                for numel in (1, 9001):
                    found += calls(group, codec, numel, between_hosts=between)
        return found

    same_on_all(len(hosts), work)


@each("size, per_host", [(2, 1), (5, 2)])
def test_all_ranks_get_the_same_bits_over_connections(size: int, per_host: int) -> None:
    def work(group: un.Group) -> list[bytes]:
        found = []
        for codec in CODECS:
            for between in (None, False):
                found += calls(group, codec, 700, between_hosts=between)
        for codec in (un.codecs.bf16, un.codecs.int4(48)):  # many segments, in pieces
            kept = un.codecs.feedback_for(np.empty(1_100_001, np.float32))
            for between in (True, False):  # with some receivers on this host and some elsewhere
                x = contributions(codec, size, kept.size)[group.rank]
                group.all_reduce(x, codec=codec, between_hosts=between, feedback=kept)
                group.broadcast(x, codec=codec, between_hosts=between, feedback=kept)
                found.append(x.tobytes())
        return found

    same_on_all(size, work, per_host=per_host)


@each("size, per_host", [(3, None), (3, 1)])
def test_sizes_that_do_not_fit(size: int, per_host: int | None) -> None:
    def work(group: un.Group) -> None:
        numbers = [np.zeros(100 + (group.rank == 1 and peer == 2), np.float32) for peer in range(size)]
        numbers[group.rank] = np.zeros(100, np.float32)
        out = [np.zeros(100, np.float32) for _ in range(size)]
        with pytest.raises(un.Mismatch, match="rank 1 sent 101 elements to rank 2, which expected 100"):
            group.all_to_all(out, numbers, codec="bf16")
            group.barrier()

    ranks.threads(size, work, per_host=per_host)


def test_premultiplied_sums_are_encoded_once() -> None:
    def work(group: un.Group) -> bytes:
        x = np.linspace(-1, 1, 500, dtype=np.float32)
        exact = sum(np.float64(rank + 0.5) * x for rank in range(group.size))
        group.all_reduce(x, un.premul_sum(group.rank + 0.5), codec="f169")
        within(x, exact, group.error_bound("all_reduce", 1.0, "f169", op=un.premul_sum(group.size)))
        return x.tobytes()

    same_on_all(3, work)


def test_inside_a_host_nothing_is_lost() -> None:
    def work(group: un.Group) -> None:
        inside.place(group, (0, 0, 0))
        x = np.full(100, 1 / 3 + group.rank, np.float32)
        exact = x.copy()
        group.all_reduce(exact)
        group.all_reduce(x, codec="int4", between_hosts=True)
        assert (x == exact).all()

    ranks.threads(3, work)


def test_all_at_once_and_later() -> None:
    def work(group: un.Group) -> list[bytes]:
        def lists() -> list[np.ndarray]:
            return [np.linspace(-1, 1 + group.rank, n, dtype=np.float32) for n in (3, 1000, 0, 50_000, 5)]

        reduced, copied, given = lists(), lists(), lists()
        group.all_reduce_coalesced(reduced, codec="int8")
        group.broadcast_coalesced(copied, 1, codec="int8")
        gathered = [np.empty((group.size, x.size), np.float32) for x in given]
        group.all_gather_coalesced(gathered, given, codec="bf16")
        blocks = [np.tile(x, group.size) for x in given]
        group.reduce_scatter_coalesced(lists(), blocks, codec="bf16")
        later = lists()
        un.wait_all([group.all_reduce(x, codec="int4", async_op=True) for x in later])
        return [x.tobytes() for x in (*reduced, *copied, *gathered, *later)]

    same_on_all(3, work)


@each("offset", range(4))
def test_values_may_begin_at_any_address(offset: int) -> None:
    def work(group: un.Group) -> list[bytes]:
        def copied(values: np.ndarray) -> np.ndarray:
            made = np.zeros(values.nbytes + 4, np.uint8)[offset : offset + values.nbytes].view(np.float32)
            made[:] = values
            return made

        x = copied(contributions(un.codecs.int8(), group.size, 5001)[group.rank])
        kept = copied(np.zeros(5001, np.float32))
        group.all_reduce(x, codec="int8", feedback=kept)
        group.all_reduce(copied(np.abs(x)), codec="u0610")
        return [x.tobytes(), kept.any()]

    same_on_all(2, work)


def test_feedback_gives_back_what_was_lost() -> None:
    def work(group: un.Group, hosts: tuple[int, ...]) -> list[bytes]:
        inside.place(group, hosts)
        xs = contributions(un.codecs.int4(), group.size, 3000)
        sums, lossy = np.zeros(3000), np.zeros(3000)
        kept = un.codecs.feedback_for(xs[0])
        scattered, blocks = np.zeros(1000), np.tile(xs[group.rank][:1000], group.size)
        fed, out = un.codecs.feedback_for(blocks), np.empty(1000, np.float32)
        for _ in range(60):
            x, plain = xs[group.rank].copy(), xs[group.rank].copy()
            group.all_reduce(x, codec="int4", feedback=kept)
            sums += x
            group.all_reduce(plain, codec="int4")
            lossy += plain
            group.reduce_scatter(out, blocks, codec="int4", feedback=fed)
            scattered += out
        exact = np.sum(xs, axis=0, dtype=np.float64)
        error, without = np.abs(sums - 60 * exact).max(), np.abs(lossy - 60 * exact).max()
        assert error < without / 10
        within(scattered, 60 * exact[:1000], 4.0)
        largest = max(float(np.abs(each).max()) for each in xs)
        within(x, exact, group.error_bound("all_reduce", largest, "int4", feedback=0.5 * largest))
        assert np.isfinite(kept).all()
        kept[0] = np.nan  # does not stay
        group.all_reduce(xs[group.rank].copy(), codec="int4", feedback=kept)
        group.all_reduce(xs[group.rank].copy(), codec="int4", feedback=kept)
        return [sums.tobytes()]

    same_on_all(3, lambda group: work(group, (0, 0, 0)))
    same_on_all(4, lambda group: work(group, (0, 0, 1, 1)))


def test_messages() -> None:
    def work(group: un.Group) -> None:
        for codec in CODECS:
            for numel in (0, 1, 999):
                x = contributions(codec, 1, numel)[0]
                if group.rank == 0:
                    group.send(x, 1, 3, codec=codec)
                else:
                    y = np.empty_like(x)
                    status = group.recv(y, 0, 3, codec=codec)
                    assert (status.source, status.tag, status.numel, status.dtype) == (0, 3, numel, "float32")
                    within(y, x, codec.bound(x))
                    assert y.tobytes() == codec.decode(codec.encode(x), x.shape).tobytes()

    ranks.threads(2, work)


def test_auto_is_none_in_shared_memory_and_follows_the_link() -> None:
    def work(group: un.Group) -> list[str]:
        def chosen(most: float) -> str:
            choices = group.explain("all_reduce", 64 << 20, max_error=most)
            assert sum(each.chosen for each in choices) == 1
            return next("" if each.codec is None else each.codec.name for each in choices if each.chosen)

        found = [chosen(1.0)]
        x = np.full(1000, 1 / 3, np.float32)
        group.all_reduce(x, codec="auto", max_error=1.0)
        assert (x == np.float32(1 / 3) * 2).all()
        inside.place(group, (0, 1))
        group.link_bytes_per_s = 1e9 / 8
        assert group.link_bytes_per_s == 1e9 / 8
        found += [chosen(most) for most in (1.0, 0.01, 1e-9)]
        for _ in range(2):
            group.all_reduce(x, codec="auto", max_error=0.01)
        for factor in (group.rank, 10.0 ** (-40 * group.rank)):  # ranks may differ in it
            group.all_reduce(x, un.premul_sum(factor), codec="auto", max_error=1e-9)
        return [*found, x.tobytes().hex()]

    first, second = ranks.threads(2, work)
    assert first == second
    assert first[:4] == ["", "int4", "int8", ""]
