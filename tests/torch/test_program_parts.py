"""Parts of recorded programs: prepared arguments, and what tells one program from another."""

import itertools
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from inside_parallel import ModelRecorder, ModuleSettings, Ref, template
from unisono.parallel import CaptureError


@pytest.mark.parametrize(
    "thing",
    [
        (), Ref(1), (Ref(1), 2, None), ([Ref(1), Ref(2)], {"dim": -1, "out": (Ref(3), torch.float32)}),
        ((1, 2), "x"), (slice(0, 3), Ref(2)), OrderedDict(a=Ref(1), b=[1.5]), ([], {}),
    ],
)  # fmt: skip
def test_a_template_fills_as_a_map_does(thing: Any) -> None:
    values = {number: object() for number in range(4)}
    filled = template(thing)(lambda ref: values[ref.value])

    def is_ref(leaf: Any) -> bool:
        return isinstance(leaf, Ref)

    assert filled == tree_map(
        lambda leaf: values[leaf.value] if is_ref(leaf) else leaf, thing, is_leaf=is_ref
    )
    assert type(filled) is type(thing) or isinstance(thing, Ref)


def test_containers_of_a_template_are_new_each_time() -> None:
    fill = template(([1, 2], {"a": [Ref(0)]}))
    (first, _), (second, _) = fill(id), fill(id)
    first.append(3)
    assert second == [1, 2]


class Flags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sizes, self.names = nn.Linear(2, 2), [1, 2], {"a": 1}
        self.config, self.held = SimpleNamespace(depth=3, heads=[4]), torch.zeros(2)


def changes() -> dict[str, Any]:
    """Ways to change a module that make another program of it."""
    return {
        "a flag": lambda m: m.eval(),
        "an entry of a list": lambda m: m.sizes.append(3),
        "an entry of a dict": lambda m: m.names.update(a=2),
        "a field of a configuration": lambda m: setattr(m.config, "depth", 4),
        "a list of a configuration": lambda m: m.config.heads.append(5),
        "another attribute": lambda m: setattr(m, "more", 1),
        "one attribute less": lambda m: delattr(m, "sizes"),
        "another name": lambda m: (setattr(m, "other", m.sizes), delattr(m, "sizes")),
        "a tensor of another shape": lambda m: m.held.resize_(3),
        "a flag of a module inside": lambda m: m.layer.train(False),
    }


@pytest.mark.parametrize("what", changes())
def test_settings_that_change_have_another_key(what: str) -> None:
    model = Flags()
    settings = ModuleSettings(model)
    before = settings.now()
    assert settings.now() is before
    changes()[what](model)
    assert settings.now() != before
    assert settings.now() == ModuleSettings(model).now()


class Turns(nn.Module):
    """Takes the results of its layer in another order now and then."""

    def __init__(self, turn: Any) -> None:
        super().__init__()
        self.layer, self.turn = nn.Linear(2, 4), turn

    def forward(self, x: Tensor) -> Any:
        first, second = self.layer(x).chunk(2, -1)
        return (first, second) if self.ahead() else (second, first)

    def ahead(self) -> bool:
        return True


class Counter(Turns):
    def ahead(self) -> bool:
        self.turn += 1
        return bool(self.turn % 2)


class Modulo(Turns):
    def ahead(self) -> bool:
        self.turn = (self.turn + 1) % 3
        return self.turn > 0


class Cycle(Turns):
    def ahead(self) -> bool:
        return bool(next(self.turn))


class Queue(Turns):
    def ahead(self) -> bool:
        self.turn.rotate(1)
        return bool(self.turn[0])


class Array(Turns):
    def ahead(self) -> bool:
        self.turn += 1
        return bool(self.turn[0] % 2)


class Waves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(super().forward(x)).real


def recorded(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    recorder = ModelRecorder(model, dtype, ValueError, where="a pipeline", remedy="Write pieces=[...]")
    return recorder.record(torch.ones(3, 2, dtype=dtype))


@pytest.mark.parametrize(
    "model",
    [
        Counter(0), Modulo(0), Cycle(itertools.cycle([1, 0])), Cycle(itertools.cycle([1, 1, 1, 0])),
        Queue(deque([1, 0])), Array(np.zeros(2)), Array(np.zeros(1)),
    ],
)  # fmt: skip
def test_a_model_that_returns_its_tensors_in_turn_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match='changes "turn" while it runs, and runs another program then'):
        recorded(model)


def test_one_that_only_counts_is_recorded() -> None:
    assert recorded(Turns(itertools.count())).outputs != recorded(Cycle(itertools.repeat(0))).outputs


def test_a_type_in_which_a_program_cannot_be_recorded_is_named() -> None:
    model = Waves(2, 4)
    model.register_buffer("table", torch.ones(2))
    remedy = r"write module.table = module.table.bfloat16\(\) .*; or write precision='autocast', which"
    with pytest.raises(CaptureError, match=remedy):
        recorded(model, torch.bfloat16)
    with pytest.raises(CaptureError) as other:
        recorded(nn.Linear(3, 4), torch.bfloat16)  # other widths are no matter of types
    assert "autocast" not in str(other.value)
