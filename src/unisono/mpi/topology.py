"""Communicators with a topology: grids and graphs, and collectives between neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.mpi import constants, object_schedules, schedules
from unisono.mpi.comm import Intracomm
from unisono.mpi.comm_state import CommState, classes
from unisono.mpi.errors import Exception, exact, of_size, whole
from unisono.mpi.handle import getter
from unisono.mpi.message_spec import by_types, equal, repeated, vector
from unisono.mpi.neighbourhoods import PROC_NULL, Edges, Grid
from unisono.mpi.plan import Plan, forms
from unisono.mpi.progress import complete
from unisono.mpi.transport import Lane


class Topocomm(Intracomm):
    """A communicator whose ranks have neighbours."""

    _kinds: tuple[int, ...] = (constants.CART, constants.GRAPH, constants.DIST_GRAPH)

    @classmethod
    def _fits(cls, state: CommState) -> bool:  # type: ignore[override]
        return state.topology is not None and state.topology.kind in cls._kinds

    def _sides(self) -> tuple[list[int], list[int], list[int]]:
        """(sources, destinations, the order in which messages from one source arrive)."""
        state = self._alive()
        sources, destinations = state.topology.neighbours(state.rank)
        return sources, destinations, state.topology.receive_order(len(sources))

    def _neighbor_allgather(self, lane: Lane, sendbuf: Any, recvbuf: Any, *, parts: Any = equal) -> Plan:
        """Send one block to all neighbours; gather theirs, {sizes}."""
        return self._neighbor_alltoall(lane, sendbuf, recvbuf, parts=parts, sent=repeated)

    def _neighbor_alltoall(
        self, lane: Lane, sendbuf: Any, recvbuf: Any, *, parts: Any = equal, sent: Any = None
    ) -> Plan:
        """Exchange blocks {sizes} with neighbours."""
        sources, destinations, order = self._sides()
        outgoing = (sent or parts)(sendbuf, len(destinations), writable=False)
        incoming = parts(recvbuf, len(sources), writable=True)
        takes = [(sources[i], incoming[i]) for i in order if sources[i] != PROC_NULL]
        gives = [pair for pair in zip(destinations, outgoing, strict=True) if pair[0] != PROC_NULL]
        return Plan(schedules.exchange(lane, gives, takes, copies=False))

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Send one object to all neighbours; returns theirs."""
        return self.neighbor_alltoall([sendobj] * len(self._sides()[1]))

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send an object to each neighbour; returns theirs."""
        sources, destinations, order = self._sides()
        objects = of_size(list(sendobj), len(destinations))
        gives = [(rank, obj) for rank, obj in zip(destinations, objects, strict=True) if rank != PROC_NULL]
        takes = [i for i in order if sources[i] != PROC_NULL]
        lane = self._alive().lane()
        found = complete(object_schedules.exchange(lane, gives, [sources[i] for i in takes]))
        result: list[Any] = [None] * len(sources)
        for i, obj in zip(takes, found, strict=True):
            result[i] = obj
        return result

    degrees = property(
        lambda self: tuple(len(side) for side in self._sides()[:2]),
        doc="(number of sources, of destinations).",
    )
    indegree = property(lambda self: len(self._sides()[0]), doc="The number of sources.")
    outdegree = property(lambda self: len(self._sides()[1]), doc="The number of destinations.")
    inoutedges = property(lambda self: self._sides()[:2], doc="(sources, destinations).")
    inedges = property(lambda self: self._sides()[0], doc="The sources.")
    outedges = property(lambda self: self._sides()[1], doc="The destinations.")


class Cartcomm(Topocomm):
    """A grid of ranks."""

    _kinds = (constants.CART,)

    def _grid(self) -> Grid:
        return self._alive().topology

    Get_dim, dim = getter("The number of axes.", lambda state: len(state.topology.dims))
    ndim = dim

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """(sizes, periods, coordinates of this rank)."""
        grid = self._grid()
        return list(grid.dims), [int(one) for one in grid.periods], grid.coords(self.rank)

    topo = property(Get_topo)
    dims = property(lambda self: self.Get_topo()[0], doc="The sizes.")
    periods = property(lambda self: self.Get_topo()[1], doc="The periods.")
    coords = property(lambda self: self.Get_topo()[2], doc="The coordinates of this rank.")

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """The rank at a place."""
        grid = self._grid()
        if len(coords) != len(grid.dims):
            raise ValueError(f"expecting {len(grid.dims)} coordinates, got {len(coords)}")
        found = grid.rank([exact(one, "coords") for one in coords])
        if found == PROC_NULL:
            raise Exception(constants.ERR_ARG, f"{list(coords)} is outside of the grid {list(grid.dims)}")
        return found

    def Get_coords(self, rank: int) -> list[int]:
        """The place of a rank."""
        rank = whole(rank, "rank")
        if not 0 <= rank < self.size:
            raise Exception(constants.ERR_RANK, f"rank {rank} of {self.size}")
        return self._grid().coords(rank)

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """(source, destination) of a shift along an axis."""
        grid = self._grid()
        direction, disp = whole(direction, "direction"), whole(disp, "disp")
        if not 0 <= direction < len(grid.dims):
            raise Exception(constants.ERR_DIMS, f"axis {direction} of {len(grid.dims)}")
        here = grid.coords(self.rank)
        ends = []
        for step in (-disp, disp):
            there = list(here)
            there[direction] += step
            ends.append(grid.rank(there))
        return ends[0], ends[1]

    def Sub(self, remain_dims: Sequence[bool]) -> Cartcomm:
        """The part of the grid along some axes in which this rank is."""
        grid, here = self._grid(), self.coords
        stays = [axis for axis, keep in enumerate(of_size(remain_dims, len(grid.dims))) if keep]
        color = str([here[axis] for axis in range(len(here)) if axis not in stays])
        made = self._split(color, self.rank)
        made._state.topology = Grid(
            tuple(grid.dims[axis] for axis in stays), tuple(grid.periods[axis] for axis in stays)
        )
        made._state.kind = None
        return Cartcomm._of(made._state)


def _lists(topology: Edges) -> tuple[list[int], list[int]]:
    return list(topology.index), list(topology.edges)


class Graphcomm(Topocomm):
    """A graph of ranks that every rank knows whole."""

    _kinds = (constants.GRAPH,)

    def _edges(self) -> Edges:
        return self._alive().topology

    Get_dims, dims = getter("(nodes, edges).", lambda state: (*map(len, _lists(state.topology)),))
    nnodes = property(lambda self: self.dims[0], doc="The number of nodes.")
    nedges = property(lambda self: self.dims[1], doc="The number of edges.")
    Get_topo, topo = getter("(index, edges).", lambda state: _lists(state.topology))
    index = property(lambda self: self.Get_topo()[0], doc="The ends of the ranks' neighbours.")
    edges = property(lambda self: self.Get_topo()[1], doc="The neighbours of all ranks.")

    def Get_neighbors_count(self, rank: int) -> int:
        """The number of a rank's neighbours."""
        return len(self.Get_neighbors(rank))

    def Get_neighbors(self, rank: int) -> list[int]:
        """A rank's neighbours."""
        if not 0 <= rank < self.size:
            raise Exception(constants.ERR_RANK, f"rank {rank} of {self.size}")
        return self._edges().of(rank)

    nneighbors = property(
        lambda self: self.Get_neighbors_count(self.rank), doc="The number of this rank's neighbours."
    )
    neighbors = property(lambda self: self.Get_neighbors(self.rank), doc="This rank's neighbours.")


class Distgraphcomm(Topocomm):
    """A graph of which each rank knows its own neighbours."""

    _kinds = (constants.DIST_GRAPH,)

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """(number of sources, of destinations, whether edges have weights)."""
        topology = self._alive().topology
        return len(topology.sources), len(topology.destinations), topology.weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], tuple[list[int], list[int]] | None]:
        """(sources, destinations, their weights or None)."""
        topology = self._alive().topology
        weights = topology.weights
        found = None if weights is None else (list(weights[0]), list(weights[1]))
        return list(topology.sources), list(topology.destinations), found


forms(Topocomm, "_neighbor_allgather", Neighbor_allgather={}, Neighbor_allgatherv={"parts": vector})
_PARTS = {"": equal, "v": vector, "w": by_types}
forms(
    Topocomm, "_neighbor_alltoall", **{f"Neighbor_alltoall{v}": {"parts": one} for v, one in _PARTS.items()}
)
classes.update({constants.CART: Cartcomm, constants.GRAPH: Graphcomm, constants.DIST_GRAPH: Distgraphcomm})
