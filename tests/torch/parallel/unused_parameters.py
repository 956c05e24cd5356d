"""Parameters that nothing uses: a pipeline keeps them, and does not move them. On two ranks."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel.plain_training import adamw, same, seeded
from parallel.program_stages import PIPELINE, SCHEDULES, WIDTH, WORDS, Skips, batches, loss
from parallel.run_features import in_group


class Leftover(Skips):
    """Parameters that nothing uses: in a layer of their own, in a block, and beside a used one."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.spare = nn.Linear(3, 2), nn.Parameter(torch.ones(3))
        self.blocks[4].spare = nn.Linear(2, 2)


def check_parameters_that_nothing_uses_are_kept(folder: Path) -> None:
    given = batches(2)
    wanted = same(up.Plan(data=2), Leftover, given, loss).state_dict()
    for plan in (PIPELINE, SCHEDULES[4], dataclasses.replace(PIPELINE, recompute=True)):
        found = same(plan, Leftover, given, loss, sample=given[0][0]).state_dict()
        assert [*found] == [*wanted]
        assert all(torch.allclose(value, wanted[name], atol=1e-5) for name, value in found.items())


class PartlyUsed(Skips):
    """One parameter is used for what nothing takes, one module is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.lost, self.spare = nn.Parameter(torch.ones(WIDTH)), nn.Linear(3, 2)

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        found = super().forward(**inputs)
        (self.table.weight * self.lost).sum()
        return found


def check_weights_have_parameters_that_nothing_needs(folder: Path) -> None:
    given = batches(2)
    for plan in (PIPELINE, SCHEDULES[4]):
        run = same(plan, PartlyUsed, given, loss, sample=given[0][0])
        weights = run.state_dict()
        assert torch.distributed.get_rank() > 0 or set(weights) == set(PartlyUsed().state_dict())


class Lost(nn.Module):
    """What the first stage makes goes into a layer whose output is lost, into numbers that have no gradient,
    and into a second tensor of the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.lost, self.head, self.aside = (nn.Linear(WIDTH, WORDS) for _ in range(3))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        first, second, third = self.first(x), self.second(x), self.third(x)
        x = torch.tanh(self.block(x))
        self.lost(first)
        picked = x.gather(-1, second.argsort(-1))
        return {"aside": self.aside(third), "logits": self.head(x + picked)}


def by_aside(output: Any, targets: Tensor) -> Tensor:
    return loss(output, targets) + 0.1 * output["aside"].square().mean()


def check_parameters_without_gradients_do_not_move(folder: Path) -> None:
    """AdamW moves what has a gradient of zero, and not what has none."""
    given = [(inputs["ids"], targets) for inputs, targets in batches(3)]
    for wanted in (loss, by_aside):
        alone = seeded(Lost)
        optimizer = adamw(alone.parameters())
        for ids, targets in given:
            optimizer.zero_grad()
            wanted(alone(ids), targets).backward()
            optimizer.step()
        for plan in (up.Plan(data=2), PIPELINE, SCHEDULES[3], SCHEDULES[4], SCHEDULES[5]):
            found = same(plan, Lost, given, wanted, sample=given[0][0]).state_dict()
            for name, value in alone.named_parameters() if found else ():
                assert torch.allclose(found[name], value, atol=1e-5), (plan, name)


class Aside(nn.Module):
    """A norm on both stages, of which the loss takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = self.norm(x)
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        x = self.layers[3](torch.tanh(self.layers[2](x)))
        return {"out": x, "aside": self.norm(x) * early}


def check_a_parameter_on_both_stages_without_a_gradient(folder: Path) -> None:
    """Neither stage has one, so weight decay does not move it."""
    torch.manual_seed(1)
    given = [(torch.randn(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(3)]

    def loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
        return functional.mse_loss(output["out"], targets)

    def decays(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)

    run = up.parallelize(seeded(Aside), PIPELINE, optimizer=decays, loss=loss, sample=given[0][0][:2])
    assert "norm.weight" in [tie.name for tie in run._built.ties], [tie.name for tie in run._built.ties]
    for batch in run.shard(given):
        run.step(batch)
    weights = run.state_dict()
    assert not weights or torch.equal(weights["norm.weight"], torch.ones(WIDTH)), weights["norm.weight"]


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
