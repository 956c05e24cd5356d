"""Random programs of calls on 1 to 9 ranks against NumPy. Hundreds here, thousands by night."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import operations
import oracle
import random_programs as programs
import unisono as un
from operations import PREMUL, Call
from random_programs import Crews, Program

# Groups are shared by all examples on purpose: every program has to leave them as good as new.
SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def crews() -> Iterator[Crews]:
    with programs.crews() as made:
        yield made


@SHARED
@given(program=programs.programs())
def test_any_program_gives_what_numpy_gives(crews: Crews, program: Program) -> None:
    crews.run(program)


@settings(SHARED, max_examples=max(10, settings().max_examples // 2))
@given(data=st.data(), size=st.integers(2, programs.MOST_RANKS))
def test_one_call_of_any_kind(crews: Crews, data: st.DataObject, size: int) -> None:
    """A program of one call shrinks to what is wrong with it."""
    crews.run(Program(size, (data.draw(programs.calls(size)),), 0))


@pytest.mark.parametrize(("size", "shift"), [(1, 0), (2, 1), (3, 0), (5, 1), (9, 0)])
def test_every_operation_with_every_dtype_in_flight_at_once(crews: Crews, size: int, shift: int) -> None:
    """Not random: no operation and no dtype is left to chance."""
    for dtype, op in [("float32", un.SUM), ("bfloat16", PREMUL), ("complex128", un.AVG), ("int8", un.BXOR)]:
        for form in ("array", "list", "own"):
            for numel in (0, 13):
                calls = [
                    Call(kind, dtype, un.SUM if "scan" in kind and op is un.AVG else op, (numel,), form=form)
                    for kind in operations.OPERATIONS
                ]
                calls = [replace(call, async_op=True, shift=shift, root=size - 1) for call in calls]
                crews.run(Program(size, tuple(calls), seed=numel))
    everything = [
        Call("all_reduce", dtype, op, (7,), async_op=True, shift=shift) for dtype, op in programs.PAIRS
    ]
    assert {call.dtype for call in everything} == set(oracle.NUMPY_DTYPES)
    crews.run(Program(size, tuple(everything), seed=1))
