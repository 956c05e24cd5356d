"""The start and the end of MPI in this process, what it says of itself, and process sets by name."""

from __future__ import annotations

import atexit
import gc
import platform
import sys
import threading
import time
import traceback
import types
from typing import Any

import unisono
from unisono.engine.base.timeouts import LONGEST_S
from unisono.engine.environment import env
from unisono.mpi import constants
from unisono.mpi.byte_memory import HasBuffer
from unisono.mpi.comm import COMM_SELF, COMM_WORLD
from unisono.mpi.comm_state import PARENT_CONTEXT, SELF_CONTEXT, WORLD_CONTEXT, CommState, Contexts
from unisono.mpi.errhandler import HasErrhandler
from unisono.mpi.errors import Exception
from unisono.mpi.group import Group
from unisono.mpi.handle import Handle, State
from unisono.mpi.info import INFO_NULL, Info
from unisono.mpi.meetings import end_all
from unisono.mpi.progress import finish_all
from unisono.mpi.transport import World, abort, worlds


class _Life:
    """Whether MPI has begun and ended here."""

    initialized = finalized = False
    level = constants.THREAD_MULTIPLE
    world: World | None = None
    thread = 0


def _form() -> Any:
    from unisono.engine.group import init_process_group
    from unisono.engine.store import HashStore

    settings = env.read(strict=False)
    if settings.launcher or "world_size" in settings.origins:
        group = init_process_group(group_name="mpi")
    else:
        group = init_process_group(store=HashStore(), rank=0, world_size=1, group_name="mpi")
    if "timeout_s" not in settings.origins:  # a worker may wait for tasks as long as it likes
        group.timeout_s = LONGEST_S
    return group


def Init() -> None:
    """Begin. `from unisono import MPI` has done so, unless `rc.initialize` is False."""
    Init_thread(constants.THREAD_SINGLE)


def Init_thread(required: int = constants.THREAD_MULTIPLE) -> int:
    """Begin; returns the level of threads, THREAD_MULTIPLE."""
    if _Life.initialized:
        raise Exception(constants.ERR_OTHER, "MPI is initialized already")
    if not constants.THREAD_SINGLE <= required <= constants.THREAD_MULTIPLE:
        raise Exception(constants.ERR_ARG, f"there is no level of threads {required}")
    world, parents = World(_form()), env.read(strict=False).parents
    contexts = Contexts(PARENT_CONTEXT if parents else SELF_CONTEXT)
    COMM_WORLD._refer(CommState(world, contexts, range(parents, world.size), WORLD_CONTEXT, 0))
    COMM_SELF._refer(CommState(world, contexts, [world.rank], SELF_CONTEXT, 0))
    COMM_WORLD._state.name, COMM_SELF._state.name = "MPI_COMM_WORLD", "MPI_COMM_SELF"
    if parents:  # ranks of this group have started this process
        world.first, ranks = parents, range(parents, world.size)
        world.parent = CommState(world, contexts, ranks, PARENT_CONTEXT, 1, range(parents))
    _Life.world, _Life.initialized, _Life.level = world, True, required
    _Life.thread = threading.get_ident()
    atexit.register(_at_exit)  # after the group's own, so that it runs before
    return constants.THREAD_MULTIPLE


def Finalize() -> None:
    """End, when all ranks have come here."""
    if not _Life.initialized or _Life.finalized:
        raise Exception(constants.ERR_OTHER, "MPI is not initialized, or finalized already")
    world = _Life.world
    assert world is not None
    if COMM_SELF._state is not None:
        COMM_SELF._delete_all()
    finish_all()
    for one in worlds[::-1]:
        if one.parent is not None:
            one.group.barrier()
    COMM_WORLD.Barrier()
    _Life.finalized = True
    COMM_WORLD._state = COMM_SELF._state = None
    for one in worlds[::-1]:
        one.close()
    end_all()


def _at_exit() -> None:
    from unisono.mpi4py.rc import rc

    failed = getattr(sys, "last_type", None) is not None
    if _Life.initialized and not _Life.finalized and not rc._is_no("finalize") and not failed:
        try:
            _delete_variables()
            Finalize()
        except Exception:  # a process that this one has started has failed
            traceback.print_exc()
            abort(1)


def _delete_variables() -> None:
    """Delete the program's objects with a `__del__`, which may call MPI. Python would do so after the end."""
    variables = vars(sys.modules["__main__"])
    found = [
        name for name, one in variables.items()
        if isinstance(getattr(type(one), "__del__", None), types.FunctionType)
    ]  # fmt: skip
    for name in found:
        del variables[name]
    if found:
        gc.collect()


def Is_initialized() -> bool:
    """Whether MPI has begun."""
    return _Life.initialized


def Is_finalized() -> bool:
    """Whether it has ended."""
    return _Life.finalized


def Query_thread() -> int:
    """The level of threads: any thread may call."""
    return constants.THREAD_MULTIPLE


def Is_thread_main() -> bool:
    """Whether this thread has initialized MPI."""
    return threading.get_ident() == _Life.thread


Wtime = time.perf_counter


def Wtick() -> float:
    """The resolution of `Wtime` in seconds."""
    return time.get_clock_info("perf_counter").resolution


def Get_processor_name() -> str:
    """The name of this host."""
    return platform.node()


def Get_version() -> tuple[int, int]:
    """The version of the standard whose names these are."""
    return constants.VERSION, constants.SUBVERSION


def Get_library_version() -> str:
    """The library's name and version."""
    return f"Unisono {unisono.__version__}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """(name, version) of the library."""
    major, minor, micro = (int(part) for part in unisono.__version__.split("."))
    return "Unisono", (major, minor, micro)


def Get_abi_version() -> tuple[int, int]:
    """(-1, -1): there is no C library."""
    return -1, -1


def Get_hw_resource_info() -> Any:
    """Hints about the hardware: none."""
    return Info.Create()


def Get_abi_info() -> Any:
    """The sizes of types in bytes, as hints."""
    return Info.Create({f"mpi_{name}_size": "8" for name in ("aint", "count", "offset")})


def Get_abi_fortran_info() -> Any:
    """INFO_NULL: there is no Fortran."""
    return INFO_NULL


def Pcontrol(level: int) -> None:
    """Does nothing."""


_SETS = {"mpi://WORLD": COMM_WORLD, "mpi://SELF": COMM_SELF}


class Session(HasErrhandler, HasBuffer, Handle):
    """A program's view of the process sets: "mpi://WORLD" and "mpi://SELF"."""

    _null = constants.ERR_SESSION

    @classmethod
    def Init(cls, info: Any = None, errhandler: Any = None) -> Session:
        """A new session."""
        made: Session = cls._of(State())
        if errhandler is not None:
            made.Set_errhandler(errhandler)
        return made

    Finalize = Handle._free

    def Get_num_psets(self, info: Any = None) -> int:
        """The number of process sets."""
        self._alive()
        return len(_SETS)

    def Get_nth_pset(self, n: int, info: Any = None) -> str:
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
