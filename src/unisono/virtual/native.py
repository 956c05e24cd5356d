"""The native library of virtual GPUs (csrc/virtual/interface.cpp), called through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_void_p
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COUNTED = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
    "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
POOLS = ("all", "small_pool", "large_pool")
FIELDS = ("current", "peak", "allocated", "freed")
TOTALS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "open": (None, [c_int, c_int64, c_int, c_int, c_int]),
    "use": (None, []),
    "register": (None, []),
    "register_libraries": (None, [c_char_p]),
    "trace": (None, [c_void_p]),
    "give_default": (None, [c_int]),
    "shared_size": (c_size_t, []),
    "count": (c_int, []),
    "current": (c_int, []),
    "physical": (c_int, [c_int]),
    "set": (c_int, [c_int]),
    "stream": (c_int64, [c_int]),
    "set_stream": (None, [c_int, c_int64]),
    "stream_handle": (c_int64, [c_int, c_int64]),
    "statistics": (None, [c_int, POINTER(c_int64)]),
    "reset_peak": (None, [c_int]),
    "reset_accumulated": (None, [c_int]),
    "empty_cache": (None, []),
    "set_fraction": (None, [c_int, c_double]),
    "fraction": (c_double, [c_int]),
    "free": (c_int64, [c_int]),
    "capacity": (c_int64, [c_int]),
}


class VirtualGpuLibrary:
    """The loaded library; its functions by name, such as `library.current()`.

    libtorch_cuda is loaded before: of two hooks for CUDA, the later one takes the place without a word.
    """

    def __init__(self, path: Path, before: Sequence[Path]) -> None:
        for each in before:  # PyTorch's, so that ours finds their symbols
            missing = (
                contextlib.suppress(OSError) if each.stem == "libtorch_cuda" else contextlib.nullcontext()
            )
            with missing:  # the CPU build has none, and PyTorch may have to load its libraries first
                ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.PyDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"unisono_virtual_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._FuncPointer:  # for type checkers: set in __init__
        raise AttributeError(name)

    def memory_stats(self, device: int) -> dict[str, object]:
        """Return the dictionary for `torch.cuda.memory_stats_as_nested_dict`."""
        numbers = (c_int64 * (len(COUNTED) * len(POOLS) * len(FIELDS) + len(TOTALS)))()
        self.statistics(device, numbers)
        each = iter(numbers)
        stats: dict[str, object] = {
            name: {pool: {field: next(each) for field in FIELDS} for pool in POOLS} for name in COUNTED
        }
        stats.update((name, next(each)) for name in TOTALS)
        nothing = dict.fromkeys(FIELDS, 0)
        stats.update(
            oversize_allocations=dict(nothing), oversize_segments=dict(nothing), num_sync_all_streams=0,
            num_oom_rejections=0, max_split_size=-1, reserved_bytes_by_private_pools={},
        )  # fmt: skip
        return stats


class TorchPython:
    """Three functions of libtorch_python that PyTorch's CUDA build calls when it starts."""

    def __init__(self, path: Path) -> None:
        loaded = ctypes.PyDLL(str(path))
        device = "EN3c1010DeviceTypeE"
        self.interpreter = loaded["_Z16getPyInterpreterv"]  # through it C++ calls torch.cuda._gpu_trace
        self.interpreter.restype = c_void_p
        self.in_bad_fork = loaded["_ZN5torch5utils21is_device_in_bad_fork" + device]
        self.in_bad_fork.argtypes, self.in_bad_fork.restype = [ctypes.c_byte], ctypes.c_bool
        self.watch_forks = loaded["_ZN5torch5utils37register_fork_handler_for_device_init" + device]
        self.watch_forks.argtypes, self.watch_forks.restype = [ctypes.c_byte], None
