"""Which plans combine contributions in the order of ranks: the prover tells."""

import numpy as np

from loops import each
from unisono.plans import ALGORITHMS, CONTRACTS, Out, Reduce, Send, build, make, others, prove

CANONICAL = {
    "reduce": {"direct"},
    "all_reduce": {"one_shot", "two_shot"},
    "reduce_scatter": {"direct"},
    "scan": {"direct"},
    "exclusive_scan": {"direct"},
}


@each("collective", CANONICAL)
@each("size", [3, 5, 8])
def test_canonical_algorithms_are_proved(collective: str, size: int) -> None:
    assert CONTRACTS[collective].reduces
    fit = {name for name in ALGORITHMS[collective] if prove(make(collective, name, size)).canonical}
    assert fit >= CANONICAL[collective]
    assert "ring" not in fit
    assert "binomial" not in fit


def test_two_ranks_leave_a_ring_no_choice_in_one_half_only() -> None:
    """Around a ring of two, each partition begins with another rank's contribution."""
    assert not prove(make("all_reduce", "ring", 2)).canonical
    assert prove(make("reduce", "binomial", 2)).canonical


def test_another_order_is_not_canonical() -> None:
    def backwards(rank: int, size: int, root: int):
        yield Send(Out(0), to=others(rank, size))
        yield Reduce(Out(0), frm=tuple(reversed(range(size))))

    assert not prove(build("all_reduce", "backwards", backwards, 3)).canonical


def test_numbers_of_numpy_do_not_overflow() -> None:
    assert others(np.int8(120), np.int8(127)) == others(120, 127)
    assert make("all_reduce", "ring", np.int8(100)) == make("all_reduce", "ring", 100)
