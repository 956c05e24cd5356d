"""`Session`: process sets by name, and groups of them."""

from __future__ import annotations

from typing import Any

from unisono.mpi import constants
from unisono.mpi.byte_memory import HasBuffer
from unisono.mpi.comm import COMM_SELF, COMM_WORLD
from unisono.mpi.errhandler import HasErrhandler
from unisono.mpi.errors import Exception
from unisono.mpi.group import Group
from unisono.mpi.handle import Handle, State
from unisono.mpi.info import Info

_SETS = {"mpi://WORLD": COMM_WORLD, "mpi://SELF": COMM_SELF}


class Session(HasErrhandler, HasBuffer, Handle):
    """A program's view of the process sets: "mpi://WORLD" and "mpi://SELF"."""

    _state: Any
    _null = constants.ERR_SESSION

    @classmethod
    def Init(cls, info: Any = None, errhandler: Any = None) -> Session:  # noqa: ARG003
        """A new session."""
        made: Session = cls._of(State())
        if errhandler is not None:
            made.Set_errhandler(errhandler)
        return made

    Finalize = Handle._free

    def Get_num_psets(self, info: Any = None) -> int:  # noqa: ARG002
        """The number of process sets."""
        self._alive()
        return len(_SETS)

    def Get_nth_pset(self, n: int, info: Any = None) -> str:  # noqa: ARG002
        """The name of a process set."""
        self._alive()
        if not 0 <= n < len(_SETS):
            raise Exception(constants.ERR_ARG, f"process set {n} of {len(_SETS)}")
        return list(_SETS)[n]

    def Get_info(self) -> Info:
        """Its hints: none."""
        self._alive()
        return Info.Create()

    def Get_pset_info(self, pset_name: str) -> Info:
        """The size of a process set, as a hint."""
        return Info.Create({"mpi_size": str(self._set(pset_name).size)})

    def Create_group(self, pset_name: str) -> Group:
        """The ranks of a process set."""
        return self._set(pset_name).Get_group()

    def _set(self, name: str) -> Any:
        self._alive()
        if name not in _SETS:
            raise Exception(constants.ERR_ARG, f"there is no process set {name!r}")
        return _SETS[name]


SESSION_NULL = Session()
