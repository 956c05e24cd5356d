"""A training whose ranks die and come, and the same training begun by given ranks from a given state.

Each rank writes what it does as lines of JSON: each attempt of a step with its samples, each update, each
loss.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unisono.parallel as up
from parallel.run_features import in_group
from ports import reserved

SAMPLES, BATCH = 96, 12
PER_EPOCH = SAMPLES // BATCH


class Net(nn.Module):
    """Has what a state may forget: buffers that each step changes, dropout, and several parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.dropout = nn.Dropout(0.2)
        self.seen: list[int] = []

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        self.seen = number.tolist()
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


def made(plan: up.Plan, seed: int, **more: Any) -> up.Run:
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(seed)
    return up.parallelize(
        model, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), loss=functional.cross_entropy, **more
    )


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(SAMPLES, 16, generator=generator), torch.randint(4, (SAMPLES,), generator=generator)
    return DataLoader(
        TensorDataset(x, y, torch.arange(SAMPLES)), batch_size=BATCH, shuffle=True, collate_fn=collate
    )


def collate(rows: list[tuple[Tensor, Tensor, Tensor]]) -> Any:
    x, y, number = (torch.stack(part) for part in zip(*rows, strict=True))
    return (x, number), y


def digest(run: up.Run) -> str:
    """Of all parameters, buffers and moments of this rank, if they are whole."""
    if run.plan.zero > 0:
        return ""
    found = hashlib.sha256()
    for value in run.model.state_dict().values():
        found.update(value.numpy().tobytes())
    for state in run.optimizer.state_dict()["state"].values():
        for _, value in sorted(state.items()):
            found.update(value.numpy().tobytes())
    return found.hexdigest()


class Log:
    """Lines of JSON in a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"log-{os.getpid()}").open("a")

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def logs(folder: Path) -> list[list[dict[str, Any]]]:
    """What each process has written."""
    return [
        [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("log-*"))
    ]


def go_on(folder: Path, plan: up.Plan, step: int, last: int) -> None:
    """What a plan trains from the state after `step`, up to step `last`."""
    run = made(plan, 99)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 4, 0.7)
    batches = run.shard(loader())
    run.load(folder / "saved" / f"step-{step:08}", also={"scheduler": scheduler, "batches": batches})
    generator = torch.load(folder / f"generator-{step}")
    torch.set_rng_state(generator)
    log = Log(Path.cwd())
    first = True
    while run.steps < last:
        for batch in batches:
            if first:
                torch.set_rng_state(generator)  # loading has drawn from it
            first = False
            loss = run.step(batch)
            scheduler.step()
            log.write(step=run.steps, loss=loss, digest=digest(run))
            if run.steps == last:
                break
        if first:  # the state was that after the last step of an epoch
            torch.set_rng_state(generator)
        first = False


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the environment of the only rank of a job."""
    with reserved() as port:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        yield


def main(rank: int, size: int, folder: Path, state: str, step: str, last: str, more: str) -> None:
    os.chdir(folder)
    plan = replace(up.Plan(**json.loads(more)).resized(size), elastic=size == 1)  # alone it draws otherwise
    whole = lambda _: go_on(Path(state), plan, int(step), int(last))  # noqa: E731
    if size > 1:
        in_group(rank, size, folder, whole)
        return
    torch.set_num_threads(1)
    with alone():
        whole(folder)
