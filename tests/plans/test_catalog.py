"""Every algorithm of the catalogue is proved, for every number of ranks up to 17 and every root."""

import pytest

from effort import cases
from loops import each
from unisono.engine.costs.tuner import choose
from unisono.errors import PlanError
from unisono.plans import ALGORITHMS, CONTRACTS, algorithm_names, make, prove
from unisono.plans.proof import run
from unisono.plans.tree import children

NAMES = [(collective, name) for collective in ALGORITHMS for name in ALGORITHMS[collective]]


# Powers of two, their neighbours, products and primes.
SIZES = cases([*range(1, 10), 12, 16, 17, 32], long=[10, 11, 13, 14, 15, 33, 64])
ALL_ROOTS = 9


def roots(collective: str, size: int) -> range:
    """All; of many ranks one, for those proofs take long."""
    if not CONTRACTS[collective].rooted:
        return range(1)
    return range(size) if size <= ALL_ROOTS else range(size // 3, size // 3 + 1)


@each(("collective", "algorithm"), NAMES)
@each("size", SIZES)
def test_catalog_is_proved(collective: str, algorithm: str, size: int) -> None:
    for root in roots(collective, size):
        prove(make(collective, algorithm, size, root))


SEVERAL_AT_ONCE = ("linear", "doubling", "halving", "halving_doubling", "bruck", "torus")


@each(("collective", "algorithm"), [name for name in NAMES if name[1] not in SEVERAL_AT_ONCE])
def test_two_messages_on_an_edge_are_enough(collective: str, algorithm: str) -> None:
    """All but the yardsticks and those that send many chunks together run with far less room."""
    for size in (2, 5, 8, 17):
        prove(make(collective, algorithm, size), edge_capacity=2)


def test_every_collective_has_an_algorithm_and_the_chooser_knows_it() -> None:
    assert list(ALGORITHMS) == list(CONTRACTS)
    for collective, algorithms in ALGORITHMS.items():
        for size in (1, 2, 8, 100):
            for nbytes in (0, 4, 1 << 14, 1 << 30):
                assert choose(collective, size, nbytes) in algorithms


def test_names_fit_their_place_in_the_lowered_plan() -> None:
    names = algorithm_names()
    assert names == sorted(set(names)) and len(names) < 255  # 255 stands for one that is not in the catalogue


def test_an_unknown_algorithm_is_named_with_those_there_are() -> None:
    with pytest.raises(
        PlanError, match="all_reduce has no algorithm 'rnig'; it has aggregator, binomial, double_tree, doub"
    ):
        make("all_reduce", "rnig", 4)


def test_every_algorithm_has_a_docstring_and_its_module_a_source() -> None:
    for collective, algorithm in NAMES:
        function = ALGORITHMS[collective][algorithm]
        assert function.__doc__
        module = __import__(function.__module__, fromlist=["__doc__"])
        assert "Source:" in module.__doc__ or module.__name__.endswith(".linear"), module.__name__


def test_binomial_children() -> None:
    assert (children(0, 8), children(4, 8), children(6, 8)) == ([1, 2, 4], [5, 6], [7])
    for size in range(1, 40):
        below = [child for place in range(size) for child in children(place, size)]
        assert sorted(below) == list(range(1, size))  # everybody but the root hangs below one other


def test_messages_in_flight() -> None:
    """As many as there are chunks: the engine's segments are made for that, and nobody needs more."""
    assert run(make("all_reduce", "one_shot", 8))[0] == 1
    for collective, algorithm in NAMES:
        plan = make(collective, algorithm, 8)
        assert run(plan)[0] == max(1, plan.chunks("out"), plan.chunks("in")), plan
    assert run(make("broadcast", "direct", 8))[0] == 1
