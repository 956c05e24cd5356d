"""Ranks that train case after case: under a plan and in one process. Each case is a line of JSON."""

import json
import logging
import time
import traceback
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono.torch  # noqa: F401
from model_fuzz.programs import PLANS, Case, program_of
from model_fuzz.random_training import Trained, Training, alone, difference, rows_of_rank, training_of, under
from unisono.parallel.context import program as context_program
from unisono.parallel.graph import proof
from unisono.parallel.graph.program import refs

WORDS = ("none", "same", "refused", "RAW", "WRONG")
TIMEOUT_S = 100  # of a collective
OURS = (ValueError, TypeError, RuntimeError)


class CutOperators:
    """Counts the operators that a plan really cuts, by name: on the tensor axis, the sequence, a context."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.compare, self.rule = proof.compare, context_program.run_rule
        proof.compare, context_program.run_rule = self, self.context

    def __call__(self, choice: Any, shapes: Any, sample: Any, forward: Any, positions: Any = None) -> Any:
        found = self.compare(choice, shapes, sample, forward, positions)
        self.counts = Counter()  # of the last proof that was made
        for node in choice.graph.nodes:
            numbers = [ref.value for ref in refs([node.args, node.named])]
            numbers += [number for number in node.outputs if number is not None]
            if any(choice.cuts(number) for number in numbers):
                self.counts[node.name] += 1
            elif positions is not None and any(map(positions.scattered, positions._numbers(node))):
                self.counts[f"sequence {node.name}"] += 1
        return found

    def context(self, call: Any) -> Any:
        found = self.rule(call)
        if any(call.place(ref) is not None for ref in refs([call.args, call.node.named])):
            self.counts[f"context {call.node.name}"] += 1
        return found


def tried(training: Training, plan: dict[str, Any], wanted: Trained) -> tuple[str, str]:
    """The word for what came of it, and its text."""
    try:
        found, run = under(training, plan)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = "/unisono/" in frames[-1].filename and isinstance(error, OURS)
        text = f"{type(error).__name__}: {str(error).strip()[:500]}"
        return ("refused", text) if ours else ("RAW", f"{text} at {frames[-1].filename}:{frames[-1].lineno}")
    differs = difference(wanted, found, rows_of_rank(run, training), whole=dist.get_rank() == 0)
    run.close()
    return ("WRONG", differs) if differs else ("same", "")


def main(rank: int, size: int, folder: Path, given: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group(
        "unisono",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    counted = CutOperators()
    for seed, name, dropped in json.loads(given):
        case = Case(seed, name, tuple(dropped))
        program = program_of(case)
        training = None if program is None else training_of(program, seed)
        wanted = None if training is None else alone(training)
        word, text, start = "none", "", time.monotonic()
        counted.counts = Counter()
        if training is not None and wanted is not None:
            word, text = tried(training, PLANS[name][1], wanted)
        words: list[Any] = [None] * size
        dist.all_gather_object(words, (word, text))
        word, text = max(words, key=lambda pair: WORDS.index(pair[0]))
        if len({each[0] for each in words}) > 1 and word not in ("RAW", "WRONG"):
            word, text = "RAW", f"ranks differ: {words}"
        if rank == 0:
            print(
                json.dumps([seed, name, dropped, word, text, counted.counts, time.monotonic() - start]),
                flush=True,
            )
        if word in ("RAW", "WRONG"):
            break  # what follows has new ranks
    dist.destroy_process_group()
