"""What a model does decides how it is cut, and no name: chains, pieces, a first batch. On two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel import models, sweep
from parallel.plain_training import adamw, same, seeded, under
from parallel.run_features import in_group

WIDTH = 8
DATA, SHARDED, TENSOR = up.Plan(data=2), up.Plan(data=2, zero=3), up.Plan(tensor=2)
PIPELINE = up.Plan(pipeline=2, micro_batches=2)
ALL = (DATA, SHARDED, TENSOR, PIPELINE)
LOSS = functional.mse_loss


def rows(count: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(8, WIDTH, generator=generator) for _ in range(2)) for _ in range(count)]


# ---- names say nothing ----


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embed(ids))))


def check_a_class_of_any_name_trains(folder: Path) -> None:
    ids = torch.randint(11, (3, 4, 6), generator=torch.Generator().manual_seed(1))
    batches = [(each, each) for each in ids]
    for name in swept(("LlamaForCausalLM", "Sequential"), ("GPT2LMHeadModel", "Qwen2ForCausalLM")):
        make: Any = type(name, (Words,), {})
        for plan in ALL:
            same(plan, make, batches, models.token_loss)


def check_what_surrounds_a_model_of_hugging_face_counts(folder: Path) -> None:
    """A hook, a wrapped forward, a parameter of the outer model."""
    if not sweep.HAVE_TRANSFORMERS:
        return

    def scaled(output: Any, factor: Any) -> Any:
        output.logits = output.logits * factor
        return output

    def hooked(model: Any) -> None:
        model.register_forward_hook(lambda _module, _args, output: scaled(output, 3.0))

    def wrapped(model: Any) -> None:
        inner = model.forward
        model.forward = lambda *args, **named: scaled(inner(*args, **named), 2.0)

    def gained(model: Any) -> None:
        model.gain = nn.Parameter(torch.tensor(1.5))
        model.register_forward_hook(lambda module, _args, output: scaled(output, module.gain))

    for make in (models.gpt2, models.llama):
        for change in (hooked, wrapped, gained):

            def changed(make: Any = make, change: Any = change) -> nn.Module:
                model = make()
                change(model)
                return model

            same(PIPELINE, changed, models.text_batches(2, 4), models.token_loss)


# ---- an nn.Sequential runs its entries as they stand ----


def twice(kind: Callable[[], nn.Module]) -> nn.Module:
    one = kind()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), one, nn.Tanh(), one, nn.Linear(WIDTH, WIDTH), one)


class Two(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return self[0](x), self[1](x)


class Product(nn.Linear):
    def forward(self, pair: Any, gain: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(pair[0] * pair[1]) * gain


class Backwards(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for entry in reversed(self):
            x = entry(x)
        return x


class Called(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 2.0


class Scaled(nn.Sequential):
    def __init__(self, *entries: nn.Module) -> None:
        super().__init__(*entries)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_forward_hook(lambda module, _args, output: output * module.gain)


def layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]


def hooked(before: bool) -> nn.Module:
    model = nn.Sequential(*layers())
    if before:
        model.register_forward_pre_hook(lambda _module, args: (args[0] * 2.0,))
    else:
        model.register_forward_hook(lambda _module, _args, output: output * 2.0)
    return model


def check_a_chain_runs_its_entries_as_they_stand(folder: Path) -> None:
    pair = (nn.Linear, WIDTH, WIDTH)
    for make in (
        lambda: twice(nn.ReLU),
        lambda: twice(lambda: pair[0](*pair[1:])),
        lambda: nn.Sequential(
            pair[0](*pair[1:]), Two(*layers()[:3:2]), Product(*pair[1:]), pair[0](*pair[1:])
        ),
        lambda: Backwards(*layers()),
        lambda: Called(*layers()),
        lambda: Scaled(*layers()),
        lambda: hooked(before=True),
        lambda: hooked(before=False),
    ):
        for plan in swept((PIPELINE, SHARDED), [up.Plan(pipeline=2)]):
            same(plan, make, rows(), LOSS)


class Gives(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(x)


class Takes(nn.Module):
    def forward(self, given: Any) -> Tensor:
        return given if isinstance(given, Tensor) else next(iter(getattr(given, "values", lambda: given)()))


def check_what_stages_cannot_send_is_named(folder: Path) -> None:
    batch = rows(1)[0]
    kinds: Any = (lambda x: [x, x], lambda x: {"x": x}, lambda x: (x, 3), lambda x: (x, None), lambda x: (x,))
    for kind in kinds:
        model = seeded(lambda kind=kind: nn.Sequential(nn.Linear(WIDTH, WIDTH), Gives(kind), Takes()))
        run = up.parallelize(model, up.Plan(pipeline=2, cuts=(2,)), optimizer=adamw, loss=LOSS)
        with pytest.raises((TypeError, RuntimeError), match="a stage ends with a Gives, which returned a"):
            run.step(batch)
    norm = nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm)
    with pytest.raises(ValueError, match="a BatchNorm1d with buffers runs in stages 0 and 1"):
        up.parallelize(model, up.Plan(pipeline=2), optimizer=adamw, loss=LOSS)


# ---- pieces ----


class Pooled(Words):
    """It has a layer that its forward does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)


class Gated(Pooled):
    """A branch that adds nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 11)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.layer(self.embed(ids)))
        return self.head(x) + self.gate(x)


class Doubled(Pooled):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda _module, _args, output: output * 2.0)


class Pair(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids), torch.zeros(len(ids), 1, 1)


class Sum(nn.Sequential):
    def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + more)


class Own(nn.Sequential):
    def __init__(self, *entries: nn.Module) -> None:
        super().__init__(*entries)
        self.gain = nn.Parameter(torch.ones(()))


def plain(m: Any) -> list[nn.Module]:
    return [m.embed, nn.Sequential(m.layer, nn.Tanh(), m.head)]


def check_pieces_compute_what_the_model_does(folder: Path) -> None:
    ids = torch.randint(11, (3, 4, 6), generator=torch.Generator().manual_seed(1))
    batches = [(each, each) for each in ids]
    spread = lambda m: [Pair(m.embed), Sum(m.layer, nn.Tanh(), m.head)]  # noqa: E731  equal values, another program
    for make, pieces in ((Words, plain), (Pooled, plain), (Pooled, spread)):
        for plan in (PIPELINE, SHARDED, up.Plan(data=2, swap="memory")):
            run = same(plan, make, batches, models.token_loss, pieces=pieces)
            if plan.swap is None:  # a closed swap has no state
                names = set(run.state_dict())
                assert names in (set(), set(make().state_dict())), names
    for make, pieces, says in (
        (
            Pooled,
            lambda m: [m.embed, nn.Sequential(m.layer, nn.ReLU(), m.head)],
            "aten.tanh there, aten.relu here",
        ),
        (Doubled, plain, "does not compute what Doubled does: .* aten.mul there"),
        (Gated, plain, 'pieces= leaves out the parameter "gate.bias" of Gated'),
        (Pooled, lambda m: [m.embed, Own(m.layer, nn.Tanh(), m.head)], 'a Own with the parameter "gain"'),
    ):
        with pytest.raises(ValueError, match=says):
            under(PIPELINE, make, batches, models.token_loss, pieces=pieces)


# ---- without a sample ----


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.hidden, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(torch.relu(self.convolution(x)).mean((2, 3)))))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.last = nn.Parameter(torch.ones(8)), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(left * self.scale + right)))


def check_the_first_batch_is_the_sample(folder: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    images = [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4)) for _ in range(3)]
    halves = [torch.randn(2, 4, 8, generator=generator) for _ in range(3)]
    named = [({"left": left, "right": right}, torch.arange(4)) for left, right in halves]
    for make, batches in ((Images, images), (Keywords, named)):
        for plan in (TENSOR, PIPELINE):
            run = same(plan, make, batches, functional.cross_entropy)
            assert type(run) is up.Run
    run = up.parallelize(seeded(Images), TENSOR, optimizer=adamw, loss=functional.cross_entropy)
    with pytest.raises(AttributeError, match=r"run\.optimizer: Images is recorded on .* sample="):
        _ = run.optimizer
    epochs = list(run.epochs(2))
    assert epochs == [0, 1]
    first = run.evaluate(images[0])
    assert run.optimizer
    assert run.epoch == 2
    assert abs(first - run.step(images[0])) < 1e-5


# ---- names of children ----


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for leaf in (name, "last"):
            setattr(self, leaf, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self._modules[self.name](x)))


class Lists(nn.Module):
    """Lists with entries that are None, and children that are called like methods."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        setattr(self, name, nn.ModuleList([Named(name), Named(name), None]))
        self.norms = nn.ModuleList([None, nn.LayerNorm(WIDTH), nn.ModuleList([None])])

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self._modules[self.name], self.norms, strict=True):  # type: ignore[arg-type]
            x = x if layer is None else layer(x)
            x = norm(x) if isinstance(norm, nn.LayerNorm) else x
        return x


def check_children_of_any_name_and_none(folder: Path) -> None:
    for name in swept(("children", "train"), ("type", "register_buffer", "named_modules", "values")):
        for plan in (*ALL, up.Plan(data=2, swap="memory")):
            same(plan, lambda name=name: Lists(name), rows(2), LOSS, sample=rows()[0][0])
    with pytest.raises(ValueError, match='"unshard" has the name of a method that fully_shard gives'):
        under(SHARDED, lambda: Lists("unshard"), rows(1), LOSS)


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
