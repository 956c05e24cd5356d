"""Calls that were made before run natively, and are checked like new ones wherever a check could fail."""

import contextlib
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import inside
import ranks
import unisono as un
from loops import each


@pytest.fixture
def alone():
    with un.init_process_group(store=un.HashStore(), rank=0, world_size=1) as group:
        yield group


REMEMBERED: dict[str, Callable[[un.Group, list[np.ndarray]], Any]] = {
    "in place": lambda group, xs: group.all_reduce(xs[0]),
    "into a list": lambda group, xs: group.all_gather([xs[0], xs[1]], xs[2]),
    "a number": lambda group, xs: group.all_reduce(2.5),
    "a whole number": lambda group, xs: group.broadcast(7, 1),
    "a number, asynchronous": lambda group, xs: group.all_reduce(2.5, async_op=True).result(),
    "gathered": lambda group, xs: group.all_gather(xs[0]),
    "gathered on a root": lambda group, xs: group.gather(xs[0], dst=1),
    "exchanged": lambda group, xs: group.all_to_all(inputs=xs[0]),
    "a block": lambda group, xs: group.reduce_scatter(xs[0]),
    "a block, asynchronous": lambda group, xs: group.reduce_scatter(xs[0], async_op=True).result(),
    "many": lambda group, xs: group.all_reduce_coalesced(xs),
    "many, asynchronous": lambda group, xs: group.broadcast_coalesced(xs, 1, async_op=True).wait(),
    "many blocks": lambda group, xs: group.all_gather_coalesced([xs[3], xs[4]], [xs[0], xs[1]]),
    "many reduced": lambda group, xs: group.reduce_scatter_coalesced((xs[0], xs[1]), (xs[3], xs[4])),
}


@each(("name", "call"), REMEMBERED.items())
def test_a_repeated_call_runs_no_python(name: str, call: Callable[..., Any]) -> None:
    def work(group: un.Group) -> tuple[int, Any, Any]:
        xs = [np.arange(numel, dtype=np.float32) for numel in (4, 4, 4, 8, 8, 40_000)]
        others = [x.copy() for x in xs]
        first = call(group, xs)
        frames = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal frames
            frames += event == "call" and frame.f_code is not call.__code__

        sys.setprofile(count)
        try:
            second = call(group, others)
        finally:
            sys.setprofile(None)
        return frames, first, second

    for frames, first, second in ranks.threads(2, work):
        assert frames == 0, name
        np.testing.assert_array_equal(first, second)


NUMBERS = [2.5, -0.0, float("inf"), 3, -(2**63), True, False, 1 + 2j]


@each("number", NUMBERS)
def test_a_number_that_is_reduced_again_keeps_its_type(alone: un.Group, number: complex) -> None:
    for _ in range(3):
        for found in (alone.all_reduce(number), alone.all_reduce(number, async_op=True).result()):
            assert type(found) is type(number)
            assert repr(found) == repr(number)


def test_numbers_that_no_dtype_holds_are_refused_each_time(alone: un.Group) -> None:
    alone.all_reduce(1)
    for _ in range(2):
        with pytest.raises(TypeError):
            alone.all_reduce(2**70)
        with pytest.raises((TypeError, ValueError)):
            alone.all_gather(np.ones(1), 1.0)


def test_a_number_is_no_message(alone: un.Group) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match="x is a float"):
            alone.send(1.5, 0)
        with pytest.raises(TypeError, match="x is a int"):
            alone.recv(1, 0)


def test_the_shape_of_a_result_is_that_of_this_call() -> None:
    def work(group: un.Group) -> None:
        for shape in [(6,), (2, 3), (6, 1), (2, 3), (6,)]:
            x = np.full(shape, group.rank + 1.0)
            assert group.all_gather(x).shape == (2, *shape)
            assert group.all_to_all(x).shape == shape
            block = shape[1:] if shape[0] == 2 else (shape[0] // 2, *shape[1:])
            assert group.reduce_scatter(x).shape == block
        for _ in range(2):
            with pytest.raises(ValueError, match="divide"):
                group.reduce_scatter(np.ones((3, 2)))
        x = np.ones(6)
        x.flags.writeable = False
        assert [group.all_gather(x).shape for _ in range(2)] == [(2, 6)] * 2

    ranks.threads(2, work)


def test_a_list_that_fits_no_more_is_checked_again() -> None:
    def work(group: un.Group) -> None:
        whole = np.zeros(9)
        for _ in range(2):
            group.all_reduce_coalesced([whole[:3], whole[3:6]])
        with pytest.raises(ValueError, match="overlap"):
            group.all_reduce_coalesced([whole[:3], whole[2:5]])
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="xs\\[1\\]"):
            group.all_reduce_coalesced([whole[:3], frozen])
        group.broadcast_coalesced([whole[:3], whole[:3] if group.rank == 0 else whole[3:6]], 0)
        group.all_reduce_coalesced([whole[6:], whole[3:6]])  # lie otherwise, and share no memory
        with pytest.raises(TypeError, match="is a list"):
            group.all_reduce_coalesced([whole[:3], [1.0, 2.0, 3.0]])  # type: ignore[list-item]

    ranks.threads(2, work)


@each("number", [np.float64(2.5), np.complex128(1j), np.float32(1.5), np.int8(3)])
def test_numpys_numbers_are_numbers_each_time(number: Any) -> None:
    def work(group: un.Group) -> list[Any]:
        group.broadcast(np.array([number]))
        return [group.broadcast(number, 0) for _ in range(3)] + [group.reduce(number, 1) for _ in range(3)]

    away, root = ranks.threads(2, work)
    assert away == [number] * 3 + [None] * 3
    assert root == [number] * 3 + [2 * number] * 3


def test_a_list_of_one_is_no_array(alone: un.Group) -> None:
    x = np.ones(3)
    alone.all_reduce(x)
    with pytest.raises(TypeError, match="is a list"):
        alone.all_reduce([x])


def test_what_changes_while_it_is_checked_is_not_remembered(alone: un.Group) -> None:
    class Shrinking(np.ndarray):
        def __getattr__(self, name: str) -> Any:
            del xs[1:]
            raise AttributeError(name)

    for _ in range(20):
        xs = [np.ones(3), *(np.ones(3).view(Shrinking) for _ in range(4))]
        with contextlib.suppress(TypeError, ValueError):
            alone.all_reduce_coalesced(xs)
        for length in (0, 1, 5):
            alone.all_reduce_coalesced([np.ones(3) for _ in range(length)])


def test_the_last_work_of_a_list_keeps_its_buffers_and_lets_them_go(alone: un.Group) -> None:
    for _ in range(2):
        buffers: list[Any] = [bytearray(8), np.ones(1), np.ones(100_000)]
        seen = weakref.ref(buffers[2])
        work = alone.all_reduce_coalesced(buffers, async_op=True)
        with pytest.raises(BufferError):
            buffers[0].clear()
        work.wait()
        buffers.pop(0).clear()
        del buffers
        assert seen() is None


def test_an_empty_list_is_checked_as_well(alone: un.Group) -> None:
    with pytest.raises(TypeError, match="op is"):
        alone.all_reduce_coalesced([], "sum")  # type: ignore[arg-type]
    group = alone.subgroup([0])
    assert group is not None
    group.close()
    with pytest.raises(un.GroupClosed):
        group.all_reduce_coalesced([])


def test_a_block_of_the_output_is_remembered_wherever_it_lies(
    alone: un.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(kept: list[np.ndarray]) -> None:
        outs = [np.zeros((1, 3)), np.zeros((1, 5))]
        kept += outs
        alone.all_gather_coalesced(outs, [out[0] for out in outs])
        alone.reduce_scatter_coalesced([out[0] for out in outs], outs)

    kept: list[np.ndarray] = []
    call(kept)
    planned: list[object] = []
    monkeypatch.setattr(inside.planner(alone), "plan_coalesced", lambda *call: planned.append(call))
    for _ in range(5):
        call(kept)
    assert not planned


def test_lists_are_remembered_until_there_are_many(alone: un.Group) -> None:
    for numel in [*range(1, 40), *range(1, 40)]:
        x = np.full(numel, 2.0)
        alone.all_reduce_coalesced([x, np.ones(3)])
        assert (x == 2).all()


def test_a_list_may_shrink_while_it_is_read(alone: un.Group) -> None:
    xs: list[Any] = []

    class Shrinking:
        def __init__(self) -> None:
            self.x = np.ones(3)

        @property
        def shape(self) -> tuple[int, ...]:
            xs.clear()
            return self.x.shape

        def __getattr__(self, name: str) -> Any:
            xs.clear()
            return getattr(self.x, name)

    for _ in range(3):
        xs[:] = [np.ones(3), Shrinking(), np.ones(3)]
        with contextlib.suppress(TypeError, ValueError):
            alone.all_reduce_coalesced(xs)


def test_many_calls_in_turns_are_all_remembered(alone: un.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [np.ones(37 * i + 5, np.float32) for i in range(32)]
    for x in arrays:
        alone.all_reduce(x)
    planned: list[object] = []
    monkeypatch.setattr(inside.planner(alone), "plan", lambda *call: planned.append(call))
    for x in arrays:
        alone.all_reduce(x)
        alone.all_reduce(x, async_op=True).wait()
    assert not planned
