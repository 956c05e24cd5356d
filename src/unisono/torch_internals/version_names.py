"""Things that PyTorch has under one name in one version and under another in the next."""

from __future__ import annotations

from typing import Any

from .probe import PrivateName, find, first

NAMES = {
    "all_gather": PrivateName(
        "torch.distributed:all_gather_single",
        purpose="collect the tensors of all ranks in one",
        without="parallel training and compression cannot run",
        since="2.13",
    ),
    "all_gather before": PrivateName(
        "torch.distributed:all_gather_into_tensor",
        purpose="the same, where there is no all_gather_single",
        without="parallel training and compression cannot run",
    ),
    "reduce_scatter": PrivateName(
        "torch.distributed:reduce_scatter_single",
        purpose="reduce one tensor, and give each rank a part of it",
        without="parallel training cannot run",
        since="2.13",
    ),
    "reduce_scatter before": PrivateName(
        "torch.distributed:reduce_scatter_tensor",
        purpose="the same, where there is no reduce_scatter_single",
        without="parallel training cannot run",
    ),
    "factor": PrivateName(
        "torch._C._distributed_c10d:ReduceOp.factor",
        purpose="read the factor of PREMUL_SUM",
        without="it is read from the state that PyTorch pickles",
        since="2.13",
    ),
    "factor before": PrivateName(
        "torch._C._distributed_c10d:ReduceOp.__getstate__",
        purpose="read the factor of PREMUL_SUM where there is no attribute `factor`",
        without="PREMUL_SUM raises",
    ),
}

all_gather_single: Any = first(NAMES["all_gather"], NAMES["all_gather before"])
reduce_scatter_single: Any = first(NAMES["reduce_scatter"], NAMES["reduce_scatter before"])


def factor(op: Any) -> float:
    """Return the factor of a PREMUL_SUM."""
    if find(NAMES["factor"]) is not None:
        return float(op.factor)
    return float(first(NAMES["factor before"])(op)[1])


# Methods of PyTorch's process groups: their names since 2.13, and before.
EARLIER_METHODS = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def method_of(group: Any, name: str) -> Any:
    """Return a method of one of PyTorch's own process groups. `name`: the newest."""
    return getattr(group, name, None) or getattr(group, EARLIER_METHODS.get(name, name))
