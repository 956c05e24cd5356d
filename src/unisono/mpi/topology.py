"""Communicators with a topology: grids and graphs, and collectives between neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from unisono.mpi import constants, object_schedules, schedules
from unisono.mpi.comm import COMM_NULL, Comm, Intracomm
from unisono.mpi.comm_state import CommState
from unisono.mpi.errors import Exception, whole
from unisono.mpi.lane import Lane
from unisono.mpi.message_spec import Block, by_types, equal, simple, vector
from unisono.mpi.plan import Plan, forms
from unisono.mpi.progress import complete

PROC_NULL = constants.PROC_NULL


class Grid(NamedTuple):
    """The topology of a Cartesian communicator. Ranks are in C order."""

    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    kind = constants.CART

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


class Edges(NamedTuple):
    """The topology of a graph communicator: index[i] is the end of rank i's neighbours in `edges`."""

    index: tuple[int, ...]
    edges: tuple[int, ...]
    kind = constants.GRAPH

    def of(self, rank: int) -> list[int]:
        """The neighbours of a rank."""
        return list(self.edges[self.index[rank - 1] if rank else 0 : self.index[rank]])

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:
        """(sources, destinations)."""
        return self.of(rank), self.of(rank)

    def receive_order(self, number: int) -> list[int]:
        """Messages are in the order of neighbours."""
        return list(range(number))


class OwnEdges(NamedTuple):
    """The topology of a distributed graph: this rank's neighbours."""

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    weights: tuple[tuple[int, ...], tuple[int, ...]] | None
    kind = constants.DIST_GRAPH

    def neighbours(self, rank: int) -> tuple[list[int], list[int]]:  # noqa: ARG002
        """(sources, destinations)."""
        return list(self.sources), list(self.destinations)

    def receive_order(self, number: int) -> list[int]:
        """Messages are in the order of neighbours."""
        return list(range(number))


def Compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """A grid of `nnodes` ranks, as close to a cube as possible; axes that are not 0 stay.

    Example: Compute_dims(12, [0, 0]) is [4, 3].
    """
    found = [0] * dims if isinstance(dims, int) else [whole(one, "dims") for one in dims]
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

    def _exchange_blocks(self, lane: Lane, outgoing: list[Block], incoming: list[Block]) -> Plan:
        sources, destinations, order = self._sides()
        takes = [(sources[i], incoming[i]) for i in order if sources[i] != PROC_NULL]
        gives = [
            (rank, block) for rank, block in zip(destinations, outgoing, strict=True) if rank != PROC_NULL
        ]
        return Plan(schedules.exchange(lane, gives, takes))

    def _neighbor_allgather(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Send one block to all neighbours; gather theirs, of one size."""
        return self._same_to_all(lane, sendbuf, recvbuf, equal)

    def _neighbor_allgatherv(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Send one block to all neighbours; gather theirs, of any sizes."""
        return self._same_to_all(lane, sendbuf, recvbuf, vector)

    def _same_to_all(self, lane: Lane, sendbuf: Any, recvbuf: Any, parts: Any) -> Plan:
        sources, destinations, _ = self._sides()
        mine = simple(sendbuf, writable=False)
        incoming = parts(recvbuf, len(sources), writable=True)
        return self._exchange_blocks(lane, [mine] * len(destinations), incoming)

    def _neighbor_alltoall(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Exchange blocks of one size with neighbours."""
        return self._each_to_each(lane, sendbuf, recvbuf, equal)

    def _neighbor_alltoallv(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Exchange blocks of any sizes with neighbours."""
        return self._each_to_each(lane, sendbuf, recvbuf, vector)

    def _neighbor_alltoallw(self, lane: Lane, sendbuf: Any, recvbuf: Any) -> Plan:
        """Exchange blocks of any sizes and types with neighbours."""
        return self._each_to_each(lane, sendbuf, recvbuf, by_types)

    def _each_to_each(self, lane: Lane, sendbuf: Any, recvbuf: Any, parts: Any) -> Plan:
        sources, destinations, _ = self._sides()
        incoming = parts(recvbuf, len(sources), writable=True)
        return self._exchange_blocks(lane, parts(sendbuf, len(destinations), writable=False), incoming)

    def neighbor_allgather(self, sendobj: Any) -> list[Any]:
        """Send one object to all neighbours; returns theirs."""
        return self.neighbor_alltoall([sendobj] * len(self._sides()[1]))

    def neighbor_alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Send an object to each neighbour; returns theirs."""
        lane = self._alive().lane()
        sources, destinations, order = self._sides()
        objects = list(sendobj)
        if len(objects) != len(destinations):
            raise ValueError(f"expecting {len(destinations)} items, got {len(objects)}")
        gives = [(rank, obj) for rank, obj in zip(destinations, objects, strict=True) if rank != PROC_NULL]
        takes = [i for i in order if sources[i] != PROC_NULL]
        found = complete(object_schedules.exchange(lane, gives, [sources[i] for i in takes]))
        result: list[Any] = [None] * len(sources)
        for i, obj in zip(takes, found, strict=True):
            result[i] = obj
        return result

    degrees = property(lambda self: tuple(len(side) for side in self._sides()[:2]))
    indegree = property(lambda self: len(self._sides()[0]))
    outdegree = property(lambda self: len(self._sides()[1]))
    inoutedges = property(lambda self: self._sides()[:2])
    inedges = property(lambda self: self._sides()[0])
    outedges = property(lambda self: self._sides()[1])


class Cartcomm(Topocomm):
    """A grid of ranks."""

    _kinds = (constants.CART,)

    def _grid(self) -> Grid:
        return self._alive().topology  # type: ignore[no-any-return]

    def Get_dim(self) -> int:
        """The number of axes."""
        return len(self._grid().dims)

    dim = ndim = property(Get_dim)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """(sizes, periods, coordinates of this rank)."""
        grid = self._grid()
        return list(grid.dims), [int(one) for one in grid.periods], grid.coords(self.rank)

    topo = property(Get_topo)
    dims = property(lambda self: self.Get_topo()[0])
    periods = property(lambda self: self.Get_topo()[1])
    coords = property(lambda self: self.Get_topo()[2])

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """The rank at a place."""
        grid = self._grid()
        if len(coords) != len(grid.dims):
            raise ValueError(f"expecting {len(grid.dims)} coordinates, got {len(coords)}")
        found = grid.rank([whole(one, "coords") for one in coords])
        if found == PROC_NULL:
            raise Exception(constants.ERR_ARG, f"{list(coords)} is outside of the grid {list(grid.dims)}")
        return found

    def Get_coords(self, rank: int) -> list[int]:
        """The place of a rank."""
        if not 0 <= rank < self.size:
            raise Exception(constants.ERR_RANK, f"rank {rank} of {self.size}")
        return self._grid().coords(rank)

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """(source, destination) of a shift along an axis."""
        grid = self._grid()
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
        if len(remain_dims) != len(grid.dims):
            raise ValueError(f"expecting {len(grid.dims)} items, got {len(remain_dims)}")
        stays = [axis for axis, keep in enumerate(remain_dims) if keep]
        color = str([here[axis] for axis in range(len(here)) if axis not in stays])
        made = self._split(color, self.rank)
        made._state.topology = Grid(
            tuple(grid.dims[axis] for axis in stays), tuple(grid.periods[axis] for axis in stays)
        )
        made._state.kind = Cartcomm
        return Cartcomm._of(made._state)  # type: ignore[no-any-return]


class Graphcomm(Topocomm):
    """A graph of ranks that every rank knows whole."""

    _kinds = (constants.GRAPH,)

    def _edges(self) -> Edges:
        return self._alive().topology  # type: ignore[no-any-return]

    def Get_dims(self) -> tuple[int, int]:
        """(number of nodes, number of edges)."""
        return len(self._edges().index), len(self._edges().edges)

    dims = property(Get_dims)
    nnodes = property(lambda self: self.Get_dims()[0])
    nedges = property(lambda self: self.Get_dims()[1])

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """(index, edges)."""
        return list(self._edges().index), list(self._edges().edges)

    topo = property(Get_topo)
    index = property(lambda self: self.Get_topo()[0])
    edges = property(lambda self: self.Get_topo()[1])

    def Get_neighbors_count(self, rank: int) -> int:
        """The number of a rank's neighbours."""
        return len(self.Get_neighbors(rank))

    def Get_neighbors(self, rank: int) -> list[int]:
        """A rank's neighbours."""
        if not 0 <= rank < self.size:
            raise Exception(constants.ERR_RANK, f"rank {rank} of {self.size}")
        return self._edges().of(rank)

    nneighbors = property(lambda self: self.Get_neighbors_count(self.rank))
    neighbors = property(lambda self: self.Get_neighbors(self.rank))


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


forms(
    Topocomm,
    {
        f"_neighbor_{kind}": f"Neighbor_{kind}"
        for kind in ("allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw")
    },
)


# ---- how they are made


def _made(comm: Any, kind: Any, topology: Any, size: int) -> Any:
    """A communicator of the first `size` ranks."""
    state = comm._alive()
    if size > state.size:
        raise Exception(constants.ERR_ARG, f"a topology of {size} ranks, and a communicator of {state.size}")
    made = comm._split(0 if state.rank < size else constants.UNDEFINED, state.rank)
    if made == COMM_NULL:
        return kind()
    made._state.topology, made._state.kind = topology, kind
    return kind._of(made._state)


def grid_of(dims: Sequence[int], periods: Any) -> Grid:
    """The topology of these sizes; periods: of each axis, or of all."""
    sizes = tuple(whole(one, "dims") for one in ([dims] if isinstance(dims, int) else dims))
    if periods is None or isinstance(periods, bool):
        periods = [bool(periods)] * len(sizes)
    if len(periods) != len(sizes):
        raise ValueError(f"expecting {len(sizes)} items, got {len(periods)}")
    if any(one < 1 for one in sizes):
        raise Exception(constants.ERR_DIMS, f"a grid {list(sizes)}")
    return Grid(sizes, tuple(bool(one) for one in periods))


def create_cart(self: Any, dims: Sequence[int], periods: Any = None, reorder: bool = False) -> Any:  # noqa: ARG001
    """A grid of ranks."""
    grid = grid_of(dims, periods)
    return _made(self, Cartcomm, grid, math.prod(grid.dims))


def create_graph(self: Any, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:  # noqa: ARG001
    """A graph of ranks: index[i] is the end of rank i's neighbours in `edges`."""
    ends = list(index)
    if ends and ends[0] == 0:  # a first end of nothing
        del ends[0]
    topology = Edges(tuple(ends), tuple(edges))
    return _made(self, Graphcomm, topology, len(topology.index))


def create_dist_graph_adjacent(
    self: Any,
    sources: Sequence[int] | None,
    destinations: Sequence[int] | None,
    sourceweights: Any = None,
    destweights: Any = None,
    info: Any = None,  # noqa: ARG001
    reorder: bool = False,  # noqa: ARG001
) -> Any:
    """A graph of which each rank tells its own neighbours."""
    sources, destinations = tuple(sources or ()), tuple(destinations or ())
    weights = None
    if not (_unweighted(sourceweights) and _unweighted(destweights)):
        weights = (_weights(sourceweights, len(sources)), _weights(destweights, len(destinations)))
    return _made(self, Distgraphcomm, OwnEdges(sources, destinations, weights), self.size)


def create_dist_graph(
    self: Any,
    sources: Sequence[int],
    degrees: Sequence[int],
    destinations: Sequence[int],
    weights: Any = None,
    info: Any = None,  # noqa: ARG001
    reorder: bool = False,  # noqa: ARG001
) -> Any:
    """A graph of which each rank tells some edges, of any ranks."""
    state = self._alive()
    plain = _unweighted(weights)
    values = [0] * len(destinations) if plain else list(_weights(weights, len(destinations)))
    edges, at = [], 0
    for source, degree in zip(sources, degrees, strict=True):
        edges += [(source, destinations[i], values[i]) for i in range(at, at + degree)]
        at += degree
    every = [edge for part in self.allgather(edges) for edge in part]
    into = [(source, weight) for source, there, weight in every if there == state.rank]
    out = [(there, weight) for source, there, weight in every if source == state.rank]
    both = None if plain else (tuple(w for _, w in into), tuple(w for _, w in out))
    topology = OwnEdges(tuple(r for r, _ in into), tuple(r for r, _ in out), both)
    return _made(self, Distgraphcomm, topology, self.size)


def cart_map(self: Any, dims: Sequence[int], periods: Any = None) -> int:
    """This process's rank in a grid."""
    size = math.prod(grid_of(dims, periods).dims)
    return self.rank if self.rank < size else constants.UNDEFINED


def graph_map(self: Any, index: Sequence[int], edges: Sequence[int]) -> int:  # noqa: ARG001
    """This process's rank in a graph."""
    nodes = len(index) - (len(index) > 0 and index[0] == 0)
    return self.rank if self.rank < nodes else constants.UNDEFINED


def _unweighted(weights: Any) -> bool:
    return weights is None or (isinstance(weights, int) and weights == constants.UNWEIGHTED)


def _weights(weights: Any, number: int) -> tuple[int, ...]:
    if isinstance(weights, int):
        if number and weights == constants.WEIGHTS_EMPTY:
            raise ValueError("WEIGHTS_EMPTY, but there are edges")
        return (0,) * number
    found = tuple(whole(one, "weights") for one in weights or ())
    if len(found) != number:
        raise ValueError(f"expecting {number} items, got {len(found)}")
    return found


Intracomm.Create_cart = create_cart  # type: ignore[attr-defined]
Intracomm.Create_graph = create_graph  # type: ignore[attr-defined]
Intracomm.Create_dist_graph_adjacent = create_dist_graph_adjacent  # type: ignore[attr-defined]
Intracomm.Create_dist_graph = create_dist_graph  # type: ignore[attr-defined]
Intracomm.Cart_map = cart_map  # type: ignore[attr-defined]
Intracomm.Graph_map = graph_map  # type: ignore[attr-defined]
_ = (Comm, CommState)
