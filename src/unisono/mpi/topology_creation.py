"""How communicators with a topology are made of others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from unisono.mpi import constants
from unisono.mpi.comm_state import classes, handle_of
from unisono.mpi.errors import Exception, exact
from unisono.mpi.neighbourhoods import Edges, OwnEdges, grid_of


class TopologyCreation:
    """The methods of `Intracomm` that add a topology."""

    _alive: Any
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

    def Create_cart(self, dims: Sequence[int], periods: Any = None, reorder: bool = False) -> Any:  # noqa: ARG002
        """A grid of ranks."""
        grid = grid_of(dims, periods)
        return self._with_topology(grid, math.prod(grid.dims))

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:  # noqa: ARG002
        """A graph of ranks: index[i] is the end of rank i's neighbours in `edges`."""
        ends = list(_numbers(index, "index"))
        if ends and ends[0] == 0:  # a first end of nothing
            del ends[0]
        topology = Edges(tuple(ends), _numbers(edges, "edges"))
        if any(not 0 <= edge < len(ends) for edge in topology.edges):
            raise Exception(constants.ERR_ARG, f"the graph has {len(ends)} ranks, edges are {topology.edges}")
        return self._with_topology(topology, len(topology.index))

    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int] | None,
        destinations: Sequence[int] | None,
        sourceweights: Any = None,
        destweights: Any = None,
        info: Any = None,  # noqa: ARG002
        reorder: bool = False,  # noqa: ARG002
    ) -> Any:
        """A graph of which each rank tells its own neighbours."""
        sources = _numbers(sources or (), "sources")
        destinations = _numbers(destinations or (), "destinations")
        weights = None
        if not (_unweighted(sourceweights) and _unweighted(destweights)):
            weights = (_weights(sourceweights, len(sources)), _weights(destweights, len(destinations)))
        return self._with_topology(OwnEdges(sources, destinations, weights), self.size)

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Any = None,
        info: Any = None,  # noqa: ARG002
        reorder: bool = False,  # noqa: ARG002
    ) -> Any:
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

    def Graph_map(self, index: Sequence[int], edges: Sequence[int]) -> int:  # noqa: ARG002
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
    found = _numbers(weights or (), "weights")
    if len(found) != number:
        raise ValueError(f"expecting {number} items, got {len(found)}")
    return found
