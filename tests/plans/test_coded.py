"""Plans whose edges carry codes: proved, lowered alike, and refused where they would lose more."""

from __future__ import annotations

import pytest

from loops import each
from unisono.errors import PlanError
from unisono.plans import lower, lower_rank, make, prove
from unisono.plans.coded_edges import CODED, IN_PIECES
from unisono.plans.contracts import CONTRACTS

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
