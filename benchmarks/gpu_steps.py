"""`python benchmarks/gpu_steps.py [--models gpt2,t5] [--small]`: predicted and measured steps on this GPU.

Eight models, those of text from Hugging Face's transformers. For each model and plan of one rank: the seconds
that `up.plan` predicts, and the median of measured steps of `up.parallelize`; in f32 also a plain loop of
PyTorch, whose losses must be the same. `--small`: sizes for a try on a virtual GPU. `--hardware h100-80g`:
what `up.plan` says of that file, with peaks; products in f32 are TF32 then.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import unisono.parallel as up
import unisono.torch  # noqa: F401  (registers the backend)
from unisono.parallel.planning.machine import measure
from unisono.planner.compute_calibration import ComputeCalibration

STEPS = 7
"""Of a plan; the first two are left out."""

PLANS: dict[str, dict[str, Any]] = {
    "f32": {},
    "f32 micro=4": {"micro_batches": 4},
    "f32 recompute": {"recompute": True},
    "f32 selective": {"recompute": "selective"},
    "bf16": {"precision": "bf16"},
    "bf16 recompute": {"precision": "bf16", "recompute": True},
}


class Job(NamedTuple):
    """A model, a batch and its loss."""

    make: Callable[[], nn.Module]
    batch: tuple[Any, Any]
    loss: Callable[[Any, Any], Tensor]


def words_loss(output: Any, targets: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def class_loss(output: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output if isinstance(output, Tensor) else output.logits, targets)


def hugging_face(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, f"{config}Config")(**settings)
        return getattr(transformers, f"{config}{name}")(made)  # type: ignore[no-any-return]

    return make


class Residual(nn.Module):
    """A bottleneck of a ResNet."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride > 1 or before != 4 * width:
            conv = nn.Conv2d(before, 4 * width, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short(x))


def resnet(width: int, counts: tuple[int, ...]) -> nn.Module:
    """ResNet-50 with width 64 and counts (3, 4, 6, 3)."""
    first = nn.Conv2d(3, width, 7, 2, 3, bias=False)
    parts: list[nn.Module] = [first, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = width
    for stage, count in enumerate(counts):
        for number in range(count):
            parts.append(Residual(before, width << stage, 2 if stage and not number else 1))
            before = 4 * (width << stage)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


class UNet(nn.Module):
    """Two convolutions with norms at each level, down and up again."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        pairs = list(zip([3, *widths], widths))  # noqa: B905  the last width begins no level
        self.down = nn.ModuleList(self.two(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.after = nn.ModuleList(self.two(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Linear(width, 1000)

    def two(self, before: int, width: int) -> nn.Module:
        parts = [nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
        return nn.Sequential(*parts, nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, level in enumerate(self.down):
            x = level(x if not number else functional.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for wider, after in zip(self.up, self.after, strict=True):
            x = after(torch.cat([wider(x), kept.pop()], 1))
        return self.head(x.mean((2, 3)))


def jobs(small: bool) -> dict[str, Job]:
    """Name -> a job."""
    width, layers, heads, vocab = (64, 2, 4, 512) if small else (768, 8, 12, 32000)
    rows, length, side = (4, 32, 64) if small else (16, 512, 224)
    ids = torch.randint(vocab, (rows, length))
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    many = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": width}
    text = {"vocab_size": vocab, "max_position_embeddings": length} | many
    llama = text | {"num_key_value_heads": heads, "intermediate_size": 3 * width, "use_cache": False}
    gpt2 = {
        "vocab_size": vocab, "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": length,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
    }  # fmt: skip
    t5 = {
        "vocab_size": vocab, "d_model": width, "d_kv": 64, "d_ff": 4 * width, "num_layers": layers // 2,
        "num_heads": heads, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0,
    }  # fmt: skip
    experts = llama | {"num_hidden_layers": layers // 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    images = torch.randn(2 * rows, 3, side, side)
    channels, halves = 8 if small else 64, images[: rows // 2, :, ::2, ::2].contiguous()
    classes = torch.randint(1000, (2 * rows,))
    vit = many | still | {"image_size": side, "intermediate_size": 4 * width, "num_labels": 1000}
    bert = text | still | {"intermediate_size": 4 * width}
    decoder = functional.pad(ids[:, :-1], (1, 0))
    return {
        "gpt2": Job(hugging_face("LMHeadModel", "GPT2", **gpt2), (ids, ids), words_loss),
        "llama": Job(hugging_face("ForCausalLM", "Llama", **llama), (ids, ids), words_loss),
        "bert": Job(hugging_face("ForMaskedLM", "Bert", **bert), (ids, ids), words_loss),
        "t5": Job(
            hugging_face("ForConditionalGeneration", "T5", **t5),
            ({"input_ids": ids, "decoder_input_ids": decoder}, ids), words_loss,
        ),
        "vit": Job(hugging_face("ForImageClassification", "ViT", **vit), (images, classes), class_loss),
        "resnet": Job(
            lambda: resnet(channels, (1, 1) if small else (3, 4, 6, 3)), (images, classes), class_loss
        ),
        "unet": Job(lambda: UNet(channels, 3), (halves, classes[: rows // 2]), class_loss),
        "mixtral": Job(hugging_face("ForCausalLM", "Mixtral", **experts), (ids, ids), words_loss),
    }  # fmt: skip


def on_gpu(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.cuda()
    if isinstance(batch, dict):
        return {name: on_gpu(value) for name, value in batch.items()}
    return tuple(on_gpu(each) for each in batch)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def made(job: Job) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return job.make()


class Timed(NamedTuple):
    """The median seconds of steps, the losses of all, and the peak beside cuBLAS's workspaces in bytes."""

    seconds: float
    losses: list[float]
    peak: int


def timed(step: Callable[[], Any]) -> Timed:
    """Run some steps."""
    seconds, losses = [], []
    for number in range(STEPS):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss))
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return Timed(statistics.median(seconds[2:]), losses, peak - held + torch.cuda.memory_allocated())


class Said(NamedTuple):
    """What was predicted: seconds by cause, and the bytes of the peak; 0: not asked."""

    parts: dict[str, float]
    peak: int = 0


def planned(job: Job, hardware: str) -> Callable[[up.Plan], Said]:
    """What `up.plan` says of a model on a GPU of a hardware file."""
    with torch.device("meta"):
        model = job.make()

    def said(plan: up.Plan) -> Said:
        choice = up.plan(
            model,
            sample=job.batch,
            optimizer=adamw,
            loss=job.loss,
            hosts=f"1x{hardware}",
            ranks=1,
            price=plan,
        )
        return Said(choice.chosen.time.seconds, choice.chosen.peak.nbytes)

    return said


def measured_here(job: Job, compute: ComputeCalibration | None) -> Callable[[up.Plan], Said]:
    """What follows from what was measured of this GPU."""
    predictor = up.StepPredictor(
        made(job), job.batch, loss=job.loss, optimizer=adamw, compute=compute, own_device=True
    )
    return lambda plan: Said(predictor.forecast(plan).seconds)


def plain(job: Job) -> Timed:
    """A loop without Unisono."""
    model, batch = made(job), on_gpu(job.batch)
    optimizer = adamw(model.parameters())

    def step() -> Tensor:
        inputs = batch[0]
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        loss = job.loss(output, batch[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return timed(step)


def trained(job: Job, plan: up.Plan, profile: Path | None) -> Timed:
    """The same by `up.parallelize`; where `profile` is given, the kernels of one more step by operator."""
    run = up.parallelize(made(job), plan, optimizer=adamw, loss=job.loss)
    batch = on_gpu(job.batch)
    found = timed(lambda: run.step(batch))
    if profile is not None:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds, record_shapes=True) as seen:
            run.step(batch)
            torch.cuda.synchronize()
        every = seen.key_averages(group_by_input_shape=True)
        rows = [(e.key, e.count, e.self_device_time_total, str(e.input_shapes)[:200]) for e in every]
        rows = sorted((row for row in rows if row[2] > 5), key=lambda row: -row[2])
        profile.write_text(json.dumps(rows))
    return found


def compared(
    name: str, job: Job, names: list[str], ask: Callable[[up.Plan], Said], folder: Path | None
) -> list[dict[str, Any]]:
    """Rows of one model."""
    rows = []
    loop = plain(job)
    gc.collect()
    torch.cuda.empty_cache()
    for plan_name in names:
        plan = up.Plan(**PLANS[plan_name])
        row: dict[str, Any] = {"model": name, "plan": plan_name}
        rows.append(row)
        try:
            said = ask(plan)
            row["predicted"], row["predicted_peak"] = sum(said.parts.values()), said.peak
            row["parts"] = {cause: took for cause, took in said.parts.items() if took}
            profile = folder / f"{name}-{plan_name}.json" if folder and "micro" not in plan_name else None
            ours = trained(job, plan, profile)
            row["measured"], row["loss"], row["peak"] = ours
            row["plain"], row["plain_loss"], _ = loop
        except Exception as error:  # noqa: BLE001  a row says what failed, and the others go on
            row["problem"] = f"{type(error).__name__}: {error}"[:300]
            row["trace"] = traceback.format_exc()[-1500:]
        gc.collect()
        torch.cuda.empty_cache()
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    head = f"{row['model']:<9}{row['plan']:<15}"
    if "problem" in row:
        return f"{head}{row['problem']}"
    measured, said = row["measured"], row["predicted"]
    parts = ", ".join(f"{cause} {took * 1e3:.1f}" for cause, took in row["parts"].items())
    text = f"{head}{measured * 1e3:8.1f} ms, predicted {said * 1e3:8.1f} {said / measured - 1:+7.1%}; {parts}"
    if row["predicted_peak"]:
        text += f"; peak {row['peak'] / 2**20:.1f} MiB {row['predicted_peak'] / row['peak'] - 1:+.2%}"
    if row["plan"].startswith("f32"):
        far = max(abs(a - b) / abs(b) for a, b in zip(row["loss"], row["plain_loss"], strict=True))
        text += f"; plain {row['plain'] * 1e3:.1f} ms {measured / row['plain'] - 1:+.1%}, losses {far:.0e}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--hardware", default="", help="a file, in place of what is measured here")
    parser.add_argument("--minutes", type=float, default=10.0, help="after these no model begins")
    parser.add_argument("-o", dest="file", type=Path, default=None)
    parser.add_argument("--profiles", type=Path, default=None, help="a folder for times of kernels")
    given = parser.parse_args()
    began, rows = time.monotonic(), []
    dist.init_process_group("unisono")
    torch.cuda.set_device(0)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    compute = None
    if given.hardware:
        torch.set_float32_matmul_precision("high")
    else:
        before = time.monotonic()
        compute = measure("cuda", 0).compute
        print(f"operators measured in {time.monotonic() - before:.1f} s", flush=True)
    torch.manual_seed(1)
    for name, job in jobs(given.small).items():
        late = time.monotonic() - began > 60 * given.minutes
        if late or (given.models and name not in given.models.split(",")):
            continue
        try:
            ask = planned(job, given.hardware) if given.hardware else measured_here(job, compute)
            rows += compared(name, job, given.plans.split(","), ask, given.profiles)
        except Exception as error:  # noqa: BLE001  the other models go on
            print(f"{name}: {type(error).__name__}: {error}"[:600], flush=True)
        if given.file is not None:
            given.file.write_text(json.dumps(rows))
    errors = sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows if "measured" in row)
    if errors:
        print(f"{len(errors)} steps: median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
