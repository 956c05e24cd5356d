"""Gradients in low rank and as codes: `check_*(rank, size)`, run by worker.py on two and three ranks.

The reference is the paper's algorithm in f64 and in one process, with another way to make columns
orthonormal, and without making Q so.
"""

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono as un
import unisono.parallel as up
from inside_parallel import ARRAYS
from unisono.codecs.low_rank import random_factor

SHAPES = {"wide": (24, 70), "bias": (70,), "conv": (12, 5, 3, 3), "tall": (90, 8), "scalar": ()}
CODECS = ("bf16", "fp16", "1-6-9", "int8", "int4", "fp8_e4m3", "fp8_e5m2")


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}


def gradients(rank: int, step: int, scale: float = 1.0) -> dict[str, Tensor]:
    """Seeded: a part of low rank that stays, and noise of each rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    steady = torch.Generator().manual_seed(5)
    found = {}
    for name, shape in SHAPES.items():
        noise, base = torch.randn(shape, generator=generator), torch.randn(shape, generator=steady)
        found[name] = scale * (base + 0.3 * noise)
    return found


class Job:
    """A Compression of SHAPES in two buckets, fed with made gradients."""

    def __init__(self, settings: Any) -> None:
        self.named = parameters()
        self.compression = up.Compression(settings, self.named, dist.group.WORLD)

    def step(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The averages."""
        out = {}
        for number, names in enumerate((("scalar", "tall", "conv"), ("bias", "wide"))):
            flat = torch.cat([given[name].reshape(-1) for name in names])
            parts = flat.split([given[name].numel() for name in names])
            pairs = [(self.named[n], part.view(SHAPES[n])) for n, part in zip(names, parts, strict=True)]
            self.compression.begin(pairs, flat, label=f"bucket {number}")
            out |= dict(zip(names, [part for _, part in pairs], strict=True))
        self.compression.finish()
        return out

    def errors(self) -> dict[str, Tensor]:
        """The mean over the ranks of what is still to be sent."""
        found = {}
        for name, shape in SHAPES.items():
            buffer = self.compression.buffers().get(f"{name}.error", torch.zeros(shape))
            found[name] = un.codecs.decode(buffer, "1-6-9") if buffer.dtype == torch.int16 else buffer.clone()
            dist.all_reduce(found[name])
            found[name] /= dist.get_world_size()
        return found


def same_everywhere(found: dict[str, Tensor]) -> None:
    for name, value in found.items():
        bits = value.contiguous().view(torch.int32)
        root = bits.clone()
        dist.broadcast(root, 0)
        assert torch.equal(root, bits), name


def distance(one: Tensor, other: Tensor) -> float:
    """Relative, in the Frobenius norm."""
    return float((one.double() - other.double()).norm() / other.double().norm())


# ---- PowerSGD ------------------------------------------------------------------------------------------


class Reference:
    """PowerSGD of one matrix in one process, in f64: the matrices of all ranks are given."""

    def __init__(self, name: str, rows: int, columns: int, rank: int, size: int, step: int = 0) -> None:
        self.q = random_factor(ARRAYS, name, columns, rank, seed=0, step=step).t().double()
        self.errors = [torch.zeros(rows, columns, dtype=torch.float64) for _ in range(size)]

    def step(self, matrices: list[Tensor]) -> Tensor:
        inputs = [m.double().view(e.shape) + e for m, e in zip(matrices, self.errors, strict=True)]
        p = gram_schmidt(sum(x @ self.q for x in inputs) / len(inputs))
        self.q = sum(x.t() @ p for x in inputs) / len(inputs)
        result = p @ self.q.t()
        self.errors = [x - result for x in inputs]
        return result


def gram_schmidt(columns: Tensor) -> Tensor:
    """Twice, which is enough in f64."""
    done: list[Tensor] = []
    for column in columns.t():
        for _ in range(2):
            column = column - sum((c * (c @ column) for c in done), torch.zeros_like(column))
        done.append(column / column.norm())
    return torch.stack(done, 1)


def check_power_sgd_is_the_papers(rank, size):
    for factors, tolerance in (("f32", 2e-5), ("1-6-9", 1e-2), ("bf16", 4e-2), ("fp16", 1e-2)):
        job = Job(up.PowerSGD(rank={"*l*": 3, "wide": 4, "conv": 2}, factors=factors, start=0))
        assert job.compression.choices == {
            "wide": 4, "bias": "exact", "conv": 2, "tall": 3, "scalar": "exact",
        }  # fmt: skip
        references = {
            name: Reference(name, SHAPES[name][0], math.prod(SHAPES[name][1:]), r, size)
            for name, r in job.compression.choices.items()
            if r != "exact"
        }
        for step in range(6):
            everybody = [gradients(one, step) for one in range(size)]
            found = job.step({name: value.clone() for name, value in everybody[rank].items()})
            same_everywhere(found)
            for name, value in found.items():
                if name in references:
                    wanted = references[name].step([g[name] for g in everybody]).view(value.shape)
                    assert distance(value, wanted) < tolerance, (factors, step, name)
                else:
                    torch.testing.assert_close(value, sum(g[name] for g in everybody) / size)


def check_full_rank_is_exact_within_rounding(rank, size):
    for settings in (
        up.PowerSGD(rank=lambda name, shape: 1000, factors="f32", start=0),
        up.PowerSGD(rank=lambda name, shape: 1000, factors="f32", start=0, feedback=False, warm_start=False),
    ):
        job = Job(settings)
        for step in range(3):
            everybody = [gradients(one, step) for one in range(size)]
            for name, value in job.step(everybody[rank]).items():
                torch.testing.assert_close(
                    value, sum(g[name] for g in everybody) / size, rtol=1e-4, atol=1e-5
                )


def check_it_finds_a_matrix_of_low_rank(rank, size):
    """Of rank 3, the same on all ranks: found to rounding after a few steps, also through zeros."""
    job = Job(up.PowerSGD(rank={"wide": 4, "tall": 4, "conv": 4}, factors="f32", start=0))
    generator = torch.Generator().manual_seed(0)
    factors = {n: [torch.randn(k, 3, generator=generator) for k in (s[0], math.prod(s[1:]))]
               for n, s in SHAPES.items() if len(s) > 1}  # fmt: skip
    matrices = {n: (a @ b.t()).view(SHAPES[n]) for n, (a, b) in factors.items()}
    rest = {"bias": torch.zeros(70), "scalar": torch.zeros(())}
    job.step({n: torch.zeros_like(m) for n, m in matrices.items()} | rest)
    for _ in range(4):
        sent = job.step({n: m.clone() for n, m in matrices.items()} | {n: r.clone() for n, r in rest.items()})
        same_everywhere(sent)
    for name, matrix in matrices.items():
        assert distance(sent[name], matrix) < 1e-4
    found = job.step({n: torch.zeros_like(m) for n, m in matrices.items()} | rest)
    assert all(torch.isfinite(value).all() for value in found.values())


def check_threads_do_not_change_the_bits(rank, size):
    torch.set_num_threads(1 + rank)
    try:
        job = Job(up.PowerSGD(rank={"wide": 4, "tall": 3, "conv": 3}, start=0))
        for step in range(3):
            same_everywhere(job.step(gradients(rank, step)))
    finally:
        torch.set_num_threads(1)


# ---- error feedback ------------------------------------------------------------------------------------


def check_what_is_left_out_is_sent_later(rank, size):
    """The sum of the results is that of the means, less the mean of the last error buffers."""
    low = {"wide": 2, "tall": 1, "conv": 2}
    kinds = [(up.PowerSGD(rank=low, factors=f, start=1), 1e-5) for f in ("f32", "bf16", "1-6-9")]
    kinds += [(up.PowerSGD(rank={"wide": "int8", "*": 2}, start=0), 1e-5)]
    kinds += [(up.Compressed(codec, small=0), 1e-5) for codec in CODECS]
    kinds += [(up.Compressed(un.codecs.int8(block=16), errors="1-6-9", small=0), 1e-4)]
    kinds += [(up.PowerSGD(rank=low, errors="1-6-9", start=0), 5e-3)]
    for settings, tolerance in kinds:
        job, steps = Job(settings), 6
        inputs = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        outputs = copy.deepcopy(inputs)
        for step in range(steps):
            for one in range(size):
                for name, value in gradients(one, step).items():
                    inputs[name] += value / size
            found = job.step(gradients(rank, step))
            same_everywhere(found)
            for name, value in found.items():
                outputs[name] += value
        for name, error in job.errors().items():
            assert distance(outputs[name] + error, inputs[name]) < tolerance, (settings, name)
        lossy = [n for n, choice in job.compression.choices.items() if choice != "exact"]
        assert any(distance(outputs[name], inputs[name]) > 1e-6 for name in lossy), settings


def check_without_feedback_nothing_is_kept(rank, size):
    for settings in (up.Compressed("int8", feedback=False), up.PowerSGD(rank=2, feedback=False, start=0)):
        job = Job(settings)
        same_everywhere(job.step(gradients(rank, 0)))
        assert not any(name.endswith("error") for name in job.compression.buffers())


def check_the_bound_of_a_codec_holds(rank, size):
    """One step: two roundings, each within the codec's bound."""
    for name in CODECS:
        job = Job(up.Compressed(name, small=0, feedback=False))
        everybody = [gradients(one, 0) for one in range(size)]
        for key, value in job.step(everybody[rank]).items():
            wanted = sum(g[key] for g in everybody) / size
            largest = max(float(g[key].abs().max()) for g in everybody)
            bound = 2.01 * un.codecs.codec.codec_of(name).bound(1.1 * largest) + 1e-6
            assert float((value - wanted).abs().max()) <= bound, (name, key)


def check_memory_is_what_the_buffers_take(rank, size):
    numel = sum(math.prod(shape) for shape in SHAPES.values())
    job = Job(up.Compressed("int8", small=0))
    assert job.compression.memory() == 0
    job.step(gradients(rank, 0))
    assert job.compression.memory() == 4 * numel
    job = Job(up.Compressed("int8", small=0, errors="1-6-9"))
    job.step(gradients(rank, 0))
    assert job.compression.memory() == 2 * numel
    job = Job(up.PowerSGD(rank={"wide": 3}, start=0))
    job.step(gradients(rank, 0))
    assert job.compression.memory() == 4 * (24 * 70 + 70 * 3)


# ---- what is not finite --------------------------------------------------------------------------------


def check_gradients_near_the_largest_number_do_not_stay(rank, size):
    """Factors and sums of errors overflow: NaN on all ranks, until the gradients are usual ones."""
    low = {"wide": 2, "tall": 1, "conv": 2}
    for factors in ("f32", "bf16", "fp16"):
        for scale in (1e4, 1e37, 5e37, 1e38, 3e38):
            job = Job(up.PowerSGD(rank=low, factors=factors, start=0))
            for step in range(4):
                same_everywhere(job.step(gradients(rank, step, scale)))
            for step in range(4, 7):
                found = job.step(gradients(rank, step))
            same_everywhere(found)
            assert all(value.isfinite().all() for value in found.values()), (factors, scale)
            assert all(buffer.isfinite().all() for buffer in job.errors().values()), (factors, scale)


def check_what_is_not_finite_does_not_stay(rank, size):
    """All ranks see that it is not, none keeps it; the next step is as if it had not been."""
    low = {"wide": 2, "tall": 1, "conv": 2}
    kinds = [up.PowerSGD(rank=low, factors=f, start=0) for f in ("f32", "fp16", "1-6-9")]
    kinds += [up.PowerSGD(rank=low, errors="1-6-9", start=0)]
    kinds += [up.Compressed(codec, small=0) for codec in CODECS]
    for settings in kinds:
        for bad in (math.nan, math.inf, -math.inf):
            job, other = Job(settings), Job(settings)
            for one in (job, other):
                one.step(gradients(rank, 0))
            kept = {name: buffer.clone() for name, buffer in job.compression.buffers().items()}
            given = gradients(rank, 1)
            if rank == size - 1:
                for value in given.values():
                    value.view(-1)[-1] = bad
            found = job.step(given)
            for name, value in found.items():
                assert not torch.isfinite(value).all(), (settings, name, bad)
            same_everywhere({n: torch.isfinite(v).float() for n, v in found.items()})
            for name, buffer in job.compression.buffers().items():
                assert torch.equal(buffer, kept[name]), (settings, name, bad)
            job.compression.steps = other.compression.steps
            after, wanted = job.step(gradients(rank, 2)), other.step(gradients(rank, 2))
            for name, value in after.items():
                assert torch.equal(value, wanted[name])


def check_overflow_of_the_format_is_no_poison(rank, size):
    """Finite gradients that a format does not hold, as under a loss scale that is too large."""
    for settings in (
        up.Compressed("fp16", small=0),
        up.PowerSGD(rank={"wide": 2, "tall": 1, "conv": 2}, factors="fp16", start=0),
    ):
        job = Job(settings)
        job.step(gradients(rank, 0))
        found = job.step(gradients(rank, 1, scale=1e6))
        assert all(not torch.isfinite(found[name]).all() for name in ("wide", "tall", "conv"))
        for step in range(2, 5):
            found = job.step(gradients(rank, step))
            assert all(torch.isfinite(value).all() for value in found.values())


# ---- state ---------------------------------------------------------------------------------------------


KINDS = {
    "low rank": lambda: up.PowerSGD(rank={"wide": 2, "conv": 3, "tall": "int8"}, errors="1-6-9", start=1),
    "cold": lambda: up.PowerSGD(rank={"wide": 2, "conv": 3}, warm_start=False, start=0),
    "coded": lambda: up.Compressed("int4", small=0),
}


def check_a_saved_state_goes_on_bit_for_bit(rank, size):
    for make in KINDS.values():
        job, other = Job(make()), Job(make())
        for step in range(4):
            job.step(gradients(rank, step))
        file = io.BytesIO()
        torch.save(job.compression.state_dict(), file)
        file.seek(0)
        other.compression.load_state_dict(torch.load(file))
        assert other.compression.memory() == job.compression.memory() > 0
        for step in range(4, 7):
            found, wanted = other.step(gradients(rank, step)), job.step(gradients(rank, step))
            for name, value in found.items():
                assert torch.equal(value, wanted[name])


def check_a_state_that_does_not_fit_is_refused(rank, size):
    job = Job(up.PowerSGD(rank={"wide": 2}, start=0))
    job.step(gradients(rank, 0))
    state = job.compression.state_dict()
    other = Job(up.PowerSGD(rank={"wide": 3}, start=0)).compression
    with pytest.raises(
        ValueError, match=r"factor of 'wide' is torch.float32 \[2, 70\], expected .*\[3, 70\]"
    ):
        other.load_state_dict(state)
    assert other.memory() == 0
    with pytest.raises(ValueError, match=f"is of rank {rank + 1} of {size}, this is rank {rank} of {size}"):
        other.load_state_dict({**state, "rank": rank + 1})
    small = up.Compression(up.Compressed("int8"), {"a": nn.Parameter(torch.zeros(3))}, dist.group.WORLD)
    with pytest.raises(ValueError, match="no parameter here is called so"):
        small.load_state_dict(state)
    halved = Job(up.PowerSGD(rank={"wide": 2}, errors="1-6-9")).compression
    with pytest.raises(ValueError, match="error of 'wide' is torch.float32"):
        halved.load_state_dict(state)


def check_without_feedback_a_saved_error_is_not_added(rank, size):
    for with_, without in (
        (up.Compressed("int8", small=0), up.Compressed("int8", small=0, feedback=False)),
        (up.PowerSGD(rank={"wide": 2}, start=0), up.PowerSGD(rank={"wide": 2}, start=0, feedback=False)),
    ):
        job, loaded, plain = Job(with_), Job(without), Job(without)
        job.step(gradients(rank, 0))
        plain.step(gradients(rank, 0))
        loaded.compression.load_state_dict(job.compression.state_dict())
        found, wanted = loaded.step(gradients(rank, 1)), plain.step(gradients(rank, 1))
        for name, value in found.items():
            assert torch.equal(value, wanted[name]), name
        assert not any(name.endswith("error") for name in loaded.compression.buffers())


def check_what_was_frozen_is_exact(rank, size):
    named = parameters()
    named["wide"].requires_grad_(False)
    compression = up.Compression(up.Compressed("int4", small=0), named, dist.group.WORLD)
    flat = torch.full((24 * 70,), 1 / 3 + rank)
    compression.begin([(named["wide"], flat.view(24, 70))], flat, label="bucket")
    compression.finish()
    torch.testing.assert_close(flat, torch.full((24 * 70,), 1 / 3 + (size - 1) / 2))
