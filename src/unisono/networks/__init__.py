"""Networks as data: hosts, links, routes. The simulator runs plans on them.

network.py      Network, NetworkLink, Symmetry; costs.py: what messages cost a rank
generators.py   fat_tree, torus, dragonfly ... ; fabric.py and fabrics.py build them
graph.py        nodes and cables by name
description.py  TOML files
quantities.py   "5 us", "100 Gbit/s"; toml.py: files as tables
"""

from __future__ import annotations

from unisono.networks.costs import ByteCosts, Costs, InsideCosts
from unisono.networks.description import parse, read
from unisono.networks.fabric import Cable
from unisono.networks.found import find
from unisono.networks.generators import (
    Hosts,
    dgx,
    dragonfly,
    fat_tree,
    full_mesh,
    rail_optimised,
    ring,
    star,
    torus,
    two_hosts,
)
from unisono.networks.network import (
    Axis,
    Machine,
    Network,
    NetworkLink,
    Switch,
    Symmetry,
)

__all__ = [
    "Axis",
    "ByteCosts",
    "Cable",
    "Costs",
    "Hosts",
    "InsideCosts",
    "Machine",
    "Network",
    "NetworkLink",
    "Switch",
    "Symmetry",
    "dgx",
    "dragonfly",
    "fat_tree",
    "find",
    "full_mesh",
    "parse",
    "rail_optimised",
    "read",
    "ring",
    "star",
    "torus",
    "two_hosts",
]
