"""Averages gradients bucket by bucket by the settings: for DistributedDataParallel, and for a plan.

A bucket's parameters are exact, coded or of low rank. Each kind is one vector, so a bucket is one message,
plus the further ones for codes and factors. The next bucket's first message is under way meanwhile. What a
rank keeps for the next step is saved by it, and in checkpoints that any plan loads.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono import codecs
from unisono.codecs import Codec
from unisono.parallel.gradients import local
from unisono.parallel.mesh import PlanMesh

from .compression_state import CompressionState
from .exchange_queue import (
    ExchangeQueue,
    GradientMatrix,
    Steps,
    coded_mean,
    concurrently,
    exact_mean,
    finite,
    length,
    low_rank,
)
from .settings import Choice, CompressionSettings

Pair = tuple[Tensor, Tensor]  # a parameter, and its gradient in a bucket
_KEYS = ("error", "factor")


class Compression:
    """Averages gradients in fewer bytes; keeps the error, which is sent later.

    `PowerSGD.attach` and `Compressed.attach` make one for DDP, `Plan(compression=...)` has its own.

    Attributes:
        settings: the PowerSGD or Compressed.
        steps: the number of steps made.
        choices: parameter -> how its gradient is sent: a rank, a codec or "exact".
        scale: of a name, by which the gradient comes multiplied. Errors are kept without it, for it changes.
    Args:
        whole: each rank has whole gradients of parameters that are cut over the group.
        tentative: a step may be skipped; until `settle` the buffers from before it are kept, too.
    """

    def __init__(
        self,
        settings: CompressionSettings,
        named: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        *,
        whole: bool = False,
        tentative: bool = False,
    ) -> None:
        self.settings, self.steps = settings, 0
        self.scale: Callable[[str], float] = lambda _: 1.0
        self._tentative = tentative
        self._group, self._flight = group, ExchangeQueue()
        self._seed = settings.low_rank.seed
        trained = {name: value for name, value in named.items() if value.requires_grad}
        for name, value in trained.items():
            _check(name, local(value))
        options: dict[str, Any] = {"feedback": settings.feedback, "errors": settings.errors}
        self._held = {
            value: CompressionState(name, shape, settings.choice(name, shape), **options, seed=self._seed)
            for name, value in trained.items()
            for shape in [value.shape if whole else local(value).shape]
        }

    @property
    def choices(self) -> dict[str, Choice]:
        """How each parameter's gradient is sent: a rank, a codec or "exact"."""
        return {held.name: held.choice for held in self._held.values()}

    @property
    def active(self) -> bool:
        """Whether the next step is compressed: the exact steps at the beginning (`start=`) are over."""
        return self.steps >= self.settings.start

    def memory(self) -> int:
        """Bytes of the buffers that this rank keeps between steps."""
        return sum(held.nbytes for held in self._held.values())

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket of DistributedDataParallel: its communication hook; see `attach`.

        Futures are complete when the last bucket's call returns.
        """
        if bucket.index() == 0:
            self.reset()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        flat = bucket.buffer()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        label = f"bucket {bucket.index()}"
        self.begin(pairs, flat, label=label, done=lambda: future.set_result(flat))
        if bucket.is_last():
            self.finish()
        return future

    def begin(
        self,
        pairs: Sequence[Pair],
        flat: Tensor,
        *,
        label: str,
        kind: str = "compressed",
        exact: Sequence[Tensor] = (),
        unused: Container[Tensor] = (),
        done: Callable[[], object] = lambda: None,
    ) -> None:
        """Start to average the gradients of a bucket, in place.

        Args:
            pairs: parameters, and their gradients, which are parts of `flat`.
            kind, label: what a trace calls it.
            exact: further values in `flat`, which are always averaged exactly.
            unused: parameters without a gradient on this rank; see `settle`.
            done: called when the averages are complete.
        """

        def steps() -> Steps[None]:
            if self.active:
                yield from self._steps(pairs, exact, unused)
            else:
                yield from exact_mean(flat, self._group)
            done()

        self._flight.begin(f"up::{kind if self.active else 'gradients'}|{label}", steps())

    def is_exact(self, parameter: Tensor) -> bool:
        """Whether its gradient is sent as it is: also where it was frozen when this began."""
        held = self._held.get(parameter)
        return held is None or held.choice == "exact"

    def finish(self, *, step: bool = True) -> None:
        """Wait for the averages that were started. step: they end one."""
        self._flight.finish()
        self.steps += step

    def reset(self) -> None:
        """Clean up after a step that ended with an error."""
        self._flight.drop()
        self.settle(undo=True)

    def settle(self, *, undo: bool, of: Iterable[Tensor] | None = None) -> None:
        """End a tentative step. undo: it is skipped, and the buffers are those from before it; or only those
        `of` parameters that no rank has used, for which it has averaged nobody's gradient.
        """
        for held in filter(None, map(self._held.get, self._held if of is None else of)):
            held.settle(undo=undo)

    # ---- one bucket ----

    def _steps(
        self, pairs: Sequence[Pair], exact: Sequence[Tensor] = (), unused: Container[Tensor] = ()
    ) -> Steps[None]:
        ranked: list[tuple[CompressionState, Tensor]] = []
        coded: dict[Codec, list[tuple[CompressionState, Tensor]]] = {}
        as_is, scaled = [*exact], []
        for parameter, gradient in pairs:
            held = self._held.get(parameter)
            if held is None or held.choice == "exact":  # None: it was frozen when this began
                as_is.append(gradient)
                continue
            if self._tentative or parameter in unused:
                held.hold()
            if (scale := self.scale(held.name)) != 1:
                scaled.append((gradient.div_(scale), scale))
            sent = coded.setdefault(held.choice, []) if isinstance(held.choice, Codec) else ranked
            sent.append((held, gradient))
        parts = [self._exact(as_is)] if as_is else []
        parts += [self._coded(codec, those) for codec, those in coded.items()]
        parts += [self._low_rank(ranked)] if ranked else []
        yield from concurrently(*parts)
        for gradient, scale in scaled:
            gradient.mul_(scale)

    def _exact(self, gradients: list[Tensor]) -> Steps[None]:
        """One vector of all small parameters."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        yield from exact_mean(flat, self._group)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))

    def _coded(self, codec: Codec, sent: list[tuple[CompressionState, Tensor]]) -> Steps[None]:
        """One vector of all parameters with this codec; they do not share its blocks."""
        feedback = self.settings.feedback
        sizes = [length(gradient.numel(), codec, 1) for _, gradient in sent]
        flat = torch.zeros(length(sum(sizes), codec, self._group.size()))
        places = [slice(start, start + g.numel()) for start, (_, g) in zip(_starts(sizes), sent, strict=True)]
        for place, (held, gradient) in zip(places, sent, strict=True):
            flat[place].view(gradient.shape).copy_(gradient)
            held.add_error(flat[place])
        result, left = yield from coded_mean(flat, codec, self._group, feedback=feedback)
        keep = finite(result)
        for place, (held, gradient) in zip(places, sent, strict=True):
            gradient.copy_(result[place].view(gradient.shape))
            if left is not None and keep:
                held.keep(left[place], self.steps)

    def _low_rank(self, sent: list[tuple[CompressionState, Tensor]]) -> Steps[None]:
        """All matrices, in one vector of factors."""
        factors = self.settings.low_rank
        matrices = [GradientMatrix(held, gradient.reshape(held.shape[0], -1)) for held, gradient in sent]
        options: dict[str, Any] = {"seed": self._seed, "step": self.steps, "warm": factors.warm_start}
        yield from low_rank(matrices, factors.codec, self._group, **options)
        for (_, gradient), (_, values) in zip(sent, matrices, strict=True):
            if values.data_ptr() != gradient.data_ptr():  # it is not contiguous, and was copied
                gradient.copy_(values.view(gradient.shape))

    # ---- what is saved ----

    def buffers(self) -> dict[str, Tensor]:
        """Every buffer of this rank, by "parameter.error" and "parameter.factor"."""
        pairs = itertools.product(self._held.values(), _KEYS)
        found = {f"{held.name}.{key}": getattr(held, key) for held, key in pairs}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank. Each rank saves its own: error buffers differ.

        The tensors are the buffers themselves, as in an optimizer's state.
        """
        place = {"rank": self._group.rank(), "size": self._group.size()}
        return {**place, "steps": self.steps, "buffers": self.buffers()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this rank.

        Raises:
            ValueError: it is from another rank, another number of ranks, or another model.
        """
        place = (self._group.rank(), self._group.size())
        if (state["rank"], state["size"]) != place:
            raise ValueError(
                f"the state is of rank {state['rank']} of {state['size']}, this is rank {place[0]} of "
                f"{place[1]}: error buffers differ, each rank loads its own"
            )
        self.take(state["buffers"], state["steps"])

    def take(self, buffers: Mapping[str, Tensor], steps: int) -> None:
        """Load copies of saved buffers. Missing ones start empty; those that would never be sent are
        skipped, for example with feedback=False.

        Raises:
            ValueError: one has another shape or type, or its parameter is not here; nothing has changed.
        """
        self.check(buffers)
        for held, key in itertools.product(self._held.values(), _KEYS):
            found = buffers.get(f"{held.name}.{key}") if key == "factor" or held.keeps else None
            setattr(held, key, None if found is None else found.clone())
        self.steps = steps

    def fits(self, key: str, value: Tensor) -> bool:
        """Whether a saved buffer has the right shape and type."""
        try:
            self.check({key: value})
        except ValueError:
            return False
        return True

    def check(self, buffers: Mapping[str, Tensor]) -> None:
        """Check saved buffers; raises as `take` does."""
        known = {f"{held.name}.{key}": (held, key) for held in self._held.values() for key in _KEYS}
        for name, buffer in buffers.items():
            if name not in known:
                raise ValueError(f"the state has {name!r}, and no parameter here is called so")
            held, key = known[name]
            held.check(key, buffer)


def _starts(sizes: Iterable[int]) -> list[int]:
    return [0, *itertools.accumulate(sizes)][:-1]


def _check(name: str, part: Tensor) -> None:
    if part.dtype != torch.float32 or part.device.type != "cpu" or part.layout != torch.strided:
        raise TypeError(
            f"{name!r} is {part.dtype} on {part.device}; gradients are compressed of dense float32 "
            "parameters in CPU memory"
        )


# ---- in a checkpoint that any plan loads ----


LOST = "they begin empty, and what was still to be sent is lost"


class CompressionCheckpoint:
    """The state of compression that a rank of a plan saves and loads.

        errors.STAGE.ROW.TENSOR.NAME      each rank's own
        factors.STAGE.TENSOR.NAME         the same on all data ranks

    The error of a result is the mean of the error buffers over the data ranks. So a plan with another number
    of data ranks gives each of its ranks that mean: no error is lost, and none is counted twice. Matrices
    that the tensor axis, or shard=, cuts differently start with empty buffers, and a warning reports it.
    """

    def __init__(self, compression: Compression, mesh: PlanMesh) -> None:
        self._compression = compression
        self._stage, self._row, self._data = mesh.stage, mesh.row, mesh.plan.data
        self._tensor, self._cut = mesh.place("tensor"), mesh.plan.tensor
        replicas = mesh.plan.data // mesh.plan.shards
        if replicas > 1 and mesh.plan.shards > 1:  # they average the rows of a rank, and have no tensor axis
            self._row, self._data = mesh.place("replica"), replicas
            self._tensor, self._cut = mesh.place("shard"), mesh.plan.shards

    def tensors(self) -> dict[str, Tensor]:
        """This rank's buffers, by their names in a checkpoint."""
        found = {}
        for key, buffer in self._compression.buffers().items():
            name, _, kind = key.rpartition(".")
            if kind == "error":
                found[f"errors.{self._stage}.{self._row}.{self._tensor}.{name}"] = buffer
            else:
                found[f"factors.{self._stage}.{self._tensor}.{name}"] = buffer
        return found

    def wanted(self, described: Iterable[str]) -> list[str]:
        """The tensors of a checkpoint that this rank reads."""
        errors: dict[str, dict[int, dict[int, str]]] = {}  # name -> stage -> row -> key
        factors: dict[str, dict[int, str]] = {}
        cut = 0
        for key in described:
            kind, _, rest = key.partition(".")
            if kind == "errors":
                stage, row, tensor, name = rest.split(".", 3)
                cut = max(cut, int(tensor) + 1)
                if int(tensor) == self._tensor:
                    errors.setdefault(name, {}).setdefault(int(stage), {})[int(row)] = key
            elif kind == "factors":
                stage, tensor, name = rest.split(".", 2)
                if int(tensor) == self._tensor:
                    factors.setdefault(name, {})[int(stage)] = key
        if cut not in (0, self._cut):
            warnings.warn(
                f"the checkpoint's error buffers are of matrices in {cut} parts, this plan has {self._cut}: "
                + LOST,
                stacklevel=2,
            )
            return []
        found: list[str] = []
        for name, choice in self._compression.choices.items():
            if choice == "exact":
                continue
            rows = self._of_stage(errors.get(name, {}))
            same = set(rows) == set(range(self._data))
            found += [rows[self._row]] if same else rows.values()
            factor = self._of_stage(factors.get(name, {}))
            found += [factor] if factor else []
        return found

    def take(self, loaded: Mapping[str, Tensor]) -> None:
        """Store the loaded tensors. A factor of another rank (r) is not used; it starts again."""
        errors: dict[str, list[Tensor]] = {}
        buffers: dict[str, Tensor] = {}
        for key, value in loaded.items():
            kind, *_, name = key.split(".", 4 if key.startswith("errors.") else 3)
            if kind == "errors":
                errors.setdefault(name, []).append(value)
            elif self._compression.fits(f"{name}.factor", value):
                buffers[f"{name}.factor"] = value
        means = {f"{name}.error": self._mean(those) for name, those in errors.items()}
        found = {key: mean for key, mean in means.items() if self._compression.fits(key, mean)}
        if len(found) < len(means):
            warnings.warn(
                f"the checkpoint's error buffers are of matrices in other parts: {LOST}", stacklevel=2
            )
        buffers |= found
        self._compression.take(buffers, self._compression.steps)

    def _of_stage(self, found: dict[int, Any]) -> Any:
        """For a parameter of several stages, this stage's value; otherwise the first one's."""
        return found.get(self._stage, found[min(found)]) if found else {}

    def _mean(self, errors: list[Tensor]) -> Tensor:
        """One error buffer unchanged; the mean of several; in the format of this run."""
        dtype = torch.float32 if self._compression.settings.errors == "f32" else torch.int16
        if len(errors) == 1 and errors[0].dtype == dtype:
            return errors[0]
        values = [e if e.dtype == torch.float32 else codecs.decode(e, codecs.f169) for e in errors]
        mean = torch.stack(values).mean(0)
        return mean if dtype == torch.float32 else codecs.encode(mean, codecs.f169).view(torch.int16)
