"""The functions of `torch._C` that only PyTorch's CUDA build has. `torch.cuda` calls them.

Calls that a virtual GPU does not support raise an error with a reason.
"""

from __future__ import annotations

import functools
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from . import build, comm
from .environment import PAGE
from .native import TorchPython
from .streams import _CudaEventBase, _CudaGraphBase, _stream_class, capturing, new_pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from .environment import VirtualGpuSettings
    from .native import VirtualGpuLibrary

CUDA = 1
NCCL_VERSION = 2 << 32 | 29 << 16 | 7  # 2.29.7
KERNELS = "it runs the CPU's kernels, no CUDA code"
MEMORY = "its memory is counted by Unisono"
POOLS = "it has no private memory pools"
REFUSED = {
    "_cuda_jiterator_compile_and_launch_kernel": KERNELS,
    "_cuda_cudaCachingAllocator_raw_alloc": "its memory belongs to tensors",
    "_cuda_cudaCachingAllocator_raw_delete": "its memory belongs to tensors",
    "_cuda_getStreamFromExternal": "it has no streams of other libraries",
    **{f"_cuda_{name}": MEMORY for name in ("customAllocator", "changeCurrentAllocator", "getAllocator")},
    **{
        f"_cuda_{name}": POOLS
        for name in (
            "getCheckpointState", "setCheckpointPoolState", "beginAllocateCurrentStreamToPool",
            "beginAllocateToPool", "beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool",
        )
    },
    "_nccl_unique_id": "use torch.distributed",
    "_nccl_init_rank": "use torch.distributed",
    **{
        f"_gds_{name}": "it reads no files by itself"
        for name in (
            "register_buffer", "deregister_buffer", "register_handle", "deregister_handle", "load_storage",
            "save_storage",
        )
    },
}  # fmt: skip
ANSWERS: dict[str, Any] = {
    "_cuda_getCompiledVersion": 0, "_cuda_getArchFlags": None, "_cuda_getCurrentBlasHandle": 0,
    "_cuda_getCurrentSolverHandle": 0, "_cuda_clearCublasWorkspaces": None, "_cuda_getCublasWorkspaceSize": 0,
    "_cuda_setCublasWorkspaceSize": None, "_cuda_resetCublasWorkspaceSize": None,
    "_cuda_getCublasLtWorkspaceSize": 0, "_cuda_setCublasLtWorkspaceSize": None,
    "_cuda_resetCublasLtWorkspaceSize": None, "_cuda_get_conv_benchmark_empty_cache": True,
    "_cuda_hasPrimaryContext": True, "_cuda_resetPeakHostMemoryStats": None,
    "_cuda_resetAccumulatedHostMemoryStats": None, "_cuda_getAllocatorBackend": "native",
    "_cuda_cudaCachingAllocator_enable": None, "_cuda_cudaCachingAllocator_is_enabled": True,
    "_cuda_cudaCachingAllocator_set_allocator_settings": None, "_cuda_isHistoryEnabled": False,
    "_cuda_record_memory_history": None, "_cuda_record_memory_history_legacy": None,
    "_cuda_attach_out_of_memory_observer": None, "_cuda_setMemoryMetadata": None,
    "_cuda_getMemoryMetadata": "", "_cuda_allocationTraceback": (), "_cuda_checkPoolLiveAllocations": True,
    "_cuda_ipc_collect": None, "_cuda_cudaHostAllocator": 0, "_cuda_record_untuned_enable": None,
    "_cuda_record_untuned_is_enabled": False, "_nccl_version": NCCL_VERSION, "_nccl_version_suffix": b"",
    "_can_use_mem_efficient_attention": False, "_can_use_cudnn_attention": False,
    "_jit_override_can_fuse_on_gpu": False,  # it would compile CUDA code
    "_set_cached_tensors_enabled": None, "_host_emptyCache": None,
    **{
        f"_cuda_tunableop_{name}": value
        for name, value in (
            ("enable", None), ("is_enabled", False), ("tuning_enable", None), ("tuning_is_enabled", False),
            ("set_max_tuning_duration", None), ("get_max_tuning_duration", 30), ("get_filename", ""),
            ("set_max_tuning_iterations", None), ("get_max_tuning_iterations", 100), ("set_filename", None),
            ("get_results", ()), ("get_validators", ()), ("read_file", False), ("write_file", False),
            ("set_rotating_buffer_size", None), ("get_rotating_buffer_size", 0), ("write_file_on_exit", None),
            ("set_numerical_check_tolerances", None),
        )
    },
}  # fmt: skip
"""What functions return that change nothing here."""
RANGES: dict[str, Any] = dict.fromkeys(("rangePushA", "rangePop", "rangeStartA", "deviceRangeStart"), 0)
RANGES |= dict.fromkeys(("rangeEnd", "markA", "deviceRangeEnd"))
RUNTIME = [f"cuda{each}" for each in ("ProfilerStart", "ProfilerStop", "StreamCreate", "StreamDestroy")]
RUNTIME += ["cudaHostRegister", "cudaHostUnregister"]


class DeviceProperties:
    """Returned by `torch.cuda.get_device_properties`: the values of an A100, except name and memory."""

    name = "Virtual GPU"
    major, minor = 8, 0
    is_multi_gpu_board = is_integrated = 0
    multi_processor_count = 108
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    warp_size = 32
    regs_per_multiprocessor = 65536
    shared_memory_per_block = 48 << 10
    shared_memory_per_block_optin = 163 << 10
    shared_memory_per_multiprocessor = 164 << 10
    L2_cache_size = 40 << 20
    clock_rate, memory_clock_rate, memory_bus_width = 1410000, 1215000, 5120
    gcnArchName = ""
    pci_domain_id = pci_device_id = 0

    def __init__(self, index: int, memory: int) -> None:
        """`index`: the number of the device on this machine, as a driver counts."""
        self.total_memory = memory
        self.pci_bus_id = index + 1
        self.uuid = f"00000000-0000-0000-0000-{index:012x}"

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id=0, pci_domain_id=0, "
            f"L2_cache_size={self.L2_cache_size >> 20}MB)"
        )


def install(c: ModuleType, library: VirtualGpuLibrary, settings: VirtualGpuSettings) -> None:
    """Add all functions to `torch._C`, which has just been imported."""
    python = TorchPython(build.torch_folder() / "lib" / "libtorch_python.so")
    given: dict[str, Any] = {
        **{name: refusal(name, why) for name, why in REFUSED.items()},
        **_devices(c, library, python),
        **_memory(c, library),
        **{name: _answer(value) for name, value in ANSWERS.items()},
        **comm.functions(c),
    }
    c._jit_override_can_fuse_on_gpu(False)
    given["_cuda_init"] = _initialize(library, python, settings)
    for name, value in given.items():
        plain = not callable(value) or isinstance(value, type)
        setattr(c, name, value if plain else _function(name, value))
    c._has_cuda, c._has_cudnn = True, False  # type: ignore[attr-defined]


def _function(name: str, called: Callable[..., Any]) -> Callable[..., Any]:
    """Make a separate function for each name: PyTorch's compiler has rules by function."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    function.__name__ = name
    return function


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def refusal(name: str, why: str) -> Callable[..., NoReturn]:
    """Make a function that raises an error. ("_cuda_x", "it has none") -> "x: not on a ..."."""
    shown = name.removeprefix("_").removeprefix("cuda_")

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"{shown}: not on a virtual GPU, {why}. {PAGE}")

    return refuse


def _devices(c: Any, library: VirtualGpuLibrary, python: TorchPython) -> dict[str, Any]:
    def exchange(device: int) -> int:
        return int(c._accelerator_exchangeDevice(device)) if device >= 0 else -1

    def synchronize() -> None:
        if capturing():
            raise c.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
        c._accelerator_synchronizeDevice(library.current())

    def current(device: int) -> tuple[int, int, int]:
        stream = c._accelerator_getStream(device)
        return stream.stream_id, stream.device_index, CUDA

    def set_stream(**place: int) -> None:
        c._accelerator_setStream(c.Stream(**place))

    mode = {"sync_debug_mode": 0, "cudnn_benchmark_limit": 10}  # without effect
    setters = {f"_cuda_set_{name}": functools.partial(mode.__setitem__, name) for name in mode}
    getters = {f"_cuda_get_{name}": functools.partial(mode.__getitem__, name) for name in mode}
    return {
        **setters,
        **getters,
        "_cuda_getDeviceCount": library.count,
        "_cuda_getDevice": library.current,
        "_cuda_setDevice": c._accelerator_setDeviceIndex,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_synchronize": synchronize,
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_isInBadFork": lambda: python.in_bad_fork(CUDA),
        "_cuda_sleep": lambda cycles: time.sleep(min(cycles / 1.41e9, 10.0)),
        "_can_use_flash_attention": lambda given, debug=False: given.query.itemsize == 2,
        "_cuda_getCurrentStream": current,
        "_cuda_getDefaultStream": lambda device: (0, library.current() if device < 0 else device, CUDA),
        "_cuda_getCurrentRawStream": lambda device: library.stream_handle(device, current(device)[0]),
        "_cuda_setStream": set_stream,
        "_cuda_isCurrentStreamCapturing": capturing,
        "_graph_pool_handle": new_pool,
        "_CudaStreamBase": _stream_class(library),
        "_CudaEventBase": _CudaEventBase,
        "_CUDAGraph": _CudaGraphBase,
        "_nvtx": _module("_nvtx", RANGES),
        "_CudaDeviceProperties": DeviceProperties,
        "_activate_gpu_trace": lambda: library.trace(python.interpreter()),
    }


def _memory(c: Any, library: VirtualGpuLibrary) -> dict[str, Any]:
    def set_fraction(fraction: float, device: int) -> None:
        if not 0 <= fraction <= 1:
            raise RuntimeError(f"invalid fraction:{fraction}. Please set within (0, 1].")
        library.set_fraction(device, fraction)

    def snapshot(asked: object = None) -> dict[str, Any]:
        traces: list[object] = [[] for _ in range(library.count())]
        return {
            "segments": [], "device_traces": traces, "allocator_settings": {}, "external_annotations": [],
        }  # fmt: skip

    def statistics(device: int) -> dict[str, object]:
        more = {"num_oom_rejections": 0, "reserved_bytes_by_private_pools": {}}
        return {**more, **c._accelerator_getDeviceStats(device)}

    runtime = _module("_cudart", dict.fromkeys(RUNTIME, 0))
    runtime.cudaError = type("cudaError", (int,), {"success": 0})
    runtime.cudaGetErrorString = lambda code: "no error" if code == 0 else "unknown error"
    runtime.cudaMemGetInfo = lambda device: (library.free(device), library.capacity(device))
    refused = {"__init__": refusal("MemPool", POOLS)}
    return {
        **{name: type(name, (), refused) for name in ("_MemPool", "_cuda_CUDAAllocator_AllocatorState")},
        "_cuda_memoryStats": statistics,
        "_cuda_resetPeakMemoryStats": c._accelerator_resetPeakStats,
        "_cuda_resetAccumulatedMemoryStats": c._accelerator_resetAccumulatedStats,
        "_cuda_emptyCache": c._accelerator_emptyCache,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": library.fraction,
        "_cuda_hostMemoryStats": dict,
        "_cuda_memorySnapshot": snapshot,
        "_cudart": runtime,
    }


def _module(name: str, answers: dict[str, Any]) -> Any:
    """Make a module of `torch._C`, of functions that return these values."""
    made = ModuleType(f"torch._C.{name}")
    made.__dict__.update((each, _answer(value)) for each, value in answers.items())
    return made


def _initialize(
    library: VirtualGpuLibrary, python: TorchPython, settings: VirtualGpuSettings
) -> Callable[[], None]:
    """Make `torch._C._cuda_init`, which the first use of a device calls."""

    def initialize() -> None:
        from unisono.torch_internals.graphs import without_modes  # it needs all of PyTorch

        torch = sys.modules["torch"]
        library.use()
        if library.count() == 0:
            raise RuntimeError("No CUDA GPUs are available")
        with without_modes():  # the sanitizer asks for a stream at each operation, and waits for this
            each = map(torch.ops.unisono_virtual.generator, range(library.count()))
            torch.cuda.default_generators = tuple(each)
        torch.cuda._get_device_properties = lambda device: DeviceProperties(
            library.physical(device), library.capacity(device)
        )
        python.watch_forks(CUDA)
        if settings.check_streams:
            from torch.cuda import _sanitizer

            sanitizer: Any = _sanitizer
            sanitizer.enable_cuda_sanitizer()

    return initialize
