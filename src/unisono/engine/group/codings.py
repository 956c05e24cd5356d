"""The codecs of a group's calls: the encoding of edges, its proof, its error, and the choice of "auto"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from unisono.codecs.codec import Codec, magnitude_of
from unisono.engine.base.checking import instance, positive
from unisono.engine.costs.choice import Chooser
from unisono.engine.group.coding import (
    AUTO,
    AUTO_CODECS,
    BLOCK_OF_ALL,
    CodecChoice,
    CodedAs,
    Feedback,
    Wanted,
    asked,
    check_signs,
    coded_as,
    feedback_of,
    sent_side,
)
from unisono.engine.group.layout import Extents, Laid
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, view
from unisono.engine.operations.kinds import kind_of
from unisono.engine.operations.reduction import Op, PremulSum, ReduceOp
from unisono.errors import PlanError
from unisono.plans import make
from unisono.plans.coded import ALL, CODED, IN_PIECES, IN_PIECES_BYTES

if TYPE_CHECKING:
    from unisono.engine.group.loss import Loss
    from unisono.plans.proof import Proof

__all__ = ["Codings"]

_F32 = DTYPES.index("float32")


class Codings:
    """The codecs of one rank, in a group of `size` ranks on these hosts; `chooser` has the cost model."""

    def __init__(self, rank: int, size: int, hosts: tuple[int, ...], chooser: Chooser) -> None:
        self._rank = rank
        self._size = size
        self._hosts = hosts
        self._several_hosts = len(set(hosts)) > 1
        self._chooser = chooser
        self._proofs: dict[tuple[object, ...], Proof] = {}
        self._chosen: dict[tuple[object, ...], Codec | None] = {}

    # ---- one call --------------------------------------------------------------------------------------

    def of_call(
        self,
        kind: str,
        given: tuple[Any, Any, Any, Any],
        reproducible: bool,
        out: Any,
        laid: Laid,
        op: Op,
        root: int,
    ) -> tuple[CodedAs | None, Feedback | None, Laid]:
        """The encoding of a call's edges (None: values), its feedback buffer, and its buffers.

        Args:
            given: codec, between_hosts, feedback, max_error.  out: the buffer of `laid.target`.
        Raises:
            ValueError, TypeError: it cannot have this codec, or the codec cannot encode its values.
        """
        plan, wanted = kind_of(kind).plan, Wanted(*given, reproducible)
        if isinstance(wanted.codec, str) and wanted.codec == AUTO:
            asked(kind, plan, *wanted[:4])
            codec = self._choose(kind, laid, op, wanted)
            if codec is None:
                return None, None, laid
            wanted = wanted._replace(codec=codec, max_error=None)
        coded = self._coded(kind, wanted, laid.dtype, op, root, (laid.target, laid.source))
        if coded is None:
            return None, None, laid
        if plan == "broadcast" and not laid.writes:  # the root stores decoded values, too
            view(out, True, f"{kind}: x")
            laid = laid._replace(writes=True)
        kept = None if wanted.feedback is None else feedback_of(kind, wanted.feedback, laid)
        return coded, kept, laid

    def coded(
        self,
        kind: str,
        coding: tuple[Any, Any],
        dtype: int,
        op: Op,
        root: int,
        reproducible: bool,
        sides: tuple[Extents, Extents],
    ) -> CodedAs | None:
        """The encoding of the edges of a call with the buffers `sides`; None: values.

        coding: codec, between_hosts.

        Raises:
            ValueError, TypeError: as `of_call`.
        """
        return self._coded(kind, Wanted(*coding, reproducible=reproducible), dtype, op, root, sides)

    def _coded(
        self, kind: str, wanted: Wanted, dtype: int, op: Op, root: int, sides: tuple[Extents, Extents]
    ) -> CodedAs | None:
        """As `coded`.

        Raises:
            ValueError, TypeError: it cannot have this codec, or the codec cannot encode its values.
        """
        plan = kind_of(kind).plan
        codec = asked(kind, plan, *wanted[:4])
        if codec is None:
            return None
        if not isinstance(codec, Codec):
            raise ValueError(f"{kind}: codec='auto' is for calls of one buffer")
        coded = coded_as(
            kind,
            codec,
            wanted.between_hosts,
            wanted.feedback is not None,
            several_hosts=self._several_hosts,
            dtype=dtype,
            op=op,
            reproducible=wanted.reproducible,
        )
        side = "" if codec.signed else sent_side(plan, self._rank, root)
        if side:
            sent = sides[0] if side == "out" else sides[1]
            check_signs(kind, sent, "x" if side == "out" or plan == "all_gather" else "inputs")
        return coded

    # ---- the proof -------------------------------------------------------------------------------------

    def way(
        self, collective: str, algorithm: str | None, root: int, coded: CodedAs, nbytes: int
    ) -> tuple[str, bool, str]:
        """The algorithm of a call, whether it depends on hosts, and which side must not be negative."""
        name, placed = coded_algorithm(collective, algorithm, coded.edges, nbytes)
        return name, placed, "" if coded.codec.signed else sent_side(collective, self._rank, root)

    def prove(self, collective: str, algorithm: str | None, root: int, coded: CodedAs) -> Proof:
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
        coded: CodedAs,
        op: Op,
        algorithm: str | None = None,
        kept: float = 0.0,
        root: int = 0,
    ) -> Loss:
        from unisono.engine.group.loss import Loss, loss

        proof, bound = self.prove(collective, algorithm, root, coded), coded.codec.bound
        found = [loss(order, largest, bound, op, self._size, kept) for order in proof.results]
        return max(found, key=lambda each: each.error, default=Loss(largest, 0.0))

    def _asked(
        self, collective: str, codec: Any, op: Op, between_hosts: Any, feedback: Any = None
    ) -> CodedAs:
        """The encoding of a call of this collective."""
        if instance(collective, str, "collective") not in CODED:
            raise ValueError(f"{collective}: no codec; {', '.join(CODED)} have one")
        if type(op) not in (ReduceOp, PremulSum):
            raise TypeError(f"{collective}: op is {op!r}, expected a reduction operation")
        wanted = Wanted(codec, between_hosts, feedback)
        coded = self._coded(collective, wanted, _F32, op, 0, ([], []))
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
        uncoded = self._chooser.explain(collective, nbytes).seconds
        found = [CodecChoice(None, uncoded, 0.0, 1.0)]
        for codec in AUTO_CODECS:
            coded = self._asked(collective, codec, op, between_hosts)
            name, _ = coded_algorithm(collective, None, coded.edges, nbytes)
            per_value = codec.nbytes(BLOCK_OF_ALL) / BLOCK_OF_ALL
            seconds = self._chooser.predict_coded(collective, name, nbytes, per_value, coded.edges)
            lost = self._loss(collective, 1.0, coded, op)
            relative = lost.error / lost.magnitude if lost.magnitude else 0.0
            found.append(CodecChoice(codec, seconds, relative, uncoded / seconds if seconds else 1.0))
        fit = [each for each in found if each.codec is None or (self._several_hosts and each.error <= most)]
        best = min(fit, key=lambda each: each.seconds)
        return tuple(each._replace(chosen=each is best) for each in found)

    def _choose(self, kind: str, laid: Laid, op: Op, wanted: Wanted) -> Codec | None:
        """The codec of codec="auto"; all ranks choose the same one."""
        most = positive(wanted.max_error, f"{kind}: max_error")
        if laid.dtype != _F32 or not self._several_hosts or wanted.reproducible:
            return None
        collective = kind_of(kind).plan
        nbytes = laid.typical * ITEMSIZES[_F32]
        nbytes *= self._size if collective in ("all_gather", "reduce_scatter") else 1
        op = PremulSum(1.0) if type(op) is PremulSum else op  # each rank has a factor of its own
        key = (collective, nbytes, op, wanted.between_hosts, most)
        if key not in self._chosen:
            choices = self._explained(collective, nbytes, op, wanted.between_hosts, most)
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
