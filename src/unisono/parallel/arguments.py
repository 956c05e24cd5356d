"""Checks what a run is given before a byte moves: arguments, a model, a batch; sets what all plans need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from unisono.errors import UnfitError
from unisono.torch.control_data import on_every_rank
from unisono.torch_internals.training import is_compiled

from .axes import AXES
from .graph.containers import tensors_in
from .plan import Plan


def check_arguments(
    model: object,
    plan: object,
    optimizer: object,
    loss: object,
    pieces: object,
    cuts: object,
    *,
    caller: str = "parallelize",
) -> None:
    """Raise TypeError for a value of another type, before a byte moves. `caller`: whose error it is."""
    wanted = {
        "model": (isinstance(model, nn.Module), model, "an nn.Module"),
        "plan": (isinstance(plan, Plan), plan, 'a Plan, what up.plan chose, or "auto"'),
        "optimizer": (
            callable(optimizer),
            optimizer,
            "a function that makes one: lambda params: AdamW(params)",
        ),
        "loss": (loss is None or callable(loss), loss, "a function of (output, targets), or None"),
        "pieces": (
            pieces is None
            or (isinstance(pieces, Sequence) and all(isinstance(p, nn.Module) for p in pieces)),
            pieces,
            "a list of modules",
        ),
        "cuts": (cuts is None or isinstance(cuts, dict), cuts, "a dict, pattern of paths -> kind"),
    }
    for name, (right, value, what) in wanted.items():
        if not right:
            raise TypeError(f"{caller}: {name} is a {type(value).__name__}, expected {what}")


def check_on_change(on_change: object, plan: Plan) -> None:
    """Raise TypeError or ValueError for a function that would never be called."""
    if on_change is None:
        return
    if not callable(on_change):
        raise TypeError(f"parallelize: on_change is a {type(on_change).__name__}, expected a function")
    if not plan.elastic:
        raise ValueError("parallelize: on_change is for runs whose ranks change: write Plan(elastic=True)")


def check_compiled(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError for a compiled model that a run would not train as the user means."""
    if "_orig_mod" in dict(model.named_children()):  # what torch.compile(model) returns
        raise ValueError(
            "parallelize: torch.compile(model) has other names of parameters, which checkpoints and weights "
            "would have, too. Write model.compile(...), with the same arguments, and give the model"
        )
    compiled = [path for path, module in model.named_modules() if is_compiled(module)]
    if compiled and plan.swap is not None:
        raise ValueError(
            f"Plan(swap={plan.swap!r}) frees parameters between uses, which compiled code does not see: "
            f'"{compiled[0] or type(model).__name__}" is compiled. Leave out compile, or swap'
        )
    if plan.pipeline > 1 and is_compiled(model):
        raise ValueError(
            f"Plan(pipeline={plan.pipeline}) runs the model's layers stage by stage, and never the compiled "
            "model itself. Compile the layers: for layer in model.layers: layer.compile()"
        )


def check_memory(model: nn.Module) -> None:
    """Raise ValueError for a model on a device whose memory an elastic run does not hand over."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"Plan(elastic=True) needs a model in CPU memory, and {name!r} is on {value.device}: "
                "newcomers get the state from memory"
            )


def two(batch: object, *, own_loss: bool = False) -> tuple[Any, Any]:
    """Return inputs and targets.

    Args:
        own_loss: the model computes its loss: a batch is its inputs, whose labels are the targets.
    """
    if own_loss:
        labels = batch.get("labels", ()) if isinstance(batch, Mapping) else getattr(batch, "labels", ())
        return batch, labels
    if not isinstance(batch, (tuple, list)):
        raise TypeError(f"a batch is (inputs, targets), not a {type(batch).__name__}")
    if len(batch) != 2:
        raise TypeError(f"a batch is (inputs, targets), not a {type(batch).__name__} of {len(batch)}")
    return batch[0], batch[1]


def check_gradients(inputs: object, plan: Plan) -> None:
    """Raise ValueError for inputs that require gradients, which a plan would leave in parts or on no rank."""
    for name, splits, *_ in AXES:
        parts = getattr(plan, name) if splits not in ("", "rows") else 1
        if parts > 1 and any(tensor.requires_grad for tensor in tensors_in(inputs)):
            raise ValueError(
                f"an input of the batch requires a gradient, and no rank of {name}={parts} has all of it. "
                "Give x.detach(), or use data= and zero= for a loss that differentiates by inputs"
            )


# ---- models ----


def check_model(model: nn.Module, plan: Plan) -> None:
    """Check a model, and make its embeddings' gradients dense, as sums over ranks are. Parameters that are
    sharded become contiguous.

    Raises:
        ValueError: it has parameters without shapes, TorchScript, or an embedding that counts or writes by
            the rows of one rank; the text names the module.
    """
    for path, module in model.named_modules():
        where = f'"{path}" ({type(module).__name__})' if path else type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise UnfitError(
                f"{where} is TorchScript, which takes no hooks, and whose program cannot be recorded. "
                "Give the Python module that it was made of"
            )
        for name, value in [*module._parameters.items(), *module._buffers.items()]:
            if value is not None and is_lazy(value):
                raise UnfitError(
                    f'"{name}" of {where} has no shape yet. Call the model on a batch once before '
                    "parallelize: model(inputs)"
                )
            if isinstance(value, DTensor):
                raise UnfitError(
                    f'"{name}" of {where} is a DTensor, as up.shard makes of a module: a plan cuts plain '
                    "tensors. Shard the function: up.shard(functional.linear, strategy)(x, weight, bias)"
                )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _check_embedding(where, module, plan)
            module.sparse = False
    if plan.zero or plan.low:
        _make_contiguous(model)


@torch.no_grad()
def _make_contiguous(model: nn.Module) -> None:
    """Give each parameter the memory format that `fully_shard` needs. Example: nn.Parameter(matrix.t())."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _check_embedding(where: str, module: nn.Embedding | nn.EmbeddingBag, plan: Plan) -> None:
    if module.max_norm is not None and (plan.copies > 1 or plan.zero or plan.low):
        raise UnfitError(
            f"{where} has max_norm={module.max_norm}: it normalises the rows that its inputs name, in the "
            "table itself, and every data rank has other inputs. Normalise what it returns, or the whole "
            "table between two steps"
        )
    if module.scale_grad_by_freq and (plan.copies > 1 or plan.micro_batches > 1):
        raise UnfitError(
            f"{where} has scale_grad_by_freq=True: it counts the inputs of one rank and one micro-batch, not "
            "those of the batch. Leave it out, or use tensor= with micro_batches=1"
        )


# ---- what ranks must have alike ----


def agree(model: nn.Module, plan: Plan, seed: int) -> tuple[int, int]:
    """Refuse ranks with different plans or models, which would wait for each other in different calls; return
    rank 0's seed, and that of its generator.
    """
    told = on_every_rank(lambda: (str(plan), describe(model), (seed, torch.initial_seed())))
    for rank, (other, tensors, _) in enumerate(told):
        if other != told[0][0]:
            raise ValueError(
                f"ranks have different plans: rank 0 {told[0][0]}, rank {rank} {other}; give all the same"
            )
        for name in {**told[0][1], **tensors}:
            if tensors.get(name) != told[0][1].get(name):
                raise ValueError(
                    f"ranks have different models: {name!r} is {told[0][1].get(name, 'missing')} on rank 0, "
                    f"{tensors.get(name, 'missing')} on rank {rank}"
                )
    return told[0][2]


def describe(model: nn.Module) -> dict[str, str]:
    """What every rank must have alike, by name."""
    found: dict[str, str] = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        frozen = isinstance(value, nn.Parameter) and not value.requires_grad
        found[name] = f"{list(value.shape)}, {value.dtype}" + ", frozen" * frozen + ", meta" * value.is_meta
    return found


def same_everywhere(model: nn.Module) -> None:
    """Broadcast rank 0's parameters and buffers, but for those on the meta device."""
    with torch.no_grad():
        for value in [v for v in [*model.parameters(), *model.buffers()] if not v.is_meta]:
            dist.broadcast(value.data, src=0)
