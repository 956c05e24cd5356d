"""Messages between two ranks with encoded values."""

from __future__ import annotations

from typing import Any, SupportsIndex

from unisono._native import Status
from unisono.codecs.codec import Codec
from unisono.codecs.memory import values_of
from unisono.engine.diagnosis.call_text import form_of_codes
from unisono.engine.group.buffer_layout import with_call_name
from unisono.engine.group.codec_arguments import check_signs, codec_for
from unisono.engine.group.messages import Seconds, checked, run
from unisono.engine.group.planning import Planner
from unisono.engine.memory.buffers import DTYPES, ITEMSIZES

__all__ = ["transfer_encoded"]

_F32 = DTYPES.index("float32")


def transfer_encoded(
    planner: Planner[Any],
    name: str,
    x: Any,
    peer: SupportsIndex | None,
    tag: int,
    timeout: Seconds,
    codec: Codec | str,
) -> Status:
    """Send float32 values as codes, or receive them; returns the status of the received message.

    Raises:
        ValueError, TypeError: an argument is wrong; nothing was sent.
    """
    planner.codings  # noqa: B018 (raises where another library moves values)
    receiving = name == "recv"
    coded = codec_for(name, codec)
    try:
        address, numel, _ = values_of(x, "x", writable=receiving)
    except (TypeError, ValueError) as error:
        raise with_call_name(name, error) from None
    if not receiving and not coded.signed:
        check_signs(name, [(address, numel)], "x")
    form = form_of_codes(coded.number, coded.block)
    codes = bytearray(coded.nbytes(numel))
    if not receiving:
        coded.encode(x, codes)
    work = checked(planner, name, codes, peer, tag, timeout, receiving=receiving, exact=True, form=form)
    run(planner, timeout, work)
    if not receiving:
        return work.receive_status()
    coded.decode(codes, out=x)
    received, values = work.receive_status(), Status.__new__(Status)
    values.__setstate__((received.source, received.tag, numel * ITEMSIZES[_F32], _F32))
    return values
