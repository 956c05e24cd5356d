"""The native library of virtual GPUs (csrc/virtual/interface.cpp), called through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import c_char_p, c_double, c_int, c_int64, c_void_p
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "open": (None, [c_int, c_int64, c_int, c_int, c_int]),
    "use": (None, []),
    "register": (None, []),
    "register_libraries": (None, [c_char_p]),
    "trace": (None, [c_void_p]),
    "count": (c_int, []),
    "current": (c_int, []),
    "physical": (c_int, [c_int]),
    "stream_handle": (c_int64, [c_int, c_int64]),
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
            missing = (OSError,) if each.stem == "libtorch_cuda" else ()
            with contextlib.suppress(
                *missing
            ):  # the CPU build has none, or PyTorch has to load its libraries
                ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.PyDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"unisono_virtual_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._FuncPointer:  # for type checkers: set in __init__
        raise AttributeError(name)


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
