"""All-reduce on a two-dimensional torus: rings along the rows, then along the columns, then back.

Source: Mikami, Suganuma, U-chupala, Tanaka, Kageyama, "Massively distributed SGD: ImageNet/ResNet-50
training in a flash", arXiv:1811.05233 (2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from unisono.plans.plan import Out, Recv, Reduce, Send, Step, by_host, exchange


def grid(hosts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The rows: the hosts, if there are several of equal size; otherwise a grid as square as possible.

    Example: six ranks of one host are in rows (0, 1, 2) and (3, 4, 5).
    """
    rows = by_host(hosts)
    if len(rows) > 1 and len({len(row) for row in rows}) == 1:
        return list(rows)
    size = len(hosts)
    height = max(divisor for divisor in range(1, isqrt(size) + 1) if size % divisor == 0)
    width = size // height
    return [tuple(range(first, first + width)) for first in range(0, size, width)]


def all_reduce(rank: int, hosts: tuple[int, ...], root: int) -> Iterator[Step]:  # noqa: ARG001
    """Reduce-scatter along the row, all-reduce along the column, all-gather along the row.

    Cost on r rows of c ranks: 2(c-1 + r-1) a + 2(p-1)/p b L + (p-1)/p g L.
    The ranks of a row divide the buffer into c groups of r chunks; those of a column share one group.
    """
    rows = grid(hosts)
    height, width = len(rows), len(rows[0])
    y = next(number for number, row in enumerate(rows) if rank in row)
    x = rows[y].index(rank)
    right, left = rows[y][(x + 1) % width], rows[y][x - 1]
    down, up = rows[(y + 1) % height][x], rows[y - 1][x]

    def group(number: int) -> range:
        first = number % width * height
        return range(first, first + height)

    def mine(number: int) -> int:
        return group(x + 1)[number % height]

    for k in range(width - 1):
        sends = [Send(Out(chunk), to=(right,)) for chunk in group(x - k)]
        yield from exchange(rank, sends, [Reduce(Out(c), frm=(left, rank)) for c in group(x - k - 1)])
    for k in range(height - 1):
        yield Send(Out(mine(y - k)), to=(down,))
        yield Reduce(Out(mine(y - k - 1)), frm=(up, rank))
    for k in range(height - 1):
        yield Send(Out(mine(y + 1 - k)), to=(down,))
        yield Recv(Out(mine(y - k)), frm=up)
    for k in range(width - 1):
        sends = [Send(Out(chunk), to=(right,)) for chunk in group(x + 1 - k)]
        yield from exchange(rank, sends, [Recv(Out(chunk), frm=left) for chunk in group(x - k)])
    if len(hosts) == 1:
        yield Reduce(Out(0), frm=(0,))
