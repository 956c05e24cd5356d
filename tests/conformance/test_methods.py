"""A group's collectives are run natively, and look and behave as ordinary methods."""

import gc
import inspect
import itertools
import json
import pydoc
import sys
import weakref
from datetime import timedelta

import numpy as np
import pytest

import inside
import ranks
import unisono as un
from loops import each
from unisono import _native


@pytest.fixture
def alone():
    with un.init_process_group(store=un.HashStore(), rank=0, world_size=1) as group:
        yield group


def arguments(name: str) -> dict[str, object]:
    x, block = np.ones(3, np.float32), np.ones((1, 3), np.float32)
    return {
        "all_gather": {"out": block, "x": x},
        "all_gather_coalesced": {"outs": [block], "xs": [x]},
        "all_reduce": {"x": x, "op": un.SUM},
        "all_reduce_coalesced": {"xs": [x], "op": un.SUM},
        "all_to_all": {"out": block, "inputs": block.copy()},
        "barrier": {},
        "broadcast": {"x": x, "src": 0},
        "broadcast_coalesced": {"xs": [x], "src": 0},
        "exclusive_scan": {"x": x, "op": un.SUM},
        "gather": {"x": x, "out": block, "dst": 0},
        "reduce": {"x": x, "dst": 0, "op": un.SUM},
        "reduce_scatter": {"out": x, "inputs": block, "op": un.SUM},
        "reduce_scatter_coalesced": {"outs": [x], "inputs": [block], "op": un.SUM},
        "scan": {"x": x, "op": un.SUM},
        "scatter": {"out": x, "inputs": block, "src": 0},
    }[name]


NAMES = [
    name
    for name, method in vars(un.Group).items()
    if isinstance(method, _native.Collective) and not name.endswith("_v")
]
ALLOCATED = ("out", "inputs", "x")  # may be left out: then the call allocates its output


@each("name", NAMES)
def test_every_way_to_write_a_call(alone: un.Group, name: str) -> None:
    """Any number of arguments by position, the others by name in any order, those with a default or not."""
    method, given = getattr(alone, name), arguments(name)
    parameters = list(inspect.signature(method).parameters.values())[: len(given)]
    assert [parameter.name for parameter in parameters] == list(given)
    optional = [p.name for p in parameters if p.default is not p.empty and p.name not in ALLOCATED]
    for left_out in itertools.chain.from_iterable(itertools.combinations(optional, n) for n in range(3)):
        kept = [(key, value) for key, value in given.items() if key not in left_out]
        for positional in range(len(kept) + 1):
            first, rest = kept[:positional], kept[positional:]
            if [key for key, _ in first] != list(given)[:positional]:
                continue
            for named in itertools.permutations(rest):
                for _ in range(2):  # the second one is remembered
                    assert method(*(value for _, value in first), **dict(named)) is None


@each("name", NAMES)
def test_arguments_that_do_not_fit_are_refused_as_python_does(alone: un.Group, name: str) -> None:
    given = arguments(name)
    method = getattr(un.Group, name)
    wrong: list[tuple[tuple[object, ...], dict[str, object]]] = [
        ((), {**given, "nonsense": 1}),
        ((*given.values(), 0, 0), {}),
        (tuple(given.values()), dict(list(given.items())[:1])) if given else ((1,), {}),
    ]
    required = [p.name for p in inspect.signature(method).parameters.values() if p.default is p.empty][1:]
    wrong += [((), {key: given[key] for key in given if key != name}) for name in required]
    getattr(alone, name)(**given)
    for args, kwargs in wrong:
        with pytest.raises(TypeError) as native:
            getattr(alone, name)(*args, **kwargs)
        with pytest.raises(TypeError) as plain:
            method.__wrapped__(alone, *args, **kwargs)
        assert str(native.value) == str(plain.value)


def test_collectives_are_ordinary_methods(alone: un.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alone.all_reduce.__name__ == "all_reduce"
    assert alone.all_reduce.__doc__ == un.Group.all_reduce.__doc__
    assert repr(alone.all_reduce).startswith("<bound method Group.all_reduce of <Group")
    assert list(inspect.signature(alone.all_reduce).parameters)[:2] == ["x", "op"]
    assert inspect.getsourcefile(inspect.unwrap(un.Group.all_reduce)).endswith("group.py")  # type: ignore[arg-type]
    assert "Reduce `x` over the group" in pydoc.render_doc(un.Group.all_reduce)
    with pytest.raises(AttributeError):
        _ = alone.all_reduce.nonsense
    monkeypatch.setattr(un.Group, "all_reduce", lambda self, x: "patched")
    assert alone.all_reduce(np.ones(1)) == "patched"


def test_method_refuses_what_is_no_group(alone: un.Group) -> None:
    for nobody in (None, 1, un.Group.__new__(un.Group)):
        with pytest.raises((TypeError, RuntimeError, AttributeError)):
            un.Group.all_reduce(nobody, np.ones(1))  # type: ignore[arg-type]


def test_a_subclass_may_have_its_own(alone: un.Group) -> None:
    class Counting(un.Group):
        def barrier(self, **options: object) -> str:  # type: ignore[override]
            return "own"

    assert Counting.barrier is not un.Group.barrier
    assert Counting.all_reduce is un.Group.all_reduce


def test_a_timeout_that_closes_the_group_is_an_error(alone: un.Group) -> None:
    class Closing(timedelta):
        def total_seconds(self) -> float:
            alone.close()
            return 1.0

    alone.barrier()
    with pytest.raises(un.GroupClosed):
        alone.barrier(timeout=Closing(seconds=1))


def test_names_that_are_not_interned_are_names(alone: un.Group) -> None:
    x = np.ones(3)
    with pytest.raises(TypeError, match="op is 'no such'"):
        alone.all_reduce(x, **json.loads('{"op": "no such"}'))
    alone.all_reduce(x, **json.loads('{"async_op": true}')).wait()
    with pytest.raises(TypeError, match="unexpected keyword argument 'ops'"):
        alone.all_reduce(x, **json.loads('{"ops": 1}'))


def test_a_list_may_change_while_its_call_is_under_way() -> None:
    def work(group: un.Group) -> None:
        for _ in range(2):  # planned, then remembered
            outs = [np.zeros(1 << 18) for _ in range(2)]
            kept = list(map(weakref.ref, outs))
            reducing = group.all_gather(outs, np.full(1 << 18, group.rank + 1.0), async_op=True)
            outs[:] = []
            found = [one() for one in kept]
            reducing.wait()
            assert [None if x is None else float(x.sum()) for x in found] == [1 << 18, 2 << 18]

    ranks.threads(2, work)


def test_memory_that_could_move_is_pinned_while_its_call_is_under_way(alone: un.Group) -> None:
    for _ in range(2):
        x = bytearray(8)
        reducing = alone.all_reduce(x, async_op=True)
        with pytest.raises(BufferError):
            x.clear()
        reducing.wait()
        x.clear()
    alone.send(bytearray(b"1234"), 0)
    x = bytearray(4)
    alone.recv(x, 0)
    x.clear()
    receiving = alone.irecv(x := bytearray(4), 0)
    with pytest.raises(BufferError):
        x.clear()
    alone.send(b"5678", 0)
    receiving.wait()
    assert x.pop() == ord("8")


def test_a_call_amid_closing_is_an_error_or_runs(alone: un.Group) -> None:
    group = alone.subgroup([0])
    assert group is not None
    group._close()  # as another thread sees it between the steps of `close`
    group.barrier()
    group.close()
    with pytest.raises(un.GroupClosed):
        group.barrier()


def test_method_type_cannot_be_instantiated() -> None:
    with pytest.raises(TypeError, match="cannot create"):
        type(vars(un.Group)["all_reduce"])()


def test_a_group_is_freed_without_the_collector(alone: un.Group) -> None:
    group = alone.subgroup([0])
    assert group is not None
    seen, planner = weakref.ref(group), inside.planner(group)
    gc.disable()
    try:
        del group
        assert seen() is None
    finally:
        gc.enable()
    with pytest.raises(un.GroupClosed):
        _ = planner.engine


def test_a_method_holds_its_group_open(alone: un.Group) -> None:
    group = alone.subgroup([0])
    assert group is not None
    planner, methods = inside.planner(group), [group.barrier, group.isend]
    del group
    while methods:
        assert planner.engine.issued == 0
        methods.pop()
    with pytest.raises(un.GroupClosed):
        _ = planner.engine


def test_method_call_leaks_no_references(alone: un.Group) -> None:
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


def test_a_work_that_was_never_made_has_no_text() -> None:
    with pytest.warns(RuntimeWarning, match="uninitialized"), pytest.raises(TypeError):
        repr(_native.CollectiveWork.__new__(_native.CollectiveWork))
