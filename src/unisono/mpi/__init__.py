"""`MPI`: the names and the behaviour of mpi4py's module MPI, over Unisono's engine.

    from unisono import MPI
    comm = MPI.COMM_WORLD

It needs no MPI and no mpi4py. A program that no launcher has started is one rank of one.
"""

from __future__ import annotations

import typing as _typing

from unisono.engine.environment import env as _env
from unisono.mpi import argument_types as _argument_types
from unisono.mpi import constants as _constants
from unisono.mpi import handle as _handle
from unisono.mpi.buffers import (
    BOTTOM,
    BUFFER_AUTOMATIC,
    IN_PLACE,
    BottomType,
    BufferAutomaticType,
    InPlaceType,
)
from unisono.mpi.byte_memory import (
    Aint_add,
    Aint_diff,
    Alloc_mem,
    Attach_buffer,
    Detach_buffer,
    Flush_buffer,
    Free_mem,
    Get_address,
    Iflush_buffer,
    buffer,
    memory,
)
from unisono.mpi.comm import COMM_NULL, COMM_SELF, COMM_WORLD, Comm, Intracomm
from unisono.mpi.constants import *  # noqa: F403
from unisono.mpi.datatype import DATATYPE_NULL, Datatype
from unisono.mpi.environment import (
    SESSION_NULL,
    Finalize,
    Get_abi_fortran_info,
    Get_abi_info,
    Get_abi_version,
    Get_hw_resource_info,
    Get_library_version,
    Get_processor_name,
    Get_version,
    Init,
    Init_thread,
    Is_finalized,
    Is_initialized,
    Is_thread_main,
    Pcontrol,
    Query_thread,
    Session,
    Wtick,
    Wtime,
    get_vendor,
)
from unisono.mpi.errhandler import (
    ERRHANDLER_NULL,
    ERRORS_ABORT,
    ERRORS_ARE_FATAL,
    ERRORS_RETURN,
    Errhandler,
)
from unisono.mpi.errors import (
    Add_error_class,
    Add_error_code,
    Add_error_string,
    Exception,
    Get_error_class,
    Get_error_string,
    Remove_error_class,
    Remove_error_code,
    Remove_error_string,
)
from unisono.mpi.file import FILE_NULL, File, Register_datarep
from unisono.mpi.group import GROUP_EMPTY, GROUP_NULL, Group
from unisono.mpi.info import INFO_ENV, INFO_NULL, Info
from unisono.mpi.intercomm import Intercomm
from unisono.mpi.meetings import Close_port, Lookup_name, Open_port, Publish_name, Unpublish_name
from unisono.mpi.message import MESSAGE_NO_PROC, MESSAGE_NULL, Message
from unisono.mpi.named_types import NAMED as _NAMED
from unisono.mpi.neighbourhoods import Compute_dims
from unisono.mpi.op import OP_NULL, Op
from unisono.mpi.op import OPS as _OPS
from unisono.mpi.pickling import Pickle, pickle
from unisono.mpi.reflection import (
    _addressof,
    _comm_lock,
    _comm_lock_table,
    _handleof,
    _sizeof,
    _typealign,
    _typecode,
    _typedict,
)
from unisono.mpi.request import REQUEST_NULL, Grequest, Prequest, Request
from unisono.mpi.status import Status
from unisono.mpi.topology import Cartcomm, Distgraphcomm, Graphcomm, Topocomm
from unisono.mpi.window import WIN_NULL, Win
from unisono.mpi4py.rc import rc

globals().update(_NAMED)
globals().update(_OPS)


def _name_constants() -> None:
    """Handles that are constants pickle by name; classes say that they are of this module.

    Public callables check the classes of their arguments.
    """
    classes: set[type] = set()
    for name, value in list(globals().items()):
        if isinstance(value, _handle.Handle) and (value or name.endswith("_NULL")):
            _handle.names.setdefault((value._family(), value.handle), name)
        elif isinstance(value, type) and value.__module__.startswith("unisono.mpi."):
            value.__module__ = __name__
            classes.update(value.__mro__)
    for one in classes:
        _handle.name_methods(one)
        _argument_types.check_class(one, globals())
    for name, value in list(globals().items()):
        if isinstance(value, type(_name_constants)):
            globals()[name] = _argument_types.checked(value, globals())


if not _typing.TYPE_CHECKING:  # to a type checker a name that does not exist is an error

    def __getattr__(name: str) -> _typing.Any:
        from unisono.mpi.reflection import refused

        raise refused(__name__, name)


rc._read(_env.copy())
pickle.read(_env.copy())
rc._warn()
if not rc._is_no("initialize"):
    Init_thread()
_name_constants()
for _name in [name for name, value in globals().items() if isinstance(value, type(_typing))]:
    del globals()[_name]  # `from mpi4py.MPI import *` gives a program no modules of this package
del annotations
