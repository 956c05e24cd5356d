"""The job, the plans that are compared for it, what speaks against one, and it as arguments of `up.Plan`.

Nothing here imports that runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import msgspec

from unisono.engine.base.validation import flag, positive, text, whole
from unisono.errors import UnfitError
from unisono.planner.hardware import Cluster, Hardware, Interconnect
from unisono.planner.shape import TransformerShape

CODECS = ("none", "bf16", "int8")
CHOICES_OF_JOB = {"dispatch": ("experts", "hosts"), "loss": ("eager", "fused"), "reduce": ("f32", "low")}
MOST = 1 << 24

Runtime = Callable[..., object]
"""`unisono.parallel.Plan`: it raises UnfitError for arguments that it does not run."""


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, on what."""

    shape: TransformerShape
    hardware: Hardware
    links: Interconnect
    batch: int  # sequences of a step, of all ranks
    ranks: int  # accelerators
    limit_bytes: int  # of memory that a rank may use
    compute: str  # the type of compute: bf16, fp16, f32, fp8
    reduce: str  # gradients are kept and reduced in "f32", or "low"
    overlap: bool  # gradients and gathered parameters travel during compute
    codecs: tuple[str, ...] = ()  # ways to compress gradients that a search may take beside "none"
    imbalance: float = 1.0  # rows of the fullest rank's experts over the mean of all ranks
    computes: tuple[str, ...] = ()  # those that are searched, where they are several, and `compute` first
    # Rows of a token go to each of its "experts", or once to each of the "hosts" that have some.
    dispatch: str = "experts"
    routed_hosts: int = 0  # hosts at most that a token's experts are on; 0: any
    expert_overlap: bool = False  # rows of one micro-batch travel while another one is computed
    # Cross entropy as PyTorch's operators compute it, "eager", or in one kernel, "fused", which keeps the
    # logits in f32 and nothing else.
    loss: str = "eager"
    autocast: bool = False  # parameters, and the sums between layers, are f32, as under `torch.autocast`
    cluster: Cluster | None = None  # hosts that differ; `hardware` and `links` are what all have in common

    def __post_init__(self) -> None:
        whole(self.batch, "batch", 1, MOST)
        whole(self.ranks, "gpus", 1, MOST)
        whole(self.limit_bytes, "memory", 1)
        flag(self.overlap, "overlap")
        for compute in (self.compute, *self.computes):
            if compute not in self.hardware.flops:
                known = ", ".join(self.hardware.flops)
                raise ValueError(f"{self.hardware.name} has no rate for {compute!r}, expected one of {known}")
        for name, allowed in CHOICES_OF_JOB.items():
            if text(value := getattr(self, name), name) not in allowed:
                raise ValueError(f"{name} is {value!r}, expected {' or '.join(allowed)}")
        whole(self.routed_hosts, "routed_hosts", 0, MOST)
        flag(self.expert_overlap, "expert_overlap")
        flag(self.autocast, "autocast")
        if self.routed_hosts and self.dispatch != "hosts":
            raise ValueError(f"routed_hosts={self.routed_hosts} needs dispatch=hosts")
        for codec in self.codecs:
            codec_rank(codec)
        if not 1 <= positive(self.imbalance, "imbalance") <= MOST:
            raise ValueError(f"imbalance is {self.imbalance}, expected 1 or more, at most {MOST}")

    @property
    def width(self) -> int:
        """Bytes of a value that is computed with; under fp8 only inputs of matrix products are narrower."""
        return 4 if self.compute == "f32" else 2

    @property
    def residual_width(self) -> int:
        """Bytes of a value between layers."""
        return 4 if self.autocast else self.width

    @property
    def logit_bytes(self) -> int:
        """Bytes of a logit at the peak of the loss.

        Eager: logits and their log-softmax in the type of compute, which autocast copies to f32, and one
        gradient in f32; in f32 two gradients. 12 bytes in 16 bits, and 16 in f32.
        """
        return 4 if self.loss == "fused" else 2 * self.width + 8

    @property
    def product_width(self) -> int:
        """Bytes of an input of a matrix product of a layer."""
        return 1 if self.compute == "fp8" else self.width

    @property
    def copy_bytes(self) -> int:
        """Bytes of copies of an element of a layer's matrix beside it: under fp8 as it is, and transposed.

        Source: NVIDIA, Transformer Engine: products of 8-bit inputs on Hopper take both from rows only.
        """
        return 2 if self.compute == "fp8" else 0

    def typed(self, compute: str) -> TrainingJob:
        """The job with one type of compute; "": its own."""
        if not compute or (compute == self.compute and not self.computes):
            return self
        return msgspec.structs.replace(self, compute=compute, computes=())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return self.width if self.reduce == "low" else 4

    @property
    def moment_bytes(self) -> int:
        """Bytes of Adam's two moments, and of the f32 copy of a 16-bit parameter."""
        return 8 if self.compute == "f32" else 12


def codec_rank(codec: str) -> int:
    """The rank of a codec of factors; 0: it has none. Example: codec_rank("rank4") == 4.

    Raises:
        ValueError: there is no such codec.
    """
    number = text(codec, "codec").removeprefix("rank")
    if codec.startswith("rank") and number.isascii() and number.isdecimal() and 0 < int(number) <= 1024:
        return int(number)
    if codec not in CODECS:
        raise ValueError(f"codec is {codec!r}, expected {', '.join(CODECS)}, or rank1 to rank1024")
    return 0


RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "zb-h1")
SWAPS = ("none", "moments", "states")
SIZES = ("data", "context", "tensor", "pipeline", "expert", "interleave", "micro_batch")
NUMBERS = {**dict.fromkeys(SIZES, (1, MOST)), "shard": (0, MOST), "tail": (0, MOST), "zero": (0, 3)}
"""The least and the most of each."""

CHOICES = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "swap": SWAPS}
LISTS = ("order", "layers", "rows")
NO_LISTS = ((), (), ())
MOST_TAIL = 8
"""Larger ones are not searched."""


class TrainingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train.

    Attributes:
        data, tensor, pipeline: sizes of the axes.
        sequence: tensor ranks also cut norms and dropout by tokens.
        interleave: stages on each pipeline rank.  micro_batch: sequences of a micro-batch.
        zero: what data ranks share: 1 moments, 2 also gradients, 3 also parameters.
        recompute: what backward computes again: "none", "selective" (scores of unfused attention), "full".
        context: ranks that share each sequence. They share what data ranks share.
        expert: data ranks over which the experts of a layer are spread.
        shard: data ranks that share (hybrid sharding); the others are replicas. 0: all of them.
        schedule: "1f1b", which is the interleaved one where interleave > 1, or "zb-h1".
        tail: layers that the last rank of a pipeline has fewer than those in the middle; 0: stages are equal.
        swap: what is in host memory while it is not needed: "moments", or "states": also parameters and
            gradients.
        codec: gradients are summed as "bf16", "int8", or factors of a low rank, such as "rank4".
        order: kinds of hosts in the order of ranks, where hosts differ; (): as they were given.
        layers: of each pipeline rank; (): equal stages, or those of `tail`.
        rows: of a micro-batch of a data rank, for each kind of hosts in that order; (): equal ones.
        compute: the type of compute; "": the job's, which has only one.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022
    (arXiv:2205.05198), for sequence and selective; Rajbhandari et al., 2020 (arXiv:1910.02054), for zero; Qi
    et al., 2023 (arXiv:2401.10241), for zb-h1; Vogels et al., 2019 (arXiv:1905.13727), for low ranks.
    """

    data: int = 1
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    interleave: int = 1
    zero: int = 0
    micro_batch: int = 1
    recompute: str = "none"
    context: int = 1
    expert: int = 1
    shard: int = 0
    schedule: str = "1f1b"
    tail: int = 0
    swap: str = "none"
    codec: str = "none"
    order: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    compute: str = ""

    def __post_init__(self) -> None:
        for name, (least, most) in NUMBERS.items():  # of thousands of plans: a call of `whole` takes longer
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                whole(value, name, least, most)
        flag(self.sequence, "sequence")
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} is {text(value, name)!r}, expected {', '.join(allowed)}")
        if self.codec not in CODECS:
            codec_rank(self.codec)
        text(self.compute, "compute")
        for name in LISTS if (self.order, self.layers, self.rows) != NO_LISTS else ():
            _check_list(getattr(self, name), name)

    def __str__(self) -> str:
        shown = ("data", "tensor", "pipeline", "micro_batch")
        values = zip(self.__struct_fields__, self.__struct_defaults__, strict=True)
        return self._text([name for name, value in values if name in shown or getattr(self, name) != value])

    def changes(self, other: TrainingPlan) -> str:
        """The fields in which it differs from another plan, such as "data=8,zero=1"."""
        return self._text(
            [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        )

    def _text(self, names: list[str]) -> str:
        return fields_text({name: getattr(self, name) for name in names})

    @property
    def ranks(self) -> int:
        """Ranks that it needs."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def copies(self) -> int:
        """Ranks that have the same part of the model, without ZeRO."""
        return self.data * self.context

    @property
    def sharers(self) -> int:
        """Copies that share what ZeRO shares."""
        return (self.shard or self.data) * self.context

    @property
    def has_replicas(self) -> bool:
        """Whether groups of ranks that share are replicas of each other."""
        return self.zero > 0 and self.copies > self.sharers

    @property
    def expert_sharers(self) -> int:
        """The same for experts, of which there are fewer copies."""
        return max(1, self.sharers // self.expert)

    def micro_batches(self, batch: int) -> int:
        """Micro-batches of each data rank."""
        return batch // (self.data * self.micro_batch)

    def problem(self, job: TrainingJob, runtime: Runtime | None = None) -> str:
        """Why the job cannot be trained so, whatever memory there is, or not by a runtime; "" if it can."""
        return (
            self._axes_problem(job)
            or self._expert_problem(job)
            or self._stages_problem(job)
            or self._sharing_problem(job)
            or self._hosts_problem(job)
            or self._runtime_problem(job, runtime)
        )

    def _axes_problem(self, job: TrainingJob) -> str:
        shape = job.shape
        if self.compute and self.compute not in (job.compute, *job.computes):
            return f"compute={self.compute}, and {' and '.join(job.computes or (job.compute,))} is planned"
        if self.ranks != job.ranks:
            axes = ["data", *["context"] * (self.context > 1), "tensor", "pipeline"]
            product = " x ".join(str(getattr(self, axis)) for axis in axes)
            return f"{' x '.join(axes)} = {product} = {self.ranks} ranks, and there are {job.ranks}"
        if not shape.cuts(self.tensor):
            heads = f"{shape.heads} heads, {shape.key_heads} key heads and an MLP of {shape.mlp}"
            return f"tensor={self.tensor} does not divide {heads}"
        if self.context > 1 and shape.sequence % (2 * self.context):
            return f"context={self.context} cannot cut {shape.sequence} tokens into {2 * self.context} parts"
        if self.sequence and (self.tensor == 1 or shape.sequence // self.context % self.tensor):
            return f"sequence=yes needs tensor > 1 that divides {shape.sequence // self.context} tokens"
        if job.batch % (self.data * self.micro_batch):
            parts = f"{self.data} data ranks with micro-batches of {self.micro_batch}"
            return f"a batch of {job.batch} cannot be cut for {parts}"
        if self.recompute == "selective" and shape.attention == "fused":
            return "recompute=selective computes unfused attention again, and this attention is fused"
        return ""

    def _expert_problem(self, job: TrainingJob) -> str:
        if self.expert == 1:
            return ""
        if job.shape.experts is None:
            return f"expert={self.expert}: this model has no experts"
        if self.data % self.expert:
            return f"expert={self.expert} does not divide data={self.data}"
        if job.shape.experts.count % self.expert:
            return f"expert={self.expert} does not divide {job.shape.experts.count} experts"
        if self.zero and self.sharers % self.expert and self.expert % self.sharers:
            return f"neither of {self.sharers} ranks that share and expert={self.expert} divides the other"
        return ""

    def _stages_problem(self, job: TrainingJob) -> str:
        layers, count = job.shape.layers, self.micro_batches(job.batch)
        if self.pipeline * self.interleave > layers:
            return f"{layers} layers are too few for {self.pipeline} x {self.interleave} stages"
        if self.interleave > 1 and (self.pipeline == 1 or count % self.pipeline):
            return f"interleave={self.interleave} needs a pipeline that divides the {count} micro-batches"
        if self.schedule == "zb-h1":
            if self.pipeline == 1 or self.interleave > 1 or count < self.pipeline:
                return f"schedule=zb-h1 needs a pipeline, of at most the {count} micro-batches, interleave=1"
            if self.zero > 1 or self.recompute != "none":
                return "schedule=zb-h1 computes gradients of weights later: it needs zero < 2, recompute=none"
        if self.tail:
            middle = -(-(layers + self.tail) // (self.pipeline * self.interleave)) * self.interleave
            spare = middle * self.pipeline - layers - self.tail
            if (
                self.pipeline == 1
                or max(self.tail, spare) >= middle
                or self.tail <= (spare + self.tail + 1) // 2
            ):
                return f"tail={self.tail} needs a pipeline whose last rank then has fewer of {layers} layers"
        return ""

    def _sharing_problem(self, job: TrainingJob) -> str:
        if self.zero and self.copies == 1:
            return f"zero={self.zero} needs data > 1"
        if self.shard and (not self.zero or self.shard == 1 or self.data % self.shard):
            return f"shard={self.shard} needs zero > 0, and more than one rank, which divide data={self.data}"
        if self.swap != "none" and job.hardware.host is None:
            return f"swap={self.swap}: the file of {job.hardware.name} has no [host]"
        if self.swap == "states" and (self.zero or self.ranks > self.data or self.expert > 1):
            return "swap=states needs zero=0 and no axis but data"
        if self.codec == "none":
            return ""
        if self.copies == 1 or self.expert > 1 or self.swap == "states":
            return f"codec={self.codec} needs copies of gradients: data > 1, no expert, no states"
        if self.zero and self.ranks > self.data:
            return (
                f"codec={self.codec} with zero={self.zero} averages whole matrices: it needs no axis but data"
            )
        if job.typed(self.compute).gradient_bytes != 4:
            return f"codec={self.codec} takes gradients in f32"
        return ""

    def _hosts_problem(self, job: TrainingJob) -> str:
        cluster = job.cluster
        if cluster is None:
            named = [name for name in LISTS if getattr(self, name)]
            return f"{named[0]} is for hosts that differ: give hosts" if named else ""
        if self.layers:
            given, stages = fields_text({"layers": self.layers}), self.pipeline * self.interleave
            if (
                len(self.layers) != self.pipeline
                or sum(self.layers) != job.shape.layers
                or self.pipeline == 1
            ):
                return f"{given} are not {job.shape.layers} layers on pipeline={self.pipeline} ranks"
            if self.tail or self.schedule != "1f1b":
                return f"{given} needs schedule=1f1b and no tail"
            if any(each % self.interleave for each in self.layers):
                return f"{given} cannot be cut into {stages} stages"
        if self.order and self.order not in cluster.orders:
            return (
                f"{fields_text({'order': self.order})}, expected each of 0 to {len(cluster.kinds) - 1} once"
            )
        if self.swap != "none" or self.schedule != "1f1b" or self.tail:
            return "hosts that differ are planned with schedule=1f1b, swap=none, and layers in place of tail"
        if job.shape.experts is not None and 0 < job.shape.dense_layers < job.shape.layers:
            return "hosts that differ are planned for models whose layers are equal, and this has two kinds"
        return self._rows_problem(cluster) if self.rows else ""

    def _rows_problem(self, cluster: Cluster) -> str:
        given, size = fields_text({"rows": self.rows}), self.context * self.tensor
        placed = cluster.placed(self.order)
        if len(self.rows) != len(placed) or self.pipeline > 1:
            return f"{given} needs a number for each of {len(placed)} kinds of hosts, and pipeline=1"
        if any(each.begin % size or each.end % size for each in placed):
            return f"{given} needs data ranks of {size} ranks on one kind of hosts each"
        total = sum(
            rows * (each.end - each.begin) // size for rows, each in zip(self.rows, placed, strict=True)
        )
        if total != self.data * self.micro_batch:
            return f"{given} are {total}, expected data x micro_batch = {self.data * self.micro_batch}"
        if self.expert > 1:
            return f"{given} needs expert=1: ranks that spread experts exchange equal numbers of rows"
        return ""

    def _runtime_problem(self, job: TrainingJob, runtime: Runtime | None) -> str:
        try:
            if runtime is not None:
                runtime(**runtime_arguments(self, job))
        except UnfitError as error:
            return str(error)
        return ""


def _check_list(values: Any, name: str) -> None:
    if not isinstance(values, tuple) or len(values) > MOST:
        raise TypeError(f"{name} is {values!r}, expected a tuple of whole numbers")
    for value in values:
        whole(value, name, 0 if name == "order" else 1, MOST)


def fields_text(fields: dict[str, Any]) -> str:
    """The text of some fields, as `parse_plan` reads it."""
    return ",".join(f"{name}={_text_of(value)}" for name, value in fields.items())


def _text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "/".join(map(str, value)) or "equal" if isinstance(value, tuple) else str(value)


def parse_plan(given: str) -> dict[str, Any]:
    """The fields that a text names. Example: "tensor=8,recompute=full" -> {"tensor": 8, "recompute": "full"}.

    Raises:
        ValueError: a field is unknown, twice there, or has no such value.
    """
    found: dict[str, Any] = {}
    for item in given.split(","):
        name, _, value = (each.strip() for each in item.partition("="))
        if name not in TrainingPlan.__struct_fields__:
            raise ValueError(
                f"{item!r}: expected FIELD=VALUE with {', '.join(TrainingPlan.__struct_fields__)}"
            )
        if name in found:
            raise ValueError(f"{name} is there twice")
        if "=" in value:
            raise ValueError(f"{item!r}: expected one FIELD=VALUE; write a comma between two of them")
        if name == "sequence":
            if value not in ("yes", "no"):
                raise ValueError(f"{item}: expected yes or no")
            found[name] = value == "yes"
        elif name in (*CHOICES, "codec", "compute"):
            found[name] = value
        elif name in LISTS:
            found[name] = () if value == "equal" else tuple(_number(each, item) for each in value.split("/"))
        else:
            found[name] = _number(value, item)
    TrainingPlan(**found)
    return found


def _number(digits: str, item: str) -> int:
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= len(str(MOST))):
        raise ValueError(f"{item}: expected a whole number from 0 to {MOST}")
    return int(digits)


def runtime_arguments(plan: TrainingPlan, job: TrainingJob, before: int = 1) -> dict[str, Any]:
    """The arguments of `unisono.parallel.Plan` for this plan. It balances stages itself, so `tail` is none.

    `layers` are its `cuts`, which count pieces: `before` is how many pieces are before the first layer.

    Raises:
        UnfitError: that runtime has nothing that was priced so; the text says what it has.
    """
    if plan.recompute == "selective":
        raise UnfitError(
            "unisono.parallel recomputes other operators under recompute=selective than were priced: "
            "plan with recompute=full or none"
        )
    if plan.swap == "moments":
        raise UnfitError("unisono.parallel swaps all states or none: plan with swap=states or none")
    if plan.codec != "none":
        name = 'Compressed("' + plan.codec + '")'
        name = f"PowerSGD({plan.codec[4:]})" if plan.codec.startswith("rank") else name
        raise UnfitError(f"codec={plan.codec}: write the plan with compression=up.{name}")
    if plan.rows:
        raise UnfitError("unisono.parallel gives all data ranks equal rows: plan with rows=equal")
    alike = ("data", "context", "tensor", "sequence", "pipeline", "expert", "zero")
    found: dict[str, Any] = {
        **{name: getattr(plan, name) for name in alike},
        "shard": plan.shard or None,
        "micro_batches": plan.micro_batches(job.batch),
        "recompute": plan.recompute == "full",
        "precision": plan.compute or job.compute,
        "reduce": job.reduce,
        "swap": "memory" if plan.swap == "states" else None,
    }
    if plan.interleave > 1:
        found |= {"schedule": "interleaved", "stages_per_rank": plan.interleave}
    elif plan.pipeline > 1:
        found["schedule"] = plan.schedule
    if plan.layers:
        chunks = [each // plan.interleave for each in plan.layers] * plan.interleave
        found["cuts"] = tuple(before + end for end in accumulate(chunks[:-1]))
    return found
