"""What rests on PyTorch's insides: each private name once, probed, with what happens where it is missing.

The rest of Unisono uses PyTorch's public names, and asks this package for the others. It compares no version
numbers: a name is looked up, and its absence has one documented effect. docs/pytorch-versions.md lists them
all, and tells how to move to a new PyTorch.
"""

from __future__ import annotations

from .probe import MissingPrivateName, PrivateName, find, first, need, optional

__all__ = ["MissingPrivateName", "PrivateName", "find", "first", "need", "optional"]
