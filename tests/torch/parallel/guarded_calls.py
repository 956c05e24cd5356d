"""Programs that run otherwise than they were recorded on such inputs: each trains alike, or is refused."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import _functional_collectives as functional_collectives

import unisono.parallel as up
from parallel.plain_training import adamw, same, seeded, under
from parallel.recorded_programs import Cross
from parallel.run_features import in_group
from parallel.wild import DATA, LOSS, PIPELINE, TENSOR, Mlp, refused, rows

CONTEXT = up.Plan(context=2)
Call = Callable[["Layer", Tensor, Tensor, bool], Any]


class Layer(nn.Module):
    """Attention with another sequence, whose arguments and results have many forms."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.norm = Cross(), nn.LayerNorm(16)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        others: tuple[Tensor, ...] = (),
        *,
        twice: bool = False,
        makes: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        for _ in range(1 + twice):
            x = self.cross(x, mask, self.norm(sum(others, x)))
        return x if makes is None else makes(x)


class Calls(Mlp):
    """Its layer is called by a function that sees whether the program runs or is recorded."""

    def __init__(self, calls: Call) -> None:
        super().__init__()
        self.given, self.layer, self.calls = nn.Linear(16, 16), Layer(), calls

    def forward(self, x: Tensor) -> Tensor:
        h = self.given(x)
        h = torch.stack([h, -h, 2 * h], 1)
        real = not (isinstance(x, FakeTensor) or x.is_meta)
        h = self.calls(self.layer, h, h * 0.5, real)
        return super().forward(h[:, 0])


def hides_nothing(x: Tensor) -> Tensor:
    return torch.ones(len(x), 1, 1, 3, dtype=torch.bool, device=x.device)


ALIKE: list[Call] = [
    lambda layer, x, y, real: layer(others=(y,), x=x) if real else layer(x, None, (y,)),
    lambda layer, x, y, real: layer(x, others=(y,)) if real else layer(x, hides_nothing(x), (y,)),
    lambda layer, x, y, real: layer(
        x, makes=lambda z: {"y": y, "z": z} if real else {"z": z, "y": y}
    )["z"],
]  # fmt: skip
OTHERS: dict[str, Call] = {
    '"layer" takes a tensor at mask; .* has none there': lambda layer, x, y, real: layer(
        x, hides_nothing(x) if real else None, (y,)
    ),
    '"layer" takes True at twice; .* has False there': lambda layer, x, y, real: layer(x, twice=real),
    '"layer" is called 2 times; .* has 1 calls': lambda layer, x, y, real: layer(layer(x) if real else x),
    "is called 1 times; .* has 2 calls": lambda layer, x, y, real: layer(x if real else layer(x)),
    "is called 0 times": lambda layer, x, y, real: x if real else layer(x),
}


def check_calls_of_another_structure(folder: Path) -> None:
    for calls in ALIKE:
        for plan in (TENSOR, DATA):
            same(plan, functools.partial(Calls, calls), rows(), LOSS, sample=rows()[0][0])
    for says, calls in OTHERS.items():
        with pytest.raises(RuntimeError, match=says) as caught:
            under(TENSOR, functools.partial(Calls, calls), rows(), LOSS, sample=rows()[0][0])
        print(caught.value, flush=True)


class Moved(nn.Module):
    """A block whose input, output and container have a gradient that ranks sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.kind = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), kind

    def forward(self, x: Tensor, *more: Tensor, causal: bool = False) -> Any:
        found = self.b(torch.tanh(self.a(sum(more, x)))) + (1.0 if causal else 0.0)
        real = not (isinstance(x, FakeTensor) or x.is_meta)
        if self.kind == "keys":
            return {"y" if real else "x": found}
        return (found, x) if self.kind == "longer" and real else (found,)


class Blocks(Mlp):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.norm = Moved(kind), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        real, kind = not (isinstance(x, FakeTensor) or x.is_meta), self.block.kind
        h = self.norm(x)
        more = (h * 0.5,) * ((kind == "more" and real) + (kind == "less" and not real))
        found = self.block(h, *more, causal=kind == "flag" and real)
        return super().forward(next(iter(found.values())) if isinstance(found, dict) else found[0])


def check_what_moves_is_where_it_was(folder: Path) -> None:
    plans = TENSOR, up.Plan(tensor=2, sequence=True)
    for kind, says in (
        ("more", "takes a tensor at place 1; .* has none there"),
        ("less", "takes no tensor at place 1; .* has one there"),
        ("flag", "takes True at causal; .* has False there"),
        ("longer", r"returns a tensor at place 1; .* has none there"),
        ("keys", r"returns a tensor at y; .* has none there"),
    ):
        for plan in plans[:1]:
            with pytest.raises(RuntimeError, match=f'"block" {says}.*"block.": "whole"') as caught:
                under(plan, lambda kind=kind: Blocks(kind), rows(), LOSS, sample=rows()[0][0])
            print(caught.value, flush=True)


class Scored(nn.Linear):
    """Returns a number and a tensor, which change places when the program runs."""

    kind = ""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        kind = "" if isinstance(y, FakeTensor) or y.is_meta else self.kind
        score = self.weight.square().mean()
        others = {"places": (y, score), "longer": (score, y, y), "kinds": (score, y.argsort(-1))}
        return others.get(kind, (score, y))


class Scores(Mlp):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Scored(16, 16)
        self.block.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        score, y, *_ = self.block(x)
        return super().forward(x + y + score.tanh())


def check_what_a_stage_calls_returns_the_same(folder: Path) -> None:
    same(PIPELINE, functools.partial(Scores, ""), rows(), LOSS, sample=rows()[0][0])
    for kind, says in (
        ("places", r"of shape \[4, 16\] and type float32 at place 0; .* has one of shape \[\] and"),
        ("kinds", r"of shape \[4, 16\] and type int64 at place 1; .* has one of shape \[4, 16\] and type fl"),
        ("longer", r"at place 2; .* has none there"),
    ):
        with pytest.raises(RuntimeError, match=f'"block" returns a tensor {says}') as caught:
            under(PIPELINE, functools.partial(Scores, kind), rows(), LOSS, sample=rows()[0][0])
        print(caught.value, flush=True)


class Passes(nn.Module):
    """Returns what it takes or one tensor twice, and something else when the program runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(16, 16), kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.layer(x))
        real = not (isinstance(x, FakeTensor) or x.is_meta)
        found = {"order": (y, x), "other": (y * 2, y), "detached": (x.detach(), y), "twice": (y, y + x)}
        if self.kind in found and real:
            return found[self.kind]
        if self.kind == "written":
            return (x + y, y) if real else (x.mul_(1.0).add_(y.detach()), y)
        return (y, y) if self.kind == "twice" else (x.contiguous(), y)


class Passed(Mlp):
    """Takes what its block was given, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.given, self.block = nn.Linear(16, 16), Passes(kind)

    def forward(self, x: Tensor) -> Tensor:
        h = self.given(x)
        first, second = self.block(h)
        return super().forward(first - 0.3 * second + h)


def check_a_tensor_that_was_there_is_returned_again(folder: Path) -> None:
    """The program has one number for it, so another tensor in its place would change what others take."""
    same(PIPELINE, functools.partial(Passed, ""), rows(), LOSS, sample=rows()[0][0])
    known = "a tensor of its own at place 0; .* has there one that was there before the call"
    for kind in ("order", "other", "detached", "written", "twice"):
        says = "two tensors at place 0 and place 1; .* has one at both" if kind == "twice" else known
        with pytest.raises(RuntimeError, match=f'"block" returns {says}') as caught:
            under(PIPELINE, functools.partial(Passed, kind), rows(), LOSS, sample=rows()[0][0])
        print(caught.value, flush=True)


class Halved(Mlp):
    def between(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        y.data.mul_(0.5)  # in one process backward takes the written values
        return y


def check_writes_by_data_are_named(folder: Path) -> None:
    batch = torch.randn(8, 6, 16), torch.randint(4, (8, 6))
    with pytest.raises(RuntimeError, match=r"context=2.*writes in place.*x\.data\.mul_"):
        under(CONTEXT, Halved, [batch], of_positions, sample=batch[0])


def check_a_module_called_by_itself(folder: Path) -> None:
    run = up.parallelize(seeded(Mlp), TENSOR, optimizer=adamw, loss=LOSS, sample=rows()[0][0])
    with pytest.raises(RuntimeError, match='"a" was called by itself, outside the model'):
        run.model.a(torch.ones(2, 16))
    (batch,) = run.shard(rows(1))
    run.step(batch)
    assert run.model(torch.ones(2, 16)).shape == (2, 4)


class Gathers(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(functional_collectives.all_reduce(x, "sum", dist.group.WORLD))


def check_collectives_of_the_program(folder: Path) -> None:
    for plan in (TENSOR, PIPELINE):
        refused(Gathers, plan, "calls all_reduce of torch.distributed")


def late_hook(model: Any) -> None:
    model.a.register_forward_hook(lambda _, args, output: output.softmax(-1))


def late_module(model: Any) -> None:
    model.b = nn.Linear(32, 4)


def late_forward(model: Any) -> None:
    model.a.forward = lambda x: x.repeat(1, 2)


def check_what_changes_after_parallelize(folder: Path) -> None:
    batch = torch.randn(8, 6, 16), torch.randint(4, (8, 6))
    looks = list[int]()
    for plan in (TENSOR, PIPELINE, CONTEXT):
        for change, says in (
            (late_module, '"b" is another module than parallelize got'),
            (late_forward, '"a" has another forward than parallelize got'),
            (late_hook, 'a hook of "a", registered since|"a" has a hook since parallelize'),
            (lambda model: model.a.register_forward_hook(lambda *_: looks.append(1)), '"a" has a hook'),
            (lambda model: model.register_forward_hook(lambda *_: None), '"Mlp" has a hook since'),
        ):
            run = up.parallelize(seeded(Mlp), plan, optimizer=adamw, loss=of_positions, sample=batch[0])
            change(run.model)
            (mine,) = run.shard([batch])
            only_looks = plan is TENSOR and " a hook" in says and "registered" not in says
            if only_looks or (plan is PIPELINE and '"a" has a hook' in says):  # a stage calls the module
                run.step(mine)
                continue
            with pytest.raises((ValueError, RuntimeError), match=says):
                run.step(mine)
    assert looks


def of_positions(output: Tensor, targets: Tensor) -> Tensor:
    return LOSS(output.flatten(0, 1), targets.flatten())


SOFT = False


class Outside(Mlp):
    """Whether features meet is decided outside the module."""

    soft = False

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def between(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return x.softmax(-1) if SOFT or self.soft or self.steps > 10 else torch.tanh(x)


def check_what_decides_outside_a_module(folder: Path) -> None:
    global SOFT
    for place in ("class", "global", "counter"):
        run = up.parallelize(seeded(Outside), TENSOR, optimizer=adamw, loss=LOSS, sample=rows()[0][0])
        (batch,) = run.shard(rows(1))
        run.step(batch)
        if place == "class":
            Outside.soft = True
        SOFT = place == "global"
        with pytest.raises(ValueError, match="runs another program of Outside than the sample"):
            for _ in range(12 if place == "counter" else 1):
                run.step(batch)
        Outside.soft = SOFT = False


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
