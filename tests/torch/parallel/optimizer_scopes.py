"""Optimizers that look beyond one value: the losses of one process, or refused by their names."""

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import unisono.parallel as up
from effort import crossed, swept
from inside_parallel import scope_of
from parallel.plain_training import same
from parallel.run_features import whole

DATA, ZERO, TENSOR = up.Plan(data=2), up.Plan(data=2, zero=3), up.Plan(tensor=2)
STAGES, SWAP = up.Plan(pipeline=2), up.Plan(swap="memory")
BOTH = up.Plan(data=2, zero=1)


class Stepping(optim.Optimizer):
    """Steps by a function of the parameters."""

    def __init__(self, params: Any, move: Callable[[list[Tensor]], None]) -> None:
        super().__init__(params, {})
        self.move = move

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.move([p for group in self.param_groups for p in group["params"]])


def by_norm_of_all(params: list[Tensor]) -> None:
    norm = sum((p.grad * p.grad).sum().item() for p in params) ** 0.5
    for p in params:
        p.add_(p.grad, alpha=-0.1 / norm)


def by_largest_of_all(params: list[Tensor]) -> None:
    largest = max(float(p.grad.abs().max()) for p in params)
    for p in params:
        p.add_(p.grad, alpha=-0.1 / largest)


def if_mean_is_small(params: list[Tensor]) -> None:
    for p in params:
        rate = 0.3 if p.grad.abs().mean() < 0.02 else 0.1
        p.sub_(p.grad * rate)


def stacked_norms(params: list[Tensor]) -> None:
    norm = torch.stack([p.grad.norm() for p in params]).norm()
    for p in params:
        p.sub_(p.grad * (0.1 / norm))


def by_norm_of_each(params: list[Tensor]) -> None:
    for p in params:
        p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-0.1)


def clipped_lists(params: list[Tensor]) -> None:
    nn.utils.clip_grad_norm_(params, 0.05)
    nn.utils.clip_grad_value_(params, 0.01)
    torch._foreach_add_(params, [p.grad for p in params], alpha=-0.5)


def signs(params: list[Tensor]) -> None:
    for p in params:
        p.add_(p.grad.sign(), alpha=-0.01)


def noisy(params: list[Tensor]) -> None:
    for p in params:
        p.sub_(0.1 * (p.grad + 0.1 * torch.randn_like(p)))


def net(*, fused: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Attention() if fused else nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Attention(nn.Module):
    """Its layer of q, k and v is three on the tensor axis."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def batches(*, fused: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, 3, 8), (4, 3, 8)) if fused else ((8, 4), (8, 2))
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes) for _ in range(3)]


FUSED, BATCHES = batches(fused=True), batches()


def under(plan: up.Plan, make: Any, *, fused: bool = False) -> up.Run:
    data = batches(fused=fused)
    return up.parallelize(net(fused=fused), plan, optimizer=make, loss=functional.mse_loss, sample=data[0][0])


def compare(plan: up.Plan, make: Any, *, fused: bool = False) -> None:
    data = FUSED if fused else BATCHES
    model = functools.partial(net, fused=fused)
    far = 1e-4 if plan.pipeline == 1 else 1e-5
    same(plan, model, data, functional.mse_loss, optimizer=make, sample=data[0][0], tolerance=far)


def check_numbers_that_an_optimizer_reads_are_whole(folder: Path) -> None:
    moves = (by_norm_of_all, by_largest_of_all, if_mean_is_small, stacked_norms, clipped_lists)
    for move, plan in crossed(moves, (TENSOR, ZERO, BOTH, DATA)):
        if (move, plan) != (stacked_norms, TENSOR):
            compare(plan, lambda params, move=move: Stepping(params, move))
    run = under(TENSOR, lambda params: Stepping(params, stacked_norms))
    with pytest.raises(RuntimeError, match=r"Stepping cannot step parameters that are cut.*float\(norm\)"):
        run.step(batches()[0])
    compare(STAGES, lambda params: Stepping(params, by_norm_of_each))


def check_optimizers_that_see_too_little_are_refused(folder: Path) -> None:
    cases = [
        (STAGES, by_norm_of_all, False, "looks at all parameters in a step"),
        (STAGES, clipped_lists, False, "looks at all parameters in a step"),
        (STAGES, noisy, False, "draws random numbers in a step"),
        (TENSOR, by_norm_of_each, True, 'looks at whole matrices, and .* has cut "qkv"'),
    ]
    for plan, move, fused, text in cases:
        with pytest.raises(ValueError, match=text):
            under(plan, lambda params, move=move: Stepping(params, move), fused=fused)
    for plan in (TENSOR, STAGES):  # each value by itself, and a norm that does not see how matrices are cut
        compare(plan, lambda params: Stepping(params, signs), fused=plan is TENSOR)
    compare(TENSOR, lambda params: Stepping(params, by_norm_of_all), fused=True)


def check_an_optimizer_that_draws_does_so_alike(folder: Path) -> None:
    """The same numbers on all ranks. Plans differ where the tensor axis has made several layers of one."""
    usual = [(False, (DATA, ZERO, TENSOR)), (True, (DATA, BOTH))]
    for fused, plans in swept(usual, [(False, (DATA, BOTH)), (True, (DATA, ZERO, TENSOR))]):
        every = []
        for plan in plans:
            torch.manual_seed(torch.distributed.get_rank())
            run = under(plan, lambda params: Stepping(params, noisy), fused=fused)
            losses = [run.step(batch) for batch in run.shard(batches(fused=fused))]
            every.append(torch.cat([torch.tensor(losses), *map(torch.flatten, whole(run).values())]))
            here = every[-1].clone()
            torch.distributed.broadcast(here, 0)
            assert torch.equal(here, every[-1]), f"{plan}: ranks differ"
        for plan, found in list(zip(plans, every, strict=True))[1:]:
            if (plan, fused) != (TENSOR, True):
                torch.testing.assert_close(found, every[0], rtol=1e-4, atol=1e-5, msg=f"{plan}, {fused}")


def check_optimizers_under_swap(folder: Path) -> None:
    plan = up.Plan(data=2, swap="memory")
    with pytest.raises(ValueError, match="steps all parameters together"):
        under(plan, lambda params: Stepping(params, by_norm_of_all))


class Sam(optim.SGD):
    """Asks for a closure when it steps."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "needs a closure"
        with torch.enable_grad():
            closure()
        return super().step()


def check_optimizers_that_need_a_closure_are_named(folder: Path) -> None:
    makes = (Sam, "Sam"), (torch.optim.LBFGS, "LBFGS")
    for plan, (make, name) in crossed((DATA, ZERO, TENSOR, STAGES), makes):
        with pytest.raises(ValueError, match=f"{name}.step needs a closure"):
            under(plan, lambda params, make=make: make(params, lr=0.1)).step((torch.ones(1), None))


def check_a_part_of_a_sum_is_never_a_number(folder: Path) -> None:
    run = under(ZERO, lambda params: optim.SGD(params, lr=0.1))
    (weight, *_) = run.trained.values()
    with pytest.raises(RuntimeError, match="this rank has a part of it"):
        weight.norm().item()
    assert weight.norm().full_tensor().item() > 0


class Lookahead(optim.Optimizer):
    """Wraps another optimizer, with lists of its own; it has not called its base class."""

    def __init__(self, base: optim.Optimizer) -> None:
        self.base, self.count = base, 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, kept in zip(group["params"], slow, strict=True):
                kept.add_(p.detach() - kept, alpha=0.5)
                p.data.copy_(kept)


class Counting(optim.Adam):
    """Counts its steps in its groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1 / group.setdefault("k", 1)
            group["k"] += 1
        super().step()


class Late(optim.SGD):
    """Norms from step 1,000 on, of parameters that are not too large, as Shampoo's preconditioners."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.start, self.largest, self.taken = 1000, 8192, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.taken += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            late = self.taken >= self.start and max(p.shape) < self.largest
            p.sub_(p.grad / p.grad.norm() if late else p.grad)


def check_what_an_update_depends_on(folder: Path) -> None:
    """Scopes of optimizers of PyTorch and others; nothing of the caller's changes."""
    cases: list[tuple[Any, tuple[int, bool, bool, bool]]] = [
        (lambda p: optim.AdamW(p), (0, False, False, False)),
        (lambda p: type("Own", (optim.AdamW,), {})(p, foreach=True), (0, False, False, False)),
        (lambda p: up.CompressedAdam(p), (0, False, False, False)),
        (lambda p: optim.Adafactor(p), (1, False, True, False)),
        (lambda p: Lookahead(optim.Adam(p)), (0, False, False, False)),
        (lambda p: Counting(p), (0, True, False, False)),
        (lambda p: Stepping(p, by_norm_of_each), (1, True, True, False)),
        (lambda p: Stepping(p, by_largest_of_all), (2, True, False, False)),
        (lambda p: Stepping(p, clipped_lists), (2, True, False, False)),
        (lambda p: Stepping(p, noisy), (0, True, False, False)),
        (lambda p: Late(p), (1, True, True, False)),
        (lambda p: Sam(p, lr=0.1), (0, False, False, True)),
    ]
    model = nn.Sequential(nn.Embedding(300, 200), nn.LayerNorm(200), nn.Linear(200, 150))
    for make, wanted in cases:
        optimizer, called = make(list(model.parameters())), []
        before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            optimizer.register_step_pre_hook(lambda *_, called=called: called.append(1))
        found = scope_of(optimizer)
        assert found[:4] == wanted, (type(optimizer), found)
        assert not found.unknown
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert not optimizer.state
        assert not called
        assert torch.equal(drawn, torch.get_rng_state())


def check_one_that_cannot_be_tried_is_told(folder: Path) -> None:
    def only_here(params: list[Tensor]) -> None:
        if any(p.numel() not in (32, 8, 16, 2) for p in params):
            raise LookupError("unknown parameters")
        signs(params)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        under(DATA, lambda params: Stepping(params, only_here))
    with pytest.warns(UserWarning, match="could not be tried"):
        run = under(STAGES, lambda params: Stepping(params, only_here))
    assert run.step(batches()[0]) > 0


def clipping(optimizer: optim.Optimizer, by_hook: bool) -> optim.Optimizer:
    """Clip by the norm of all gradients, in a hook before the step, or in a step of its own."""
    plain = optimizer.step

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)

    if by_hook:
        optimizer.register_step_pre_hook(clip)
    else:
        optimizer.step = lambda: (clip(), plain())  # type: ignore[assignment,method-assign]
    return optimizer


def check_hooks_and_steps_in_place_of_the_class(folder: Path) -> None:
    """They see whole tensors, or a warning says that they do not. A scheduler's step is none."""
    for by_hook in (True, False):

        def make(params: Any, by_hook: bool = by_hook) -> optim.Optimizer:
            return clipping(optim.SGD(params, lr=0.5), by_hook)

        for plan in swept((ZERO, TENSOR), (DATA, BOTH)):
            compare(plan, make)
        run = under(STAGES, make)
        with pytest.warns(UserWarning, match=r"SGD has hooks of its step, or another step.*Plan\(clip"):
            run.step(batches()[0])

    def scheduled(params: Any) -> optim.Optimizer:
        optimizer = optim.SGD(params, lr=0.5)
        optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        under(STAGES, scheduled).step(batches()[0])
