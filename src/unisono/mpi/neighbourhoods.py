"""Topologies as data: grids and graphs of ranks, who is whose neighbour; and how communicators get them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from unisono.mpi import constants
from unisono.mpi.comm_state import classes, handle_of
from unisono.mpi.errors import Exception, exact, of_size
from unisono.mpi.handle import Handle

PROC_NULL = constants.PROC_NULL


class Grid(msgspec.Struct, frozen=True):
    """The topology of a Cartesian communicator. Ranks are in C order."""

    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    kind: int = constants.CART

    def coords(self, rank: int) -> list[int]:
        """Where a rank is."""
        found = []
        for size in reversed(self.dims):
            found.append(rank % size)
            rank //= size
        return found[::-1]

    def rank(self, coords: Sequence[int]) -> int:
        """The rank at a place; PROC_NULL: it is outside."""
        rank = 0
        for at, size, period in zip(coords, self.dims, self.periods, strict=True):
            if not period and not 0 <= at < size:
                return PROC_NULL
            rank = rank * size + at % size
        return rank

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        """(sources, destinations): along each axis the rank before, then the one behind."""
        here, found = self.coords(rank), []
        for axis in range(len(self.dims)):
            for step in (-1, 1):
                there = list(here)
                there[axis] += step
                found.append(self.rank(there))
        return found, found

    def receive_order(self, number: int) -> list[int]:
        """Between the same two ranks, what goes to the rank before arrives as from the rank behind."""
        return [one ^ 1 for one in range(number)]


class _Ordered(msgspec.Struct, frozen=True):
    """A graph."""

    def receive_order(self, number: int) -> list[int]:
        """Messages are in the order of neighbours."""
        return list(range(number))


class Edges(_Ordered, frozen=True):
    """The topology of a graph communicator: index[i] is the end of rank i's neighbours in `edges`."""

    index: tuple[int, ...]
    edges: tuple[int, ...]
    kind: int = constants.GRAPH

    def of(self, rank: int) -> list[int]:
        """The neighbours of a rank."""
        return list(self.edges[self.index[rank - 1] if rank else 0 : self.index[rank]])

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        """(sources, destinations)."""
        return self.of(rank), self.of(rank)


class OwnEdges(_Ordered, frozen=True):
    """The topology of a distributed graph: this rank's neighbours."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    weights: tuple[tuple[int, ...], tuple[int, ...]] | None
    kind: int = constants.DIST_GRAPH

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        """(sources, destinations)."""
        return list(self.sources), list(self.destinations)


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """A grid of `nnodes` ranks, as close to a cube as possible; axes that are not 0 stay.

    Example: Compute_dims(12, [0, 0]) is [4, 3].
    """
    found = [0] * dims if isinstance(dims, int) else [exact(one, "dims") for one in dims]
    fixed = math.prod(one for one in found if one > 0)
    free = [axis for axis, one in enumerate(found) if one == 0]
    if nnodes < 1 or any(one < 0 for one in found) or nnodes % fixed or (not free and nnodes != fixed):
        raise Exception(constants.ERR_DIMS, f"no grid {found} has {nnodes} ranks")
    for axis, one in zip(free, _most_cubic(nnodes // fixed, len(free)), strict=True):
        found[axis] = one
    return found


def _most_cubic(number: int, axes: int) -> list[int]:
    """The factors whose largest is smallest, in falling order."""
    if axes == 0:
        return []
    if axes == 1:
        return [number]
    best: list[int] = []
    for first in (n for n in range(1, number + 1) if number % n == 0 and n**axes >= number):
        rest = _most_cubic(number // first, axes - 1)
        if rest[0] <= first and not best:
            best = [first, *rest]
    return best


def grid_of(dims: Sequence[int], periods: Any) -> Grid:
    """The topology of these sizes; periods: of each axis, or of all."""
    sizes = tuple(exact(one, "dims") for one in ([dims] if isinstance(dims, int) else dims))
    if periods is None or isinstance(periods, bool):
        periods = [bool(periods)] * len(sizes)
    of_size(periods, len(sizes))
    if any(one < 1 for one in sizes):
        raise Exception(constants.ERR_DIMS, f"a grid {list(sizes)}")
    return Grid(sizes, tuple(exact(one, "periods") != 0 for one in periods))


class TopologyCreation(Handle):
    """The methods of `Intracomm` that add a topology."""

    _split: Any
    allgather: Any
    rank: Any
    size: Any

    def _with_topology(self, topology: Any, size: int) -> Any:
        """A communicator of the first `size` ranks."""
        state = self._alive()
        if size > state.size:
            raise Exception(constants.ERR_ARG, f"a topology of {size} ranks, but {state.size} ranks")
        made = self._split(0 if state.rank < size else constants.UNDEFINED, state.rank)
        if not made:
            return classes[topology.kind]()
        made._state.topology, made._state.kind = topology, None
        return handle_of(made._state)

    def Create_cart(self, dims: Sequence[int], periods: Any = None, reorder: bool = False) -> Any:
        """A grid of ranks."""
        grid = grid_of(dims, periods)
        return self._with_topology(grid, math.prod(grid.dims))

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
        """A graph of ranks: index[i] is the end of rank i's neighbours in `edges`."""
        ends = list(_numbers(index, "index"))
        if ends and ends[0] == 0:  # a first end of nothing
            del ends[0]
        topology = Edges(tuple(ends), _numbers(edges, "edges"))
        if any(not 0 <= edge < len(ends) for edge in topology.edges):
            raise Exception(constants.ERR_ARG, f"the graph has {len(ends)} ranks, edges are {topology.edges}")
        return self._with_topology(topology, len(topology.index))

    def Create_dist_graph_adjacent(
        self, sources: Sequence[int] | None, destinations: Sequence[int] | None, sourceweights: Any = None,
        destweights: Any = None, info: Any = None, reorder: bool = False,
    ) -> Any:  # fmt: skip
        """A graph of which each rank tells its own neighbours."""
        sources = _numbers(sources or (), "sources")
        destinations = _numbers(destinations or (), "destinations")
        weights = None
        if not (_unweighted(sourceweights) and _unweighted(destweights)):
            weights = (_weights(sourceweights, len(sources)), _weights(destweights, len(destinations)))
        return self._with_topology(OwnEdges(sources, destinations, weights), self.size)

    def Create_dist_graph(
        self, sources: Sequence[int], degrees: Sequence[int], destinations: Sequence[int],
        weights: Any = None, info: Any = None, reorder: bool = False,
    ) -> Any:  # fmt: skip
        """A graph of which each rank tells some edges, of any ranks."""
        state = self._alive()
        plain = _unweighted(weights)
        values = [0] * len(destinations) if plain else list(_weights(weights, len(destinations)))
        edges, at = [], 0
        sources, degrees = _numbers(sources, "sources"), _numbers(degrees, "degrees")
        destinations = _numbers(destinations, "destinations")
        for source, degree in zip(sources, degrees, strict=True):
            edges += [(source, destinations[i], values[i]) for i in range(at, at + degree)]
            at += degree
        every = [edge for part in self.allgather(edges) for edge in part]
        into = [(source, weight) for source, there, weight in every if there == state.rank]
        out = [(there, weight) for source, there, weight in every if source == state.rank]
        both = None if plain else (tuple(w for _, w in into), tuple(w for _, w in out))
        topology = OwnEdges(tuple(r for r, _ in into), tuple(r for r, _ in out), both)
        return self._with_topology(topology, self.size)

    def Cart_map(self, dims: Sequence[int], periods: Any = None) -> int:
        """This process's rank in a grid."""
        size = math.prod(grid_of(dims, periods).dims)
        return self.rank if self.rank < size else constants.UNDEFINED

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:
        """This process's rank in a graph."""
        nodes = len(index) - (len(index) > 0 and index[0] == 0)
        return self.rank if self.rank < nodes else constants.UNDEFINED


def _unweighted(weights: Any) -> bool:
    return weights is None or (isinstance(weights, int) and weights == constants.UNWEIGHTED)


def _numbers(values: Sequence[int], name: str) -> tuple[int, ...]:
    return tuple(exact(one, name) for one in values)


def _weights(weights: Any, number: int) -> tuple[int, ...]:
    if isinstance(weights, int):
        if number and weights == constants.WEIGHTS_EMPTY:
            raise ValueError("WEIGHTS_EMPTY, but there are edges")
        return (0,) * number
    found: tuple[int, ...] = of_size(_numbers(weights or (), "weights"), number)
    return found
