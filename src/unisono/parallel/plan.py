"""The plan: how many ranks each kind of parallelism gets, and what the ranks do. It starts nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from unisono.errors import UnfitError

from .axes import AXES, NAMES
from .compression.settings import CompressionSettings
from .pipeline.schedule import KINDS, splits_backward

PRECISIONS = ("f32", "bf16", "fp16", "autocast")
_OPTIONAL = ("shard", "stages_per_rank", "local_steps")
_COUNTS = (*NAMES, "micro_batches", "expert", "copy_every")


@dataclass(frozen=True)
class OuterSGD:
    """How replicas that train on their own meet: SGD whose gradient is the mean of what each has moved by.

    With rate 1 and no momentum the weights become the mean of the replicas' (local SGD). The defaults are
    DiLoCo's. Sources: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019 (arXiv:1805.09767);
    Douillard et al., DiLoCo, 2023 (arXiv:2311.08105).

    Args:
        rate: the learning rate.
        momentum: 0 to 1, without 1.
        nesterov: Nesterov's momentum.
    Raises:
        TypeError, ValueError: wrong arguments.
    """

    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        for name in ("rate", "momentum"):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"OuterSGD: {name} is {value!r}, expected float")
        if not isinstance(self.nesterov, bool):
            raise TypeError(f"OuterSGD: nesterov is {self.nesterov!r}, expected bool")
        if not 0 < self.rate < math.inf:
            raise UnfitError(f"OuterSGD: rate is {self.rate}; it must be positive")
        if not 0 <= self.momentum < 1:
            raise UnfitError(f"OuterSGD: momentum is {self.momentum}; it must be at least 0 and below 1")


OUTER = {"average": OuterSGD(1.0, 0.0, False), "nesterov": OuterSGD()}
"""The outer optimizers that have a name."""


class Need(NamedTuple):
    """What a setting needs of another one. Args: its field, the values that go with it, why."""

    field: str
    values: tuple[object, ...]
    why: str


NEEDS: dict[str, tuple[Need, ...]] = {
    "precision='autocast'": (
        Need("pipeline", (1,), "the recorded operators of a stage run in the types of the recording"),
        Need("context", (1,), "the recorded operators run in the types of the recording"),
        Need("expert", (1,), "rows travel to experts in one type"),
        Need("keep_f32", ((),), "a module stays in f32 by torch.autocast(..., enabled=False) in its forward"),
        Need("reduce", ("f32",), "its gradients are f32"),
        Need("swap", (None,), "autocast keeps casts of parameters, which come and go"),
    ),
    "unit_scales": (
        Need("tensor", (1,), "a unit's gradients would be those of parts of matrices"),
        Need("pipeline", (1,), "ranks have different units"),
        Need("context", (1,), "the recorded program calls no units"),
        Need("expert", (1,), "rows come to experts from several units"),
        Need("local_steps", (None,), "replicas would have scales of their own"),
        Need("elastic", (False,), "a newcomer has none"),
        Need("swap", (None,), "no unit of parts that come and go was tried with a scale of its own"),
        Need("precision", ("fp16",), "no other type of compute is scaled"),
    ),
    "compression": (Need("swap", (None,), "its error feedback stays in memory"),),
    "local_steps": (
        Need("buffers", ("average", "first"), "replicas meet with one model"),
        Need("swap", (None,), "the weights of the last meeting stay in memory"),
    ),
    "expert": (
        Need("compression", (None,), "it averages over all data ranks, and experts differ there"),
        Need("local_steps", (None,), "replicas that train on their own exchange no rows"),
        Need("elastic", (False,), "a rank that dies takes the only copy of its experts with it"),
    ),
    "elastic": (
        Need("tensor", (1,), "a rank that dies takes the only copy of its part of each matrix with it"),
        Need("pipeline", (1,), "a rank that dies takes the only copy of its stage with it"),
        Need("swap", (None,), "a newcomer gets values from memory"),
        Need("compression", (None,), "what a rank has not sent yet is its own, and dies with it"),
        Need(
            "local_steps", (None,), "replicas that train on their own have no common state between meetings"
        ),
        Need("sync_batch_norm", (False,), "its sums are over fixed ranks"),
        Need("buffers", ("average", "first"), "a newcomer has none"),
    ),
    "context": (
        Need(
            "sequence",
            (False,),
            "context ranks cut all activations so, and a larger context= cuts them further",
        ),
        Need("sync_batch_norm", (False,), "it sums over the rows of data ranks, not over positions"),
        Need("keep_f32", ((),), "the recorded program has one type of parameters"),
    ),
}
OF_COPIES = (
    Need("compression", (None,), "what a rank has not sent yet is saved for data ranks only"),
    Need("local_steps", (None,), "replicas meet over data ranks only"),
    Need("elastic", (False,), "ranks that are left share out rows, and nothing else"),
)
"""What each axis whose ranks hold copies needs, but for that of the rows."""

NEEDS |= {
    axis.name: (*NEEDS.get(axis.name, ()), *OF_COPIES)
    for axis in AXES
    if axis.copies and axis.splits != "rows"
}
"""A setting -> what it needs, where it is not the default. `docs/plans.md` shows the table."""

COMPRESSED_UNITS = (
    Need("tensor", (1,), "gradients of a unit would be those of parts of matrices"),
    Need("pipeline", (1,), "each unit averages once for each update, in the last backward of all"),
    Need("local_steps", (None,), "replicas average differences, and not gradients of units"),
    Need("reduce", ("f32",), "it takes f32 gradients"),
)
"""What compression needs beside zero=1 to 3 or low precision, where it averages the gradients of units."""

OWN_LOOP = (
    Need("tensor", (1,), "a rank's backward gives a part of each gradient"),
    Need("pipeline", (1,), "no rank has the whole model"),
    Need("context", (1,), "no rank has whole sequences"),
    Need("expert", (1,), "ranks have different experts"),
    Need("micro_batches", (1,), "step alone cuts a batch: call backward for each part of it"),
    Need("precision", ("f32", "bf16", "fp16"), "the loop has torch.autocast of its own, beside f32"),
    Need("unit_scales", (False,), "gradients that the loop sees have the scale of the loss"),
    Need("swap", (None,), "parameters are in memory within step alone"),
    Need("compression", (None,), "it averages once for each update"),
    Need("local_steps", (None,), "replicas meet in step"),
    Need("elastic", (False,), "step alone is done again by the living"),
)
"""What a loop of `Run.backward` and `Run.update` needs."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train on `data * context * tensor * pipeline` ranks.

    Rank order: tensor is the fastest axis, then context, then data, then pipeline. With data=2, tensor=2,
    pipeline=2 ranks 0 and 1 share one tensor group, ranks 0 and 2 one data group, ranks 0 and 4 one pipeline.

    Args:
        data: copies of the model, each with its own rows of a batch.
        tensor: ranks that share each matrix.
        sequence: between matrices they share the positions of each sequence, which they must divide.
        pipeline: ranks that share the layers.
        context: ranks that share each sequence: dim 1 of a batch's inputs. They share what data ranks share.
        zero: what data ranks share: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
        shard: data ranks that share (hybrid sharding); the others are replicas. None: all data ranks.
        micro_batches: parts of a rank's batch; gradients add up over them.
        schedule: one of gpipe, 1f1b, interleaved, zb-h1, zbv.
        stages_per_rank: stages on each pipeline rank; None: 2 for interleaved and zbv, else 1.
        cuts: the first piece of each stage but the first; None: balanced by cost.
        precision: the type of compute; parameters are kept in f32. fp16 scales the loss. autocast: forward
            and loss run under torch.autocast in bf16, which chooses the type of each operator; parameters,
            gradients and what data ranks send are f32.
        keep_f32: patterns of paths of modules that compute in f32 under bf16 and fp16, such as
            "blocks.*.gate"; "norms" stands for all normalisations. BatchNorm always does.
        unit_scales: under fp16 each unit, such as a block, has a scale of its own beside the loss's; each is
            halved when it overflows, and grows for itself.
        reduce: the type in which gradients are reduced: f32, or low for that of compute.
        clip: largest global norm of gradients; None: not clipped.
        recompute: keep only the inputs of each unit in forward and compute the rest again in backward.
            "selective": keep also the results of matrix products, convolutions and attention.
        uneven_use: ranks may leave different parameters unused. Their gradients are zero, not None.
        buffers: what data ranks make of buffers that a forward changes: "average" (of floating ones), "first"
            (the values of the first one), or "own" (each rank keeps its own; a checkpoint has the first's).
        sync_batch_norm: BatchNorm takes the rows of all data ranks, not of each by itself.
        tf32: allow TF32 in f32 matrix products on GPUs.
        swap: where parameters, gradients and optimizer state are while they are not needed: "disk" (a file in
            the folder for temporary files), another folder for that file, or "memory" (of the host, for
            models on a GPU). A rank swaps what it owns under `zero` and the axes. None: where the model is.
        compression: average gradients in fewer bytes: `PowerSGD(rank=4)`, `Compressed("int8")`, in CPU
            memory. With shard= what replicas exchange; what a group of shards reduces stays f32.
        local_steps: replicas (data / shard) train on their own, and meet after this number of steps with the
            difference of their weights. Between meetings they exchange nothing. None: gradients are averaged
            in every step.
        outer: what happens at a meeting: "average" (local SGD), "nesterov" (DiLoCo), or OuterSGD(rate=0.7,
            momentum=0.9). `compression` is then that of the differences.
        expert: ranks of different rows or positions over which the experts of a layer are spread; it divides
            data * context. With tensor=n they are spread over expert * n ranks.
        elastic: ranks may die and come; `data` is their number at the start, and `shard` the least that share
            where it divides no longer. See docs/elastic.md.
        copy_every: steps from one copy of the shards to the next, under elastic and zero=1 to 3. After a loss
            the run makes at most so many steps again.

    Raises:
        ValueError: the plan cannot run on any number of ranks; it says why.
        TypeError: an argument is of another type than the one given here.
    Example: Plan(data=2, tensor=2, pipeline=2, zero=1, micro_batches=4) runs on 8 ranks.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    shard: int | None = None
    micro_batches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    cuts: tuple[int, ...] | None = None
    precision: Literal["f32", "bf16", "fp16", "autocast"] = "f32"
    keep_f32: tuple[str, ...] = ()
    unit_scales: bool = False
    reduce: Literal["f32", "low"] = "f32"
    clip: float | None = None
    recompute: bool | Literal["selective"] = False
    uneven_use: bool = False
    buffers: Literal["average", "first", "own"] = "average"
    sync_batch_norm: bool = False
    tf32: bool = False
    swap: str | None = None
    compression: CompressionSettings | None = None
    local_steps: int | None = None
    outer: OuterSGD | str = "nesterov"
    expert: int = 1
    elastic: bool = False
    copy_every: int = 1
    context: int = 1
    sequence: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise UnfitError(f"Plan: {name} is {getattr(self, name)}; it must be at least 1")
        _one_of("zero", self.zero, (0, 1, 2, 3))
        _one_of("schedule", self.schedule, tuple(KINDS))
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("reduce", self.reduce, ("f32", "low"))
        _one_of("buffers", self.buffers, ("average", "first", "own"))
        if self.clip is not None and not self.clip > 0:
            raise UnfitError(f"Plan: clip is {self.clip}; it must be positive, or None")
        if self.sequence and self.tensor == 1:
            raise UnfitError(
                "Plan: sequence=True cuts sequences over the tensor ranks; set tensor to 2 or more"
            )
        self._check_sharding()
        self._check_schedule()
        self._check_local_steps()
        self._check_expert()
        self._check_elastic()
        self._check_needs()

    def _check_types(self) -> None:
        for name in ("zero", *_COUNTS, *_OPTIONAL):
            value = getattr(self, name)
            optional = name in _OPTIONAL
            if type(value) is not int and not (optional and value is None):
                raise TypeError(f"Plan: {name} is {value!r}, expected int{' or None' if optional else ''}")
        for name in ("uneven_use", "sync_batch_norm", "tf32", "elastic", "sequence", "unit_scales"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Plan: {name} is {getattr(self, name)!r}, expected bool")
        if not isinstance(self.recompute, bool) and self.recompute != "selective":
            raise TypeError(f"Plan: recompute is {self.recompute!r}, expected True, False or 'selective'")
        kept: object = self.keep_f32
        if not isinstance(kept, tuple) or not all(isinstance(pattern, str) for pattern in kept):
            raise TypeError(f"Plan: keep_f32 is {kept!r}, expected a tuple of patterns of paths")
        clip: object = self.clip
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, (int, float))):
            raise TypeError(f"Plan: clip is {clip!r}, expected float or None")
        cuts: object = self.cuts
        if cuts is not None and not (isinstance(cuts, tuple) and all(type(cut) is int for cut in cuts)):
            raise TypeError(f"Plan: cuts is {cuts!r}, expected a tuple of int or None")
        swap: object = self.swap
        if swap is not None and not (isinstance(swap, str) and swap):
            raise TypeError(f"Plan: swap is {swap!r}, expected 'disk', 'memory', a folder's name or None")
        if not isinstance(self.compression, CompressionSettings | None):
            raise TypeError(
                f"Plan: compression is {self.compression!r}, expected PowerSGD(...), Compressed(...) or None"
            )

    def _check_needs(self) -> None:
        """Refuse settings that do not go together."""
        defaults = {each.name: each.default for each in fields(self)}
        for setting, needs in NEEDS.items():
            name, _, value = setting.partition("=")
            here = f"{name}={getattr(self, name)!r}"
            if here != setting if value else getattr(self, name) == defaults[name]:
                continue
            for unmet in self._unmet(here, needs):
                raise UnfitError(unmet)
        units = self.compression is not None and (self.zero > 0 or self.low)
        for unmet in self._unmet(
            f"compression with zero={self.zero}, precision={self.precision!r}",
            COMPRESSED_UNITS if units else (),
        ):
            raise UnfitError(unmet)

    def _unmet(self, what: str, needs: Iterable[Need]) -> Iterator[str]:
        for need in needs:
            if getattr(self, need.field) not in need.values:
                wanted = " or ".join(f"{need.field}={each!r}" for each in need.values)
                yield f"Plan: {what} needs {wanted}, not {getattr(self, need.field)!r}: {need.why}"

    def _check_sharding(self) -> None:
        if self.shard is None:
            return
        if self.zero == 0:
            raise UnfitError(f"Plan: shard={self.shard} with zero=0 shards nothing; set zero to 1, 2 or 3")
        if self.shard < 1 or self.data % self.shard:
            raise UnfitError(f"Plan: {self.data} data ranks cannot be cut into groups of shard={self.shard}")

    def _check_schedule(self) -> None:
        kind = KINDS[self.schedule]
        split = self.pipeline > 1 and splits_backward(self.schedule)
        if split and self.zero > 1:
            raise UnfitError(
                f"Plan: schedule {self.schedule} computes gradients of weights in a pass of their own, "
                f"which zero={self.zero} does not reduce; use zero=1, or schedule 1f1b"
            )
        if split and self.recompute:
            raise UnfitError(
                f"Plan: schedule {self.schedule} would recompute each unit twice; use 1f1b with recompute"
            )
        if split and self.swap is not None:
            raise UnfitError(
                f"Plan: schedule {self.schedule} computes gradients of weights in a pass of their own, "
                f"for which swap={self.swap!r} brings no parameters back; use schedule 1f1b"
            )
        stages = self.stages_per_rank
        if stages is not None and stages < 1:
            raise UnfitError(f"Plan: stages_per_rank is {stages}; it must be at least 1")
        if kind.stages and stages not in (None, *kind.stages):
            several = f"{kind.stages[0]} stage{'s' if kind.stages[0] > 1 else ''}"
            raise UnfitError(
                f"Plan: {self.schedule} has {several} on each rank, not {stages}; use interleaved for others"
            )
        if self.cuts is not None and (
            len(self.cuts) != self.stages - 1 or list(self.cuts) != sorted(set(self.cuts))
        ):
            raise UnfitError(f"Plan: cuts={self.cuts} must be {self.stages - 1} growing numbers of pieces")
        if self.cuts and self.cuts[0] < 1:
            raise UnfitError(f"Plan: cuts={self.cuts} leaves the first stage no piece; begin at 1")

    def _check_local_steps(self) -> None:
        outer: object = self.outer
        if not isinstance(outer, OuterSGD) and not (isinstance(outer, str) and outer in OUTER):
            allowed = ", ".join(map(repr, OUTER))
            raise UnfitError(f"Plan: outer is {outer!r}; it must be one of {allowed}, or an OuterSGD")
        if self.local_steps is None:
            return
        if self.local_steps < 1:
            raise UnfitError(f"Plan: local_steps is {self.local_steps}; it must be at least 1")
        if self.data // self.shards < 2:
            why = (
                f"zero={self.zero} without shard= makes one of all data ranks" if self.data > 1 else "data=1"
            )
            raise UnfitError(f"Plan: local_steps={self.local_steps} needs two replicas at least: {why}")

    def _check_expert(self) -> None:
        if self.expert == 1:
            return
        if self.copies % self.expert:
            sizes = [(axis.name, getattr(self, axis.name)) for axis in AXES if axis.copies]
            of = " x ".join(f"{name}={size}" for name, size in sizes if name == "data" or size > 1)
            raise UnfitError(f"Plan: expert={self.expert} does not divide {of}")
        if self.sharers % self.expert and self.expert % self.sharers:
            raise UnfitError(
                f"Plan: neither of shard={self.sharers} and expert={self.expert} divides the other; the "
                "ranks of an expert's shards would be parts of several groups"
            )

    def _check_elastic(self) -> None:
        if self.copy_every > 1 and not (self.elastic and self.zero):
            raise UnfitError(
                f"Plan: copy_every={self.copy_every} is for shards that survive their rank: it needs "
                "elastic=True, and zero=1 to 3. With zero=0 every rank has the whole state"
            )
        if self.elastic and self.zero == 0 and self.low:
            raise UnfitError(
                f"Plan: elastic=True with zero=0 needs precision='f32', not {self.precision!r}: replicas in "
                "low precision are bound to their ranks; use zero=1"
            )

    @property
    def why_no_own_loop(self) -> str:
        """Why `Run.backward` and `Run.update` do not train under this plan; empty: they do."""
        return next(self._unmet("run.backward", OWN_LOOP), "")

    def check_own_loop(self) -> None:
        """Raise ValueError where `Run.backward` and `Run.update` do not train under this plan."""
        if self.why_no_own_loop:
            raise UnfitError(self.why_no_own_loop)

    def resized(self, data: int) -> Plan:
        """The plan with so many data ranks. `shard` grows to the next number that divides them.

        Example: Plan(data=8, zero=3, shard=2).resized(7) has shard=7, resized(6) shard=2.
        """
        shard = self.shard
        if shard is not None:
            shard = next((one for one in range(shard, data) if data % one == 0), data)
        return replace(self, data=data, shard=shard)

    def of_replica(self) -> Plan:
        """The plan of one replica, under `local_steps`: as if there were no other."""
        return replace(self, data=self.shards, shard=None, local_steps=None, compression=None)

    def of_experts(self) -> Plan:
        """The plan of an expert's parameters: the tensor axis is that of experts and of tensors.

        Example: Plan(data=8, zero=3, expert=2).of_experts() is Plan(data=4, zero=3, tensor=2, shard=4).
        """
        shard = None if self.zero == 0 else max(1, self.sharers // self.expert)
        whole: dict[str, Any] = {axis.name: 1 for axis in AXES if axis.copies}
        whole |= {"data": self.copies // self.expert, "tensor": self.expert * self.tensor, "expert": 1}
        return replace(self, **whole, shard=shard)

    @property
    def outer_sgd(self) -> OuterSGD:
        """`outer`, in numbers."""
        return OUTER[self.outer] if isinstance(self.outer, str) else self.outer

    @property
    def ranks(self) -> int:
        """Ranks the plan runs on."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Ranks of each of the `AXES`."""
        return [getattr(self, axis.name) for axis in AXES]

    @property
    def low(self) -> bool:
        """Whether units compute with parameters and inputs that are cast to a lower type."""
        return self.precision in ("bf16", "fp16")

    @property
    def reduces_early(self) -> bool:
        """Whether gradients are reduced after each micro-batch, and not once for each update."""
        return self.zero >= 2 and self.compression is None

    @property
    def swaps_parts(self) -> bool:
        """Whether a rank swaps its part of what is gathered for a use, and not whole parameters."""
        cut = self.zero > 0 or self.low or self.ranks > self.data or self.expert > 1
        return self.swap is not None and cut

    @property
    def shards(self) -> int:
        """Data ranks that share: 1 under zero=0."""
        return 1 if self.zero == 0 else self.shard or self.data

    @property
    def sharers(self) -> int:
        """Ranks that share a parameter, which those of all axes with copies do: 1 under zero=0."""
        return self.shards * self.copies // self.data if self.zero else 1

    @property
    def copies(self) -> int:
        """Ranks of a stage that hold the same part of the matrices: data x context."""
        return math.prod(size for axis, size in zip(AXES, self.sizes, strict=True) if axis.copies)

    @property
    def chunks(self) -> int:
        """Stages on each pipeline rank."""
        if self.pipeline == 1:
            return 1
        return self.stages_per_rank or (KINDS[self.schedule].stages or (2,))[0]

    @property
    def stages(self) -> int:
        """Stages in all."""
        return self.pipeline * self.chunks

    def __str__(self) -> str:
        """What differs from Plan(), such as "Plan(data=2, zero=1)"."""
        parts = (
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"Plan({', '.join(parts)})"


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise UnfitError(f"Plan: {name} is {value!r}; it must be one of {', '.join(map(str, allowed))}")
