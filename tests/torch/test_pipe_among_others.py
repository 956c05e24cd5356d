"""A pipeline in one process beside what else programs do with a model: index, copy, compile, change it."""

import copy
import gc
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import unisono.parallel as up

X = torch.randn(10, 8)


def net(drop: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    first = nn.Linear(8, 8), nn.Tanh(), nn.Dropout(drop)
    return nn.Sequential(*first, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def piped(mode: str = "except_last", drop: float = 0.0) -> up.Pipe:
    return up.Pipe(net(drop), 4, mode, balance=[3, 3])


def trained(module: nn.Module, call: Callable[[Any], Any]) -> list[Tensor]:
    """The output for X, the gradient of X, and those of the parameters."""
    x = X.clone().requires_grad_()
    output = call(x)
    output = output if isinstance(output, Tensor) else output.local_value()
    output.square().sum().backward()
    return [output, *(one.grad for one in (x, *module.parameters()))]


def test_its_children_are_those_of_the_sequential() -> None:
    plain, pipe = net(), piped()
    assert len(pipe) == 6
    assert [*pipe] == [pipe[place] for place in range(6)]
    assert pipe[-1] is [*pipe.children()][5]
    assert type(pipe[1:3]) is nn.Sequential
    assert [*pipe.state_dict()] == [*plain.state_dict()]
    expected = trained(plain, plain)
    for same in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        torch.testing.assert_close(trained(same, same), expected)
    pipe.append(pipe[1])
    with pytest.raises(ValueError, match="7 children, 6 different ones"):
        pipe(X)


def test_a_move_to_one_device_is_refused() -> None:
    pipe = up.Pipe(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta")))
    with pytest.raises(ValueError, match="on cpu, meta, and would all move to one device"):
        pipe.to("meta")
    assert pipe.double()[0].weight.dtype == torch.float64
    assert piped().to("meta")[0].weight.is_meta  # threads of one device


def test_a_stage_may_write_what_it_takes() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))
    pipe = up.Pipe(copy.deepcopy(plain), 2, "never", balance=[1, 2])
    torch.testing.assert_close(trained(pipe, pipe), trained(plain, plain))
    with pytest.raises(ValueError, match="is changed in place by the stage"):
        up.Pipe(plain, 2, "always", balance=[1, 2])(X)


class Masks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


@pytest.mark.parametrize(
    "change", ["parameter", "data", "module", "buffer", "data of a buffer", "functional_call"]
)
def test_what_changes_before_it_is_computed_again_is_refused(change: str) -> None:
    stage = nn.Sequential(nn.Linear(8, 8), Masks(), nn.ReLU())
    pipe = up.Pipe(nn.Sequential(stage, nn.Linear(8, 4)), 2, "always", balance=[1, 1])
    given = {name: one.detach().clone().requires_grad_() for name, one in pipe.named_parameters()}
    output = (functional_call(pipe, given, (X,)) if change == "functional_call" else pipe(X)).local_value()
    if change == "parameter":
        stage[0].weight = nn.Parameter(torch.ones(8, 8))
    elif change == "data":
        stage[0].weight.data = torch.ones(8, 8)
    elif change == "module":
        stage[2] = nn.Tanh()
    elif change == "buffer":
        stage[1].mask.mul_(2)
    elif change == "data of a buffer":
        stage[1].mask.data = torch.zeros(8)
    with pytest.raises(ValueError, match="was changed between forward and backward"):
        output.sum().backward()


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


@pytest.mark.parametrize("mode", ["never", "except_last"])
def test_other_data_of_parameters_count_as_in_the_sequential(mode: str) -> None:
    """Autograd saves a view of the weight of a Linear, with the old data, and of a product the factors."""
    found = []
    plain = nn.Sequential(nn.Linear(8, 8), Scales(), nn.Linear(8, 8), Scales()).double()
    for module in (
        plain,
        up.Pipe(copy.deepcopy(plain), 1 if mode == "except_last" else 2, mode, balance=[2, 2]),
    ):
        x = X.double().requires_grad_()
        output = module(x) if module is plain else module(x).local_value()
        for parameter in module.parameters():
            parameter.data = torch.full_like(parameter, 5.0)
        output.square().sum().backward()
        found.append([output, x.grad, *(parameter.grad for parameter in module.parameters())])
    torch.testing.assert_close(*found)


def test_statistics_that_are_read_may_not_change() -> None:
    norm = nn.BatchNorm1d(8)
    pipe = up.Pipe(nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 4)), 2, "always", balance=[2, 1])
    norm.eval()  # frozen, as in fine-tuning
    output = pipe(X).local_value()
    norm.running_mean.add_(1)
    with pytest.raises(ValueError, match="was changed between forward and backward"):
        output.sum().backward()


def test_functional_call_of_what_is_not_computed_again() -> None:
    plain, pipe = net(), piped("never")
    made = [
        {name: (one.detach() * 2).requires_grad_() for name, one in net().named_parameters()} for _ in "ab"
    ]
    for module, given in zip((plain, pipe), made, strict=True):
        trained(module, lambda x, module=module, given=given: functional_call(module, given, (x,)))
    torch.testing.assert_close(*([one.grad for one in given.values()] for given in made))


def test_statistics_of_two_stages_are_refused() -> None:
    norm = nn.BatchNorm1d(8)
    stages = [nn.Sequential(nn.Linear(8, 8), norm) for _ in range(2)]
    with pytest.raises(ValueError, match="stages 0 and 1 have the same BatchNorm1d"):
        up.Pipe(nn.Sequential(*stages), 2, balance=[1, 1])
    up.Pipe(nn.Sequential(*stages), 2)(X)


def test_modes_and_hooks_of_the_caller_see_the_stages() -> None:
    flops, saved = [], []
    for module in (net(), piped("never")):
        with FlopCounterMode(display=False) as counter, saved_tensors_hooks(saved.append, lambda _: None):
            module(X)
        flops.append(counter.get_total_flops())
        assert saved
        saved.clear()
    assert flops[0] == flops[1] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_it(reentrant: bool) -> None:
    expected, pipe = piped(drop=0.4), piped(drop=0.4)
    torch.manual_seed(1)
    outputs = trained(expected, expected)
    torch.manual_seed(1)
    found = trained(
        pipe, lambda x: checkpoint(lambda rows: pipe(rows).local_value(), x, use_reentrant=reentrant)
    )
    torch.testing.assert_close(found, outputs)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # PyTorch 2.12's generator
def test_a_checkpoint_that_draws_in_a_thread_is_refused() -> None:
    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(functional.dropout, x, use_reentrant=False)

    with pytest.raises(RuntimeError, match="runs within torch.utils.checkpoint, in a stage of a Pipe"):
        up.Pipe(nn.Sequential(nn.Linear(8, 8), Inside(), nn.Linear(8, 8)), 2, balance=[2, 1])(X)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[0][:, 0]


def test_operators_that_take_no_generator_draw_the_same_again() -> None:
    found = []
    for mode in ("never", "always"):
        torch.manual_seed(0)
        pipe = up.Pipe(nn.Sequential(Recurrent(), Recurrent(), nn.Linear(8, 4)), 4, mode, balance=[1, 1, 1])
        found.append(trained(pipe, pipe))
    torch.testing.assert_close(*found)


def test_compiled_stages() -> None:
    plain, pipe = net(), piped("always")
    for child in pipe:
        child.compile(backend="aot_eager")
    torch.testing.assert_close(trained(pipe, pipe), trained(plain, plain))


def test_gradients_of_gradients_are_refused() -> None:
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(piped()(x).local_value().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


class Watched(nn.Module):
    """Raises for one row; notes what it returns. Args: s: how long it sleeps."""

    def __init__(self, s: float = 0.0) -> None:
        super().__init__()
        self.s, self.seen = s, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.s)
        made = x * 2
        self.seen.append(weakref.ref(made))
        if len(x) == 1:
            raise KeyError("one row")
        return made


def test_nothing_is_left_of_a_call_that_raised() -> None:
    watched = Watched()
    pipe = up.Pipe(nn.Sequential(nn.Linear(8, 8), watched, nn.Linear(8, 8)), 4, "never", balance=[1, 2])
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyError, match="one row"):
            pipe(X[:7])  # rows 2 2 2 1
        assert len(watched.seen) == 4
        assert not any(made() is not None for made in watched.seen)
    finally:
        gc.enable()


def test_an_interrupt_ends_the_threads() -> None:
    pipe = up.Pipe(nn.Sequential(nn.Linear(8, 8), Watched(0.2), Watched(0.2)), 5, balance=[2, 1])
    threads = threading.active_count()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pipe(X)
    timer.join()
    assert threading.active_count() == threads
    assert len(pipe[1].seen) < 5
    assert pipe(X).local_value().shape == X.shape
