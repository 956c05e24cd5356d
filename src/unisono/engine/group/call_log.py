"""What the log says of a group's calls, and of its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.engine.environment.event_log import LOG
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES
from unisono.engine.operations.functions import UserOp
from unisono.engine.operations.reduction import ReduceOp
from unisono.plans.contracts import CONTRACTS

if TYPE_CHECKING:
    from unisono.engine.group.arguments import CallArguments
    from unisono.engine.group.planning import Planner

__all__ = ["log_call", "log_end"]


def log_call(
    planner: Planner[Any], call: CallArguments, algorithm: str, note: str | None, dtype: int, numel: int
) -> None:
    """A kind of call: once for each size class (a power of two) at level 1, at level 2 each new call."""
    nbytes = numel * ITEMSIZES[dtype]
    key = (call.kind, algorithm, dtype, call.op.name, nbytes.bit_length())
    again = key in planner.logged
    if again and LOG.level < 2:
        return
    planner.logged.add(key)
    op = f" {call.op.name}" if isinstance(call.op, ReduceOp | UserOp) and CONTRACTS[call.plan].reduces else ""
    what = f"{call.kind}{op} {DTYPES[dtype]}[{numel}] ({nbytes} bytes)" if numel else call.kind
    line = f"group {planner.name}: {what}: {algorithm}{f', {note}' if note else ''}"
    if again:
        LOG.debug("coll", line)
    else:
        LOG.info("coll", f"{line} ({planner.reason(call, nbytes, algorithm)})")


def log_end(planner: Planner[Any], issued: int, cause: str) -> None:
    """The end of a group."""
    because = f" because of {cause}" if cause else ""
    LOG.info("init", f"group {planner.name}: closed after {issued} collectives{because}")
