"""The rows of the table: all that `torch.distributed` exports, and what PyTorch builds on a process group.

The names are taken from PyTorch itself, so none is forgotten. A row is found again in what the recorder wrote
by where its code stands, or by the name of its type.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed import fsdp, pipelining

from recording.recorder import place_of
from unisono.torch.process_group import ProcessGroupUnisono

if TYPE_CHECKING:
    from collections.abc import Iterator

# Module, its title. Where a module has no __all__, what it defines itself.
MODULES = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks": "Communication hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook": "Communication hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook": "Communication hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks": "Communication hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook": "Communication hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks": "Communication hooks",
    "torch.distributed.algorithms.join": "Join: uneven inputs",
    "torch.distributed.algorithms.model_averaging.averagers": "Model averaging",
    "torch.distributed.algorithms.model_averaging.hierarchical_model_averager": "Model averaging",
    "torch.distributed.optim": "Optimizers",
    "torch.distributed.fsdp": "FSDP",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor.parallel": "Tensor parallel",
    "torch.distributed.tensor.experimental": "Tensor parallel",
    "torch.distributed.pipelining": "Pipeline parallel",
    "torch.distributed.checkpoint": "Checkpoint",
    "torch.distributed.checkpoint.state_dict": "Checkpoint",
    "torch.distributed._functional_collectives": "Functional collectives",
    "torch.distributed.nn.functional": "Collectives with gradients (torch.distributed.nn)",
}
# Types without Python code that PyTorch passes to nobody: where it makes or takes them.
HANDLED_BY = {
    "Reducer": torch.nn.parallel.DistributedDataParallel._ddp_init_helper,
    "Logger": torch.nn.parallel.DistributedDataParallel._ddp_init_helper,
    "StateDictSettings": fsdp.FullyShardedDataParallel.get_state_dict_type,
    "SplitPoint": pipelining._IR.annotate_split_points,
}
SYNC_BATCH_NORM = ("SyncBatchNorm", torch.nn.SyncBatchNorm)
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip
STORES = ("TCPStore", "FileStore", "HashStore")
COLLECTIVES_WITH_ASYNC = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "barrier")
# Options of C++ and how they are registered: no calls of a user's.
NOT_METHODS = (
    "_pybind11_conduit_v1_",
    "BackendType",
    "_register_backend",
    "_set_default_backend",
    "_id",
    "boxed",
)


# ProcessGroupGloo, ProcessGroupNCCL: which there are depends on how PyTorch was built.
OTHER_BACKENDS = torch._C._distributed_c10d.Backend


class Feature(NamedTuple):
    """One row: `keys` are what the recorder writes when it is run, a place, or a place and a detail."""

    section: str
    name: str
    keys: frozenset[str]


def features() -> list[Feature]:
    """Return all rows, in order."""
    made = [*_functions(), *_details(), *_methods()]
    for module, title in MODULES.items():
        made.extend(_exports(module, title))
    return made


def _functions() -> Iterator[Feature]:
    for name in sorted(set(dir(dist)) | set(c10d.__all__)):
        thing = getattr(dist, name, None)
        home = str(getattr(thing, "__module__", ""))
        if (
            name.startswith("_")
            or inspect.ismodule(thing)
            or not home.startswith(("torch.distr", "torch._C._distr"))
        ):
            continue
        if inspect.isfunction(thing):
            yield Feature("Functions", f"{name}", keys(thing))
        elif inspect.isclass(thing) and not issubclass(thing, OTHER_BACKENDS):
            made_over = _over(name) if name in STORES else frozenset()
            yield Feature("Classes", name, keys(thing) | made_over)


def _details() -> Iterator[Feature]:
    reducing = (dist.all_reduce, dist.reduce, dist.reduce_scatter, dist.reduce_scatter_single)
    for name in OPERATIONS:
        found = frozenset(f"{key} op={name}" for one in reducing for key in keys(one))
        yield Feature("Operations of reductions", f"ReduceOp.{name}", found)
    for name in DTYPES:
        found = frozenset(f"{key} dtype={name}" for key in keys(dist.all_reduce) | keys(dist.broadcast))
        yield Feature("Types in all_reduce or broadcast", f"torch.{name}", found)
    for name in COLLECTIVES_WITH_ASYNC:
        found = frozenset(f"{key} async_op" for key in keys(getattr(dist, name)))
        yield Feature("Asynchronous calls", f"{name}(async_op=True)", found)
    for name in STORES:
        yield Feature("Stores a group is made over", name, _over(name))


def _over(store: str) -> frozenset[str]:
    """What is written when a group is made over a store."""
    return frozenset(f"{key} store={store}" for key in keys(c10d._new_process_group_helper))


def _methods() -> Iterator[Feature]:
    """Give the methods PyTorch may call on the group, whoever answers them."""
    for name in sorted(dir(dist.ProcessGroup)):
        if (
            name.startswith("__")
            or name in NOT_METHODS
            or isinstance(getattr(dist.ProcessGroup, name), dist.ProcessGroup.BackendType)
        ):
            continue
        yield Feature("Methods of ProcessGroup", name, keys(getattr(ProcessGroupUnisono, name)))


def _exports(module: str, title: str) -> Iterator[Feature]:
    home = importlib.import_module(module)
    public = {name: thing for name, thing in vars(home).items() if not name.startswith("_")}
    listed = getattr(home, "__all__", None) or [
        name
        for name, thing in public.items()
        if str(getattr(thing, "__module__", "")).startswith(module)
        and not name.endswith(("_backward", "_setup_context"))
    ]
    for name in listed:
        thing = getattr(home, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield Feature(title, name, keys(thing))
    if title == "DistributedDataParallel":
        yield Feature(title, SYNC_BATCH_NORM[0], keys(SYNC_BATCH_NORM[1]))


def keys(thing: Any) -> frozenset[str]:
    """Return what the recorder writes when `thing` is run."""
    if inspect.isclass(thing):
        own = [] if issubclass(thing, enum.Enum) else [*vars(thing).values()]
        own += vars(type(thing)).values() if type(thing).__module__ == thing.__module__ else ()
        own += [HANDLED_BY[thing.__name__]] if thing.__name__ in HANDLED_BY else ()
        found = [key for value in own if not inspect.isclass(value) for key in keys(value)]
        return frozenset([*found, f"type {thing.__module__}.{thing.__qualname__}"])
    if isinstance(thing, property):
        thing = thing.fget
    thing = inspect.unwrap(getattr(thing, "__func__", thing))
    code = getattr(thing, "__code__", None)
    place = place_of(code) if code else ""
    return frozenset([place] if place else [])
