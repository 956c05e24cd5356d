"""CompressedAdam: AdamW's losses with half the state, one kernel, state that is saved and cut."""

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import suite
import unisono as un
import unisono.parallel as up
from effort import swept
from loops import each
from parallel import models
from unisono import _native


def parameters(*shapes: Any, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def stepped(optimizer: torch.optim.Optimizer, steps: int, scale: float = 1.0) -> None:
    """Steps with seeded gradients around a slope of 0.1 * scale."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = scale * (0.1 + torch.randn(parameter.shape, generator=generator))
        optimizer.step()


@each("options, theirs", [
    ({"weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
    ({"weight_decay": 0.1, "decoupled": False}, lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1)),
    ({"weight_decay": 0, "betas": (0.8, 0.99), "eps": 1e-6, "rounding": "nearest"},
     lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0, betas=(0.8, 0.99), eps=1e-6)),
    ({"weight_decay": 0, "betas": (0.0, 0.0)},
     lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0, betas=(0.0, 0.0))),
])  # fmt: skip
@each("scale", [1.0, 1e-3, 1e-6, 1e-9])
def test_compressed_adam_follows_adam(options, theirs, scale):
    shapes = (300, (7, 11), (), (0,), (1, 1))
    mine, other = parameters(*shapes), parameters(*shapes)
    start = [p.detach().clone() for p in mine]
    stepped(up.CompressedAdam(mine, lr=1e-2, **options), 100, scale)
    stepped(theirs(other), 100, scale)
    gone, wanted = (
        torch.cat([(p.detach() - s).flatten() for p, s in zip(found, start, strict=True)])
        for found in (mine, other)
    )
    assert (gone - wanted).norm() < 0.02 * wanted.norm()


def test_one_step_is_decode_update_encode_on_every_instruction_set():
    rng = np.random.default_rng(0)
    n = 3001
    m = un.codecs.encode(
        np.ldexp(rng.standard_normal(n), rng.integers(-45, 3, n)).astype(np.float32), "1-6-9"
    )
    v = un.codecs.encode(
        np.abs(np.ldexp(rng.standard_normal(n), rng.integers(-70, 5, n))).astype(np.float32), "0-6-10"
    )
    g = np.ldexp(rng.standard_normal(n), rng.integers(-40, 3, n)).astype(np.float32)
    p = rng.standard_normal(n).astype(np.float32)
    f = np.float32
    options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.0, "shrink": 0.999, "rate": 0.01}
    options |= {"root_correction": 3.0, "seed": 11}
    means = un.codecs.decode(m, "1-6-9"), un.codecs.decode(v, "0-6-10")
    mean = means[0] + (g - means[0]) * (f(1) - f(0.9))
    variance = means[1] * f(0.999) + g * g * (f(1) - f(0.999))
    wanted = p * f(0.999) - f(0.01) * mean / (np.sqrt(variance) * f(3) + f(1e-8))
    for stochastic in (True, False):
        first = None
        for isa in _native.isas():
            room = [np.concatenate([a, a[:1]])[:-1].copy() for a in (p, g, m, v)]
            assert _native.adam(
                *(a.ctypes.data for a in room), n, **options, stochastic_mean=stochastic, isa=isa
            ) == 0  # fmt: skip
            assert np.array_equal(room[0], wanted)
            assert first is None or all(map(np.array_equal, room, first))
            first = room
        for codes, name, exact in ((room[2], "1-6-9", mean), (room[3], "0-6-10", variance)):
            codec = un.codecs.codec_of(name)
            if name == "1-6-9" and not stochastic:
                assert np.array_equal(codes, codec.encode(exact))
            error = np.abs(codec.decode(codes).astype(np.float64) - exact)
            assert all(e <= codec.bound(float(x), "stochastic") for e, x in zip(error, exact, strict=True))
            assert np.abs(codes.astype(np.int64) - codec.encode(exact)).max() <= 1


def test_the_variance_does_not_get_stuck():
    """From 2 to 1 and from 0.5 to 1, with beta2 so near 1 that the nearest would not get there."""
    for start, beta2 in ((2.0, 0.9995), (0.5, 0.9995), (1.3, 0.999), (1e-14, 0.999)):
        (p,) = parameters(2000)
        optimizer = up.CompressedAdam([p], lr=0.0, betas=(0.9, beta2))
        p.grad = torch.ones_like(p)
        optimizer.step()
        state = optimizer.state[p]
        full = torch.full((2000,), start)
        state["exp_avg_sq"].copy_(un.codecs.encode(full, "0-6-10").view(torch.int16))
        held = un.codecs.u0610.encode(full)
        stuck = un.codecs.u0610.decode(held)
        exact = un.codecs.u0610.decode(held).double()
        for _ in range(3000):
            optimizer.step()
            exact = exact * beta2 + (1 - beta2)
            stuck = un.codecs.decode(un.codecs.encode(stuck * beta2 + (1 - beta2), "0-6-10"), "0-6-10")
        value = un.codecs.decode(state["exp_avg_sq"], "0-6-10").double().mean().item()
        assert abs(value / exact[0].item() - 1) < 2e-3
        if start in (2.0, 0.5, 1.3):
            assert abs(stuck[0].item() / exact[0].item() - 1) > 0.1  # what stochastic rounding is for


def trained(name: str, optimizer: Any, steps: int, rows: int) -> float:
    """The mean loss over 20 batches after training."""
    case, model = models.CASES[name], models.make(name)
    made = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, steps)
    for x, y in case.batches(steps, rows):
        made.zero_grad()
        case.loss(model(x), y).backward()
        made.step()
        schedule.step()
    with torch.no_grad():
        return sum(case.loss(model(x), y).item() for x, y in case.batches(20, rows)) / 20


@each("name, steps, rows, lr", swept([("mlp", 800, 32, 3e-3)], [("gpt", 400, 8, 5e-3)]))
def test_the_final_loss_is_adamws(name, steps, rows, lr):
    torch.set_num_threads(1)
    wanted = trained(name, lambda p: torch.optim.AdamW(p, lr=lr), steps, rows)
    found = trained(name, lambda p: up.CompressedAdam(p, lr=lr), steps, rows)
    print(f"{name}: AdamW {wanted:.5f}, CompressedAdam {found:.5f}, {found / wanted - 1:+.4%}")
    assert abs(found / wanted - 1) < 0.005


def test_state_is_half_and_saved():
    def grouped(found: list[nn.Parameter]) -> up.CompressedAdam:
        return up.CompressedAdam(
            [{"params": found[:1], "lr": 1e-2}, {"params": found[1:], "betas": (0.5, 0.9)}]
        )

    mine = parameters((100, 10), 50)
    optimizer = grouped(mine)
    stepped(optimizer, 5)
    for parameter in mine:
        state = optimizer.state[parameter]
        kept = [value for key, value in state.items() if key != "step"]
        assert sum(value.nbytes for value in kept) == 4 * parameter.numel()
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in kept)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    copies = [nn.Parameter(p.detach().clone()) for p in mine]
    other = grouped(copies)
    other.load_state_dict(torch.load(saved))
    alike, whole = copy.deepcopy((mine, optimizer))
    stepped(optimizer, 3)
    stepped(other, 3)
    stepped(whole, 3)
    for one, two, three in zip(mine, copies, alike, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    with pytest.raises(ValueError, match="exp_avg of parameter 0 is torch.float32, expected int16"):
        other.load_state_dict(
            torch.optim.AdamW(mine).state_dict() | {"state": {0: {"exp_avg": torch.zeros(3)}}}
        )


def test_odd_parameters():
    (p,) = parameters((6, 4))
    turned = nn.Parameter(p.detach().t().contiguous().t())
    assert not turned.is_contiguous()
    for each_one in (p, turned):
        optimizer = up.CompressedAdam([each_one, *parameters(3)])
        each_one.grad = torch.arange(24.0).reshape(6, 4) - 11
        assert optimizer.step(lambda: 5) == 5
    assert torch.equal(p, turned)
    tensor_lr = up.CompressedAdam([p], lr=torch.tensor(1e-3))
    tensor_lr.step()
    torch.optim.lr_scheduler.StepLR(up.CompressedAdam([p]), 1)


def test_what_cannot_be_held_is_said_before_anything_changes():
    mine = parameters(5, 4)
    optimizer = up.CompressedAdam(mine)
    for factor in (1.0, 2000.0):  # the first of 2000 is held: 0.001 of its square
        mine[0].grad, mine[1].grad = torch.full((5,), factor), torch.tensor([1.0, factor, 2.0, 1.0])
        optimizer.step()
    before = copy.deepcopy((mine, optimizer.state_dict()["state"]))
    mine[0].grad = torch.ones(5)
    mine[1].grad = torch.tensor([1.0, 0.0, 2.0, 3000.0])
    with pytest.raises(OverflowError, match="gradients of parameter 1 .* up to 4094"):
        optimizer.step()
    for one, two in zip(mine, before[0], strict=True):
        assert torch.equal(one, two)
    for index, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][index][key]) for key, value in state.items())


def test_a_decay_that_is_added_counts():
    p = nn.Parameter(torch.full((4,), 3000.0))
    optimizer = up.CompressedAdam([p], weight_decay=1.0, decoupled=False)
    p.grad = torch.zeros(4)
    with pytest.raises(OverflowError, match="gradients of parameter 0"):
        optimizer.step()
    assert (p == 3000).all()


def test_what_is_not_finite_goes_where_adamw_sends_it():
    (p,) = parameters(4)
    p.grad = torch.tensor([1.0, float("nan"), float("inf"), 1.0])
    up.CompressedAdam([p]).step()
    assert torch.isfinite(p).tolist() == [True, False, False, True]


def test_the_state_of_another_model_is_refused():
    small, big = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1 << 12))
    saved, optimizer = up.CompressedAdam([small]), up.CompressedAdam([big])
    small.grad, big.grad = torch.ones(4), torch.ones(1 << 12)
    saved.step()
    optimizer.load_state_dict(saved.state_dict())
    says = r"exp_avg of parameter 0 is torch.int16 \[4\] on cpu, expected int16 \[4096\]"
    with pytest.raises(ValueError, match=says):
        optimizer.step()
    assert not big.any()
    optimizer = up.CompressedAdam([big])
    optimizer.step()
    optimizer.state[big]["exp_avg_sq"] = torch.zeros(1 << 12)
    with pytest.raises(ValueError, match=r"exp_avg_sq of parameter 0 is torch.float32 \[4096\]"):
        optimizer.step()


def test_a_state_that_is_not_contiguous_is_kept_where_it_is():
    (mine,), (other,) = parameters((6, 4)), parameters((6, 4))
    optimizers = [up.CompressedAdam([p]) for p in (mine, other)]
    for optimizer in optimizers:
        stepped(optimizer, 1)
    state = optimizers[1].state[other]
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = state[key].t().contiguous().t()
        assert not state[key].is_contiguous()
    for optimizer in optimizers:
        stepped(optimizer, 2)
    assert torch.equal(mine, other)
    for key, value in optimizers[0].state[mine].items():
        assert torch.equal(value, state[key])


def test_a_graph_that_saved_the_old_values_fails():
    w, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    y = (w * w * x).sum()
    w.grad = torch.ones(3)
    up.CompressedAdam([w], lr=1.0).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


P = nn.Parameter(torch.ones(3))


@each("call, error, text", [
    (lambda: up.CompressedAdam([nn.Parameter(torch.ones(2).double())]), TypeError, "float64 on cpu"),
    (lambda: up.CompressedAdam([nn.Parameter(torch.ones(2, device="meta"))]), TypeError, "on meta"),
    (lambda: up.CompressedAdam([P], lr=-1), ValueError, "lr is -1.0"),
    (lambda: up.CompressedAdam([P], lr="a"), TypeError, "lr is 'a'"),
    (lambda: up.CompressedAdam([P], lr=float("nan")), ValueError, "lr is nan"),
    (lambda: up.CompressedAdam([P], betas=(0.9, 1.0)), ValueError, r"betas\[1\] is 1.0"),
    (lambda: up.CompressedAdam([P], betas=0.9), TypeError, "betas is 0.9"),
    (lambda: up.CompressedAdam([P], lr=10**400), ValueError, "lr is inf"),
    (lambda: up.CompressedAdam([P], eps=0), ValueError, "eps is 0.0"),
    (lambda: up.CompressedAdam([P], seed=-1), ValueError, "seed is -1"),
    (lambda: up.CompressedAdam([P], rounding="up"), ValueError, "rounding is 'up'"),
    (lambda: up.CompressedAdam([P], decoupled=1), TypeError, "decoupled is a int"),
])  # fmt: skip
def test_wrong_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_codecs_of_tensors():
    x = torch.linspace(-3, 3, 600).reshape(20, 30)
    for codec in (un.codecs.bf16, un.codecs.f169, un.codecs.fp8_e4m3, un.codecs.int8(), un.codecs.int4()):
        codes = codec.encode(x)
        assert codes.dtype == getattr(torch, codec.dtype)
        assert np.array_equal(codes.numpy(), codec.encode(x.numpy()))
        y = codec.decode(codes, x.shape)
        assert isinstance(y, torch.Tensor)
        assert (y - x).abs().max() <= codec.bound(x)
        assert torch.equal(codec.accumulate(codes, y.clone()), y + y)
    assert torch.equal(un.codecs.decode(x.bfloat16(), "bf16"), x.bfloat16().float())
    for bad in (x.t(), x.to("meta"), x.double(), x.to_sparse()):
        with pytest.raises((TypeError, ValueError)):
            un.codecs.encode(bad, "bf16")


def test_sparse_gradients_are_refused():
    layer = nn.Embedding(5, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse"):
        up.CompressedAdam(layer.parameters()).step()


def job(do: str, **plan: Any) -> dict[str, Any]:
    return {"do": do, "model": "tied", "plan": plan, "optimizer": "compressed"}


def test_it_is_cut_by_zero_and_kept_in_checkpoints(forks: suite.Forks, tmp_path: Path) -> None:
    everything, first, rest, cut_otherwise, tensor = forks.losses(
        tmp_path / "a", 2,
        job("all", data=2, zero=2), job("first", data=2, zero=2), job("rest", data=2, zero=2),
        job("rest", data=2, zero=3), job("rest", tensor=2),
    )  # fmt: skip
    assert first + rest == everything
    (alone,) = forks.losses(tmp_path / "b", 1, job("all"))
    for found in (everything, first + cut_otherwise, first + tensor):
        assert found == pytest.approx(alone, abs=1e-3)  # parts of a parameter have other random bits
