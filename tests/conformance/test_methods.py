"""A group's collectives as native objects take and refuse what the methods in Python do."""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import weakref

import numpy as np
import pytest

import ranks
import unisono as un
from unisono.group.collectives import Collectives
from unisono.group.methods import methods


@pytest.fixture
def alone():
    with un.init_process_group(store=un.HashStore(), rank=0, world_size=1) as group:
        yield group


def arguments(name: str) -> dict[str, object]:
    x, block = np.ones(3, np.float32), np.ones((1, 3), np.float32)
    return {
        "all_gather": {"out": block, "x": x},
        "all_reduce": {"x": x, "op": un.SUM},
        "all_to_all": {"out": block, "inputs": block.copy()},
        "barrier": {},
        "broadcast": {"x": x, "src": 0},
        "exclusive_scan": {"x": x, "op": un.SUM},
        "gather": {"x": x, "out": block, "dst": 0},
        "reduce": {"x": x, "dst": 0, "op": un.SUM},
        "reduce_scatter": {"out": x, "inputs": block, "op": un.SUM},
        "scan": {"x": x, "op": un.SUM},
        "scatter": {"out": x, "inputs": block, "src": 0},
    }[name]


NAMES = [
    name
    for name, function in vars(Collectives).items()
    if inspect.isfunction(function) and not name.endswith("_v")
]


@pytest.mark.parametrize("name", NAMES)
def test_every_way_to_write_a_call(alone: un.Group, name: str) -> None:
    """Any number of arguments by position, the others by name in any order, those with a default or not."""
    method, given = getattr(alone, name), arguments(name)
    parameters = list(inspect.signature(method).parameters.values())[: len(given)]
    assert [parameter.name for parameter in parameters] == list(given)
    optional = [p.name for p in parameters if p.default is not p.empty and p.name not in ("out", "inputs")]
    for left_out in itertools.chain.from_iterable(itertools.combinations(optional, n) for n in range(3)):
        kept = [(key, value) for key, value in given.items() if key not in left_out]
        for positional in range(len(kept) + 1):
            first, rest = kept[:positional], kept[positional:]
            if [key for key, _ in first] != list(given)[:positional]:
                continue
            for named in itertools.permutations(rest):
                for _ in range(2):  # the second one is remembered
                    assert method(*(value for _, value in first), **dict(named)) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_wrong_is_refused_as_by_the_method_in_python(alone: un.Group, name: str) -> None:
    given = arguments(name)
    wrong: list[tuple[tuple[object, ...], dict[str, object]]] = [
        ((), {**given, "nonsense": 1}),
        ((*given.values(), 0, 0), {}),
        (tuple(given.values()), dict(list(given.items())[:1])) if given else ((1,), {}),
        ((), dict(list(given.items())[1:])) if given else ((1, 2), {}),
    ]
    getattr(alone, name)(**given)
    for args, kwargs in wrong:
        with pytest.raises(TypeError) as native:
            getattr(alone, name)(*args, **kwargs)
        with pytest.raises(TypeError) as plain:
            getattr(Collectives, name)(alone, *args, **kwargs)
        assert str(native.value) == str(plain.value)


def test_they_look_like_the_methods(alone: un.Group) -> None:
    assert alone.all_reduce.__name__ == "all_reduce"
    assert alone.all_reduce.__doc__ == Collectives.all_reduce.__doc__
    assert inspect.signature(alone.all_reduce) == inspect.signature(Collectives().all_reduce)
    with pytest.raises(AttributeError):
        _ = alone.all_reduce.nonsense


def test_a_group_is_freed_without_the_collector(alone: un.Group) -> None:
    group = alone.subgroup([0])
    assert group is not None
    seen, caller = weakref.ref(group), group._caller
    gc.disable()
    try:
        del group
        assert seen() is None
    finally:
        gc.enable()
    with pytest.raises(un.GroupClosed):
        _ = caller.engine


def test_a_method_holds_its_group_open(alone: un.Group) -> None:
    group = alone.subgroup([0])
    assert group is not None
    caller, methods = group._caller, [group.barrier, group.isend]
    del group
    while methods:
        assert caller.engine.issued == 0
        methods.pop()
    with pytest.raises(un.GroupClosed):
        _ = caller.engine


def test_what_a_subclass_has_of_its_own_is_left_to_it(alone: un.Group) -> None:
    class Counting(un.Group):
        def barrier(self, **options: object) -> None: ...  # type: ignore[override]

    made = methods(alone._hold, Counting)
    assert set(made) == set(NAMES) - {"barrier"}


def test_it_keeps_no_more_references_than_it_needs(alone: un.Group) -> None:
    x = np.ones(3, np.float32)
    alone.all_reduce(x)
    before = sys.getrefcount(x)
    for _ in range(100):
        alone.all_reduce(x, op=un.SUM)
        alone.broadcast(x=x)
        with pytest.raises(TypeError):
            alone.all_reduce(x, x=x)
    assert sys.getrefcount(x) == before


def test_a_fault_is_raised_from_a_call_that_is_remembered() -> None:
    def work(group: un.Group) -> None:
        x = np.ones(3, np.float32)
        group.all_reduce(x)
        with pytest.raises(un.Mismatch, match="all_reduce"):
            group.all_reduce(x, un.MAX if group.rank else un.SUM)
            group.barrier()

    ranks.threads(2, work)
