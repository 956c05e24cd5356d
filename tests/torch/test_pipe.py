"""A pipeline over the devices of one process, on CPU threads: beside the plain nn.Sequential."""

import copy
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import suite
import unisono.parallel as up
from effort import judge_time
from inside_parallel import predict, schedule
from parallel.bubbles import Sleeps

X, Y = torch.randn(10, 8), torch.randint(4, (10,))
SLEEP_S = 0.05


@pytest.fixture(autouse=True)
def one_thread_for_each_operator() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def grads(module: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The loss, the gradient of its inputs, and those of the parameters."""
    rows = x.clone().requires_grad_()
    found = loss(rows)
    found.backward()
    return [found, *(one.grad for one in (rows, *module.parameters()))]


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("balance", [None, [2, 3], [1, 1, 1, 1, 1]], ids=str)
def test_outputs_and_gradients_are_those_of_the_sequential(mode: str, balance: Any) -> None:
    plain = net()
    expected = grads(plain, X, lambda x: functional.cross_entropy(plain(x), Y))
    for chunks in (1, 3, 8, 20):  # 10 rows: uneven micro-batches, fewer rows than chunks
        pipe = up.Pipe(net(), chunks, mode, balance=balance)
        found = grads(pipe, X, lambda x, pipe=pipe: functional.cross_entropy(pipe(x).local_value(), Y))
        torch.testing.assert_close(found, expected)
        for order in ("gpipe", "1f1b"):
            timed = up.Pipe(net(), chunks, mode, balance=balance, schedule=order)
            given = {"target": Y, "loss": functional.cross_entropy}
            found = grads(timed, X, lambda x, timed=timed, given=given: timed(x, **given).local_value())
            torch.testing.assert_close(found, expected)
            with torch.no_grad():
                torch.testing.assert_close(timed(X).local_value(), plain(X))
                torch.testing.assert_close(timed(X, **given).local_value(), expected[0])
    assert list(pipe.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(pipe.state_dict())


class Two(nn.Module):
    """A dict, a tensor and a number, from a tensor, a tuple and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, pair: tuple[Tensor, dict[str, Tensor]], *, scale: float = 2.0) -> Any:
        left, named = pair
        return {"sum": self.layer(x) + left * scale}, named["ids"], "mean"


class Joins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, given: Any) -> Any:
        named, ids, kind = given
        return {"out": self.layer(named["sum"]) + ids, "ids": ids}, kind


def test_nested_values_between_stages() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Two(), Joins(), nn.Identity())
    left, ids, scale = torch.randn(10, 4), torch.arange(10)[:, None], torch.tensor(3.0)
    expected, _ = plain[1](plain[0](X, (left * scale, {"ids": ids})))
    pipe = up.Pipe(copy.deepcopy(plain), 4, balance=[1, 2])
    left.requires_grad_()
    scale.requires_grad_()
    found, kind = pipe(X, (left * scale, {"ids": ids})).local_value()
    assert kind == "mean"
    assert not found["ids"].requires_grad
    torch.testing.assert_close(found, expected)
    found["out"].square().sum().backward()
    assert left.grad is not None
    assert scale.grad is not None


class Noise(nn.Module):
    """Draws in many ways."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape) * torch.randint_like(x, 3) + torch.randn(1) + torch.randperm(4)[0]
        return x + torch.randn_like(x) * 0.1 + drawn + torch.bernoulli(torch.full_like(x, 0.5))


def test_draws_do_not_depend_on_timing_nor_on_recomputation() -> None:
    def trained(mode: str, order: str) -> list[Tensor]:
        torch.manual_seed(3)
        first = nn.Linear(8, 16), nn.Dropout(0.4), nn.BatchNorm1d(16)
        rest = nn.Linear(16, 16), Noise(), nn.AlphaDropout(0.2), nn.RReLU(), nn.Linear(16, 4)
        pipe = up.Pipe(nn.Sequential(*first, *rest), 5, mode, balance=[3, 3, 2], schedule=order)
        torch.manual_seed(5)
        loss = pipe(X, target=Y, loss=functional.cross_entropy).local_value()
        loss.backward()
        return [loss, *(p.grad for p in pipe.parameters()), *pipe.buffers(), torch.rand(3)]

    expected = trained("never", "gpipe")
    for mode in ("never", "except_last", "always"):
        for order in ("gpipe", "1f1b", "gpipe"):
            torch.testing.assert_close(trained(mode, order), expected)
    other = up.Pipe(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), 2, balance=[1, 1])
    ones = torch.ones(2, 1000)
    first, second = other(ones).local_value()
    assert not torch.equal(first, second)  # micro-batches
    assert 0.2 < (first > 0).float().mean() < 0.3  # stages: two of two are kept
    assert not torch.equal(other(ones).local_value()[0], first)  # calls
    with torch.inference_mode():
        assert not torch.equal(other(ones).local_value()[0], first)
        assert torch.equal(other.eval()(ones).local_value(), ones)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_batch_norm_counts_each_micro_batch_once(mode: str) -> None:
    plain = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.BatchNorm1d(4))
    pipe = up.Pipe(copy.deepcopy(plain), 5, mode, balance=[2, 2])
    outputs = torch.cat([plain(rows) for rows in X.chunk(5)])
    found = pipe(X).local_value()
    (outputs.square().mean() + found.square().mean()).backward()
    torch.testing.assert_close(found, outputs)
    torch.testing.assert_close(pipe.state_dict(), plain.state_dict())
    grads_of = [[p.grad for p in module.parameters()] for module in (plain, pipe)]
    torch.testing.assert_close(*grads_of)


def test_hooks_of_parameters_get_the_gradient_of_the_batch() -> None:
    plain = net()
    pipe = up.Pipe(copy.deepcopy(plain), 4, balance=[2, 3])
    calls: list[str] = []
    for module in (plain, pipe):
        first, last = next(module.parameters()), [*module.parameters()][-1]
        first.register_hook(lambda grad: (calls.append("grad"), grad * 2)[1])
        last.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    plain(X).square().mean().backward()
    expected, calls = calls, []
    pipe(X).local_value().square().mean().backward()
    assert sorted(calls) == sorted(expected) == ["after", "grad"]
    for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_autocast_and_frozen_and_tied_parameters() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    plain[3].weight = plain[0].weight
    plain[1].requires_grad_(requires_grad=False)
    pipe = up.Pipe(copy.deepcopy(plain), 2, "always", balance=[2, 2])
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(X), pipe(X).local_value()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    expected.float().sum().backward()
    found.float().sum().backward()
    assert pipe.get_submodule("1").weight.grad is None
    for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=0.05)


class Raises(nn.Module):
    """Raises in the forward or the backward of its second call."""

    def __init__(self, error: BaseException, *, backward: bool) -> None:
        super().__init__()
        self.error, self.backward, self.calls = error, backward, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = x * 1
        if self.calls == 2 and self.backward:
            y.register_hook(self.fail)
        elif self.calls == 2:
            self.fail()
        return y

    def fail(self, *_: Any) -> None:
        raise self.error


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("error", [KeyError("lost"), KeyboardInterrupt()], ids=repr)
def test_an_error_ends_all_stages_and_names_its_own(stage: int, backward: bool, error: BaseException) -> None:
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
    layers[stage] = nn.Sequential(layers[stage], Raises(error, backward=backward))
    threads = threading.active_count()
    pipe = up.Pipe(nn.Sequential(*layers), 4, "never", balance=[1, 1, 1])
    with pytest.raises(type(error)) as caught:
        pipe(X).local_value().sum().backward()
    if hasattr(error, "add_note"):
        kind = "B1" if backward else "F1"
        assert f"in {kind} of stage {stage} (children {stage}; cpu)" in caught.value.__notes__
    assert threading.active_count() == threads
    pipe(X).local_value().sum().backward()  # the third call is as the first


def test_nothing_is_left_of_a_call() -> None:
    pipe = up.Pipe(net(), 4, balance=[2, 3])
    gc.collect()
    gc.disable()
    try:
        for given in ({}, {"target": Y, "loss": functional.cross_entropy}):
            output = pipe(X, **given).local_value()
            run = weakref.ref(_run_of(output))
            output.sum().backward()
            with pytest.raises(RuntimeError, match="backward ran already"):
                output.sum().backward()
            del output
            assert run() is None, "it would keep all activations until the garbage collector comes"
    finally:
        gc.enable()


def _run_of(output: Tensor) -> Any:
    """What the graph of an output keeps of the call."""
    node: Any = output.grad_fn
    while not hasattr(node, "run") and not hasattr(node, "grads"):
        node = node.next_functions[0][0]
    return node


def test_stages_overlap_and_the_bubble_is_the_predicted_one() -> None:
    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return Sleeps.apply(x * self.weight, SLEEP_S, SLEEP_S)

    pipe = up.Pipe(nn.Sequential(Sleeper(), Sleeper()), 4, "never", balance=[1, 1])
    expected = predict(schedule("gpipe", 2, 4), {"F": 1.0, "B": 1.0}).bubble

    took, bubbles = [], []
    for _ in range(3):
        start = time.perf_counter()
        pipe(X).local_value().sum().backward()
        took.append(time.perf_counter() - start)
        bubbles.append(abs(pipe.timeline().bubble - expected))
        first, second = ([s for s in pipe.timeline().spans if s.rank == stage] for stage in range(2))
        at_once = [one for one, other in itertools.product(first, second) if _overlap(one, other)]
        assert {span.action.kind for span in at_once} == {"F", "B"}
    judge_time(min(took), 14 * SLEEP_S)  # 10 on a quiet machine; one thread: 16
    judge_time(min(bubbles), 0.05)


def _overlap(one: Any, other: Any) -> bool:
    return one.start_s < other.end_s and other.start_s < one.end_s


WRONG: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "a Linear of 0 children, expected a plain nn.Sequential": (TypeError, lambda: up.Pipe(nn.Linear(8, 8))),  # type: ignore[arg-type]
    "a Sequential of 0 children": (TypeError, lambda: up.Pipe(nn.Sequential())),
    "each one once": (ValueError, lambda: up.Pipe(nn.Sequential(*[nn.ReLU()] * 2))),
    "chunks": (ValueError, lambda: up.Pipe(net(), 0)),
    "Pipe: checkpoint is 'some', expected one of": (ValueError, lambda: up.Pipe(net(), 2, "some")),
    "schedule is 'zbv', expected one of 'gpipe', '1f1b'": (
        ValueError,
        lambda: up.Pipe(net(), 2, schedule="zbv"),
    ),
    "deferred_batch_norm": (ValueError, lambda: up.Pipe(net(), 2, deferred_batch_norm=True)),
    r"balance=\[2, 2\] counts 4 children, and there are 5": (
        ValueError,
        lambda: up.Pipe(net(), balance=[2, 2]),
    ),
    'child "1" has parameters on cpu, meta': (
        ValueError,
        lambda: up.Pipe(
            nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")))
        ),
    ),
    "balance gives stage 0 children on": (
        ValueError,
        lambda: up.Pipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta")), balance=[2]),
    ),
    'called "forward"': (ValueError, lambda: up.Pipe(_named("forward"))),
    "beside those of its children": (TypeError, lambda: up.Pipe(_hooked())),
    "needs the loss": (ValueError, lambda: up.Pipe(net(), 2, schedule="1f1b")(X)),
    "no tensor with rows": (TypeError, lambda: up.Pipe(net(), 2)(3)),
    r"tensors with \[9, 10\] rows": (ValueError, lambda: up.Pipe(net(), 2)(X, target=Y[:9])),
    "loss returned a tensor of shape": (
        TypeError,
        lambda: up.Pipe(net(), 2)(X, target=Y, loss=lambda out, _: out),
    ),
    "uses a tensor of shape .* no parameter of its children": (
        ValueError,
        lambda: _piped(lambda x: x * LOOSE),
    ),
    "gives a object: no gradient comes through it": (ValueError, lambda: _piped(lambda _: object())),
    "writes a buffer in forward": (ValueError, lambda: _piped(_Counter())),
    r"a parameter or eval\(\) was changed between forward and backward": (ValueError, lambda: _evaluated()),
    r"shapes \[\[\], \[\]\] for micro-batches of \[5, 5\] rows": (
        ValueError,
        lambda: up.Pipe(nn.Sequential(nn.MSELoss()), 2)(X, X),
    ),
}


LOOSE = torch.ones(8, requires_grad=True)  # no module has it


class _Call(nn.Module):
    def __init__(self, run: Callable[[Any], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(x)


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls.clone()


def _piped(run: Callable[[Any], Any]) -> None:
    stages = nn.Sequential(nn.Linear(X.shape[1], 8), _Call(run), nn.Linear(8, 1))
    up.Pipe(stages, 2, "always", balance=[2, 1])(X).local_value().sum().backward()


def _evaluated() -> None:
    pipe = up.Pipe(net(), 2, "always")
    output = pipe(X).local_value()
    pipe.eval()
    output.sum().backward()


def _named(name: str) -> nn.Sequential:
    made = nn.Sequential()
    made._modules[name] = nn.ReLU()
    return made


def _hooked() -> nn.Sequential:
    made = net()
    made.register_forward_hook(lambda *_: None)
    return made


@pytest.mark.parametrize("text", WRONG)
def test_what_does_not_fit_is_refused(text: str) -> None:
    kind, call = WRONG[text]
    with pytest.raises(kind, match=text):
        call()


def test_beside_data_parallel_with_checkpoints(forks: suite.Forks, tmp_path: Path) -> None:
    texts = forks.run(tmp_path, {"piped": ("parallel.piped", 2, [])})["piped"]
    assert all("the losses of one process" in text and "(ended" not in text for text in texts), texts
