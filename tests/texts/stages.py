"""Pipelines, mixed precision, swapping: `stages.py NAME`."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from told import of_all, refusal, say
from torch import nn
from trained import alone, batches, kept, net, planned, same

import unisono.parallel as up
from unisono.parallel.pipeline.schedule import predict, schedule


class Deep(nn.Module):
    """No nn.Sequential: the stages come from its recording."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.second(y)) + x)


def trains(plan: up.Plan, within: float = 1e-6) -> up.Run:
    run = planned(plan, net(), sample=batches()[0][0])
    same([run.step(batch) for batch in run.shard(batches())], alone(net(), batches()), within)
    return run


def bubbles() -> None:
    """(p-1)/(m+p-1) of p stages and m micro-batches."""
    for p, m in ((4, 8), (2, 8), (4, 1)):
        found = predict(schedule("gpipe", p, m), {"F": 1.0, "B": 2.0})
        assert abs(found.bubble - (p - 1) / (m + p - 1)) < 1e-12
        say(f"p={p} m={m}: {found.bubble:.4f}")
    say(predict(schedule("gpipe", 4, 8), {"F": 1.0, "B": 2.0}).text(44).splitlines()[0])


def checkpointed() -> None:
    """Data ranks beside stages, over TCP: saved after two steps, loaded under another plan."""
    run, wanted = (
        planned(up.Plan(data=2, pipeline=2, micro_batches=4, schedule="gpipe"), net()),
        alone(net(), batches()),
    )
    found = [run.step(batch) for batch in run.shard(batches()[:2])]
    folder = Path(of_all(tempfile.mkdtemp())[0])
    run.save(folder)
    other = planned(up.Plan(data=4, zero=3), net())
    other.load(folder)
    found += [other.step(batch) for batch in other.shard(batches()[2:])]
    same(found, wanted)
    dist.barrier()
    say("the losses of one process, before and after the checkpoint")


def between_hosts() -> None:
    run = trains(up.Plan(pipeline=2, micro_batches=8, schedule="gpipe"))
    first, second = of_all([*run.parameters])
    assert len(first) == len(second) == 6
    assert not {*first} & {*second}
    assert len(run.timeline().text(60).splitlines()) >= 2
    say("the losses of one process, stages on two hosts")


def recorded() -> None:
    run = planned(up.Plan(pipeline=2, micro_batches=2), Deep(), sample=batches()[0][0])
    same([run.step(batch) for batch in run.shard(batches())], alone(Deep(), batches()))
    say(str(run.stages).splitlines()[2].split()[:2])


def axes() -> None:
    for plan in (up.Plan(tensor=2, pipeline=2, micro_batches=4, schedule="gpipe"),
                 up.Plan(data=2, pipeline=2, micro_batches=4)):  # fmt: skip
        run = trains(plan)
        whole = sum(parameter.numel() for parameter in net().parameters())
        assert sum(of_all(kept(run))) < 1.5 * plan.data * whole  # without cuts: 4 times the whole
        say(f"tensor={plan.tensor} data={plan.data} pipeline=2: the losses of one process")


def automatic() -> None:
    run = planned("auto", net(), sample=batches()[0])
    same([run.step(batch) for batch in run.shard(batches())], alone(net(), batches()))
    say("the losses of one process, by the plan that was chosen")


def precisions() -> None:
    """Rounded, and as good: 20 steps on the same rows bring the loss from 1.03 to 0.62."""
    rows = batches(count=1) * 20
    for precision in ("fp16", "bf16", "autocast"):
        run = planned(up.Plan(data=2, precision=precision), net())
        same([run.step(batch) for batch in run.shard(rows)], alone(net(), rows), within=2e-3, beyond=5e-6)
        say(precision, "follows f32")


def tf32() -> None:
    """Off by default; a CPU has none."""
    assert not torch.backends.cuda.matmul.allow_tf32
    trains(up.Plan(data=2))
    assert torch.get_float32_matmul_precision() == "highest"
    trains(up.Plan(data=2, tf32=True))
    assert torch.get_float32_matmul_precision() == "high"
    say("off by default")


def swaps() -> None:
    for store in ("memory", "disk"):
        run = planned(up.Plan(data=2, swap=store), net())
        found = [run.step(batch) for batch in run.shard(batches())]
        waits(run)
        plain = planned(up.Plan(data=2), net())
        assert found == [plain.step(batch) for batch in plain.shard(batches())]
        same(found, alone(net(), batches()))
        say(store, "has the losses without swapping, bit for bit")


def waits(run: up.Run) -> None:
    """Between steps no parameter is in memory."""
    for parameter in run.parameters.values():
        assert "its values are in memory only while its unit computes" in refusal(parameter.sum, RuntimeError)


def swaps_with_zero() -> None:
    waits(trains(up.Plan(data=2, zero=3, swap="disk")))
    say("the losses of one process")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
