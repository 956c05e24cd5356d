"""ZeRO, low rank, 16-bit formats and Adam in four bytes. `sharing.py NAME`."""

import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from told import of_all, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trained import adam, alone, batches, kept, net, planned, same

import unisono as un
import unisono.parallel as up
from unisono.planner import shape_of


def within_a_node() -> None:
    """Shards among the ranks of a node, replicas between nodes."""
    run = planned(up.Plan(data=4, zero=3, shard=2), net())
    (first, *others) = run.shard(batches())
    found = [run.step(first, watch=True)]
    axes = {"all_gather": "shard", "reduce_scatter": "shard", "all_reduce": "replica"}
    seen = {call.operation for call in run.explain() if call.nbytes and axes.get(call.operation) == call.axis}
    found += [run.step(batch) for batch in others]
    same(found, alone(net(), batches()))
    say("the losses of one process;", sorted(seen))


def gathers() -> None:
    """The parameters of a unit are gathered before it runs, again in backward."""
    run = planned(up.Plan(data=2, zero=3), net(1024))
    batch = next(iter(run.shard(batches(1024, 1))))
    run.step(batch, watch=True)
    calls = [call.operation for call in run.explain() if call.axis != "world"]
    say(len(calls), "calls:", *[f"{kind} {calls.count(kind)}" for kind in sorted(set(calls))])


def inference() -> None:
    run, x = planned(up.Plan(data=2, zero=3), net()), batches()[0][0]
    model = net()
    assert kept(run) * 2 == sum(parameter.numel() for parameter in model.parameters())
    for batch in run.shard([(x, x)]):
        torch.testing.assert_close(run.predict(batch[0]), model(batch[0]), rtol=0, atol=1e-6)
    say("outputs of one process")


def low_rank() -> None:
    """PowerSGD of DDP: matrices as two factors, ranks equal bit for bit; a plan has it, too."""
    dist.init_process_group("unisono")
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8 * 4 * 4, 64), nn.Linear(64, 8))
    ddp = DistributedDataParallel(model)
    hook = up.PowerSGD(rank={"0.*": "bf16", "2.weight": 4, "*": "exact"}, start=1).attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(3):
        torch.manual_seed(step * 2 + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(8, 4, 6, 6)).square().mean().backward()
        optimizer.step()
    weights = of_all(nn.utils.parameters_to_vector(model.parameters()).tolist())
    assert weights[0] == weights[1]
    assert torch.linalg.matrix_rank(model[2].weight.grad) == 4
    say(
        {
            name: str(getattr(hook.choices[name], "name", hook.choices[name]))
            for name in ("0.weight", "2.weight", "3.weight")
        }
    )


def low_rank_call() -> None:
    """A matrix of rank 2 in a call: two factors of rank 4 have it."""
    with un.init_process_group() as world:
        rng = np.random.default_rng(5)
        common = (rng.standard_normal((64, 2)) @ rng.standard_normal((2, 32))).astype(np.float32)
        x, codec = common * (world.rank + 1), un.LowRank(rank=4)
        world.all_reduce(x, codec=codec)
        assert np.linalg.norm(x - 3 * common) < 1e-4 * np.linalg.norm(x)
        y = rng.standard_normal((64, 32)).astype(np.float32)
        world.all_reduce(y, codec=codec)
        assert np.linalg.matrix_rank(y) == 4
        say(codec.nbytes((64, 32)), "bytes in place of", common.nbytes)


def all_together() -> None:
    """Shards, low-rank gradients and 16 bits in one plan."""
    plan = up.Plan(data=2, zero=2, precision="bf16", compression=up.PowerSGD(rank=4, start=1))
    run, rows = planned(plan, net()), batches(count=1) * 20  # the loss falls from 1.03 to 0.62
    found = [run.step(batch, watch=step == 19) for step, batch in enumerate(run.shard(rows))]
    same(found, alone(net(), rows), within=5e-2, beyond=2e-3)
    assert any("averaged, compressed, and each rank keeps its part" in call.why for call in run.explain())
    say("follows one process in f32")


def classes() -> None:
    """Parameters by how much their gradients may lose: exact, 16 bits, low rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    rows = [(x, x.flip(1)) for x in torch.randn(3, 128, 64)]
    proposal = un.codecs.classify(model, rows, nn.functional.mse_loss)
    say({name: proposal[name] for name in ("0.weight", "0.bias")})


def formats() -> None:
    """Sign, exponent and fraction bits; the largest relative error of a normal value is half a place."""
    x = np.random.default_rng(3).uniform(1, 2, 1 << 20).astype(np.float32)
    for name, bound, values in (("1-6-9", 2.0**-10, x - 3), ("0-6-10", 2.0**-11, x)):
        back = un.codecs.decode(un.codecs.encode(values, name), name)
        worst = float(np.max(np.abs(back - values) / np.abs(values)))
        assert bound / 2 < worst <= bound, worst
        say(name, "error at most 2^", round(np.log2(bound)))
    with un.init_process_group() as world:
        for name in ("1-6-9", "0-6-10"):
            y = np.full(8, 1.5 + 2.0**-12, np.float32)  # which both formats round to 1.5
            world.all_reduce(y, codec=name)
            assert (y == 1.5 * world.size).all()
        say("all_reduce in both")


GPT = {"heads": 96, "sequence": 2048}


def on_paper(shape: Any, **how: Any) -> Any:
    return un.plan(shape, hardware="a100-80g", **how)


def too_large() -> None:
    """170 billion parameters in f32 do not fit on a GPU of 80 GB, and a 64th of them does."""
    shape = shape_of("gpt", layers=93, hidden=12288, vocab=120000, **GPT)
    for zero in (0, 3):
        found = on_paper(shape, batch=64, gpus=64, compute="f32", plan=f"data=64,zero={zero},recompute=full")
        nbytes = found.chosen.memory.parameters
        say(f"zero={zero}: {nbytes / 1e9:.0f} GB of parameters on a GPU")


def cluster() -> None:
    """A trillion parameters on 3,072 GPUs; published: 502 PFLOP/s (Narayanan et al., 2021)."""
    shape = shape_of("gpt", layers=128, hidden=25600, heads=160, vocab=51200, sequence=2048)
    found = on_paper(shape, batch=3072, gpus=3072, plan="data=6,tensor=8,pipeline=64")
    pflops = found.tflops_per_gpu * 3072 / 1000
    assert abs(pflops / 502 - 1) < 0.1, pflops
    say("within 10 % of 502 PFLOP/s")


def table() -> None:
    """Bits of the float formats, from their largest value and their place after 1."""
    for name, kind in (("f32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        info = torch.finfo(kind)
        fraction = round(-np.log2(info.eps))
        say(f"{name}: 1-{info.bits - 1 - fraction}-{fraction}, largest {info.max:.4g}")


def adam_in_four_bytes() -> None:
    """The mean in 1-6-9, the variance in 0-6-10: four bytes a parameter, the loss of AdamW."""
    losses, sizes = {}, {}
    rows = batches(count=1) * 200
    for name, make in (("AdamW", adam), ("CompressedAdam", lambda params: up.CompressedAdam(params, 1e-2))):
        model, kept = net(), []

        def made(params: Any, make: Any = make, kept: list[Any] = kept) -> torch.optim.Optimizer:
            kept.append(make(params))
            return kept[0]

        losses[name] = alone(model, rows, made)[-1]
        state = [value for each in kept[0].state.values() for value in each.values()]
        nbytes = sum(value.nbytes for value in state if torch.is_tensor(value) and value.numel() > 1)
        sizes[name] = nbytes / sum(parameter.numel() for parameter in model.parameters())
    assert abs(losses["CompressedAdam"] / losses["AdamW"] - 1) < 0.05, losses
    say({name: f"{size:.2f} bytes" for name, size in sizes.items()})


if __name__ == "__main__":
    globals()[sys.argv[1]]()
