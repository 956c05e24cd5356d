"""The settings of virtual GPUs: read from the environment when a process starts, set for its children."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from unisono.engine.environment import env

SITE = os.path.join(os.path.dirname(__file__), "site")
_SHARED_NBYTES = 1 << 20  # more than csrc/virtual/memory_account.hpp maps
PAGE = "See python -m pydoc unisono.virtual."  # ends what a virtual GPU refuses
PROGRAMS = os.path.join(os.path.dirname(__file__), "programs")


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


def requested(environ: Mapping[str, str] | None = None) -> env.Settings:
    """Read the variables of virtual GPUs only: this runs before a job's variables are read."""
    environ = env.copy() if environ is None else environ
    return env.read(
        {k: v for k, v in environ.items() if k.startswith("UNISONO_VIRTUAL") or k == "XDG_CACHE_HOME"}
    )


def shared_file() -> str:
    """Make memory in which every process of a machine records how much it uses. It ends with this process."""
    fd = os.memfd_create("unisono-virtual-gpus", os.MFD_CLOEXEC)
    os.ftruncate(fd, _SHARED_NBYTES)
    return f"/proc/{os.getpid()}/fd/{fd}"


def set_for_libraries(environ: MutableMapping[str, str]) -> None:
    """Let Triton interpret its kernels, and programs find the `nvidia-smi` of virtual GPUs."""
    for name in ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION"):  # the second one: without a warning
        environ.setdefault(name, "1")
    paths = environ.get("PATH", os.defpath).split(os.pathsep)
    if PROGRAMS not in paths:
        environ["PATH"] = os.pathsep.join([PROGRAMS, *paths])


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
    set_for_libraries(environ)
