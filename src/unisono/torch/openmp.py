"""OpenMP's threads of several ranks on the cores of one host. Says so; changes nothing.

An idle thread of OpenMP polls for its next work, for milliseconds. libgomp makes that short in a process with
more threads than cores, and knows nothing of other processes: with ranks x threads above the cores, idle
threads of one rank keep those of another from the cores. How to wait is read when libgomp is loaded, which is
at `import torch`: the launcher must set it, as `unisono run` does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from unisono import env
from unisono.errors import message
from unisono.limits import usable_cores

__all__ = ["warn_if_crowded"]


def warn_if_crowded(hosts: Sequence[str], rank: int) -> None:
    """Warn where the ranks of this rank's host have more threads than cores, once for each host.

    Not where the user has chosen the threads or how they wait. hosts: of every rank.
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
