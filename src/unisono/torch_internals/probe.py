"""Looks a private name of PyTorch up.

    BACKWARD = Private(
        "torch.autograd.graph:_engine_run_backward",
        purpose="tell whether DDP's C++ asks for a future",
        without="errors of DDP's collectives are RuntimeErrors of PyTorch",
    )

Four ways to use one, by what its absence means:

    find(NAME)       PyTorch has no such feature, and nothing is missing: None, silently
    first(NEW, OLD)  one thing under several names: the first that is there
    optional(NAME)   a feature of Unisono is switched off: None, and one warning that says which
    need(NAME)       the caller cannot go on: Missing, an error that says what cannot be used
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any, NamedTuple

from unisono.errors import message

__all__ = ["MissingPrivateName", "PrivateName", "find", "first", "need", "optional"]


class PrivateName(NamedTuple):
    """A name of PyTorch that no document of PyTorch promises.

    Attributes:
        path: "module:attribute", the attribute with dots for one inside a class.
        purpose: what Unisono does with it.
        without: what a user notices where it is missing, as the end of "PyTorch 2.16.0 has no NAME: ...".
        since: the first supported minor version that has it, such as "2.14"; "": all of them.
        until: the last one that has it; "": the newest. Both are for the table and its test only.
        build: what PyTorch is built with where it has the name, such as "NCCL"; "": every build has it.
    """

    path: str
    purpose: str
    without: str
    since: str = ""
    until: str = ""
    build: str = ""

    def said(self) -> str:
        """Return the sentence that says it is missing."""
        import torch

        return f"PyTorch {torch.__version__} has no {self.path.replace(':', '.')}: {self.without}"


class MissingPrivateName(NotImplementedError):
    """A feature needs a name that this version of PyTorch does not have."""


def find(name: PrivateName) -> Any:
    """Return what `name` stands for; None where this PyTorch does not have it."""
    module, _, attributes = name.path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in attributes.split(".") if attributes else ():
            instances = getattr(found, "__annotations__", {})  # what only instances have
            found = getattr(found, attribute) if hasattr(found, attribute) else instances[attribute]
    except (ImportError, KeyError):
        return None
    return found


def first(*names: PrivateName) -> Any:
    """Return the first of `names` that is there. Raises Missing as `need` does, in words of the first."""
    for name in names:
        if (found := find(name)) is not None:
            return found
    return need(names[0])


def optional(name: PrivateName) -> Any:
    """Return what `name` stands for; None, with one warning, where it is missing."""
    found = find(name)
    if found is None:
        warnings.warn(name.said(), RuntimeWarning, stacklevel=3)
    return found


def need(name: PrivateName) -> Any:
    """Return what `name` stands for.

    Raises:
        Missing: this PyTorch does not have it.
    """
    found = find(name)
    if found is None:
        raise MissingPrivateName(
            message(name.said(), remedy="Install a version of PyTorch that Unisono was tested with.")
        )
    return found
