"""One rank of an elastic training that loses ranks: elastic_job.py FOLDER RANKS STEPS [RANK:WHERE:STEP ...].

WHERE a rank kills itself: forward, exchange, optimizer, between, draw, save. raise: it raises an error. stop:
it stops itself in forward. lose: it deletes the checkpoints. behind: it loses its groups when the others have
completed the step; copied: so it does under ZeRO, after the step before.
STEPS 0: it ends 12 steps after a newcomer has come, if nothing has changed since. With new:take:0 the first
newcomer dies while it takes the state.
"""

import gc

gc.disable()  # collections while modules are imported take a quarter of the time of a rank
# ruff: noqa: E402

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import unisono.parallel as up
from parallel.elastic_training import Log, digest, loader, made
from unisono.errors import Aborted

gc.freeze()
gc.enable()
FOLDER, RANKS, STEPS, *FAULTS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]
SAVE_EVERY = int(os.environ.get("SAVE_EVERY", "1"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))  # of each of the first steps
NEW = "UNISONO_JOIN" in os.environ


class Fault:
    """Where and when this process dies."""

    def __init__(self, run: up.Run) -> None:
        mine = [fault.split(":") for fault in FAULTS]
        self._run = run
        self._at = {where: int(step) for rank, where, step in mine if rank == os.environ["RANK"] and not NEW}

    def reach(self, where: str, *_: Any) -> None:
        if self._at.get(where) == self._run.steps + 1:
            if where == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if where == "raise":
                raise ArithmeticError("a bad sample")
            if where == "lose":  # the checkpoints
                shutil.rmtree(FOLDER / "saved", ignore_errors=True)
                return
            if where in ("behind", "copied"):
                del self._at[where]
                for group in self._run._groups():
                    group.abort()
                raise Aborted("this rank has not seen the end of the step")
            os.kill(os.getpid(), signal.SIGKILL)


class Scheduler(torch.optim.lr_scheduler.StepLR):
    """Its state is what a newcomer takes last."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        once = FOLDER / "died"
        if NEW and "new:take:0" in FAULTS and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().load_state_dict(state)


def instrument(run: Any, log: Log, fault: Fault) -> None:
    model = run.model

    def forward(*_: Any) -> None:
        if model.training:
            log.write(attempt=run.steps + 1, generation=run.generation, samples=model.seen)
            time.sleep(PAUSE_S * (run.steps < 3))
            fault.reach("lose")
            fault.reach("forward")
            fault.reach("raise")
            fault.reach("stop")

    model.register_forward_hook(forward)

    def exchange(*_: Any) -> None:
        fault.reach("exchange")

    if run.plan.zero == 0:
        model.first.weight.register_post_accumulate_grad_hook(exchange)
    else:  # its gradients belong to no parameter that stays
        model.first.register_forward_hook(lambda _, __, out: out.register_hook(exchange) and None)

    def update(*_: Any) -> None:
        fault.reach("behind")
        log.write(update=run.steps + 1, generation=run.generation)
        fault.reach("optimizer")

    run.optimizer.register_step_pre_hook(update)
    keep = run.keep_copy

    def keep_copy(**when: bool) -> None:
        keep(**when)
        fault.reach("copied")

    run.keep_copy = keep_copy


def is_over(run: Any) -> bool:
    if STEPS:
        return run.steps >= STEPS
    return bool(run.changes and run.changes[-1].joined and run.steps >= run.changes[-1].steps + 12)


def main() -> None:
    torch.set_num_threads(1)
    log = Log(FOLDER)

    def told(change: up.Change) -> None:
        state = change.steps - change.redone
        log.write(change=str(change), before=change.before, size=change.size, steps=change.steps, state=state)

    plan = up.Plan(elastic=True, **json.loads(os.environ.get("PLAN", "{}")) | {"data": RANKS})
    with made(plan, int(os.environ["RANK"]), on_change=told) as run:
        fault = Fault(run)
        instrument(run, log, fault)
        scheduler = Scheduler(run.optimizer, 4, 0.7)
        run.attach(scheduler=scheduler)
        batches = run.shard(loader())
        for _ in run.epochs(1000):
            for batch in batches:
                fault.reach("between")
                loss = run.step(batch)
                scheduler.step()
                log.write(step=run.steps, loss=loss, digest=digest(run), size=run.plan.data)
                state = torch.get_rng_state()
                log.write(step_of_state=run.steps, random=hashlib.md5(state.numpy().tobytes()).hexdigest())
                written = FOLDER / f"generator-{os.getpid()}"
                torch.save(state, written)
                written.rename(
                    FOLDER / f"generator-{run.steps}"
                )  # the same on all ranks: `Job.losses` checks it
                fault.reach("save")
                if run.steps % SAVE_EVERY == 0:
                    run.save(FOLDER / "saved", also={"batches": batches})
                if is_over(run):
                    break
                time.sleep(0.02 * (STEPS == 0))
            if is_over(run):
                break
            fault.reach("draw")
    log.write(done=run.steps)


main()
