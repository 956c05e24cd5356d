"""The planner beside published figures, each bound with a verdict; misses are listed.

    python benchmarks/planner.py [memory] [zero] [times] [sc21] [llama3] [fsdp] [moe] [context] [fit] [search]
    python benchmarks/planner.py machine [--models gpt,cnn] [--layouts 2,4,2x2] [--plans PLANS]

`machine` says what steps take on this machine, and measures them: planner_machine.py. `fit` solves for the
two constants of a100-80g that are fitted, on the rows FITTED, and says how much the other two matter.
`search` times the largest search, `fp8` is Llama 3 in 8 bits. Nothing here needs a GPU.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from planner_machine import FOREIGN, LAYOUTS, MODELS, RECORD, WHAT, machine, wrong_plan
from planner_rows import CONTEXT, FSDP, KORTHIKANTI, LLAMA3, MOE, SC21, ZERO
from published import verdict

import unisono as un
from unisono.planner import Hardware, TrainingPlan, TransformerShape, find_hardware, shape_of
from unisono.planner.memory import RankElements, layer_activations, model_states
from unisono.planner.model_config import read_shape
from unisono.planner.planner import PlanChoice
from unisono.planner.stages import in_flight

GIB = 1 << 30
HARDWARE = "a100-80g"

FITTED = (("22B", "full"), ("530B", "full"))
MODES = {"full": "recompute=full", "selective": "recompute=selective,sequence=yes"}


class TimedRow(NamedTuple):
    """A row of Korthikanti's table 5: the planner's step beside the published one."""

    model: str
    mode: str
    choice: PlanChoice
    published_s: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.choice.seconds / self.published_s - 1

    @property
    def fitted(self) -> bool:
        """Whether the constants were fitted on it."""
        return (self.model, self.mode) in FITTED


def gpt(layers: int, hidden: int, heads: int) -> TransformerShape:
    """As both papers train it: 51,200 tokens, sequences of 2048."""
    return shape_of(
        "gpt", layers=layers, hidden=hidden, heads=heads, vocab=51200, sequence=2048, positions=2048
    )


def memory() -> bool:
    """The twelve values, to the byte."""
    print(f"memory of the first rank, GiB; {KORTHIKANTI['source']}")
    wrong = 0
    for at, (name, row) in enumerate(KORTHIKANTI["rows"].items()):
        layers, hidden, heads, tensor, pipeline, batch, micro_batch, interleave = row
        shape = gpt(layers, hidden, heads)
        plan = TrainingPlan(tensor=tensor, pipeline=pipeline, interleave=interleave, micro_batch=micro_batch)
        job = un.plan(shape, batch=batch, gpus=plan.ranks, hardware=HARDWARE, plan=str(plan)).job
        matrices = RankElements(layers / pipeline * shape.matrices(tensor))
        states = sum(model_states(matrices, plan, job))
        kept = layers / pipeline * in_flight(plan, 0, batch // micro_batch)
        selective = msgspec.structs.replace(plan, sequence=True, recompute="selective")
        found = (
            states / GIB,
            kept * layer_activations(shape, plan, job.width) / GIB,
            kept * layer_activations(shape, selective, job.width) / GIB,
        )
        names = ("states_GiB", "activations_GiB", "activations_selective_GiB")
        published = tuple(KORTHIKANTI[each][at] for each in names)
        wrong += sum(abs(one / other - 1) > 1e-12 for one, other in zip(found, published, strict=True))
        cells = zip(("matrices", "none", "selective"), found, published, strict=True)
        print(f"    {name:>5}  " + "  ".join(f"{what} {one:.6f} ({other:.6f})" for what, one, other in cells))
    return verdict("all 12 values exact", not wrong, f"{wrong} differ")


def zero() -> bool:
    """Every cell, to its last digit: the paper rounds some and cuts others."""
    print(f"ZeRO; {ZERO['source']}")
    wrong = count = 0
    for elements, rows in ZERO["cells"].items():
        for ranks, cells in rows.items():
            job = un.plan(
                gpt(2, 64, 4), batch=ranks, gpus=ranks, hardware=HARDWARE, plan="", reduce="low"
            ).job
            found = [
                sum(model_states(RankElements(elements), TrainingPlan(data=ranks, zero=stage), job)) / 1e9
                for stage in (1, 2, 3)
            ]
            for one, cell in zip(found, cells.split(), strict=True):
                unit = 10.0 ** -len(cell.partition(".")[2])
                count += 1
                wrong += not abs(one - float(cell)) < unit
            shown = "  ".join(f"{one:.6g}" for one in found)
            print(f"    {elements / 1e9:6g} billion on {ranks:5}: {shown} ({cells})")
    return verdict(f"all {count} cells exact to their last digit", not wrong, f"{wrong} differ")


def timed_rows(hardware: Hardware) -> Iterator[TimedRow]:
    """All rows of table 5."""
    for at, (name, row) in enumerate(KORTHIKANTI["rows"].items()):
        layers, hidden, heads, tensor, pipeline, batch, micro_batch, interleave = row
        axes = f"tensor={tensor},pipeline={pipeline},micro_batch={micro_batch},interleave={interleave}"
        for mode, text in MODES.items():
            choice = un.plan(
                gpt(layers, hidden, heads),
                batch=batch,
                gpus=tensor * pipeline,
                hardware=hardware,
                plan=f"{axes},{text}",
            )
            yield TimedRow(name, mode, choice, KORTHIKANTI[f"step_{mode}_s"][at])


def times() -> bool:
    """Table 5: six rows beside those that the constants were fitted on."""
    print(f"seconds of a step; {KORTHIKANTI['source']}")
    errors = []
    for row in timed_rows(find_hardware(HARDWARE)):
        if not row.fitted:
            errors.append(abs(row.error))
        print(
            f"    {row.model:>5} {row.mode:<9} {row.choice.seconds:8.3f} s ({row.published_s:6.2f})  "
            f"{row.error:+.1%}{'  fitted' if row.fitted else ''}"
        )
    mean = sum(errors) / len(errors)
    held = verdict("mean error of the six other rows 2.5 %", mean <= 0.025, f"{mean:.2%}")
    return verdict("largest 6 %", max(errors) <= 0.06, f"{max(errors):.2%}") and held


def sc21() -> bool:
    """Megatron's weak scaling. The table names no micro-batch: the one that the planner takes counts."""
    print(f"TFLOP/s of a GPU; {SC21['source']}")
    held = True
    for micro_batch in ("", ",micro_batch=1"):
        errors = []
        for name, (heads, hidden, layers, tensor, pipeline, gpus, batch, tflops) in SC21["rows"].items():
            choice = un.plan(
                gpt(layers, hidden, heads),
                batch=batch,
                gpus=gpus,
                hardware=HARDWARE,
                plan=f"tensor={tensor},pipeline={pipeline},recompute=full{micro_batch}",
            )
            errors.append(choice.tflops_per_gpu / tflops - 1)
            print(
                f"    {name:>6} {choice.tflops_per_gpu:6.1f} ({tflops})  {errors[-1]:+.1%}  "
                f"micro-batches of {choice.plan.micro_batch}"
            )
        mean, most = sum(map(abs, errors)) / len(errors), max(map(abs, errors))
        what = "micro-batches of 1" if micro_batch else "the planner's micro-batches"
        bounds = f"{what}: mean error 5 %, largest 10 %"
        good = verdict(bounds, mean <= 0.05 and most <= 0.10, f"{mean:.2%}, {most:.2%}")
        held &= good or bool(micro_batch)
    return held


def fit() -> bool:
    """Solve for the shares of matrix products and memory on the fitted rows; vary the two assumptions."""
    print(f"two constants from two rows, {FITTED}")
    hardware = find_hardware(HARDWARE)
    matrix, share = solved(hardware)
    for kernel_s, links in ((5e-6, 0.70), (8e-6, 0.60), (8e-6, 0.70), (8e-6, 0.80), (12e-6, 0.70)):
        other = with_constants(hardware, kernel_s=kernel_s, links=links)
        found = solved(other)
        rows = timed_rows(with_constants(other, matrix=found[0], memory=found[1]))
        errors = [abs(row.error) for row in rows if not row.fitted]
        print(
            f"    kernel {kernel_s * 1e6:.0f} us, links {links:.2f}: matrix {found[0]:.4f}, "
            f"memory {found[1]:.4f}; other rows {sum(errors) / len(errors):.2%} mean, {max(errors):.2%} worst"
        )
    kept = hardware.efficiency
    near = abs(matrix - kept.matrix) < 1e-3 and abs(share - kept.memory) < 1e-3
    return verdict("the file has the fitted constants", near, f"{kept.matrix}, {kept.memory}")


def with_constants(hardware: Hardware, **changes: float) -> Hardware:
    """The same hardware with other efficiencies."""
    return msgspec.structs.replace(
        hardware, efficiency=msgspec.structs.replace(hardware.efficiency, **changes)
    )


def solved(hardware: Hardware) -> tuple[float, float]:
    """(matrix, memory) with which the fitted rows are exact: Newton's method."""

    def errors(matrix: float, share: float) -> list[float]:
        return [
            row.error
            for row in timed_rows(with_constants(hardware, matrix=matrix, memory=share))
            if row.fitted
        ]

    matrix, share, small = 0.75, 0.70, 1e-4
    for _ in range(8):
        here = errors(matrix, share)
        right, up = errors(matrix + small, share), errors(matrix, share + small)
        (a, c), (b, d) = ([(y - x) / small for x, y in zip(here, way, strict=True)] for way in (right, up))
        determinant = a * d - b * c
        matrix -= (here[0] * d - b * here[1]) / determinant
        share -= (a * here[1] - c * here[0]) / determinant
    return matrix, share


def llama() -> TransformerShape:
    """Llama 3 405B."""
    return shape_of(
        "llama",
        layers=126,
        hidden=16384,
        heads=128,
        kv_heads=8,
        ffn=53248,
        vocab=128256,
        sequence=8192,
    )


def llama3() -> bool:
    """H100, on which nothing is fitted. The paper does not say how often it interleaves: 4 is a guess."""
    print(LLAMA3["source"])
    errors = []
    for gpus, tflops in LLAMA3["rows"].items():
        choice = un.plan(llama(), batch=2048, gpus=gpus, hardware="h100-80g", plan=LLAMA3["plan"])
        errors.append(abs(choice.tflops_per_gpu / tflops - 1))
        print(
            f"    {gpus:6} GPUs: {choice.tflops_per_gpu:.0f} ({tflops}), {choice.memory_bytes / GIB:.0f} GiB"
        )
    return verdict("within 10 %", max(errors) <= 0.10, f"worst {max(errors):.1%}")


def fsdp_errors(hardware: str, rows: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Relative errors of MPT under FSDP, and how many models have other numbers of parameters."""
    errors, wrong = {}, 0
    found_hardware = with_constants(find_hardware(hardware), attention=FSDP["attention"][hardware])
    print(f"  {hardware}")
    for name, row in rows.items():
        layers, hidden, heads, sequence, gpus, micro_batch, micro_batches, recompute, published, count = row
        shape = shape_of(
            "gpt", layers=layers, hidden=hidden, heads=heads, vocab=50368, sequence=sequence,
            positions=sequence, dropout=False, attention="fused",
        )  # fmt: skip
        batch = gpus * micro_batch * micro_batches
        plan = f"data={gpus},zero=3,micro_batch={micro_batch},recompute={recompute}"
        choice = un.plan(shape, batch=batch, gpus=gpus, hardware=found_hardware, plan=plan, overlap=True)
        found = batch * sequence / gpus / choice.seconds
        errors[name] = found / published - 1
        wrong += shape.parameters != count
        print(f"    {name:>12} {found:7.0f} ({published:5}) tokens/s of a GPU  {errors[name]:+.1%}")
    return errors, wrong


def fsdp() -> bool:
    """MPT under FSDP, in PyTorch without a compiler: what the planner's efficiencies leave out."""
    print(FSDP["source"])
    errors, wrong = fsdp_errors("h100-80g", FSDP["rows"])
    on_a100, wrong_too = fsdp_errors("a100-80g", FSDP["a100_rows"])
    held = verdict("parameters exact", not wrong + wrong_too, f"{wrong + wrong_too} differ")
    large = max(abs(error) for name, error in errors.items() if name[:3] in ("70b", "30b"))
    held &= verdict("H100, 30b and 70b within 15 %", large <= 0.15, f"worst {large:.1%}")
    verdict("H100, all within 15 %", max(errors.values()) <= 0.15, f"worst {max(errors.values()):.1%}")
    good = sum(abs(error) <= 0.10 for error in on_a100.values())
    verdict("A100, all within 10 %", good == len(on_a100), f"{good} of {len(on_a100)}")
    return held


def moe() -> bool:
    """Models with experts. Nothing is fitted; where the program sends rows by DeepEP, so does the planner."""
    print(MOE["source"])
    errors = {}
    for name, (model, sequence, gpus, batch, plan, published) in MOE["rows"].items():
        shape = read_shape(model, sequence)
        plan = plan if "micro_batch" in plan else f"{plan},micro_batch=1"
        way = MOE["deepep"] if name in MOE["with_deepep"] else {}
        choice = un.plan(shape, batch=batch, gpus=gpus, hardware="h100-80g", plan=plan, **way)
        if isinstance(published, str):
            tflops = float(published.split()[0])
            published = choice.seconds * choice.model_tflops_per_gpu / tflops
        errors[name] = choice.seconds / published - 1
        time = choice.chosen.time
        print(
            f"    {name:>20} {choice.seconds:7.2f} s ({published:5.2f})  {errors[name]:+.1%}; rows of "
            f"experts {time.experts / time.total:.0%}, recomputation {time.recompute / time.total:.0%}, "
            f"{choice.memory_bytes / GIB:.0f} GiB"
        )
    worst = max(map(abs, errors.values()))
    return verdict("all within 25 %", worst <= 0.25, f"worst {worst:.1%}")


def fp8() -> bool:
    """Products of layers in 8 bits, on H100. Nothing is fitted."""
    print(LLAMA3["fp8"]["source"])
    errors = []
    for name, (model, gpus, batch, plan, published) in LLAMA3["fp8"]["rows"].items():
        shape = read_shape(model, 8192)
        given = f"{plan},micro_batch=1"
        choice = un.plan(shape, batch=batch, gpus=gpus, hardware="h100-80g", compute="fp8", plan=given)
        found = batch * 8192 / gpus / choice.seconds
        errors.append(found / published - 1)
        print(
            f"    {name:>16} {found:7.0f} ({published:5}) tokens/s of a GPU  {errors[-1]:+.1%}, "
            f"{choice.memory_bytes / GIB:.0f} GiB"
        )
    worst = max(map(abs, errors))
    return verdict("within 20 %", worst <= 0.20, f"worst {worst:.1%}")


def context() -> bool:
    """Long sequences. The paper does not say whether all scores count, or the half of a causal mask."""
    print(CONTEXT["source"])
    shape = msgspec.structs.replace(llama(), sequence=131072)
    choice = un.plan(shape, batch=128, gpus=16384, hardware="h100-80g", plan=CONTEXT["plan"])
    whole = choice.model_tflops_per_gpu
    scores = 3 * 128 * shape.layers * shape.core_flops(131072) / 16384 / choice.seconds / 1e12
    half = whole - scores / 2
    print(
        f"    {half:.0f} with half of the scores, {whole:.0f} with all ({CONTEXT['tflops']}); context "
        f"{choice.chosen.time.context / choice.seconds:.1%}, {choice.memory_bytes / GIB:.0f} GiB"
    )
    error = abs(half / CONTEXT["tflops"] - 1)
    return verdict("within 10 %, half of the scores counted", error <= 0.10, f"{error:.1%}")


def search() -> bool:
    """A model like Llama 3 405B on 16,384 ranks."""
    held = True
    experts = read_shape("deepseek-v3", 4096)
    jobs = [(llama(), 2048, 16384), (llama(), 16384, 16384), (experts, 15360, 2048)]
    for shape, batch, gpus in jobs:
        begun = time.process_time()
        choice = un.plan(shape, batch=batch, gpus=gpus, hardware="h100-80g", network="dgx_h100")
        took = time.process_time() - begun
        print(choice)
        what = f"{shape.parameters / 1e9:.0f} billion parameters, batch {batch}, {gpus:,} ranks in 10 s"
        held &= verdict(what, took <= 10, f"{took:.1f} s for {choice.candidates:,} plans")
    return held


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main() -> int:
    """Run what was asked for, or all; the exit code is 1 if a bound does not hold."""
    parts: dict[str, Callable[[], Any]] = {
        "memory": memory, "zero": zero, "times": times, "sc21": sc21, "llama3": llama3, "fsdp": fsdp,
        "moe": moe, "fp8": fp8, "context": context, "fit": fit, "search": search,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(parts)} (default: all of these), machine")
    add = parser.add_argument_group("of machine").add_argument
    add("--rounds", type=int, default=5, help="turns of each plan (default 5)")
    add(
        "--models", type=_words, default=MODELS, help=f"of {','.join((*MODELS, *FOREIGN))}, or any of the zoo"
    )
    add("--layouts", type=_words, default=tuple(LAYOUTS), help=f"of {','.join(LAYOUTS)} (default: all)")
    add("--minutes", type=float, default=12.0, help="no job begins after so many (default 12)")
    add(
        "--plans", default="", help='measure these, not the usual ones: "context=2;expert=2,zero=1;swap=disk"'
    )
    add("--what", type=_words, default=WHAT, help=f"of {','.join(WHAT)} (default: both)")
    add("--record", type=Path, default=RECORD, help="file that keeps what has run")
    args = parser.parse_args()
    for name, given, known in (("layout", args.layouts, LAYOUTS), ("--what", args.what, WHAT)):
        if unknown := set(given) - set(known):
            parser.error(f"no {name} {min(unknown)}: there are {', '.join(known)}")
    if "machine" in args.parts:
        parts["machine"] = functools.partial(
            machine, args.models, args.layouts, rounds=args.rounds, minutes=args.minutes, record=args.record,
            plans=args.plans, what=args.what,
        )  # fmt: skip
        if problem := wrong_plan(args.plans, args.layouts):
            parser.error(problem)
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no part {min(unknown)}: there are {', '.join(parts)}")
    held = [parts[part]() for part in args.parts or parts]
    print(f"{sum(held)} of {len(held)} parts hold")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
