"""`all_reduce(x, codec=un.LowRank(rank))`: a matrix as two factors, in three collectives of the group."""

from __future__ import annotations

import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from unisono import _native
from unisono.codecs.low_rank import LowRank, LowRankFeedback, NumPyArrays, rounds
from unisono.engine.group.arguments import CallArguments
from unisono.engine.memory.buffers import DTYPES, is_tensor
from unisono.engine.operations.reduction import ReduceOp

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class LowRankCall:
    """A checked call: `GroupBase` runs it as it runs the calls of other libraries.

    Args:
        planner: of the group.  x: the buffer, checked as that of an `all_reduce` in place.  dtype: its code.
    Raises:
        ValueError, TypeError: it is no matrix of float32, or an argument does not go with low rank.
    """

    def __init__(self, planner: Any, call: CallArguments, x: Any, sendbuf: Any, dtype: int) -> None:
        assert call.coding is not None
        codec, between_hosts, feedback, max_error = call.coding
        others = {
            "out": sendbuf,
            "algorithm": call.algorithm,
            "between_hosts": between_hosts,
            "max_error": max_error,
            "reproducible": call.reproducible or None,
        }
        wrong = [f"{name}=" for name, value in others.items() if value is not None]
        if call.kind != "all_reduce":
            raise ValueError(f"{call.kind}: un.LowRank is a codec of all_reduce alone")
        if wrong:
            raise ValueError(f"all_reduce: {wrong[0]} does not go with un.LowRank")
        if call.op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise TypeError(f"all_reduce: {call.op.name} has no meaning for low rank; SUM and AVG have")
        if DTYPES[dtype] != "float32" or not hasattr(x, "reshape"):
            what = DTYPES[dtype] if hasattr(x, "reshape") else f"a {type(x).__name__}"
            raise TypeError(f"all_reduce: low rank takes an array or a tensor of float32, got {what}")
        shape = tuple(x.shape)
        if feedback is None:
            feedback = LowRankFeedback(shape, keeps=False)
        elif not isinstance(feedback, LowRankFeedback):
            raise TypeError(
                f"all_reduce: feedback is a {type(feedback).__name__}, expected codec.feedback_for(x)"
            )
        if feedback.shape != shape:
            raise ValueError(f"all_reduce: feedback is for shape {list(feedback.shape)}, x has {list(shape)}")
        self._planner, self._codec, self._feedback = planner, codec, feedback
        self._sums = call.op is ReduceOp.SUM
        array: Array = x.detach().numpy() if is_tensor(x) else x
        self._values = array.reshape(shape[0], -1)

    def __call__(self, async_op: bool, timeout: Any) -> None:
        """Run it.

        Raises:
            ValueError: it is asynchronous; or ranks gave other codecs, or feedback of other calls.
        """
        if async_op:
            raise ValueError("all_reduce: async_op=True does not go with un.LowRank, which sends twice")
        import numpy as np

        planner, feedback, codec = self._planner, self._feedback, self._codec
        calls = _native.GroupBase(planner, getattr(planner, "engine", None), planner.timeout_s)

        def all_reduce(x: Array, op: ReduceOp, *coding: Any) -> None:
            calls._execute(planner.plan("all_reduce", x, None, op, 0, None, False, *coding), False, timeout)

        feedback.begin(codec)
        self._compare(all_reduce)
        options: dict[str, Any] = {"seed": codec.seed, "step": feedback.calls, "warm": codec.warm_start}
        steps = rounds([(feedback, self._values)], NumPyArrays(), largest=codec.largest, **options)
        coding = () if codec.factors == "f32" else (codec.factors, False)
        with np.errstate(invalid="ignore", over="ignore"):  # where a value is not finite, see `rounds`
            factors: list[Array] | None = next(steps)
            while factors is not None:
                all_reduce(factors[0], ReduceOp.AVG, *coding)
                factors = _sent(steps, factors)
        feedback.calls += 1
        if self._sums:
            self._values *= self._planner.size

    def _compare(self, all_reduce: Any) -> None:
        """Factors that began with different directions would have a mean without meaning."""
        import numpy as np

        kept = self._feedback
        begun = b"" if kept.factor is None else kept.factor.tobytes()
        number = zlib.crc32(begun, zlib.crc32(f"{self._codec} {kept.calls} {kept.shape}".encode()))
        both = np.array([number, -number])
        all_reduce(both, ReduceOp.MAX)
        if both[0] != -both[1]:
            raise ValueError(
                "all_reduce: the ranks differ in the codec un.LowRank, in x's shape, or in the calls that "
                "their feedback has seen"
            )


def _sent(steps: Generator[list[Array], list[Array], None], means: list[Array]) -> list[Array] | None:
    try:
        return steps.send(means)
    except StopIteration:
        return None


__all__ = ["LowRank", "LowRankCall"]
