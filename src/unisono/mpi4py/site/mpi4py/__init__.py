"""mpi4py in the ranks of `unisono run --replace mpi4py`. Each module here stands for one of Unisono's."""

import sys

from unisono.mpi4py.package import (  # noqa: F401
    Rc,
    __version__,
    get_config,
    get_include,
    profile,
    rc,
)

__all__ = ["MPI"]

sys.modules[f"{__name__}.rc"] = rc  # type: ignore[assignment]  # mpi4py has it there, too
