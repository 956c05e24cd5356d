"""Models as people write them: hooks, forwards that write, lambdas, lists. On two ranks."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from parallel.models import Pair
from parallel.rows import VECTORS, Row, variant

DATA, ZERO, TENSOR = up.Plan(data=2), up.Plan(data=2, zero=3), up.Plan(tensor=2)
PIPELINE = up.Plan(pipeline=2, micro_batches=2)
SWAP = up.Plan(data=2, swap="disk")
TWICE, AGAIN = up.Plan(data=2, micro_batches=2), up.Plan(data=2, recompute=True)
LOW = up.Plan(data=2, precision="bf16")
LOSS = functional.cross_entropy


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


# ---- hooks ----


def hooked() -> nn.Module:
    model = chain()
    mask = (torch.arange(32 * 16).view(32, 16) % 3 > 0).float()
    model[0].weight.register_hook(lambda grad: (grad * mask).clamp(-0.01, 0.01))
    model[2].bias.register_hook(lambda grad: grad / grad.norm())
    gone = model[2].weight.register_hook(lambda grad: grad * 0)
    gone.remove()
    return model


def clip(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


def clipped() -> nn.Module:
    model = chain()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return model


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(chain())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def normed() -> nn.Module:
    model = Blocks()
    model.blocks[0] = nn.utils.weight_norm(model.blocks[0])
    return model


def scaled() -> nn.Module:
    model = Blocks()
    model.blocks[2].register_forward_pre_hook(lambda _, args: (args[0] * 0.7,))
    model.blocks[0].register_forward_hook(lambda _, args, output: output * 1.5)
    return model


def slowed(_: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 0.5)
    return torch.tanh(x)


UNITS = (AGAIN, up.Plan(tensor=2, recompute=True), SWAP)
HOOKS = {
    "hooks of parameters": Row(
        hooked, (DATA, up.Plan(data=2, zero=1, micro_batches=2), ZERO, TENSOR, PIPELINE),
        {'"0.weight" has a hook of register_hook, and swap': [SWAP]}, sample=None,
    ),
    "hooks of whole gradients": Row(
        clipped, (TWICE, PIPELINE),
        {'"0.weight" has a hook of register_post_accumulate_grad_hook.*a part of it': [ZERO, TENSOR]},
        sample=None,
    ),
    "a hook before a unit": Row(scaled, UNITS, sample=None),
    "a norm of a weight before a unit": Row(normed, UNITS, sample=None),
    "a hook of a tensor": Row(
        variant("Slowed", Pair, between=slowed), refused={"registers a hook on a tensor": [PIPELINE]}
    ),
}  # fmt: skip


# ---- a forward that writes ----


@torch.no_grad()
def clamp(model: nn.Module, _: Tensor) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def mask(model: Any, _: Tensor) -> None:
    """Writes the same again, by .data, as masked convolutions do."""
    model.fc1.weight.data *= torch.arange(16) % 2


@torch.no_grad()
def by_rows(model: Any, x: Tensor) -> None:
    model.fc1.bias.add_(x.mean())


class Follower(Pair):
    """A teacher that follows its student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(16, 32).requires_grad_(False)

    def before(self, x: Tensor) -> None:
        for mine, other in zip(self.teacher.parameters(), self.fc1.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * other.data

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.teacher.bias)


def in_place(*, add: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), InPlace(add=add), InPlace(add=add), nn.Linear(16, 4))


class InPlace(nn.Module):
    """A residual branch that begins with an activation in place, as in VQ-VAE; `add`: with a sum."""

    def __init__(self, *, add: bool = False) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.LeakyReLU(0.2, inplace=not add), nn.Linear(16, 16))
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        if self.add:
            x += 1
        return x + self.branch(x)


LOST = {
    "the forward writes the parameter .*this plan would lose it": [ZERO],
    "the forward writes the parameter .*swap= would lose": [SWAP],
}
WRITES = {
    "clamps its parameters": Row(variant("Clamped", Pair, before=clamp), (DATA, TWICE), LOST, sample=None),
    "masks a parameter": Row(variant("Masked", Pair, before=mask), (TWICE,), LOST, sample=None),
    "writes what differs": Row(
        variant("ByRows", Pair, before=by_rows),
        refused={'"fc1.bias", and data ranks write different values': [DATA]},
    ),
    "follows a student": Row(
        Follower, (DATA,),
        {
            "the forward writes the parameter .*this plan would lose it": [ZERO],
            "this step runs it 2 times, where one process runs it once": [TWICE],
            'puts other values in place of "teacher.weight"': [PIPELINE],
        },
    ),
    "freezes a parameter": Row(
        variant("Freezing", Pair, before=lambda model, _: model.fc2.bias.requires_grad_(False)),
        refused={'freezes "fc2.bias" while it runs': [PIPELINE]},
    ),
    "an activation in place": Row(in_place, (ZERO, SWAP, AGAIN), sample=None),
    "a sum in place": Row(
        lambda: in_place(add=True), sample=None,
        refused={r"writes into the tensor that its unit takes.*x = x": [ZERO, SWAP, AGAIN]},
    ),
}  # fmt: skip


# ---- lambdas, lists, functions ----


class Block(nn.Module):
    """Its branch is a lambda, as in minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.ModuleDict({"up": nn.Linear(16, 32), "act": nn.GELU(), "down": nn.Linear(32, 16)})
        m = self.mlp
        self.branch = lambda x: m["down"](m["act"](m["up"](x)))
        self.both = [lambda x: x, lambda x, norm=self.norm: norm(x)]

    def forward(self, x: Tensor) -> Tensor:
        return self.both[0](x) + self.branch(self.both[1](x))


class Noted(nn.Module):
    """A hook notes what it sees in the model, which a recording must not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)
        self.head.register_forward_pre_hook(lambda _module, args: self.note(args[0]))

    def note(self, x: Tensor) -> None:
        self.width = x.shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows, time, _ = x.shape
        q, k, v = (layer(x).view(rows, time, 4, 4).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).contiguous().view(rows, time, -1))


class Heads(nn.Module):
    """The attention is called by its forward, as in llama2.c; its number of heads is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention.forward(self.norm(x))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList([Heads(), Heads()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x.abs().long() % 16)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Pairs(nn.Module):
    """A list of lists: nothing calls the inner ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(16), nn.Linear(16, 16), nn.ParameterList([torch.ones(16)])])
            for _ in range(2)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear, gains in self.layers:
            x = x + torch.tanh(linear(norm(x))) * gains[0]
        return self.head(x)


def scripted(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x)


@functools.cache
def script() -> Any:
    """The scripted function, whose backward is one function after three calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        made = torch.jit.script(scripted)
    for _ in range(3):
        made(torch.ones(2, requires_grad=True)).sum().backward()
    return made


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


FORWARDS = {
    "lambdas in attributes": Row(Noted, (TENSOR, PIPELINE), gradients=True),
    "a module called by its forward": Row(
        Words, (TENSOR, PIPELINE),
        holds=lambda run: run.cut is None or run.cut.parameters[0] > 0.5 * run.cut.parameters[1],
    ),
    "lists of lists": Row(Pairs, (ZERO, SWAP), sample=None),
    "a scripted function": Row(
        variant("Scripted", Pair, lambda _: script(), between=lambda _, x: script()(x)), (TENSOR, DATA),
        {"runs a torch.autograd.Function": [PIPELINE]},
    ),
    "a gradient within the forward": Row(
        Forces, (DATA, TENSOR, PIPELINE), given=[(x, x.flip(0)) for x, _ in VECTORS],
        refused={r"recompute=True: .*takes gradients.*Write recompute=False": [AGAIN]},
        loss=functional.mse_loss,
    ),
}  # fmt: skip


TABLE = HOOKS | WRITES | FORWARDS
