"""`--best`: other hierarchies and segment sizes, and the winner as a file that `algorithm=` takes.

An algorithm that uses hosts can be given other groups: the units of a network (pods, leaves, rows of a torus)
in place of its hosts. Segments are tried for the fastest algorithms only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from unisono.commands.simulate.trials import Trial, Wish
from unisono.networks import Network
from unisono.plans import PLACED

__all__ = ["candidates", "save"]

SEGMENTS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
FASTEST = 3


def groupings(network: Network) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, group of each rank) for each prefix of the network's axes that is neither one group nor all."""
    if network.symmetry is None:
        return
    axes = network.symmetry.axes
    for count in range(1, len(axes) + 1):
        ranks = math.prod(axis.size for axis in axes[count:])
        groups = network.size // ranks
        if ranks == 1 or groups <= 1 or network.size % ranks:
            continue
        found = tuple(rank // ranks for rank in range(network.size))
        if found != tuple(network.hosts):
            yield f"groups of {ranks} (one {axes[count - 1].name})", found


def candidates(network: Network, done: Sequence[Trial]) -> Iterator[Wish]:
    """What else to try, after the algorithms of the catalogue."""
    fastest = sorted(done, key=lambda trial: trial.seconds)[:FASTEST]
    if not fastest:
        return
    first = fastest[0].wish
    for name in PLACED.get(first.collective, ()):
        for note, groups in groupings(network):
            yield first._replace(algorithm=name, groups=groups, segment=first.segment, note=note)
    for trial in fastest:
        for segment in SEGMENTS:
            if segment < trial.wish.nbytes:
                yield trial.wish._replace(segment=segment, note=f"segments of {segment >> 10} KiB")


def save(network: Network, wish: Wish, file: Path) -> None:
    """Write the winner.

    Raises:
        OSError: the file cannot be written.  ValueError: the name does not end in .toml.
    """
    from unisono.schedules.recipe import Recipe, written

    if file.suffix != ".toml":
        raise ValueError(f"-o {file}: expected a name that ends in .toml")
    if any(mark in wish.algorithm for mark in ".:/"):
        raise ValueError(f"-o {file}: the winner {wish.algorithm} is a file already")
    recipe = Recipe(
        wish.collective, wish.algorithm, network.size, wish.root, wish.groups or tuple(network.hosts)
    )
    comment = f"for {network.name}, {wish.nbytes} bytes"
    if wish.segment:
        comment += f"; simulated with segments of {wish.segment} bytes, which the engine chooses itself"
    file.write_text(written(recipe, comment), encoding="utf-8")
