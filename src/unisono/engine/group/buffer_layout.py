"""The buffers of a call: argument checks of the collectives, most of all of those with an input and an
output.

A side is a list of (address, numel): of one buffer, or of one for each rank. `out` and `inputs` may be one
array with a leading axis of p, which the engine cuts, or a list of p arrays.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from unisono.engine.memory.buffers import DTYPES, ITEMSIZES, view, views
from unisono.engine.operations.kinds import kind_of
from unisono.plans import CONTRACTS

Extents = list[tuple[int, int]]

_LISTS = (list, tuple)  # a constant: the expression `list | tuple` would be evaluated in every call


class CollectiveBuffers(NamedTuple):
    """The two sides of a collective.

    Attributes:
        out, sendbuf: the names of its arguments.  out_blocks, sendbuf_blocks: whether that side has p blocks.
        equal: all blocks have one size; otherwise only this rank's own block has to fit.
        root: the argument that names the only rank with p blocks; "" where every rank has both sides.
    """

    out: str
    sendbuf: str
    out_blocks: bool
    sendbuf_blocks: bool
    equal: bool
    root: str = ""


SIDES: dict[str, CollectiveBuffers] = {
    "all_gather": CollectiveBuffers("out", "x", True, False, True),
    "all_gather_v": CollectiveBuffers("out", "x", True, False, False),
    "gather": CollectiveBuffers("out", "x", True, False, False, "dst"),
    "scatter": CollectiveBuffers("out", "inputs", False, True, False, "src"),
    "reduce_scatter": CollectiveBuffers("out", "inputs", False, True, True),
    "all_to_all": CollectiveBuffers("out", "inputs", True, True, False),
}

_BARRIER = "barrier"
_U8 = DTYPES.index("uint8")


class BufferLayout(NamedTuple):
    """The buffers of a call, checked.

    Attributes:
        dtype: its code.  target: what is written, or used in place.  source: what is read.
        numel: elements, which must be equal on all ranks; 0 where they may differ.
        typical: elements by which an algorithm is chosen, the same on every rank.
        blocks: the blocks that may differ in size.  writes: this rank's first side is written.
    """

    dtype: int
    target: Extents
    source: Extents
    numel: int
    typical: int
    blocks: Extents
    writes: bool = True


def check_layout(collective: str, out: Any, sendbuf: Any, size: int, rank: int, root: int) -> BufferLayout:
    """Check the buffers of a collective. One that works in place has `out` only, a barrier none.

    Raises:
        ValueError, TypeError: an array, its size, dtype or place in memory is wrong.
    """
    sides = SIDES.get(collective)
    if sides is not None:
        dtype, target, source = both_buffers(sides, out, sendbuf, size, rank, root)
        several, single = (target, source) if sides.out_blocks else (source, target)
        numel = single[0][1] if sides.equal else 0
        typical = numel
        if collective == "all_gather_v":  # every rank knows all sizes
            typical = sum(length for _, length in target) // size
        return BufferLayout(dtype, target, source, numel, typical, several if sides.root else [])
    if collective == _BARRIER:
        return BufferLayout(_U8, [], [], 0, 0, [])
    if collective == "reduce" and rank != root and sendbuf is not None:
        out, sendbuf = sendbuf, None
    writes = writes_first(collective, rank, root)
    address, numel, dtype = view(out, writes, "x" if sendbuf is None else "out")
    source = [] if sendbuf is None else _beside(sendbuf, address, numel, dtype)
    return BufferLayout(dtype, [(address, numel)], source, numel, numel, [], writes)


def writes_first(collective: str, rank: int, root: int) -> bool:
    """Whether this rank's first side is written."""
    return {"broadcast": rank != root, "reduce": rank == root}.get(collective, True)


def names_of(collective: str, sendbuf: Any) -> tuple[str, str]:
    """The names of the output and the input in errors."""
    sides = SIDES.get(collective)
    if sides is not None:
        return sides.out, sides.sendbuf
    return ("x" if sendbuf is None else "out"), "x"


def _beside(x: Any, address: int, numel: int, dtype: int) -> Extents:
    """The input of a call that works in place otherwise; [] where it is the output."""
    start, length, other = view(x, False, "x")
    if (length, other) != (numel, dtype):
        texts = f"out is {DTYPES[dtype]}[{numel}], x is {DTYPES[other]}[{length}]"
        raise ValueError(f"{texts}; they must agree")
    nbytes = numel * ITEMSIZES[dtype]
    if start != address and start < address + nbytes and address < start + nbytes:
        raise ValueError("out and x overlap in memory; out may be x, or apart from it")
    return [] if start == address else [(start, length)]


def both_buffers(
    sides: CollectiveBuffers, out: Any, sendbuf: Any, size: int, rank: int, root: int
) -> tuple[int, Extents, Extents]:
    """(dtype, output, input) of a call that has both, all checked.

    Raises:
        ValueError, TypeError: an array, its size, dtype or place in memory is wrong.
    """
    if sides.root and rank != root:
        return _away_from_root(sides, out, sendbuf, rank, root)
    if sides.out_blocks:
        dtype, target = blocks(_present(sides, out, sides.out, rank), size, True, sides.out)
    else:
        address, numel, dtype = view(out, True, sides.out)
        target = [(address, numel)]
    if sides.sendbuf_blocks:
        other, source = blocks(_present(sides, sendbuf, sides.sendbuf, rank), size, False, sides.sendbuf)
    else:
        address, numel, other = view(sendbuf, False, sides.sendbuf)
        source = [(address, numel)]
    if dtype != other:
        raise ValueError(
            f"{sides.out} is {DTYPES[dtype]}, {sides.sendbuf} is {DTYPES[other]}; they must agree"
        )
    if sides.out_blocks and sides.sendbuf_blocks:
        _check_exchange(sides, target, source, dtype, size, rank)
    elif sides.out_blocks:
        _check_blocks(target, source[0], dtype, size, rank, sides.equal, (sides.out, sides.sendbuf))
    else:
        _check_blocks(source, target[0], dtype, size, rank, sides.equal, (sides.sendbuf, sides.out))
    return dtype, target, source


def blocks(arrays: Any, size: int, writable: bool, name: str) -> tuple[int, Extents]:
    """Dtype and extents of p blocks: a list or tuple of p arrays, or one array of p equal blocks."""
    if isinstance(arrays, _LISTS):
        if len(arrays) != size:
            raise ValueError(f"{name} has {len(arrays)} arrays, expected {size}: one for every rank")
        dtype, extents = views(arrays, writable=writable, name=name)
        if writable:
            _check_disjoint(extents, dtype, name)
        return dtype, extents
    address, numel, dtype = view(arrays, writable, name)
    if numel % size:
        raise ValueError(f"{name} has {numel} elements, which cannot be cut into {size} equal blocks")
    return dtype, [(address, numel)]


def check_alike(collective: str, blocks: Extents) -> None:
    """Check that only a direct algorithm has blocks of different sizes: others do not know the sizes."""
    sizes = {numel for _, numel in blocks}
    if len(sizes) > 1:
        raise ValueError(
            f"{collective}: blocks have {min(sizes)} to {max(sizes)} elements; sizes may differ with "
            "algorithm='direct' only"
        )


def in_parts(layout: BufferLayout, kind: str, size: int, parts: int) -> BufferLayout:
    """The buffers of a call whose plan cuts each of the `size` blocks into `parts` chunks.

    Raises:
        ValueError: a block cannot be cut into equal parts.
    """
    contract = CONTRACTS[kind_of(kind).plan]

    def cut(extents: Extents, blocks: str) -> Extents:
        several = len(extents) == 1 and blocks == "p"
        for _, numel in extents:
            if numel % (parts * size if several else parts):
                block = numel // size if several else numel
                raise ValueError(
                    f"{kind}: a block has {block} elements, which cannot be cut into {parts} equal chunks, "
                    "as the plan needs"
                )
        if len(extents) <= 1:
            return extents
        return [each for extent in extents for each in spread([extent], parts, ITEMSIZES[layout.dtype])]

    return layout._replace(
        target=cut(layout.target, contract.out_blocks), source=cut(layout.source, contract.in_blocks)
    )


def spread(extents: Extents, count: int, item: int) -> Extents:
    """The blocks of a side one by one."""
    if len(extents) == count:
        return extents
    address, numel = extents[0][0], extents[0][1] // count
    return [(address + number * numel * item, numel) for number in range(count)]


def with_call_name(collective: str, error: Exception) -> Exception:
    """The same error, beginning with the name of the call."""
    return type(error)(f"{collective}: {error}")


def _away_from_root(
    sides: CollectiveBuffers, out: Any, sendbuf: Any, rank: int, root: int
) -> tuple[int, Extents, Extents]:
    """The sides of a rank that is not the root: only the root has the side of p blocks."""
    name, surplus = (sides.out, out) if sides.out_blocks else (sides.sendbuf, sendbuf)
    if surplus is not None:
        raise ValueError(f"{name}= is given on rank {rank}, which is not {sides.root}={root}")
    if sides.out_blocks:
        address, numel, dtype = view(sendbuf, False, sides.sendbuf)
        return dtype, [], [(address, numel)]
    address, numel, dtype = view(out, True, sides.out)
    return dtype, [(address, numel)], []


def _present(sides: CollectiveBuffers, arrays: Any, name: str, rank: int) -> Any:
    if arrays is None and sides.root:
        raise ValueError(f"rank {rank} is {sides.root} and needs {name}=")
    return arrays


def _check_blocks(
    several: Extents,
    single: tuple[int, int],
    dtype: int,
    size: int,
    rank: int,
    equal: bool,
    names: tuple[str, str],
) -> None:
    """Check that the blocks of one side fit the other side, and that only this rank's block shares memory."""
    address, numel = single
    if len(several) == 1:
        if several[0][1] != numel * size:
            raise ValueError(_misfit(names, several[0][1] // size, 0 if equal else rank, numel))
    else:
        for peer in range(size) if equal else (rank,):
            if several[peer][1] != numel:
                raise ValueError(_misfit(names, several[peer][1], peer, numel))
    item = ITEMSIZES[dtype]
    end = address + numel * item
    for start, count in several:
        apart = not (numel and start < end and address < start + count * item)
        if not apart and single != _block(several, size, rank, item):
            raise ValueError(f"{names[0]} and {names[1]} overlap in memory; only block {rank} may be shared")


def _check_exchange(
    sides: CollectiveBuffers, out: Extents, sendbuf: Extents, dtype: int, size: int, rank: int
) -> None:
    """Check that a rank's block for itself fits, and that the two sides share no memory."""
    item = ITEMSIZES[dtype]
    got, gave = _block(out, size, rank, item)[1], _block(sendbuf, size, rank, item)[1]
    if got != gave:
        raise ValueError(_misfit((sides.out, sides.sendbuf), got, rank, gave))
    for start, count in out:
        for other, length in sendbuf:
            if start < other + length * item and other < start + count * item and count and length:
                raise ValueError(f"{sides.out} and {sides.sendbuf} overlap in memory")


def _misfit(names: tuple[str, str], found: int, rank: int, numel: int) -> str:
    return f"{names[0]} has {found} elements for rank {rank}, {names[1]} has {numel}"


def _check_disjoint(extents: Extents, dtype: int, name: str) -> None:
    """Check that no two written arrays share memory."""
    item = ITEMSIZES[dtype]
    for (low, numel), (high, _) in pairwise(sorted(extent for extent in extents if extent[1])):
        if low + numel * item > high:
            raise ValueError(f"two arrays of {name} overlap in memory")


def _block(extents: Extents, size: int, rank: int, item: int) -> tuple[int, int]:
    """Block `rank` of a side."""
    if len(extents) == size:
        return extents[rank]
    address, numel = extents[0][0], extents[0][1] // size
    return address + rank * numel * item, numel
