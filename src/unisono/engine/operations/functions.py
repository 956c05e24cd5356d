"""Reduction functions of the program: `un.op(f)`, MAXLOC and MINLOC, and the operations on Python values.

The engine calls a function with pieces of the ranks' arrays, as it calls its own kernels. A piece has whole
elements; those of a structured dtype are never cut.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import sys
import threading
import traceback
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from unisono._native import COMBINED_BYTES, Combiner
from unisono.engine.base.validation import flag, instance

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Function = Callable[[Any, Any], Any]

SAMPLE = 64
"""So many elements show whether a function combines element by element."""


class UserOp:
    """A reduction by the program's own function, made by `un.op`. Calling it combines two Python values.

    Attributes:
        function, commutative, name: see `op`.
        description: the function and where it is defined, for the text of a Mismatch.
        number: by which ranks compare functions.  value: of all functions in the engine.
        raised: the exception that it raised on this rank in a collective.
    """

    value = 9

    def __init__(self, function: Function, commutative: bool, name: str | None, origin: Any = None) -> None:
        """origin: the function by which ranks compare it; None: this one."""
        inner: Any = function if origin is None else origin
        while isinstance(inner, functools.partial):
            inner = inner.func
        kind = type(inner)
        called = str(getattr(inner, "__qualname__", "") or getattr(inner, "__name__", kind.__qualname__))
        code = getattr(inner, "__code__", None)
        place = "" if code is None else f", {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
        defined = f"{getattr(inner, '__module__', None) or kind.__module__}.{called}{place}"
        self.function, self.commutative = function, commutative
        self.name = called if name is None else name
        description = f"op {self.name} ({defined}{'' if commutative else ', does not commute'})"
        self.description = description.encode("utf-8", "replace").decode()  # a file may have any name
        self.number = _number(self.description)
        self._given_name = name
        self._state: dict[str, BaseException] = {}  # not `self`: combiners would keep it alive for ever
        self._combiners: dict[np.dtype[Any], Combiner] = {}

    def __call__(self, x: Any, y: Any) -> Any:
        """The function of two values."""
        return self.function(x, y)

    def __repr__(self) -> str:
        return f"<{self.description}>"

    def __reduce__(self) -> Any:
        return op, (self.function, self.commutative, self._given_name)

    @property
    def raised(self) -> BaseException | None:
        """The exception that the function raised on this rank in a collective."""
        return self._state.get("raised")

    def combiner(self, dtype: np.dtype[Any], item: int, describe: Callable[[BaseException], str]) -> Combiner:
        """What the engine calls for arrays of this dtype.

        Args:
            item: how many elements of the engine one of them has.
            describe: the text of an exception, for the other ranks.
        """
        found = self._combiners.get(dtype)
        if found is None:
            fold = _Fold(self.function, self.name, dtype, self._state, describe)
            # Of two threads that make one, both take the first: the engine refers to it without a count.
            found = self._combiners.setdefault(dtype, Combiner.of(fold, item))
        return found

    def number_for(self, dtype: np.dtype[Any]) -> int:
        """By which ranks compare calls with this function and dtype."""
        return self.number if dtype.kind != "V" else _number(f"{self.description} {dtype.descr}")


def op(function: Function, commutative: bool = True, name: str | None = None) -> UserOp:
    """Make a reduction operation of a function f(a, b) of two arrays.

    f combines element by element and is associative. It gets NumPy arrays [n] of the call's dtype, for any n,
    and returns such an array. `a` is the result so far and may be overwritten and returned;
    `b` is read-only. It keeps neither. Elements of a structured dtype stay whole. A NumPy ufunc such as
    `np.logaddexp` needs no copies. f runs in the thread that runs the call, and may not call the same group.

    An exception in f aborts the group, with an error on all ranks. Functions that are defined elsewhere on
    other ranks are a Mismatch. `reduce_object` and its like take f of any two Python values.

    Args:
        commutative: False keeps the order of ranks: f(f(x0, x1), x2) ...
        name: for error texts; None: the function's.
    Raises:
        TypeError: it is no function.
    Example: absmax = un.op(lambda a, b: np.where(abs(a) >= abs(b), a, b)); group.all_reduce(x, absmax)
    """
    if isinstance(function, UserOp | type) or not callable(function):
        raise TypeError(f"op: function is {function!r}, expected a function of two arrays")
    name = None if name is None else instance(name, str, "op: name")
    return UserOp(function, flag(commutative, "op: commutative"), name)


class _Fold:
    """Combines memory by a function: what `Combiner` calls."""

    def __init__(
        self,
        function: Function,
        name: str,
        dtype: np.dtype[Any],
        state: dict[str, BaseException],
        describe: Callable[[BaseException], str],
    ) -> None:
        import numpy as np

        self._function: Any = function
        self._name, self._dtype, self._state, self._describe = name, dtype, state, describe
        self._ufunc = isinstance(function, np.ufunc) and (function.nin, function.nout) == (2, 1)
        self._checked = self._ufunc
        self._array: Callable[[memoryview], Array] = functools.partial(np.frombuffer, dtype=dtype)

    def __call__(self, out: memoryview, *inputs: memoryview) -> str | None:
        """Returns the text of an exception, for the other ranks."""
        try:
            self._combine(out, inputs)
        except BaseException as error:  # SystemExit, too, has to end the call on all ranks
            _clear_frames(error)
            if isinstance(error, KeyboardInterrupt) and threading.get_native_id() == os.getpid():
                raise
            self._state["raised"] = error
            return self._describe(error)
        return None

    def _combine(self, out: memoryview, inputs: tuple[memoryview, ...]) -> None:
        arrays = [self._array(each) for each in inputs]
        users = list(map(sys.getrefcount, arrays))
        if not self._checked and out.nbytes >= COMBINED_BYTES:
            self._check(arrays[0][:SAMPLE], arrays[1][:SAMPLE])
            self._checked = True
        combine = self._by_ufunc if self._ufunc else self._by_function
        combine(self._array(out), arrays)
        if list(map(sys.getrefcount, arrays)) != users:
            gc.collect()  # a cycle may hold one, such as an exception that the function has handled
            if list(map(sys.getrefcount, arrays)) != users:  # to read it later is a crash, or other bytes
                raise ValueError(f"{self._name} keeps an array that it was given; let it keep a copy")

    def _by_ufunc(self, out: Array, arrays: list[Array]) -> None:
        """The last step writes to `out`, which may be one of the inputs."""
        total = arrays[0]
        for number, other in enumerate(arrays[1:-1]):
            total = self._function(total, other, out=total if number else out.copy())
        self._function(total, arrays[-1], out=out)

    def _by_function(self, out: Array, arrays: list[Array]) -> None:
        out[...] = functools.reduce(self._combined, arrays[1:], arrays[0].copy())

    def _combined(self, total: Array, other: Array) -> Array:
        """total f other, in memory of its own: the next call may work in place."""
        import numpy as np

        made: Any = self._function(total, other)
        if made is total:
            return np.asarray(total)
        if not isinstance(made, np.ndarray) or made.shape != other.shape or made.dtype != self._dtype:
            found = f"{made.dtype}{list(made.shape)}" if isinstance(made, np.ndarray) else repr(made)[:40]
            wanted = f"{self._dtype}{list(other.shape)}"
            raise TypeError(f"{self._name} returned {found} for two arrays {wanted}, expected such an array")
        fresh: Array = made if made.flags.owndata and made.flags.writeable else made.copy()
        return fresh

    def _check(self, a: Array, b: Array) -> None:
        """Large arrays are cut: a function that mixes elements would give wrong numbers."""
        import numpy as np

        half = len(a) // 2
        whole = self._combined(a.copy(), b)
        parts = [self._combined(a[:half].copy(), b[:half]), self._combined(a[half:].copy(), b[half:])]
        joined = np.concatenate(parts)
        numbers = self._dtype.kind in "fc"
        same = np.allclose(whole, joined, 1e-3, 0.0, True) if numbers else whole.tobytes() == joined.tobytes()
        if not same:
            raise ValueError(
                f"{self._name} does not combine element by element: two halves of an array give another "
                "result than the whole, and collectives cut arrays. Give elements that belong together one "
                "structured dtype, or use all_reduce_object, whose functions get whole values"
            )


def _clear_frames(error: BaseException) -> None:
    """Forget the arrays in the frames of an exception: a debugger that shows them later would crash."""
    each: BaseException | None = error
    for _ in range(sys.getrecursionlimit()):  # a program may chain exceptions in a circle
        if each is None:
            return
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little") | 1


# ---- operations on Python values, and on pairs ---------------------------------------------------------

VALUES: dict[str, Function] = {
    "SUM": operator.add,
    "PRODUCT": operator.mul,
    "MIN": lambda x, y: y if y < x else x,
    "MAX": lambda x, y: y if y > x else x,
    "BAND": operator.and_,
    "BOR": operator.or_,
    "BXOR": operator.xor,
}
"""What an operation of the engine is on two Python values."""


def of_values(kind: str, op: Any) -> Function:
    """The function of two Python values of an operation. Raises TypeError: it has none."""
    found = op if isinstance(op, UserOp) else VALUES.get(getattr(op, "name", ""))
    if found is None:
        raise TypeError(f"{kind}: op is {op!r}, expected un.{', un.'.join(VALUES)} or un.op(f)")
    return found


def _locating(better: Function) -> Function:
    """MAXLOC and MINLOC: the better value with its index; of equal ones the lower index. NaN is the best.

    Values are pairs (value, index), or arrays of a dtype with these two fields.
    """

    def locate(a: Any, b: Any) -> Any:
        names = getattr(getattr(a, "dtype", None), "names", None)
        (u, i), (v, j) = ((a[names[0]], a[names[1]]), (b[names[0]], b[names[1]])) if names else (a, b)
        none, other = u != u, v != v  # NaN
        alike = (u == v) | (none & other)
        first = (none > other) | ((none == other) & (better(u, v) | (alike & (i <= j))))
        if not names:
            return a if first else b
        import numpy as np

        return np.where(first, a, b)

    return locate


MAXLOC = op(_locating(operator.gt), name="MAXLOC")
MINLOC = op(_locating(operator.lt), name="MINLOC")
