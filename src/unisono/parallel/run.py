"""A run: a model, a plan and an optimizer, stepped batch by batch."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from unisono.engine.publishing.pieces import Piece
from unisono.torch.control_data import on_every_rank, on_rank_0
from unisono.torch_internals.assignments import version_of
from unisono.torch_internals.dtensor import handle_parts

from .arguments import check_gradients, two
from .batches import DataComparison, RankBatches, rows_of
from .checkpoint import CheckpointWriter, RunState, WeightAverage, newest, state_of, states
from .compression.reducer import CompressionCheckpoint
from .costs.collectives import Link
from .costs.forecast import ForecastCheck, StepForecast
from .failures import RunFailures, explained
from .generators import drawing, reseed, seed_of
from .gradients import local, scale_
from .layouts.shard import planned
from .loss_check import LossCheck, check_own_loss, not_a_mean
from .loss_weights import (
    SUM,
    GradientAccumulation,
    Weigh,
    cut_batch,
    ignored_by,
    is_mean,
    own_loss,
    resolved,
    share_of_rank,
)
from .model_changes import ModelChanges, TrainedFlags, check_trained, why_fixed
from .model_setup import ModelSetup
from .optimizer_scope import limits_of, refuse_closure
from .optimizers import (
    Optimizer,
    Parameters,
    check_groups,
    extend_optimizers,
    has_cut_parameters,
    make_optimizers,
    optimizers_of,
    step,
    steps_parts,
    tell_of_hooks,
)
from .outer_optimizer import OuterOptimizer
from .pipeline.runtime import StepInput
from .pipeline.schedule import Schedule, Span, Timeline
from .plan import Plan
from .precision import LossScaler, UnitScales
from .prediction import evaluating, joined, prediction, proved_schedule
from .profiled_step import CommunicationReport, ProfiledStep, write_trace
from .profiled_step import profile_step as watching
from .replicated_parameters import ReplicatedParameters, mark_of
from .sharded_parameters import own_units, reshard
from .swap import ParameterSwap
from .weights import (
    RunRanks,
    copy_weights,
    export,
    fused_layers,
    pieces_of,
    save_pretrained,
    weights_of,
    write_configuration,
)
from .written_parameters import WrittenParameters, raise_written


class Run:
    """A run; `parallelize` returns it.

    Attributes:
        model: the user's model; on a pipeline's rank the parameters of other stages are on the meta device.
        optimizer: the result of the caller's function; without parameters where this rank trains nothing.
        grad_norm: the global norm of the last step's gradients before clipping; None if the plan asks for
            none.
        steps: batches trained on, over all runs that were saved and loaded.
        epoch: the number of the present one, where `epochs` counts them.
        skipped: steps that overflowed under fp16 and changed nothing.
        swap: what swaps, under Plan(swap=...); its `waited_s` is of the last step.
        experts: which layers of experts are spread over ranks; print it. None without that axis.
        cut: how the tensor axis cuts the model, and why not the rest; print it. None without that axis.
        stages: what each stage of a pipeline runs and sends, if it is cut from the model's program; print it.
            None: there is no pipeline, or its stages are pieces.
        compression: the buffers of `Plan(compression=...)`; None without, and on one data rank.
    """

    def __init__(
        self,
        built: ModelSetup,
        plan: Plan,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Any] | None,
        weigh: Weigh = None,
        prediction: StepForecast | None = None,
    ) -> None:
        self.plan, self.model, self.mesh = plan, built.model, built.mesh
        self.scaler = LossScaler.of(plan.precision)
        self.grad_norm: float | None = None
        self.skipped = 0
        self._built, self._loss, self._own_loss = built, loss or own_loss, loss is None
        self._ignored = ignored_by(loss)
        self._weigh = resolved(weigh, self._ignored, built.model, loss)
        self._loss_check: LossCheck | None = None  # of the first step that cuts a loss which may be no mean
        if not (loss is None or self._weigh in ("rows", SUM) or is_mean(loss)):
            self._loss_check = LossCheck(loss, self._weigh, self._ignored, built.mesh.axes.device_type)
        self._accumulated = self._accumulation()
        self.compression = None if isinstance(built.units, ParameterSwap) else built.units.compression
        self._named = built.named
        self._overflowed: list[bool] = []  # under unit scales: that of the loss, of each unit
        self._scales = _scales_of_units(built, self.scaler) if plan.unit_scales else None
        if self.compression is not None:
            self.compression.scale = _factors(self.scaler, self._scales, self._accumulated)
        self.swap = built.swap
        self._trained = {name: value for name, value in self._named.items() if value.requires_grad}
        self._make, given = optimizer, Parameters(self._trained)
        group, limits = built.mesh.everyone.world, limits_of(built)
        self.optimizer, self._optimizers, self._closures = make_optimizers(optimizer, given, group, limits)
        self._told = not (limits.part or limits.units)  # hooks of a step see all parameters, or it is told
        self._fixed = why_fixed(built)
        self._flags = None if self._fixed else TrainedFlags(built)
        self.averages: weakref.WeakSet[Any] = weakref.WeakSet()  # of the weights; they learn of new ones
        self._cut = has_cut_parameters(self._trained.values())
        if self._cut:
            handle_parts()
        self.experts = built.experts
        self.cut = None if built.decision is None else built.decision.cut
        self.stages = built.programs.first
        self.steps, self._data = 0, DataComparison(self.mesh.everyone.world)
        self._check: ForecastCheck | None = None  # of the first steps with a forecast
        if prediction is not None and dist.get_rank() == 0:
            self._check = ForecastCheck(prediction, self.mesh.axes.device_type)
        self._asked = False  # a newcomer waits at some rank
        self._spans: list[Span] = []
        self._watched: ProfiledStep | None = None
        self._checkpoints = CheckpointWriter()
        self._statistics, self._written = built.statistics(self.mesh), WrittenParameters(built)
        self._waiting = list[Any]()  # the accumulated gradients after a step
        self._outside = ""  # what the program has done since the last step, and the plan would lose
        self._replaced = False  # other values are in place of the weights
        self._outer: OuterOptimizer | None = None
        if self.mesh.outer is not None:
            self._outer = OuterOptimizer(self._trained, built.statistics(self.mesh.outer), self.mesh)
            self.compression = self._outer.compression
        self.epoch = 0
        self._failures = self._watch()
        self._changes = ModelChanges.of(built.model, plan, built.programs.first)

    def _watch(self) -> RunFailures:
        return RunFailures(self.mesh.everyone.world, self._groups())

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the number of each epoch that is still to come, up to `count`.

        A run that was loaded begins with the epoch in which it was saved.
        """
        while self.epoch < count:
            yield self.epoch
            self.epoch += 1

    def shard(self, loader: Iterable[Any]) -> RankBatches:
        """Yield this rank's rows of each batch of `loader`, whose batches are those of all ranks together."""
        return RankBatches(loader, self.mesh.everyone.row, self.plan.data, self._data)

    def _groups(self) -> list[Any]:
        return self._built.groups

    def step(self, batch: tuple[Any, Any], *, update: bool = True, watch: bool = False) -> float:
        """Train on this rank's part of a batch: forward, backward, communication, optimizer.

        Args:
            batch: (inputs, targets). Ranks of one pipeline and of one tensor group give the same rows.
            update: False, on all ranks: only add to the gradients. The next step with an update trains on all
                these batches as on one, and counts as one step.
            watch: run under PyTorch's profiler, for `explain` and `trace`. Such a step is slower.
        Returns:
            The mean loss over the rows of all ranks, the same on every rank. Under Plan(local_steps=...) over
            the rows of this replica only.
        Raises:
            ValueError: ranks that should have the same rows have different numbers of them. What was
                accumulated stays.
            RuntimeError: the run cannot be used any more; the text names the rank and its error.
        """
        if not isinstance(update, bool):
            raise TypeError(f"step: update is {update!r}, expected bool")
        if torch.is_inference_mode_enabled():
            raise RuntimeError("step within torch.inference_mode() has no gradients: call it outside")
        self._check_own("step")
        if self._closures is not None:
            refuse_closure(self._closures)
        if watch:
            mean, self._watched = watching(lambda: self._train(batch, update=update))
            return mean
        if self._check is not None and not self._check.done and update and not self._accumulated.calls:
            return self._check.step(lambda: self._train(batch, update=True))
        return self._train(batch, update=update)

    def _train(self, batch: tuple[Any, Any], *, update: bool) -> float:
        if self.swap is not None:
            self.swap.waited_s = 0.0
        drawn = f"step, call {self._accumulated.calls}" if self._accumulated.calls else "step"
        self._built.hooks.check_step(update=update)
        with self._call(), self._drawing(drawn):
            self._accumulated.check("step")
            if not self._accumulated.calls:
                self._clear()  # what a backward outside a step has left
            made, work, total = self._work(batch, self._accumulated, train=True, update=update)
            with self._gradients_end(update=update):
                self._written.begin()
                loss, count, self._spans = self._built.runtime.run(made, work)
                wrote, lost = self._written.written(len(work.micros) * (2 if self.plan.recompute else 1))
                if update:
                    if self._scales is not None:
                        self._overflowed = self._scales.unify(self._trained)
                    self._built.complete(self._trained, self.scaler.scale)
                known = None if work.counts else total
                mean: float = self._conclude(loss, count, known, wrote=wrote, lost=lost, update=update)
        self._waiting = [] if update else self._gradients()
        return mean

    def backward(
        self,
        loss: Tensor,
        *,
        rows: float | None = None,
        also: Sequence[Run] = (),
        retain_graph: bool = False,
    ) -> None:
        """Add the gradients of a loss that the caller computed from `run.model(...)`. All ranks call this.

        Afterwards each parameter's `grad` is that of the mean over all ranks' losses, the same on every rank,
        and times `scaler.scale` under fp16. Further calls add to it, as in PyTorch, until `update`; the first
        one after an update drops what was there. An input gets the gradient of this rank's loss alone.

        Args:
            loss: one value, the mean over this rank's rows.
            rows: over how many rows, or labels, it is a mean. Ranks weigh by them, so that the result is the
                mean over all rows, as in one process. None: all ranks weigh the same, as in DDP.
            also: other runs that this loss trains, too, such as its learned weights; each takes an `update`.
            retain_graph: another backward of this graph follows.
        Raises:
            ValueError: this plan has its backward in `step` alone; gradients of `step(batch, update=False)`
                wait; the loss comes to no parameter of this run, or to one of no run; without `rows`, the
                last forwards of the ranks had different numbers of rows.
            Mismatch: ranks call different things.
        """
        with contextlib.ExitStack() as stack:
            weights = [stack.enter_context(run._gathering(loss, rows)) for run in (self, *also)]
            if also and any(run.scaler.active for run in (self, *also)):
                raise ValueError("backward: also= with precision='fp16', where each run scales its own loss")
            torch.autograd.backward(loss, torch.full_like(loss, weights[0]), retain_graph=retain_graph)

    def update(self, closure: Callable[[], object] | None = None) -> Tensor:
        """Update the parameters by the gradients of `backward`, which go then. All ranks call this.

        Clips as the plan says, skips an overflow under fp16, and counts one step.

        Args:
            closure: computes the loss and calls `backward`, for optimizers that need it, such as LBFGS. Each
                evaluation begins without gradients.
        Returns:
            The mean loss of all ranks, weighed as in `backward` and added up over its calls; of a closure's
            first evaluation. f64 [], the same on every rank. Reading it waits for the device; the call itself
            does so for `Plan(clip=...)`, fp16 and a closure.
        Raises:
            ValueError: no `backward` came before.    TypeError: an optimizer needs a closure.
            Mismatch: ranks call different things.
        """
        self.plan.check_own_loop()
        self._check_own("update")
        if closure is None and self._closures is not None:
            name = type(self._closures).__name__
            raise TypeError(f"update: {name}.step needs a closure: run.update(closure)")
        losses: list[Tensor] = []
        with self._call():
            if self._closures is not None:
                self._step(1.0, lambda: self._evaluated(closure, losses))
            elif closure is not None:
                self._clear()
                closure()
            self._accumulated.check("update")
            with self._gradients_end(update=True):
                lost = self._strayed()
                reshard(self._built.units.root)  # a forward may have gathered what was then
                wrote = self._written.is_early()  # ranks then compare what they have
                loss = self._accumulated.lost / self.plan.data
                mean: Tensor = self._conclude(loss, 0.0, 1.0, wrote=wrote, lost=lost, stepped=bool(losses))
        return next(iter(losses), mean)

    def _evaluated(self, closure: Any, losses: list[Tensor]) -> Tensor:
        """Call the caller's closure, without gradients of earlier ones; return and note all ranks' loss."""
        self._clear()
        with torch.enable_grad():
            closure()
        self._accumulated.check("update")
        numbers, _ = self._agree(self._accumulated.lost / self.plan.data, 0.0, changes=[], norm=True)
        factor = self._factor(numbers[1].item() if self._asks_norm else None, 1.0)
        scale_(self._trained.values(), factor or 1.0)  # none overflows: no closure goes with fp16
        losses.append(numbers[0])
        return numbers[0]

    @contextlib.contextmanager
    def _gathering(self, loss: Tensor, rows: float | None) -> Iterator[float]:
        """A backward of the caller's, within the block; yields what the loss is multiplied by."""
        self.plan.check_own_loop()
        self._check_own("backward")
        with self._call():
            self._accumulated.check("backward")
            self._built.hooks.check_step(update=not self._accumulated.calls)
            check_own_loss(loss)
            weight, changed = share_of_rank(rows, self._written.rows, self.mesh, changed=self._is_changed())
            if changed:
                self._check_outside()
                self._follow_frozen()
            if not self._accumulated.calls:
                self._clear()
            before = self._gradients()
            with self._gradients_end(update=False), self._built.runtime.backward():
                yield weight * self.scaler.scale
                if all(map(_same, before, self._gradients())):
                    raise ValueError(
                        "backward: the loss comes to no parameter of this run. Call backward of the run "
                        "whose model has computed it; run.backward(loss, also=[other]) trains both"
                    )
            self._built.complete(self._trained, self.scaler.scale)
            self._accumulated.add_loss(loss.detach().double() * weight)

    @contextlib.contextmanager
    def _gradients_end(self, *, update: bool) -> Iterator[None]:
        """After the block the gradients go: with an update, and with an error, to which no step may add."""
        kept = False
        try:
            yield
            kept = not update
        except BaseException:
            self._built.runtime.forget()
            raise
        finally:
            self._written.end()
            if not kept:
                self._clear()

    def _conclude(
        self, loss: Tensor | float, count: float, total: float | None, *, update: bool = True,
        wrote: bool = False, lost: str = "", stepped: bool = False,
    ) -> Any:  # fmt: skip
        """Agree with all ranks on what the gradients come from, and update. Return the mean loss, that of the
        caller's loop on the device.

        Args:
            total: by what all ranks divide; None: by the sum of `count`.
            wrote, lost: see `WrittenParameters.written`.
            stepped: the optimizers have stepped.
        """
        own = self._accumulated.own_loop
        changed = self._statistics.changed()
        twice = self._statistics.lasting(changed, twice=True)
        problem, tried = ("", False) if own else self._loss_problem()
        changes = [any(changed), twice is not None or bool(lost), self._is_asked(), update, not update, wrote]
        norm = update and not stepped
        used = self._built.units.buckets if update and not self.plan.uneven_use else ()
        changes += [bool(problem), tried, *self._overflowed]
        numbers, moved = self._agree(loss, count, changes=changes, norm=norm, mark=mark_of(used))
        for bucket in used if moved[-1] else ():
            bucket.check_used()
        if not own:
            self._check_loss(problem, found=moved[6], tried=moved[7])
        if moved[1]:
            raise_written(twice, lost)
        if moved[3] and moved[4]:
            raise ValueError("step: update is True on some ranks and False on others")
        self._asked, self._overflowed = moved[2], moved[8:-1]
        values = numbers.tolist() if not own or (norm and self._asks_norm) else [0.0] * 3
        count = values[2] if total is None else total
        mean = numbers[0] if own else values[0] * self._accumulated.ratio(count)
        ratio = self._accumulated.add(count)
        if moved[0]:
            self._statistics.synchronize(changed)
        if moved[5]:
            self._written.check_ranks(own_loop=own)
        if update:
            if not stepped:
                self._update(values[1] if self._asks_norm else None, ratio)
            if self._outer is not None and self._outer.due(self.steps + 1):
                self._outer.meet()
            self.steps += 1
        return mean

    def _accumulation(self) -> GradientAccumulation:
        return GradientAccumulation(sums=self._weigh == SUM)

    def _is_asked(self) -> bool:
        """Whether a newcomer waits at this rank."""
        return False

    @evaluating()
    def evaluate(self, batch: tuple[Any, Any]) -> float:
        """Return the mean loss on a batch, as `step` does, and change nothing. Call `run.model.eval()`
        first. A rank may have no rows: 0 of each tensor.
        """
        with self._call(), self._drawing("evaluate"):
            alone = self._accumulation()
            made, work, total = self._work(batch, alone, train=False)
            loss, count, _ = self._built.runtime.run(made, work)
            problem, tried = self._loss_problem()
            mean, count, moved = self._agree_unchanged(loss, count, [bool(problem), tried])
            self._check_loss(problem, found=moved[0], tried=moved[1])
            return mean * alone.ratio(count if work.counts else total)

    def explain(self, link: Link | None = None) -> CommunicationReport:
        """Return every collective of the last watched step on this rank: where, why, bytes, predicted and
        measured seconds.

        Args:
            link: the prices behind the predicted seconds.
        Raises:
            RuntimeError: no step was watched.
        """
        report = CommunicationReport(self._seen().calls(self.mesh, link or Link(), self.experts))
        report.notes = self._built.programs.notes
        return report

    def trace(self, path: str | Path) -> None:
        """Write the last watched step of all ranks for ui.perfetto.dev. All ranks call this; rank 0
        writes.
        """
        write_trace(self._seen(), Path(path))

    def communication_share(self) -> float:
        """Return the share of the last watched step in which this rank was in a collective or a message."""
        return self._seen().share()

    def _seen(self) -> ProfiledStep:
        if self._watched is None:
            raise RuntimeError("no step was watched; call run.step(batch, watch=True) on all ranks first")
        return self._watched

    def timeline(self) -> Timeline:
        """Return when each action of the last step ran, on all ranks of this pipeline. All its ranks call
        this.
        """
        group = self.mesh.group("pipeline")
        gathered = on_every_rank(lambda: self._spans, group)
        return Timeline(
            f"{self.plan.schedule}, measured", self.plan.pipeline, [s for spans in gathered for s in spans]
        )

    @evaluating()
    def predict(self, inputs: Any) -> Any:
        """Return what the model returns for this rank's rows, and change nothing. All ranks call this.

        Call `run.model.eval()` first. In a pipeline every rank of it gets the result. The results of several
        micro-batches are joined along dimension 0, which counts the rows.

        Raises:
            ValueError: the result of several micro-batches cannot be joined.
        """
        with self._call(), self._drawing("predict"):
            made, work, outputs, other = prediction(inputs, self._built, changed=self._is_changed())
            if other:
                self._check_outside()
                self._follow_frozen()
            self._confirm(work.micros, loss=False)
            self._built.runtime.run(made, work)
            result = joined(outputs, self._built, rows_of([inputs]))
            self._agree_unchanged(0.0, 0.0, [])
            return result

    def weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, value) of all parameters and persistent buffers. All ranks iterate to the end.

        Values are whole and in CPU memory on rank 0, one after the other, and None on other ranks. Names and
        shapes are those of the model before `parallelize`.

        Raises:
            ValueError: replicas that train on their own have not just met, or gradients wait for an update.
        """
        self._check_settled("weights")
        with self._state() as state:
            reshard(self._built.units.root)
            yield from weights_of(self._built, state.value)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as plain PyTorch has it, on rank 0; empty on others. All ranks call this."""
        found = {name: value for name, value in self.weights() if value is not None}
        again = {path: found[name] for path, name in self._built.names.items() if name in found}
        return again | {name: value for name, value in found.items() if name not in again}

    def published(self) -> tuple[Callable[[], dict[str, list[Piece]]], RunRanks]:
        """What `unisono.publish` and `unisono.subscribe(into=)` ask a run for: its pieces, and its ranks.

        Raises:
            ValueError: under Plan(swap=...); or see `weights`.
        """
        if self.swap is not None:
            raise ValueError("publish: under Plan(swap=...) the weights are not in memory between steps")

        def pieces() -> dict[str, list[Piece]]:
            self._check_settled("publish")
            return pieces_of(self._built, lambda parameter: parameter.data)

        return pieces, RunRanks(self._built)

    def taken(self) -> None:
        """Take note that a subscription has filled the weights."""
        reshard(self._built.units.root)
        self._written.follow()

    def copy_to(self, model: nn.Module | None = None) -> None:
        """Give a plain model these weights and persistent buffers, such as one to generate text with.

        All ranks call this; each may pass a model of its own, which is like that before `parallelize`, and
        of any floating type. Its memory is all that a rank needs, with one tensor more.

        Args:
            model: None: this rank wants none.
        Raises:
            TypeError: it is no module.
            ValueError: it has other parameters than the run's, or none with memory; or see `weights`.
        """
        if not (model is None or isinstance(model, nn.Module)):
            raise TypeError(f"copy_to: model is a {type(model).__name__}, expected an nn.Module, or None")
        self._check_settled("copy_to")
        copy_weights(self.weights(), model, self._built)

    def export(self, folder: str | Path, *, shard_bytes: int = 5_000_000_000) -> None:
        """Write safetensors in Hugging Face's layout, with the model's configuration if it has one.

        All ranks call this; rank 0 writes, and holds at most `shard_bytes` at a time. Files of an earlier
        model in `folder` go. Needs the package `safetensors`.

        Raises:
            RuntimeError: rank 0 could not write; on all ranks.
            ValueError: see `weights`.
        """
        place = Path(folder)
        self._check_settled("export")
        export(self.weights(), place, _bytes(shard_bytes), lambda: write_configuration(self.model, place))

    def save_pretrained(self, folder: str | Path, *, shard_bytes: int = 5_000_000_000) -> None:
        """Write what the model's own `save_pretrained` writes, under any plan; `from_pretrained` reads it.

        A model of `transformers` gives its weights and configuration, a `PeftModel` its adapters only. All
        ranks call this; rank 0 writes, and holds at most `shard_bytes` at a time, or all adapters.

        Raises:
            RuntimeError: rank 0 could not write; on all ranks.
            ValueError: it is a model of another kind, see `export`; or see `weights`.
        """
        self._check_settled("save_pretrained")
        size = _bytes(shard_bytes)
        save_pretrained(self._built, self.weights, Path(folder), size)

    def save(
        self,
        folder: str | Path,
        *,
        keep: int | None = None,
        background: bool = False,
        also: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint to `folder/step-N`, which all ranks see. All ranks call this.

        Args:
            keep: whole checkpoints of this step and earlier ones to leave, the newest, 1 at least; None: all.
            background: return once the state is copied; `wait` waits for the rest, and so does the next save.
            also: name -> an object whose `state_dict()` is plain data, equal on all ranks: a learning-rate
                scheduler, or what `shard` returned; or an `EMA`.
        Raises:
            TypeError: the state of such an object is more than numbers, strings, lists, tuples and dicts.
            RuntimeError: a rank could not write; it says which, and why.
            OSError: rank 0 could not make the folder, or give it its name.
            ValueError: replicas that train on their own have not just met, or gradients wait for an update.
        """
        self._check_settled("save")
        self._check_own("save")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"save: keep is {keep!r}; it must be a number of checkpoints, or None for all")
        kept = {name: states(name, thing) for name, thing in (also or {}).items()}
        with self._statistics.saved(), self._state(also) as state:
            state.about["also"] = kept
            self._checkpoints.save(state, Path(folder), self.steps, keep=keep, background=background)

    def _check_settled(self, what: str) -> None:
        """Refuse what needs the weights after an update, the same on all replicas, where there are none."""
        if self._accumulated.calls:
            raise ValueError(
                f"{what}: {self._accumulated.calls} calls of {self._accumulated.of} wait for an update, "
                "and no checkpoint has gradients. Call it after the update"
            )
        if self._outer is not None and not self._outer.due(self.steps):
            raise ValueError(
                f"{what}: after {self.steps} steps each replica has weights of its own. Call it after a "
                f"meeting: the next one ends step {self._outer.next_meeting(self.steps)}"
            )
        self._is_changed()
        self._check_outside()

    def _check_own(self, what: str) -> None:
        """Refuse what needs the run's own weights while others are in their place."""
        if self._replaced:
            raise RuntimeError(f"{what}: averages are in place of the weights. Call it after EMA.applied()")

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """This rank's parts of all its parameters, as an optimizer has them, by their names in the model."""
        return self._named

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """This rank's parts of the parameters that are trained, by their names in the model."""
        return self._trained

    @contextlib.contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Have other values in place of the weights, for evaluation. All ranks call this.

        Args:
            values: name -> this rank's part of a parameter, as `trained` has it.
        Raises:
            ValueError: gradients wait for an update.
            RuntimeError: other values are in place already.
        """
        self._check_settled("EMA.applied")
        self._check_own("EMA.applied")
        kept = {name: local(self._trained[name].detach()).clone() for name in values}
        self._put(values)
        self._replaced = True
        try:
            yield
        finally:
            self._put(kept)
            self._replaced = False

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        reshard(self._built.units.root)  # what was gathered is older
        for name, value in values.items():
            local(self._trained[name]).copy_(value)

    def wait(self) -> None:
        """Wait until a save in the background is done; raise its error."""
        self._checkpoints.wait()

    def load(self, folder: str | Path, *, also: Mapping[str, Any] | None = None) -> None:
        """Continue from a checkpoint that any plan saved: a `step-N`, or the newest whole one in a folder of
        them.

        Args:
            also: name -> an object that was saved by this name; its `load_state_dict` is called.
        Raises:
            FileNotFoundError: there is none.
            ValueError: it is of another model, or damaged. Then load another one: parameters may be mixed.
        """
        self._load(Path(folder), also or {})

    def _load(self, folder: Path, also: Mapping[str, Any]) -> Path:
        """Load what rank 0 takes for the newest checkpoint; return its folder."""
        self._check_own("load")
        self.wait()  # a save deletes older ones
        found = on_rank_0(lambda: newest(folder), self.mesh.everyone.world)
        if self._accumulated.calls:
            self._drop()
        self._follow_frozen()
        left = on_every_rank(lambda: self._take_checkpoint(found, also), self.mesh.everyone.world)
        if nobodys := sorted(set.intersection(*map(set, left))):
            raise ValueError(
                f"{found} has {len(nobodys)} parameters that this model does not have, such as "
                f"{nobodys[0]!r}: it is of another model"
            )
        return found

    def _take_checkpoint(self, folder: Path, also: Mapping[str, Any]) -> list[str]:
        """Returns: the names of the saved parameters that this rank has not taken."""
        with self._state(also) as state:
            left = state.load(folder, beside=also)
        self._take_numbers(state.about)
        self._written.follow()
        for name, thing in also.items():
            thing.load_state_dict(state_of(state.about["also"][name]))
        return sorted(left)

    def _take_numbers(self, about: Mapping[str, Any]) -> None:
        """Take the run's own numbers from a state."""
        self._built.seed = about.get("seed", self._built.seed)
        self._statistics.note()
        self.steps, self.skipped = about["steps"], about["skipped"]
        self.epoch = about.get("epoch", 0)
        if self.scaler.active and about["scale"] != 1.0:
            self.scaler.scale, self.scaler.succeeded = about["scale"], about["succeeded"]
        saved = about.get("unit_scales", [])
        if self._scales is not None and len(saved) == len(self._scales.units):
            for one, (scale, succeeded) in zip(self._scales.units, saved, strict=True):
                one.scale, one.succeeded = scale, succeeded
        if self.compression is not None:  # it counts what it has sent
            self.compression.steps = self.steps if self._outer is None else self._outer.meetings(self.steps)

    def close(self) -> None:
        """End swapping: the parameters come back into memory. Without Plan(swap=...) nothing happens."""
        if self.swap is not None:
            self.swap.close()

    @contextlib.contextmanager
    def _state(self, also: Mapping[str, Any] | None = None) -> Iterator[RunState]:
        about: dict[str, Any] = {"steps": self.steps, "skipped": self.skipped, "seed": self._built.seed}
        about |= {"epoch": self.epoch, "scale": self.scaler.scale, "succeeded": self.scaler.succeeded}
        units = [] if self._scales is None else self._scales.units
        about["unit_scales"] = [[one.scale, one.succeeded] for one in units]
        kept = (
            None if self.compression is None else CompressionCheckpoint(self.compression, self.mesh.everyone)
        )
        seen: contextlib.AbstractContextManager[dict[nn.Parameter, Tensor]] = contextlib.nullcontext({})
        if self.swap is not None:
            seen = self.swap.mapped(*self._optimizers)
        with seen as elsewhere:
            root, buffers = self._built.units.root, self._built.buffers
            replica = 0 if self._outer is None else self.mesh.everyone.place("replica")
            options: dict[str, Any] = {"replica": replica, "outer": self._outer}
            options["fused"] = fused_layers(self.model)
            beside = {name: thing for name, thing in (also or {}).items() if isinstance(thing, WeightAverage)}
            options["averages"] = {name: thing.tensors() for name, thing in beside.items()}
            yield RunState(root, self._named, buffers, self._optimizers, about, elsewhere, kept, **options)

    # ---- one step ----

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """A call that all ranks make. An exception here affects all of them."""
        self._failures.begin()
        try:
            if self.swap is not None:
                self.swap.check()
            if self._flags is None:
                replicas = self._outer is None and isinstance(self._built.units, ReplicatedParameters)
                check_trained(self._named, self._trained, self._fixed, follows=replicas)
            with planned(self.plan, self.mesh):
                yield
        except BaseException as error:
            interrupted = self._built.runtime.interrupted
            if interrupted:
                self._clear()  # the next call drops the gradients
            named = explained(error, self.model, self.plan)
            if isinstance(error, Exception):
                left = self.plan.pipeline > 1 and interrupted  # messages that no stage received
                self._failures.resolve(named or error, together=not left)
            if named is not None:
                raise named from error
            raise

    @property
    def _draws(self) -> bool:
        """Whether calls have seeds of their own. Elastic runs do: their number of ranks must not show."""
        return self.plan.ranks > 1 or bool(self.plan.elastic)

    def _drawing(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Seed what the model draws in this call; one rank draws as the caller's program does."""
        if not self._draws:
            return contextlib.nullcontext()
        if self._built.region is not None:
            self._built.region.forget()
        seed = seed_of(self._built.seed, what, self.steps, *self.mesh.everyone.draws)
        return drawing(seed, self.mesh.axes.device_type)

    def _work(
        self, batch: tuple[Any, Any], into: GradientAccumulation, *, train: bool, update: bool = True
    ) -> tuple[Schedule, StepInput, float]:
        """The schedule, its input, and the rows or labels by which its losses are divided."""
        inputs, targets = two(batch, own_loss=self._own_loss)
        if train:
            check_gradients(inputs, self.plan)
        several = into.calls > 0 or not update
        given = inputs, targets
        options: Any = {"several": several, "changed": self._is_changed(), "forward": not train}
        options["data"] = self._data if self.plan.ranks > self.plan.data else None  # who shares rows
        options["read"] = self._built.programs.read(self._loss)
        cut = cut_batch(given, self._weigh, self._ignored, self.mesh, **options)
        if cut.changed:
            self._check_outside()
            self._follow_frozen()
        micros, weights = cut.micros, into.weights(cut)
        if self._built.compared is not None:
            confirm = partial(self._confirm, loss=False)
            alone = proved_schedule(self.plan, 1)
            self._built.compared.run(self.model, self._built.runtime, alone, confirm, inputs, self.mesh)
            self._built.compared = None
        self._confirm(micros)
        if not all(weights):  # whose loss counts nothing, and is not computed
            self._confirm(
                [micro for micro, weight in zip(micros, weights, strict=True) if not weight], loss=False
            )
        # fully_shard averages over the data ranks; weights are shares of the sum
        counts = self._weigh == "counted"
        factor = self.scaler.scale * self.mesh.plan.data
        loss: Any = self._loss
        if self._loss_check is not None and (
            several or self.plan.micro_batches > 1 or self.mesh.plan.data > 1
        ):
            loss = self._loss_check
            loss.asked = True
            if self._built.programs.axis is not None:
                loss = self._see_loss(micros[0], loss)
        work = StepInput(micros, weights, loss, factor, train, counts, update)
        if self._built.trial is not None:
            self._built.trial.run(given if rows_of([*given]) else micros[0], work.mean, self.mesh)
            self._built.trial = None
        return proved_schedule(self.plan, len(micros)), work, cut.total

    def _see_loss(self, micro: tuple[Any, Any], check: LossCheck) -> Any:
        """Show a loss the whole output of a micro-batch, which it gets nowhere under a context axis."""
        seeing = StepInput(
            [micro], [1.0], check, train=False, counts=self._weigh == "counted", recorded=False
        )
        with torch.no_grad(), drawing(self._built.seed, self.mesh.axes.device_type):
            self._confirm([micro], loss=False)
            self._built.runtime.run(proved_schedule(self.plan, 1), seeing)
        return self._loss

    def _loss_problem(self) -> tuple[str, bool]:
        """Why the loss is no mean of its parts; "": it is. And whether this rank could try."""
        check = self._loss_check
        return ("", False) if check is None else (check.problem(), check.rows > 1)

    def _check_loss(self, problem: str, *, found: bool, tried: bool) -> None:
        """Raise, on all ranks, for a loss that is no mean. Where no rank has two rows, try those of all."""
        check = self._loss_check
        if check is None or not check.asked:
            return
        if not found and not tried and not self.plan.elastic:  # whose newcomers would ask alone
            every = on_every_rank(lambda: check.tensors() if self.mesh.counts else [], self.mesh.world)
            seen = [one for some in every for one in some]
            problems = on_every_rank(lambda: check.problem(seen), self.mesh.world)
            problem = next(filter(None, problems), "")
        if problem or found:
            raise ValueError(not_a_mean(problem))
        if tried:
            self._loss_check = None

    def _is_changed(self) -> bool:
        """Whether the caller has changed parameters of this rank since the last call, or what is trained."""
        self._outside = self._written.outside() or self._strayed()
        waits = self._accumulated.calls > 0 and not self._accumulated.own_loop
        if waits and not all(map(_same, self._waiting, self._gradients())):
            self._outside = (
                "gradients that wait for an update after step(batch, update=False) were changed since: by a "
                "backward outside the step, or zero_grad(). All of them are dropped. Do that after a step "
                "with an update, or take gradients by torch.autograd.grad"
            )
        return bool(self._outside) or (self._flags is not None and bool(self._flags.changed()))

    def _strayed(self) -> str:
        """Why gradients of `backward` that wait are wrong now; empty: they are not."""
        units = self._built.units
        stray = isinstance(units, ReplicatedParameters) and self._accumulated.own_loop and units.strayed()
        return STRAY if stray else ""

    def _gradients(self) -> list[tuple[Any, int]]:
        """The gradients of this rank, and how often each was written."""
        found = [*(value.grad for value in self._trained.values()), *self._built.units.waiting()]
        return [(one, version_of(one) if isinstance(one, Tensor) else 0) for one in found]

    def _check_outside(self) -> None:
        """Raise, on all ranks, what one of them cannot follow. All ranks call this."""
        told = on_every_rank(lambda: self._outside, self.mesh.world)
        self._outside = ""
        if any(told):
            self._drop()
            raise RuntimeError(next(filter(None, told)))

    def _drop(self) -> None:
        self._clear()
        self._built.runtime.forget()

    def _follow_frozen(self) -> None:
        """Train what requires gradients now. All ranks call this between two steps.

        Raises:
            ValueError: ranks differ; gradients wait for an update; or no optimizer can take a parameter.
        """
        if self._flags is None:
            return
        flags = self._flags.changed()
        new = {name: self._named[name] for name, flag in flags.items() if flag and name not in self._trained}
        made, problem = self._optimizers_for(new)
        if not self._flags.agreed(self.mesh, problem):
            return
        for average in self.averages:
            average.begin(new)
        extend_optimizers(self._optimizers, made)
        self._flags.take(flags)
        self._trained |= new
        self._cut = has_cut_parameters(self._trained.values())
        self._built.follow_frozen(self._flags.everywhere)

    def _optimizers_for(self, new: Mapping[str, nn.Parameter]) -> tuple[list[torch.optim.Optimizer], str]:
        """What the caller's function makes of parameters that no optimizer has, and what is wrong."""
        if self._accumulated.calls:
            what = "parameters were frozen or unfrozen while gradients wait for an update"
            return [], f"{what}. Do that after a step with an update"
        has = {p for one in self._optimizers for group in one.param_groups for p in group["params"]}
        if not has <= set(self._named.values()):
            what = "the optimizer got parameters that are not this rank's"
            return [], f"{what}. Take them from run.parameters, by their names"
        left = Parameters({name: value for name, value in new.items() if value not in has})
        try:
            made = [] if left.nothing else optimizers_of(self._make(left), left, swap=False)
            check_groups(self._optimizers, made, left)
        except (KeyError, TypeError, ValueError) as error:
            return [], f"optimizer= of parameters that are trained from now on: {error}"
        return made, ""

    def _confirm(self, micros: Sequence[tuple[Any, Any]], *, loss: bool = True) -> None:
        """Prove the cuts for these micro-batches; loss: the programs end with that of the run."""
        if self._changes is not None:
            self._changes.check()
        self._built.programs.confirm(micros, self._loss if loss else None)

    @property
    def _asks_norm(self) -> bool:
        return self.plan.clip is not None or self.scaler.active

    def _agree(
        self, loss: Tensor | float, count: float, *, changes: list[bool], norm: bool, mark: int = 0
    ) -> tuple[Tensor, list[bool]]:
        """Sum over all ranks the loss, the squared norm where it is asked for, the count: f64 [3], on the
        device. Also return whether some rank has these changes, and whether their marks differ.

        One message; two where the host may send its own, so that reading it does not wait for the device.
        """
        device, host = torch.device(self.mesh.axes.device_type), self.mesh.control
        mine = [0.0, 0.0, 0.0, mark, mark * mark, *map(float, changes)]
        flags = torch.tensor(mine, dtype=torch.float64, device=host)
        both = flags if host.type == device.type else flags.new_zeros(3, device=device)
        if self.mesh.counts:
            both[0], both[2] = loss, count
        if norm and self._asks_norm:
            both[1] = self._built.squared_norm(self._trained)
        with record_function("up::agree|step"):
            dist.all_reduce(both, group=self.mesh.world)
            if flags is not both:
                dist.all_reduce(flags, group=self.mesh.world)
        total, squares, *moved = flags[3:].tolist()
        apart = self.mesh.plan.ranks * squares != total * total  # these sums are exact
        return both[:3], [*(one > 0 for one in moved), apart]

    def _agree_unchanged(
        self, loss: Tensor | float, count: float, changes: list[bool]
    ) -> tuple[float, float, list[bool]]:
        """The same after an evaluation, which may change no buffer that a checkpoint has."""
        changed = self._statistics.changed()
        name = self._statistics.lasting(changed)
        changes = [name is not None, *changes]
        numbers, (wrong, *moved) = self._agree(loss, count, norm=False, changes=changes)
        if wrong:
            self._statistics.synchronize(changed)
            what = f"buffer {name!r}" if name else "a buffer of another rank"
            raise RuntimeError(
                f"the evaluation has changed {what}. Call run.model.eval() before run.evaluate"
            )
        mean, _, total = numbers.tolist()
        return mean, total, moved

    def _factor(self, squared: float | None, ratio: float) -> float | None:
        """What unscales and clips all gradients; None: the step is skipped, some rank overflowed.

        Args:
            ratio: all gradients are to be multiplied by it.
        """
        if squared is None:
            return ratio
        overflowed = self.scaler.active and (not math.isfinite(squared) or any(self._overflowed))
        scale = self.scaler.scale
        if self._scales is not None:
            self._scales.update(self._overflowed)
        elif self.scaler.active:
            self.scaler.update(overflowed)
        self.grad_norm = math.sqrt(squared) / scale * ratio if squared >= 0 else squared
        if overflowed:
            self.skipped += 1
            return None
        clip = self.plan.clip
        return ratio / scale * (1.0 if clip is None else min(1.0, clip / (self.grad_norm + 1e-6)))

    def _update(self, squared: float | None, ratio: float) -> None:
        """Unscale, clip, step; or skip the step."""
        factor = self._factor(squared, ratio)
        if self.compression is not None:
            self.compression.settle(undo=factor is None)
        if factor is not None:
            self._step(factor)

    def _step(self, factor: float, *closure: Callable[[], Tensor]) -> None:
        """Step each optimizer, by gradients times `factor`, or by one closure."""
        self._told = self._told or tell_of_hooks(self._optimizers, self.plan)
        parts = closure or all(map(steps_parts, self._optimizers))
        if self._draws and not parts:  # which draw the same on all ranks
            reseed(seed_of(self._built.seed, "update", self.steps), self.mesh.axes.device_type)
        if self.swap is not None:
            for optimizer in self._optimizers:
                self.swap.update(optimizer, factor)
        else:
            scale_(self._trained.values(), factor)
            for optimizer in self._optimizers:
                step(optimizer, *closure, cut=self._cut)

    def _clear(self) -> None:
        self._accumulated.clear()
        if self._scales is not None:
            self._scales.forget()
        for parameter in self._trained.values():
            parameter.grad = None
        if self.swap is not None:
            self.swap.reset()


STRAY = (
    "a backward that is not of this run has added to gradients that wait for its update, on each rank those "
    "of its own rows. Write other.backward(loss, also=[this run]), or call this run's update before it"
)


def _scales_of_units(built: ModelSetup, scaler: LossScaler) -> UnitScales:
    own = {*own_units(built.model, built.structure.units)}
    units = {path: one for path, one in built.model.named_modules() if one in own}
    return UnitScales(units, built.names, scaler)


def _factors(
    scaler: LossScaler, scales: UnitScales | None, calls: GradientAccumulation
) -> Callable[[str], float]:
    """By what the gradients of a unit are multiplied."""
    return lambda name: calls.excess * (scales.scale_of(name) if scales else scaler.scale)


def _same(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    alike = one[0] is other[0] if isinstance(one[0], Tensor) else one[0] == other[0]
    return alike and one[1] == other[1]


def _bytes(size: object) -> int:
    if type(size) is not int or size < 1:
        raise ValueError(f"shard_bytes is {size!r}; it must be a number of bytes, at least 1")
    return size
