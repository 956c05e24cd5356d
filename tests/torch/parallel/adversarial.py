"""Programs that look as if a cut were right: each trains as one process does, or is refused by name."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono.parallel as up
from parallel import models
from parallel.foreign import TENSOR, Straight, proved, refused
from parallel.plain_training import same, seeded, under
from parallel.run_features import adamw, in_group


class Pair(nn.Module):
    """Two layers, and something between them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, width), nn.Linear(width, 4)
        self.temp = nn.Parameter(torch.tensor([0.7]))

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Any:
        return self.fc2(torch.tanh(self.between(self.fc1(x))))


class BySize(Pair):
    def between(self, h: Tensor) -> Tensor:
        return h / torch.tensor(float(h.shape[-1])).sqrt()


class FilledBySize(Pair):
    def between(self, h: Tensor) -> Tensor:
        return h / torch.full((1,), float(h.shape[-1])).sqrt()


class ThroughView(Pair):
    """The gradient of `temp` comes back through a write into a view."""

    def between(self, h: Tensor) -> Tensor:
        s = torch.ones(2)
        s[0] = self.temp[0]
        return h * s[0] + s[1:]


class Beside(nn.Module):
    """One layer makes what is cut and what is used whole."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(16, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        whole, part = self.both(x).chunk(2, -1)
        return torch.tanh(self.out(part)) * whole


class SharedBetween(nn.Module):
    """One module takes what is whole, and what is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(16, 4), nn.Tanh()
        self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.layer_norm(self.first(x), (4,))
        return h + self.down(self.act(self.up(self.act(h))))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5]))

    def forward(self, h: Tensor) -> dict[str, Tensor]:
        return {"scale": self.w.exp()}


class FromDict(Pair):
    """A module returns a dict, and each rank uses the whole value in it for its part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale(h)["scale"]


class Shifted(nn.Linear):
    """A linear layer that adds more than its bias."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.shift = nn.Parameter(torch.ones(out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias) + self.shift


class ShiftedRow(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.fc2 = Shifted(32, 4)


class Plus(nn.Linear):
    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + r


class PlusRow(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.fc2 = Plus(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)), x[:, :4])


class Hooked(Pair):
    """Hooks that use a whole parameter: after a layer cut by column, and before one cut by row."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1.register_forward_hook(lambda _m, _a, out: out * self.temp)
        self.fc2.register_forward_pre_hook(lambda _m, args: (args[0] + self.temp,))
        self.fc2.register_forward_hook(lambda _m, _a, out: out + self.temp)


class HookedFused(nn.Module):
    """A fused layer whose hook would be lost if it became several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 96), nn.Linear(32, 4)
        self.qkv.register_forward_hook(lambda _m, _a, out: out * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.tanh(q) * k + v)


class Scaled(Pair):
    def between(self, h: Tensor) -> Tensor:
        return h * self.temp


class Kept(Pair):
    """The loss takes an attribute that the forward leaves behind."""

    def between(self, h: Tensor) -> Tensor:
        self.hidden = h.pow(2)
        return h * self.temp


class Rebound(Pair):
    """A buffer that is another tensor after each step, and one that is written through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("last", torch.zeros(2, 32))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * h.mean(0)
            self.last[0].copy_(h.detach().sum(0))
        return h + self.mean + self.last[0] * 0.01


class OwnForward(Pair):
    """One layer has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.fc2
        self.fc2.forward = lambda x: functional.linear(x, layer.weight, layer.bias) + layer.bias


class Again(nn.Module):
    """Recomputes a part of its own forward, with heads of a written number."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)
        self.gain = nn.Parameter(torch.ones(32))
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        h = self.fc1(x).view(len(x), 4, -1)
        return self.fc2((h * h.norm(dim=-1, keepdim=True)).flatten(1) * self.gain)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.ones((), requires_grad=True)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Taken(Pair):
    """A function with a backward of its own takes what is cut, and a layer follows."""

    def between(self, h: Tensor) -> Tensor:
        return Straight.apply(h) + h


class ListOfParameters(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((32,), 0.5))
        self.gains = [self.gain]

    def between(self, h: Tensor) -> Tensor:
        return h * self.gains[0]


class ByRows(Pair):
    def between(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if len(h) > 6 else h


class ByStep(Pair):
    """Another program from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.late = 0, False

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.late = self.calls > 2
        return h.softmax(-1) if self.late else h


class ByChance(Pair):
    def between(self, h: Tensor) -> Tensor:
        return h.softmax(-1) if random.random() < 0.5 else h


class Detached(Pair):
    """A whole parameter whose only gradient is none: its moments and its decay must not begin."""

    def between(self, h: Tensor) -> Tensor:
        return h * self.temp.detach()


RIGHT = (
    BySize, FilledBySize, ThroughView, FromDict, ShiftedRow, PlusRow, Hooked, HookedFused, Rebound,
    OwnForward, Taken, ListOfParameters, Detached,
)  # fmt: skip


def check_programs_that_only_look_right(folder: Path) -> None:
    batches = models.vector_batches(3, 8)
    failed = []
    for make in RIGHT:
        for plan in (TENSOR, up.Plan(tensor=2, zero=1)):
            if make is ListOfParameters and plan.zero:
                refused(make, batches, functional.cross_entropy, "also in the attribute", plan=plan)
                continue
            try:
                proved(make, batches, functional.cross_entropy, plan=plan)
            except Exception as error:
                failed.append(f"{make.__name__} {plan}: {type(error).__name__} {str(error)[:300]}")
    assert not failed, "\n".join(failed)


def check_what_the_loss_takes_beside_the_output(folder: Path) -> None:
    batches = models.vector_batches(3, 8)
    made: list[Any] = []

    def make(kind: Any) -> Any:
        def made_of_it() -> nn.Module:
            made.append(kind())
            return made[-1]

        return made_of_it

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, targets) + 0.1 * made[-1].hidden.mean()

    proved(make(Kept), batches, loss)

    def regularised(output: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(output, targets) + 0.1 * made[-1].temp.pow(2)

    says = 'the loss takes the parameter "temp" itself.*Compute it in the forward'
    refused(make(Scaled), batches, regularised, says, sample=batches[0][0])
    for plan in (up.Plan(data=2), up.Plan(pipeline=1, data=2, micro_batches=2)):
        same(plan, make(Scaled), batches, regularised)
    proved(make(Kept), batches, regularised)  # it is whole


def check_a_second_derivative_through_a_cut_is_refused(folder: Path) -> None:
    def penalty(output: Tensor, targets: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(output.sum(), made[-1].seen, create_graph=True)
        return functional.cross_entropy(output, targets) + slope.pow(2).mean()

    class Sloped(Pair):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x.requires_grad_()
            return super().forward(self.seen)

    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(Sloped())
        return made[-1]

    batches = models.vector_batches(2, 8)
    with pytest.raises(RuntimeError, match="cut on the tensor "):
        under(TENSOR, make, batches, penalty, sample=batches[0][0])


def check_a_module_that_recomputes_a_part_of_itself(folder: Path) -> None:
    batches = models.vector_batches(3, 8)
    for reentrant in (True, False):
        proved(lambda r=reentrant: Again(reentrant=r), batches, functional.cross_entropy)


def check_programs_that_change_during_a_run(folder: Path) -> None:
    x, y = models.vector_batches(1, 8)[0]
    small = [(x[:4], y[:4])] * 2
    run, _ = under(TENSOR, ByRows, small, functional.cross_entropy, sample=x[:4])
    assert run.cut.modules["fc2"] == "row"
    with pytest.raises(ValueError, match="this batch runs another program of ByRows"):
        run.step((x, y))
    run, _ = under(TENSOR, ByStep, [(x, y)] * 2, functional.cross_entropy, sample=x)
    with pytest.raises(ValueError, match="this batch runs another program of ByStep"):
        for _ in range(4):
            run.step((x, y))
    for more in ({"sample": x}, {}):
        refused(ByChance, [(x, y)], functional.cross_entropy, "Python's random or NumPy|fc2", **more)
    parts = up.Plan(tensor=2, micro_batches=2)
    run = up.parallelize(seeded(ByRows), parts, optimizer=adamw, loss=functional.cross_entropy, sample=x[:4])
    run.step((x, y))  # eight rows, four in each part


def check_gradients_of_what_is_whole_beside_what_is_cut(folder: Path) -> None:
    batches = models.vector_batches(2, 8)
    proved(Beside, batches, functional.cross_entropy)


def check_a_module_that_takes_whole_and_cut_values(folder: Path) -> None:
    same(TENSOR, SharedBetween, models.vector_batches(2, 8), functional.cross_entropy)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
