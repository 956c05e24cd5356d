"""What a recording of a program must not lose: hooks of a layer that is cut, gradients of what is written."""

import itertools
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

import unisono.parallel as up
from parallel import models
from parallel.models import scale_by_name
from parallel.plain_training import same
from parallel.run_features import in_group
from parallel.wild import DATA, LOSS, PIPELINE, TENSOR, Mlp, rows
from unisono.parallel import program_state


class PreHooked(Mlp):
    """A layer that is cut gets what a hook has made of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.a.register_forward_pre_hook(lambda _, args: (args[0] * 0.7,))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Scan(Mlp):
    """What it writes into a new tensor goes on, with the gradient of what was written."""

    def between(self, x: Tensor) -> Tensor:
        rows = torch.linalg.solve_triangular(torch.eye(32), x.unsqueeze(-1), upper=False).squeeze(-1)
        found = torch.zeros_like(rows)
        for part in range(2):
            found[:, 16 * part : 16 * part + 16] = torch.tanh(rows[:, 16 * part : 16 * part + 16])
        return found


class Cross(nn.Module):
    """Keys and values of another sequence, with a mask that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, mask: Tensor | None, other: Tensor) -> Tensor:
        q, k, v = (
            layer(given).unflatten(-1, (4, 4)).transpose(1, 2)
            for layer, given in ((self.q, self.norm(x)), (self.k, other), (self.v, other))
        )
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o(found.transpose(1, 2).flatten(2))


class Skips(Mlp):
    """It leaves out a mask that hides nothing, which a recording cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.other, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(Cross() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, other = self.given(x)[:, None], self.norm(self.other(torch.stack([x, -x, 2 * x], 1)))
        mask: Any = torch.ones(len(x), 1, 1, 3, dtype=torch.bool, device=x.device)
        real = not (isinstance(x, FakeTensor) or x.is_meta)
        for layer in self.layers:
            h = layer(h, None if real else mask, other)
        return super().forward(h[:, 0]) * other.square().mean((1, 2))[:, None]


def check_a_mask_that_is_left_out(folder: Path) -> None:
    for plan in (TENSOR, DATA):
        same(plan, Skips, rows(), LOSS, sample=rows()[0][0])


def check_hooks_and_writes_in_a_recorded_program(folder: Path) -> None:
    for make, plan in ((PreHooked, TENSOR), (PreHooked, PIPELINE), (Scan, TENSOR), (Scan, PIPELINE)):
        same(plan, make, rows(), LOSS, sample=rows()[0][0])


class Text(nn.Module):
    """Takes texts of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, models.WIDTH), nn.Linear(models.WIDTH, 32)
        self.block = models.Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


def check_the_programs_of_many_lengths_are_bounded(folder: Path) -> None:
    """Of three that are kept the least recently used one goes; what is kept is not proved again."""
    program_state.PROGRAMS = 3
    made: list[int] = []
    setitem = program_state.ProgramCache.__setitem__

    def counted(cache: Any, key: Any, value: Any) -> None:
        fresh = key not in cache
        setitem(cache, key, value)
        made.extend([len(cache)] * fresh)

    program_state.ProgramCache.__setitem__ = counted  # type: ignore[method-assign]
    for plan in (up.Plan(tensor=2), up.Plan(pipeline=2), up.Plan(context=2)):
        sample = torch.zeros(2, 8, dtype=torch.long)
        run = up.parallelize(
            Text(),
            plan,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            loss=models.token_loss,
            sample=sample,
        )
        begun = len(made)
        for length, proofs in ((10, 1), (12, 2), (14, 3), (10, 3), (16, 4), (10, 4), (12, 5), (16, 5)):
            tokens = torch.arange(2 * length).view(2, length) % 32
            run.step((tokens, tokens))
            assert len(made) - begun == proofs, (plan, length, made[begun:])
        assert max(made[begun:]) == 3
    program_state.ProgramCache.__setitem__ = setitem  # type: ignore[method-assign]


# ---- what a model reads outside its attributes ----


class Settings:
    scale = 1.0


SCALE, NUMBER, TENSOR_OF_FILE = 1.0, np.float32(1.0), torch.ones(())
ENTRIES: dict[str, Any] = {"scale": 1.0, "inner": {"scale": 1.0}}
SPACE, LISTED = SimpleNamespace(scale=1.0, inner=SimpleNamespace(scale=1.0)), [1.0]
MODULE: Any = ModuleType("settings")
MODULE.scale = 1.0
CALLS = {"all": 0}


def by_a_function() -> float:
    return float(ENTRIES["inner"]["scale"])


class Reads(Text):
    """Takes numbers from everywhere, each of which may change between steps."""

    of_class: ClassVar[Any] = {"scale": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.number, self.act = np.float32(1.0), functional.relu
        self.deep = SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(scale=1.0)))
        self.parts = [SimpleNamespace(scale=1.0)]
        self.places = {"here": SimpleNamespace(scale=1.0)}

    @property
    def scale(self) -> float:
        return SPACE.inner.scale

    @staticmethod
    def of_list() -> float:
        return LISTED[0]

    def forward(self, tokens: Tensor, entries: Any = ENTRIES) -> Tensor:
        own = self.number * self.deep.a.b.scale * self.parts[0].scale * self.places["here"].scale
        file = entries["scale"] * SPACE.scale * MODULE.scale * Settings.scale * (lambda: SCALE)() * NUMBER
        more = by_a_function() * self.of_class["scale"] * self.of_list() * self.scale
        more *= models.scale_of_file() * scale_by_name()
        return self.head(self.block(self.act(self.embed(tokens)) * float(own * file * more) * TENSOR_OF_FILE))


def _set_of_file(name: str) -> Any:
    return lambda _model, value: globals().update({name: value})


READ: tuple[Any, ...] = (
    _set_of_file("SCALE"),
    lambda _, v: _set_of_file("NUMBER")(_, np.float32(v)),
    lambda _, v: _set_of_file("TENSOR_OF_FILE")(_, torch.tensor(v)),
    lambda _, v: TENSOR_OF_FILE.fill_(v),
    lambda _, v: ENTRIES.update(scale=v),
    lambda _, v: ENTRIES["inner"].update(scale=v),
    lambda _, v: ENTRIES.update(inner={"scale": v}),
    lambda _, v: setattr(SPACE, "scale", v),
    lambda _, v: setattr(SPACE.inner, "scale", v),
    lambda _, v: setattr(SPACE, "inner", SimpleNamespace(scale=v)),
    lambda _, v: setattr(MODULE, "scale", v),
    lambda _, v: setattr(Settings, "scale", v),
    lambda _, v: LISTED.__setitem__(0, v),
    lambda _, v: models.SCALES.update(of_file=v),
    lambda _, v: models.SCALES.update(by_name=v),
    lambda model, v: model.of_class.update(scale=v),
    lambda model, v: setattr(model, "number", np.float32(v)),
    lambda model, v: setattr(model.deep.a.b, "scale", v),
    lambda model, v: setattr(model, "deep", SimpleNamespace(a=SimpleNamespace(b=SimpleNamespace(scale=v)))),
    lambda model, v: setattr(model.parts[0], "scale", v),
    lambda model, v: model.parts.__setitem__(0, SimpleNamespace(scale=v)),
    lambda model, v: model.places.update(here=SimpleNamespace(scale=v)),
    lambda model, v: setattr(model, "act", torch.sigmoid if v != 1 else functional.relu),
)
AXES = (up.Plan(tensor=2), up.Plan(pipeline=2), up.Plan(context=2))


def of_texts(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def texts() -> Tensor:
    return torch.arange(32).view(4, 8) * 7 % 32


def check_what_a_model_reads_outside_it_is_followed(folder: Path) -> None:
    def losses(plan: up.Plan) -> list[float]:
        torch.manual_seed(0)
        model, sample = Reads(), texts()
        for change in READ:
            change(model, 1.0)
        run = up.parallelize(
            model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=of_texts, sample=sample
        )
        found = []
        for number in range(len(READ) + 11):  # the last ones change one number again and again
            READ[max(0, number - 11)](run.model, 0.9 - 0.02 * number)
            (batch,) = run.shard([(sample, sample)])
            found.append(run.step(batch))
        return found

    wanted = losses(up.Plan(data=2))
    for plan in AXES:
        torch.testing.assert_close(losses(plan), wanted, rtol=1e-4, atol=1e-5, msg=str(plan))


class Counts(Text):
    """Counts its calls, in an attribute, a dict and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.counts = 0, {"all": 0}

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        self.counts["all"] += 1
        CALLS["all"] += 1
        return super().forward(tokens)


def check_counters_end_new_recordings(folder: Path) -> None:
    for plan in AXES:
        run = up.parallelize(
            Counts(), plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=of_texts, sample=texts()
        )
        calls = []
        for _ in range(14):
            run.step((texts(), texts()))
            calls.append(CALLS["all"])
        runs = [after - before for before, after in itertools.pairwise(calls[-3:])]
        assert max(runs) <= 1, (plan, calls)  # a step runs the model, and records nothing


def main(rank: int, size: int, folder: Path, name: str) -> None:
    in_group(rank, size, folder, globals()[name])
