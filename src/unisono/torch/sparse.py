"""All-reduce of sparse COO tensors: the indices and values of all ranks are gathered and summed.

The ranks first exchange how many entries they have, so also an asynchronous call waits until the other ranks
have made it. The rest runs in the background. Gloo does the same with a thread of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from unisono.engine.operations.reduction import ReduceOp
from unisono.errors import message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unisono.engine.group import Group


class SparseAllReduce:
    """One sparse all-reduce: two gathers, and the sum after them.

    Example (p=2): {(0): 1, (2): 1} and {(2): 3} -> {(0): 1, (2): 4} on both.
    """

    def __init__(self, group: Group, x: torch.Tensor, op: Any, timeout: float | None) -> None:
        if op is not ReduceOp.SUM:
            raise ValueError(
                message("all_reduce of a sparse tensor", observed=str(op), expected="SUM, and no other")
            )
        self._x = x
        self._own = x.detach().coalesce()
        counts = self._sizes(group, timeout)
        shape, dense = self._own.indices().shape[0], self._own.values().shape[1:]
        self._indices = [torch.empty(shape, n, dtype=torch.int64) for n in counts]
        self._values = [torch.empty(n, *dense, dtype=x.dtype) for n in counts]
        self._group = group
        self._timeout = timeout

    def start(self, async_op: bool) -> list[Any]:
        """Begin the gathers; returns their works when asynchronous."""
        pairs: Sequence[tuple[Any, Any]] = (
            (self._indices, self._own.indices().contiguous()),
            (self._values, self._own.values().contiguous()),
        )
        return [
            self._group.all_gather_v(out, given, async_op=async_op, timeout=self._timeout)
            for out, given in pairs
        ]

    def finish(self) -> None:
        """Store the sum of the gathered entries in the tensor."""
        total = torch.sparse_coo_tensor(
            torch.cat(self._indices, dim=1), torch.cat(self._values), self._own.shape, check_invariants=False
        )
        with torch.no_grad():
            self._x.copy_(total.coalesce())  # on x.detach() it would not change x

    def _sizes(self, group: Group, timeout: float | None) -> list[int]:
        """The number of entries of each rank.

        Raises:
            ValueError: on every rank, if the tensors differ in shape or sparse dimensions.
        """
        own = self._own
        mine = [own.values().shape[0], own.sparse_dim(), own.dim(), *own.shape]
        row = torch.zeros(3 + 16, dtype=torch.int64)
        row[: len(mine)] = torch.tensor(mine)
        rows = torch.empty(group.size, row.numel(), dtype=torch.int64)
        group.all_gather(rows, row, timeout=timeout)
        for rank, other in enumerate(rows[:, 1:]):
            if not torch.equal(other, row[1:]):
                shape = other[2 : 2 + int(other[1])].tolist()
                raise ValueError(
                    message(
                        f"all_reduce of sparse tensors of different shapes: rank {rank} has {shape} with "
                        f"{int(other[0])} sparse dimensions",
                        expected=f"{list(own.shape)} with {own.sparse_dim()}, as on rank {group.rank}",
                    )
                )
        return [int(n) for n in rows[:, 0]]
