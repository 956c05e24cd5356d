"""`up.plan` for GPUs that this machine has not: hardware files, their memory, operators and links."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unisono.parallel as up
from inside_parallel import DryRun, LinkCosts, TrainingTask, column_sum, convolution, hosts_of
from inside_planner import operator_costs_of
from loops import each
from planned_models import adamw, features, mlp, planned
from unisono.planner import find_hardware

LOWER, HIGHER = 0.77, 1.1  # shares of f32 and of 16 bits beside the file's
A100, V100 = find_hardware("a100-80g"), find_hardware("v100-32g")
CROSS = nn.functional.cross_entropy
SMALL: dict[str, Any] = {"pipeline": 1, "tensor": 1, "recompute": False, "micro_batches": 1, "ranks": None}


def test_a_laptop_plans_for_gpus() -> None:
    choice = planned(**SMALL, hosts="2xa100-80g", zero=[0, 1], shard=None)
    assert choice.plan.ranks == 16
    assert choice.limit_bytes == A100.usable_bytes
    assert choice.speed == "a roofline of a100-80g"
    assert choice.links == "the links of a100-80g"
    assert "prices of operators: a roofline of a100-80g" in str(choice)
    assert "prices of collectives: the links of a100-80g" in str(choice)
    assert choice.memory_bytes % (2 << 20) == 0  # segments of the allocator
    half = planned(**{**SMALL, "ranks": 4}, hosts="1xa100-80g", zero=0)
    assert half.plan == up.Plan(data=4)


def test_memory_is_that_of_a_gpus_allocator() -> None:
    plan = up.Plan(data=2, zero=1)
    (here,) = DryRun(TrainingTask(mlp(), features(16), 16, adamw, CROSS), plan).peaks()
    gpu = TrainingTask(mlp(), features(16), 16, adamw, CROSS, on_gpu=True)
    (there,) = DryRun(gpu, plan).peaks()
    assert here.nbytes <= there.nbytes < 1.05 * here.nbytes + (1 << 16)
    assert there.reserved > there.nbytes
    (full,) = DryRun(gpu, plan, there.reserved // 2).peaks()
    assert full.exceeded > 0


@each(
    "low, kind, point, work, nbytes, kernels",
    [
        (False, "product", (4096.0, 4096.0, 4096.0), 2 * 4096**3 / (156e12 * 0.756 * LOWER), 0, 2),
        (True, "product_low", (4096.0, 4096.0, 4096.0), 2 * 4096**3 / (312e12 * 0.756 * HIGHER), 0, 2),
        (True, "attention_low", (1024.0, 1e11), 1e11 / (312e12 * 0.6 * 0.85), 0, 2),
        (True, "attention_backward_low", (1024.0, 1e11), 2.5e11 / (312e12 * 0.6 * 0.65), 0, 4),
        (False, "convolution", (64.0, 1e10), 1e10 / (156e12 * 0.175), 0, 5),
        (False, "convolution", (1.0, 1e10), 1e10 / (156e12 * 0.005), 0, 5),  # no units for products
        (True, "convolution_low", (1.0, 1e10), 1e10 / (312e12 * 0.0025), 0, 5),
        (False, "attention", (512.0, 1e11), 1e11 / (156e12 * 0.6 * 0.24), 0, 2),
        (False, "attention", (129.0, 1e11), 1e11 / (156e12 * 0.6 * 0.24 * (129 / 256) ** 2), 0, 2),
        (False, "batched", (64.0, 1e10), 0, 1.5 * 4 * 1e10 / 64, 1),
        (True, "batched_low", (64.0, 1e10), 0, 1.5 * 2 * 1e10 / 64, 1),
        (False, "batched", (1024.0, 1e13), 1e13 / (156e12 * 0.756 * LOWER), 0, 1),
        (False, "light", (1e8,), 0, 1e8, 1),
        (False, "heavy", (1e8,), 0, 1.25 * 8e8, 1),
        (True, "heavy_low", (1e8,), 0, 1.25 * 4e8, 1),
        (True, "norm_backward_low", (1e7,), 0, 5 * 4e7, 2),
        (False, "softmax", (1e7,), 0, 8e7, 1),
        (False, "softmax", (3e8,), 0, 1.85 * 24e8, 1),  # of a vocabulary
    ],
)
def test_operators_take_the_longer_of_flops_and_bytes(
    low: bool, kind: str, point: tuple[float, ...], work: float, nbytes: float, kernels: int
) -> None:
    found = operator_costs_of(A100, ["bf16"] if low else []).at(kind, *point)
    assert found == pytest.approx(kernels * 2.4e-6 + max(work, nbytes / (2039e9 * 0.704 * 1.25)), rel=1e-6)


def test_a_host_starts_what_a_gpu_of_a_file_runs() -> None:
    costs = operator_costs_of(A100)
    assert (costs.launch_s, costs.forward_s, costs.view_s) == pytest.approx((8e-6, 6.4e-6, 2e-6))
    small = mlp()
    options: dict[str, Any] = {"sample": (features(4)[0], features(4)[1]), "optimizer": adamw, "loss": CROSS}
    price = up.plan(small, **options, hosts="1xa100-80g", ranks=1, price=up.Plan()).seconds
    assert 3e-3 < price < 2e-2  # the device computes for a tenth of it


def test_kernels_take_memory_within_themselves_on_gpus() -> None:
    def seen(rows: int, columns: int, width: int = 4) -> int:
        dtype = torch.float32 if width == 4 else torch.bfloat16
        given = torch.empty(rows, columns, dtype=dtype, device="meta")
        return column_sum(given.sum(0), given, [0])

    # On an H100 the allocator's history has 37.12 and 132.00 MiB within the gradient of a bias.
    assert seen(6304, 768) == int(37.125 * 2**20)
    assert seen(6304, 3072, 2) == 132 << 20
    assert seen(16, 768) == 0  # one block sums it
    image, weight = torch.empty(16, 64, 224, 224, device="meta"), torch.empty(64, 64, 3, 3, device="meta")
    assert convolution(image, image, weight, None, [1, 1]) == 2 * image.nbytes
    assert convolution(image, image, weight[:, :, :1, :1], None, [1, 1]) == 0


class Attends(nn.Module):
    """Attention with dropout, or with grouped heads."""

    def __init__(self, groups: int, dropout: float) -> None:
        super().__init__()
        self.groups, self.dropout = groups, dropout
        self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64 // groups)
        self.out = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q(x), self.k(x)))
        attend = nn.functional.scaled_dot_product_attention
        y = attend(q, k, k, dropout_p=self.dropout, enable_gqa=self.groups > 1)
        return self.out(y.transpose(1, 2).flatten(2).mean(1))


@each("groups, dropout, keeps", [(1, 0.0, False), (1, 0.5, False), (4, 0.0, True)])
def test_attention_keeps_what_a_gpus_keeps(groups: int, dropout: float, keeps: bool) -> None:
    length = 256
    sample = torch.randn(2, length, 64), torch.randint(4, (2,))
    task = TrainingTask(Attends(groups, dropout), sample, 2, adamw, CROSS, on_gpu=True)
    (peak,) = DryRun(task, up.Plan()).peaks()
    scores = 2 * 8 * length * length * 4
    assert (peak.nbytes > scores) == keeps


def test_collectives_take_what_their_links_take() -> None:
    costs, nbytes = LinkCosts([A100, A100], [0] * 8 + [1] * 8), 1 << 30
    inside = 2 * (nbytes * 7 / 8 / (300e9 * 0.7) + 3 * 2.7e-6)
    assert costs.seconds("all_reduce", range(8), nbytes) == pytest.approx(inside)
    ports = nbytes / 2 / (25e9 * 0.7) + 4e-6  # one rank of each host
    assert costs.seconds("all_gather", (0, 8), nbytes) == pytest.approx(ports)
    assert costs.seconds("all_gather", (3,), nbytes) == 0.0
    assert costs.message(0, 1, 1e9) == pytest.approx(1e9 / (300e9 * 0.7) + 2.7e-6)
    assert costs.message(7, 8, 1e9) == pytest.approx(1e9 / (25e9 * 0.7) + 4e-6)
    mixed = LinkCosts([A100, V100], [0, 1])
    assert mixed.message(0, 1, 1e9) == pytest.approx(1e9 / (6.25e9 * 0.7) + 4e-6)  # V100's port


def test_hosts_of_a_file_differ(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[[hosts]]\ncount = 1\nhardware = "one.toml"\n'
        '[[hosts]]\ncount = 1\nhardware = "one.toml"\nspeed = 0.25\nmemory = "20 GiB"\n'
    )
    text = (Path(find_hardware.__code__.co_filename).parent / "shipped" / "a100-80g.toml").read_text()
    (tmp_path / "one.toml").write_text(text.replace("ranks = 8", "ranks = 1").replace('"8 us"', '"1 ns"'))
    given: dict[str, Any] = {"pipeline": 2, "data": 1, "tensor": 1, "schedule": "1f1b", "ranks": None}
    wide = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    options: dict[str, Any] = {"sample": (features(4)[0].repeat(1, 4), features(4)[1]), "batch": 4096}
    choice = up.plan(wide, **options, optimizer=adamw, loss=CROSS, **given, hosts=str(file))
    assert choice.plan.cuts is not None
    assert choice.plan.cuts[0] > 4  # the second rank is slower
    assert {choice.limit_bytes} <= {20 << 30, A100.usable_bytes}
    hosts = hosts_of(file, None)
    assert isinstance(hosts, list)
    assert [host.gpu.usable_bytes for host in hosts if host.gpu] == [A100.usable_bytes, 20 << 30]


@each(
    "given, kind, text",
    [
        ({"hosts": "4xtpu"}, ValueError, "no hardware 'tpu'"),
        ({"hosts": "a100-80g"}, ValueError, "expected such as 4xa100-80g"),
        ({"hosts": ""}, ValueError, "expected such as 4xa100-80g"),
        ({"hosts": "0xa100-80g"}, ValueError, "a count is 0"),
        ({"hosts": "9999999xa100-80g"}, ValueError, "a count is 9999999"),
        ({"hosts": "4096xa100-80g"}, ValueError, "32768 ranks, expected 1 to 4096"),
        ({"hosts": "no/cluster.toml"}, OSError, "no/cluster.toml"),
        ({"hosts": Path("no.toml")}, OSError, "no.toml"),
        ({"hosts": [(1, "no.toml")]}, OSError, "no.toml"),
        ({"hosts": [("a100-80g", 1)]}, TypeError, "a count"),
        ({"hosts": [(1, 2, 3)]}, TypeError, "no pair"),
        ({"hosts": b"1xa100-80g"}, ValueError, "hosts is b"),
        ({"hosts": "1xa100-80g", "ranks": 3, "data": 3}, up.NoPlanFitsError, "no plan of 3 ranks"),
        ({"hosts": "2xa100-80g", "ranks": 3}, ValueError, "evenly on equal hosts"),
        ({"hosts": "1xa100-80g", "ranks": 9}, ValueError, "hosts have 8 ranks, and ranks is 9"),
        (
            {"hosts": "1xa100-80g", "memory": "100G"},
            ValueError,
            "memory is 100.00 GiB, and a100-80g has 80.00 GiB",
        ),
        ({"hosts": "1xv100-32g", "precision": "bf16"}, ValueError, "no rate for bf16, only fp16, f32"),
        ({"hosts": "1xa100-80g", "compression": up.Compressed("int8")}, ValueError, "CPU memory"),
        ({"hosts": [up.JobHost(ranks=1, hardware="a100-80g"), 1]}, ValueError, "some hosts have hardware"),
    ],
)
def test_wrong_hosts_are_refused(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        planned(**{**SMALL, **given})


@each(
    "given, kind, text",
    [
        ({"hardware": 3}, TypeError, "hardware is a int"),
        ({"hardware": "tpu"}, ValueError, "no hardware 'tpu'"),
        ({"ranks": 9, "hardware": "a100-80g"}, ValueError, "has 8 GPUs"),
        ({"hardware": "a100-80g", "memory": "90G"}, ValueError, "a100-80g has 80.00 GiB"),
        ({"speed": math.nan}, ValueError, "speed is nan"),
    ],
)
def test_wrong_descriptions_are_refused(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        up.JobHost(**{"ranks": 1, **given})
