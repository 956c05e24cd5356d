"""Warns when the OpenMP threads of all ranks are more than the cores of the host. It changes nothing.

An idle OpenMP thread polls for its next work, for milliseconds. libgomp shortens this in a process with more
threads than cores, but it does not know other processes. With ranks x threads above the cores, idle threads
of one rank keep threads of another from running. libgomp reads its wait policy when it is loaded, at `import
torch`: so the launcher must set it, as `unisono run` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from unisono.engine.base.limits import usable_cores
from unisono.engine.environment import env
from unisono.errors import message


def warn_if_crowded(hosts: Sequence[str], rank: int) -> None:
    """Warn where the ranks of this rank's host have more threads than cores, once for each host.

    No warning where the user has set the threads or the wait policy. hosts: of every rank.
    """
    host = hosts[rank]
    ranks, threads = hosts.count(host), torch.get_num_threads()
    if ranks == 1 or threads == 1 or hosts.index(host) != rank:
        return
    if env.copy().keys() & {"OMP_NUM_THREADS", *env.WAIT_POLICIES}:
        return
    cores = usable_cores()
    if ranks * threads <= cores:
        return
    text = message(
        f"{ranks} ranks with {threads} OpenMP threads each share {cores} cores: idle threads poll on cores "
        "that other ranks need, and a step may take many times as long",
        remedy=f"Set OMP_NUM_THREADS={max(1, cores // ranks)}, or OMP_WAIT_POLICY=PASSIVE, before the ranks "
        "are started; `unisono run` does.",
    )
    warnings.warn(text, RuntimeWarning, stacklevel=2)
