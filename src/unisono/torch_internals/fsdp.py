"""PyTorch's FSDP2 (`fully_shard`, `replicate`) from inside: what a schedule with passes of its own needs.

`fully_shard` reduces gradients in hooks of a backward pass. A pipeline schedule that computes weights'
gradients in a pass of their own has no such hooks, and a step that ended with an error leaves state behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from unisono.errors import message

from .assignments import version_of
from .probe import MissingPrivateName, PrivateName, find, need, optional
from .training import module_at

FSDP = "torch.distributed.fsdp._fully_shard."

NAMES = {
    "replicate": PrivateName(
        "torch.distributed._composable.replicate_with_fsdp:replicate",
        purpose="cast replicas to bf16 or fp16 (zero=0 with a precision)",
        without="zero=0 takes precision='f32' only",
    ),
    "states": PrivateName(
        FSDP + "_fsdp_state:FSDPState._root_post_backward_final_callback",
        purpose="reduce gradients at the end of a pass that is no backward pass",
        without="zero >= 1 cannot run",
    ),
    "group": PrivateName(
        FSDP + "_fsdp_param_group:FSDPParamGroup.post_backward",
        purpose="reduce the gradients of one unit",
        without="zero >= 1 cannot run",
    ),
    "asynchronous": PrivateName(
        "torch.distributed.fsdp:FSDPModule._set_unshard_async_op",
        purpose="gather the next unit's parameters while one computes",
        without="zero >= 1 gathers a unit's parameters when it needs them, which takes longer",
    ),
    "leaf dtypes": PrivateName(
        FSDP + "_fsdp_param_group:FSDPParamGroup._set_unsharded_grad_dtypes",
        purpose="add gradients up in the type that is reduced; they stay in their parameters",
        without="`accumulate` is asked for",
        since="2.15",
    ),
    "accumulate": PrivateName(
        FSDP + "_fsdp_param:FSDPParam.accumulate_unsharded_grad_if_needed",
        purpose="the same, before gradients stayed in their parameters",
        without="schedules with passes of weights cannot run with zero >= 1",
        until="2.14",
    ),
    "reset": PrivateName(
        "torch.distributed.fsdp:FSDPModule.reset_iter_state",
        purpose="forget a step that ended with an error",
        without="Unisono forgets it itself",
        since="2.13",
    ),
    "unused": PrivateName(
        "torch.distributed.fsdp:FSDPModule.set_reduce_scatter_unused_params",
        purpose="reduce zeros for parameters that a rank has not used (uneven_use=True)",
        without="Unisono puts zeros into their gradients",
        since="2.13",
    ),
}


NAMES["dtypes"] = PrivateName(
    FSDP + "_fsdp_param_group:FSDPParamGroup._init_mp_dtypes",
    purpose="train parameters that were frozen when they were sharded",
    without="freezing or unfreezing in the middle of a run raises",
)
NAMES["states of modules"] = PrivateName(
    "torch.distributed._composable_state:_module_state_mapping",
    purpose="shard a model anew over other ranks (elastic=True with zero >= 1)",
    without="elastic=True takes zero=0 only",
)
NAMES["contract"] = PrivateName(
    "torch.distributed._composable.contract:STATE_KEY",
    purpose="shard a model anew over other ranks (elastic=True with zero >= 1)",
    without="elastic=True takes zero=0 only",
)
NAMES["registry"] = PrivateName(
    "torch.distributed._composable.contract:REGISTRY_KEY",
    purpose="shard a model anew over other ranks (elastic=True with zero >= 1)",
    without="elastic=True takes zero=0 only",
)


def unwrap(module: Any) -> None:
    """Undo `fully_shard` of one module. Its parameters are whole again and have no values.

    Hooks of the parameters are lost. Collectives of the module must have ended.

    Raises:
        MissingPrivateName: this PyTorch keeps its states otherwise. Try it on a small module first.
    """
    try:
        _unwrap(module)
    except AttributeError as error:
        what = "elastic=True with zero >= 1 cannot shard a model over other ranks with this PyTorch"
        remedy = "Use zero=0, or a version of PyTorch that Unisono was tested with."
        raise MissingPrivateName(message(what, observed=str(error), remedy=remedy)) from error


def _unwrap(module: Any) -> None:
    known, keys = need(NAMES["states of modules"]), (need(NAMES["contract"]), need(NAMES["registry"]))
    need(NAMES["group"])
    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in state._fsdp_param_groups:
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
        for held in group.fsdp_params:
            held._post_load_hook_handle.remove()
            trained = held.sharded_param.requires_grad
            whole = torch.nn.Parameter(
                torch.empty(held._orig_size, dtype=held.sharded_param.dtype), requires_grad=trained
            )
            info = held._module_info
            for owner, name in (
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names, strict=True),
            ):
                owner._parameters[name] = whole
    known.pop(module)
    for key in keys:
        module.__dict__.pop(key)
    module.__class__ = type(module).__mro__[2]


def shown(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (sharded, gathered) of each parameter that the modules show gathered, as a forward left it."""
    if root._get_fsdp_state()._is_root is None:
        return  # nothing ran yet
    for group in _groups(root):
        for held in group.fsdp_params if group.is_unsharded else ():
            yield held.sharded_param, held._unsharded_param


class GatheredParameter(torch.nn.Parameter):
    """A gathered copy of a sharded parameter, which counts what writes it by `.data`, too."""

    @property
    def data(self) -> Any:
        """A view as PyTorch gives it. Those of one parameter share one version counter."""
        seen: Any = self.__dict__.get("_seen")
        if seen is None:
            seen = self.__dict__["_seen"] = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return seen.detach()

    @data.setter
    def data(self, value: Any) -> None:
        self.__dict__["_assigned"] = self.__dict__.get("_assigned", 0) + 1
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def writes(self) -> int:
        """How often it was written. FSDP's gathering does not count."""
        seen = self.__dict__.get("_seen")
        return (
            version_of(self)
            + (0 if seen is None else version_of(seen))
            + int(self.__dict__.get("_assigned", 0))
        )


class GatheredCopies:
    """The gathered copies of all parameters in `root`, and what writes them: the next gather overwrites it.

    A copy is made once; its versions outlast the memory that is freed between its uses.
    """

    def __init__(self, root: Any) -> None:
        need(NAMES["states"])
        modules: list[Any] = [module for module in root.modules() if isinstance(module, FSDPModule)]
        groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
        self._held = [held for group in groups for held in group.fsdp_params]
        self._known = [_writes(held) for held in self._held]
        for held in self._held:
            held.init_unsharded_param = _counting(held, held.init_unsharded_param)

    def written(self) -> list[tuple[Any, Any]]:
        """The (sharded, gathered) parameters whose copy was written since the last call."""
        found = []
        for number, held in enumerate(self._held):
            count = _writes(held)
            if count != self._known[number]:
                self._known[number] = count
                found.append((held.sharded_param, held._unsharded_param))
        return found


def _counting(held: Any, make: Callable[[], None]) -> Callable[[], None]:
    """Make the gathered copy as FSDP does, the first time of the class that counts."""

    def made() -> None:
        make()
        if type(held._unsharded_param) is torch.nn.Parameter:
            held._unsharded_param.__class__ = GatheredParameter
        held.__dict__.pop("init_unsharded_param", None)

    return made


def _writes(held: Any) -> int:
    copy = held.__dict__.get("_unsharded_param")
    if isinstance(copy, GatheredParameter):
        return copy.writes()
    return 0 if copy is None else version_of(copy)  # cut on the tensor axis, too


def observe(
    root: Any,
    gathers: Callable[[], AbstractContextManager[None]],
    reduces: Callable[[], AbstractContextManager[None]],
    gathered: Callable[[Any], None],
    reduced: Callable[[Any], None],
) -> None:
    """Gather and reduce each unit's parameters within contexts.

    Args:
        gathers, reduces: make a context.
        gathered: called with each gathered copy of a parameter.    reduced: with each sharded one.
    """
    need(NAMES["group"])

    def follow(group: Any, unshard: Any, wait_for_unshard: Any, post_backward: Any) -> None:
        def begin(*args: Any) -> None:
            with gathers():
                unshard(*args)

        def end() -> None:
            with gathers():
                wait_for_unshard()
            for held in group.fsdp_params:
                if hasattr(held, "_unsharded_param"):
                    gathered(held._unsharded_param)

        def reduce(*args: Any) -> None:
            with reduces():
                post_backward(*args)
            for held in group.fsdp_params:
                reduced(held.sharded_param)

        group.unshard, group.wait_for_unshard, group.post_backward = begin, end, reduce

    for module in root.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            follow(group, group.unshard, group.wait_for_unshard, group.post_backward)


def follow_units(root: Any, follow: Callable[[list[Any]], Any]) -> None:
    """Free what was gathered after each use, and tell what has the parts of each unit's parameters.

    Args:
        follow: of the parts; returns what is told by `gather()`: they are about to be copied; `gathered()`:
            they were; `reduced(wait)`: their gradients are under way, for which `wait()` has the device wait.
    """
    need(NAMES["group"])
    for module in root.modules():
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            _follow(group, follow([held.sharded_param for held in group.fsdp_params]))


def _follow(group: Any, memory: Any) -> None:
    unshard, wait_for_unshard, post_backward = group.unshard, group.wait_for_unshard, group.post_backward

    def begin(*args: Any) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            memory.gather()
        unshard(*args)

    def end() -> None:
        waits = group._all_gather_result is not None
        wait_for_unshard()
        if waits:
            memory.gathered()

    def wait() -> None:
        if group._post_reduce_event is not None:
            group.device_handle.current_stream().wait_event(group._post_reduce_event)

    def reduce(*args: Any) -> None:
        post_backward(*args)
        memory.reduced(wait)

    group.unshard, group.wait_for_unshard, group.post_backward = begin, end, reduce
    group._reset_sharded_params = True  # they stay where they are
    group.post_forward_mesh_info = group.mesh_info


def is_sharded(unit: Any, name: str) -> bool:
    """Whether a module inside `unit` that is sharded by itself has the parameter of this name."""
    path = name.rpartition(".")[0]
    while path:
        if isinstance(module_at(unit, path), FSDPModule):
            return True
        path = path.rpartition(".")[0]
    return False


def hidden_by_methods(root: Any) -> str:
    """A child or tensor that methods of a sharded module would hide from its forward; "": there is none."""
    methods = {name for name in dir(FSDPModule) if not hasattr(torch.nn.Module, name)}
    for path, module in root.named_modules():
        for name in (*module._modules, *module._parameters, *module._buffers):
            if name in methods:
                return f"{path}.{name}".lstrip(".")
    return ""


def can_follow_frozen() -> bool:
    """Whether this PyTorch can."""
    return find(NAMES["dtypes"]) is not None


def follow_frozen(root: Any) -> None:
    """Train those parameters that require gradients now. They must be sharded."""
    if root._get_fsdp_state()._is_root is None:
        return  # the first forward looks
    init_dtypes = need(NAMES["dtypes"])
    for group in _groups(root):
        init_dtypes(group)


def trained(module: Any) -> list[Any]:
    """The sharded parameters of one unit that require gradients, in the order of its messages."""
    held = [one for group in module._get_fsdp_state()._fsdp_param_groups for one in group.fsdp_params]
    return [one.sharded_param for one in held if one.sharded_param.requires_grad]


def replicate(module: Any, **arguments: Any) -> None:
    """Make replicas of `module`, in place, with FSDP2's casts."""
    need(NAMES["replicate"])(module, **arguments)


def gather_ahead(root: Any) -> None:
    """Gather parameters asynchronously."""
    if (switch := optional(NAMES["asynchronous"])) is not None:
        switch(root, True)


def reset(root: Any) -> None:
    """Drop the gradients of a step that raised, and wait for its collectives in flight."""
    if root._get_fsdp_state()._is_root is None:
        return  # the error came before the first forward
    for held in (held for group in _groups(root) for held in group.fsdp_params):
        if find(NAMES["accumulate"]) is not None:
            held.unsharded_accumulated_grad = None
        if hasattr(held, "_unsharded_param"):
            held.unsharded_param.grad = None
    reset_state = find(NAMES["reset"]) or _reset_before
    reset_state(root)


def waiting(root: Any) -> list[Any]:
    """The gradients that wait in gathered parameters to be reduced."""
    if root._get_fsdp_state()._is_root is None:
        return []
    held = [one for group in _groups(root) for one in group.fsdp_params]
    copies = [one._unsharded_param for one in held if hasattr(one, "_unsharded_param")]
    return [copy.grad for copy in copies] + [one.unsharded_accumulated_grad for one in held]


def accumulate(root: Any) -> None:
    """Add the gradients of a pass for weights to the accumulated ones, in the type of the reduction."""
    in_leaves = find(NAMES["leaf dtypes"]) is not None
    for group in _groups(root):
        if in_leaves:
            group._set_unsharded_grad_dtypes(defer_upcast=False)
            continue
        for held in group.fsdp_params:
            if hasattr(held, "_unsharded_param"):
                held.accumulate_unsharded_grad_if_needed()
                held.to_accumulated_grad_if_needed()


def reduce_now(root: Any) -> None:
    """Reduce the accumulated gradients."""
    need(NAMES["group"])
    for group in _groups(root):
        group.post_backward()
    root._get_fsdp_state()._root_post_backward_final_callback()


def reduce_unused(root: Any) -> None:
    """Reduce zeros for a parameter that this rank has not used: another rank may have a gradient of it."""
    if (switch := find(NAMES["unused"])) is not None:
        switch(root, True)
        return
    need(NAMES["group"])
    for group in root._get_fsdp_state()._fsdp_param_groups:
        group.post_backward = _with_zeros(group, group.post_backward)


def _with_zeros(group: Any, post_backward: Callable[..., None]) -> Callable[..., None]:
    def with_zeros(*unused: Any) -> None:
        for held in group.fsdp_params if group.reduce_grads else ():
            unsharded = getattr(held, "_unsharded_param", None)
            if unsharded is None or held.unsharded_accumulated_grad is not None:
                continue
            if unsharded.requires_grad and unsharded.grad is None:
                unsharded.grad = torch.zeros_like(unsharded)
        post_backward(*unused)

    return with_zeros


def _groups(root: Any) -> list[Any]:
    """What `fully_shard` made of each unit's parameters."""
    need(NAMES["states"])
    states = root._get_fsdp_state()._state_ctx.all_states
    return [group for state in states for group in state._fsdp_param_groups]


def _reset_before(root: Any) -> None:
    """`reset_iter_state` for versions that have none."""
    root_state = root._get_fsdp_state()
    idle = type(root_state._training_state).IDLE
    for group in _groups(root):
        group.finalize_backward()  # waits
        group._reshard_after_forward_event = group._partial_reduce_output = None
        group._training_state = idle
        group._to_sharded()
    communication = root_state._comm_ctx
    current = root_state._device_handle.current_stream()
    for left in (communication.all_gather_state, *communication.reduce_scatter_states):
        if left is not None and left.event is not None:
            current.wait_event(left.event)
    communication.all_gather_state = None
    communication.reduce_scatter_states.clear()
    communication.post_forward_order.clear()
    for state in root_state._state_ctx.all_states:
        state._training_state = idle
        state._modules_to_run_forward.clear()
    root_state._state_ctx.iter_forward_root = None
    root_state._state_ctx.post_backward_final_callback_queued = False
