"""Enables virtual GPUs in this process, before PyTorch is imported."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.engine.environment import env
from unisono.errors import message

from . import build, import_hook
from .environment import VirtualGpuSettings, requested
from .native import VirtualGpuLibrary

if TYPE_CHECKING:
    from types import ModuleType

MOST = 64
DEFAULT_MEMORY = 80 << 30


_STATE: dict[
    str, VirtualGpuSettings
] = {}  # "on": the settings. PyTorch itself can have only one set of devices.


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
    if enabled():
        if enabled() != wanted:
            raise ValueError(message("virtual GPUs are on", observed=str(enabled()), expected=str(wanted)))
        return
    if import_hook.already_imported():
        raise RuntimeError(
            message(
                "virtual GPUs must be turned on before PyTorch is imported",
                remedy="Use `unisono run --virtual-gpus N`, or call unisono.virtual.enable first.",
            )
        )
    _STATE["on"] = wanted
    start = _StartupSteps(wanted)
    after = {"torch._C": start.after_c, "torch": start.after_torch, "unisono.torch": start.after_backend}
    sys.meta_path.insert(0, import_hook.ImportHook({"torch": start.before_torch}, after))


def enable_from_environment() -> None:
    """Enable virtual GPUs as `unisono run --virtual-gpus` has set."""
    settings = requested().settings
    if settings.virtual_gpus:
        enable(
            settings.virtual_gpus,
            settings.virtual_memory,
            poison=settings.virtual_poison,
            check_streams=settings.virtual_check_streams,
            shared=settings.virtual_shared,
        )


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

    cache = Path(requested().settings.cache_home or Path.home() / ".cache") / "unisono"
    return build.build(torch, cache, version("torch"))


class _StartupSteps:
    """The steps of the start, around the import of PyTorch."""

    def __init__(self, settings: VirtualGpuSettings) -> None:
        self._settings = settings
        self._torch = Path()
        self._library: Any = None

    def before_torch(self) -> None:
        """Build the library if necessary, and load it with PyTorch's libraries."""
        self._torch = build.torch_folder()
        path = _built(self._torch)
        names = ("libc10.so", "libtorch_cpu.so")
        self._library = VirtualGpuLibrary(path, [self._torch / "lib" / name for name in names])
        devices = visible(self._settings.gpus, requested().visible)
        memory = self._settings.memory
        shared = _opened(self._settings.shared)
        self._library.open(
            len(devices), (ctypes.c_int * MOST)(*devices), memory or DEFAULT_MEMORY, int(memory > 0),
            int(self._settings.poison), shared,
        )  # fmt: skip
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
        from . import cuda, kernels, storages, tensor_types

        storages.install()
        tensor_types.install()
        self._kernels = kernels.register()
        for fused in ("flash", "mem_efficient", "cudnn"):  # kernels of the CUDA build; others do the same
            getattr(module.backends.cuda, f"enable_{fused}_sdp")(False)
        module.backends.cudnn.is_acceptable = _not_acceptable  # without its warning
        module.cuda._get_pynvml_handler = cuda.refusal("pynvml", "it has no sensors")
        module.cuda._device_count_nvml = lambda: -1  # a real driver reports real devices only

    def after_backend(self, module: ModuleType) -> None:  # noqa: ARG002
        """Replace NCCL by Unisono's backend."""
        from . import nccl

        nccl.make()


def _not_acceptable(tensor: object) -> bool:  # noqa: ARG001
    """Replace `torch.backends.cudnn.is_acceptable`."""
    return False


def _opened(path: str) -> int:
    """Open the shared file; -1 if there is none: the job deletes it, and its children may outlive it."""
    try:
        return os.open(path, os.O_RDWR) if path else -1
    except FileNotFoundError:
        return -1


def visible(gpus: int, text: str | None) -> list[int]:
    """Return the devices of `gpus` that CUDA_VISIBLE_DEVICES selects, by CUDA's rules.

    Example: (4, "2,0") -> [2, 0]; (4, "1,9,2") -> [1]: devices after an unknown one are hidden.
    """
    if text is None:
        return list(range(gpus))
    seen: list[int] = []
    for word in text.split(","):
        number = int(word) if word.strip().isdecimal() else -1
        if not 0 <= number < gpus or number in seen:
            break
        seen.append(number)
    return seen
