"""Parameters that a plan replaces: the new ones get the caller's attributes, and the old ones no gradient.

An optimizer may read an attribute of a parameter, such as Mamba's `_no_weight_decay`.

A loss, a hook or a closure may hold a parameter that it took from the model before `parallelize`. Where the
plan shards or cuts parameters, or moves them to other stages, the model has other ones then. Without this
refusal autograd would follow the old one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial

from torch import nn

from .loss_parameters import refuse_replaced

__all__ = ["replaced_parameters_raise"]


@contextlib.contextmanager
def replaced_parameters_raise(model: nn.Module) -> Iterator[None]:
    """What is a parameter of `model` before the block, and none after it, raises RuntimeError in backward.

    Example: w = model.head.weight before; a loss with w.pow(2) under Plan(data=2, zero=3).
    """
    before = [(name, weakref.ref(value), dict(vars(value))) for name, value in model.named_parameters()]
    yield
    named = dict(model.named_parameters(remove_duplicate=False))
    now = {id(parameter) for parameter in named.values()}
    for name, reference, attributes in before:
        parameter, new = reference(), named.get(name)
        for attribute, value in attributes.items() if new is not None and new is not parameter else ():
            if not hasattr(new, attribute):
                setattr(new, attribute, value)
        if parameter is not None and parameter.requires_grad and id(parameter) not in now:
            parameter.register_hook(partial(refuse_replaced, name))
