"""Parameters on the data axis: `ReplicatedParameters` for ZeRO 0, `fully_shard` unit by unit for ZeRO 1 to 3.

The masters are f32 and belong to the optimizer. What computes is gathered and cast when a unit runs. ZeRO 0
in bf16 or fp16 needs such casts, too: PyTorch's `replicate` makes them.

| zero | gathered | gradients are reduced | kept on a rank between micro-batches |
|---|---|---|---|
| 0 | never | once a step | parameters, gradients |
| 1 | once a step | once a step | parameters, gradients |
| 2 | once a step | after each micro-batch | parameters, its part of gradients |
| 3 | before each use | after each micro-batch | its part of both |

Where there is one stage, backward of a root begins right after its forward: it is gathered once for both.

A parameter without a dimension cannot be cut. Each rank keeps it whole in f32, and its gradient is averaged
at the end of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from unisono.errors import UnfitError
from unisono.torch_internals import fsdp, training

from .compression.reducer import Compression
from .compression.sharded_reduction import compress_units
from .experts.layers import ExpertAxis
from .gradients import local
from .graph.capture import STATE
from .graph.containers import tensors_in
from .materialize import Initializer
from .mesh import PlanMesh
from .plan import Plan
from .replicated_parameters import GradientBucket, ReplicatedParameters, buckets_of
from .swap import ParameterSwap, ShardSwap
from .swap_space import store_of
from .unit_hooks import own_memory, recompute, shows_tensors

SMALL = 1 / 8  # of the largest unit
SMALL_MODEL_BYTES = 16 << 20  # a model of no more is one unit: messages cost more than its memory
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard_units(
    root: nn.Module,
    units: Sequence[nn.Module],
    mesh: PlanMesh,
    *,
    last: bool,
    initial: Initializer,
    exact: Sequence[nn.Module] = (),
    experts: ExpertAxis | None = None,
) -> DataAxis:
    """Wrap `units` and then `root`, in place. What no unit has, shared parameters too, belongs to `root`.

    Args:
        last: `root` returns what the loss takes, so floating outputs are cast to f32.
        initial: gives parameters on the meta device their values, unit by unit.
        exact: modules that compute in f32.
        experts: whose parameters fewer ranks hold; None: there are none.
    """
    plan = mesh.plan
    own = own_units(root, units)
    replicas = plan.zero == 0 and not plan.low and not plan.swaps_parts
    for module in [*own, *exact, root] if plan.tensor > 1 or not replicas else ():
        module.register_forward_hook(own_memory)
    if not replicas:
        root.register_forward_hook(shows_tensors)
    for unit in own if plan.recompute else ():
        recompute(unit, selective=plan.recompute == "selective")
    if replicas and plan.swap is not None:
        group = mesh.group("replica") if plan.data > 1 else None
        return ParameterSwap(
            root, units, store_of(plan.swap), group=group, uneven_use=plan.uneven_use, fill=initial.fill
        )
    if replicas:
        initial.fill(root)
        return ReplicatedParameters(root, mesh, experts)
    check_lists(root, f"zero={plan.zero} with precision={plan.precision!r}")
    hidden = fsdp.hidden_by_methods(root)
    if hidden:
        raise UnfitError(
            f'"{hidden}" has the name of a method that fully_shard gives its module, which a forward '
            "would call in its place. Give it another name, or leave out zero= and low precision"
        )
    wrapped = gathered_units(root, own, plan)
    alone = apart(root, exact)
    inside = {part for module in alone for part in module.modules()}
    outer = [unit for unit in wrapped if unit not in inside]
    return ShardedParameters(root, outer, mesh, last=last, fill=initial.fill, exact=alone, experts=experts)


def own_units(root: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The units in `root` that share no parameter with another module."""
    return [unit for unit in units if unit is not root and not _shares(unit, root)]


def gathered_units(root: nn.Module, own: Sequence[nn.Module], plan: Plan) -> list[nn.Module]:
    """Those of the units of `root` whose parameters are gathered and reduced by themselves.

    There are none where all parameters travel in one message: replicas reduce their gradients so, too. In low
    precision a small model has units as a large one has them: they cast their inputs.
    """
    if plan.swap is not None and not plan.uneven_use:
        return _large(own)
    small = not plan.low and _nbytes(root) <= SMALL_MODEL_BYTES
    return [] if plan.uneven_use or plan.zero == 0 or small else _large(own)


def apart(root: nn.Module, exact: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of the modules that are in `root`, and in no other of them: that one is whole in f32.

    Raises:
        ValueError: one shares a parameter with another module, which would have it in low precision.
    """
    kept = set(exact)
    here = [module for module in root.modules() if module in kept]
    inner = {part for module in here for part in module.modules() if part is not module}
    found = [module for module in here if module not in inner]
    for module in found:
        if _shares(module, root):
            raise UnfitError(
                f"a {type(module).__name__} that keeps f32 shares a parameter with another module. Leave it "
                "out of keep_f32"
            )
    return found


def _large(units: Sequence[nn.Module]) -> list[nn.Module]:
    """The units that are worth messages of their own. The others belong to the root: a message costs more
    than their memory, which is less than that of the largest unit.
    """
    sizes = [_nbytes(unit) for unit in units]
    most = max(sizes, default=0)
    small = [size for size in sizes if size < SMALL * most]
    return [unit for unit, size in zip(units, sizes, strict=True) if size not in small or sum(small) > most]


@torch.no_grad()
def _nbytes(module: nn.Module) -> int:
    """The bytes of this rank's parameters, before the data axis cuts them."""
    return sum(local(parameter).nbytes for parameter in module.parameters())


def _is_scalar(parameter: nn.Parameter) -> bool:
    """Whether nothing of it can be cut: it has no dimension, no element, or is complex, which travels with
    no other type.
    """
    return parameter.dim() == 0 or parameter.numel() == 0 or parameter.is_complex()


def _check_types(unit: nn.Module, plan: Plan) -> None:
    """Refuse parameters of several types in one message of `fully_shard`."""
    first: dict[torch.dtype, str] = {}
    for name, parameter in unit.named_parameters():
        if parameter.requires_grad and not (fsdp.is_sharded(unit, name) or _is_scalar(parameter)):
            first.setdefault(parameter.dtype, name)
    if len(first) > 1:
        (one, name), (two, other), *_ = first.items()
        raise UnfitError(
            f'"{name}" is {one} and "{other}" is {two} in {type(unit).__name__}, which zero={plan.zero} with '
            f"precision={plan.precision!r} does not shard together. Give trained parameters one type "
            "(model.float()) and write precision= for the type of computation, or use zero=0 with f32"
        )


def check_lists(root: nn.Module, what: str) -> None:
    """Refuse parameters in a plain attribute of a module too: there they stay as they are now."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for path, module in root.named_modules():
        for leaf, thing in vars(module).items():
            if leaf in STATE or training.follows_parameters(module, leaf):
                continue
            for tensor in tensors_in(thing, nn.Parameter):
                if id(tensor) in names:
                    raise UnfitError(
                        f'the parameter "{names[id(tensor)]}" is also in the attribute "{leaf}" of "{path}", '
                        f"where it would stay what it is now, and {what} puts others in its place. Put it "
                        "into an nn.ParameterList, or use zero=0 with f32"
                    )


def _shares(unit: nn.Module, root: nn.Module) -> bool:
    """Whether a parameter of `unit` is one of a module outside it, too."""
    inside = set(unit.modules())
    mine = set(unit.parameters())
    outside = (module for module in root.modules() if module not in inside)
    return any(parameter in mine for module in outside for parameter in module.parameters(recurse=False))


def _policy(plan: Plan, output: torch.dtype | None = None) -> MixedPrecisionPolicy:
    if not plan.low:
        return MixedPrecisionPolicy()
    low = TYPES[plan.precision]  # None would be f32 since PyTorch 2.15, and the parameters' type before
    reduce = torch.float32 if plan.reduce == "f32" else low
    casts = plan.context == 1  # a recorded program has its casts
    return MixedPrecisionPolicy(low, reduce, output, cast_forward_inputs=casts)


def _wrap(module: nn.Module, mesh: PlanMesh, policy: MixedPrecisionPolicy, **more: Any) -> None:
    plan, whole = mesh.plan, set(filter(_is_scalar, module.parameters())) or None
    alone = plan.compression is not None  # which averages over replicas itself
    if plan.zero == 0:
        replicas = mesh.part("shard" if alone else "replica")
        fsdp.replicate(module, mesh=replicas, mp_policy=policy, ignored_params=whole)
        return
    # None: also free it, but for a root, whose backward follows at once where there is one stage
    frees = plan.zero == 3 or plan.swap is not None
    free = None if frees and plan.pipeline == 1 else frees
    sharding = mesh.part("replica", "shard") if mesh.axes.size(1) > 1 and not alone else mesh.part("shard")
    fully_shard(
        module, mesh=sharding, mp_policy=policy, reshard_after_forward=free, ignored_params=whole, **more
    )


def _wrap_expert(module: nn.Module, mesh: PlanMesh) -> None:
    """Shard a layer of experts, or one expert. `mesh`: of the experts' parameters."""
    policy = replace(_policy(mesh.plan), cast_forward_inputs=False)  # weights of rows stay f32
    if mesh.plan.zero == 0:
        _wrap(module, mesh, policy)
        return
    parts = mesh.plan.shards

    def place(parameter: nn.Parameter) -> Shard:
        """Stacked experts are cut in another dimension than that of experts, or evenly in this one."""
        if not isinstance(parameter, DTensor):
            return Shard(0)
        sizes = parameter.to_local().shape
        fits = [dim for dim in (*range(1, len(sizes)), 0) if sizes[dim] % parts == 0]
        if not fits:
            raise UnfitError(
                f"zero={mesh.plan.zero}: no dimension of a parameter of experts, {list(sizes)} on each "
                f"of {parts} ranks, can be cut into {parts} parts. Use another expert=, or shard="
            )
        return Shard(fits[0])

    _wrap(module, mesh, policy, shard_placement_fn=place)


class ShardedParameters:
    """The data axis where `fully_shard` (or `replicate`) reduces the gradients.

    Args:
        experts: whose parameters fewer ranks hold; None: there are none.
    Attributes:
        root: the module whose parameters these are.
        buckets: those of scalars.
        compression: how gradients are compressed; None: not.
    """

    def __init__(
        self,
        root: Any,
        units: Sequence[Any],
        mesh: PlanMesh,
        *,
        last: bool,
        fill: Callable[[nn.Module], object],
        exact: Sequence[Any] = (),
        experts: ExpertAxis | None = None,
    ) -> None:
        self.root, self._units, self._last = root, units, last
        self._exact, self._experts = exact, experts
        self.compression: Compression | None = None
        self.swap = None if mesh.plan.swap is None else ShardSwap(store_of(mesh.plan.swap))
        self._kept = False  # until the end of the next backward, which reads them by no hook of a unit
        if mesh.plan.elastic:  # whether `follow` will work
            tried = nn.Linear(1, 1)
            _wrap(tried, mesh, _policy(mesh.plan))
            fsdp.unwrap(tried)
        self._wrap(mesh, fill)

    def _wrap(self, mesh: PlanMesh, fill: Callable[[nn.Module], object]) -> None:
        """Shard unit by unit; `fill` gives one its values before."""
        self._plan = plan = mesh.plan
        # what the next one was told: last, reduce, free
        self._backward: tuple[bool, bool, bool] | None = None
        for exact in self._exact:
            fill(exact)
            low = None if exact is self.root else TYPES[plan.precision]
            _wrap(exact, mesh, MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=low))
            self._take(exact)
        left = [] if self._experts is None else self._experts.modules()
        for unit in self._units:
            fill(unit)
            left = self._wrap_experts(unit, left)
            _check_types(unit, plan)
            _wrap(unit, mesh, _policy(plan))
            self._take(unit)
        fill(self.root)
        self._wrap_experts(self.root, left)
        _check_types(self.root, plan)
        _wrap(self.root, mesh, _policy(plan, torch.float32 if self._last else None))
        self._take(self.root)
        if self.swap is not None:
            self.swap.hook(self.root)
        self._mesh = mesh
        self.buckets = self._scalar_buckets()
        if plan.uneven_use:
            fsdp.reduce_unused(self.root)
        if self._units and mesh.axes.size(2) > 1:  # gather the next unit's parameters while one computes
            fsdp.gather_ahead(self.root)
            for unit, following in itertools.pairwise(self._units):
                unit.set_modules_to_forward_prefetch([following])

    def _take(self, module: nn.Module) -> None:
        """Move this rank's parts of what was sharded to where they are swapped."""
        inside = set() if self.swap is None else set(module.parameters())
        for name, parameter in self.root.named_parameters():
            if self.swap is not None and parameter in inside and not _is_scalar(parameter):
                self.swap.take(name, parameter)

    def _scalar_buckets(self) -> list[GradientBucket]:
        """Those of scalars, for one axis after the other."""
        leave = [parameter for parameter in self.root.parameters() if not _is_scalar(parameter)]
        axes = [axis for axis in ("replica", "shard") if self._mesh.group(axis).size() > 1]
        found = (buckets_of(self.root, self._mesh, self._experts, leave, axis) for axis in axes)
        return [*itertools.chain.from_iterable(found)]

    def _wrap_experts(self, unit: nn.Module, experts: list[nn.Module]) -> list[nn.Module]:
        """Shard those in `unit` over the ranks that hold them; return the others."""
        inside = set(unit.modules())
        for module in experts:
            if module in inside and self._experts is not None:
                module.register_forward_hook(own_memory)
                _wrap_expert(module, self._experts.mesh)
        return [module for module in experts if module not in inside]

    def follow(self, mesh: PlanMesh) -> None:
        """Shard over the data ranks of this mesh from now on. Parameters are others and have no values."""
        for unit in (*self._exact, *self._units, self.root):
            fsdp.unwrap(unit)
        self._wrap(mesh, lambda _: None)

    def shown(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield (parameter, what the model shows in its place) where a forward has left it gathered."""
        return fsdp.shown(self.root)

    def follow_frozen(self) -> None:
        """Train those parameters that require gradients now."""
        reshard(self.root)
        fsdp.follow_frozen(self.root)
        self.buckets = self._scalar_buckets()

    def compress(self, named: Mapping[str, nn.Parameter]) -> None:
        """Compress gradients as the plan says. `named`: the parameters by their names in the user's model."""
        settings, parts = self._plan.compression, self._mesh.axes.size(1) > 1
        group = self._mesh.group("replica" if parts else "shard")
        if settings is not None and group.size() > 1:
            options = {"whole": not parts, "tentative": self._plan.precision == "fp16"}
            self.compression = Compression(settings, named, group, **options)
            compress_units(self.root, self.compression, parts=parts)

    def reset(self) -> None:
        """Drop the state of a step that raised, and wait for its collectives in flight."""
        fsdp.reset(self.root)
        if self.compression is not None:
            self.compression.reset()
        if self.swap is not None:
            self.swap.reset()
        for bucket in self.buckets:
            bucket.forget()

    def waiting(self) -> list[Any]:
        """The gradients that wait to be reduced."""
        stored = [] if self.swap is None else [*self.swap.norms.values()]
        return [*fsdp.waiting(self.root), *stored]

    def before_backward(self, *, last: bool) -> None:
        """Set whether the next backward reduces gradients or accumulates them. `last`: of this step."""
        free = (last or self._plan.zero == 3 or self.swap is not None) and not self._kept
        self._set_backward(last=last, reduce=last or self._plan.reduces_early, free=free)

    def note_gradient(self, _gradient: Any) -> None:
        """The hook of an output: parameters stay gathered where a derivative of this gradient follows."""
        if torch.is_grad_enabled():
            self._kept = True
            self._set_backward(last=True, reduce=True, free=False)

    def after_weights(self) -> None:
        """Add the gradients of weights to the accumulated ones, in the type of the reduction.

        The hooks of backward, which do so otherwise, do not run in a separate pass for weights.
        """
        fsdp.accumulate(self.root)

    def reduce_now(self) -> None:
        """Reduce the accumulated gradients, for schedules with a separate pass for weights."""
        self._set_backward(last=True, reduce=True, free=True)
        fsdp.reduce_now(self.root)

    def _set_backward(self, *, last: bool, reduce: bool, free: bool) -> None:
        """Tell every module, where something changes: each setting is a walk through all of them."""
        wanted = last, reduce, free
        if wanted == self._backward:
            return
        self._backward = wanted
        self.root.set_is_last_backward(last)
        self.root.set_requires_gradient_sync(reduce)
        self.root.set_requires_all_reduce(last)
        self.root.set_reshard_after_backward(free)

    def finish(self) -> None:
        """Average the gradients of scalars. The end of the last backward has waited for all others."""
        if self.compression is not None:
            self.compression.finish()
        for bucket in self.buckets:
            bucket.reduce()
            bucket.wait()
            bucket.finish_step(uneven_use=self._plan.uneven_use)
        if self._kept:
            self._kept = False
            reshard(self.root)
        if self.swap is not None:
            self.swap.finish()


def reshard(root: nn.Module) -> None:
    """Restore each parameter to the form that the optimizer has: a forward may have left it gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# What a run asks of it: root, reset, waiting, before_backward, after_weights, reduce_now, finish.
DataAxis = ReplicatedParameters | ParameterSwap | ShardedParameters
