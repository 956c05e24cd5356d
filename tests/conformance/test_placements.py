"""Every algorithm over the real engine, on groups that are told their ranks are on several hosts."""

import numpy as np
import pytest

import cases
import effort
import inside
import ranks
import unisono as un
from loops import each
from unisono.errors import PlanError
from unisono.plans import ALGORITHMS

PLACEMENTS = effort.cases(
    [(0, 0, 1, 1), (0, 1, 0, 1, 1), (0, 1, 1, 2, 2, 2)], long=[(0, 1, 2, 3), (0, 1, 1, 2, 2, 2, 2)]
)


def placed(group: un.Group, hosts: tuple[int, ...]) -> un.Group:
    inside.place(group, hosts)
    return group


@each("hosts", PLACEMENTS)
def test_every_algorithm_on_hosts(hosts: tuple[int, ...]) -> None:
    def work(group: un.Group) -> None:
        placed(group, hosts)
        for numel in (0, 13, cases.SEGMENT_BYTES // 4 + 5):
            for algorithm in ALGORITHMS["all_reduce"]:
                for op in (un.SUM, un.AVG):
                    cases.all_reduce(group, "float32", op, algorithm, numel)
            for algorithm in ALGORITHMS["reduce"]:
                cases.reduce(group, "float32", un.SUM, algorithm, numel)
            for algorithm in ALGORITHMS["reduce_scatter"]:
                cases.reduce_scatter(group, "float32", un.AVG, algorithm, numel, in_place=numel == 13)
            cases.moves(group, "float32", numel)
        cases.uneven(group)

    ranks.threads(len(hosts), work)


@each("hosts", PLACEMENTS)
def test_chosen_algorithm_on_hosts(hosts: tuple[int, ...]) -> None:
    def work(group: un.Group) -> None:
        placed(group, hosts)
        for numel in (0, 1, 1000, 1 << 20):
            x = np.full(numel, group.rank + 1.0, np.float32)
            for _ in range(2):  # the second time the quick way
                group.all_reduce(x, un.MAX)
                assert (x == group.size).all()
            group.broadcast(x)
            group.reduce(x)
        cases.in_flight(group)
        group.barrier()

    ranks.threads(len(hosts), work)


def test_a_new_placement_makes_new_plans() -> None:
    def work(group: un.Group) -> None:
        for hosts in ((0, 0, 0), (0, 1, 2), (0, 1, 1)):
            placed(group, hosts)
            x = np.full(10, group.rank + 1.0)
            group.all_reduce(x, algorithm="hierarchical")
            group.all_reduce(x)
            assert (x == 18).all()

    ranks.threads(3, work)


def test_an_unknown_algorithm_is_refused_with_the_names_there_are() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(PlanError, match="gather has no algorithm 'ring'; it has binomial, direct, hier"):
            group.gather(np.zeros(1), np.zeros(2) if group.rank == 0 else None, algorithm="ring")
        with pytest.raises(ValueError, match="2 ranks, expected 1|1 ranks, expected 2"):
            placed(group, (0,))

    ranks.threads(2, work)


def test_only_direct_moves_blocks_of_different_sizes() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            with pytest.raises(ValueError, match="blocks have 1 to 2 elements"):
                group.gather(np.zeros(1), [np.zeros(1), np.zeros(2)], algorithm="binomial")

    ranks.threads(2, work)
