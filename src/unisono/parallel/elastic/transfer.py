"""State that goes over the group from ranks that have it to ranks that have not, in pieces.

    piece    0  1  2  3  4  5  ...
    source   0  1  2  0  1  2        each receiver gets every piece once, from several ranks at once

Large tensors are sent and received where they are. Small ones are packed: one message for many.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unisono.engine.group.native import NativeGroup

__all__ = ["spread"]

PIECE_BYTES = 16 << 20
SMALL_BYTES = 1 << 16
AT_ONCE = 16
"""Messages under way for each pair of ranks."""


def spread(
    group: NativeGroup, sources: Sequence[int], receivers: Sequence[int], tensors: Sequence[Tensor]
) -> None:
    """Fill the tensors of each receiver with those of the sources. Sources and receivers call this.

    Shapes: the same sizes and dtypes, in one order, on all of them. In CPU memory.
    Cost: each receiver gets all bytes once; each source sends its share of them to each receiver.

    Args:
        sources, receivers: ranks of the group; all sources have the same values.
    Raises:
        PeerLost: one of them died; what was received is then of no use.
    """
    if group.rank not in (*sources, *receivers):
        return
    receiving = group.rank in receivers
    small = [one for one in tensors if one.nbytes < SMALL_BYTES]
    packed = torch.cat([_bytes(one) for one in small]) if small else torch.empty(0, dtype=torch.uint8)
    large = [one for one in tensors if one.nbytes >= SMALL_BYTES]
    whole = [one if one.is_contiguous() else one.contiguous() for one in large]
    pieces = [piece for one in (packed, *whole) for piece in _bytes(one).split(PIECE_BYTES) if len(piece)]
    peers = sources if receiving else receivers
    under_way: deque[Any] = deque()
    for number, piece in enumerate(pieces):
        source = sources[number % len(sources)]
        for peer in peers:
            if receiving and peer == source:
                under_way.append(group.irecv(piece.numpy(), peer))
            elif not receiving and group.rank == source:
                under_way.append(group.isend(piece.numpy(), peer))
        while len(under_way) > AT_ONCE * len(peers):
            under_way.popleft().wait()
    for work in under_way:
        work.wait()
    if receiving:
        _unpack(packed, small)
        for one, filled in zip(large, whole, strict=True):
            if filled is not one:
                one.copy_(filled)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    for part, one in zip(packed.split([one.nbytes for one in tensors]), tensors, strict=True):
        one.copy_(part.clone().view(one.dtype).view(one.shape))
