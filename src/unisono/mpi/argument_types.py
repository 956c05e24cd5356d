"""The classes of arguments: a call with an object of a wrong one is a TypeError before anything happens.

The annotations of a public callable say them. Handles are also known by their parameters' names.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np

from unisono.mpi.handle import State

_NUMBERS = (int, float, np.integer, np.floating)
_HANDLES = {
    "info": "Info", "comm": "Comm", "comm1": "Comm", "comm2": "Comm", "peer_comm": "Comm", "group": "Group",
    "session": "Session", "errhandler": "Errhandler", "status": "Status", "recvtag": "int", "sendtag": "int",
}  # fmt: skip
"""The class of parameters that have none in their annotation."""
_LISTS = {
    "requests": "Request", "statuses": "Status", "datatypes": "Datatype", "remain_dims": "int", "dims": "int",
    "periods": "int", "index": "int", "edges": "int", "sources": "int", "destinations": "int",
}  # fmt: skip
"""The class of the items of lists."""
_FAST = {
    "FastCollectives": "Barrier Bcast Allreduce", "PointToPoint": "Send Recv Isend Irecv Sendrecv",
    "ObjectMessages": "send recv isend irecv",
}  # fmt: skip
"""Methods that check their arguments themselves: a check of each would take a fifth of their time."""


def wrong(name: str, kind: str, value: Any) -> TypeError:
    """The error of an argument."""
    return TypeError(f"{name}: expected {kind}, got {type(value).__name__}")


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) or (kinds is _NUMBERS and hasattr(value, "__index__"))


def checked(body: Any, classes: dict[str, Any]) -> Any:
    """A callable that checks the classes of its arguments, where they are known. classes: by name."""
    known = {"int": _NUMBERS, "str": (str, bytes), **classes}
    checks = []
    for place, one in enumerate(inspect.signature(body).parameters.values()):
        words = set(str(one.annotation).split(" | "))
        if words == {"Any"} or one.annotation is one.empty:
            words = {_HANDLES.get(one.name, "Any")} | ({"None"} if one.default is None else set())
        names = words - {"None"}
        listed = one.name in _LISTS and not names & known.keys()
        name = _LISTS[one.name] if listed else names.pop() if len(names) == 1 else ""
        if name in known:
            checks.append(
                (place, one.name, name, known[name], listed, one.default is None or "None" in words)
            )
    if not checks:
        return body

    @functools.wraps(body)
    def call(*args: Any, **options: Any) -> Any:
        for place, name, kind, kinds, listed, optional in checks:
            value = args[place] if place < len(args) else options.get(name, State)
            if value is State or (optional and value is None):
                continue
            if listed and not hasattr(value, "__len__"):
                raise wrong(name, f"a sequence of {kind}", value)
            for one in value if listed else (value,):
                if not _fits(one, kinds):
                    raise wrong(name, kind, one)
        return body(*args, **options)

    return call


def check_class(cls: type, classes: dict[str, Any]) -> None:
    """Give the public methods of a class their checks."""
    for name, found in list(vars(cls).items()):
        body = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        fast = name in _FAST.get(cls.__name__, "").split()
        if name.startswith("_") or fast or not inspect.isfunction(body):
            continue
        made = checked(body, classes)
        if made is not body:
            setattr(cls, name, made if body is found else type(found)(made))
