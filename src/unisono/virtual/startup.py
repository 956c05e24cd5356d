"""Enables virtual GPUs in this process, before PyTorch is imported."""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.engine.environment import env
from unisono.errors import message

from . import build, import_hook
from .environment import VirtualGpuSettings, requested, set_for_libraries, shared_file
from .native import VirtualGpuLibrary

if TYPE_CHECKING:
    from types import ModuleType

MOST = 64
DEFAULT_MEMORY = 80 << 30
PARTS = {
    "unisono.torch": "unisono.virtual.nccl",
    "triton": "unisono.virtual.triton",
    "torch._inductor.compile_fx": "unisono.virtual.inductor",
    "torch._higher_order_ops.triton_kernel_wrap": "unisono.torch_internals.compiled_kernels",
    "torch.utils.cpp_extension": "unisono.virtual.libraries",
}
"""Modules to install when another one has been imported, by the other's name."""

_STATE: dict[str, VirtualGpuSettings] = {}  # "on": the settings. PyTorch can have one set of devices.


def enabled() -> VirtualGpuSettings | None:
    """Return this process's settings; None without virtual GPUs."""
    return _STATE.get("on")


def enable(
    gpus: int, memory: str | int = 0, *, poison: bool = True, check_streams: bool = False, shared: str = ""
) -> None:
    """Give this process virtual GPUs. Call it before `import torch`; a second call changes nothing.

    Args:
        gpus: 1 to 64.
        memory: of each, such as "16G"; 0: counted, without a limit.
        poison: fill new memory with NaN (floating point) or invalid integers.
        check_streams: report missing waits between streams; see `torch.cuda._sanitizer`.
        shared: set by `unisono run`.
    Raises:
        ValueError: a value is out of range, or the settings differ from the first call.
        RuntimeError: PyTorch has been imported, or the library cannot be built.
        ImportError: PyTorch is not installed.
    """
    if not 1 <= gpus <= MOST:
        raise ValueError(message("virtual GPUs", observed=str(gpus), expected=f"1 to {MOST}"))
    limit = env.parse_size(memory) if isinstance(memory, str) else memory
    wanted = VirtualGpuSettings(gpus, limit, poison, check_streams, shared)
    if (now := enabled()) is not None:
        if now._replace(shared=shared) != wanted:
            raise ValueError(message("virtual GPUs are on", observed=str(now), expected=str(wanted)))
        return
    if "torch" in sys.modules:
        raise RuntimeError(
            message(
                "virtual GPUs must be turned on before PyTorch is imported",
                remedy="Use `unisono run --virtual-gpus N`, or call unisono.virtual.enable first.",
            )
        )
    _STATE["on"] = wanted
    set_for_libraries(os.environ)  # noqa: TID251  (this process is the one that they run in)
    start = _StartupSteps(wanted)
    after: dict[str, Any] = {name: functools.partial(_install, part) for name, part in PARTS.items()}
    after |= {"torch._C": start.after_c, "torch": start.after_torch}
    sys.meta_path.insert(0, import_hook.ImportHook({"torch": start.before_torch}, after))


def enable_at_start() -> None:
    """Enable virtual GPUs as UNISONO_VIRTUAL_GPUS and the like say. Python calls this when it starts.

    Where no launcher did, this process and its children share the devices.
    """
    try:
        settings = requested()
        if not settings.virtual_gpus:
            return
        shared = settings.virtual_shared
        if not os.path.exists(shared):
            shared = os.environ["UNISONO_VIRTUAL_SHARED"] = shared_file()  # noqa: TID251  (for its children)
        enable(
            settings.virtual_gpus,
            settings.virtual_memory,
            poison=settings.virtual_poison,
            check_streams=settings.virtual_check_streams,
            shared=shared,
        )
    except Exception as error:  # noqa: BLE001  (a traceback of `site` would hide the reason)
        sys.exit(f"unisono: {error}")


def prepare() -> None:
    """Build the library if it does not exist, before ranks start; without PyTorch do nothing.

    Raises:
        RuntimeError: it cannot be built; the text gives the reason.
    """
    with contextlib.suppress(ImportError):  # of which PackageNotFoundError is one
        _built(build.torch_folder())


def _built(torch: Path) -> Path:
    """Return the library for PyTorch in folder `torch`. Raises what `build.build` raises."""
    from importlib.metadata import version  # 15 ms, which `unisono run` spends for GPUs only

    cache = Path(requested().cache_home or Path.home() / ".cache") / "unisono"
    return build.build(torch, cache, version("torch"))


class _StartupSteps:
    """The steps of the start, around the import of PyTorch."""

    def __init__(self, settings: VirtualGpuSettings) -> None:
        self._settings = settings
        self._library: Any = None

    def before_torch(self) -> None:
        """Build the library if necessary, and load it with PyTorch's libraries."""
        torch = build.torch_folder()
        path = _built(torch)
        before = [torch / "lib" / name for name in ("libc10.so", "libtorch_cpu.so", "libtorch_cuda.so")]
        self._library = VirtualGpuLibrary(path, before)
        gpus, memory, poison = self._settings.gpus, self._settings.memory, int(self._settings.poison)
        shared = -1
        with contextlib.suppress(FileNotFoundError):  # the job deletes it, and its children may outlive it
            shared = os.open(self._settings.shared, os.O_RDWR)
        self._library.open(gpus, memory or DEFAULT_MEMORY, int(memory > 0), poison, shared)
        if shared >= 0:
            os.close(shared)
        if glob.glob("/dev/nvidia[0-9]*"):
            print(f"unisono: the {self._settings.gpus} GPUs of this process are virtual", file=sys.stderr)

    def after_c(self, module: ModuleType) -> None:
        """Add the functions of PyTorch's CUDA build to `torch._C`."""
        from . import cuda

        self._library.register()
        cuda.install(module, self._library, self._settings)

    def after_torch(self, module: ModuleType) -> None:
        """Install the parts that need all of PyTorch."""
        from . import cuda, kernels, libraries, storages, tensor_types

        libraries.watch(self._library)
        storages.install()
        tensor_types.install()
        self._kernels = kernels.register()
        module.backends.cuda.enable_cudnn_sdp(False)
        module.backends.cudnn.is_acceptable = lambda tensor: False  # without its warning  # noqa: ARG005
        module.cuda._get_pynvml_handler = cuda.refusal("pynvml", "it has no sensors")
        module.cuda._compile_kernel = cuda.refusal("compile_kernel", cuda.KERNELS)
        supported = module.autograd.profiler._supported_activities() - {module.profiler.ProfilerActivity.CUDA}
        module.autograd.profiler._supported_activities = lambda: supported  # the profiler's own events
        for place in (module.cuda, module.cuda.memory):
            place.list_gpu_processes = cuda.refusal("list_gpu_processes", "nvidia-smi lists them")
        module.cuda._device_count_nvml = lambda: -1  # a real driver reports real devices only


def _install(part: str, module: ModuleType) -> None:
    importlib.import_module(part).install(module)
