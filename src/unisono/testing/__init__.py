"""The plugin of pytest: `@pytest.mark.ranks(4)` runs a test on four ranks. docs/testing.md is for users.

plugin.py    what pytest loads: options, fixtures, hooks; it imports the others when a test needs them
marker.py    the arguments of the marker
pool.py      in pytest's process: starts ranks, gives them a test, waits, ends those that hang
rank.py      a rank: a pytest session that runs the tests it is given
groups.py    the groups of a rank, kept from test to test
merge.py     one report from those of the ranks
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

GROUPS: pytest.StashKey[Any] = pytest.StashKey()
"""The `groups.Groups` of this process, in a rank only."""


class RankRequest(NamedTuple):
    """One test, as a rank is asked for it.

    Attributes:
        generation: groups of an earlier one are broken.
        keep: how many of the nodes of its chain, from the session on, the next test needs.
        until: when its groups give up, by `time.time()`.
        folder: shared by its ranks; no other test has it, nor what begins with it.
        port: MASTER_PORT, free.
        debug: the terminal that an error is debugged on; (): none.
    """

    nodeid: str
    path: str
    rank: int
    ranks: int
    hosts: int
    backend: str
    generation: int
    keep: int
    until: float
    folder: str
    port: int
    debug: tuple[str, ...] = ()
