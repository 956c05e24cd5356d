"""Ways to run a plan. Today one: the engine over shared memory (`native`)."""

from __future__ import annotations

from unisono.checking import instance

__all__ = ["BACKENDS", "is_available"]

BACKENDS: dict[str, tuple[str, ...]] = {"native": ("cpu",), "mpi": (), "gloo": (), "nccl": ()}
"""Every backend's name, with the devices whose memory it moves here; none: it cannot be selected yet."""


def is_available(backend: str = "native", device: str = "cpu") -> bool:
    """Whether `init_process_group(backend)` works here for memory of a device: "cpu" or "cuda"."""
    return instance(device, str, "device") in BACKENDS.get(instance(backend, str, "backend"), ())
