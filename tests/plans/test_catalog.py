"""Every algorithm of the catalogue is proved, for many numbers of ranks and every root; also with codes."""

from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

import pages
from effort import cases
from loops import each
from python_runs import fine
from unisono.engine.costs.tuner import choose
from unisono.errors import PlanError
from unisono.plans import (
    ALGORITHMS,
    CONTRACTS,
    Out,
    Recv,
    Reduce,
    Send,
    algorithm_names,
    build,
    lower,
    lower_rank,
    make,
    others,
    prove,
)
from unisono.plans.agreement import agreement
from unisono.plans.coded_edges import CODED, IN_PIECES
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


# ---- which plans combine contributions in the order of ranks: the prover tells ----


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


def test_which_algorithms_compute_a_result_once() -> None:
    """Reduction functions run in these alone; each collective has one in the order of ranks."""
    for size in (2, 3, 5, 8):
        proofs = {name: prove(make("all_reduce", name, size)) for name in ALGORITHMS["all_reduce"]}
        assert not proofs["one_shot"].once and not proofs["doubling"].once
        assert proofs["two_shot"].once and proofs["ring"].once and proofs["binomial"].once
        for collective in ("all_reduce", "reduce", "reduce_scatter", "scan", "exclusive_scan"):
            every = [prove(make(collective, name, size)) for name in ALGORITHMS[collective]]
            assert any(proof.once and proof.canonical for proof in every), collective


def test_another_order_is_not_canonical() -> None:
    def backwards(rank: int, size: int, root: int):
        yield Send(Out(0), to=others(rank, size))
        yield Reduce(Out(0), frm=tuple(reversed(range(size))))

    assert not prove(build("all_reduce", "backwards", backwards, 3)).canonical


def test_numbers_of_numpy_do_not_overflow() -> None:
    assert others(np.int8(120), np.int8(127)) == others(120, 127)
    assert make("all_reduce", "ring", np.int8(100)) == make("all_reduce", "ring", 100)


# ---- plans whose edges carry codes: proved, lowered alike, and refused where they would lose more ----


PLACEMENTS = [(), (0, 1), (0, 0, 1), (0, 1, 2, 3), (0, 1, 0, 1, 1), (0, 0, 0, 1, 1, 2), (0, 1, 1, 2, 2, 2, 2)]
WAYS = [
    *(
        (collective, flat, "all", (), size)
        for collective, (flat, _) in CODED.items()
        for size in (1, 2, 3, 8, 17)
    ),
    *(
        (collective, name, "between", hosts, len(hosts) or 3)
        for collective, (_, placed) in CODED.items()
        for name in {placed, IN_PIECES.get(collective, placed)}
        for hosts in PLACEMENTS
    ),
]


@each("collective, algorithm, coding, hosts, size", WAYS)
def test_plans_for_codes(
    collective: str, algorithm: str, coding: str, hosts: tuple[int, ...], size: int
) -> None:
    for root in range(size if CONTRACTS[collective].rooted else 1):
        plan = make(collective, algorithm, size, root, hosts, coding)
        crosses = size > 1 and (coding == "all" or len(set(hosts)) > 1)
        assert prove(plan).encodings == (2 if collective == "all_reduce" else 1) * crosses
        code = lower(plan)
        for rank in range(size):
            assert lower_rank(rank, collective, algorithm, size, root, hosts, coding) == code[rank]


def test_a_host_sums_are_encoded_once() -> None:
    proof = prove(make("all_reduce", "hierarchical", 4, 0, (0, 0, 1, 1), "between"))
    assert proof.encodings == 2
    codes = ("codes", ((2, 0), (3, 0)))
    assert ("codes", ((0, 0), (1, 0), codes)) in proof.results


@each(
    "collective, algorithm, idempotent, why",
    [
        ("all_reduce", "ring", True, "encodes a partial result in which the contribution of rank 0"),
        ("all_reduce", "binomial", True, "encodes a partial result"),
        ("all_reduce", "doubling", True, "encodes a partial result"),
        ("reduce", "binomial", True, "encodes a partial result"),
        ("reduce_scatter", "ring", True, "encodes a partial result"),
        ("all_gather", "ring", False, "passes on what came as codes"),
        ("all_gather", "direct", True, r"writes In\(0\)"),  # its own block would differ from the others'
        ("broadcast", "binomial", False, "passes on what came as codes"),
    ],
)
def test_what_would_lose_more_is_refused(collective: str, algorithm: str, idempotent: bool, why: str) -> None:
    plan = make(collective, algorithm, 4, coding="all")
    with pytest.raises(PlanError, match=why):
        prove(plan, idempotent=idempotent)
    prove(make(collective, algorithm, 4))


def test_idempotent_codes_may_be_passed_on() -> None:
    for collective, algorithm in (("all_gather", "ring"), ("broadcast", "binomial")):
        assert prove(make(collective, algorithm, 4, coding="all"), idempotent=True).encodings == 1


def test_edges_are_named() -> None:
    with pytest.raises(PlanError, match="coding is 'some'"):
        make("all_reduce", "two_shot", 2, coding="some")


# ---- the plan by which some ranks wait until all have made a call ----


@each("size", range(1, 6))
def test_who_waits_has_heard_of_all_and_no_message_is_left(size: int) -> None:
    for count in range(1, size + 1):
        for waiting in permutations(range(size), count):
            _run(size, waiting)


def _run(size: int, waiting: tuple[int, ...]) -> None:
    coming = {rank: list(agreement(rank, size, waiting)) for rank in range(size)}
    under_way: Counter[tuple[int, int]] = Counter()
    known = {rank: {rank} for rank in range(size)}
    while any(coming.values()):
        ready = [rank for rank, steps in coming.items() if steps and _can(steps[0], rank, under_way)]
        assert ready, ("deadlock", waiting)
        rank = ready[0]
        step = coming[rank].pop(0)
        if isinstance(step, Send):
            under_way.update((rank, peer) for peer in step.to)
        else:
            assert isinstance(step, Recv)
            under_way[step.frm, rank] -= 1
            known[rank] |= known[step.frm]
    assert not +under_way, ("left over", waiting)
    assert all(known[rank] == set(range(size)) for rank in waiting)


def _can(step: object, rank: int, under_way: Counter[tuple[int, int]]) -> bool:
    return not isinstance(step, Recv) or under_way[step.frm, rank] > 0


# ---- docs/algorithms.md and the pages of the algorithms say what the plans say ----


ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_algorithms_is_current() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    made = fine("tools/algorithms.py", cwd=ROOT)
    assert page == made, "run: python tools/algorithms.py > docs/algorithms.md"


def test_every_algorithm_gets_a_page(tmp_path: Path) -> None:
    fine("tools/algorithms.py", tmp_path, cwd=ROOT)
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms:
            name = f"{collective}-{algorithm}"
            page = (tmp_path / f"{name}.md").read_text()
            assert f"({name}.svg)" in page and "def " in page and "rounds, p = " in page
    for page in tmp_path.glob("*.md"):
        for path, _ in pages.links(page.read_text()):
            assert (tmp_path / path).exists(), f"{page.name} links to {path}"
