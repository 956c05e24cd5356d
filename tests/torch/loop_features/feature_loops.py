"""Two ways to run a training loop: one process in PyTorch's own words, and ranks by a plan.

A feature is written once, with the names of `up.Run`. `Alone` gives it a `PlainRun`, the oracle.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unisono.parallel as up
from loop_features.feature_models import Text, texts, token_loss

IGNORED = -100


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an eps that keeps rounding of gradients that are zero from becoming steps."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)


class NamedParameters(list[nn.Parameter]):
    """What `optimizer=` gets: parameters, and `named`."""

    def __init__(self, model: nn.Module) -> None:
        self.named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        super().__init__(self.named.values())


class PlainRun:
    """One process that trains on whole batches."""

    skipped = 0

    def __init__(self, model: nn.Module, optimizer: Any, loss: Any, weigh: Any, clip: float | None) -> None:
        self.model, self._loss, self._weigh, self._clip = model, loss, weigh, clip
        self.optimizer = optimizer(NamedParameters(model))
        self.grad_norm: float | None = None
        self.steps, self._count = 0, 0
        self._lost: Any = 0.0

    def shard(self, loader: Any) -> Any:
        return loader

    def epochs(self, count: int) -> Iterator[int]:
        yield from range(count)

    def step(self, batch: Any, *, update: bool = True, watch: bool = False) -> float:
        total, count = self._sum(batch)
        if update and not self._count:
            total, self._count = total / count, 1  # hooks see the gradient of the mean
            total.backward()
            self._update()
            return total.item()
        total.backward()
        self._count += count
        if update:
            self._update()
        return total.item() / count

    def backward(self, loss: Tensor, *, rows: float | None = None) -> None:
        loss.backward()
        self._count, self._lost = 1, self._lost + loss.detach()

    def update(self) -> Tensor:
        lost, self._lost = self._lost, 0.0
        self._update()
        return lost

    def _update(self) -> None:
        parameters = [one for one in self.model.parameters() if one.grad is not None]
        for parameter in parameters:
            parameter.grad /= self._count
        if self._clip is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(parameters, self._clip).item()
        for optimizer in self.optimizer if isinstance(self.optimizer, list) else [self.optimizer]:
            optimizer.step()
        self.model.zero_grad()
        self.steps, self._count = self.steps + 1, 0

    def _sum(self, batch: Any) -> tuple[Tensor, int]:
        """The sum of the loss, and over how many rows or labels it goes."""
        if self._loss is None:
            return self.model(**batch)["loss"] * counted(batch["labels"]), counted(batch["labels"])
        inputs, targets = batch
        found = self._loss(self.predict(inputs), targets)
        if self._weigh == "counted":
            return found[0], int(found[1])
        if self._weigh == "tokens":
            return found * counted(targets), counted(targets)
        count = int(self._weigh(targets)) if callable(self._weigh) else len(targets)
        return found * count, count

    @torch.no_grad()
    def evaluate(self, batch: Any) -> float:
        total, count = self._sum(batch)
        return total.item() / count

    def predict(self, inputs: Any) -> Any:
        return self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def counted(labels: Tensor) -> int:
    return int((labels != IGNORED).sum())


class PlainAverage:
    """What `up.EMA` is: an AveragedModel."""

    def __init__(self, run: PlainRun, decay: float) -> None:
        self._run, self._model = run, AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.update()  # the first call copies

    def update(self) -> None:
        self._model.update_parameters(self._run.model)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        kept, self._run.model = self._run.model, self._model.module
        yield
        self._run.model = kept


class Loops:
    """Where a feature is tried."""

    planned = False

    def __init__(self, folder: Path, plan: up.Plan) -> None:
        self.folder, self.plan = folder, plan
        self.experts = plan.expert > 1

    def start(
        self,
        make: Callable[..., nn.Module] = Text,
        *,
        optimizer: Any = adamw,
        loss: Any = token_loss,
        weigh: Any = None,
        changes: dict[str, Any] | None = None,
        prepare: Callable[[nn.Module], object] | None = None,
        **more: Any,
    ) -> Any:
        """A run of a seeded model. changes: of the plan."""
        torch.manual_seed(0)
        model = make(experts=self.experts)
        if prepare is not None:
            prepare(model)
        return self._run(model, optimizer, loss, weigh, changes or {}, more)

    def _run(self, model: Any, optimizer: Any, loss: Any, weigh: Any, changes: Any, more: Any) -> Any:
        raise NotImplementedError


class Alone(Loops):
    """One process."""

    ema = PlainAverage

    def _run(self, model: Any, optimizer: Any, loss: Any, weigh: Any, changes: Any, more: Any) -> Any:
        return PlainRun(model, optimizer, loss, weigh, changes.get("clip"))

    def outputs(self, run: Any, inputs: Any) -> Tensor:
        with torch.no_grad():
            return run.predict(inputs)


class Planned(Loops):
    """All ranks of a plan."""

    planned = True
    ema = up.EMA

    def _run(self, model: Any, optimizer: Any, loss: Any, weigh: Any, changes: Any, more: Any) -> Any:
        plan = dataclasses.replace(self.plan, **changes)
        more.setdefault("sample", texts(1)[0][0])
        return up.parallelize(model, plan, optimizer=optimizer, loss=loss, weigh=weigh, **more)

    def outputs(self, run: Any, inputs: Any) -> Tensor:
        """Of all rows: each rank has its own."""
        (mine,) = run.shard([(inputs, torch.arange(len(inputs)))])
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (mine[1], run.predict(mine[0])))
        whole = next(output for _, output in found if output is not None)
        every = torch.zeros(len(inputs), *whole.shape[1:])
        for rows, output in found:
            every[rows] = output
        return every
