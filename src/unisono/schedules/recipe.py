"""An algorithm of the catalogue with the groups that it uses in place of hosts: a small TOML file.

    # for dgx_h100, 67108864 bytes
    collective = "all_reduce"
    algorithm = "hierarchical"
    ranks = 1024
    hosts = "128x8"

`unisono simulate --best -o FILE.toml` writes it, `algorithm="FILE.toml"` takes it.
"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from unisono.errors import PlanError
from unisono.plans.catalog import make
from unisono.plans.plan import MOST_RANKS, Plan

__all__ = ["Recipe", "plan_of_recipe", "read_recipe", "written"]

MOST_BYTES = 16 << 20


class Recipe(NamedTuple):
    """What the file says. hosts: the group of each rank."""

    collective: str
    algorithm: str
    ranks: int
    root: int
    hosts: tuple[int, ...]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    collective: str
    algorithm: str
    ranks: int
    hosts: str = ""
    root: int = 0


def written(recipe: Recipe, comment: str = "") -> str:
    """The text of the file. Example: hosts (0, 0, 1, 1) are written as "2x2"."""
    lines = [f"# {comment}"] if comment else []
    lines += [
        f'collective = "{recipe.collective}"',
        f'algorithm = "{recipe.algorithm}"',
        f"ranks = {recipe.ranks}",
        f'hosts = "{_grouped(recipe.hosts)}"',
    ]
    return "\n".join([*lines, *([f"root = {recipe.root}"] if recipe.root else []), ""])


def read_recipe(file: Path) -> Recipe:
    """What a file says.

    Raises:
        OSError: the file cannot be read.  ValueError: it is wrong; the message names the file.
        ModuleNotFoundError: Python 3.10 without the package tomli.
    """
    with file.open("rb") as opened:
        data = opened.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{file}: is larger than {MOST_BYTES >> 20} MiB")
    try:
        found = msgspec.convert(msgspec.toml.decode(data), _File)
    except ImportError:
        raise ModuleNotFoundError(
            "reading TOML on Python 3.10 needs the package tomli: pip install 'unisono[networks]'",
            name="tomli",
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from None
    if not 1 <= found.ranks <= MOST_RANKS or not 0 <= found.root < found.ranks:
        raise ValueError(f"{file}: has {found.ranks} ranks and root {found.root}")
    hosts = _hosts(file, found.hosts, found.ranks)
    return Recipe(found.collective, found.algorithm, found.ranks, found.root, hosts)


def plan_of_recipe(recipe: Recipe) -> Plan:
    """The plan.

    Raises:
        PlanError: there is no such algorithm.
    """
    plan = make(recipe.collective, recipe.algorithm, recipe.ranks, recipe.root, recipe.hosts)
    return plan._replace(algorithm=f"{recipe.algorithm}.toml")


def _grouped(hosts: tuple[int, ...]) -> str:
    counts = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    if [host for host, _ in counts] == list(range(len(counts))):
        sizes = {count for _, count in counts}
        return (
            f"{len(counts)}x{sizes.pop()}" if len(sizes) == 1 else "+".join(str(count) for _, count in counts)
        )
    return ",".join(map(str, hosts))


def _hosts(file: Path, text: str, ranks: int) -> tuple[int, ...]:
    if not text:
        return ()
    if found := re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,6})", text):
        counts = [int(found[2])] * min(int(found[1]), MOST_RANKS + 1)
    elif re.fullmatch(r"[1-9]\d{0,6}(\+[1-9]\d{0,6})*", text):
        counts = [int(count) for count in text.split("+")]
    elif re.fullmatch(r"\d{1,7}(,\d{1,7})+", text):
        hosts = tuple(map(int, text.split(",")))
        counts = [] if len(hosts) == ranks else [len(hosts)]
        if not counts:
            return hosts
    else:
        raise ValueError(
            f"{file}: hosts is {text[:40]!r}, expected 2x3, 3+2+1 or the host of each rank as 0,0,1"
        )
    if sum(counts) != ranks:
        raise PlanError(f"{file}: hosts are {sum(counts)} ranks, expected {ranks}")
    return tuple(host for host, count in enumerate(counts) for _ in range(count))
