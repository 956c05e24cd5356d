"""What a program depends on outside its recording: numbers, modules, hooks, decisions. On two ranks."""

import itertools
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
from effort import SWEEP, crossed, swept
from parallel import models
from parallel.call_table import CONTEXT, POSITIONS, of_positions
from parallel.model_table import PIPELINE, TENSOR
from parallel.models import Pair, scale_by_name
from parallel.plain_training import begun
from unisono.parallel import program_state


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
    for plan in swept(AXES[1:2], (AXES[0], AXES[2])):
        sample = torch.zeros(2, 8, dtype=torch.long)
        run = begun(plan, Text, models.token_loss, optimizer=plain_sgd, sample=sample)
        first = len(made)
        for length, proofs in ((10, 1), (12, 2), (14, 3), (10, 3), (16, 4), (10, 4), (12, 5), (16, 5)):
            tokens = torch.arange(2 * length).view(2, length) % 32
            run.step((tokens, tokens))
            assert len(made) - first == proofs, (plan, length, made[first:])
        assert max(made[first:]) == 3
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
AGAIN = 10  # more than program_state.COUNTS, after which a number is a counter
AXES = (TENSOR, up.Plan(pipeline=2), CONTEXT)


TEXTS = torch.arange(32).view(4, 8) * 7 % 32


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def unchanged() -> nn.Module:
    model = Reads()
    for change in READ:
        change(model, 1.0)
    return model


def check_what_a_model_reads_outside_it_is_followed(folder: Path) -> None:
    """Each source under one axis, in the sweep under all; and one number that changes again and again."""

    def losses(plan: up.Plan, changes: Any) -> list[float]:
        found = []
        run = begun(plan, unchanged, of_positions, optimizer=plain_sgd, sample=TEXTS)
        for number, change in enumerate(changes):
            change(run.model, 0.9 - 0.02 * number)
            found += [run.step(batch) for batch in run.shard([(TEXTS, TEXTS)])]
        return found

    for place, plan in enumerate(AXES):
        sources = READ if SWEEP else READ[place :: len(AXES)]
        changes = [READ[0]] * (AGAIN if SWEEP or place == 0 else 0) + [*sources]
        wanted = losses(up.Plan(data=2), changes)
        torch.testing.assert_close(losses(plan, changes), wanted, rtol=1e-4, atol=1e-5, msg=str(plan))


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
    for plan in swept(AXES[:1], AXES[1:]):
        run = begun(plan, Counts, of_positions, optimizer=plain_sgd, sample=TEXTS)
        calls = []
        for _ in range(14):
            run.step((TEXTS, TEXTS))
            calls.append(CALLS["all"])
        runs = [after - before for before, after in itertools.pairwise(calls[-3:])]
        assert max(runs) <= 1, (plan, calls)  # a step runs the model, and records nothing


class Rates(Text):
    """Scales by an entry of a long list and of a long dict, and has a log."""

    def __init__(self) -> None:
        super().__init__()
        self.rates, self.named, self.log = [1.0] * 40, {str(n): 1.0 for n in range(200)}, list[float]()

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.rates[39] * self.named["199"]


def check_long_lists_and_dicts_are_followed(folder: Path) -> None:
    """Their entries once were those of the recording for good. A log, which grows, is no reason to record."""

    def losses(plan: up.Plan) -> list[float]:
        run = begun(plan, Rates, of_positions, optimizer=plain_sgd, sample=TEXTS)
        found = []
        for number in range(4):
            run.model.rates[39], run.model.named["199"] = 1.0 - 0.1 * number, 1.0 + 0.2 * number
            found += [run.step(batch) for batch in run.shard([(TEXTS, TEXTS)])]
        return found

    wanted = losses(up.Plan(data=2))
    for plan in AXES[1:]:
        torch.testing.assert_close(losses(plan), wanted, rtol=1e-4, atol=1e-5, msg=str(plan))
    model, keys = Rates(), list[Any]()
    settings = program_state.ModuleSettings(model, counters=True)
    for number in range(60):
        model.log.append(float(number))
        keys.append(settings.now())
    assert keys[-1] == keys[-10]


def check_a_module_called_by_itself(folder: Path) -> None:
    batch = models.vector_batches(1, 8)[0]
    run = begun(TENSOR, Pair, sample=batch[0])
    with pytest.raises(RuntimeError, match='"fc1" was called by itself, outside the model'):
        run.model.fc1(torch.ones(2, 16))
    run.step(batch)
    assert run.model(torch.ones(2, 16)).shape == (2, 4)


# ---- what changes after parallelize ----


def late_hook(model: Any) -> None:
    model.fc1.register_forward_hook(lambda _, args, output: output.softmax(-1))


def late_module(model: Any) -> None:
    model.fc2 = nn.Linear(32, 4)


def late_forward(model: Any) -> None:
    model.fc1.forward = lambda x: x.repeat(1, 2)


def check_what_changes_after_parallelize(folder: Path) -> None:
    (batch,) = POSITIONS
    looks = list[int]()
    changes = (
        (late_module, '"fc2" is another module than parallelize got'),
        (late_forward, '"fc1" has another forward than parallelize got'),
        (late_hook, 'a hook of "fc1", registered since|"fc1" has a hook since parallelize'),
        (lambda model: model.fc1.register_forward_hook(lambda *_: looks.append(1)), '"fc1" has a hook'),
        (lambda model: model.register_forward_hook(lambda *_: None), '"Pair" has a hook since'),
    )
    for plan, (change, says) in crossed((TENSOR, PIPELINE, CONTEXT), changes):
        run = begun(plan, Pair, of_positions, sample=batch[0])
        change(run.model)
        (mine,) = run.shard([batch])
        only_looks = plan is TENSOR and " a hook" in says and "registered" not in says
        if only_looks or (plan is PIPELINE and '"fc1" has a hook' in says):  # a stage calls the module
            run.step(mine)
            continue
        with pytest.raises((ValueError, RuntimeError), match=says):
            run.step(mine)
    assert looks


SOFT = False


class Outside(Pair):
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
        batch = models.vector_batches(1, 8)[0]
        run = begun(TENSOR, Outside, sample=batch[0])
        run.step(batch)
        if place == "class":
            Outside.soft = True
        SOFT = place == "global"
        with pytest.raises(ValueError, match="runs another program of Outside than the sample"):
            for _ in range(12 if place == "counter" else 1):
                run.step(batch)
        Outside.soft = SOFT = False
