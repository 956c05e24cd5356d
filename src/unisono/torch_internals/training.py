"""Private names that parallel training uses, FSDP2's apart."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from .probe import PrivateName, find, need

NAMES = {
    "recompute": PrivateName(
        "torch.distributed._composable.checkpoint_activation:checkpoint",
        purpose="compute activations again in backward (recompute=True)",
        without="recompute=True cannot run",
    ),
    "offsets": PrivateName(
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
        purpose="give each value of a cut parameter its own random bits in CompressedAdam",
        without="CompressedAdam cannot take DTensors",
    ),
    "inputs": PrivateName(
        "torch.distributed.pipelining._backward:stage_backward_input",
        purpose="compute gradients of inputs apart from those of weights",
        without="the schedules zb-h1 and zbv cannot run",
    ),
    "weights": PrivateName(
        "torch.distributed.pipelining._backward:stage_backward_weight",
        purpose="compute gradients of weights apart from those of inputs",
        without="the schedules zb-h1 and zbv cannot run",
    ),
    "view": PrivateName(
        "torch:Tensor._is_view",
        purpose="copy an output only if it is a view, which a hook of FSDP2 cannot follow",
        without="every output of a unit is copied",
    ),
    "multiply": PrivateName(
        "torch:_foreach_mul_",
        purpose="scale all gradients in one call",
        without="one call for each",
    ),
    "copy": PrivateName(
        "torch:_foreach_copy_",
        purpose="copy all gradients in one call",
        without="one call for each",
    ),
    "flat weights": PrivateName(
        "torch.nn:RNNBase.__setattr__",
        purpose="shard nn.LSTM, nn.GRU and nn.RNN: it puts their parameters into their list of weights, too",
        without="zero >= 1 refuses these modules",
    ),
    "plain": PrivateName(
        "torch._C:DisableTorchFunctionSubclass",
        purpose="raise where a program reads a parameter that is swapped out",
        without="swap= cannot run",
    ),
    "sequence": PrivateName(
        "torch.autograd.graph:Node._sequence_nr",
        purpose="tell what a loss has computed from what the model has",
        without="a loss that takes a parameter which the tensor axis cuts is not refused, and "
        "up.StepPredictor and up.plan cannot run",
    ),
    "compiled": PrivateName(
        "torch.nn:Module._wrapped_call_impl",  # it calls _compiled_call_impl, which is None at first
        purpose="refuse compiled modules where parameters are swapped",
        without="a compiled module under swap= raises an error of torch.compile",
    ),
    "hooks before a step": PrivateName(
        "torch.optim:Optimizer._optimizer_step_pre_hooks",
        purpose="tell whether a step of an optimizer calls hooks: they get cut parameters, no parts",
        without="an optimizer of parameters that are cut takes longer",
    ),
    "hooks after a step": PrivateName(
        "torch.optim:Optimizer._optimizer_step_post_hooks",
        purpose="the same",
        without="an optimizer of parameters that are cut takes longer",
    ),
    "hooks before any step": PrivateName(
        "torch.optim.optimizer:_global_optimizer_pre_hooks",
        purpose="the same, of hooks of all optimizers",
        without="an optimizer of parameters that are cut takes longer",
    ),
    "hooks after any step": PrivateName(
        "torch.optim.optimizer:_global_optimizer_post_hooks",
        purpose="the same, of hooks of all optimizers",
        without="an optimizer of parameters that are cut takes longer",
    ),
    "hooks of gradients": PrivateName(
        "torch:Tensor._backward_hooks",
        purpose="call a parameter's hooks with the gradient of all ranks, not of one",
        without="parameters with hooks are refused",
    ),
    "hooks after gradients": PrivateName(
        "torch:Tensor._post_accumulate_grad_hooks",
        purpose="the same, of hooks that are called when a gradient has been added",
        without="parameters with hooks are refused",
    ),
    "hooks before a forward": PrivateName(
        "torch.nn:Module._forward_pre_hooks",
        purpose="compute what the caller's hooks do before a unit again in backward (recompute=True)",
        without="they are called again on what they have returned",
    ),
    "not persistent": PrivateName(
        "torch.nn:Module._non_persistent_buffers_set",
        purpose="leave buffers with persistent=False out of a checkpoint",
        without="they are in it",
    ),
}


def recompute(module: nn.Module, **options: Any) -> None:
    """Compute the activations of `module` again in backward. `options`: of torch.utils.checkpoint.

    What the caller's hooks do before a forward is computed again, too. PyTorch would keep what they return,
    and call them again on it.
    """
    hooks: Any = module._forward_pre_hooks if find(NAMES["hooks before a forward"]) is not None else {}
    before = set(hooks)
    need(NAMES["recompute"])(module, **options)
    for number in set(hooks) - before:
        hooks.move_to_end(number, last=False)


def offsets(parameter: Any) -> Sequence[int]:
    """Return where the local part of a DTensor begins in each dimension."""
    _, found = need(NAMES["offsets"])(parameter.shape, parameter.device_mesh, parameter.placements)
    return found  # type: ignore[no-any-return]


def backward_of_inputs(*args: Any) -> Any:
    """PyTorch's `stage_backward_input`."""
    return need(NAMES["inputs"])(*args)


def backward_of_weights(*args: Any) -> Any:
    """PyTorch's `stage_backward_weight`."""
    return need(NAMES["weights"])(*args)


def is_view(tensor: Tensor) -> bool:
    """Whether `tensor` is a view of another; True where this PyTorch does not tell."""
    tells = find(NAMES["view"])
    return tells is None or bool(tells(tensor))


def multiply_each_(tensors: list[Tensor], factor: Any) -> None:
    """Multiply each tensor, in place."""
    together = find(NAMES["multiply"])
    if together is not None:
        together(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def copy_each_(into: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy each tensor into its counterpart."""
    together = find(NAMES["copy"])
    if together is not None:
        together(into, tensors)
        return
    for target, tensor in zip(into, tensors, strict=True):
        target.copy_(tensor)


def plainly(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of PyTorch without the `__torch_function__` of its arguments' classes."""
    with need(NAMES["plain"])():
        return function(*args, **kwargs)


def sequence_of(function: Any) -> int:
    """The number of a function of autograd, which grows from one to the next in a thread."""
    return int(function._sequence_nr()) if find(NAMES["sequence"]) is not None else -1


def functions_behind(first: Any, since: int | None = None) -> Iterator[Any]:
    """Each function of autograd from which `first` comes, and itself. None: there is none.

    Args:
        since: what is behind functions with this number or a smaller one is left out.
    """
    seen, left = set[Any](), [first]
    while left:
        function = left.pop()
        if function is not None and function not in seen:
            seen.add(function)
            if since is None or sequence_of(function) > since:
                left += [before for before, _ in function.next_functions]
            yield function


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled in place."""
    return getattr(module, "_compiled_call_impl", None) is not None


def uncompile(module: Any) -> None:
    """Undo `Module.compile`."""
    module._compiled_call_impl = None


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module of a path. `get_submodule` reads attributes, such as a method with the name of a child."""
    for name in path.split(".") if path else ():
        child = model._modules[name]
        assert child is not None
        model = child
    return model


def persistent(module: nn.Module, name: str) -> bool:
    """Whether a buffer of `module` belongs to its state."""
    return name not in getattr(module, "_non_persistent_buffers_set", ())


def has_step_hooks(optimizer: Any) -> bool:
    """Whether a step of this optimizer calls hooks, or another function is in the place of its class's.

    A scheduler's, which counts steps, is not. True where this PyTorch does not tell.
    """
    step = vars(optimizer).get("step")
    if step is not None and getattr(step, "__wrapped__", None) is not type(optimizer).step:
        return True
    before, after = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    own = getattr(optimizer, before, None), getattr(optimizer, after, None)
    return any(hooks is None or len(hooks) > 0 for hooks in (*own, *_hooks_of_all()))


@functools.cache
def _hooks_of_all() -> tuple[Any, Any]:
    """The tables of hooks before and after any optimizer's step, which PyTorch fills in place."""
    return find(NAMES["hooks before any step"]), find(NAMES["hooks after any step"])


def without_hooks(optimizer: Any) -> dict[str, Any]:
    """The attributes of an optimizer, without hooks, and without a step of its own such as a scheduler's."""
    return {
        name: OrderedDict() if name.startswith("_optimizer_") else value
        for name, value in vars(optimizer).items()
        if not (name == "step" and isinstance(value, FunctionType))
    }


def follows_parameters(module: nn.Module, leaf: str) -> bool:
    """Whether an attribute always has the parameters of now, as the list of weights of nn.LSTM has."""
    own = find(NAMES["flat weights"])
    return own is not None and leaf == "_flat_weights" and type(module).__setattr__ is own


def hooks_of(parameter: Any, kind: str) -> Any:
    """The hooks on a parameter's gradient, number -> function, as PyTorch keeps them; None: there are none.

    Args:
        kind: "hooks of gradients" (`register_hook`), or "hooks after gradients"
            (`register_post_accumulate_grad_hook`).
    """
    return getattr(parameter, _attribute(kind), None)


def set_hooks(parameter: Any, kind: str, hooks: Any) -> None:
    """Have autograd call these hooks of a parameter, and no others of this kind."""
    need(NAMES[kind])
    setattr(parameter, _attribute(kind), hooks)


def _attribute(kind: str) -> str:
    return NAMES[kind].path.rpartition(".")[2]
