"""The arguments of a collective besides its buffers, and their checks; the checked arguments of a message."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono import _native
from unisono.engine.memory.buffers import DTYPES, REDUCIBLE, instead
from unisono.engine.operations.functions import UserOp
from unisono.engine.operations.kinds import kind_of
from unisono.engine.operations.reduction import Op, PremulSum, ReduceOp
from unisono.plans import ALGORITHMS, CONTRACTS, StepFunction

if TYPE_CHECKING:
    import numpy as np

    from unisono.engine.memory.strided import Unpacking

_OPS = (ReduceOp, PremulSum, UserOp)
_OP_NAMES = ", ".join(f"un.{op.name}" for op in ReduceOp)


class CodecArguments(NamedTuple):
    """The codec arguments of a call as the caller gave them, see `Group`."""

    codec: Any
    between_hosts: Any = None
    feedback: Any = None
    max_error: Any = None


class CallArguments(NamedTuple):
    """The arguments of a call.

    Attributes:
        kind: of the call, see `kinds`.  algorithm: a name, the caller's function, or None: chosen by size.
        reproducible: contributions are combined in the order of ranks, as the call or the group asks.
        coding: None: the caller gave no argument about a codec.
        element: NumPy's dtype of the buffers, for a function; None: the op is none.
    """

    kind: str
    op: Op = ReduceOp.SUM
    root: int = 0
    algorithm: str | StepFunction | None = None
    reproducible: bool = False
    coding: CodecArguments | None = None
    element: np.dtype[Any] | None = None

    @property
    def plan(self) -> str:
        """The collective whose plan runs: that of `all_reduce_coalesced` is "all_reduce"."""
        return kind_of(self.kind).plan


OBJECT_FORM = 1 << 8  # added to the dtype of a message that is an object


class MessageArguments(NamedTuple):
    """One message, checked: what both an engine and a library need to move it.

    Attributes:
        name: of the caller's method.  address, numel, dtype: of its buffer; `keep` pins it.
        rank, tag: -1 for any.  exact: a shorter message is a Mismatch, too.
        form: the form of a message of codes; None: that of the array.
        synchronous: a send that is done only when a receive has matched it.
        unpack: of a receive into a packed array: writes so many bytes of it back, see `strided`.
    """

    name: str
    address: int
    numel: int
    dtype: int
    rank: int
    tag: int
    timeout: float | timedelta | None
    keep: Any
    receiving: bool
    exact: bool = False
    form: int | None = None
    synchronous: bool = False
    unpack: Unpacking | None = None


def check_algorithm(kind: str, algorithm: Any) -> None:
    """Raises TypeError: it is neither a name, the name of a file, nor a function."""
    if algorithm is not None and not isinstance(algorithm, str) and not callable(algorithm):
        raise TypeError(
            f"{kind}: algorithm is a {type(algorithm).__name__}, expected a name, a file or a function"
        )


def check_beside(call: CallArguments) -> None:
    """Raises ValueError: such a call has no `out`."""
    if call.coding is not None or not (call.algorithm is None or call.algorithm in ALGORITHMS[call.plan]):
        what = "codec=" if call.coding is not None else "an algorithm of your own"
        raise ValueError(
            f"{call.kind}: out= does not go with {what}; copy x into it first, and reduce it in place"
        )


def check_op(kind: str, op: Any) -> None:
    """Raises TypeError: it is no reduction operation."""
    if type(op) not in _OPS:
        raise TypeError(f"{kind}: op is {op!r}, expected {_OP_NAMES}, premul_sum(factor) or op(f)")


def check_reducible(kind: str, dtype: int, op: Op) -> None:
    """Raises TypeError, ValueError: the operation has no meaning for the dtype, or for this collective."""
    if not CONTRACTS[kind_of(kind).plan].reduces or type(op) is UserOp:
        return
    if DTYPES[dtype] not in REDUCIBLE:
        raise TypeError(f"{kind}: {DTYPES[dtype]} is moved, not reduced{instead(DTYPES[dtype])}")
    if not _native.reducible(dtype, op.value):
        raise TypeError(f"{kind}: {op.name} has no meaning for {DTYPES[dtype]}{_hint(op, dtype)}")
    if kind in ("scan", "exclusive_scan") and op is ReduceOp.AVG:
        raise ValueError(f"{kind}: AVG has no meaning for a prefix; use SUM")


def element_type(kind: str, dtype: int, buffers: tuple[Any, ...]) -> np.dtype[Any] | None:
    """NumPy's dtype of the buffers that a function gets; None: the call reduces nothing.

    Raises:
        TypeError: NumPy has no such type, or the buffers have several.
    """
    if not CONTRACTS[kind_of(kind).plan].reduces or kind == "barrier":
        return None
    import numpy as np

    given = [each for side in buffers for each in (side if isinstance(side, (list, tuple)) else [side])]
    found: set[np.dtype[Any]] = {each.dtype for each in given if isinstance(each, np.ndarray)}
    if len(found) > 1:
        raise TypeError(f"{kind}: the arrays are of several dtypes: {', '.join(map(str, found))}")
    if found:
        return found.pop()
    from unisono.engine.encoding.dtypes import restore

    try:
        return restore(DTYPES[dtype]) if DTYPES[dtype] == "bfloat16" else np.dtype(DTYPES[dtype])
    except (TypeError, ValueError) as error:
        name = DTYPES[dtype]
        raise TypeError(f"{kind}: a function gets arrays of NumPy, which has no {name}: {error}") from None


def _hint(op: Op, dtype: int) -> str:
    if op is ReduceOp.AVG:
        return "; use SUM and divide, or a floating-point dtype"
    return "; complex numbers have no order" if DTYPES[dtype].startswith("complex") else ""
