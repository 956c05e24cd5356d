"""Parameters of all kinds, and what models take and return. On two ranks."""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import swept
from parallel import models, sweep
from parallel.model_table import DATA, LOSS, LOW, PIPELINE, TENSOR, ZERO
from parallel.models import Pair
from parallel.rows import VECTORS, Row, variant
from parallel.tensor_table import text_row


class Waves(nn.Module):
    """A complex weight beside f32 ones, as in FNO and S5."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        self.weight = nn.Parameter(torch.randn(9, 9, dtype=torch.complex64) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return self.head(x + torch.fft.irfft(torch.fft.rfft(x.float()) @ self.weight, n=16))


class Absent(nn.Linear):
    """PyTorch has no complex numbers of two bf16."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.view_as_complex(y.unflatten(-1, (-1, 2))).abs().repeat(1, 2)


class Table(Pair):
    """Its table is a buffer, which low precision leaves in f32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, 32))

    def between(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.table) @ torch.ones(4, 32, dtype=x.dtype)


def inside() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Table())


def mixed() -> nn.Module:
    model = Pair()
    model.fc2.double()
    return model


def bag(*, sparse: bool = False) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(32, 16, mode="sum", sparse=sparse), nn.Linear(16, 4))


def by_rank(model: Any, x: Tensor) -> Tensor:
    return model.extra(x) if dist.get_rank() else torch.tanh(x)


def embedding(**more: Any) -> Any:
    return lambda: nn.Sequential(nn.Embedding(8, 4, **more), nn.Flatten())


def transposed(model: Any) -> None:
    model.fc1.weight = nn.Parameter(torch.randn(16, 32).mul(0.1).t())


def with_complex(model: Any) -> None:
    model.c = nn.Linear(32, 32, dtype=torch.complex64)


def with_empty(model: Any) -> None:
    model.more = nn.Parameter(torch.zeros(0, 32))


def kept(plan: up.Plan, *names: str) -> up.Plan:
    return dataclasses.replace(plan, keep_f32=names)


PARAMETERS = {
    "complex weights of FNO": Row(Waves, (ZERO, up.Plan(data=2, zero=1, micro_batches=2), TENSOR)),
    "a complex layer": Row(
        variant("Complex", Pair, with_complex, between=lambda m, x: m.c(x.to(torch.complex64)).abs()),
        (DATA, TENSOR),
    ),
    "no complex numbers in bf16": Row(
        lambda: Absent(16, 4), refused={r"PyTorch does not have in bf16.*keep_f32": [LOW]}
    ),
    "a transposed weight": Row(variant("Turned", Pair, transposed), (ZERO,)),
    "an empty parameter": Row(
        variant("Empty", Pair, with_empty, between=lambda m, x: torch.cat([x, m.more])),
        (DATA, ZERO, TENSOR, PIPELINE),
    ),
    "sparse gradients": Row(
        lambda: bag(sparse=True), (DATA, ZERO, TENSOR), compare={"beside": bag},
        given=[(x.abs().mul(7).long().clamp(max=31), y) for x, y in VECTORS],
    ),
    "no shape yet": Row(
        lambda: nn.Sequential(nn.LazyLinear(4)),
        refused={'"weight" of "0" .LazyLinear. has no shape yet': [DATA, TENSOR]},
    ),
    "a script": Row(lambda: torch.jit.script(Pair()), refused={"Pair|TorchScript": [DATA, TENSOR]}),
    "an embedding that writes": Row(embedding(max_norm=1.0), refused={"max_norm=1.0": [DATA]}),
    "an embedding that counts": Row(embedding(scale_grad_by_freq=True), refused={"scale_grad": [DATA]}),
    "parameters of two types": Row(
        mixed, refused={'"fc1.weight" is torch.float32 and "fc2.weight" is torch.float64': [ZERO]}
    ),
    "SparseAdam": Row(
        Pair, refused={"SparseAdam": [DATA]}, options={"optimizer": torch.optim.SparseAdam}
    ),
    "a layer of one rank": Row(
        variant("ByRank", Pair, lambda m: setattr(m, "extra", nn.Linear(32, 32)), between=by_rank),
        refused={r"different parameters under .* write Plan\(uneven_use=True\)": [ZERO]},
    ),
    "a table in f32": Row(
        Table,
        refused={
            r"precision='bf16': Table, at .*_table.py:\d+, mixes bf16 with another type.*keep_f32": [LOW],
            "write precision='autocast' without pipeline=; or keep": [up.Plan(pipeline=2, precision="bf16")],
        },
    ),
    "a table in f32 in a chain": Row(
        inside, [kept(LOW, "1")], compare={"tolerance": 5e-2},
        refused={
            r'"1" \(Table\), at .* mixes': [LOW], "write precision='autocast'; or keep": [LOW],
            "write precision='autocast' without keep_f32=; or keep": [kept(LOW, "0")],
        },
    ),
}  # fmt: skip


# ---- inputs and outputs ----


@dataclasses.dataclass
class Given:
    """What a model is called with, and what it returns."""

    x: Tensor
    scale: float = 0.5


class Named(NamedTuple):
    x: Tensor
    mask: Tensor


class Takes(Pair):
    def forward(self, given: Any) -> Any:
        x = super().forward(given.x)
        return Given(x * given.scale) if isinstance(given, Given) else Named(x, given.mask)


def distribution(model: Pair, x: Tensor) -> Any:
    return torch.distributions.Categorical(logits=Pair.forward(model, x), validate_args=False)


def of_x(output: Any, targets: Tensor) -> Tensor:
    return LOSS(output.x, targets)


ALL = (DATA, ZERO, TENSOR, PIPELINE)
CONTAINERS = {
    "a dataclass": Row(Takes, ALL, given=[((Given(x),), y) for x, y in VECTORS], loss=of_x),
    "a named tuple": Row(Takes, ALL, given=[((Named(x, x > 0),), y) for x, y in VECTORS], loss=of_x),
    "an output that hides tensors": Row(
        variant("Spread", Pair, forward=distribution), (DATA,),
        {r"Spread returns a Categorical, which hides its tensors": [ZERO]},
        loss=lambda found, y: -getattr(found, "logits", found).gather(1, y[:, None]).mean(), sample=None,
    ),
}  # fmt: skip


# ---- frozen, tied and without dimensions ----


def fused_frozen() -> nn.Module:
    model = models.gpt2()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("c_attn.weight" not in name)
        parameter.noted = name
    return model


def stays_frozen(run: up.Run) -> bool:
    return all(
        parameter.requires_grad == (".c_attn." not in name or name.endswith("bias"))
        for name, parameter in run.model.named_parameters()
    )


class LoRA(nn.Module):
    """A layer of GPT-2 that is frozen, with an adapter in low rank."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.weight, self.bias = inner.weight, inner.bias  # what peft's layers show, too
        wide, out = inner.weight.shape
        self.down, self.up = nn.Linear(wide, 2, bias=False), nn.Linear(2, out, bias=False)
        inner.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def with_adapters() -> nn.Module:
    model: Any = models.gpt2().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn)
    return model


def tied_frozen() -> nn.Module:
    model: Any = models.gpt(tied=True)
    model[0].token.weight.requires_grad_(False)
    return model


class Scaled(nn.Module):
    """A model with a parameter that has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(16, 4), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


def frozen_layer() -> nn.Module:
    model: Any = models.mlp()
    model[0].requires_grad_(False)
    return model


ZERO1, ZERO2 = up.Plan(data=2, zero=1), up.Plan(data=2, zero=2)
STAGES = up.Plan(pipeline=2)
SCALARS = (
    DATA, up.Plan(data=2, swap="memory"), up.Plan(data=2, compression=up.PowerSGD(rank=2)), ZERO1,
    up.Plan(data=2, zero=2, micro_batches=2), ZERO, up.Plan(tensor=2, zero=1),
)  # fmt: skip
NORMS = tuple(
    up.Plan(**more, clip=1.0)
    for more in (
        {"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2, "zero": 1}, {"pipeline": 2},
        {"pipeline": 2, "schedule": "zbv"},
    )
)  # fmt: skip
FROZEN = {
    "a norm that is clipped": text_row(
        lambda: models.gpt(tied=True), trains=swept(NORMS[1:4], (NORMS[0], NORMS[4])), sample=None
    ),
    "a layer is frozen": Row(
        frozen_layer, (ZERO2, up.Plan(pipeline=2, schedule="zb-h1", micro_batches=2)), sample=None,
        given=models.vector_batches(5, 8), compare={"state": True},
    ),
    "a tied parameter is frozen": text_row(
        tied_frozen,
        trains=swept((ZERO2, TENSOR, STAGES), (DATA, up.Plan(pipeline=2, schedule="zbv", micro_batches=2))),
    ),
    "no dimensions": Row(Scaled, SCALARS),
    "no dimensions in bf16": Row(
        Scaled, (LOW, up.Plan(data=2, zero=2, precision="bf16")), compare={"tolerance": 5e-2}
    ),
}  # fmt: skip
if sweep.HAVE_TRANSFORMERS:
    FROZEN |= {
        "a fused layer stays frozen": text_row(
            fused_frozen, trains=(DATA, ZERO2, TENSOR, STAGES), holds=stays_frozen
        ),
        "an adapter of a fused layer": text_row(with_adapters, trains=(DATA, ZERO1, STAGES, TENSOR)),
    }  # fmt: skip
TABLE = PARAMETERS | CONTAINERS | FROZEN
