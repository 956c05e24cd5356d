"""What the sweep does not ask: overflow, frozen and unused parameters, groups, bubbles, memory, reports."""

import io
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

import unisono.parallel as up
import unisono.torch  # noqa: F401
from effort import SWEEP
from inside_parallel import PlanMesh
from parallel import models, sweep
from parallel.group_of_a_job import process_group
from parallel.plain_training import local
from unisono.parallel import sharded_parameters
from unisono.parallel.profiled_step import profile_step

SMALL_MODEL_BYTES = sharded_parameters.SMALL_MODEL_BYTES


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def made(name: str, plan: up.Plan, optimizer: Any = adamw, **more: Any) -> up.Run:
    case = models.CASES[name]
    return up.parallelize(models.make(name), plan, optimizer=optimizer, loss=case.loss, **more)


def whole(run: up.Run) -> dict[str, Tensor]:
    """This rank's parameters, gathered over the data and tensor axes."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in run.model.named_parameters()
        if not p.is_meta
    }


def check_overflow_on_one_rank_skips_the_step_on_all(folder: Path) -> None:
    for plan in (up.Plan(data=2, zero=3, precision="fp16"), up.Plan(pipeline=2, precision="fp16")):
        run = made("mlp", plan)
        x, y = models.vector_batches(1, 4)[0]
        run.step((x, y))
        assert run.skipped == 0
        before, scale = whole(run), run.scaler.scale
        if plan.data == 2 and dist.get_rank() == 1:
            x = x * 1e6  # infinite in fp16, on one rank only
        elif plan.data == 1:
            x = x * 1e6
        run.step((x, y))
        assert run.skipped == 1
        assert run.scaler.scale == scale / 2
        after = whole(run)
        assert all(torch.equal(before[name], after[name]) for name in before)
        run.step(models.vector_batches(1, 4)[0])
        assert run.skipped == 1
        assert any(not torch.equal(before[name], value) for name, value in whole(run).items())


class Branches(nn.Module):
    """Each row's rank decides which branch is used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.left if x[0, 0] > 0 else self.right)(x))


def check_ranks_may_use_different_parameters(folder: Path) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(5))
    x[0, 0], x[4, 0] = 1.0, -1.0  # the first half goes left, the second right
    y = x[:, :4].argmax(1)
    for zero in (0, 2):
        torch.manual_seed(0)
        model = Branches()
        alone = Branches()
        alone.load_state_dict(model.state_dict())
        run = up.parallelize(
            model,
            up.Plan(data=2, zero=zero, uneven_use=True),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            loss=functional.cross_entropy,
        )
        for batch in run.shard([(x, y)] * 3):
            run.step(batch)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for half in (slice(0, 4), slice(4, 8)):
                (functional.cross_entropy(alone(x[half]), y[half]) / 2).backward()
            optimizer.step()
        for name, value in whole(run).items():
            torch.testing.assert_close(value, alone.get_parameter(name))


def check_a_gradient_of_some_ranks_only_is_an_error(folder: Path) -> None:
    x = torch.ones(4, 16)
    x[2, 0] = -1.0  # rank 1 goes right
    torch.manual_seed(0)
    run = up.parallelize(
        Branches(),
        up.Plan(data=2),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=functional.cross_entropy,
    )
    part = next(iter(run.shard([(x, x[:, :4].argmax(1))])))
    with pytest.raises(RuntimeError, match=r"'right.bias' has a gradient on 50% .*uneven_use=True"):
        run.step(part)


def check_parameter_groups_by_name(folder: Path) -> None:
    def groups(parameters: up.Parameters) -> torch.optim.Optimizer:
        biases = [p for name, p in parameters.named.items() if name.endswith("bias")]
        others = [p for name, p in parameters.named.items() if not name.endswith("bias")]
        return torch.optim.SGD([{"params": biases, "lr": 0.0}, {"params": others}], lr=0.1)

    run = made("mlp", up.Plan(pipeline=2), groups)
    before = whole(run)
    run.step(models.vector_batches(1, 4)[0])
    for name, value in whole(run).items():
        assert torch.equal(value, before[name]) == name.endswith("bias"), name


def check_accumulation_moves_no_gradients(folder: Path) -> None:
    def reductions(micro_batches: int, zero: int) -> int:
        run = made("mlp", up.Plan(data=2, zero=zero, micro_batches=micro_batches))
        (batch,) = run.shard(models.vector_batches(1, 8))
        run.step(batch, watch=True)
        return sum(
            call.operation in ("reduce_scatter", "all_reduce") and call.axis != "world"
            for call in run.explain()
        )

    assert reductions(1, 0) == reductions(4, 0) > 0
    assert reductions(1, 1) == reductions(4, 1) > 0
    assert reductions(4, 2) == 4 * reductions(1, 2)


def check_zero_bubble_adds_up_in_f32(folder: Path) -> None:
    """Gradients of weights have a pass of their own there, without the hooks of backward."""
    for schedule in ("zb-h1", "zbv"):
        plan = {"pipeline": 2, "schedule": schedule, "micro_batches": 4, "precision": "bf16"}
        trial = sweep.Trial("tied", "adamw", 8, plan)
        assert sweep.difference(trial, sweep.train(trial, 3)) < sweep.TOLERANCE


def check_memory_between_steps(folder: Path) -> None:
    """f32 AdamW: 4 bytes of parameter and 8 of moments; ZeRO keeps 1/N of them, tensor cuts what it can."""
    total = sum(p.numel() for p in models.make("gpt").parameters())
    for plan, share in (
        (up.Plan(data=2), 1.0),
        (up.Plan(data=2, zero=1), 0.5),
        (up.Plan(data=2, zero=3), 0.5),
    ):
        run = made("gpt", plan)
        for batch in run.shard(models.text_batches(1, 4)):
            run.step(batch)
        kept = [local(p) for p in run.optimizer.param_groups[0]["params"]]
        kept += [local(s) for state in run.optimizer.state.values() for s in state.values() if s.dim()]
        nbytes = sum(tensor.nbytes for tensor in kept)
        assert abs(nbytes / (12 * total * share) - 1) < 0.05, (plan, nbytes, total)
        gathered = sum(p.numel() for p in run.model.parameters())
        assert gathered == total  # DTensors say their whole size, and nothing else is registered


def check_explain_and_trace(folder: Path) -> None:
    run = made("gpt", up.Plan(data=2, zero=3))
    with pytest.raises(RuntimeError, match="no step was watched"):
        run.explain()
    (batch,) = run.shard(models.text_batches(1, 4))
    run.step(batch, watch=True)
    report = run.explain()
    parts = {call.where: call.nbytes for call in report if call.operation == "reduce_scatter"}
    block = sum(p.numel() for p in models.Block().parameters()) * 4
    assert parts["1"] == pytest.approx(block / 2, rel=0.05)  # a rank receives half of a block's gradients
    assert {call.axis for call in report} == {"world", "shard"}
    assert all(call.predicted_s > 0 and call.measured_s > 0 for call in report)
    assert "gradients are reduced to their owners" in str(report)
    run.trace(folder / "step.json")
    dist.barrier()
    written = json.loads((folder / "step.json").read_text())["traceEvents"]
    assert {event["pid"] for event in written} == {0, 1}
    assert any(event["name"] == "pipeline|F0 of stage 0" for event in written)
    assert any(event["name"] == "unisono:all_gather" and event["args"]["bytes"] for event in written)


def check_a_small_model_is_one_unit(folder: Path) -> None:
    """Its parameters are gathered once a step; in low precision it has units, which cast their inputs."""
    batch = models.text_batches(1, 4)[0]

    def train(small: int, **more: Any) -> tuple[up.Run, list[float], list[str]]:
        sharded_parameters.SMALL_MODEL_BYTES = small
        run = made("gpt", up.Plan(data=2, zero=3, **more))
        (part,) = run.shard([batch])
        losses = [run.evaluate(part), *(run.step(part) for _ in range(3)), run.step(part, watch=True)]
        return run, losses, [call.operation for call in run.explain() if call.axis == "shard"]

    run, losses, moved = train(SMALL_MODEL_BYTES)
    _, expected, units = train(0)
    assert losses == expected  # the same sums in the same order
    assert moved == ["all_gather", "reduce_scatter"]
    assert units.count("reduce_scatter") > 1
    assert not SWEEP or train(SMALL_MODEL_BYTES, precision="bf16")[2] == train(0, precision="bf16")[2]
    run.evaluate(next(iter(run.shard([batch]))))
    assert all(isinstance(value, DTensor) for value in run.model.parameters())  # gathered ones are plain


def check_bytes_received_leave_out_those_sent(folder: Path) -> None:
    run = made("mlp", up.Plan(pipeline=2))
    (batch,) = run.shard(models.vector_batches(1, 8))
    _, trace = profile_step(lambda: run.step(batch, watch=False))
    calls = trace.calls(run.mesh, up.Link())
    assert {"send", "recv"} <= {call.operation for call in calls}
    assert trace.received(2) == sum(call.nbytes for call in calls if call.operation != "send")


def check_metrics_and_progress(folder: Path) -> None:
    average, loss = up.Average(), torch.tensor(1.0 + 4 * dist.get_rank(), requires_grad=True)
    average.add("loss", loss * 1, samples=3 - 2 * dist.get_rank())
    assert average.result() == {"loss": 2.0}
    assert loss.item() == 1.0 + 4 * dist.get_rank()
    average.add(f"of rank {dist.get_rank()}", 1.0)
    with pytest.raises(ValueError, match="different metrics"):
        average.result()
    run, out = made("gpt", up.Plan(data=2)), io.StringIO()
    losses = list(up.Progress(run, every=2, out=out).steps(run.shard(models.text_batches(4, 4))))
    assert len(losses) == run.steps == 4
    lines = out.getvalue().splitlines()
    assert len(lines) == (2 if dist.get_rank() == 0 else 0)
    assert all(re.fullmatch(LINE, line) for line in lines), lines


LINE = r"step \d+  loss [\d.]+  [\d.]+ ms/step  \d+ tokens/s  communication \d+%  memory \d+ MB"


def check_evaluate_changes_nothing(folder: Path) -> None:
    for plan in (up.Plan(data=2, zero=1), up.Plan(pipeline=2), up.Plan(data=2, zero=3)):
        run = made("mlp", plan)
        (batch,) = run.shard(models.vector_batches(1, 8))
        before = whole(run)
        first = run.evaluate(batch)
        assert run.evaluate(batch) == first
        assert abs(run.step(batch) - first) < 1e-6
        assert run.evaluate(batch) != first
        assert set(before) == set(whole(run))
    for zero in (0, 1):  # what an evaluation has gathered in bf16 does not stand for the weights
        run = made("mlp", up.Plan(data=2, zero=zero, precision="bf16"))
        (batch,) = run.shard(models.vector_batches(1, 8))
        run.step(batch)
        wanted = run.state_dict()
        run.evaluate(batch)
        assert all(torch.equal(value, wanted[name]) for name, value in run.state_dict().items())


def in_group(rank: int, size: int, folder: Path, check: Callable[[Path], None]) -> None:
    """Run a check as one rank of a group of its own; its models have units as large ones have them."""
    sharded_parameters.SMALL_MODEL_BYTES = 0
    warnings.filterwarnings("error", message=".*returned a view tensor")
    with process_group(rank, size, folder):
        check(folder)


# ---- what `up.Progress` says: model FLOPs utilization, and batches that are dicts ----


def check_model_flops_utilization(folder: Path) -> None:
    batches = models.vector_batches(4, 8)
    graph = up.capture(models.make("mlp"), batches[0][0])
    of_row = 3 * graph.flops / 8
    for plan, more in (
        (up.Plan(data=2), {"peak": 1e9}),
        (up.Plan(data=2), {"peak": "measured"}),
        (up.Plan(data=2, zero=3), {"peak": 1e9, "flops": of_row}),
        (up.Plan(pipeline=2), {"peak": 2e12, "flops": of_row}),
    ):
        run, out = made("mlp", plan), io.StringIO()
        list(up.Progress(run, every=4, out=out, **more).steps(run.shard(batches)))
        if dist.get_rank() == 0:
            found = re.search(
                r"  (\d+) rows/s  MFU ([\d.]+)% of ([\d.]+) ([GT]FLOP/s) per rank", out.getvalue()
            )
            rows, share, peak = (float(found[index]) for index in (1, 2, 3))
            unit = {"GFLOP/s": 1e9, "TFLOP/s": 1e12}[found[4]]
            assert ("(measured)" in out.getvalue()) == (more["peak"] == "measured")
            assert abs(share / 100 - rows * of_row / (peak * unit * 2)) < 0.002 + 0.1 * share / 100, (
                out.getvalue()
            )
    for plan, more, says in (
        (up.Plan(data=2), {"peak": "fast"}, "peak is 'fast', expected FLOP/s of a rank or 'measured'"),
        (up.Plan(data=2), {"peak": -1.0}, "peak is -1.0; it must be positive"),
        (up.Plan(data=2, zero=1), {"peak": 1e9}, "Before parallelize, write graph = up.capture"),
    ):
        with pytest.raises(ValueError, match=says):
            up.Progress(made("mlp", plan), **more)
    with pytest.raises(TypeError, match="peak is True, expected a number"):
        up.Progress(made("mlp", up.Plan(data=2)), peak=True)


def check_progress_of_a_model_with_its_own_loss(folder: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 8)

        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": functional.cross_entropy(self.table(ids).flatten(0, 1), labels.flatten())}

    run = up.parallelize(Own(), up.Plan(data=2), optimizer=adamw, loss=None)
    ids, out = torch.randint(8, (4, 6)), io.StringIO()
    batches = [{"ids": ids, "labels": ids}] * 4
    list(up.Progress(run, every=2, out=out, peak=1e9).steps(run.shard(batches)))
    assert out.getvalue().count("tokens/s  MFU") == (2 if dist.get_rank() == 0 else 0)


# ---- process groups one after the other in one process. Checks that run in turn have such groups, too ----


def check_meshes_of_a_new_group_are_new(folder: Path) -> None:
    """DTensor keeps the meshes it has seen, and takes an equal one for a new one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for more in (1, 0):
        mesh = PlanMesh.of(up.Plan(data=size, expert=2), "cpu")
        for _ in range(more):
            dist.new_group()  # so that the groups of experts get another name
        experts = mesh.of_experts().axes
        for axes, last in ((mesh.axes, Replicate()), (experts, Shard(0))):
            value = DTensor.from_local(torch.ones(2), axes, [Replicate()] * 3 + [last])
            copy = value.clone()  # asks for the mesh by value; a sum would compare a thousand strategies
            assert copy.device_mesh is axes
            assert copy.full_tensor().tolist() == [1.0] * (4 if axes is experts else 2)
        assert experts.get_local_rank(3) == rank % 2
        if more:
            dist.destroy_process_group()
            store = dist.FileStore(str(folder / "again"), size)
            dist.init_process_group("unisono", store=store, rank=rank, world_size=size)
