"""What models in the wild do beside their forward: each trains as in one process, or is refused by name."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.plain_training import adamw, alone, same, seeded, under
from parallel.run_features import in_group

DATA, ZERO, TENSOR = up.Plan(data=2), up.Plan(data=2, zero=3), up.Plan(tensor=2)
PIPELINE = up.Plan(pipeline=2, micro_batches=2)
SWAP = up.Plan(data=2, swap="disk")
LOSS = functional.cross_entropy


class Mlp(nn.Module):
    """Two layers, and what a subclass does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        return self.b(self.between(self.a(x)))

    def before(self, x: Tensor) -> None:
        """Nothing."""

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Clamped(Mlp):
    def before(self, x: Tensor) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)


class Masked(Mlp):
    """Writes the same again, by .data, as masked convolutions do."""

    def before(self, x: Tensor) -> None:
        self.a.weight.data *= torch.arange(16) % 2


class ByRows(Mlp):
    def before(self, x: Tensor) -> None:
        with torch.no_grad():
            self.a.bias.add_(x.mean())


class Follower(Mlp):
    """A teacher that follows its student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(16, 32).requires_grad_(False)

    def before(self, x: Tensor) -> None:
        for mine, other in zip(self.teacher.parameters(), self.a.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * other.data

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.teacher.bias)


class Freezing(Mlp):
    def before(self, x: Tensor) -> None:
        self.b.bias.requires_grad_(False)


class Slowed(Mlp):
    def between(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return torch.tanh(x)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x)


class Scripted(Mlp):
    def between(self, x: Tensor) -> Tensor:
        return scripted(x)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rows(count: int = 3) -> Any:
    return models.vector_batches(count, 8)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    mask = (torch.arange(32 * 16).view(32, 16) % 3 > 0).float()
    model[0].weight.register_hook(lambda grad: (grad * mask).clamp(-0.01, 0.01))
    model[2].bias.register_hook(lambda grad: grad / grad.norm())
    gone = model[2].weight.register_hook(lambda grad: grad * 0)
    gone.remove()
    return model


def clipped() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def clip(parameter: Tensor) -> None:
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return model


def refused(make: Any, plan: up.Plan, says: str, error: Any = ValueError, **more: Any) -> None:
    with pytest.raises(error, match=says) as caught:
        under(plan, make, rows(), LOSS, sample=rows()[0][0], **more)
    print(caught.value, flush=True)


def check_hooks_of_parameters_get_the_gradient_of_the_batch(folder: Path) -> None:
    for plan in (DATA, up.Plan(data=2, zero=1, micro_batches=2), ZERO, TENSOR, PIPELINE):
        same(plan, hooked, rows(), LOSS)
    for plan in (dataclasses.replace(DATA, micro_batches=2), PIPELINE):
        same(plan, clipped, rows(), LOSS)
    for plan in (ZERO, TENSOR):
        refused(clipped, plan, '"0.weight" has a hook of register_post_accumulate_grad_hook.*a part of it')
    refused(hooked, SWAP, '"0.weight" has a hook of register_hook, and swap')
    model = seeded(hooked)
    for _ in range(2):  # the second run finds the hooks of the first
        run = up.parallelize(model, DATA, optimizer=adamw, loss=LOSS)
        (batch,) = run.shard(rows(1))
        run.step(batch)
        assert run.grad_norm is None
        with pytest.raises(ValueError, match=r"update=False adds up.*has a hook"):
            run.step(batch, update=False)


def check_a_forward_that_writes_parameters(folder: Path) -> None:
    same(DATA, Clamped, rows(), LOSS)
    for make in (Masked, Clamped):
        same(dataclasses.replace(DATA, micro_batches=2), make, rows(), LOSS)
    same(DATA, Follower, rows(), LOSS)
    for make in (Clamped, Masked, Follower):
        refused(make, ZERO, "the forward writes the parameter .*this plan would lose it", RuntimeError)
    for make in (Clamped, Masked):
        refused(make, SWAP, "the forward writes the parameter .*swap= would lose", RuntimeError)
    refused(ByRows, DATA, '"a.bias", and data ranks write different values', RuntimeError)
    twice = dataclasses.replace(DATA, micro_batches=2)
    refused(Follower, twice, "this step runs it 2 times, where one process runs it once", RuntimeError)


def check_hooks_before_a_unit_are_computed_again_with_it(folder: Path) -> None:
    def normed() -> nn.Module:
        model = Blocks()
        model.blocks[0] = nn.utils.weight_norm(model.blocks[0])
        return model

    def scaled() -> nn.Module:
        model = Blocks()
        model.blocks[2].register_forward_pre_hook(lambda _, args: (args[0] * 0.7,))
        model.blocks[0].register_forward_hook(lambda _, args, output: output * 1.5)
        return model

    for make in (normed, scaled):
        for plan in (up.Plan(data=2, recompute=True), up.Plan(tensor=2, recompute=True), SWAP):
            same(plan, make, rows(), LOSS)


def check_a_scripted_function(folder: Path) -> None:
    for _ in range(3):  # then its backward is one function
        scripted(torch.ones(2, requires_grad=True)).sum().backward()
    for plan in (TENSOR, DATA):
        same(plan, Scripted, rows(), LOSS, sample=rows()[0][0])
    refused(Scripted, PIPELINE, "runs a torch.autograd.Function")


def check_what_no_stage_repeats(folder: Path) -> None:
    refused(Freezing, PIPELINE, 'freezes "b.bias" while it runs')
    refused(Follower, PIPELINE, 'puts other values in place of "teacher.weight"')
    refused(Slowed, PIPELINE, "registers a hook on a tensor")


def check_models_that_are_refused(folder: Path) -> None:
    for plan in (DATA, TENSOR):
        refused(
            lambda: nn.Sequential(nn.LazyLinear(4)), plan, '"weight" of "0" .LazyLinear. has no shape yet'
        )
        refused(lambda: torch.jit.script(Mlp()), plan, "Mlp|TorchScript")

    def embedding(**more: Any) -> nn.Module:
        return nn.Sequential(nn.Embedding(8, 4, **more), nn.Flatten())

    for more, says in (({"max_norm": 1.0}, "max_norm=1.0"), ({"scale_grad_by_freq": True}, "scale_grad")):
        refused(lambda more=more: embedding(**more), DATA, says)

    mixed = Mlp()
    mixed.b.double()
    with pytest.raises(ValueError, match='"a.weight" is torch.float32 and "b.weight" is torch.float64'):
        up.parallelize(mixed, ZERO, optimizer=adamw, loss=LOSS)
    with pytest.raises(ValueError, match="SparseAdam"):
        up.parallelize(Mlp(), DATA, optimizer=torch.optim.SparseAdam, loss=LOSS)


def check_parameters_of_other_kinds(folder: Path) -> None:
    class Turned(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.a.weight = nn.Parameter(torch.randn(16, 32).mul(0.1).t())

    class Complex(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(32, 32, dtype=torch.complex64)

        def between(self, x: Tensor) -> Tensor:
            return self.c(x.to(torch.complex64)).abs()

    class Empty(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.zeros(0, 32))

        def between(self, x: Tensor) -> Tensor:
            return torch.cat([x, self.more])

    kinds = (Turned, ZERO), (Complex, DATA), (Complex, TENSOR), (Empty, DATA), (Empty, ZERO), (Empty, TENSOR)
    for make, plan in (*kinds, (Empty, PIPELINE)):
        same(plan, make, rows(), LOSS, sample=rows()[0][0])
    batches = [(x.abs().mul(7).long().clamp(max=31), y) for x, y in rows()]

    def bag(sparse: bool) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(32, 16, mode="sum", sparse=sparse), nn.Linear(16, 4))

    wanted = alone(lambda: bag(False), batches, LOSS)
    for plan in (DATA, ZERO, TENSOR):
        _, found = under(plan, lambda: bag(True), batches, LOSS, sample=batches[0][0])
        assert max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)) < 1e-5, plan


class Forces(nn.Module):
    """A gradient within the forward. tanh keeps its result for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.energy = nn.ModuleList(nn.Linear(16, 16) for _ in range(2)), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = h = x.detach().requires_grad_(True)
            for layer in self.layers:
                h = h + torch.tanh(layer(h))
            (force,) = torch.autograd.grad(self.energy(h).sum(), x, create_graph=True)
        return force


class Table(Mlp):
    """Its table is a buffer, which low precision leaves in f32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, 32))

    def between(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.table) @ torch.ones(4, 32, dtype=x.dtype)


def check_gradients_within_a_forward(folder: Path) -> None:
    batches = [(x, x.flip(0)) for x, _ in rows()]
    for plan in (DATA, TENSOR, PIPELINE):
        same(plan, Forces, batches, functional.mse_loss, sample=batches[0][0])
    again = up.Plan(data=2, recompute=True)
    run = up.parallelize(seeded(Forces), again, optimizer=adamw, loss=functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"recompute=True: .*takes gradients.*Write recompute=False"):
        run.step(next(iter(run.shard(batches))))


@dataclasses.dataclass
class Given:
    """What a model is called with, and what it returns."""

    x: Tensor
    scale: float = 0.5


class Named(NamedTuple):
    x: Tensor
    mask: Tensor


class Takes(Mlp):
    def forward(self, given: Any) -> Any:
        x = super().forward(given.x)
        return Given(x * given.scale) if isinstance(given, Given) else Named(x, given.mask)


class Spread(Mlp):
    """Returns an object that hides its tensors."""

    def forward(self, x: Tensor) -> Any:
        return torch.distributions.Categorical(logits=super().forward(x), validate_args=False)


def check_containers_of_other_kinds(folder: Path) -> None:
    for made in (Given, lambda x: Named(x, x > 0)):
        batches = [((made(x),), y) for x, y in rows()]
        plain = [(made(x), y) for x, y in rows()]  # as one process calls the model
        wanted = alone(Takes, plain, lambda found, y: LOSS(found.x, y))
        for plan in (DATA, ZERO, TENSOR, PIPELINE):
            sample = batches[0][0]
            _, found = under(plan, Takes, batches, lambda found, y: LOSS(found.x, y), sample=sample)
            assert max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)) < 1e-5, plan


def check_outputs_that_hide_tensors(folder: Path) -> None:
    def loss(found: Any, y: Tensor) -> Tensor:
        return -found.log_prob(y).mean()

    wanted = alone(Mlp, rows(), LOSS)
    _, found = under(DATA, Spread, rows(), loss)
    assert max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)) < 1e-5
    with pytest.raises(ValueError, match=r"Spread returns a Categorical, which hides its tensors"):
        under(ZERO, Spread, rows(), loss)


def check_types_that_low_precision_mixes(folder: Path) -> None:
    low = up.Plan(data=2, precision="bf16")
    refused(Table, low, r"precision='bf16': Table, at .*wild.py:\d+, mixes bf16 with another type.*keep_f32")
    inside = lambda: nn.Sequential(nn.Linear(16, 16), Table())  # noqa: E731
    refused(inside, low, r'"1" \(Table\), at .* mixes')
    refused(inside, low, "write precision='autocast'; or keep")
    kept = dataclasses.replace(low, keep_f32=("0",))
    refused(inside, kept, "write precision='autocast' without keep_f32=; or keep")
    _, found = under(dataclasses.replace(low, keep_f32=("1",)), inside, rows(), LOSS)
    wanted = alone(inside, rows(), LOSS)
    assert max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)) < 5e-2
    says = "write precision='autocast' without pipeline=; or keep"
    staged = up.Plan(pipeline=2, precision="bf16")
    refused(Table, staged, says, (ValueError, RuntimeError))  # one stage tells the other


class ByRank(Mlp):
    """A layer that one rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(32, 32)

    def between(self, x: Tensor) -> Tensor:
        return self.extra(x) if torch.distributed.get_rank() else torch.tanh(x)


def check_parameters_that_one_rank_uses(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"different parameters under .* write Plan\(uneven_use=True\)"):
        under(ZERO, ByRank, rows(), LOSS)


def check_attributes_of_parameters_stay(folder: Path) -> None:
    def marked() -> nn.Module:
        model = Mlp()
        model.a.weight.no_decay = True
        return model

    seen: list[list[str]] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        seen.append([name for name, one in parameters.named.items() if getattr(one, "no_decay", False)])
        return adamw(parameters)

    for plan in (DATA, ZERO, TENSOR, up.Plan(data=2, precision="bf16")):
        up.parallelize(seeded(marked), plan, optimizer=optimizer, loss=LOSS, sample=rows()[0][0])
    assert seen == [["a.weight"]] * 4, seen


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
