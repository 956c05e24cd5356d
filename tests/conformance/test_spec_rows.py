"""The specification's worked examples, each under the name of its row; where else each row is tested.

C19 (reproducible=True) and C20 (coalesced calls) get their tests here with the calls themselves.
"""

from __future__ import annotations

import ast
import time
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import oracle
import ranks
import unisono as un
from loops import each

TESTS = Path(__file__).resolve().parents[1]


def ones_of(group: un.Group, numel: int) -> np.ndarray:
    """[rank+1] * numel"""
    return np.full(numel, group.rank + 1, np.float32)


def test_C1_broadcast() -> None:
    def work(group: un.Group) -> None:
        x = np.array([1, 2, 3, 4, 5]) if group.rank == 0 else np.zeros(5, np.int64)
        group.broadcast(x, src=0)
        assert x.tolist() == [1, 2, 3, 4, 5]

    ranks.threads(3, work)


def test_C2_reduce() -> None:
    def work(group: un.Group) -> None:
        x = ones_of(group, 5)
        group.reduce(x, dst=0)
        assert x.tolist() == [[6] * 5, [2] * 5, [3] * 5][group.rank]

    ranks.threads(3, work)


@pytest.mark.parametrize(("size", "numel", "total"), [(3, 5, 6), (4, 8, 10)])
def test_C3_all_reduce(size: int, numel: int, total: int) -> None:
    def work(group: un.Group) -> None:
        x = ones_of(group, numel)
        group.all_reduce(x)
        assert x.tolist() == [total] * numel

    ranks.threads(size, work)


def test_C4_gather() -> None:
    def work(group: un.Group) -> None:
        out = np.zeros((3, 2)) if group.rank == 1 else None
        group.gather(np.full(2, group.rank + 1.0), out, dst=1)
        assert out is None or out.tolist() == [[1, 1], [2, 2], [3, 3]]

    ranks.threads(3, work)


def test_C5_all_gather() -> None:
    def work(group: un.Group) -> None:
        out = np.zeros((3, 2))
        group.all_gather(out, np.full(2, group.rank + 1.0))
        assert out.tolist() == [[1, 1], [2, 2], [3, 3]]
        uneven = [np.zeros(length) for length in (2, 0, 1)]
        group.all_gather_v(uneven, np.full((2, 0, 1)[group.rank], group.rank + 1.0))
        assert [one.tolist() for one in uneven] == [[1, 1], [], [3]]

    ranks.threads(3, work)


def test_C6_scatter() -> None:
    def work(group: un.Group) -> None:
        inputs = [np.full(rank, 10.0 + rank) for rank in range(3)] if group.rank == 2 else None
        out = np.zeros(group.rank)
        group.scatter(out, inputs, src=2)
        assert out.tolist() == [10.0 + group.rank] * group.rank
        whole = [np.zeros(rank) for rank in range(3)] if group.rank == 2 else None
        group.gather(out, whole, dst=2)  # the inverse
        assert whole is None or all((a == b).all() for a, b in zip(whole, inputs, strict=True))

    ranks.threads(3, work)


def test_C7_reduce_scatter() -> None:
    def powers(group: un.Group) -> None:
        inputs = [((group.rank + 1) * np.array([1, 2])) ** (j + 1) for j in range(3)]
        out = np.zeros(2, np.int64)
        group.reduce_scatter(out, inputs)
        assert out.tolist() == [[6, 12], [14, 56], [36, 288]][group.rank]

    def cut_into_four(group: un.Group) -> None:
        out = np.zeros(2, np.float32)
        group.reduce_scatter(out, ones_of(group, 8))
        assert out.tolist() == [10, 10]
        with pytest.raises(ValueError, match="3 arrays, expected 4"):
            group.reduce_scatter(out, [np.zeros(2, np.float32)] * 3)
        assert out.tolist() == [10, 10]

    ranks.threads(3, powers)
    ranks.threads(4, cut_into_four)


def test_C8_all_to_all() -> None:
    def work(group: un.Group) -> None:
        out = np.zeros((2, 1), np.int64)
        group.all_to_all(out, np.array([[1], [2]]) + 2 * group.rank)
        assert out.tolist() == ([[1], [3]], [[2], [4]])[group.rank]
        inputs = [np.full(1 + group.rank + 2 * peer, group.rank) for peer in range(2)]
        uneven = [np.zeros(1 + peer + 2 * group.rank, np.int64) for peer in range(2)]
        group.all_to_all(uneven, inputs)
        assert [one.tolist() for one in uneven] == [[0] * (1 + 2 * group.rank), [1] * (2 + 2 * group.rank)]

    ranks.threads(2, work)


def test_C9_scan() -> None:
    def work(group: un.Group) -> None:
        x, below = ones_of(group, 2), ones_of(group, 2)
        group.scan(x)
        group.exclusive_scan(below)
        assert x.tolist() == [[1] * 2, [3] * 2, [6] * 2][group.rank]
        assert below.tolist() == [[1] * 2, [1] * 2, [3] * 2][group.rank]

    ranks.threads(3, work)


def test_C10_barrier() -> None:
    """Ranks that come after 0, 1 and 2 units of time all leave when the last has come."""
    came: list[float] = []
    left: list[float] = []

    def work(group: un.Group) -> None:
        time.sleep(0.1 * group.rank)
        came.append(time.monotonic())
        group.barrier()
        left.append(time.monotonic())

    ranks.threads(3, work)
    assert min(left) >= max(came)


def test_C11_both_send_first() -> None:
    def work(group: un.Group) -> None:
        x = np.zeros(1 << 18)
        group.send(np.full(1 << 18, group.rank + 1.0), 1 - group.rank)
        assert group.recv(x, 1 - group.rank) == 1 - group.rank
        assert (x == 2 - group.rank).all()

    ranks.threads(2, work)


def test_C12_objects() -> None:
    def work(group: un.Group) -> None:
        mine = {"rank": group.rank, 1: (None, True, 2**80, 0.5, "ä", b"x", [1], {2})}
        assert group.all_gather_object(mine) == [{**mine, "rank": rank} for rank in range(2)]
        with pytest.raises(TypeError):
            group.broadcast_object(object(), group.rank)

    ranks.threads(2, work)


def test_C13_operations() -> None:
    def work(group: un.Group) -> None:
        wanted = {un.SUM: 6, un.PRODUCT: 6, un.MIN: 1, un.MAX: 3, un.BAND: 0, un.BOR: 3, un.BXOR: 0}
        for op, value in wanted.items():
            x = np.array([group.rank + 1])
            group.all_reduce(x, op)
            assert x[0] == value, op
        for algorithm in (None, "ring"):
            x = np.array([group.rank + 1.0])
            group.all_reduce(x, un.AVG, algorithm=algorithm)
            assert x[0] == 2
        group.all_reduce(x := np.array([2.0]), un.premul_sum(group.rank + 1))
        assert x[0] == 12
        with pytest.raises(TypeError, match="AVG has no meaning for int64; use SUM and divide"):
            group.all_reduce(np.array([1]), un.AVG)

    ranks.threads(3, work)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_C14_16_bit_floats_round_once(dtype: Any) -> None:
    """1 + three halves of the last place: rounding at every step would lose them all."""
    half = float(np.finfo(np.float16).eps if dtype == "float16" else ml_dtypes.finfo(dtype).eps) / 2

    def work(group: un.Group) -> None:
        x = np.array([half if group.rank else 1.0], dtype)
        group.all_reduce(x)
        assert float(x[0]) == 1 + 4 * half  # 1 + 3 halves, rounded to even once

    ranks.threads(4, work)


def test_C15_buffers() -> None:
    def work(group: un.Group) -> None:
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        for wrong in (frozen, np.zeros((3, 2))[:, 0]):
            with pytest.raises(ValueError, match="read-only|not contiguous"):
                group.all_reduce(wrong)
        for right in (np.ones(3), bytearray(b"\1\1\1"), memoryview(np.ones(3))):
            group.all_reduce(right)
            assert list(right) == [2, 2, 2]
        group.all_reduce(np.zeros(0))

    ranks.threads(2, work)


def test_C16_works() -> None:
    def work(group: un.Group) -> None:
        buffers = [np.full(1000, float(number)) for number in range(20)]
        works = [group.all_reduce(x, async_op=True) for x in buffers]
        works[-1].wait(timeout=60)
        assert all(one.done() and one.exception() is None for one in works)
        assert all((x == 3 * number).all() for number, x in enumerate(buffers))

    ranks.threads(3, work)


def test_C17_groups() -> None:
    def work(world: un.Group) -> None:
        some, half = world.subgroup([3, 1]), world.split(world.rank % 2, key=-world.rank)
        assert half is not None
        assert half.members == ((3, 1) if world.rank % 2 else (2, 0))
        half.broadcast(x := np.array([world.rank]), src=0)
        assert x[0] == (3 if world.rank % 2 else 2)
        half.close()
        assert (some is None) == (world.rank not in (1, 3))
        if some is not None:
            assert some.members[some.rank] == world.rank
            some.close()
        world.barrier()

    ranks.threads(4, work)


def test_C18_all_reduce_is_reduce_scatter_then_all_gather() -> None:
    def work(group: un.Group) -> None:
        x = oracle.data(group.rank, 3000, "float32").reshape(3, 1000)
        block, whole, reduced = np.zeros(1000, np.float32), np.zeros_like(x), x.copy()
        group.reduce_scatter(block, x)
        group.all_gather(whole, block)
        group.all_reduce(reduced, algorithm="two_shot")
        assert whole.tobytes() == reduced.tobytes()

    ranks.threads(3, work)


def test_C19_every_rank_has_the_same_bits() -> None:
    for algorithm in ("one_shot", "two_shot", "ring", "binomial"):

        def work(group: un.Group, algorithm: str = algorithm) -> bytes:
            x = oracle.data(group.rank, 1001, "float32").copy()
            group.all_reduce(x, algorithm=algorithm)
            return x.tobytes()

        assert len(set(ranks.threads(5, work))) == 1


def test_A7_golden_trace_on_the_engine() -> None:
    """The result of the trace; its steps are in the table below."""

    def work(group: un.Group) -> None:
        x = np.array([[2, 4, 6], [1, 2, 3], [4, 8, 12]][group.rank], np.float64)
        mean = x.copy()
        group.all_reduce(x, algorithm="ring")
        group.all_reduce(mean, un.AVG, algorithm="ring")
        assert x.tolist() == [7, 14, 21]
        assert mean.tolist() == [7 / 3, 14 / 3, 7]

    ranks.threads(3, work)


ELSEWHERE = {
    "C1-C18": ["property/test_programs.py::test_any_program_gives_what_numpy_gives"],
    "C7": ["conformance/test_arguments.py::test_wrong_arguments_are_refused_and_the_group_goes_on"],
    "C11": [
        "conformance/test_messages.py::test_receive_from_anybody",
        "conformance/test_messages.py::test_tags_pick_messages_out_of_order",
        "torch/checks/collectives.py::check_batch_isend_irecv",
    ],
    "C12": ["unit/test_encoding_trust.py::test_pickle_only_on_request_on_both_sides"],
    "C14": ["conformance/test_collectives.py::test_16_bit_floats_round_as_numpy_does"],
    "C16": ["torch/checks/works.py::check_many_in_flight"],
    "A1-A12": ["plans/test_catalog.py::test_catalog_is_proved", "unit/test_price.py::test_formulas"],
    "A7": ["plans/test_numbers.py::test_golden_trace_of_the_ring"],
    "A12": ["plans/test_numbers.py::test_nobody_leaves_a_barrier_before_everybody_came"],
    "G1": ["unit/test_rendezvous.py::test_arguments_that_exclude_each_other"],
    "G2": [
        "unit/test_rendezvous.py::test_each_missing_variable_is_named",
        "unit/test_env.py::test_two_sources_that_disagree_are_both_named",
        "multiproc/test_rendezvous_of_processes.py::test_env_from_each_launcher",
    ],
    "G3": ["unit/test_rendezvous.py::test_all_ranks_know_each_other"],
    "G4": ["multiproc/test_rendezvous_of_processes.py::test_repeated_runs_with_kills_in_between"],
    "G5": [
        "conformance/test_store.py::test_dict_like_view",
        "conformance/test_store.py::test_compare_set_follows_pytorch",
    ],
    "G7": [
        "multiproc/test_launched_jobs.py::test_every_line_has_its_prefix_and_its_stream",
        "multiproc/test_launch_endings.py::test_ctrl_c_ends_those_who_ignore_it",
        "multiproc/test_launch_endings.py::test_exit_code_is_kept",
    ],
    "G8": [
        "multiproc/test_ranks_that_die.py::test_sigkill_of_any_rank_at_any_moment_is_named_within_a_second"
    ],
    "G9": ["unit/test_doctor.py::test_report_names_everything"],
    "R1": ["multiproc/test_ranks_that_die.py::test_rank_that_never_calls_is_named_in_the_timeout"],
    "R2": [
        "multiproc/test_ranks_that_die.py::test_sigkill_of_any_rank_at_any_moment_is_named_within_a_second"
    ],
    "R3": [
        "multiproc/test_mismatches.py::test_mismatch_shows_both_calls",
        "property/test_programs.py::test_ranks_that_differ_are_all_told",
    ],
    "R4": ["multiproc/test_launch_endings.py::test_a_killed_launcher_leaves_nothing"],
    "R5": [
        "conformance/test_edges.py::test_child_of_a_fork_leaves_the_group_alone",
        "multiproc/test_ranks_that_die.py::test_ctrl_c_in_a_wait_is_heard",
    ],
    "R6": ["unit/test_store_server.py::test_a_flood_before_hello_is_cut_short"],
    "R7": ["multiproc/test_rendezvous_of_processes.py::test_malformed_and_missing_variables"],
    "T1": ["torch/checks/sharded.py::check_fully_shard", "torch/checks/sharded.py::check_dtensor"],
    "T3": [
        "torch/checks/training.py::check_distributed_sampler",
        "torch/checks/training.py::check_checkpoint",
    ],
}


@cache
def functions(path: str) -> set[str]:
    return {
        node.name for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef)
    }


@each("row", ELSEWHERE)
def test_rows_that_are_tested_elsewhere(row: str) -> None:
    for test in ELSEWHERE[row]:
        path, _, name = test.partition("::")
        assert name in functions(path), f"{row}: there is no {test}"
