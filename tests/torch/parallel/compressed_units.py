"""Compressed gradients where data ranks share, and in low precision: `check_*(rank, size)`, run by worker.py.

The reference is the same compression with zero=0, where no rank has a part of anything.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unisono.parallel as up
from effort import crossed, swept
from parallel import models
from parallel.compressed_runs import Uneven, shared_folder
from parallel.compression import Reference, distance

LOW = up.PowerSGD(rank=2, factors="f32", start=2)


def gpt() -> nn.Module:
    """Of one block: its four units are the tokens, the block, the head and the root."""
    model = models.make("gpt")
    return nn.Sequential(model[0], model[1], model[-1])


def losses(rank: int, size: int, *, steps: int = 5, make: Any = None, **plan: Any) -> tuple[list[float], Any]:
    case = models.CASES["gpt"]
    make = make or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    run = up.parallelize(gpt(), up.Plan(data=size, **plan), optimizer=make, loss=case.loss)
    return [run.step((x[rank::size], y[rank::size])) for x, y in case.batches(steps, 4 * size)], run


def check_zero_is_that_of_whole_gradients(rank, size):
    rounded = up.PowerSGD(rank=2, start=0, errors="1-6-9"), up.Compressed("int8", start=1)
    for settings, zeros in ((LOW, swept([1, 3], [2])), (rounded[0], (3,)), (rounded[1], (2,))):
        wanted, first = losses(rank, size, compression=settings)
        values, buffers = first.state_dict(), first.compression.buffers()
        for zero in zeros:
            found, run = losses(rank, size, compression=settings, zero=zero)
            assert found == pytest.approx(wanted, rel=1e-5 if settings is LOW else 1e-3), (settings, zero)
            assert run.compression.choices == first.compression.choices
            for name, value in run.state_dict().items() if settings is LOW else ():
                torch.testing.assert_close(value, values[name], rtol=1e-3, atol=1e-5)
            assert run.compression.buffers().keys() == buffers.keys()
            assert all(run.compression.buffers()[key].shape == one.shape for key, one in buffers.items())


def check_low_precision_is_that_of_zero_0(rank, size):
    for precision, zeros in swept([("fp16", (0, 3))], [("bf16", (0, 1))]):
        plain, _ = losses(rank, size, steps=3, precision=precision)
        wanted: list[float] = []
        for zero in zeros:
            found, run = losses(rank, size, precision=precision, zero=zero, compression=LOW)
            wanted = wanted or found
            assert run.compression.memory() > 0
            assert found[:2] == pytest.approx(plain[:2], rel=1e-5)
            assert found == pytest.approx(wanted, rel=5e-3), (precision, zero)
            assert run.skipped == 0


def check_micro_batches_and_clipping_are_those_of_zero_0(rank, size):
    for more in swept([{"micro_batches": 2, "clip": 0.5}], [{"micro_batches": 2}, {"clip": 0.5}]):
        wanted, _ = losses(rank, size, steps=5, compression=LOW, **more)
        found, _ = losses(rank, size, steps=5, compression=LOW, zero=2, **more)
        assert found == pytest.approx(wanted, rel=1e-5), more
    plan = {"zero": 3, "compression": LOW, "precision": "fp16", "unit_scales": True, "steps": 5}
    wanted, _ = losses(rank, size, **plan)
    for more in swept([{"recompute": True, "micro_batches": 2}], [{"recompute": True}, {"micro_batches": 2}]):
        found, _ = losses(rank, size, **plan, **more)
        assert found == pytest.approx(wanted, rel=2e-3), more


def check_a_step_of_several_calls_is_one_on_all_rows(rank, size):
    """Also where steps differ in the number of calls: what is sent later counts as in one call."""
    for zero in swept([0, 3], [2]):
        found = []
        for parts in (1, 2):
            _, run = losses(rank, size, steps=3, compression=LOW, zero=zero)
            for number, (x, y) in enumerate(models.CASES["gpt"].batches(4, 4 * size)):
                cut = parts if number % 2 else 1
                *several, last = zip(x[rank::size].chunk(cut), y[rank::size].chunk(cut), strict=True)
                for batch in several:
                    run.step(batch, update=False)
                run.step(last)
            found.append(run.state_dict())
        for name, value in found[0].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-5)


class Matrices(nn.Module):
    """The gradient of each matrix is the mean over this rank's rows of its part of the inputs."""

    def __init__(self, *shapes: tuple[int, int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Matrix(*shape) for shape in shapes)

    def forward(self, x: Any) -> Any:
        out, start = x.new_zeros(len(x)), 0
        for part in self.parts:
            out = out + part(x[:, start : start + part.weight.numel()])
            start += part.numel
        return out


class Matrix(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight, self.numel = nn.Parameter(torch.zeros(rows, columns)), rows * columns

    def forward(self, x: Any) -> Any:
        return x.view(len(x), -1) @ self.weight.view(-1)


SIZES = (9, 20), (14, 8)


def made_run(plan: up.Plan) -> up.Run:
    sgd = {"optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "loss": lambda out, _: out.mean()}
    return up.parallelize(Matrices(*SIZES), plan, **sgd)


def gradient_of(rank: int, step: int) -> torch.Tensor:
    """What one rank's row makes the gradients of both matrices."""
    return torch.randn(
        1, sum(n * m for n, m in SIZES), generator=torch.Generator().manual_seed(90 * step + rank)
    )


def check_updates_are_the_papers(rank, size):
    """Against the algorithm in f64 and in one process; under shard= that of each group's rows."""
    settings = up.PowerSGD(rank={"*": 2}, factors="f32", start=1)
    kinds = [(zero, None, "f32") for zero in (0, 1, 2, 3)] + [(3, None, "bf16"), (2, None, "fp16")]
    kinds += [(zero, 2, kind) for zero, kind in ((1, "f32"), (3, "f32"), (2, "fp16"))] if size == 4 else []
    for zero, shard, precision in kinds:
        run = made_run(up.Plan(data=size, zero=zero, shard=shard, precision=precision, compression=settings))
        run.scaler.scale = min(run.scaler.scale, 4.0)
        groups = [[*range(first, size, shard or 1)] for first in range(shard or 1)]  # of ranks with one part
        references: dict[Any, Any] = {}
        wanted = [torch.zeros(*shape, dtype=torch.float64) for shape in SIZES]
        for step in range(5):
            x = gradient_of(rank, step)
            run.step((x, torch.zeros(1)))
            low = x.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32))
            every = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(every, low.float())
            for number, (rows, columns) in enumerate(SIZES):
                first = 0 if number == 0 else SIZES[0][0] * SIZES[0][1]
                parts = [g[0, first : first + rows * columns].view(rows, columns).double() for g in every]
                length = math.ceil(rows / len(groups))
                for place, ranks in enumerate(groups):
                    mine = slice(place * length, (place + 1) * length)
                    shards = [parts[r // len(groups) * len(groups) :][: len(groups)] for r in ranks]
                    means = [sum(several)[mine] / len(groups) for several in shards]
                    key, height = (number, place), means[0].size(0)
                    name = f"parts.{number}.weight"
                    if step == 0:
                        wanted[number][mine] -= sum(means) / len(means)
                        continue
                    if key not in references:
                        references[key] = Reference(name, height, columns, 2, len(means), step=1)
                    wanted[number][mine] -= references[key].step(means)
        state = run.state_dict()
        for number, value in enumerate(wanted if rank == 0 else ()):
            found = state[f"parts.{number}.weight"]
            assert distance(found, value) < 2e-5, (zero, shard, precision, number)


def check_an_overflow_leaves_no_trace(rank, size):
    for zero, errors in crossed((0, 3, 1), ("f32", "1-6-9")):
        settings = up.PowerSGD(rank={"*": 2}, factors="f32", errors=errors, start=0)
        run = made_run(up.Plan(data=size, zero=zero, precision="fp16", compression=settings))
        run.scaler.scale = 8.0
        for step in range(2):
            run.step((gradient_of(rank, step), torch.zeros(1)))
        before = {name: one.clone() for name, one in run.compression.buffers().items()}
        weights = run.state_dict()
        x = gradient_of(rank, 2)
        if rank == 0:
            x[0, 3] = math.inf  # of the first matrix; the second one is finite everywhere
        assert run.skipped == 0
        run.step((x, torch.zeros(1)))
        assert run.skipped == 1
        assert run.scaler.scale == 4.0
        after = run.compression.buffers()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], one) for name, one in after.items())
        assert all(torch.equal(weights[name], one) for name, one in run.state_dict().items())
        run.step((gradient_of(rank, 3), torch.zeros(1)))
        assert run.skipped == 1
        assert all(torch.isfinite(one).all() for one in run.state_dict().values())
        assert not any(torch.equal(before[name], one) for name, one in run.compression.buffers().items())


def check_it_saves_and_loads(rank, size):
    folder = shared_folder(rank)
    half, whole = {"zero": 0, "precision": "fp16", "unit_scales": True}, {"zero": 3, "precision": "f32"}
    cases: list[Any] = [(half, *swept([half], [{"zero": 2, "precision": "fp16"}]))]
    cases += [(whole, *swept([{"zero": 2, "precision": "f32"}], [whole]))]
    if size == 4:
        shared = {"zero": 3, "shard": 2, "precision": "fp16"}
        cases += [(shared, shared, {"zero": 2, "precision": "fp16"})]
    adam = {"make": lambda p: up.CompressedAdam(p, lr=3e-3)}
    for number, (plan, *others) in enumerate(cases):
        path = f"{folder}/{number}"
        batches = models.CASES["gpt"].batches(6, 4 * size)[4:]
        _, run = losses(rank, size, steps=4, compression=LOW, **adam, **plan)
        scales = run._scales and run._scales.units
        for one in scales or ():
            one.scale = 2.0**9
        run.save(path)
        wanted = [run.step((x[rank::size], y[rank::size])) for x, y in batches]
        for other in others:
            _, again = losses(rank, size, steps=1, compression=LOW, **adam, **other)
            if other is not plan and "shard" in plan:
                with pytest.warns(UserWarning, match="begin empty"):
                    again.load(path)
            else:
                again.load(path)
                assert again.compression.memory() > 0
            found = [again.step((x[rank::size], y[rank::size])) for x, y in batches]
            if other is plan:
                assert found == wanted, plan
                assert scales is None or again._scales.units == scales
            else:
                assert found == pytest.approx(wanted, rel=2e-2), plan


def check_attach_takes_a_module_of_fully_shard(rank, size):
    """As a DistributedDataParallel with the same settings, step by step; and what it refuses."""
    found = {}
    for kind in ("ddp", "units"):
        model, case = gpt(), models.CASES["gpt"]
        settings = up.PowerSGD(rank=2, factors="f32", start=2)
        if kind == "units":
            for unit in (*model.children(), model):
                fully_shard(unit)
            compression = settings.attach(model)
        else:
            model = DistributedDataParallel(model)
            compression = settings.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in case.batches(6, 4 * size):
            optimizer.zero_grad()
            case.loss(model(x[rank::size]), y[rank::size]).backward()
            optimizer.step()
        assert compression.steps == 6
        assert compression.memory() > 0
        values = {name.removeprefix("module."): value.detach() for name, value in model.named_parameters()}
        found[kind] = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in values.items()}
    for name, value in found["ddp"].items():
        torch.testing.assert_close(found["units"][name], value, rtol=1e-3, atol=1e-5)
    with pytest.raises(
        TypeError, match="got a Linear, expected a DistributedDataParallel, or a module after"
    ):
        settings.attach(nn.Linear(4, 4))
    outer = nn.Sequential(nn.Linear(4, 4))
    fully_shard(outer, mesh=dist.device_mesh.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b")))
    with pytest.raises(TypeError, match="over a mesh of one axis"):
        settings.attach(outer)
    model = Uneven()  # whose second unit has no gradients
    for unit in (*model.children(), model):
        fully_shard(unit)
    compression, x = settings.attach(model), torch.ones(4, 16)
    for step in range(3):
        assert (compression.steps, compression.active) == (step, step == settings.start)
        model(x).sum().backward()
    model.used.set_gradient_divide_factor(1.0)
    with pytest.raises(ValueError, match="gradients of used are scaled or summed"):
        model(x).sum().backward()


def check_explain_names_what_units_send(rank, size):
    kinds = {("f32", 3): "whole gradients are averaged", ("bf16", 0): "averaged over replicas, compressed"}
    for (precision, zero), why in kinds.items():
        settings = up.PowerSGD(rank=2, factors="f32", start=0)
        run = up.parallelize(
            gpt(), up.Plan(data=size, zero=zero, precision=precision, compression=settings),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=models.CASES["gpt"].loss,
        )  # fmt: skip
        (x, y), *_ = models.CASES["gpt"].batches(1, 4 * size)
        run.step((x[rank::size], y[rank::size]), watch=True)
        calls = [call for call in run.explain() if why in call.why]
        ranked = {name for name, choice in run.compression.choices.items() if isinstance(choice, int)}
        shapes = [value.shape for name, value in run.trained.items() if name in ranked]
        wanted = 4 * sum(2 * (n + m) for n, m in shapes) * 2 * (size - 1) / size
        sent = sum(call.nbytes for call in calls if call.operation == "all_reduce")
        assert {call.ranks for call in calls} == {size}
        if zero:
            assert sent == pytest.approx(wanted)
        else:
            assert sent > wanted


def check_units_have_scales_of_their_own(rank, size):
    """An overflow within one block halves its scale alone, and the losses are those of one scale."""
    for zero, compression in ((0, None), (3, LOW)):
        plan = {"zero": zero, "compression": compression, "precision": "fp16"}
        wanted, one = losses(rank, size, **plan)
        found, run = losses(rank, size, unit_scales=True, **plan)
        assert run.skipped == one.skipped
        assert found == pytest.approx(wanted, rel=2e-3), plan
        scalers = run._scales.units
        assert len(scalers) >= 3
        before, buffers = [one.scale for one in scalers], {}
        if compression is not None:
            buffers = {name: value.clone() for name, value in run.compression.buffers().items()}
        (x, y), *_ = models.CASES["gpt"].batches(1, 4 * size)
        scalers[1].scale = 2.0**40  # of the first block: infinite in fp16
        weights = run.state_dict()
        run.step((x[rank::size], y[rank::size]))
        assert run.skipped == one.skipped + 1
        assert [one.scale for one in scalers] == [before[0], 2.0**39, *before[2:]]
        assert run.scaler.scale == one.scaler.scale
        assert all(torch.equal(weights[name], value) for name, value in run.state_dict().items())
        assert all(
            torch.equal(buffers[n], value)
            for n, value in (run.compression.buffers() if buffers else {}).items()
        )
        scalers[1].scale = 2.0**10
        scalers[2].scale = 2.0**6
        run.step((x[rank::size], y[rank::size]))
        assert run.skipped == one.skipped + 1


def check_a_parameter_without_a_gradient(rank, size):
    """It is refused in words, or counts as zero; never is another one taken for it."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
    for more in ({"zero": 1}, {"precision": "bf16"}):
        for settings in (up.PowerSGD(rank=2, start=0), up.PowerSGD(rank=2, start=5)):
            plan, sgd = up.Plan(data=size, compression=settings, **more), {"loss": nn.functional.mse_loss}
            sgd |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
            run = up.parallelize(Uneven(), plan, **sgd)
            with pytest.raises(
                ValueError, match=r"^a parameter of the root has no gradient on this rank.*uneven_use=True"
            ):
                run.step((x, x))
    run = up.parallelize(Uneven(), replace(plan, zero=2, precision="f32", uneven_use=True), **sgd)
    given = x.clone()
    given[:, 0] = x[:, 0] if rank else 1e4
    before = run.state_dict()
    run.step((given, x))
    after = run.state_dict()
    assert not any(torch.equal(before[name], value) for name, value in after.items())
