"""The loop of `un.elastic` over the groups of a program, where faults come early, or again and again."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import ranks
import unisono as un
from unisono.engine.group import elastic_loop
from unisono.engine.group.elastic_loop import ElasticLoop


@pytest.mark.parametrize("per_host", [3, 1])
def test_a_rank_that_is_lost_while_the_first_group_begins_to_listen_is_out(per_host: int) -> None:
    """`un.elastic` listens before the first turn: a loss there is dealt with like any other."""

    def work(group: Any) -> None:
        if group.rank == 2:
            group.close()
            return
        loop = ElasticLoop(group, 1, None)
        loop.listen(("127.0.0.1", 0))
        assert [one.rank for one in loop.group.left] == [2]
        x = np.ones(4)
        loop.group.all_reduce(x)
        assert (x == 2).all()
        assert loop.group.waiting() == 0  # it listens, too
        loop.group.barrier()
        loop.close()

    ranks.threads(3, work, per_host=per_host)


def turns_that_abort(size: int) -> list[int]:
    """How many turns of a loop each rank has made until its fault was raised; at most five."""

    def work(group: Any) -> int:
        loop = ElasticLoop(group, 1, None)
        for turn in range(1, 6):
            with pytest.raises(un.Aborted) as fault, contextlib.ExitStack() as ends:
                ends.callback(loop.group.abort)
                loop.group.barrier()
                raise un.Aborted("the program's own")
            loop.leave(fault.value)
            try:
                assert loop.next_group()
            except un.Aborted:
                return turn
        loop.close()
        return 5

    found: list[int] = ranks.threads(size, work, per_host=size)
    return found


def test_a_fault_after_which_nobody_is_out_is_raised_if_it_comes_again_and_again() -> None:
    assert turns_that_abort(2) == [elastic_loop.MOST_VAIN] * 2


def test_faults_far_from_each_other_are_dealt_with_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_loop, "STEADY_S", float("-inf"))
    assert turns_that_abort(2) == [5, 5]
