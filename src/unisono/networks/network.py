"""A network as data: hosts, links and routes, the costs of a rank, and the symmetry of all that.

Ranks are 0..size-1. Rank r is local rank r % ranks_per_host of host r // ranks_per_host.

A *link* carries bytes in one direction. A cable in full duplex is two links. A cable in half duplex, or the
memory of a host, is one link that the routes of both directions cross. Routes that cross the same link share
its rate. Numbers, names and ends of links are computed when they are needed, so a network of 100,000 ranks is
made in less than a second and takes a few megabytes.

`generators` builds networks, `description` reads them from TOML. This module simulates nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, overload

import msgspec

from unisono.engine.base.validation import whole
from unisono.networks.costs import Costs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "Axis",
    "Family",
    "Links",
    "Machine",
    "Network",
    "NetworkLink",
    "Router",
    "Switch",
    "Symmetry",
    "numbered",
]

FULL, HALF = "full", "half"


class NetworkLink(NamedTuple):
    """What bytes cross in one direction (half duplex: in both).

    Attributes:
        name: "source>target"; a half-duplex one "source=target".
        latency_s: until the first byte of a message has crossed it.  bytes_per_s: what all its flows share.
        duplex: "full": the way back is another link. "half": the way back is this link.
        burst_bytes: what passes at once after a pause (`fabric.Cable`).
    """

    name: str
    latency_s: float
    bytes_per_s: float
    duplex: str
    burst_bytes: float = 0.0

    @property
    def ends(self) -> tuple[str, str]:
        """The names of its two ends."""
        source, _, target = self.name.partition("=" if self.duplex == HALF else ">")
        return source, target


class Machine(NamedTuple):
    """A host.

    Attributes:
        cores: which its ranks share, where there are more ranks than cores; 0: each rank has one.
        memory_bytes_per_s: of all its cores together; 0: no limit.
    """

    name: str
    cores: int
    memory_bytes_per_s: float


class Switch(NamedTuple):
    """A switch that adds the messages of its ranks, and sends the sum to all of them.

    Attributes:
        adds_bytes_per_s: of each contribution; 0: as fast as its links.
    """

    name: str
    adds_bytes_per_s: float


class Axis(NamedTuple):
    """One digit of the number of a rank.

    Attributes:
        kind: "symmetric": any permutation of its values is a symmetry. "cyclic": a rotation is.
            "fixed": its values differ.
    """

    name: str
    size: int
    kind: str


class Symmetry(NamedTuple):
    """Maps of the network onto itself: each digit of a rank's number is shifted by itself, without a carry.

    The digits are those of `axes`, the most significant first. For every shift s and all ranks a, b

        route(image(a, s), image(b, s)) == tuple(link_image(l, s) for l in route(a, b))

    and a link and its image have the same latency and rate; ranks have the same costs.

    Example: a torus(4, 8) has the axes (x, 4), (y, 8). image(9, (1, 0)) == 17: from (1, 1) to (2, 1).
    """

    axes: tuple[Axis, ...]
    families: tuple[Family, ...]

    @property
    def order(self) -> int:
        """The number of different shifts."""
        return math.prod(axis.size for axis in self.axes if axis.kind != "fixed")

    def digits(self, rank: int) -> tuple[int, ...]:
        """The digits of a rank's number."""
        return split(rank, tuple(axis.size for axis in self.axes))

    def image(self, rank: int, shift: Sequence[int]) -> int:
        """The rank that a shift maps this one to.

        Raises:
            ValueError: the shift has another number of digits, or moves a fixed axis.
        """
        self._check(shift)
        sizes = tuple(axis.size for axis in self.axes)
        return joined(((d + s) % n for d, s, n in zip(self.digits(rank), shift, sizes, strict=True)), sizes)

    def link_image(self, link: int, shift: Sequence[int]) -> int:
        """The link that a shift maps this one to."""
        self._check(shift)
        family = _family_of(self.families, link)
        moved = []
        for coordinate, axis, size in zip(
            split(link - family.base, family.sizes), family.axes, family.sizes, strict=True
        ):
            period = size if axis < 0 else min(size, self.axes[axis].size)  # `Network.first` shortens an axis
            by = shift[axis] if axis >= 0 and coordinate < period else 0
            moved.append((coordinate + by) % period if by else coordinate)
        return family.base + joined(moved, family.sizes)

    def _check(self, shift: Sequence[int]) -> None:
        if len(shift) != len(self.axes):
            raise ValueError(f"the shift {tuple(shift)} has {len(shift)} digits, expected {len(self.axes)}")
        for axis, by in zip(self.axes, shift, strict=True):
            if axis.kind == "fixed" and by % axis.size:
                raise ValueError(f"the shift {tuple(shift)} moves the axis {axis.name}, which is fixed")


class Family(NamedTuple):
    """Links of one kind: they differ in their coordinates only.

    Attributes:
        source, target: the names of the ends, from the coordinates: "host{0}.gpu{1}".format.
        sizes: of the coordinates.  axes: the axis of the symmetry that shifts each; -1: none does.
        back: the way back of the family before it; in half duplex the two are the same links.
        base: the number of the first one; see `numbered`.
    """

    source: Callable[..., str]
    target: Callable[..., str]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    latency_s: float
    bytes_per_s: float
    duplex: str = FULL
    burst_bytes: float = 0.0
    back: bool = False
    base: int = 0

    @property
    def repeats(self) -> bool:
        """Whether its links are those of the family before it."""
        return self.back and self.duplex == HALF

    @property
    def total(self) -> int:
        """The number of its links."""
        return math.prod(self.sizes)

    def at(self, *coordinates: int) -> int:
        """The number of the link with these coordinates."""
        return self.base + joined(coordinates, self.sizes)

    def link(self, number: int) -> NetworkLink:
        """The link with this number."""
        coordinates = split(number - self.base, self.sizes)
        mark = "=" if self.duplex == HALF else ">"
        name = f"{self.source(*coordinates)}{mark}{self.target(*coordinates)}"
        return NetworkLink(name, self.latency_s, self.bytes_per_s, self.duplex, self.burst_bytes)


def numbered(families: Sequence[Family]) -> tuple[Family, ...]:
    """The same families, one after the other in the numbering of links."""
    found: list[Family] = []
    base = 0
    for family in families:
        if family.repeats:
            found.append(family._replace(base=found[-1].base))
            continue
        found.append(family._replace(base=base))
        base += family.total
    return tuple(found)


class Links(Sequence[NetworkLink]):
    """All links of a network by number. `latency_s`, `bytes_per_s`, `burst_bytes`: float64[links]."""

    def __init__(self, families: tuple[Family, ...]) -> None:
        self.families = tuple(family for family in families if not family.repeats)
        self._bases = [family.base for family in self.families]

    def __len__(self) -> int:
        return self.families[-1].base + self.families[-1].total if self.families else 0

    @overload
    def __getitem__(self, number: int) -> NetworkLink: ...
    @overload
    def __getitem__(self, number: slice) -> list[NetworkLink]: ...
    def __getitem__(self, number: int | slice) -> NetworkLink | list[NetworkLink]:
        """The link of a number, or those of a slice."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        number = number + len(self) if number < 0 else number
        if not 0 <= number < len(self):
            raise IndexError(f"no link {number}: there are {len(self)}")
        return self.families[bisect_right(self._bases, number) - 1].link(number)

    def __iter__(self) -> Iterator[NetworkLink]:
        for family in self.families:
            for number in range(family.base, family.base + family.total):
                yield family.link(number)

    @cached_property
    def latency_s(self) -> NDArray[np.float64]:
        """The latency of each, in seconds."""
        return self._column([family.latency_s for family in self.families])

    @cached_property
    def bytes_per_s(self) -> NDArray[np.float64]:
        """The rate of each, in bytes per second."""
        return self._column([family.bytes_per_s for family in self.families])

    @cached_property
    def burst_bytes(self) -> NDArray[np.float64]:
        """What each passes at once after a pause."""
        return self._column([family.burst_bytes for family in self.families])

    def _column(self, values: list[float]) -> NDArray[np.float64]:
        import numpy as np

        return np.repeat(np.array(values, np.float64), [family.total for family in self.families])


class Router(Protocol):
    """Finds the links between two ranks; equal arguments give equal links."""

    def path(self, source: int, target: int) -> tuple[int, ...]:
        """The links from one rank to another, in order."""

    def to_switch(self, source: int, switch: int) -> tuple[int, ...]:
        """The links from a rank to a switch that adds."""

    def from_switch(self, switch: int, target: int) -> tuple[int, ...]:
        """The links from a switch that adds to a rank."""


class Network(msgspec.Struct, frozen=True, kw_only=True, dict=True, eq=False):
    """Ranks on hosts, and the links between them.

    Attributes:
        name: for people.  size: the number of ranks.
        hosts: the number of the host of each rank, as plans take it.
        machines: the hosts by number.
        links: all links by number.
        costs: of each rank by `costs_index`; most networks have one for all.
        costs_index: which of the costs each rank has; (): all have the first.
        switches: those that add; the endpoint `size + i` of `route` is switch i.
        symmetry: the maps of the network onto itself; None: none is known.
        stores: a switch has a whole message before it sends it on; False: it forwards the bytes as they come.
        shared_cores: of the one machine that all hosts are on; 0: each host has its own (`Machine.cores`).
    """

    name: str
    size: int
    hosts: Sequence[int]
    machines: Sequence[Machine]
    links: Links
    router: Router
    costs: tuple[Costs, ...] = (Costs(),)
    costs_index: Sequence[int] = ()
    switches: tuple[Switch, ...] = ()
    symmetry: Symmetry | None = None
    stores: bool = False
    shared_cores: int = 0

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """The numbers of the links that a message crosses, in order; () from a rank to itself.

        A number from `size` on is a switch that adds. Two calls give the same route.

        Raises:
            ValueError: there is no such rank or switch, or no route.
        """
        last = self.size + len(self.switches) - 1
        source, target = whole(source, "source", 0, last), whole(target, "target", 0, last)
        if source == target:
            return ()
        if source >= self.size:
            return self.router.from_switch(source - self.size, whole(target, "target", 0, self.size - 1))
        if target >= self.size:
            return self.router.to_switch(source, target - self.size)
        return self.router.path(source, target)

    def costs_of(self, rank: int) -> Costs:
        """The costs of a rank."""
        rank = whole(rank, "rank", 0, self.size - 1)
        return self.costs[self.costs_index[rank]] if self.costs_index else self.costs[0]

    def latency_s(self, source: int, target: int) -> float:
        """The latency of the whole route."""
        return float(sum(self.links[link].latency_s for link in self.route(source, target)))

    def first(self, size: int) -> Network:
        """The same network with only its ranks 0..size-1.

        Its symmetry keeps what maps these ranks onto themselves: all of the less significant axes, and
        that of the most significant one where any permutation of it is a symmetry.

        Raises:
            ValueError: it has fewer ranks.
        """
        size = whole(size, "the number of ranks", 1, self.size)
        if size == self.size:
            return self
        return msgspec.structs.replace(
            self,
            size=size,
            hosts=self.hosts[:size],
            machines=self.machines[: max(self.hosts[:size]) + 1],
            costs_index=self.costs_index[:size],
            symmetry=_cut(self.symmetry, size),
        )


def _cut(symmetry: Symmetry | None, size: int) -> Symmetry | None:
    """The symmetry of the first ranks: see `Network.first`."""
    if symmetry is None:
        return None
    axes = list(symmetry.axes)
    rest = size
    for number in reversed(range(len(axes))):
        axis = axes[number]
        if rest == 1:
            axes[number] = Axis(axis.name, 1, "fixed")
        elif rest % axis.size == 0:
            rest //= axis.size
        elif rest < axis.size and axis.kind == "symmetric":
            axes[number], rest = Axis(axis.name, rest, axis.kind), 1
        else:
            return None
    return Symmetry(tuple(axes), symmetry.families)


def split(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The digits of a number in mixed radix, most significant first. Example: split(9, (4, 8)): (1, 1)."""
    digits = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        digits.append(digit)
    return tuple(reversed(digits))


def joined(digits: Iterator[int] | Sequence[int], sizes: Sequence[int]) -> int:
    """The number of these digits. Example: joined((1, 1), (4, 8)) == 9."""
    number = 0
    for digit, size in zip(digits, sizes, strict=True):
        number = number * size + digit
    return number


def _family_of(families: tuple[Family, ...], number: int) -> Family:
    for family in families:
        if number < family.base + family.total:
            return family
    raise IndexError(f"no link {number}")
