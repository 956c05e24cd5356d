"""Arguments of recorded calls, prepared once: what a run still has to fill in is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .containers import mapped
from .program import Ref

__all__ = ["Filler", "template"]

Filler = Callable[[Callable[[Ref], Any]], Any]
"""Takes what finds a value, and returns the arguments."""

UNCHANGED = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def template(thing: Any) -> Filler:
    """What fills nested arguments with values, as `mapped(thing, resolve, Ref)` does; containers are new.

    Example: template((Ref(3), 1))(values.get) == (values.get(Ref(3)), 1).
    """
    if isinstance(thing, Ref):
        return lambda resolve: resolve(thing)
    if isinstance(thing, UNCHANGED):
        return lambda _: thing
    if type(thing) is tuple and all(isinstance(part, UNCHANGED) for part in thing):
        return lambda _: thing
    if type(thing) in (tuple, list):
        parts = [template(part) for part in thing]
        if type(thing) is tuple:
            return lambda resolve: tuple([fill(resolve) for fill in parts])
        return lambda resolve: [fill(resolve) for fill in parts]
    if type(thing) is dict:
        named = [(key, template(part)) for key, part in thing.items()]
        return lambda resolve: {key: fill(resolve) for key, fill in named}
    return lambda resolve: mapped(thing, resolve, Ref)
