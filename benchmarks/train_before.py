"""Step times of two installations of Unisono on the same models and plans, in one run.

    python benchmarks/train_before.py --before ../other/.venv/bin/python
    python benchmarks/train_before.py --before ../other/.venv/bin/python --models gpt --plans data,tensor

The other interpreter has PyTorch (and transformers for gpt2 and llama), too. Every installation
has its own two ranks, which hold a model for each plan from the same seed and sit still while the others
train. A step is forward, backward and AdamW on four rows. Their losses have to agree. A figure is the median
over rounds of the round's median on rank 0; the ratio, now over before, is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS, ROWS, TIME, COMPARED_STEPS, TOLERANCE = 2, 4, 64, 3, 1e-4
MODELS = ("gpt", "gpt2", "llama")
PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": RANKS},
    "zero=3": {"data": RANKS, "zero": 3},
    "tensor": {"tensor": RANKS},
    "pipeline": {"pipeline": RANKS, "micro_batches": ROWS},
}
PORTS = {"before": 29611, "now": 29612}


# ---- a rank --------------------------------------------------------------------------------------------


def gpt(tokens: Any) -> tuple[Any, Callable[[Any, Any], Any], Any]:
    """The GPT of gpt.py with 10 million parameters, its loss, and what it takes."""
    from gpt import GPT

    return GPT(6, 384, 12, TIME), lambda output, _: output, tokens


def hugging_face(name: str, tokens: Any) -> tuple[Any, Callable[[Any, Any], Any], Any]:
    """A model of transformers with some 10 million parameters, without dropout."""
    import transformers
    from torch.nn import functional

    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=256,
                n_positions=TIME,
                n_embd=384,
                n_layer=6,
                n_head=12,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    else:
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=256,
                hidden_size=384,
                intermediate_size=1024,
                num_hidden_layers=6,
                num_attention_heads=12,
                num_key_value_heads=6,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    def loss(output: Any, targets: Any) -> Any:
        logits = output if not hasattr(output, "logits") else output.logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model, loss, tokens[:, :-1]


class Rank:
    """A rank with a step for each plan of one model."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        import unisono.torch  # noqa: F401  (registers the backend)

        torch.set_num_threads(1)
        dist.init_process_group("unisono")
        self.rank = dist.get_rank()
        self.steps: dict[str, Callable[[], float]] = {}

    def bind(self, model: str, plan: str) -> list[float]:
        """Make a model and its run; returns the losses of the first steps."""
        import torch

        import unisono.parallel as up

        tokens = torch.randint(256, (ROWS, TIME + 1), generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)
        module, loss, inputs = gpt(tokens) if model == "gpt" else hugging_face(model, tokens)
        targets = tokens[:, 1:].contiguous()
        if PLANS[plan].get("data", 1) > 1:
            inputs, targets = (each.chunk(RANKS)[self.rank] for each in (inputs, targets))
        run = up.parallelize(
            module,
            up.Plan(**PLANS[plan]),
            sample=inputs[:1],
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
            loss=loss,
        )
        self.steps[plan] = lambda: run.step((inputs, targets))
        return [float(self.steps[plan]()) for _ in range(COMPARED_STEPS)]

    def time(self, plan: str, steps: int) -> float:
        """The median seconds of some steps, after one that warms up."""
        self.steps[plan]()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self.steps[plan]()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


def worker() -> None:
    """Answer commands, one line of JSON each."""
    answers, rank = os.fdopen(os.dup(1), "w"), Rank()
    os.dup2(2, 1)  # what libraries print
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(rank, name)(*arguments)), file=answers, flush=True)


# ---- the program ---------------------------------------------------------------------------------------


class Installation:
    """The ranks of an interpreter."""

    def __init__(self, name: str, python: str) -> None:
        settings = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORTS[name])}
        self.name = name
        self._ranks = [
            subprocess.Popen(
                [python, os.path.abspath(__file__), "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]

    def ask(self, *command: Any) -> Any:
        """What rank 0 answers to a command to all."""
        for rank in self._ranks:
            assert rank.stdin is not None
            print(json.dumps(command), file=rank.stdin, flush=True)
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout is not None]
        if not all(lines):
            raise SystemExit(f"a rank of {self.name} ended at {command}")
        return json.loads(lines[0])

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.terminate()
            rank.wait()


def compare(sides: list[Installation], model: str, plans: list[str], args: Any) -> None:
    """Print the plans of one model."""
    for plan in plans:
        losses = [side.ask("bind", model, plan) for side in sides]
        apart = max(abs(one - other) for one, other in zip(*losses, strict=True))
        if apart > TOLERANCE:
            raise SystemExit(f"{model}, {plan}: the losses differ: {losses}")
    times: dict[tuple[str, str], list[float]] = {(s.name, p): [] for s in sides for p in plans}
    for number in range(args.rounds):
        for plan in plans:
            for side in sides[:: 1 if number % 2 else -1]:
                times[side.name, plan].append(side.ask("time", plan, args.steps))
    for plan in plans:
        before, now = (times[side.name, plan] for side in sides)
        ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
        millis = [f"{statistics.median(each) * 1e3:8.1f}" for each in (before, now)]
        print(f"{model:8}{plan:10}{millis[0]}{millis[1]}{ratio:8.3f}", flush=True)


def main() -> None:
    """Measure and print."""
    if "--worker" in sys.argv:
        worker()
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, metavar="PYTHON", help="the other interpreter")
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma list of {', '.join(MODELS)}")
    parser.add_argument("--plans", default=",".join(PLANS), help=f"comma list of {', '.join(PLANS)}")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each (default 15)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn (default 5)")
    args = parser.parse_args()
    if not Path(args.before).exists():
        parser.error(f"no interpreter at {args.before}")
    print(f"{'model':8}{'plan':10}{'before':>8}{'now':>8}{'ratio':>8}   ms of a step")
    for model in args.models.split(","):
        sides = [Installation("before", args.before), Installation("now", sys.executable)]
        try:
            compare(sides, model, args.plans.split(","), args)
        finally:
            for side in sides:
                side.close()


if __name__ == "__main__":
    main()
