"""Collectives as plans: data that is proved, priced and run. Standard library only.

plan.py       the words: Send, Recv, Reduce, Copy; Plan
contracts.py  what each collective promises
proof.py      shows that a plan keeps the promise, for a given number of ranks
lowering.py   flattens a plan for the engine
catalog.py    all algorithms by name           choose.py  which one when
direct.py, ring.py, tree.py, linear.py, dissemination.py   the algorithms
"""

from __future__ import annotations

from unisono.plans.catalog import ALGORITHMS, algorithm_names, make
from unisono.plans.choose import choose
from unisono.plans.contracts import CONTRACTS
from unisono.plans.lowering import lower
from unisono.plans.plan import Chunk, Copy, In, Out, Plan, Recv, Reduce, Send, Tmp, build, others
from unisono.plans.proof import Proof, prove

__all__ = [
    "ALGORITHMS",
    "CONTRACTS",
    "Chunk",
    "Copy",
    "In",
    "Out",
    "Plan",
    "Proof",
    "Recv",
    "Reduce",
    "Send",
    "Tmp",
    "algorithm_names",
    "build",
    "choose",
    "lower",
    "make",
    "others",
    "prove",
]
