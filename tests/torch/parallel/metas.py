"""Models on the meta device: every plan begins as one process does that materialises the same model."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import SWEEP
from parallel import models
from parallel.run_features import adamw, whole

HAVE_TRANSFORMERS = importlib.util.find_spec("transformers") is not None

# what is looked up in the first piece, and multiplied in the last; in "tied" they are one matrix
VOCABULARY = {"0.token": "vocabulary", "5.1": "column, gathered"}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return models.CASES[name].make()


def smaller(module: nn.Module) -> None:
    """A user's function, after the module's own."""
    if isinstance(module, nn.Embedding):
        module.weight.mul_(0.1)


def alone(name: str, batches: Any) -> list[float]:
    case, model = models.CASES[name], up.materialize(on_meta(name), seed=3, init=smaller)
    optimizer, losses = adamw(model.parameters()), []
    for x, y in batches:
        output = model(x)
        loss = case.loss(getattr(output, "logits", output), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_of(name: str, plan: up.Plan) -> up.Run:
    model, loss = on_meta(name), models.CASES[name].loss
    cuts = VOCABULARY if name in ("gpt", "tied") and plan.tensor > 1 else None
    return up.parallelize(model, plan, optimizer=adamw, loss=loss, seed=3, init=smaller, cuts=cuts)


def same(plans: dict[str, list[up.Plan]], steps: int = 2) -> None:
    for name, asked in plans.items():
        if name in ("gpt2", "llama") and not HAVE_TRANSFORMERS:
            continue
        batches = models.CASES[name].batches(steps, 8)
        wanted = alone(name, batches)
        for plan in asked:
            run = run_of(name, plan)
            losses = [run.step(batch) for batch in run.shard(batches)]
            worst = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
            assert worst < 1e-5, f"{name}, {plan}: {losses}, not {wanted}"
            run.close()


def check_two_ranks_begin_as_one_process(folder: Path) -> None:
    two = up.Plan(data=2, zero=3), up.Plan(pipeline=2, micro_batches=2), up.Plan(tensor=2, zero=1)
    usual = {"tied": [*two, up.Plan(data=2), up.Plan(data=2, swap="memory")]}
    same(usual | {"gpt": list(two)} if SWEEP else usual)
    the_norm_where_a_vocabulary_is_cut()
    a_module_around_units_leaves_them_alone()
    says_what_is_missing()


def the_norm_where_a_vocabulary_is_cut() -> None:
    (x, y), model = models.text_batches(1, 8)[0], up.materialize(on_meta("gpt"), seed=3, init=smaller)
    models.token_loss(model(x), y).backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    run = run_of("gpt", up.Plan(tensor=2, clip=1e9))
    run.step((x, y))
    assert abs(run.grad_norm - wanted) < 1e-4 * wanted


class Table(nn.Module):
    """Parameters and a buffer that the constructor fills, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.mask


class Half(Table):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Around(nn.Module):
    """What is around the units must not write into them: some ranks hold them already, others never."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.blocks = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale


def a_module_around_units_leaves_them_alone() -> None:
    batch, kinds = models.vector_batches(1, 8)[0], (up.Plan(data=2, zero=3), up.Plan(data=2))
    for plan in kinds:
        with torch.device("meta"):
            here, there = Around(), Around()
        run = up.parallelize(here, plan, optimizer=adamw, loss=functional.cross_entropy, seed=1)
        wanted = functional.cross_entropy(up.materialize(there, seed=1)(batch[0]), batch[1]).item()
        assert there.blocks[0].weight.std() > 0.1
        (part,) = run.shard([batch])
        assert abs(run.step(part) - wanted) < 1e-5, plan


def filled(module: nn.Module) -> None:
    if isinstance(module, Table):
        module.scale.fill_(1)
        module.mask = torch.ones(16, dtype=torch.bool)


def says_what_is_missing() -> None:
    def ask(kind: type[nn.Module] = Table, **more: Any) -> up.Run:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(16, 16), kind(), nn.BatchNorm1d(16), nn.Linear(16, 4))
        more = {"plan": up.Plan(data=2), **more}
        return up.parallelize(model, optimizer=adamw, loss=functional.cross_entropy, **more)

    with pytest.raises(
        ValueError, match=r'"1" \(Table\) .* no reset_parameters.*: nothing says how scale, mask begin'
    ):
        ask()
    with pytest.raises(ValueError, match=r'"1.mask" has no values .* reset_parameters\(\), or in init=fn'):
        ask(Half)
    with pytest.raises(TypeError, match="init is a str, expected a function of one module"):
        ask(init="normal")
    with pytest.raises(ValueError, match="sample= runs the pieces"):
        ask(plan=up.Plan(pipeline=2), sample=torch.zeros(2, 16), init=filled)
    with pytest.raises(ValueError, match="seed= and init= are for models on the meta device"):
        up.parallelize(models.mlp(), up.Plan(data=2), optimizer=adamw, loss=functional.cross_entropy, seed=1)
    with torch.device("meta"), pytest.raises(ValueError, match="only the model belongs there"):
        ask(init=filled)
    with pytest.raises(ValueError, match=r"different models: .*float32, meta on rank 0, .*float32 on rank 1"):
        model = on_meta("mlp") if dist.get_rank() == 0 else models.mlp()
        up.parallelize(model, up.Plan(data=2), optimizer=adamw, loss=functional.cross_entropy)
    torch.manual_seed(dist.get_rank())  # rank 0's counts
    run = ask(init=filled, plan=up.Plan(data=2, zero=1))
    both = whole(run)["0.weight"]
    said = [torch.empty_like(both) for _ in range(2)]
    dist.all_gather(said, both)
    assert torch.equal(*said)
    assert run.model[1].mask.all()


def check_four_ranks_begin_as_one_process(folder: Path) -> None:
    plans = [
        up.Plan(data=4, zero=3), up.Plan(data=4, zero=2, shard=2), up.Plan(pipeline=4, micro_batches=4),
        up.Plan(data=2, tensor=2, zero=3), up.Plan(tensor=2, pipeline=2, micro_batches=2),
        up.Plan(data=2, pipeline=2, zero=1, schedule="zbv", micro_batches=2),
    ]  # fmt: skip
    same({"gpt": plans[:2], "tied": plans[2:], "conv": plans[2:3], "gpt2": plans, "llama": plans[3:]})


def check_checkpoints_of_either_kind(folder: Path) -> None:
    """What a run of a real model saved goes into one that was on the meta device, under another plan."""
    batches = models.text_batches(4, 8)
    first = up.parallelize(
        models.make("tied"), up.Plan(data=2, zero=1), optimizer=adamw, loss=models.token_loss
    )
    losses = [first.step(batch) for batch in first.shard(batches[:2])]
    first.save(folder / "saved")
    losses = [first.step(batch) for batch in first.shard(batches[2:])]
    for plan in (up.Plan(pipeline=2), up.Plan(data=2, zero=3)):
        run = run_of("tied", plan)
        run.load(folder / "saved")
        again = [run.step(batch) for batch in run.shard(batches[2:])]
        assert max(abs(a - b) for a, b in zip(again, losses, strict=True)) < 1e-5
