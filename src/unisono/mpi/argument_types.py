"""The classes of arguments: a call with an object of a wrong class is a TypeError before anything happens.

A parameter's name says its class. What is not in the table is read where it is used: buffers, ranks and tags.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from unisono.mpi.errors import whole, wrong_class

_CLASSES = {
    "comm": "Comm", "peer_comm": "Comm", "group": "Group", "group1": "Group", "group2": "Group",
    "info": "Info", "errhandler": "Errhandler", "session": "Session", "status": "Status", "op": "Op",
    "datatype": "Datatype", "datatypes": "Datatype", "requests": "Request", "statuses": "Status",
    "assertion": "int", "errorcode": "int", "query_fn": "callable", "free_fn": "callable",
    "cancel_fn": "callable", "errhandler_fn": "callable",
}  # fmt: skip
_OTHERS: dict[str, Any] = {"int": int, "callable": Callable}
"""Of these, those that are no class of MPI."""
_LISTS = ("datatypes", "requests", "statuses")
"""Parameters that are sequences of such objects."""
_FAST = {"Allreduce", "Iprobe", "Probe", "Recv", "recv", "Sendrecv", "Waitall", "waitall"}
"""Calls that check their arguments themselves: this check would take a tenth of their time."""
_OTHER = {"Spawn_multiple"}
"""Calls whose arguments of these names may be of other classes: an info for each command."""


def checked(body: Any, names: dict[str, Any]) -> Any:
    """A callable that checks its arguments; `body` if there is nothing to check. names: of the classes."""
    lowercase = body.__name__[0].islower()  # its op may be any function
    parameters = list(inspect.signature(body).parameters.values())
    checks = [
        (place, one.name, kind, _OTHERS.get(kind) or names[kind], one.default is None)
        for place, one in enumerate(parameters)
        if (kind := _CLASSES.get(one.name)) and not (kind == "Op" and lowercase)
    ]
    if not checks:
        return body

    @functools.wraps(body)
    def call(*args: Any, **options: Any) -> Any:
        given = len(args)
        for place, name, expected, kind, optional in checks:
            if place < given:
                value = args[place]
            elif name in options:
                value = options[name]
            else:
                continue
            if value is None and optional:
                continue
            if name in _LISTS:
                for one in value:
                    if not isinstance(one, kind):
                        raise wrong_class(name, f"a sequence of {expected}", one)
            elif kind is int:
                whole(value, name)
            elif not isinstance(value, kind):
                raise wrong_class(name, expected, value)
        return body(*args, **options)

    return call


def check_class(cls: type, names: dict[str, Any]) -> None:
    """Give the public methods of a class their checks."""
    for name, found in list(vars(cls).items()):
        body = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        if name.startswith("_") or name in _FAST | _OTHER or not inspect.isfunction(body):
            continue
        made = checked(body, names)
        if made is not body:
            setattr(cls, name, made if body is found else type(found)(made))
