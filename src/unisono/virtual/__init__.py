"""Virtual GPUs: CUDA devices in host memory. Code for several GPUs runs, and fails, as on GPUs.

    unisono run --virtual-gpus 4 train.py           four ranks, each with its GPU of four
    unisono run -n 1 --virtual-gpus 4 train.py      one process; it may start its other ranks (Lightning)
    UNISONO_VIRTUAL_GPUS=4 torchrun --nproc-per-node 4 train.py       any launcher, any Python program
    pytest --virtual-gpus 4                         tests that use GPUs

or, in a program, before PyTorch is imported:

    import unisono.virtual
    unisono.virtual.enable(4, memory="16G")

What differs from a GPU:

- Speed: the CPU computes. float16 is multiplied in float32 and rounded once.
- torch.compile: Inductor compiles for the CPU. A graph that the CPU cannot have, such as flex_attention
  with gradients, runs uncompiled (aot_eager), and a line on stderr says why.
- CUDA graphs: a replay runs the recorded operations again, and saves no time. mode="reduce-overhead" makes
  no graphs.
- Triton: its own interpreter runs the kernels (TRITON_INTERPRET=1 is set), which is slow. Autotuning takes
  the first configuration.
- Operations of other libraries run their CPU kernels. One with a kernel for CUDA only is an error: give it
  CPU tensors, or use another operation.
- Errors, not hangs: ranks that call different things, or that end, are reported with their call.
- torch.empty fills new memory with NaN (UNISONO_VIRTUAL_POISON=0: it does not). A NaN that comes from there
  is reported once.
- Not there: memory pools, IPC, sensors, streams of other libraries, GPUDirect
  Storage. Snapshots and histories of memory are empty; memory_stats counts as PyTorch's allocator does.
- nvidia-smi answers the usual queries in a job's processes.

docs/virtual-gpus.md in the sources tells more. Importing this module imports neither PyTorch nor NumPy.
"""

from __future__ import annotations

from .environment import VirtualGpuSettings
from .startup import enable, enabled

__all__ = ["VirtualGpuSettings", "enable", "enabled"]
