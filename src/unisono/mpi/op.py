"""`Op`: what a reduction does, on arrays and on Python objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.engine.operations.functions import MAXLOC, MINLOC, VALUES, UserOp
from unisono.engine.operations.reduction import ReduceOp
from unisono.mpi import constants
from unisono.mpi.byte_memory import buffer
from unisono.mpi.datatype import Datatype
from unisono.mpi.errors import Exception, wrong_class
from unisono.mpi.handle import Handle, State, getter
from unisono.mpi.layout import Type
from unisono.mpi.message_spec import simple

_ENGINE_TYPES = "bBhilqfd"
"""NumPy's characters of the types that the engine reduces for every operation."""


class _Operation(State):
    """arrays(a, b): a op b.  objects: the same of two objects.  engine: the engine's operation, or None.

    kinds: NumPy's kinds of types that it takes.  user: the program's function.
    functions: for types that the engine does not reduce by itself, what it calls.
    """

    def __init__(
        self, name: str, objects: Any, arrays: Any, kinds: str, engine: ReduceOp | None, commutes: bool = True
    ) -> None:
        self.name, self.objects, self.arrays, self.kinds = name, objects, arrays, kinds
        self.engine, self.commutes = engine, commutes
        self.user: Callable[..., Any] | None = None
        self.functions: dict[Type, UserOp] = {}


class Op(Handle):
    """An operation of reductions. `op(x, y)` applies it to objects."""

    _null = constants.ERR_OP

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> Op:
        """An operation of a function (inbuf, inoutbuf, datatype), which leaves the result in `inoutbuf`."""
        if not callable(function):
            raise TypeError("function: expected a callable")
        state = _Operation("", function, None, "", None, bool(commute))
        state.user = function
        return cls._of(state)

    def Free(self) -> None:
        """Release it."""
        self._alive()
        self._refuse_constant("freed")
        self._state = None

    Is_commutative, is_commutative = getter("Whether operands may be swapped.", lambda state: state.commutes)
    is_predefined = property(
        lambda self: self._state is None or self._state.user is None, doc="Whether no program has made it."
    )

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Reduce `inbuf` into `inoutbuf`."""
        source, target = simple(inbuf, writable=False), simple(inoutbuf, writable=True)
        check_alike(source, target)
        packed = target.pack() if target.dense else target.pack().copy()
        fold(self, source.pack(), packed, target.type)
        target.fill(packed)

    def __call__(self, x: Any, y: Any) -> Any:
        if self._state is None:
            raise ValueError("cannot call the null operation")
        state = self._alive()
        if state.user is None:
            return state.objects(x, y)
        state.user(x, y, None)
        return y

    def __reduce__(self) -> Any:
        if self._state is None or self._state.user is None:
            return super().__reduce__()
        return type(self).Create, (self._state.user, self._state.commutes)


def check_alike(source: Any, target: Any) -> None:
    """Check that both sides of a reduction have the same type and count."""
    if source.type is not target.type:
        raise ValueError("mismatch in send and receive MPI datatypes")
    if source.count != target.count:
        raise ValueError(f"mismatch in send count {source.count} and receive count {target.count}")


def check_type(op: Op, kind: Type) -> None:
    """Check that an operation takes a type.

    Raises:
        Exception: it does not (ERR_OP), or it is null.
    """
    if not isinstance(op, Op):
        raise wrong_class("op", "Op", op)
    state = op._alive()
    if state.user is not None or state.name in ("MPI_REPLACE", "MPI_NO_OP"):
        return
    if kind.dtype is None or kind.dtype.kind not in state.kinds:
        raise Exception(constants.ERR_OP, f"{state.name} has no meaning for {kind.name or kind.dtype}")


def fold(op: Op, source: Any, target: Any, kind: Type) -> None:
    """target = source op target, of packed items."""
    state, layout = op._alive(), kind.layout
    check_type(op, kind)
    if 0 < layout.size < layout.extent and layout.offsets.min() >= 0 and layout.offsets.max() < layout.extent:
        count = target.size // layout.size  # a function, and a dtype, know items with their gaps
        a, b = (np.zeros(count * layout.extent, np.uint8) for _ in range(2))
        for packed, raw in ((source, a), (target, b)):
            layout.unpack(packed, raw, 0)
        _apply(state, a, b, kind)
        target[:] = layout.pack(b, 0, count)
    else:
        _apply(state, source, target, kind)


def _apply(state: _Operation, source: Any, target: Any, kind: Type) -> None:
    if state.user is not None:
        state.user(buffer(source), buffer(target), Datatype._of(kind))
    elif state.name == "MPI_REPLACE":
        target[:] = source
    elif state.name != "MPI_NO_OP" and target.size:
        values = target.view(kind.dtype)
        values[...] = state.arrays(source.view(kind.dtype), values)


def check_function(op: Any) -> None:
    """Check the operation of a reduction of objects: an `Op`, or any function of two.

    Raises:
        TypeError: it is none.  Exception: it is null.
    """
    if isinstance(op, Op):
        op._alive()
    elif not callable(op):
        raise wrong_class("op", "Op or function", op)


def engine_op(op: Op, kind: Type) -> tuple[ReduceOp | UserOp | None, Any]:
    """The engine's operation for a type, and NumPy's dtype for its items; None: it has none."""
    state = op._state
    if state is None or (state.user is None and state.arrays is None):
        return None, None
    if state.engine is not None and kind.dtype is not None and kind.dtype.char in _ENGINE_TYPES:
        return (state.engine if kind.dtype.kind in state.kinds else None), kind.dtype
    found = state.functions.get(kind)
    if found is None:
        function = functools.partial(_folded, op, kind)
        found = state.functions[kind] = UserOp(function, state.commutes, state.name or None, state.user)
    return found, np.dtype((np.void, kind.layout.size))


def _folded(op: Op, kind: Type, a: Any, b: Any) -> Any:
    target = b.copy()
    fold(op, a.view(np.uint8), target.view(np.uint8), kind)
    return target


def _logical(function: Any) -> Any:
    return lambda a, b: function(a.astype(bool), b.astype(bool))


def _predefined() -> dict[str, Op]:
    engine = ReduceOp
    numbers, ordered, truth, bits = "iufc", "iuf", "iufb", "iub"
    rows: dict[str, Any] = {
        "MAX": (VALUES["MAX"], np.maximum, ordered + "b", engine.MAX),
        "MIN": (VALUES["MIN"], np.minimum, ordered + "b", engine.MIN),
        "SUM": (VALUES["SUM"], np.add, numbers + "b", engine.SUM),
        "PROD": (VALUES["PRODUCT"], np.multiply, numbers + "b", engine.PRODUCT),
        "LAND": (lambda x, y: bool(x) & bool(y), _logical(np.logical_and), truth, None),
        "BAND": (VALUES["BAND"], np.bitwise_and, bits, engine.BAND),
        "LOR": (lambda x, y: bool(x) | bool(y), _logical(np.logical_or), truth, None),
        "BOR": (VALUES["BOR"], np.bitwise_or, bits, engine.BOR),
        "LXOR": (lambda x, y: bool(x) ^ bool(y), _logical(np.logical_xor), truth, None),
        "BXOR": (VALUES["BXOR"], np.bitwise_xor, bits, engine.BXOR),
        "MAXLOC": (MAXLOC, MAXLOC, "V", None),
        "MINLOC": (MINLOC, MINLOC, "V", None),
        "REPLACE": (lambda _, y: y, None, "", None, False),
        "NO_OP": (lambda x, _: x, None, "", None, False),
    }
    return {name: Op._of(_Operation(f"MPI_{name}", *row)) for name, row in rows.items()}


OPS = _predefined()
OP_NULL = Op()
