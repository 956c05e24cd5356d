"""Copies between the devices of one process, for DataParallel and `torch.cuda.comm`."""

from __future__ import annotations

from typing import Any

import torch  # which is not complete yet

REDUCTIONS = ("add", "mul", "maximum", "minimum")  # by their number in ncclRedOp_t


def functions(c: Any) -> dict[str, Any]:
    """Return the functions by their names in `torch._C`."""
    return {
        "_broadcast": _broadcast,
        "_broadcast_out": _broadcast_out,
        "_broadcast_coalesced": lambda tensors, devices, size: (
            [list(each) for each in zip(*(_broadcast(x, devices) for x in tensors), strict=True)]
            or [[] for _ in devices]
        ),
        "_scatter": _scatter,
        "_scatter_out": _scatter_out,
        "_gather": _gather,
        "_gather_out": _gather_out,
        "_nccl_all_reduce": lambda inputs, outputs, op, *_: _broadcast_out(_reduced(inputs, op), outputs),
        "_nccl_reduce": lambda inputs, output, root, op, *_: output.copy_(_reduced(inputs, op)),
        "_nccl_broadcast": lambda inputs, root, *_: _broadcast_out(inputs[root], inputs),
        "_nccl_all_gather": _all_gather,
        "_nccl_reduce_scatter": _reduce_scatter,
    }


def _device(index: Any) -> Any:
    return torch.device("cuda", index) if isinstance(index, int) else torch.device(index)


def _broadcast(tensor: Any, devices: Any) -> list[Any]:
    if not devices:
        raise RuntimeError("Expected at least one device to broadcast to")
    return [tensor if tensor.device == _device(each) else tensor.to(_device(each)) for each in devices]


def _broadcast_out(tensor: Any, out: Any) -> Any:
    for i, each in enumerate(out):
        if not each.is_cuda:
            raise RuntimeError(
                f"Expected all output tensors to be CUDA tensors, but output tensor at index {i}"
            )
        if each.shape != tensor.shape:
            raise RuntimeError(
                "Expected all output tensors to have same shape as the source tensor "
                f"{list(tensor.shape)}, but output tensor at index {i} has shape {list(each.shape)}"
            )
        if each is not tensor:
            each.detach().copy_(tensor.detach())
    return out


def _scatter(tensor: Any, devices: Any, sizes: Any, dim: int, streams: Any) -> list[Any]:
    if not devices:
        raise RuntimeError("Expected at least one device to scatter to")
    chunks = tensor.split(list(sizes), dim) if sizes is not None else tensor.chunk(len(devices), dim)
    return [chunk.to(_device(each)) for chunk, each in zip(chunks, devices, strict=False)]


def _scatter_out(tensor: Any, out: Any, dim: int, streams: Any) -> Any:
    for chunk, each in zip(tensor.split([x.shape[dim] for x in out], dim), out, strict=True):
        each.copy_(chunk)
    return out


def _gather(tensors: Any, dim: int, destination: Any) -> Any:
    if not tensors:
        raise RuntimeError("Expected at least one tensor to gather from")
    for i, x in enumerate(tensors):
        if not x.is_cuda:
            raise RuntimeError(
                "Expected all input tensors to be CUDA tensors, but tensor at index "
                f"{i} has device '{x.device}'"
            )
    where = torch.device("cuda") if destination is None else torch.device("cpu")
    if isinstance(destination, int) and destination >= 0:
        where = torch.device("cuda", destination)
    return torch.cat([x.to(where) for x in tensors], dim)


def _gather_out(tensors: Any, out: Any, dim: int) -> Any:
    out.copy_(torch.cat([x.to(out.device) for x in tensors], dim))
    return out


def _reduced(inputs: Any, op: int) -> Any:
    result = inputs[0].clone()
    for x in inputs[1:]:
        result = getattr(result, REDUCTIONS[op])(x.to(result.device))
    return result


def _all_gather(inputs: Any, outputs: Any, streams: Any = None, comms: Any = None) -> None:
    for out in outputs:
        out.view(-1).copy_(torch.cat([x.to(out.device).view(-1) for x in inputs]))


def _reduce_scatter(inputs: Any, outputs: Any, op: int, streams: Any = None, comms: Any = None) -> None:
    for chunk, out in zip(_reduced(inputs, op).view(-1).chunk(len(outputs)), outputs, strict=True):
        out.view(-1).copy_(chunk)
