"""The settings of virtual GPUs: read from the environment when a process starts, set for its children."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from unisono.engine.environment import env

__all__ = ["RequestedGpus", "VirtualGpuSettings", "requested", "set_for_children"]

SITE = os.path.join(os.path.dirname(__file__), "site")


class VirtualGpuSettings(NamedTuple):
    """The settings of virtual GPUs.

    Attributes:
        gpus: the number of devices of this machine; CUDA_VISIBLE_DEVICES may hide some from this process.
        memory: bytes of each; 0: 80 GiB are reported, and there is no limit.
        poison: `torch.empty` is filled with a pattern.
        check_streams: report the use of a tensor on a stream that did not wait for the stream that wrote it.
        shared: file with the memory in use by each process of the machine; "": this one and its forks only.
    """

    gpus: int
    memory: int = 0
    poison: bool = True
    check_streams: bool = False
    shared: str = ""


class RequestedGpus(NamedTuple):
    """The settings in the environment. `visible`: CUDA_VISIBLE_DEVICES; an empty one hides all devices."""

    settings: env.Settings
    visible: str | None


def requested(environ: Mapping[str, str] | None = None) -> RequestedGpus:
    """Read the variables of virtual GPUs only: this runs before a job's variables are read."""
    environ = env.copy() if environ is None else environ
    ours = {k: v for k, v in environ.items() if k.startswith("UNISONO_VIRTUAL") or k == "XDG_CACHE_HOME"}
    return RequestedGpus(env.read(ours), environ.get("CUDA_VISIBLE_DEVICES"))


def set_for_children(
    environ: MutableMapping[str, str], gpus: int, memory: str, *, poison: bool, check_streams: bool
) -> None:
    """Enable virtual GPUs in every Python that starts with `environ`, through a sitecustomize module."""
    environ.update(
        UNISONO_VIRTUAL_GPUS=str(gpus),
        UNISONO_VIRTUAL_MEMORY=memory,
        UNISONO_VIRTUAL_POISON=str(int(poison)),
        UNISONO_VIRTUAL_CHECK_STREAMS=str(int(check_streams)),
        PYTHONPATH=os.pathsep.join(filter(None, (SITE, environ.get("PYTHONPATH", "")))),
    )
