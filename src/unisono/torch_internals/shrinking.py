"""PyTorch's `shrink_group`: the steps at which it has to know that a group of Unisono is its own backend.

PyTorch wraps the shrunk backend in a process group of its own. It also shrinks the backend of one device, and
counts the ranks of a subgroup by the numbers of the world.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed.distributed_c10d as module

from .probe import PrivateName, find

C10D = "torch.distributed.distributed_c10d:"

CHOICE = PrivateName(
    C10D + "_validate_shrink_backend_requirements",
    purpose="let shrink_group shrink the whole group, not the NCCL part that takes its CUDA tensors",
    without="shrink_group says that groups of Unisono cannot shrink",
)
CREATION = PrivateName(
    C10D + "_create_shrunk_process_group",
    purpose="let shrink_group return the group itself, with the numbers of its ranks and its store",
    without="shrink_group says that groups of Unisono cannot shrink",
)


def have_shrinking() -> bool:
    """Whether `shrink_group` of this PyTorch can be told about groups of Unisono."""
    return find(CHOICE) is not None and find(CREATION) is not None


def shrinks_itself(is_ours: Callable[[Any], bool]) -> None:
    """Tell `shrink_group` that the groups for which `is_ours` holds are their own backends.

    May be called again: the last `is_ours` counts.
    """
    if not have_shrinking():
        return
    for name, wrapped in ((CHOICE, _chosen), (CREATION, _created)):
        original = find(name)
        original = getattr(original, "__wrapped__", original)
        setattr(module, original.__name__, wrapped(original, is_ours))


def _chosen(original: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(info: Any) -> Any:
        group = info["process_group"]
        return group if is_ours(group) and group.supports_shrinking else original(info)

    return call


def _created(original: Callable[..., Any], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: Any, ranks: list[int], metadata: Any, is_default: bool) -> Any:
        if not is_ours(group):
            return original(group, ranks, metadata, is_default)
        ranks[:] = group.global_ranks  # PyTorch registers what it finds in these two
        metadata["store"] = group.get_group_store()
        if metadata["bound_device_id"] is not None:
            group.bound_device_id = metadata["bound_device_id"]
        group._set_group_name(metadata["new_group_name"])
        group._set_group_desc(
            "default:shrunken" if is_default else f"{metadata['original_group_name']}:shrunk"
        )
        return group

    return call
