"""What the package mpi4py has besides its modules: its version, its runtime options, its configuration."""

from __future__ import annotations

import os

from unisono.mpi4py.rc import Rc, rc

__all__ = ["SITE", "Rc", "__version__", "get_config", "get_include", "profile", "rc"]

__version__ = "4.1.2"
"""The mpi4py whose interface this is."""

SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
"""The folder in PYTHONPATH in which a program finds mpi4py."""


def get_include() -> str:
    """Where the headers of mpi4py would be. There are none: Unisono has no communicators of C."""
    return os.path.join(SITE, "mpi4py")


def get_config() -> dict[str, str]:
    """How mpi4py was built; empty here, as in wheels of mpi4py."""
    return {}


def profile(name: str, *, path: object = None) -> None:  # noqa: ARG001
    """Refused: a profiler of MPI sees calls into an MPI library, and there are none."""
    raise ValueError(f"profiler {name!r} not found: Unisono is no MPI library that it could watch")
