"""One rank of a small elastic training in which a program does what few do: elastic_cases.py CASE RANKS.

Each rank prints one line of JSON for each step; the lines of all ranks must be the same.
"""

import gc

gc.disable()  # collections while modules are imported take a quarter of the time of a rank
# ruff: noqa: E402

import json
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unisono.parallel as up
from unisono.errors import Aborted

gc.freeze()
gc.enable()
CASE, SIZE = sys.argv[1], int(sys.argv[2])
RANK, NEW = int(os.environ["RANK"]), "UNISONO_JOIN" in os.environ


class Net(nn.Module):
    """Two layers; counts its forwards in a buffer that no checkpoint has."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.last(hidden - 0.1 * self.mean)


class Counting(torch.optim.SGD):
    """Has a count of its steps in each group, and one of each parameter that is no tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0) + 1
                parameter.grad.mul_(1 / (group["count"] + state["seen"]))
        return super().step(closure)


def lose(run: Any) -> None:
    """Be in the place of a rank that has not seen the end of a call, which the others completed."""
    for group in run._groups():
        group.abort()
    raise Aborted("this rank has not seen the end of the step")


def loader(rows: int = 24, batch: int = 6, **more: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=batch, shuffle=True, **more)


def made(**more: Any) -> Any:
    torch.manual_seed(0)
    return up.parallelize(
        Net(),
        up.Plan(data=SIZE, elastic=True, **json.loads(os.environ.get("PLAN", "{}"))),
        optimizer=lambda p: Counting(p, lr=0.1),
        loss=functional.cross_entropy,
        **more,
    )


def tell(run: Any, loss: float, **more: Any) -> None:
    generator = sum(torch.get_rng_state().tolist())
    weights = [float(value.double().sum()) for _, value in sorted(run.model.state_dict().items())]
    mean = float(run.model.mean.double().sum())
    options = [group["count"] for group in run.optimizer.param_groups]
    line = {"step": run.steps, "loss": loss, "generator": generator, "mean": mean, "options": options, **more}
    print(json.dumps(line | ({} if run.plan.zero else {"weights": weights})), flush=True)


def at(run: Any, step: int, rank: int = 1) -> bool:
    return not NEW and rank == RANK and run.steps + 1 == step


def behind() -> None:
    """Rank 1 is behind in step 3; the program draws random numbers between steps."""
    with made() as run:
        lost = [True]

        def before(*_: Any) -> None:
            if at(run, 3) and lost and "calm" not in sys.argv:
                lost.clear()
                lose(run)

        run.optimizer.register_step_pre_hook(before)
        batches = run.shard(loader())
        for _ in run.epochs(2):
            for batch in batches:
                loss = run.step(batch)
                tell(run, loss, drawn=float(torch.rand(())))


def evaluating() -> None:
    """After step 5 of whole batches rank 1 fails in an evaluation; the learning rate changes."""
    torch.manual_seed(1)
    data = [batch for _ in range(3) for batch in loader()]
    with made() as run:
        lost = ["calm" not in sys.argv]

        def evaluated(*_: Any) -> None:
            if not run.model.training and at(run, 6) and lost[0]:
                lost[0] = False
                lose(run)

        run.model.register_forward_pre_hook(evaluated)
        for batch, other in zip(run.shard(data), run.shard(iter(data)), strict=True):
            loss = run.step(batch)
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.8
            run.model.eval()
            found = run.evaluate(other)
            run.model.train()
            tell(run, loss, evaluated=found, rate=run.optimizer.param_groups[0]["lr"])


def draw() -> None:
    """In the draw of the second epoch rank 2 dies, and rank 1 is behind; `on_change` sets the batch."""
    with made(on_change=lambda _: batches.set_batch_size(4)) as run:
        batches: Any = run.shard(loader())
        make, lost = run._made, [True]

        def call(work: Any, *args: Any, **options: Any) -> Any:
            if run._in_draw and at(run, 5, 2):
                make(work)  # all have the order
                os._exit(1)

            def behind_once() -> None:
                work()
                if at(run, 5, 1) and lost:
                    lost.clear()
                    time.sleep(0.5)  # the others complete it
                    lose(run)

            return make(behind_once if run._in_draw else work, *args, **options)

        run._made = call
        for _ in run.epochs(3):
            for batch in batches:
                loss = run.step(batch)
                tell(run, loss, order=batches._order)


def nested() -> None:
    """`on_change` makes a call of the run."""

    def on_change(_: up.Change) -> None:
        try:
            run.save("nowhere")
        except RuntimeError as error:
            print("refused:", error, flush=True)

    with made(on_change=on_change) as run:
        batches = run.shard(loader())
        for batch in batches:
            if at(run, 3):
                os._exit(1)
            tell(run, run.step(batch))


def many() -> None:
    """Several loaders, of which some loops end early; a rank dies, and a newcomer comes."""
    with made() as run:
        batches = run.shard(loader())
        others = [run.shard(loader(8, 3)) for _ in range(6)]
        for _ in run.epochs(1000):
            for batch in batches:
                if at(run, 4):
                    os._exit(1)
                tell(run, run.step(batch), order=batches._order)
                run.model.eval()
                for other in others:
                    for part in other:
                        run.evaluate(part)
                        break
                run.model.train()
                if run.changes and run.changes[-1].joined and run.steps >= run.changes[-1].steps + 8:
                    return
                time.sleep(0.02)
                if run.steps % 3 == 0:  # not by `enumerate`: a newcomer's first loop begins in the middle
                    break


if __name__ == "__main__":
    globals()[CASE]()
