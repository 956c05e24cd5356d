"""Gradients in low rank and as codes. The checks of parallel/compression.py run on two and three ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import suite
import unisono as un
import unisono.parallel as up
from effort import HANG_S, cases, swept
from inside_parallel import ARRAYS
from loops import each
from test_checks import run_all
from unisono.codecs.low_rank import orthonormal

MODULES = ("compression", "compressed_runs")
CHECKS = [check for check in suite.checks("parallel") if check.partition(".")[0] in MODULES]
UNITS = [check for check in suite.checks("parallel") if check.startswith("compressed_units.")]
SETS = [(size, CHECKS) for size in cases([3], long=[2])]
SETS += [(size, part) for size in cases([4], long=[2, 3]) for part in (UNITS[:6], UNITS[6:])]


@pytest.mark.parametrize("size, checks", SETS, ids=[f"{size}-{those[0]}" for size, those in SETS])
def test_checks(forks: suite.Forks, size: int, checks: list[str], subtests: pytest.Subtests) -> None:
    """UNITS: where data ranks share, and in low precision; four ranks also with shard=2."""
    for check, text in run_all(forks, size, "parallel", checks, HANG_S).items():
        if text:
            with subtests.test(check=check):
                pytest.fail(text, pytrace=False)


def job(do: str, compression: str = "both", **plan: Any) -> dict[str, Any]:
    return {"do": do, "model": "tied", "plan": plan, "compression": compression}


@pytest.mark.sweep  # compressed_runs.py loads under the same plan, bit for bit
def test_any_plan_loads_the_buffers(forks: suite.Forks, tmp_path: Path) -> None:
    """Under the same plan the run goes on bit for bit, under another one with the same losses, nearly."""
    four, staged, cut = {"data": 4}, {"data": 2, "pipeline": 2, "micro_batches": 2}, {"data": 2, "tensor": 2}
    others = [job("rest", **four), job("rest", **cut), job("rest", "none", zero=1, **four)]
    (plain,) = forks.losses(tmp_path / "plain" / "jobs", 1, job("all", "none"))
    first, *rests = forks.losses(
        tmp_path / "a" / "jobs", 4, job("first", **four), *swept([job("rest", **staged)], others)
    )
    everything, begun, rest = forks.losses(
        tmp_path / "b" / "jobs", 4, job("all", **cut), job("first", **cut), job("rest", **cut)
    )
    assert begun + rest == everything
    assert everything != plain
    for found in (everything, *(first + other for other in rests)):
        assert found == pytest.approx(plain, abs=0.05)


@pytest.mark.slow
@pytest.mark.sweep  # 1,200 steps of each way
def test_the_final_loss_is_that_of_exact_gradients(forks: suite.Forks, tmp_path: Path) -> None:
    printed = forks.run(tmp_path, {"losses": ("parallel.compressed_losses", 2, [])})["losses"]
    path = tmp_path / "losses" / "losses.json"
    assert path.exists(), "\n".join(printed)
    limits = {"bf16": 0.005, "int8": 0.005, "low rank": 0.02}
    for name, found in json.loads(path.read_text()).items():
        for way, limit in limits.items():
            if (name, way) == ("mlp", "low rank"):
                continue  # its matrices are 16 x 16: rank 4 saves nothing, and costs 8 % of loss
            change = found[way] / found["exact"] - 1
            print(f"{name}: exact {found['exact']:.5f}, {way} {found[way]:.5f}, {change:+.3%}")
            assert change < limit, (name, way)


def test_columns_become_orthonormal_whatever_they_are():
    """Nearly dependent columns, zeros, huge and tiny ones; Gram-Schmidt in f32 does not."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(200, 1, generator=generator)
    noise = torch.randn(200, 4, generator=generator)
    near = (base + 1e-3 * noise).bfloat16().float()
    for columns in (near, 1e30 * near, 1e-30 * near, torch.zeros(200, 4), base.repeat(1, 4), noise[:4]):
        found = orthonormal(ARRAYS, columns.t())
        eye = torch.eye(columns.shape[1])
        assert (found @ found.t() - eye).abs().max() < 1e-6
        assert (found.t() @ (found @ columns) - columns).abs().max() <= 1e-5 * columns.abs().max()
    once = near.clone()
    for k in range(4):
        once[:, k] /= once[:, k].norm()
        once[:, k + 1 :] -= once[:, k : k + 1] * (once[:, k] @ once[:, k + 1 :])
    assert (once.t() @ once - torch.eye(4)).abs().max() > 1e-5


def test_dependent_columns_give_way_to_spare_ones():
    spare = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    one = torch.randn(1, 50, generator=torch.Generator().manual_seed(2))
    found = orthonormal(ARRAYS, one.repeat(3, 1), lambda: spare)
    assert (found @ found.t() - torch.eye(3)).abs().max() < 1e-6
    assert ((found.t() @ (found @ one.t())).t() - one).abs().max() < 1e-5
    within = torch.cat([one, spare[1:]])  # what the three rows span
    rest = found.t() - torch.linalg.lstsq(within.t(), found.t()).solution.t().matmul(within).t()
    assert rest.abs().max() < 1e-5


def low(**plan: Any) -> up.Plan:
    return up.Plan(data=2, compression=up.PowerSGD(), **plan)


@each("call, error, text", [
    (lambda: up.PowerSGD(rank=0), ValueError, "rank is 0, expected 1"),
    (lambda: up.PowerSGD(rank=1.5), TypeError, "rank is 1.5, expected a whole number"),
    (lambda: up.PowerSGD(factors="int8"), ValueError, "factors is 'int8', expected one of 'bf16'"),
    (lambda: up.PowerSGD(errors="bf16"), ValueError, "errors is 'bf16', expected one of 'f32', '1-6-9'"),
    (lambda: up.PowerSGD(start=-1), ValueError, "start is -1"),
    (lambda: up.PowerSGD(saving=0), ValueError, "saving is 0"),
    (lambda: up.PowerSGD(feedback=1), TypeError, "feedback is a int"),
    (lambda: up.PowerSGD(seed="a"), TypeError, "seed is 'a'"),
    (lambda: up.Compressed("int9"), ValueError, "codec 'int9' is not one of"),
    (lambda: up.Compressed("0-6-10"), ValueError, "no negative numbers"),
    (lambda: up.Compressed("bf16", small=-1), ValueError, "small is -1"),
    (lambda: up.Compressed("bf16", rule={"a": 4}).choice("a", (4, 4)), ValueError, "Compressed has no ranks"),
    (lambda: up.PowerSGD(rank={"a": 1.5}).choice("a", (4, 4)), TypeError, "choice for 'a' is 1.5"),
    (lambda: up.PowerSGD(rank={"a": 0}).choice("a", (4, 4)), ValueError, "the rank of 'a' is 0"),
    (lambda: up.PowerSGD(rank=lambda n, s: "u0610").choice("a", (4, 4)), ValueError, "no negative numbers"),
    (lambda: up.Plan(data=2, compression="int8"), TypeError, "compression is 'int8', expected PowerSGD"),
    (lambda: low(zero=1, tensor=2), ValueError, "compression with zero=1, precision='f32' needs tensor=1"),
    (lambda: low(zero=3, pipeline=2), ValueError, "needs pipeline=1"),
    (lambda: low(precision="bf16", pipeline=2), ValueError, "with zero=0, precision='bf16' needs pipeline=1"),
    (lambda: low(zero=2, reduce="low"), ValueError, "it takes f32 gradients"),
    (lambda: low(zero=2, shard=1, local_steps=2), ValueError, "and not gradients of units"),
])  # fmt: skip
def test_wrong_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_choices_by_number_pattern_and_function():
    by_number = up.PowerSGD(rank=4)
    assert by_number.choice("a", (100, 100)) == 4
    assert (
        by_number.choice("a", (100,)) == by_number.choice("a", ()) == by_number.choice("a", (0, 5)) == "exact"
    )
    assert by_number.choice("a", (6, 6)) == "exact"  # (6 + 6) * 4 * 2 bytes of 6 * 6 * 4
    assert by_number.choice("a", (64, 3, 3, 3)) == 4
    rule = up.PowerSGD(rank={"head.weight": "exact", "*.weight": 2, "emb*": "bf16", "a[0]": 3})
    assert rule.choice("head.weight", (50, 50)) == "exact"
    assert rule.choice("x.weight", (50, 50)) == 2
    assert rule.choice("x.weight", (50, 1)) == 1
    assert rule.choice("x.weight", (50,)) == "exact"
    assert rule.choice("embedding", (50, 50)) == un.codecs.bf16
    assert rule.choice("a[0]", (50, 50)) == 3  # a name is no pattern
    assert rule.choice("other", (50, 50)) == "exact"
    coded = up.Compressed("int8", rule={"head": "bf16", "norm*": "exact"})
    assert coded.choice("head", (50, 50)) == un.codecs.bf16
    assert coded.choice("norm", (50, 50)) == "exact"
    assert coded.choice("x", (50, 50)) == un.codecs.int8()
    assert coded.choice("x", (50,)) == "exact"


def test_settings_say_what_differs_and_can_be_hashed():
    plan = up.Plan(data=2, compression=up.PowerSGD(rank=8, errors="1-6-9"))
    assert str(plan) == "Plan(data=2, compression=PowerSGD(rank=8, errors='1-6-9'))"
    assert hash(up.PowerSGD(rank={"a": 1})) == hash(up.PowerSGD(rank={"b": 1}))
    assert up.Compressed("int8") == up.Compressed("int8") != up.Compressed("bf16")


class Sorted(torch.nn.Module):
    """One matrix of each class: its inputs have rank 1, or all ranks; one is small."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.full = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40, bias=False)
        self.unused = torch.nn.Parameter(torch.zeros(40, 40))

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        one = self.flat(x[:, :1] * torch.ones(40))
        return (one[:, 0].mean() - 1) ** 2 + (self.full(x) - y).square().mean()


def test_classes_are_proposed_by_what_is_measured():
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    target = torch.linalg.qr(torch.randn(40, 40, generator=generator))[0]
    batches = [(x, x @ target) for x in torch.randn(3, 400, 40, generator=generator)]
    model = Sorted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    found = un.codecs.classify(model, batches)
    assert dict(found) == {"unused": "exact", "flat.weight": 2, "flat.bias": "exact", "full.weight": "bf16"}
    row = {row.name: row for row in found.rows}["full.weight"]
    assert 0.03 < row.captured[2] < row.captured[4] < 0.5
    assert row.kept[4] == pytest.approx(row.captured[4], abs=0.1)
    assert 0 < row.rounding < 2**-8
    assert "in all" in str(found)
    assert "needs more than rank 8" in str(found)
    assert torch.equal(torch.get_rng_state(), state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
    assert un.codecs.classify(model, batches, codec="int4")["full.weight"] == "exact"
    assert up.PowerSGD(rank=found).choice("flat.weight", (40, 40)) == 2
    assert up.PowerSGD(rank={**found, "full.weight": 3}).choice("full.weight", (40, 40)) == 3


@each("call, error, text", [
    (lambda m: un.codecs.classify(m, []), ValueError, "batches is empty"),
    (lambda m: un.codecs.classify(m, torch.ones(2, 3)), TypeError, "model.batch. is no loss"),
    (lambda m: un.codecs.classify(m, torch.ones(2, 3), ranks=[0]), ValueError, "ranks is 0"),
    (lambda m: un.codecs.classify(m, torch.ones(2, 3), least=0), ValueError, "least is 0"),
    (lambda m: un.codecs.classify(m.requires_grad_(False), torch.ones(2, 3)), ValueError, "no parameter"),
    (lambda m: un.codecs.classify(m, (torch.ones(2, 3), 0), lambda y, t: y.sum() * torch.inf),
     ValueError, "the loss is -?inf"),
])  # fmt: skip
def test_classify_refuses(call, error, text):
    with pytest.raises(error, match=text):
        call(torch.nn.Linear(3, 3))
