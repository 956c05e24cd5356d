"""The codec of a call: its arguments, and which edges of the plan carry codes."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

from unisono import _native
from unisono.codecs.codec import Codec, codec_of
from unisono.engine.base.validation import flag
from unisono.engine.group.arguments import CallArguments, CodecArguments
from unisono.engine.group.buffer_layout import BufferLayout, Extents, with_call_name
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, pinned, view
from unisono.engine.operations.reduction import PremulSum, ReduceOp
from unisono.plans.coded_edges import ALL, BETWEEN, CODED, Coding
from unisono.plans.contracts import CONTRACTS

AUTO = "auto"

AUTO_CODECS = (Codec("bf16"), Codec("int8", 64), Codec("int4", 64))
"""The choices of "auto": codecs whose error is relative to the magnitude for every finite f32."""

BLOCK_OF_ALL = 1 << 16
"""The number of values for which bytes per value are computed: a multiple of every block."""

_F32 = DTYPES.index("float32")
_OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_NO_SUMS = (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_FED_BACK = ("all_reduce", "reduce_scatter", "broadcast", "all_to_all")


class EdgeCoding(NamedTuple):
    """How the edges of a call encode values.

    Attributes:
        codec: of the codes.  edges: which carry codes.  feedback: the error is kept and added in the next
            call.
    """

    codec: Codec
    edges: Coding
    feedback: bool

    @property
    def between_hosts(self) -> bool:
        """Whether only edges between hosts carry codes."""
        return self.edges == BETWEEN

    @property
    def number(self) -> int:
        """Identifies it when ranks compare their calls; never 0."""
        digest = blake2b(f"{self.codec} {self.edges} {self.feedback}".encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little") or 1

    def __str__(self) -> str:
        where = "between hosts" if self.between_hosts else "on all edges"
        kept = ", feedback" if self.feedback else ""
        return f"codec {self.codec.label} {where}{kept}"


class CodecChoice(NamedTuple):
    """One codec for a message, as `Group.explain` returns it.

    Attributes:
        codec: None: no codec.  seconds: of a call, by the cost model.
        error: the plan's bound, relative to the largest magnitude that the result can have.
        gain: the speed-up over no codec.  chosen: codec="auto" takes it with this `max_error`.
    """

    codec: Codec | None
    seconds: float
    error: float
    gain: float
    chosen: bool = False

    def __str__(self) -> str:
        name = "none" if self.codec is None else self.codec.label
        mark = ", chosen" if self.chosen else ""
        return f"{name}: {self.seconds * 1e3:.3f} ms, {self.gain:.2f}x, error {self.error:.2g}{mark}"


class FeedbackBuffer(NamedTuple):
    """The buffer in which a call keeps the encoding error, and the object that pins it."""

    address: int
    numel: int
    keep: Any


def requested_codec(call: CallArguments, coding: CodecArguments) -> Codec | str | None:
    """The codec argument, checked with the other arguments alone: None, a codec, or "auto".

    Raises:
        ValueError, TypeError: it is no codec, the collective has none, or an argument needs one.
    """
    kind, codec = call.kind, coding.codec
    if codec is None:
        for name, value in coding._asdict().items():
            if value is not None:
                raise ValueError(f"{kind}: {name}= is given without codec=")
        return None
    if coding.between_hosts is not None:
        flag(coding.between_hosts, f"{kind}: between_hosts")
    if call.plan not in CODED:
        raise ValueError(f"{kind}: no codec; {', '.join(CODED)} have one")
    if isinstance(codec, str) and codec == AUTO:
        if coding.max_error is None:
            raise ValueError(f"{kind}: codec='auto' needs max_error=, the largest relative error")
        if coding.feedback is not None:
            raise ValueError(f"{kind}: feedback= needs a codec of its own, not codec='auto'")
        return AUTO
    if coding.max_error is not None:
        raise ValueError(f"{kind}: max_error= is for codec='auto'")
    return codec_for(kind, codec)


def codec_for(call: str, codec: Any) -> Codec:
    """The codec of a call, from a codec or its name.

    Raises:
        ValueError, TypeError: no codec has this name, or it is no codec.
    """
    try:
        return codec_of(codec)
    except (TypeError, ValueError) as error:
        raise with_call_name(call, error) from None


def edge_coding(
    call: CallArguments, coding: CodecArguments, codec: Codec, dtype: int, *, several_hosts: bool
) -> EdgeCoding:
    """How the edges of a call encode values.

    Raises:
        ValueError, TypeError: the call cannot have this codec.
    """
    kind, op, feedback = call.kind, call.op, coding.feedback is not None
    if dtype != _F32:
        raise TypeError(f"{kind}: a codec takes float32, got {DTYPES[dtype]}; convert it first")
    if call.reproducible:
        raise ValueError(
            f"{kind}: reproducible=True asks for contributions as they are, and a codec rounds them"
        )
    if type(op) is not PremulSum and op not in _OPS:
        raise TypeError(f"{kind}: {op.name} has no meaning for codes of float32")
    if not codec.signed and (feedback or (isinstance(op, PremulSum) and op.factor < 0)):
        what = "feedback=" if feedback else "premul_sum of a negative factor"
        raise ValueError(f"{kind}: {what} makes numbers below zero, and {codec.name} has none")
    if feedback and op in _NO_SUMS:
        raise ValueError(f"{kind}: feedback= makes up for what sums have lost; {op.name} is none")
    only_between = several_hosts if coding.between_hosts is None else coding.between_hosts
    return EdgeCoding(codec, BETWEEN if only_between else ALL, feedback)


def feedback_of(collective: str, buffer: Any, layout: BufferLayout) -> FeedbackBuffer:
    """Check the buffer in which a call keeps the encoding error.

    Raises:
        ValueError, TypeError: it is no float32 buffer as long as the data that is sent, or overlaps that.
    """
    if collective not in _FED_BACK:
        raise ValueError(f"{collective}: no feedback=; {', '.join(_FED_BACK)} have it")
    keep = pinned(buffer)
    try:
        address, numel, dtype = view(buffer, True, "feedback")
    except (TypeError, ValueError) as error:
        raise with_call_name(collective, error) from None
    sent = layout.source or layout.target
    if dtype != _F32:
        raise TypeError(f"{collective}: feedback is {DTYPES[dtype]}, expected float32")
    if len(sent) != 1:
        raise ValueError(f"{collective}: feedback= needs one buffer to be sent, got a list of {len(sent)}")
    if numel != sent[0][1]:
        raise ValueError(
            f"{collective}: feedback has {numel} elements, expected {sent[0][1]}, as what is sent"
        )
    item = ITEMSIZES[_F32]
    for start, count in (*layout.target, *layout.source):
        if numel and count and start < address + numel * item and address < start + count * item:
            raise ValueError(f"{collective}: feedback and another buffer of the call overlap in memory")
    return FeedbackBuffer(address, numel, keep)


def sent_buffers(plan: str, rank: int, root: int) -> str:
    """The side of a call from which this rank sends: "out", "in", or "" for neither."""
    contract = CONTRACTS[plan]
    if not contract.gives(rank, root) or (plan == "broadcast" and rank != root):
        return ""
    return "out" if contract.in_place else "in"


def check_signs(collective: str, sent: Extents, name: str) -> None:
    """Refuse negative numbers, for a codec without them.

    Raises:
        ValueError: there is one; the text has its index.
    """
    for number, (address, numel) in enumerate(sent):
        place = _native.first_negative(address, numel)
        if place < numel:
            which = f"{name}[{number}]" if len(sent) > 1 else name
            value = _value(address + place * ITEMSIZES[_F32])
            raise ValueError(
                f"{collective}: {which}[{place}] is {value}, and this codec has no numbers below zero"
            )


def _value(address: int) -> float:
    import ctypes

    return ctypes.c_float.from_address(address).value
