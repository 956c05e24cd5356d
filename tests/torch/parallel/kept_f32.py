"""Modules that keep f32 in low precision: BatchNorm always, others by `keep_f32`, as one process has it."""

import copy
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import crossed, swept
from parallel import models
from parallel.batch_norms import Residual
from parallel.expert_models import batches, listed, loss, stacked
from parallel.plain_training import adamw, begun, seeded

NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Residual(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 4),
    )  # fmt: skip


class OneProcess:
    """Masters in f32, a copy in low precision with some modules in f32, f32 sums of the parts' gradients."""

    def __init__(self, kind: torch.dtype, *kept: str) -> None:
        self.master, self.kind = seeded(images), kind
        self.low = copy.deepcopy(self.master).to(kind)
        for path, module in self.low.named_modules():
            always = isinstance(module, NORMS[:1])
            named = any(fnmatchcase(path, pattern) for pattern in kept)
            if always or named or ("norms" in kept and isinstance(module, NORMS)):
                module.float()
                module.register_forward_pre_hook(lambda _, args: tuple(one.float() for one in args))
                module.register_forward_hook(lambda _, args, output: output.to(kind))
        self.optimizer = adamw(self.master.parameters())

    def step(self, batch: tuple[Tensor, Tensor], parts: int) -> float:
        with torch.no_grad():
            for low, master in zip(self.low.parameters(), self.master.parameters(), strict=True):
                low.copy_(master)
        total = 0.0
        self.optimizer.zero_grad()
        for x, y in zip(batch[0].chunk(parts), batch[1].chunk(parts), strict=True):
            self.low.zero_grad()
            loss = functional.cross_entropy(self.low(x.to(self.kind)).float(), y)
            (loss * 2.0**10).backward()  # a power of two: fp16 would lose small gradients
            total += loss.item() / parts
            for low, master in zip(self.low.parameters(), self.master.parameters(), strict=True):
                grad = low.grad.float() / 2.0**10 / parts
                master.grad = grad if master.grad is None else master.grad + grad
        self.optimizer.step()
        return total


def check_losses_are_those_of_one_process(folder: Path) -> None:
    given = models.image_batches(4, 8)
    usual = [("fp16", ("norms",)), ("bf16", ()), ("bf16", ("3.conv*", "6"))]
    others = [("bf16", ("norms",)), ("fp16", ()), ("fp16", ("3.conv*", "6"))]
    plans = {"data": 2}, {"pipeline": 2}, {"data": 2, "zero": 1}
    for (precision, kept), plan in crossed(swept(usual, others), plans):
        zero = {"zero": 3} if "zero" in plan and not kept else {}
        whole = up.Plan(**{**plan, **zero}, precision=precision, keep_f32=kept)
        alone = OneProcess(TYPES[precision], *kept)
        wanted = [alone.step(batch, whole.data) for batch in given]
        run = begun(whole, images)
        run.scaler.scale = min(run.scaler.scale, 2.0**10)  # the first step overflows otherwise
        found = [run.step(batch) for batch in run.shard(given)]
        worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        assert worst < 1e-5, (whole, found, wanted)
        floats = [one for one in run.model.buffers() if one.is_floating_point()]
        assert all(one.dtype == torch.float32 for one in floats)


def check_a_kept_module_in_a_kept_one_is_a_part_of_it(folder: Path) -> None:
    """Units, too: the outer one is whole in f32, so patterns of inner ones change nothing."""
    given = models.text_batches(2, 4)
    usual, more = {"data": 2, "zero": 3, "recompute": True}, ({"tensor": 2, "zero": 1}, {"data": 2})
    for plan in swept([usual], more):
        found = []
        for kept in (("3",), ("3", "3.fc1", "3.norm*")):
            whole = up.Plan(**plan, precision="bf16", keep_f32=kept)
            run = begun(whole, models.gpt, models.token_loss)
            found.append([run.step(batch) for batch in run.shard(given)])
        assert found[0] == found[1], plan
    for zero in swept([3], [0]):  # BatchNorm is in the block
        plan = up.Plan(data=2, zero=zero, precision="bf16", keep_f32=("3",))
        run = begun(plan, images)
        alone = OneProcess(torch.bfloat16, "3", "3.*")
        for batch, mine in zip(
            models.image_batches(2, 8), run.shard(models.image_batches(2, 8)), strict=True
        ):
            assert abs(run.step(mine) - alone.step(batch, 2)) < 1e-2


def check_experts_that_are_spread_are_no_kept_modules(folder: Path) -> None:
    leaf = "1.experts.0.up"
    for make, kept, path in ((stacked, "*.experts", "1.experts"), (stacked, "1", "1"), (listed, leaf, leaf)):
        plan = up.Plan(data=2, expert=2, precision="bf16", keep_f32=(kept,))
        with pytest.raises(ValueError, match=f'"{path}" keeps f32 and has experts that expert=2 spreads'):
            begun(plan, make, loss)
    with pytest.raises(ValueError, match=r'"1\.experts" is a ModuleList, .* Write "1\.experts\.\*"'):
        plan = up.Plan(data=2, precision="bf16", keep_f32=("1.experts",))
        begun(plan, listed, loss)
    given = batches(2)
    losses = {}
    for expert in (1, 2):
        plan = up.Plan(data=2, expert=expert, zero=1, precision="bf16", keep_f32=("*.gate",))
        run = begun(plan, stacked, loss)
        losses[expert] = [run.step(batch) for batch in run.shard(given)]
    torch.testing.assert_close(losses[1], losses[2], atol=1e-2, rtol=0)


class Wrapped(nn.Module):
    """Its layers are in a module that is cut into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def check_a_kept_module_that_stages_share_is_refused(folder: Path) -> None:
    x, y = models.vector_batches(1, 8)[0]
    for kept in ("body", "body.*"):
        plan = up.Plan(pipeline=2, precision="bf16", keep_f32=(kept,))
        options = {"optimizer": adamw, "loss": functional.cross_entropy, "sample": x}
        if kept == "body":
            with pytest.raises(ValueError, match='no stage of the pipeline calls "body" as a whole'):
                up.parallelize(seeded(Wrapped), plan, **options)
            continue
        run = up.parallelize(seeded(Wrapped), plan, **options)
        assert abs(run.step((x, y)) - functional.cross_entropy(seeded(Wrapped)(x), y).item()) < 1e-2


def check_a_kept_module_returns_no_view(folder: Path) -> None:
    """PyTorch warns of one, which a test takes for an error."""
    given = models.text_batches(2, 4)
    plan = up.Plan(tensor=2, sequence=True, precision="bf16", keep_f32=("norms",))
    run = up.parallelize(models.gpt(), plan, optimizer=adamw, loss=models.token_loss, sample=given[0][0])
    for batch in given:
        run.step(batch)


def check_kept_modules_are_in_a_checkpoint(folder: Path) -> None:
    plan = up.Plan(data=2, zero=3, precision="bf16", keep_f32=("norms",))
    run = begun(plan, images)
    first, second = run.shard(models.image_batches(2, 8))
    run.step(first)
    run.save(folder)
    wanted = run.step(second)
    again = up.parallelize(images(), plan, optimizer=adamw, loss=functional.cross_entropy)
    again.load(folder)
    assert again.step(second) == wanted


def check_wrong_use_is_named(folder: Path) -> None:
    def made(make: Any = images, **plan: Any) -> up.Run:
        return up.parallelize(make(), up.Plan(data=2, **plan), optimizer=adamw, loss=functional.cross_entropy)

    with pytest.raises(ValueError, match='keep_f32: no module of Sequential is called "head"'):
        made(precision="bf16", keep_f32=("head",))
    with pytest.raises(TypeError, match=r"keep_f32 is \['norms'\], expected a tuple of patterns"):
        made(precision="bf16", keep_f32=["norms"])
    with pytest.raises(ValueError, match='"1" keeps f32, and its gradients .* uneven_use=True does not'):
        made(precision="bf16", uneven_use=True)
    with pytest.raises(ValueError, match="Linear that keeps f32 shares a parameter with another module"):
        made(lambda: models.gpt(tied=True), precision="bf16", keep_f32=("5.1",))
    made(keep_f32=("norms",))  # f32 anyway
