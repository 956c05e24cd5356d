"""`TransactionalRun`: a run whose ranks die and come; each call is a transaction.

The ranks count their calls. When one is lost, the living agree who is left, and compare their counts: some
may have completed a call that others have not. Those give the others its result, and the state after it. A
call that nobody has completed is made again, on the same batch, which the living cut among them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.engine.group.departure import Departure
from unisono.engine.group.native import NativeGroup
from unisono.errors import GroupError
from unisono.parallel.checkpoint import CheckpointWriter, RunState, newest, state_of, states
from unisono.parallel.failures import RunFailures
from unisono.parallel.loss_weights import Weigh
from unisono.parallel.mesh import PlanMesh
from unisono.parallel.model_buffers import BufferKind
from unisono.parallel.model_setup import ModelSetup
from unisono.parallel.optimizers import Optimizer
from unisono.parallel.plan import Plan
from unisono.parallel.run import Run

from .batches import DrawnOrder, ElasticBatches
from .handover import (
    NOTHING,
    CallReport,
    Change,
    Handover,
    SavedState,
    StepRecord,
    StepRecords,
    fingerprint,
    spread,
)
from .membership import ElasticFailures, RunMembership
from .shards import ShardCopy, send_shards, sources_of

LOST = "a shard of the state was lost with all its copies: neighbours died together"
ASK_S = 0.05
"""How often a rank looks whether newcomers wait at it."""


class TransactionalRun(Run):
    """The calls of a run under `Plan(elastic=True)`, and the changes of its ranks.

    Attributes:
        changes: of the ranks, since this one is in the run.
    """

    def __init__(
        self,
        built: ModelSetup,
        plan: Plan,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Any] | None,
        weigh: Weigh,
        membership: RunMembership,
        on_change: Callable[[Change], object] | None,
    ) -> None:
        self._membership, self._on_change = membership, on_change
        self._has_groups = True  # between two memberships there are none
        self._asked_plan, self._program = plan, fingerprint(plan, built.model)
        super().__init__(built, plan.resized(membership.size), optimizer, loss, weigh)
        self._copies: list[ShardCopy] = []  # the newest one is the last
        self._completed_steps = 0  # after the newest call
        self._records = StepRecords()  # under ZeRO: to make steps again from an earlier state
        self._saved: SavedState | None = None
        self._rebuilt: tuple[str, ...] = ()
        self.changes: list[Change] = []
        self._calls = NOTHING if membership.group is None else 0
        self._result: float | None = None
        self._attached: dict[str, Any] = {}
        self._batches: list[ElasticBatches] = []
        self._newest: ElasticBatches | None = None  # whose batch a call got last
        self._drawn: ElasticBatches | None = None  # whose order was drawn last
        self._settled: list[dict[str, Any]] = []  # of the optimizers, after the newest call
        self._in_draw = False
        self._in_call = False
        self._places: list[DrawnOrder] = []  # of a newcomer, at which its epochs begin
        self._has_entered = True  # its first step has begun
        self._is_whole = True  # its state is that after its newest call
        self._is_told = True  # of the change in which it came
        self._told_size, self._left, self._joined = self.plan.data, list[Departure](), 0
        self._next_look = 0.0
        self._prepare_groups()

    @property
    def is_newcomer(self) -> bool:
        """Whether this process has come to join a running job, and has no state yet."""
        return self._membership.group is None

    @property
    def generation(self) -> int:
        """How often the group has changed since the job began."""
        return 0 if self._membership.group is None else self._membership.group.generation

    # ---- a call as a transaction ----

    def _made(
        self, work: Callable[[], Any], source: ElasticBatches | None = None, *, grows: bool = False
    ) -> Any:
        """Make a call that all ranks make, as often as it takes; return its result.

        Args:
            source: of its batch.
            grows: newcomers enter here.
        """
        if self.is_newcomer:
            raise RuntimeError(
                "this process joins a running job, and has no state yet: begin with `for epoch in "
                "run.epochs(n):`, or run.shard(loader); `if not run.is_newcomer:` for what comes before"
            )
        if not self._has_entered and not grows:
            raise RuntimeError("the first call of a newcomer is run.step: the others are in one")
        if self._in_call:
            raise RuntimeError(
                "a call of this run is under way, and on_change and hooks are in it: make this one later; "
                "run.changes has what changed"
            )
        self._has_entered = True
        self._newest = self._newest if source is None else source
        self._in_call = True
        try:
            return self._repeated(work, grows=grows)
        finally:
            self._in_call = False

    def _repeated(self, work: Callable[[], Any], *, grows: bool) -> Any:
        number = self._calls + 1
        while self._calls < number:
            kept, settings = self._statistics.values(), self._settings()
            try:
                if grows and self._asked:
                    self._grow()
                result = work()
            except Exception as error:
                self._statistics.restore(kept)
                self._take_settings(settings)
                if self._failures.ended:
                    self._membership.close()  # the others go on
                    raise
                if not self._is_loss(error):
                    raise
                self._stop()
                self._change(partial(self._membership.shrink, error))
            else:
                self._calls, self._result, self._completed_steps = number, result, self.steps
                self._settled = self._settings()
        self._membership.succeed()
        return self._result

    def _settings(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def _take_settings(self, settings: list[dict[str, Any]]) -> None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, kept in zip(groups, settings, strict=True):
            for key in group.keys() - kept.keys() - {"params"}:
                del group[key]
            group.update(kept)

    def draw(self, batches: ElasticBatches, work: Callable[[], None]) -> None:
        """Draw the order of an epoch, together."""
        self._drawn, self._in_draw = batches, True
        try:
            self._made(work)
        finally:
            self._in_draw = False

    def enter(self) -> None:
        """Join the running job, if this process is a newcomer."""
        if self.is_newcomer:
            self._has_entered = self._is_told = False
            self._stop()
            self._change(self._membership.join)

    def tell(self) -> None:
        """Call `on_change`, if this rank has not been told of the newest change."""
        if self._is_told:
            return
        self._is_told = True
        change = self._present_change()
        self._told_size, self._left, self._joined, self._rebuilt = self.plan.data, [], 0, ()
        if not change.left and not change.joined:  # the same ranks have made their group anew
            return
        self.changes.append(change)
        if self._on_change is not None:
            self._on_change(change)

    def _is_asked(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + ASK_S
        return self._membership.is_asked()

    def _watch(self) -> RunFailures:
        told = self._membership.tell_reason
        return ElasticFailures(self.mesh.world, self._groups(), self._is_loss, told)

    def _is_loss(self, error: BaseException) -> bool:
        """Whether an error of a call comes from the loss of a rank."""
        return self._membership.lost(error, self._groups())

    # ---- a change ----

    def _grow(self) -> None:
        """Take in the newcomers that wait."""
        self._asked = False
        rows = [one.smallest() for one in self._batches if one.active or one is self._newest]
        most = min((one for one in rows if one is not None), default=None)
        if not self._membership.has_room(most):
            return
        self.keep_copy(now=True)  # a newcomer cannot make earlier steps again
        if self._membership.grow(most):
            self._stop()
            self._change(None)

    def _stop(self) -> None:
        """End the groups of the present ranks, so that nobody waits in them, and what they did."""
        groups = {id(group): group for group in self._groups()}.values()
        for group in groups:
            with contextlib.suppress(RuntimeError):
                group.abort()
        with contextlib.suppress(RuntimeError):  # it waits for collectives, which have failed
            self._built.units.reset()
        self._clear()
        self._has_groups = False
        for group in groups:
            dist.destroy_process_group(group)

    def _groups(self) -> list[Any]:
        return super()._groups() if self._has_groups else []

    def _change(self, make: Callable[[], None] | None) -> None:
        """Make the next group, and go on in it. If another rank is lost meanwhile, make one without it."""
        while True:
            if make is not None:
                make()
            make = self._try(self._settle)
            if make is None and self._has_entered:  # a newcomer is told when it has a place in the data
                self._is_told = False
                self.tell()
                make = self._try(self._redo)
            if make is None:
                return

    def _try(self, work: Callable[[], None]) -> Callable[[], None] | None:
        """Do this. If a rank is lost meanwhile, return what makes the next group."""
        try:
            work()
        except Exception as error:
            if not self._is_loss(error):
                raise
            self._stop()
            return partial(self._membership.shrink, error)
        return None

    def _settle(self) -> None:
        """Bring all ranks of the new group to one state."""
        group = self._membership.members
        self._left += group.left
        self._joined += group.previous_ranks.count(None)
        self._membership.follow()
        self._follow()
        calls = self._calls if self._is_whole else NOTHING
        held = [one.held for one in self._copies]
        caches = [slot.kind for slot in self._statistics.caches.values()]
        steps = self._completed_steps
        mine = CallReport(calls, self._program, steps, self._records.reach_back(steps), held, caches)
        reports = group.all_gather_object(mine)
        newest = max(one.calls for one in reports)
        sources = [rank for rank, one in enumerate(reports) if one.calls == newest]
        if newest == NOTHING:
            raise GroupError("this run has ended: all ranks that had its state are lost")
        if self._program != reports[sources[0]].program:
            raise ValueError(
                "this process has another plan or another model than the ranks of the run that it joins; "
                "start it with the same script"
            )
        behind = [rank for rank, one in enumerate(reports) if one.calls < newest]
        known = [one.caches for one in reports if one.calls != NOTHING]
        alike = [kind for kind in known[0] if all(kind in one for one in known)]  # others are each rank's own
        if self.plan.zero > 0:
            self._reshard(group, reports, sources, alike)
        elif behind:
            self._hand_over(group, sources, behind, alike)

    def _caches(self, kinds: list[BufferKind]) -> list[Tensor]:
        """The buffers of these kinds; made where this rank has others."""
        slots, found = self._statistics.slots, []
        for kind in kinds:
            slot = slots[kind[0]]
            if slot.value is None or slot.kind != kind:
                dtype: torch.dtype = getattr(torch, kind[1].removeprefix("torch."))
                slot.module._buffers[slot.leaf] = torch.empty(kind[2], dtype=dtype)
            assert slot.value is not None
            found.append(slot.value)
        return found

    def _follow(self) -> None:
        """Train over the ranks of the new group."""
        self._asked = False  # some ranks may not have seen the end of the step that asked
        self.plan, former = self._asked_plan.resized(self._membership.size), self._named
        self.mesh = PlanMesh.of(self.plan, self.mesh.axes.device_type)
        self._has_groups = True
        self._built.follow(self.mesh)
        self._exchange_parameters(former)
        self._statistics = self._built.statistics(self.mesh)
        self._failures = self._watch()
        self._prepare_groups()
        for batches in self._batches:
            batches.follow(used=batches.active or batches is self._newest)

    def _exchange_parameters(self, former: dict[str, nn.Parameter]) -> None:
        """Take the parameters that the model has now, and make the optimizers forget those before."""
        self._named = self._built.named
        self._trained = {name: value for name, value in self._named.items() if value.requires_grad}
        self._written.follow()
        names = {value: name for name, value in former.items()}
        for optimizer in self._optimizers if self.plan.zero > 0 else ():
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [self._named[names[one]] for one in group["params"]]

    def record(self, batches: ElasticBatches) -> StepRecord:
        """What a step on the newest of these batches begins with."""
        modes = bytes(module.training for module in self.model.modules())
        return StepRecord(batches, batches.drawn, self._settings(), modes)

    def kept(self, step: Callable[[], float], record: StepRecord) -> float:
        """Make a step. Under ZeRO: remember how it began, and copy the state before and after it if due."""
        if self.plan.zero == 0:
            return step()
        self.keep_copy()
        self._records.add(self.steps + 1, record)
        loss = step()
        self.keep_copy()
        return loss

    def keep_copy(self, *, now: bool = False) -> None:
        """Under ZeRO: copy this state, which all ranks are in, if there is no copy of the last steps.

        Args:
            now: also if there is one, but of an earlier state.
        """
        group = self._membership.members
        last, allowed = self._copies[-1].held if self._copies else None, 1 if now else self.plan.copy_every
        same = last is not None and last.generation == group.generation
        if self.plan.zero == 0 or (same and last and self.steps - last.steps < allowed):
            return
        reused = self._copies.pop(0) if len(self._copies) > 1 else None
        with self._state() as state:
            _, written = state.here()
            caches = {n: slot.value for n, slot in self._statistics.caches.items() if slot.value is not None}
            about = state.about, written, caches
            made = ShardCopy(state.values(), *about, self.plan, self.steps, group, reused)
        self._copies.append(made)
        group.barrier()  # whoever goes on knows that all have theirs
        self._forget_records()

    def note_saved(self, folder: Path) -> None:
        """There is a checkpoint of this state."""
        self._saved = SavedState(str(folder.absolute()), self.steps)
        self._forget_records()

    def _forget_records(self) -> None:
        copied = min((one.held.steps for one in self._copies), default=self.steps)
        self._records.forget(copied, None if self._saved is None else self._saved.steps)

    def _redo(self) -> None:
        """Make the steps again that the state lacks. The program does not see it."""
        records = self._records.between(self.steps, self._completed_steps)
        settings, norm, modules = self._settings(), self.grad_norm, [*self.model.modules()]
        modes, generator = [module.training for module in modules], torch.default_generator.get_state()
        try:
            for batches, group in itertools.groupby(records, key=lambda one: one.batches):
                part = [*group]
                for record, mine in zip(part, batches.again([one.drawn for one in part]), strict=True):
                    self._take_settings(record.settings)
                    _set_modes(modules, map(bool, record.modes))
                    self.kept(partial(self._train, mine, update=True), record)
        finally:
            self._take_settings(settings)
            _set_modes(modules, modes)
            self.grad_norm = norm
            torch.default_generator.set_state(generator)

    def _reshard(
        self, group: NativeGroup, reports: list[CallReport], newest: list[int], alike: list[BufferKind]
    ) -> None:
        """Give all ranks their shards of the state after the newest completed step."""
        copies = [one.copies for one in reports]
        lost = {one.rank: one.why for one in self._left}
        sources = sources_of(copies, reports[newest[0]].steps, lost)
        if sources is None:
            self._reload(group, reports, newest[0])
            return
        self._check_reach(reports, sources.label[0])
        self._rebuilt += tuple(one for one in sources.rebuilt if one not in self._rebuilt)
        copy = next((one for one in self._copies if one.held.label == sources.label), None)
        if copy is not None:
            self._take_numbers(copy.about | {"epoch": self.epoch})
        having = [rank for rank, held in enumerate(copies) if any(one.label == sources.label for one in held)]
        first = next((rank for rank in newest if rank in having), having[0])
        with self._state() as state:
            mine = self._given(state, copy) if group.rank == first else None
            given: Handover = group.broadcast_object(mine, first)
            filled = state.room(given.kinds, given.sharded)
            kinds = [kind for kind in given.kinds if kind[0] in given.sharded]
            send_shards(group, self.plan, copy, kinds, sources, filled)
            plain = [name for name, _, _ in given.kinds if name not in given.sharded]
            self._copies = [] if copy is None else [copy]
            if copy is not None:
                for name in plain:
                    filled[name].copy_(copy.own[name])
                for slot in self._statistics.caches.values():
                    value, kept = slot.value, copy.caches.get(slot.name)
                    if value is not None and kept is not None and value.shape == kept.shape:
                        value.copy_(kept)
            lacking = [rank for rank in range(group.size) if rank not in having]
            if lacking:
                spread(group, having, lacking, [filled[name] for name in plain] + self._caches(alike))
            self._take(state, filled, given)

    def _reload(self, group: NativeGroup, reports: list[CallReport], first: int) -> None:
        """Give all ranks the state of the newest checkpoint. first: a rank that is not behind."""
        with self._state() as state:
            given: Handover = group.broadcast_object(self._given(state, None), first)
            if given.saved is None:
                raise GroupError(
                    f"{LOST}, and this run has saved and loaded no checkpoint to go back to. Start it again"
                )
            self._check_reach(reports, given.saved.steps)
            settings = self._settings()  # the program's own, such as its learning rate now
            try:
                state.load(newest(Path(given.saved.folder)))
            except (OSError, ValueError) as error:
                raise GroupError(
                    f"{LOST}, and the newest checkpoint cannot be loaded: {error}. Start the job again"
                ) from error
            self._take_settings(settings)
            self._take_numbers(state.about | {"epoch": self.epoch})
        self._copies.clear()
        self._rebuilt = (f"the state after step {given.saved.steps} from {given.saved.folder}",)
        self._take_place(given)

    def _check_reach(self, reports: list[CallReport], state: int) -> None:
        """Refuse to go on with a state from which this rank cannot make the steps that follow."""
        mine = reports[self._membership.members.rank]
        reach = max(one.steps for one in reports) if mine.calls == NOTHING else mine.reach_back
        if reach > state:
            raise GroupError(
                f"the run goes back to the state after step {state}, and this rank does not have the batches "
                f"of steps {state + 1} to {reach}: it came later, or its loader has no sampler that drew them"
            )

    def _prepare_groups(self) -> None:
        self._checkpoints = CheckpointWriter(self.mesh.world)
        if self._membership.group is None:
            return
        for group in self._groups():
            group.set_timeout(timedelta(seconds=self._membership.group.timeout_s))
            group._group.elastic = True

    def _hand_over(
        self, group: NativeGroup, sources: list[int], behind: list[int], alike: list[BufferKind]
    ) -> None:
        """Bring the ranks that are behind to the state of the others."""
        with self._state() as state:
            mine = self._given(state, None) if group.rank == sources[0] else None
            given: Handover = group.broadcast_object(mine, sources[0])
            if group.rank in behind:
                filled, self._is_whole = state.room(given.kinds), False
            else:
                filled = state.tensors()
            tensors = [filled[name] for name, _, _ in given.kinds] + self._caches(alike)
            spread(group, sources, behind, tensors)
            if group.rank in behind:
                self._take(state, filled, given)

    def _given(self, state: RunState, copy: ShardCopy | None) -> Handover:
        kinds, written = state.here()
        active = [one for one in self._batches if one.active or one is self._newest]  # as they have begun
        return Handover(
            self._calls,
            self._result if isinstance(self._result, float) else None,
            self.grad_norm,
            self._present_change(),
            kinds if copy is None else copy.kinds,
            set() if copy is None else copy.sharded,
            written if copy is None else written | copy.written,
            self._settled,
            json.dumps({name: states(name, thing) for name, thing in self._attached.items()}),
            [one.order() for one in active],
            None if self._drawn is None else self._drawn.order(drawn=True),
            torch.default_generator.get_state().numpy(),
            self._saved,
        )

    def _take(self, state: RunState, filled: dict[str, Tensor], given: Handover) -> None:
        """Be in the state of another rank. One of the former group keeps what its program sets in between."""
        new, epoch = self._calls == NOTHING, self.epoch
        state.take_from(filled, given.written, options=new)
        self._take_numbers(state.about)
        if not new:
            self.epoch = epoch
        self._take_place(given)

    def _take_place(self, given: Handover) -> None:
        """Have completed the calls of another rank."""
        new, behind = self._calls == NOTHING, self._calls < given.calls
        self._calls, self._result, self.grad_norm = given.calls, given.result, given.grad_norm
        self._is_whole, self._completed_steps, self._saved = True, given.change.steps, given.saved
        if not new:
            if behind:
                self._settled = [
                    {key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}
                    for one in given.settings
                ]
                self._take_settings(self._settled)
            if behind and self._in_draw and self._drawn is not None and given.drawn is not None:
                self._drawn.take_order(given.drawn)
            return
        attached = json.loads(given.attached)
        if attached.keys() != self._attached.keys():
            raise ValueError(
                f"the ranks of the run have attached {[*attached]}, and this newcomer {[*self._attached]}: "
                "call run.attach before the first epoch"
            )
        for name, thing in self._attached.items():
            thing.load_state_dict(state_of(attached[name]))
        self._places = list(given.places)
        self._told_size = given.change.before
        self._left, self._joined = list(given.change.left), given.change.joined
        self._rebuilt = given.change.rebuilt
        torch.default_generator.set_state(torch.from_numpy(given.generator))

    def _present_change(self) -> Change:
        before, after, steps = self._told_size, self.plan.data, self._completed_steps
        redone = max(0, steps - self.steps)
        return Change(before, after, tuple(self._left), self._joined, steps, self._rebuilt, redone)


def _set_modes(modules: Iterable[nn.Module], training: Iterable[bool]) -> None:
    for module, mode in zip(modules, training, strict=True):
        module.training = mode
