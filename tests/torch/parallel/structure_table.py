"""What a model does decides how it is cut, and no name: chains, pieces, a first batch. On two ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel import models, sweep
from parallel.model_table import DATA, PIPELINE, TENSOR
from parallel.model_table import ZERO as SHARDED
from parallel.rows import Row

WIDTH = 8
MEMORY = up.Plan(data=2, swap="memory")
ALL = (DATA, SHARDED, TENSOR, PIPELINE)
GENERATOR = torch.Generator().manual_seed(1)
ROWS_OF_8 = [tuple(torch.randn(8, WIDTH, generator=GENERATOR) for _ in range(2)) for _ in range(3)]
IDS = [(ids, ids) for ids in torch.randint(11, (3, 4, 6), generator=GENERATOR)]
IMAGES = [(torch.randn(4, 3, 8, 8, generator=GENERATOR), torch.arange(4)) for _ in range(3)]
HALVES = [
    (dict(zip(("left", "right"), torch.randn(2, 4, 8, generator=GENERATOR), strict=True)), torch.arange(4))
    for _ in range(3)
]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def of_vectors(make: Any, trains: Any = (), refused: Any = {}, **more: Any) -> Row:  # noqa: B006
    return Row(make, trains, refused, ROWS_OF_8, functional.mse_loss, **{"sample": None, **more})


# ---- names say nothing ----


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(11, WIDTH), linear(), nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embed(ids))))


def times(output: Any, factor: Any) -> Any:
    output.logits = output.logits * factor
    return output


def hooked_output(model: Any) -> None:
    model.register_forward_hook(lambda _module, _args, output: times(output, 3.0))


def wrapped(model: Any) -> None:
    inner = model.forward
    model.forward = lambda *args, **named: times(inner(*args, **named), 2.0)


def gained(model: Any) -> None:
    model.gain = nn.Parameter(torch.tensor(1.5))
    model.register_forward_hook(lambda module, _args, output: times(output, module.gain))


def changed(make: Any, change: Any) -> Any:
    def made() -> nn.Module:
        model = make()
        change(model)
        return model

    return made


NAMES = {
    f"a class named {name}": Row(
        type(name, (Words,), {}), ALL, given=IDS, loss=models.token_loss, sample=None
    )
    for name in swept(("LlamaForCausalLM", "Sequential"), ("GPT2LMHeadModel", "Qwen2ForCausalLM"))
}
SURROUNDED = {
    f"{make.__name__}, {change.__name__}": Row(
        changed(make, change),
        (PIPELINE,),
        given=models.text_batches(2, 4),
        loss=models.token_loss,
        sample=None,
    )
    for make in (models.gpt2, models.llama)
    for change in (hooked_output, wrapped, gained)
    if sweep.HAVE_TRANSFORMERS
}


# ---- an nn.Sequential runs its entries as they stand ----


def twice(kind: Callable[[], nn.Module]) -> nn.Module:
    one = kind()
    return nn.Sequential(linear(), one, nn.Tanh(), one, linear(), one)


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
    return [linear(), nn.Tanh(), linear(), nn.Tanh(), linear()]


def hooked(*, before: bool) -> nn.Module:
    model = nn.Sequential(*layers())
    if before:
        model.register_forward_pre_hook(lambda _module, args: (args[0] * 2.0,))
    else:
        model.register_forward_hook(lambda _module, _args, output: output * 2.0)
    return model


class Gives(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(x)


class Takes(nn.Module):
    def forward(self, given: Any) -> Tensor:
        return given if isinstance(given, Tensor) else next(iter(getattr(given, "values", lambda: given)()))


class Counted(nn.Module):
    """A stage may return a tuple, of which one tensor has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
        ones = torch.ones(len(x), dtype=torch.int64)
        return torch.tanh(self.layer(x)), ones if count is None else count + 1


class Last(nn.Linear):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * count.unsqueeze(1)


class Spread(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](*self[1](*self[0](x)))


def one_norm() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(linear(), norm, linear(), norm)


SENT: dict[str, Any] = {
    "a list": lambda x: [x, x], "a dict": lambda x: {"x": x}, "a number": lambda x: (x, 3),
    "None": lambda x: (x, None), "a tuple": lambda x: (x,),
}  # fmt: skip
THREE = {"pipeline": 2, "micro_batches": 3}
VIEWS = up.Plan(pipeline=2, micro_batches=2, schedule="zbv", cuts=(1, 2, 3))
OF_16 = {
    "several outputs, and other shapes": Row(
        lambda: Spread(Counted(), Counted(), Last(16, 4)),
        [up.Plan(**THREE), up.Plan(**THREE, schedule="zb-h1")],
        given=[models.vector_batches(1, rows)[0] for rows in (7, 3, 2, 7)], sample=None,
        options={"pieces": list},
    ),
    "in place after a cut layer": Row(
        lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)),
        [up.Plan(tensor=2, zero=3), TENSOR], sample=None,
    ),
    "a stage that returns a view": Row(
        lambda: nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Linear(4, 4), nn.Flatten(), nn.Linear(16, 4)),
        [VIEWS], sample=None,
    ),
}  # fmt: skip
CHAINS = {
    f"a chain with {name}": of_vectors(make, swept((PIPELINE, SHARDED), [up.Plan(pipeline=2)]))
    for name, make in {
        "one activation": lambda: twice(nn.ReLU),
        "one layer": lambda: twice(linear),
        "a product of two": lambda: nn.Sequential(
            linear(), Two(*layers()[:3:2]), Product(WIDTH, WIDTH), linear()
        ),
        "another order": lambda: Backwards(*layers()),
        "another call": lambda: Called(*layers()),
        "a parameter of its own": lambda: Scaled(*layers()),
        "a hook before it": lambda: hooked(before=True),
        "a hook after it": lambda: hooked(before=False),
    }.items()
} | {
    f"a stage that ends with {name}": of_vectors(
        lambda kind=kind: nn.Sequential(linear(), Gives(kind), Takes()),
        refused={"a stage ends with a Gives, which returned a": [up.Plan(pipeline=2, cuts=(2,))]},
    )
    for name, kind in SENT.items()
} | {
    "a norm of two stages": of_vectors(
        one_norm, refused={"a BatchNorm1d with buffers runs in stages 0 and 1": [up.Plan(pipeline=2)]}
    ),
}  # fmt: skip


# ---- pieces ----


class Pooled(Words):
    """It has a layer that its forward does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = linear()


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


def pieces(make: Any, cut: Any, refused: Any = None) -> Row:
    def has_its_names(run: up.Run) -> bool:  # on rank 0; a closed swap has no state
        return run.plan.swap is not None or set(run.state_dict()) in (set(), set(make().state_dict()))

    plans = () if refused else (PIPELINE, SHARDED, MEMORY)
    return Row(
        make, plans, refused or {}, IDS, models.token_loss, sample=None, holds=has_its_names,
        options={"pieces": cut},
    )  # fmt: skip


def plain(m: Any) -> list[nn.Module]:
    return [m.embed, nn.Sequential(m.layer, nn.Tanh(), m.head)]


def spread(m: Any) -> list[nn.Module]:
    """Equal values, another program."""
    return [Pair(m.embed), Sum(m.layer, nn.Tanh(), m.head)]


PIECES = {
    "pieces": pieces(Words, plain),
    "pieces without a layer": pieces(Pooled, plain),
    "pieces of another program": pieces(Pooled, spread),
    "pieces of another function": pieces(
        Pooled, lambda m: [m.embed, nn.Sequential(m.layer, nn.ReLU(), m.head)],
        {"aten.tanh there, aten.relu here": [PIPELINE]},
    ),
    "pieces without a hook": pieces(
        Doubled, plain, {"does not compute what Doubled does: .* aten.mul there": [PIPELINE]}
    ),
    "pieces without a branch": pieces(
        Gated, plain, {'pieces= leaves out the parameter "gate.bias" of Gated': [PIPELINE]}
    ),
    "pieces with a parameter more": pieces(
        Pooled, lambda m: [m.embed, Own(m.layer, nn.Tanh(), m.head)],
        {'a Own with the parameter "gain"': [PIPELINE]},
    ),
}  # fmt: skip


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


UNSAMPLED = {
    "images without a sample": Row(Images, (TENSOR, PIPELINE), given=IMAGES, sample=None),
    "keywords without a sample": Row(Keywords, (TENSOR, PIPELINE), given=HALVES, sample=None),
}


# ---- names of children ----


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        for leaf in (name, "last"):
            setattr(self, leaf, linear())

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


CHILDREN = {
    f"a child named {name}": of_vectors(
        lambda name=name: Lists(name), (*ALL, MEMORY), sample=ROWS_OF_8[0][0]
    )
    for name in swept(("children", "train"), ("type", "register_buffer", "named_modules", "values"))
} | {
    "a child named unshard": of_vectors(
        lambda: Lists("unshard"),
        refused={'"unshard" has the name of a method that fully_shard gives': [SHARDED]},
    ),
}  # fmt: skip
TABLE = NAMES | SURROUNDED | OF_16 | CHAINS | PIECES | UNSAMPLED | CHILDREN
