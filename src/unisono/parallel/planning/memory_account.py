"""The memory of a program that runs on shapes, by cause: each storage, from its operator to its end.

`StorageWatch` sees storages, `MemoryTracker` adds them up and keeps the peak. What an operator's kernels take
and give back within it is not seen: tables here say it, of what is known.

PyTorch's allocator caches CUDA memory. A block is a multiple of 512 bytes, cut from a segment; segments are
2 MiB for blocks of up to 1 MiB, 20 MiB below 10 MiB, and a multiple of 2 MiB from there on. A freed block
joins its free neighbours and stays in its segment. Where the limit is reached, segments without blocks are
given back first. Host memory has neither. Source: c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import bisect
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.parallel.graph.containers import tensors_in
from unisono.parallel.graph.step_trace import StepTrace, program_frame
from unisono.torch_internals import autograd
from unisono.torch_internals.dtensor import finding_shapes_within
from unisono.torch_internals.fake import address_of, memory_of

MIB = 1 << 20
SMALLEST, SMALL = 512, MIB
SPARE = 0.05  # of the memory, for fragmentation
SMALL_SEGMENT, LARGE_SEGMENT, LARGE, LARGE_UNIT = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


def allowed(limit: int) -> int:
    """What the segments of a dry run may take of a limit: a run may cut them in another order.

    Example: 1 GiB -> 970.8 MiB.
    """
    return max(0, int(limit * (1 - SPARE)) - SMALL_SEGMENT)


@dataclass(eq=False, slots=True)
class AllocatorBlock:
    """A part of a segment. `stream`: of the work that it was made for; others do not reuse it."""

    size: int
    address: int
    stream: int
    free: bool = False
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None


@dataclass
class CachingAllocator:
    """Blocks and segments of one device."""

    limit: int | None = None  # bytes of all segments; None: no limit
    reserved: int = 0  # bytes of segments, now
    peak: int = 0  # and at most
    exceeded: int = 0  # the most bytes that were missing under the limit; 0: all fitted
    _free: dict[tuple[int, bool], list[tuple[int, int, AllocatorBlock]]] = field(default_factory=dict)
    _next: int = 0

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Bytes of the block that a tensor of so many gets."""
        return max(SMALLEST, (nbytes + SMALLEST - 1) // SMALLEST * SMALLEST)

    def allocate(self, nbytes: int, stream: int = 0) -> AllocatorBlock:
        """Take a block."""
        size = self.rounded(nbytes)
        small = size <= SMALL
        free = self._free.setdefault((stream, small), [])
        place = bisect.bisect_left(free, (size, 0))
        block = free.pop(place)[2] if place < len(free) else self._segment(size, stream)
        block.free = False
        left = block.size - size
        if left >= SMALLEST if small else left > SMALL:
            rest = AllocatorBlock(left, block.address + size, stream, False, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            self._keep(rest, small)
        return block

    def release(self, block: AllocatorBlock, *, small: bool) -> None:
        """Give a block back. `small`: as it was taken."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other, small)
                first, second = (other, block) if other is block.before else (block, other)
                block.address, block.size = first.address, first.size + second.size
                block.before, block.after = first.before, second.after
                if block.before is not None:
                    block.before.after = block
                if block.after is not None:
                    block.after.before = block
        self._keep(block, small)

    def _keep(self, block: AllocatorBlock, small: bool) -> None:
        block.free = True
        bisect.insort(self._free.setdefault((block.stream, small), []), self._key(block))

    def _take(self, block: AllocatorBlock, small: bool) -> None:
        free = self._free[block.stream, small]
        free.pop(bisect.bisect_left(free, self._key(block)[:2]))

    @staticmethod
    def _key(block: AllocatorBlock) -> tuple[int, int, AllocatorBlock]:
        return block.size, block.address, block  # addresses differ, so blocks are never compared

    def _segment(self, size: int, stream: int) -> AllocatorBlock:
        unit = (size + LARGE_UNIT - 1) // LARGE_UNIT * LARGE_UNIT
        nbytes = SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT if size < LARGE else unit
        if self.limit is not None and self.reserved + nbytes > self.limit:
            self._drop()
            self.exceeded = max(self.exceeded, self.reserved + nbytes - self.limit)
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        self._next += nbytes + LARGE_UNIT
        return AllocatorBlock(nbytes, self._next - nbytes, stream)

    def _drop(self) -> None:
        """Give back segments that are one free block."""
        for key, free in self._free.items():
            kept = [each for each in free if each[2].before is not None or each[2].after is not None]
            self.reserved -= sum(size for size, *_ in free) - sum(size for size, *_ in kept)
            self._free[key] = kept


CAUSES = (
    "parameters", "gradients", "moments", "gathered", "buffers", "inputs", "activations", "temporary",
)  # fmt: skip


class ProgramLocation(NamedTuple):
    """Where a program is."""

    phase: str  # forward, backward, update
    module: str = ""  # the innermost one
    line: str = ""  # of the program, such as "model.py:17"

    def __str__(self) -> str:
        where = " in ".join(filter(None, (self.phase, f'"{self.module}"' if self.module else "")))
        return f"{where}, at {self.line}" if self.line else where


class MemoryPeak(NamedTuple):
    """The peak of one rank."""

    nbytes: int  # of all blocks
    parts: dict[str, int]  # by cause, whose sum it is
    place: ProgramLocation  # where it is
    reserved: int  # bytes of all segments at their peak; on a host equal to nbytes
    exceeded: int  # bytes that are missing under the limit; 0: it fits


@dataclass(eq=False, slots=True)
class Charge:
    """Memory in use."""

    nbytes: int
    cause: str
    block: AllocatorBlock | None
    small: bool = False


@dataclass
class MemoryTracker:
    """The memory of one device."""

    allocator: CachingAllocator | None  # PyTorch's for CUDA; None: that of the host, which keeps nothing
    where: Callable[[], ProgramLocation]  # the place of the program, which is asked at each new peak
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    total: int = 0
    _peak: int = 0
    _at: tuple[dict[str, int], ProgramLocation] | None = None

    def charge(self, nbytes: int, cause: str, stream: int = 0) -> Charge:
        """Take memory."""
        if nbytes <= 0:
            return Charge(0, cause, None)
        block = None
        if self.allocator is not None:
            nbytes = self.allocator.rounded(nbytes)
            block = self.allocator.allocate(nbytes, stream)
            charge = Charge(block.size, cause, block, nbytes <= SMALL)
        else:
            charge = Charge(nbytes, cause, None)
        self.parts[cause] += charge.nbytes
        self.total += charge.nbytes
        if self.total > self._peak:
            self._peak, self._at = self.total, None
            self._at = dict(self.parts), self.where()
        return charge

    def release(self, charge: Charge) -> None:
        """Give memory back."""
        self.parts[charge.cause] -= charge.nbytes
        self.total -= charge.nbytes
        if charge.block is not None and self.allocator is not None:
            self.allocator.release(charge.block, small=charge.small)
        charge.nbytes, charge.block = 0, None

    def relabel(self, charge: Charge, cause: str) -> None:
        """Count memory under another cause."""
        self.parts[charge.cause] -= charge.nbytes
        self.parts[cause] += charge.nbytes
        charge.cause = cause
        if self._at is not None and self.total == self._peak:
            self._at = dict(self.parts), self._at[1]

    def forget_peak(self) -> None:
        """Look for the peak from here on."""
        self._peak = 0

    @property
    def peak(self) -> MemoryPeak:
        """The largest sum so far."""
        parts, place = self._at or (dict(self.parts), self.where())
        reserved = self.allocator.peak if self.allocator is not None else self._peak
        exceeded = self.allocator.exceeded if self.allocator is not None else 0
        return MemoryPeak(self._peak, parts, place, reserved, exceeded)


KernelMemory = Callable[..., int | list[int]]
"""(result, *arguments) -> bytes, or those of several tensors that are there at once."""

MULTIPROCESSORS, THREADS = 132, 2048
"""Of the largest GPUs, and of each of them; a smaller one takes less."""

BLOCK, WARP = 512, 32
LEAST_VALUES, MOST_VALUES = 16, 256  # of a thread


def column_sum(made: Tensor, given: Tensor, dims: Any = None, *_: Any) -> int:
    """Partial sums over the leading dimensions, of which each block of threads writes its own.

    Source: aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig and global_memory_size.
    Example: [6304, 768] -> [768] takes 37.1 MiB, and [6304, 3072] -> [3072] 132 MiB.
    """
    columns = made.numel()
    leading = dims is not None and sorted(dim % given.dim() for dim in dims) == [*range(len(dims))]
    if not leading or len(dims) == given.dim() or columns < 2 or not given.is_contiguous():
        return 0
    rows = given.numel() // columns
    wide = next(width for width in (4, 2, 1) if columns % width == 0)
    across = min(_power(columns // wide), WARP)
    down = min(_power(rows), BLOCK // wide // across)
    values, grid = -(-rows // down), -(-columns // wide // across)
    target = MULTIPROCESSORS * THREADS // (across * down)
    if values < MOST_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    return 4 * columns * blocks * across * wide if blocks > 1 else 0


def _power(number: int) -> int:
    """The largest power of two that is not above it."""
    return 1 << max(1, number).bit_length() - 1


def convolution(made: Tensor, given: Tensor, weight: Tensor, _bias: Any, stride: Any, *_: Any) -> int:
    """cuDNN's copies with the channels last, of the input and of the result."""
    return 0 if _is_product(weight, stride) else given.nbytes + made.nbytes


def convolution_backward(
    _made: Any, grad: Tensor, given: Tensor, weight: Tensor, _bias: Any, stride: Any, *_: Any
) -> int:
    """The same, of the input and of the gradient."""
    return 0 if _is_product(weight, stride) else given.nbytes + grad.nbytes


def _is_product(weight: Tensor, stride: Any) -> bool:
    """Whether a convolution multiplies each position alone: no copies are made."""
    return weight.shape[2:].numel() == 1 and all(step == 1 for step in stride)


def copy_in(grads: Sequence[Tensor], parts: int, dtype: torch.dtype, *, fused: bool) -> list[int]:
    """Copies that `fully_shard` makes of gradients on their way into one buffer, in bytes of each.

    Gradients of several types are cast to that of the buffer first. Those that are not contiguous, or whose
    rows are not a multiple of `parts`, are copied.

    Args:
        dtype: of the buffer.
        fused: kernels of a GPU read contiguous gradients as they are, in the buffer's type, or bf16 for f32.
    Source: torch/csrc/distributed/fsdp/ChunkCat.cpp; aten/src/ATen/native/cuda/TensorShape.cu.
    Example: f32 [4, 8] and bf16 [6, 8] into f32 of 4 parts -> 192 and 256, fused none.
    """
    types = {grad.dtype for grad in grads}
    contiguous = all(grad.is_contiguous() for grad in grads)
    read = {dtype, torch.bfloat16} if dtype == torch.float32 else {dtype}
    if fused and contiguous and types <= read:
        return []
    cast = len(types) > 1
    pads = not (fused and contiguous and cast)  # what is cast is in the buffer's type
    found = []
    for grad in grads:
        size = dtype.itemsize if cast else grad.itemsize
        if cast and grad.dtype != dtype:
            found.append(grad.numel() * size)
        rows = -(-grad.shape[0] // parts) * parts
        if pads and (rows > grad.shape[0] or not grad.is_contiguous()):
            found.append(rows * grad.shape[1:].numel() * size)
    return found


ANYWHERE: dict[str, KernelMemory] = {
    # the result, and where nothing is seen
    "aten::_safe_softmax": lambda made, *_: made.nbytes + made.numel(),
    "aten::linalg_vector_norm": lambda made, given, *_: (
        given.numel() * made.itemsize * (made.dtype != given.dtype)
    ),
}
ON_GPU: dict[str, KernelMemory] = {
    # the kernel multiplies the gradient and the result first: aten/src/ATen/native/cuda/SoftMax.cu
    "aten::_softmax_backward_data": lambda _made, grad, *_: grad.nbytes,
}
REAL: dict[str, KernelMemory] = {
    "aten::sum.dim_IntList": column_sum,
    "aten::convolution": convolution,
    "aten::convolution_backward": convolution_backward,
}


def kernel_memory(*, on_gpu: bool, virtual: bool) -> dict[str, KernelMemory]:
    """Operator -> what its kernels take, of its result and its arguments.

    Args:
        on_gpu: the operators run on a GPU.    virtual: which is in host memory, and has no kernels of cuDNN.
    """
    real = on_gpu and not virtual

    def copies(_made: Any, grads: Sequence[Tensor], _dim: int, parts: int, into: Tensor) -> list[int]:
        return copy_in(grads, parts, into.dtype, fused=real)

    reducing = dict.fromkeys(("fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype"), copies)
    return {**ANYWHERE, **reducing, **(ON_GPU if on_gpu else {}), **(REAL if real else {})}


HERE = os.path.dirname(__file__) + os.sep


class StorageWatch(StepTrace):
    """Charges every new storage of a step on one type of device.

    Args:
        device_type: of the shapes.
        inside: operator -> bytes that its kernels take and give back within it.
    Attributes:
        account: takes the charges. Its `where` is this object's `place`.
        cause: of what is made now.
    """

    def __init__(self, device_type: str, inside: dict[str, KernelMemory]) -> None:
        super().__init__("")
        self._inside = inside
        self.account: Any = None
        self.cause = "temporary"
        self._device_type = device_type
        # of a storage, by its address, with what tells its end; None: it is not counted
        self._charges: dict[int, tuple[Charge | None, Any]] = {}
        self._streams: dict[Any, int] = {}
        self._modules: list[str] = []
        self._places: dict[int, tuple[str, str]] = {}  # number of an autograd function -> module, line

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused and any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on parts come next
        return super().__torch_dispatch__(op, types, args, kwargs)

    def operator(self, op: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run one operator, and charge what it makes, and what its kernels take."""
        output = op(*args, **named)
        inside = self._inside.get(op.name())
        if inside is not None and next(tensors_in(args)).device.type == self._device_type:
            taken = inside(output, *args, *named.values())
            taken = taken if isinstance(taken, list) else [taken]
            for charge in [self.account.charge(nbytes, "temporary") for nbytes in taken]:
                self.account.release(charge)
        for part in tensors_in(output):
            self.see(part)
        if self._modules and self.phase == "forward":
            self._places.setdefault(autograd.next_sequence() - 1, (self._modules[-1], _line()))
        return output

    def see(self, tensor: Tensor, *, counts: bool = True) -> None:
        """Charge the storage of a tensor, if it is new. `counts`: otherwise it is never charged."""
        if tensor.device.type != self._device_type:
            return
        storage, key = memory_of(tensor)
        if key in self._charges:
            return
        charge = self.account.charge(storage.nbytes(), self.cause, self._stream()) if counts else None
        self._charges[key] = charge, weakref.ref(storage, lambda _: self._end(key))

    def relabel(self, tensor: Tensor, cause: str) -> None:
        """Count the storage of a tensor under another cause."""
        charge, _ = self._charges.get(memory_of(tensor)[1], (None, None))
        if charge is not None:
            self.account.relabel(charge, cause)

    def _stream(self) -> int:
        """The number of the stream on which operators run now."""
        stream = torch.get_device_module(self._device_type).current_stream()
        return self._streams.setdefault(stream, len(self._streams))

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """See a step: also storages whose memory is freed and taken again, those of `fully_shard` and of
        swapping. What PyTorch computes to find shapes of DTensors is none of it.
        """
        kind: Any = torch.UntypedStorage
        own, plain = vars(kind).get("resize_"), kind.resize_

        def resize(storage: Any, nbytes: int) -> Any:
            number = address_of(storage)
            charge, end = self._charges.get(number, (None, None))
            found = plain(storage, nbytes)
            if charge is not None:
                self.account.release(charge)
                self._charges[number] = self.account.charge(nbytes, charge.cause, self._stream()), end
            return found

        kind.resize_ = resize
        try:
            with self, finding_shapes_within(self.paused):
                yield
        finally:
            if own is None:
                del kind.resize_
            else:
                kind.resize_ = own

    def _end(self, key: int) -> None:
        charge, _ = self._charges.pop(key, (None, None))
        if charge is not None:
            self.account.release(charge)

    def begin(self, path: str, module: nn.Module, args: Any, named: Any) -> None:  # noqa: ARG002
        """The program is in a module."""
        self._modules.append(path)

    def end(self, path: str, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        """It is in the one around that."""
        self._modules.pop()

    def place(self) -> ProgramLocation:
        """Where the program is now."""
        if self.phase == "backward" and not self._modules:
            return ProgramLocation(self.phase, *self._places.get(autograd.running_sequence(), ("", "")))
        path = self._modules[-1] if self._modules else ""
        again = self.phase == "backward"
        return ProgramLocation(
            "recomputation" if again else self.phase, path, _line() if path or not again else ""
        )


def _line() -> str:
    """The innermost line of the program; "" where PyTorch's modules and this package are all that runs."""
    frame = program_frame(lambda code: code.co_name == "_step" and code.co_filename.startswith(HERE))
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
