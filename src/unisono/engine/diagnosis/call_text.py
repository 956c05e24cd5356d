"""Calls and messages as text, and which ranks made another call than most. It does not use the engine."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b

from unisono._native import CallRecord, codecs
from unisono.engine.diagnosis.report import CallDescription
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES
from unisono.engine.operations.functions import UserOp
from unisono.engine.operations.kinds import KINDS, kind_of
from unisono.engine.operations.reduction import PremulSum, ReduceOp
from unisono.plans import CONTRACTS, algorithm_names

_LISTED = 8  # ranks of a subgroup that fit into a call's number, a byte each
_HASH_BYTES = 6
_FIRST_CODEC = 128  # in a call's dtype: below it a dtype, from it on a codec of float32
_FORM_CODEC, _FORM_BLOCK = 9, 13
_CODECS: tuple[str, ...] = tuple(name for name, _ in codecs())
OWN = "the caller's own"
FUNCTION = "a function"

KIND_SHIFT = 8
"""In the form of a message: below it the dtype, above it 1 for a part of an object."""

WINDOW_WAITS = (
    "",
    "has the lock",
    "is in an update",
    "has not called fence",
    "has not called post",
    "has not called complete",
    "did not answer",
)
"""What a rank did for which a call of a window waited, by its number in the engine."""


def kind_name(kind: int) -> str:
    """The name of a call by its number, which another rank may have sent."""
    return KINDS[kind] if kind < len(KINDS) else f"unknown call {kind}"


def describe_call(call: CallRecord) -> CallDescription:
    """The engine's record of a call, in the form for error texts."""
    name = kind_name(call.kind)
    if name not in KINDS:
        return CallDescription(name, ())
    if name == "subgroup":
        return CallDescription(name, (_ranks(call.numel, call.root),))
    kind = kind_of(name)
    contract = CONTRACTS[kind.plan]
    coded = call.dtype >= _FIRST_CODEC
    arguments = _buffers(name, DTYPES.index("float32") if coded else call.dtype, call.numel)
    if arguments and coded:
        arguments[0] += f" as {_coding_text(call, _CODECS[call.dtype - _FIRST_CODEC])}"
    if contract.reduces and name != "barrier":
        others = {PremulSum(1.0).value: PremulSum(1.0).name, UserOp.value: FUNCTION}
        arguments.append(others.get(call.op) or ReduceOp(call.op).name)
    if contract.rooted or kind.rooted:
        arguments.append(f"root={call.root}")
    names = algorithm_names()
    arguments.append(f"algorithm={names[call.algorithm] if call.algorithm < len(names) else OWN}")
    return CallDescription(name, tuple(arguments))


def _coding_text(call: CallRecord, codec: str) -> str:
    """How a call encodes values. Example: "int8(block=64) between hosts with feedback"."""
    block = f"(block={call.block})" if call.block else ""
    where = " between hosts" if call.between_hosts else ""
    return f"{codec}{block}{where}{' with feedback' if call.fed_back else ''}"


def _buffers(name: str, dtype: int, numel: int) -> list[str]:
    """The buffers of a call, for its text."""
    if name == "barrier" or name == "split" or name.endswith("_object"):
        return []
    if name.endswith("_coalesced"):
        count = numel >> 8 * _HASH_BYTES
        return [f"{DTYPES[dtype]}", f"{count} buffers" if count > 1 else "1 buffer"]
    return [f"{DTYPES[dtype]}[{numel}]" if numel else f"{DTYPES[dtype]}"]


def form_of_codes(codec: int, block: int) -> int:
    """The form of a message of codes. codec: its number."""
    return DTYPES.index("uint8") | codec + 1 << _FORM_CODEC | block // 16 << _FORM_BLOCK


def message_text(form: int, nbytes: int) -> str:
    """A message as text. form: the code of its dtype, and above that 1 for an object."""
    dtype, is_object = form & ((1 << KIND_SHIFT) - 1), form >> KIND_SHIFT & 1
    if codec := form >> _FORM_CODEC & 15:
        block = (form >> _FORM_BLOCK) * 16
        return f"{nbytes} bytes of {_CODECS[codec - 1]}{f'(block={block})' if block else ''}"
    return "an object" if is_object else f"{DTYPES[dtype]}[{nbytes // ITEMSIZES[dtype]}]"


def number_of_list(buffers: Sequence[tuple[int, int]]) -> int:
    """A number for a list of (dtype, numel) in its order: the count in the upper bits, a hash below."""
    numbers = array("q", [number for pair in buffers for number in pair])
    return min(len(buffers), 0xFFFF) << 8 * _HASH_BYTES | _hash(numbers)


def number_of_ranks(ranks: Sequence[int]) -> int:
    """A number for a list of ranks in its order: the ranks themselves if they fit, otherwise a hash.

    Example: [2, 0] -> 0x0103
    """
    if len(ranks) <= _LISTED and max(ranks) < 255:
        return sum(rank + 1 << 8 * place for place, rank in enumerate(ranks))
    return _hash(array("q", ranks))


def _ranks(number: int, count: int) -> str:
    """The ranks in `number_of_ranks`, or how many they are."""
    listed = [byte - 1 for byte in number.to_bytes(8, "little") if byte]
    return str(listed) if len(listed) == count <= _LISTED else f"{count} ranks"


def _hash(numbers: array[int]) -> int:
    return int.from_bytes(blake2b(numbers.tobytes(), digest_size=_HASH_BYTES).digest(), "little")


def odd_ones(calls: Sequence[CallDescription | None], name: Callable[..., str]) -> str:
    """The ranks that made another call than most, as a sentence. "" if no call has a majority, or if the
    other ranks differ among themselves.

    Args:
        calls: of every rank; None: not known.
        name: of ranks, in texts.
    Example: [A, A, B, A] -> "rank 2 called broadcast, the others all_reduce"
    """
    known = [call for call in calls if call is not None]
    usual, count = Counter(known).most_common(1)[0] if known else (None, 0)
    odd = {rank: call for rank, call in enumerate(calls) if call is not None and call != usual}
    different = set(odd.values())
    if usual is None or 2 * count <= len(known) or len(different) != 1:
        return ""
    ranks = name(*odd)
    others = "the others" if len(known) == len(calls) else "most others"
    one = different.pop()
    if one.name != usual.name:
        return f"{ranks} called {one.name}, {others} {usual.name}"
    pairs = [pair for pair in zip(one.arguments, usual.arguments, strict=True) if pair[0] != pair[1]]
    theirs, usually = (", ".join(each) for each in zip(*pairs, strict=True))
    return f"{ranks} called {one.name} with {theirs}, {others} with {usually}"
