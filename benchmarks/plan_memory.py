"""`unisono run -n 4 --virtual-gpus 4 --no-poison benchmarks/plan_memory.py [MODEL ...]`: memory of plans.

For each model and plan: the peak of a step on the fullest rank, as PyTorch's allocator counts it there
(torch.cuda.max_memory_allocated), and the error of a dry run's prediction; then the same for reserved memory.
On virtual GPUs, whose books are those of PyTorch. A miss is marked: more than 5 % above, or 2 % below.

Models: mlp, cnn, gpt, llama, and with transformers hf-gpt2, hf-llama. PLANS="data=2,zero=3;tensor=2" in the
environment gives other plans.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import unisono.parallel as up
from unisono.parallel.costs.task import TrainingTask
from unisono.parallel.planning.dry_run import DryRun

KIB = 1 << 10
WORDS, LENGTH = 512, 64


class Block(nn.Module):
    """GPT's; `gated`: Llama's."""

    def __init__(self, width: int, heads: int, *, gated: bool) -> None:
        super().__init__()
        norm: Any = nn.RMSNorm if gated else nn.LayerNorm
        self.heads, self.before, self.after = heads, norm(width), norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=not gated) for _ in range(4))
        inner = width * 8 // 3 if gated else 4 * width
        self.fc1, self.fc2 = nn.Linear(width, inner, bias=not gated), nn.Linear(inner, width, bias=not gated)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        y = self.before(x)
        q, k, v = (
            each(y).view(rows, length, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(rows, length, -1))
        y = self.after(x)
        inner = (
            functional.gelu(self.fc1(y)) if self.gate is None else functional.silu(self.gate(y)) * self.fc1(y)
        )
        return x + self.fc2(inner)


class Head(nn.Module):
    """Norm and output."""

    def __init__(self, width: int, *, gated: bool) -> None:
        super().__init__()
        self.norm: Any = nn.RMSNorm(width) if gated else nn.LayerNorm(width)
        self.out = nn.Linear(width, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def transformer(*, gated: bool) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, 192), *(Block(192, 4, gated=gated) for _ in range(6)), Head(192, gated=gated)
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(384, 384), nn.GELU()) for _ in range(8)), nn.Linear(384, 10)
    )


def cnn() -> nn.Module:
    def stage(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

    return nn.Sequential(
        stage(3, 48), stage(48, 96), nn.MaxPool2d(2), stage(96, 192), stage(192, 192), nn.MaxPool2d(2),
        stage(192, 384), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 10),
    )  # fmt: skip


def hugging_face(name: str) -> nn.Module:
    import transformers

    common: dict[str, Any] = {"vocab_size": WORDS}
    if name == "hf-gpt2":
        config = transformers.GPT2Config(n_layer=4, n_embd=192, n_head=4, n_positions=LENGTH, **common)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=4, hidden_size=192, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, max_position_embeddings=LENGTH, **common,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokens_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def batch_of(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.device("cpu"):
        if name in ("mlp", "cnn"):
            return torch.randn(rows, *((384,) if name == "mlp" else (3, 24, 24))), torch.randint(10, (rows,))
        ids = torch.randint(WORDS, (rows, LENGTH))
        return ids, ids.clone()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "gpt": lambda: transformer(gated=False),
    "llama": lambda: transformer(gated=True),
    "hf-gpt2": lambda: hugging_face("hf-gpt2"),
    "hf-llama": lambda: hugging_face("hf-llama"),
}
BATCH = {"mlp": 256, "cnn": 16, "gpt": 16, "llama": 16, "hf-gpt2": 16, "hf-llama": 16}


def plans(name: str, ranks: int) -> list[up.Plan]:
    half = ranks // 2
    if os.environ.get("PLANS"):
        return [eval(f"up.Plan({text})") for text in os.environ["PLANS"].split(";")]
    found = [
        *(up.Plan(data=ranks, zero=zero) for zero in range(4)),
        up.Plan(data=ranks, zero=1, micro_batches=2),
        up.Plan(data=ranks, zero=3, micro_batches=2),
        up.Plan(data=ranks, zero=2, micro_batches=2, precision="bf16"),
        up.Plan(data=ranks, zero=3, precision="bf16", recompute=True),
        up.Plan(data=ranks, zero=0, precision="bf16"),
        up.Plan(data=ranks, zero=0, recompute=True),
        up.Plan(data=half, tensor=2, zero=1),
    ]
    stages = {"mlp": 9, "cnn": 10, "gpt": 8, "llama": 8}.get(name)
    cuts = None if stages is None else (stages // 2,)
    pipelines: list[dict[str, Any]] = [{}, {"zero": 1}, {"recompute": True}, {"zero": 3}]
    found += [up.Plan(pipeline=2, data=half, micro_batches=4, cuts=cuts, **more) for more in pipelines]
    if name in ("gpt", "llama", "hf-llama"):
        found += [
            up.Plan(data=half, tensor=2, recompute=True),
            up.Plan(data=half, tensor=2, sequence=True),
            up.Plan(data=half, zero=0, pipeline=2, micro_batches=2, precision="bf16", cuts=cuts),
            up.Plan(tensor=2, pipeline=half, micro_batches=4, cuts=cuts)
            if half == 2
            else up.Plan(data=ranks),
        ]
    return [each for each in found if name != "cnn" or not each.recompute]  # BatchNorm is not computed again


def compare(name: str, plan: up.Plan) -> tuple[float, str]:
    """Return the error of the prediction, and a line about it."""
    batch, rank = BATCH[name], dist.get_rank()
    inputs, targets = batch_of(name, batch // plan.data)
    with torch.device("meta"):
        model = MODELS[name]()
    task = TrainingTask(
        model,
        (inputs, targets),
        batch,
        adamw,
        tokens_loss if len(inputs.shape) == 2 and name != "mlp" else functional.cross_entropy,
    )
    stage = rank // (plan.ranks // plan.pipeline)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    first = rank % (plan.ranks // plan.pipeline) == 0
    said = DryRun(task, plan).peak_of(stage) if first else None
    given = inputs.cuda(), targets.cuda()
    sample = inputs[: max(1, len(inputs) // plan.micro_batches)] if plan.pipeline == 1 else None
    run = up.parallelize(model, plan, optimizer=adamw, loss=task.loss, seed=0, sample=sample)
    run.step(given)
    torch.cuda.reset_peak_memory_stats()
    run.step(given)
    seen = torch.cuda.max_memory_allocated() - before
    reserved = torch.cuda.max_memory_reserved()
    mine = (said.nbytes, said.reserved, str(said.place)) if said is not None else None
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (seen, reserved, before, mine))
    fullest = max(range(len(told)), key=lambda at: told[at][0])
    seen, reserved, before, _ = told[fullest]
    places = plan.ranks // plan.pipeline
    nbytes, kept, place = told[fullest // places * places][3]
    error = nbytes / seen - 1
    mark = "" if -0.02 <= error <= 0.05 else "  MISS"
    text = f"{name:<9}{seen / KIB:>8.0f} KiB {error:>+7.2%}  reserved {reserved / KIB:>8.0f}"
    return error, f"{text} {kept / reserved - 1:>+7.1%}  {plan}  {place}{mark} {before or ''}"


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:unisono,cuda:nccl")
    torch.set_default_device("cuda")
    errors = []
    for name in sys.argv[1:] or list(MODELS):
        for plan in plans(name, dist.get_world_size()):
            error, text = compare(name, plan)
            errors.append(error)
            if dist.get_rank() == 0:
                print(text, flush=True)
    if dist.get_rank() == 0:
        missed = [error for error in errors if not -0.02 <= error <= 0.05]
        print(f"{len(errors)} plans, {len(missed)} missed, errors {min(errors):+.2%} to {max(errors):+.2%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
