"""Reductions that a library does not have: every rank gathers all contributions, and combines them itself.

The result is exact and in the order of ranks, but expensive: p times the memory and the traffic of a
broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from unisono.engine.operations.reduction import ReduceOp


def reduce_gathered(torch: Any, parts: Sequence[Any], op: ReduceOp) -> Any:
    """The reduction of tensors, one after another. MIN and MAX propagate NaN."""
    functions = {
        ReduceOp.SUM: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    return reduce(functions[op], parts)
