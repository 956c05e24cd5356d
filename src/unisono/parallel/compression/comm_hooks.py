"""How each parameter's gradient is sent: by a rule, by name, or by the result of `un.codecs.classify`.

A choice is a rank (a whole number: low rank), a codec (its codes are sent), or "exact" (f32 is sent).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from unisono.codecs import Codec
from unisono.codecs.codec import codec_of
from unisono.engine.base.validation import flag, instance, one_of, whole

from .reducer import Compression
from .settings import EXACT, Choice, CompressionSettings, LowRankOptions, Rule
from .sharded_reduction import compress_module

_FACTORS = ("bf16", "fp16", "1-6-9")
_ERRORS = ("f32", "1-6-9")
_MOST_RANK = 1 << 16


@dataclass(frozen=True, repr=False)
class _CommHook(CompressionSettings):
    """Settings that a DistributedDataParallel takes."""

    def attach(self, ddp: Any) -> Compression:
        """Compress the gradients of a DistributedDataParallel: `register_comm_hook` with this.

        Or those of a model after `fully_shard` (FSDP2) over one axis: in the place of each unit's
        reduce-scatter. All ranks call it, before the first backward.
        Returns:
            The buffers, which checkpoints need: `state_dict`, `load_state_dict`, `memory`.
        Raises:
            TypeError: it is neither; a parameter is not dense float32 in CPU memory, or is cut otherwise.
        """
        if isinstance(ddp, FSDPModule):
            return compress_module(ddp, self)
        if not isinstance(ddp, DistributedDataParallel):
            raise TypeError(
                f"attach: got a {type(ddp).__name__}, expected a DistributedDataParallel, or a module after "
                f"fully_shard(module). Or write up.Plan(compression={self!r})"
            )
        compression = Compression(self, dict(ddp.module.named_parameters()), ddp.process_group)
        # a lambda: DDP compares the annotations of a hook with types, ours are text
        ddp.register_comm_hook(compression, lambda state, bucket: state.reduce(bucket))
        return compression

    def __repr__(self) -> str:
        """The fields that differ from the default, such as "PowerSGD(rank=8)"."""
        parts = (
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        )
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class PowerSGD(_CommHook):
    """Gradients of matrices are sent as two factors of low rank; the error is sent later.

    The gradient M [n, m] of a parameter becomes P [n, r] and Q [m, r]; both are averaged over the ranks, and
    every rank gets P Q^T, with P made orthonormal. The difference to a rank's own M stays on this rank in an
    error buffer, and is added to its next M. The next step starts from this Q (warm start).

    Cost: 2 (n + m) r factors in place of 2 n m values (ring); one more message per bucket.
    Source: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019; factors and error buffers in 16 bits: Ramesh
    et al., Zero-Shot Text-to-Image Generation, 2021, appendix.

    Args:
        rank: r, for each matrix for which it saves enough; or what to do with each parameter, by pattern of
            names (`{"head.*": "exact", "*.weight": 4}`, the first that matches; none: exact) or a function of
            (name, shape). A choice is a rank, "exact", or a codec. `un.codecs.classify` gives such a mapping.
        factors: the format in which P and Q are sent: "bf16", "fp16", "1-6-9" or "f32".
        errors: the format in which error buffers are kept: "f32", or "1-6-9" with half the memory.
        start: steps at the beginning that send gradients exactly.
        feedback: False: the error is dropped.
        warm_start: False: every step begins with a random Q.
        saving: with a number as `rank`, a matrix is compressed when its factors are smaller by this ratio.
        seed: of the first Q; ranks need the same one.
    Raises:
        TypeError, ValueError: wrong arguments.
    Example: a Linear(1024, 4096) with rank=4 in bf16 sends 40 KiB in place of 16 MiB.
    """

    rank: int | Rule = field(default=4, hash=False)
    factors: str = "bf16"
    errors: str = "f32"
    start: int = 10
    feedback: bool = True
    warm_start: bool = True
    saving: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, Mapping) and not callable(self.rank):
            object.__setattr__(self, "rank", whole(self.rank, "rank", 1, _MOST_RANK))
        one_of(self.factors, "factors", (*_FACTORS, "f32"))
        _common(self)
        flag(self.warm_start, "warm_start")
        object.__setattr__(self, "seed", whole(self.seed, "seed", 0, 2**63 - 1))
        if not instance(self.saving, (int, float), "saving") > 0:
            raise ValueError(f"saving is {self.saving}, expected a ratio above 0")

    @property
    def codec(self) -> Codec | None:
        """The codec of factors; None: they are sent in f32."""
        return None if self.factors == "f32" else codec_of(self.factors)

    @property
    def low_rank(self) -> LowRankOptions:
        """How factors are sent."""
        return LowRankOptions(self.codec, self.warm_start, self.seed)

    def choice(self, name: str, shape: Sequence[int]) -> Choice:
        """What becomes of a parameter's gradient: a rank, a codec, or "exact"."""
        if len(shape) < 2 or math.prod(shape) == 0:
            found = None if isinstance(self.rank, int) else _choice_by_rule(self.rank, name, shape)
            return EXACT if found is None or isinstance(found, int) else found
        rows, columns = shape[0], math.prod(shape[1:])
        if not isinstance(self.rank, int):
            found = _choice_by_rule(self.rank, name, shape)
            return min(found, rows, columns) if isinstance(found, int) else found or EXACT
        rank = min(self.rank, rows, columns)
        nbytes = rank * (rows + columns) * (4 if self.codec is None else 2)
        return rank if nbytes * self.saving < 4 * rows * columns else EXACT


@dataclass(frozen=True, repr=False)
class Compressed(_CommHook):
    """Gradients are sent as codes; with feedback, the rounding error is sent later.

    Each rank encodes its gradients once; the owner of a part adds their values in f32, and encodes the sum
    once (over other backends than Unisono's the mean). The errors of both roundings stay in an error buffer,
    and are added to the next gradient. fp16 and fp8 overflow where the sum does: bf16, 1-6-9, int8 and int4
    can hold sums of gradients.

    Cost: 2(p-1)/p of the codes' bytes sent per rank, one call (over other backends two messages).
    Source: Seide et al., 1-bit SGD, Interspeech 2014 (feedback); Tang et al., 1-bit Adam, ICML 2021 (of both
    roundings).

    Args:
        codec: one of `un.codecs`, or its name. 0-6-10 has no negative numbers, and is refused.
        feedback: False: rounding errors are dropped.
        errors: the format in which error buffers are kept: "f32", or "1-6-9" with half the memory.
        start: steps at the beginning that send gradients exactly.
        small: parameters with fewer elements are sent exactly.
        rule: what to do with a parameter instead, by pattern of names or a function, as PowerSGD's `rank`;
            without ranks. None matches: `codec`.
    Raises:
        TypeError, ValueError: wrong arguments.
    """

    codec: Codec | str
    feedback: bool = True
    errors: str = "f32"
    start: int = 0
    small: int = 1024
    rule: Rule | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        _signed(codec_of(self.codec))
        _common(self)
        object.__setattr__(self, "small", whole(self.small, "small", 0))

    def choice(self, name: str, shape: Sequence[int]) -> Choice:
        """What becomes of a parameter's gradient: a codec, or "exact"."""
        found = None if self.rule is None else _choice_by_rule(self.rule, name, shape)
        if isinstance(found, int):
            raise ValueError(f"rule gives {name!r} rank {found}; Compressed has no ranks, PowerSGD has")
        if found is not None:
            return found
        return EXACT if math.prod(shape) < self.small else codec_of(self.codec)


def _choice_by_rule(rule: Rule, name: str, shape: Sequence[int]) -> Choice | None:
    """A rule's choice for a parameter, checked; None: it makes none."""
    if isinstance(rule, Mapping):
        # a name may hold the characters of patterns
        found = rule[name] if name in rule else next(
            (choice for pattern, choice in rule.items() if fnmatchcase(name, pattern)), None
        )  # fmt: skip
    else:
        found = rule(name, tuple(shape))
    if found is None or found == EXACT:
        return found
    if isinstance(found, (str, Codec)):
        return _signed(codec_of(found))
    try:
        return whole(found, f"the rank of {name!r}", 1, _MOST_RANK)
    except TypeError:
        raise TypeError(
            f"the choice for {name!r} is {found!r}, expected a rank, a codec or 'exact'"
        ) from None


def _signed(codec: Codec) -> Codec:
    if codec.name == "0-6-10":
        raise ValueError("codec 0-6-10 has no negative numbers, and gradients have; use 1-6-9 or bf16")
    return codec


def _common(settings: CompressionSettings) -> None:
    one_of(settings.errors, "errors", _ERRORS)
    object.__setattr__(settings, "start", whole(settings.start, "start", 0))
    flag(settings.feedback, "feedback")
