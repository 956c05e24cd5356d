"""Sequences that are cut, with other axes, in other people's models, and in long ones. On four ranks."""

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import unisono.parallel as up
from parallel import context_features, contexts, sweep
from parallel.contexts import Decoder, Encoder, batches, classes, mean, of_class
from parallel.plain_training import begun, seeded
from parallel.rows import Row


def check_every_gradient(folder: Path) -> None:
    context_features.check_every_gradient(folder)


def check_attention(folder: Path) -> None:
    contexts.check_attention_against_one_process(folder)


def hugging_face(kind: str) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if kind == "GPT2":
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 48}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    config._attn_implementation = "sdpa"
    return getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config)


def of_hugging_face() -> dict[str, Row]:
    """With a loss of the logits, and with their own, whose labels are padded."""
    ids = torch.randint(64, (3, 4, 25), generator=torch.Generator().manual_seed(5))
    logits = [(each[:, :-1], each[:, 1:]) for each in ids]
    ends = torch.arange(25) >= torch.tensor([[25], [7], [16], [2]])
    own = [{"input_ids": each, "labels": each.masked_fill(ends, -100)} for each in ids]
    rows = {}
    for kind in ("Llama", "Qwen2", "Mistral", "GPT2"):
        make = partial(hugging_face, kind)
        whole = {"context": 2, "data": 2, "zero": 3, "recompute": True}
        rows[kind] = Row(make, plans({"context": 4}, whole), given=logits, loss=mean, sample=None)
        clipped = plans({"context": 4, "clip": 0.5}, whole | {"clip": 0.5})
        rows[f"{kind}'s own loss"] = Row(
            make, clipped, given=own, loss=None, sample=None, options={"weigh": "tokens"}, holds=predicts
        )
    return rows


def predicts(run: up.Run) -> bool:
    run.model.eval()
    shape = run.predict({"input_ids": torch.zeros(2, 24, dtype=torch.long)}).logits.shape
    run.model.train()
    return shape == (2, 24, 64)


def plans(*more: dict[str, Any]) -> list[up.Plan]:
    return [up.Plan(**one) for one in more]


HYBRID = {"context": 2, "data": 2}
TABLE = {
    "a ring": Row(
        partial(Decoder, 6, 3),
        plans(
            {"context": 4}, {"context": 4, "zero": 3, "recompute": True, "micro_batches": 4}, HYBRID,
            {**HYBRID, "zero": 1, "micro_batches": 2}, {**HYBRID, "zero": 2, "micro_batches": 2},
            {**HYBRID, "zero": 3, "recompute": True}, {**HYBRID, "zero": 3, "shard": 1},
            {**HYBRID, "zero": 1, "uneven_use": True},
        ),
        given=batches(21), loss=mean, sample=None,
    ),
    "by heads": Row(
        partial(Decoder, 4, 4), plans({"context": 4}), given=batches(512, rows=2), loss=mean, sample=None
    ),
    "an encoder": Row(
        Encoder, plans({"context": 4}, {**HYBRID, "zero": 3}), given=classes(), loss=of_class, sample=None
    ),
} | (of_hugging_face() if sweep.HAVE_TRANSFORMERS else {})  # fmt: skip


def peak_mb(step: Any) -> float:
    """How much more memory this process has had during a call than before it."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    clear.write_text("5")  # the peak begins anew
    before = numbers(status)["VmRSS"]
    step()
    return (numbers(status)["VmHWM"] - before) / 1024


def numbers(status: Path) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(Vm\w+):\s+(\d+) kB", status.read_text())}


def check_four_times_as_long_in_the_same_memory(folder: Path) -> None:
    time = 1024
    make = partial(contexts.Recorded, width=96, heads=3, layers=4, context=4 * time)
    ids = torch.randint(256, (1, 4 * time + 1), generator=torch.Generator().manual_seed(2))
    losses = []

    def whole(tokens: Tensor) -> None:
        loss = seeded(make)(tokens)
        loss.backward()
        losses.append(loss.item())

    one = peak_mb(partial(whole, ids[:, : time + 1]))
    run = begun(up.Plan(context=4), make, lambda loss, _: loss)
    batch = ids, torch.zeros(1)
    four = peak_mb(lambda: losses.append(run.step(batch)))
    alone = peak_mb(partial(whole, ids)) if dist.get_rank() == 0 else math.inf
    print(
        f"one process: {one:.0f} MB for {time} positions, {alone:.0f} MB for {4 * time}; "
        f"context=4: {four:.0f} MB a rank for {4 * time}",
        flush=True,
    )
    assert dist.get_rank() > 0 or abs(losses[1] - losses[2]) < 1e-5, losses
    assert four < 1.3 * one < alone, (one, four, alone)
