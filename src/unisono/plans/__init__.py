"""Collectives as plans: data that can be proved, priced and run. Standard library only.

plan.py        the steps: Send, Recv, Reduce, Copy; Plan
contracts.py   what each collective promises
proof.py       shows that a plan keeps the promise, for a given number of ranks
lowering.py    flattens a plan for the engine
provenance.py  traces one rank's results back, to lower only its code
zero_copy.py   which messages may be read in the sender's memory
custom.py      the caller's own algorithms
catalog.py     all algorithms by name
all other modules   the algorithms
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.plans.catalog import ALGORITHMS, PLACED, algorithm_names, make
from unisono.plans.contracts import CONTRACTS
from unisono.plans.lowering import lower, lower_rank
from unisono.plans.plan import (
    Chunk,
    Copy,
    In,
    Out,
    Plan,
    Recv,
    Reduce,
    Send,
    StepFunction,
    Tmp,
    build,
    by_host,
    exchange,
    others,
)

if TYPE_CHECKING:
    from unisono.plans.proof import Proof, prove

__all__ = [
    "ALGORITHMS",
    "CONTRACTS",
    "PLACED",
    "Chunk",
    "Copy",
    "In",
    "Out",
    "Plan",
    "Proof",
    "Recv",
    "Reduce",
    "Send",
    "StepFunction",
    "Tmp",
    "algorithm_names",
    "build",
    "by_host",
    "exchange",
    "lower",
    "lower_rank",
    "make",
    "others",
    "prove",
]


if not TYPE_CHECKING:  # to a type checker a name that does not exist is an error

    def __getattr__(name: str) -> Any:
        if name in ("Proof", "prove"):  # imported late: most ranks prove nothing
            from unisono.plans import proof

            return getattr(proof, name)
        raise AttributeError(f"module 'unisono.plans' has no attribute {name!r}")
