"""The codecs of a group's calls: the encoding of edges, its proof, its error, and the choice of "auto"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from unisono.codecs.codec import Codec, magnitude_of
from unisono.engine.base.validation import instance, positive
from unisono.engine.costs.tuner import Tuner
from unisono.engine.group.arguments import CallArguments, CodecArguments, check_op
from unisono.engine.group.buffer_layout import BufferLayout, Extents
from unisono.engine.group.codec_arguments import (
    AUTO,
    AUTO_CODECS,
    BLOCK_OF_ALL,
    CodecChoice,
    EdgeCoding,
    FeedbackBuffer,
    check_signs,
    edge_coding,
    feedback_of,
    requested_codec,
    sent_buffers,
)
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, view
from unisono.engine.operations.reduction import Op, PremulSum
from unisono.errors import PlanError
from unisono.plans import make
from unisono.plans.coded_edges import ALL, CODED, IN_PIECES, IN_PIECES_BYTES

if TYPE_CHECKING:
    from unisono.engine.group.error_bound import ErrorBound
    from unisono.plans.proof import Proof

_F32 = DTYPES.index("float32")


class CodecPlanner:
    """The codecs of one rank, in a group of `size` ranks on these hosts; `tuner` has the cost model."""

    def __init__(self, rank: int, size: int, hosts: tuple[int, ...], tuner: Tuner) -> None:
        self._rank = rank
        self._size = size
        self._hosts = hosts
        self._several_hosts = len(set(hosts)) > 1
        self._tuner = tuner
        self._proofs: dict[tuple[object, ...], Proof] = {}
        self._chosen: dict[tuple[object, ...], Codec | None] = {}

    # ---- one call --------------------------------------------------------------------------------------

    def of_call(
        self, call: CallArguments, out: Any, layout: BufferLayout
    ) -> tuple[EdgeCoding | None, FeedbackBuffer | None, BufferLayout]:
        """The encoding of a call's edges (None: values), its feedback buffer, and its buffers.

        Args:
            out: the buffer of `layout.target`.
        Raises:
            ValueError, TypeError: it cannot have this codec, or the codec cannot encode its values.
        """
        coding = call.coding
        if coding is not None and isinstance(coding.codec, str) and coding.codec == AUTO:
            requested_codec(call, coding)
            codec = self._choose(call, coding, layout)
            if codec is None:
                return None, None, layout
            coding = coding._replace(codec=codec, max_error=None)
            call = call._replace(coding=coding)
        coded = self.coded(call, layout.dtype, (layout.target, layout.source))
        if coded is None or coding is None:
            return None, None, layout
        if call.plan == "broadcast" and not layout.writes:  # the root stores decoded values, too
            view(out, True, f"{call.kind}: x")
            layout = layout._replace(writes=True)
        kept = None if coding.feedback is None else feedback_of(call.kind, coding.feedback, layout)
        return coded, kept, layout

    def coded(self, call: CallArguments, dtype: int, sides: tuple[Extents, Extents]) -> EdgeCoding | None:
        """The encoding of the edges of a call with the buffers `sides`; None: values.

        Raises:
            ValueError, TypeError: it cannot have this codec, or the codec cannot encode its values.
        """
        if call.coding is None:
            return None
        codec = requested_codec(call, call.coding)
        if codec is None:
            return None
        if not isinstance(codec, Codec):
            raise ValueError(f"{call.kind}: codec='auto' is for calls of one buffer")
        coded = edge_coding(call, call.coding, codec, dtype, several_hosts=self._several_hosts)
        side = "" if codec.signed else sent_buffers(call.plan, self._rank, call.root)
        if side:
            sent = sides[0] if side == "out" else sides[1]
            name = "x" if side == "out" or call.plan == "all_gather" else "inputs"
            check_signs(call.kind, sent, name)
        return coded

    # ---- the proof -------------------------------------------------------------------------------------

    def way(
        self, collective: str, algorithm: str | None, root: int, coded: EdgeCoding, nbytes: int
    ) -> tuple[str, bool, str]:
        """The algorithm of a call, whether it depends on hosts, and which side must not be negative."""
        name, placed = coded_algorithm(collective, algorithm, coded.edges, nbytes)
        return name, placed, "" if coded.codec.signed else sent_buffers(collective, self._rank, root)

    def prove(self, collective: str, algorithm: str | None, root: int, coded: EdgeCoding) -> Proof:
        """The proof of the plan of such a call.

        Raises:
            PlanError: its edges cannot carry these codes; the text says why.
        """
        from unisono.plans.proof import prove  # imported late: most ranks prove nothing

        idempotent = coded.codec.idempotent and not coded.feedback  # a kept error would be added again
        key = (collective, algorithm, root, coded.edges, idempotent)
        if key in self._proofs:
            return self._proofs[key]
        name, placed = coded_algorithm(collective, algorithm, coded.edges)
        try:
            plan = make(collective, name, self._size, root, self._hosts if placed else (), coded.edges)
            proof = self._proofs[key] = prove(plan, idempotent=idempotent)
        except PlanError as error:
            raise PlanError(
                f"{collective}: algorithm {name!r} with {coded} is refused before a byte has moved: {error}"
            ) from None
        return proof

    def bound(
        self,
        collective: str,
        data: Any,
        codec: Any,
        op: Op,
        algorithm: str | None,
        between_hosts: Any,
        feedback: Any,
        root: int,
    ) -> float:
        """See `Group.error_bound`."""
        coded = self._asked(collective, codec, op, between_hosts, feedback)
        largest = magnitude_of(data)
        kept = 0.0 if feedback is None else magnitude_of(feedback)
        if not math.isfinite(largest + kept):
            return math.inf
        return self._loss(collective, largest, coded, op, algorithm, kept, root).error

    def _loss(
        self,
        collective: str,
        largest: float,
        coded: EdgeCoding,
        op: Op,
        algorithm: str | None = None,
        kept: float = 0.0,
        root: int = 0,
    ) -> ErrorBound:
        from unisono.engine.group.error_bound import ErrorBound, error_bound

        proof, bound = self.prove(collective, algorithm, root, coded), coded.codec.bound
        found = [error_bound(order, largest, bound, op, self._size, kept) for order in proof.results]
        return max(found, key=lambda each: each.error, default=ErrorBound(largest, 0.0))

    def _asked(
        self, collective: str, codec: Any, op: Op, between_hosts: Any, feedback: Any = None
    ) -> EdgeCoding:
        """The encoding of a call of this collective."""
        if instance(collective, str, "collective") not in CODED:
            raise ValueError(f"{collective}: no codec; {', '.join(CODED)} have one")
        check_op(collective, op)
        call = CallArguments(collective, op, coding=CodecArguments(codec, between_hosts, feedback))
        coded = self.coded(call, _F32, ([], []))
        if coded is None:
            raise TypeError("codec is None, expected a codec or its name")
        return coded

    # ---- the choice ------------------------------------------------------------------------------------

    def explain(
        self, collective: str, nbytes: int, op: Op, between_hosts: Any, max_error: Any
    ) -> tuple[CodecChoice, ...]:
        """See `Group.explain`."""
        most = positive(max_error, "max_error")
        self._asked(collective, AUTO_CODECS[0], op, between_hosts)
        return self._explained(collective, nbytes, op, between_hosts, most)

    def _explained(
        self, collective: str, nbytes: int, op: Op, between_hosts: Any, most: float
    ) -> tuple[CodecChoice, ...]:
        uncoded = self._tuner.explain(collective, nbytes).seconds
        found = [CodecChoice(None, uncoded, 0.0, 1.0)]
        for codec in AUTO_CODECS:
            coded = self._asked(collective, codec, op, between_hosts)
            name, _ = coded_algorithm(collective, None, coded.edges, nbytes)
            per_value = codec.nbytes(BLOCK_OF_ALL) / BLOCK_OF_ALL
            seconds = self._tuner.predict_coded(collective, name, nbytes, per_value, coded.edges)
            lost = self._loss(collective, 1.0, coded, op)
            relative = lost.error / lost.magnitude if lost.magnitude else 0.0
            found.append(CodecChoice(codec, seconds, relative, uncoded / seconds if seconds else 1.0))
        fit = [each for each in found if each.codec is None or (self._several_hosts and each.error <= most)]
        best = min(fit, key=lambda each: each.seconds)
        return tuple(each._replace(chosen=each is best) for each in found)

    def _choose(self, call: CallArguments, coding: CodecArguments, layout: BufferLayout) -> Codec | None:
        """The codec of codec="auto"; all ranks choose the same one."""
        most = positive(coding.max_error, f"{call.kind}: max_error")
        if layout.dtype != _F32 or not self._several_hosts or call.reproducible:
            return None
        collective, op = call.plan, call.op
        nbytes = layout.typical * ITEMSIZES[_F32]
        nbytes *= self._size if collective in ("all_gather", "reduce_scatter") else 1
        op = PremulSum(1.0) if type(op) is PremulSum else op  # each rank has a factor of its own
        key = (collective, nbytes, op, coding.between_hosts, most)
        if key not in self._chosen:
            choices = self._explained(collective, nbytes, op, coding.between_hosts, most)
            self._chosen[key] = next(each.codec for each in choices if each.chosen)
        return self._chosen[key]


def coded_algorithm(collective: str, algorithm: str | None, edges: str, nbytes: int = 0) -> tuple[str, bool]:
    """The algorithm of a call whose edges carry codes, and whether it depends on hosts."""
    flat, placed = CODED[collective]
    if algorithm is not None:
        return algorithm, True
    if edges != ALL and nbytes >= IN_PIECES_BYTES:
        placed = IN_PIECES.get(collective, placed)
    return (flat, False) if edges == ALL else (placed, True)
