"""Registers the backends "unisono" and "unisono-mpi"; if UNISONO_REPLACE says so, replaces "gloo" or "mpi".

This runs at every `import torch`, so it does not import the engine: the first group does.
docs/adr/0005-replacing-gloo.md explains how and why "gloo" is replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d as c10d

from unisono.engine.environment import env
from unisono.errors import message
from unisono.torch_internals import hooks, shrinking
from unisono.torch_internals.c10d import forget_failed_coalescing, forget_failed_world
from unisono.torch_internals.process_group_requests import current_request
from unisono.torch_internals.rendezvous_handlers import before_a_file, meet_by_launcher

from .nccl_substitute import current

if TYPE_CHECKING:
    from datetime import timedelta

    from unisono.torch_internals.c10d import ProcessGroup, Store

    from .nccl_substitute import NcclSubstitute

ORIGINAL = "original_gloo"
"""The name of PyTorch's own Gloo while "gloo" is replaced."""


def register() -> None:
    """Register the backend; replace Gloo if the environment says so. May be called again.

    Raises:
        ValueError: UNISONO_REPLACE is malformed.
    """
    c10d.Backend.register_backend("unisono", _create, extended_api=True, devices=["cpu", "cuda"])
    c10d.Backend.register_backend("unisono-mpi", _create_mpi, extended_api=True, devices=["cpu"])
    meet_by_launcher(_launched_store)
    before_a_file(_free_file)
    hooks.before_attaching(_pass_dispatcher)
    forget_failed_coalescing(_drop_batch)
    for name in ("unisono", "unisono-mpi", "mpi"):
        hooks.records_itself(name)
    shrinking.shrinks_itself(_is_ours)
    if env.replaced_backend() == "gloo":
        replace_gloo()
    if env.replaced_backend() == "mpi":
        replace_mpi()


def replace_gloo() -> None:
    """Put `GlooReplacement` in the place of PyTorch's Gloo. May be called again."""
    module: Any = c10d  # Any: for a type checker its classes are constants
    original = getattr(module, "ProcessGroupGloo", None)  # None: PyTorch without Gloo raises its own error
    if type(original) not in (GlooReplacement, type(None)):
        module.Backend.register_backend(ORIGINAL, original, devices=["cpu"])
        module.ProcessGroupGloo = GlooReplacement("ProcessGroupGloo", (), {"original": original})


def replace_mpi() -> None:
    """Make "mpi" a backend of Unisono in every build of PyTorch. May be called again."""
    module: Any = c10d
    module.ProcessGroupMPI, module._MPI_AVAILABLE = MpiReplacement, True


class MpiReplacement:
    """Stands for ProcessGroupMPI in distributed_c10d."""

    @staticmethod
    def create(ranks: list[int]) -> ProcessGroup | None:
        """Make the world, or the group of some of its ranks; see `mpi_group.create_for_mpi`."""
        from .mpi_group import create_for_mpi

        return create_for_mpi(ranks)


def _create_mpi(given: Any, backend_options: Any) -> ProcessGroup:
    from .mpi_group import create

    return create(given, backend_options)


def _free_file(path: str, timeout_s: float) -> None:
    """PyTorch's store would read another store's file for ever, when it should begin anew."""
    from unisono.engine.store.file import wait_for_end

    wait_for_end(path, timeout_s)


def _launched_store(timeout_s: float) -> Any:
    from .mpi_group import launched_store

    return launched_store(timeout_s)


def _create(given: Any, backend_options: Any) -> ProcessGroup:
    from .process_group import create

    try:
        return create(given, backend_options)
    except BaseException:
        forget_failed_world()
        raise


def _pass_dispatcher(group: Any) -> None:
    """Make a group of Unisono call PyTorch's hooks; others do."""
    if _is_ours(group):
        group.pass_dispatcher()


def _drop_batch(group: Any) -> None:
    """Forget the works of a block of `_coalescing_manager` that has raised; they go on."""
    if getattr(group, "_batch", None) is not None:
        group._batch = None


def _is_ours(group: Any) -> bool:
    from .process_group import ProcessGroupUnisono

    return isinstance(group, ProcessGroupUnisono)


class GlooReplacement(type):
    """The metaclass of the class that replaces ProcessGroupGloo in distributed_c10d.

    A call makes a process group of Unisono if UNISONO_REPLACE=gloo, or if it takes tensors of virtual GPUs.
    Attributes are those of PyTorch's class, and real Gloo groups are instances of it, too.
    """

    original: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a group with the backend name "gloo"."""
        request = current_request()
        devices = {} if request is None else request.devices()
        stand_in = current() if devices.get("cuda") == "gloo" else None
        if stand_in is None and env.replaced_backend() != "gloo":
            return cls.original(*args, **kwargs)
        return cls.of_unisono(*args, stand_in=stand_in, devices=tuple(devices), **kwargs)

    def of_unisono(
        cls,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        *,
        stand_in: NcclSubstitute | None,
        devices: tuple[str, ...],
        enable_reconfigure: bool = False,
        **new: Any,
    ) -> ProcessGroup:
        """Make a group of Unisono with the backend name "gloo".

        Args:
            stand_in: makes it, for tensors of `devices`; None: it takes tensors of the CPU.
            enable_reconfigure: the group has no ranks before `reconfigure`.
        Raises:
            NotImplementedError: PyTorch gives further arguments.
        """
        from .process_group import ProcessGroupUnisono, world
        from .subgroups import NO_PARENT, ParentRanks

        if new:
            raise NotImplementedError(
                message(
                    "PyTorch gives its Gloo groups arguments that Unisono does not know",
                    observed=", ".join(new),
                    remedy="Run without --replace gloo.",
                )
            )

        # Every rank must pass the same name here. The group's own name and ranks are set only later.
        everybody = c10d.GroupMember.WORLD
        within = NO_PARENT if everybody is None else ParentRanks(world(), range(everybody.size()))
        name = "world" if everybody is None else "group"
        connects = not enable_reconfigure
        kind: dict[str, Any] = {"backend": "gloo", "parent_ranks": within, "connects": connects}
        if stand_in is not None:
            made: ProcessGroup = stand_in.group(store, rank, size, timeout, name, devices=devices, **kind)
            return made
        return ProcessGroupUnisono(store, rank, size, timeout, name, **kind)

    def __instancecheck__(cls, instance: Any) -> bool:
        """True also for the groups made here: distributed_c10d asserts it."""
        from .process_group import ProcessGroupUnisono

        ours = isinstance(instance, ProcessGroupUnisono) and instance.name() == "gloo"
        return ours or isinstance(instance, cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)
