"""Any torch.distributed backend as a contender: Gloo, and Unisono through `import unisono.torch`.

Imported in a worker that measures such a side, and nowhere else: it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from unisono.commands.bench.cases import BenchCase, CaseBuffers
from unisono.commands.bench.contenders import Call, Contender, choice_record, cut, pingpong
from unisono.torch_internals import c10d

__all__ = ["TorchContender"]

TIMEOUT = timedelta(seconds=120)


class TorchContender(Contender):
    """`torch.distributed` with the given backend, on CPU tensors that share NumPy's memory."""

    def __init__(self, backend: str, rank: int, size: int, address: str) -> None:
        if backend == "unisono":
            import unisono.torch  # noqa: F401  (registers the backend)
        torch.set_num_threads(1)
        self.rank, self.size = rank, size
        dist.init_process_group(
            backend, init_method=f"tcp://{address}", rank=rank, world_size=size, timeout=TIMEOUT
        )
        self.own = backend == "unisono"

    def choice(self, case: BenchCase) -> dict[str, Any]:
        """What Unisono tells of a case, without what PyTorch adds to a call."""
        if not self.own:
            return {}
        world, _ = c10d.world()
        return choice_record(world.choice, case)

    def bind(self, case: BenchCase, buffers: CaseBuffers) -> Call:
        """Make the tensors of a case, and the call to be timed."""
        inp, out, root = _tensor(buffers.inp), _tensor(buffers.out), case.root
        op = getattr(dist.ReduceOp, case.op.upper())
        binders: dict[str, Callable[[], Call]] = {
            "all_reduce": lambda: partial(dist.all_reduce, inp, op=op),
            "broadcast": lambda: partial(dist.broadcast, inp, src=root),
            "reduce": lambda: partial(dist.reduce, inp, dst=root, op=op),
            "all_gather": lambda: partial(_newest("all_gather_single", "all_gather_into_tensor"), out, inp),
            "reduce_scatter": lambda: partial(
                _newest("reduce_scatter_single", "reduce_scatter_tensor"), out, inp, op=op
            ),
            "all_to_all": lambda: partial(dist.all_to_all_single, out, inp),
            "gather": lambda: partial(dist.gather, inp, self._parts(out), dst=root),
            "scatter": lambda: partial(dist.scatter, out, self._parts(inp), src=root),
            "barrier": lambda: dist.barrier,
            "send_recv": lambda: pingpong(self.rank, self.size, dist.send, dist.recv, inp, out),
            "all_gather_v": lambda: partial(dist.all_gather, cut(out, case), inp),
            "all_to_all_v": lambda: partial(
                dist.all_to_all_single, out, inp, [case.parts[self.rank]] * self.size, case.parts
            ),
            "gather_v": lambda: partial(dist.gather, inp, cut(out, case), dst=root),
            "scatter_v": lambda: partial(dist.scatter, out, cut(inp, case), src=root),
        }
        if case.operation not in binders:
            raise ValueError(f"torch.distributed has no {case.operation}")
        return binders[case.operation]()

    def _parts(self, tensor: Any) -> Any:
        return None if tensor is None else list(tensor.chunk(self.size))

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


def _newest(*names: str) -> Callable[..., object]:
    """The first of these functions that this torch has: the old spellings warn in every process."""
    found: Callable[..., object] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return found


def _tensor(array: Any) -> Any:
    """The same memory as a tensor; bfloat16 travels as 16-bit integers, NumPy has no such type."""
    if array is None:
        return None
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
