"""Every public callable of MPI with an object of a wrong class at each position, and what it raises.

One rank; it runs with Unisono and with mpi4py: MPI_OF=mpi4py.MPI python wrong_objects.py. A line is a
callable, a parameter, and a letter for each of `WRONG`: T TypeError, V ValueError, M MPI.Exception, . for
nothing, or the name. wrong_objects.txt has what mpi4py 4.1.2 over MPICH 5 prints.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

MPI: Any = importlib.import_module(os.environ.get("MPI_OF", "unisono.mpi"))

WRONG: dict[str, Callable[[], Any]] = {
    "str": lambda: "x",
    "None": lambda: None,
    "int": lambda: 7,
    "list": lambda: [object()],
    "object": object,
    "Comm": lambda: MPI.COMM_SELF,
    "Group": lambda: MPI.COMM_SELF.Get_group(),
    "Datatype": lambda: MPI.INT,
}
ENDS = {
    "Abort", "Finalize", "Init", "Init_thread", "Pcontrol", "Accept", "Connect", "Join", "Spawn",
    "Detach_buffer",
    "Spawn_multiple", "Disconnect", "Open_port", "Attach_buffer", "Free_mem", "Register_datarep", "Unattach",
    "Detach", "Flush_buffer", "Iflush_buffer", "Revoke", "Create_from_group", "fromaddress", "Get_address",
    "Set_view", "Start", "from_bytes", "Call_errhandler", "Remove_error_class", "Remove_error_code",
    "Remove_error_string",
}  # fmt: skip
"""Calls that end the job, wait for others, or whose wrong numbers are addresses."""


MADE: dict[str, Callable[[Any], Any]] = {
    "Comm": lambda comm: comm, "Intracomm": lambda comm: comm, "Group": lambda comm: comm.Get_group(),
    "Cartcomm": lambda comm: comm.Create_cart([1]), "Graphcomm": lambda comm: comm.Create_graph([0], []),
    "Distgraphcomm": lambda comm: comm.Create_dist_graph_adjacent([], []),
    "Datatype": lambda _: MPI.INT.Dup(),
    "Topocomm": lambda comm: comm.Create_cart([1]), "Info": lambda _: MPI.Info.Create(),
    "Op": lambda _: MPI.SUM, "Status": lambda _: MPI.Status(), "Request": lambda _: MPI.Request(),
    "Prequest": lambda _: MPI.Prequest(), "Message": lambda _: MPI.Message(), "File": lambda _: MPI.FILE_NULL,
    "Win": lambda comm: MPI.Win.Create(bytearray(64), 1, comm=comm),
    "Errhandler": lambda _: MPI.ERRORS_RETURN,
    "buffer": lambda _: MPI.buffer(bytearray(8)), "Pickle": lambda _: MPI.Pickle(),
}  # fmt: skip
"""An object of each class."""


def right() -> dict[str, Any]:
    """A value for each name of a parameter; a new one for every call."""
    comm = MPI.COMM_SELF
    return {
        "comm": comm, "comm1": comm, "comm2": comm, "peer_comm": comm, "group": comm.Get_group(),
        "op": MPI.SUM,
        "group1": comm.Get_group(), "group2": comm.Get_group(), "other": comm.Get_group(),
        "datatype": MPI.INT,
        "request": MPI.Request(), "requests": [MPI.Request()], "info": MPI.INFO_NULL,
        "errhandler": MPI.ERRORS_RETURN,
        "status": MPI.Status(), "statuses": [MPI.Status()], "root": 0, "dest": MPI.PROC_NULL,
        "source": MPI.PROC_NULL,
        "rank": 0, "tag": 1, "sendtag": 1, "recvtag": 1, "key": 0, "color": 0, "local_leader": 0,
        "remote_leader": 0, "target_rank": 0, "dims": [1], "nnodes": 1, "ndims": 1, "periods": [False],
        "coords": [0], "index": [0], "edges": [], "direction": 0, "disp": 0, "ranks": [0], "ranks1": [0],
        "ranges": [(0, 0, 1)], "count": 1, "blocklength": 1, "stride": 1, "blocklengths": [1],
        "displacements": [0], "datatypes": [MPI.INT], "sizes": [2], "subsizes": [1], "starts": [0], "size": 8,
        "distribs": [MPI.DISTRIBUTE_BLOCK], "dargs": [MPI.DISTRIBUTE_DFLT_DARG], "gsizes": [1], "psizes": [1],
        "lb": 0, "extent": 4, "typeclass": MPI.TYPECLASS_INTEGER, "function": lambda *_: None, "value": "v",
        "sources": [], "destinations": [], "degrees": [0], "recvcounts": [2], "maxlen": 8, "partitions": 1,
        "partition": 0, "remain_dims": [True], "lock_type": MPI.LOCK_SHARED,
        "split_type": MPI.COMM_TYPE_SHARED,
        "errorcode": 1, "errorclass": 1, "ierr": 1, "string": "s", "name": "n", "n": 1, "nbytes": 4,
        "buf": bytearray(8),
        "keyval": 999999, "attrval": 1, "handle": 0, "memory": bytearray(8), "objs": [1], "sendobj": [1],
        "service_name": "s", "port_name": "p", "sendbuf": bytearray(8), "recvbuf": bytearray(8),
        "inbuf": bytearray(8), "outbuf": bytearray(8), "inoutbuf": bytearray(8), "origin": bytearray(8),
        "result": bytearray(8), "compare": bytearray(8), "position": 0, "datarep": "external32", "flag": True,
    }  # fmt: skip


def callables() -> Iterator[tuple[str, str, Any]]:
    """(the class or "", the name, the function) of each."""
    for name, value in sorted(vars(MPI).items()):
        if name.startswith("_") or name in ENDS:
            continue
        if inspect.isclass(value) and not issubclass(value, BaseException | enum.Enum):
            base = next((one for one in value.__mro__[1:] if getattr(MPI, one.__name__, None) is one), object)
            for method in sorted(set(dir(value)) - set(dir(base))):
                own = not method.startswith("_") and method not in ENDS
                if (own and callable(inspect.getattr_static(value, method))) or (
                    own and callable(getattr(value, method))
                ):
                    yield name, method, getattr(value, method)
        elif callable(value) and not inspect.isclass(value) and not isinstance(value, MPI.Op):
            yield "", name, value


def letter(call: Callable[[], Any]) -> str:
    """What a call raises."""
    try:
        call()
    except MPI.Exception:
        return "M"
    except TypeError:
        return "T"
    except ValueError:
        return "V"
    except BaseException as error:
        return f"<{type(error).__name__}>"
    return "."


def lines(only: list[str], after: str) -> Iterator[str]:
    """One for each parameter. after: begin behind this line's first two words."""
    for owner, name, function in callables():
        if only and f"{owner}.{name}" not in only:
            continue
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (ValueError, TypeError):
            continue
        bound = owner and inspect.isclass(getattr(MPI, owner)) and not inspect.ismethod(function)
        static = owner and isinstance(inspect.getattr_static(getattr(MPI, owner), name), staticmethod)
        if bound and not static and parameters:
            if owner not in MADE:
                continue
            parameters = parameters[1:]
            bound = True
        else:
            bound = False
        for place in parameters:
            if place.kind in (place.VAR_POSITIONAL, place.VAR_KEYWORD):
                continue
            key = f"{owner}.{name} {place.name}"
            if after:
                after = "" if key == after else after
                continue
            found = [key]
            print(key, end=" ", flush=True)
            for wrong in WRONG.values():
                values = right()
                given = {
                    one.name: values[one.name] for one in parameters
                    if one.name in values and (one.default is one.empty or one.name == "source")
                }  # fmt: skip
                given[place.name] = wrong()
                this = MADE[owner](MPI.COMM_SELF) if bound else None
                call = getattr(this, name) if bound else function
                print(letter(lambda call=call, given=given: call(**given)), end="", flush=True)
                if owner.endswith("hcomm") or owner in ("Cartcomm", "Topocomm", "Win", "Datatype", "Info"):
                    letter(lambda this=this: this.Free())
            print(flush=True)
            yield " ".join(found)


if __name__ == "__main__":
    after = sys.argv[1] if len(sys.argv) > 1 else ""
    for _ in lines(sys.argv[2:], after):
        pass
