"""One rank of the conformance suite over a backend: `program.py BACKEND [quick]`, started by any launcher.

The tests are those of tests/conformance, as they are. Their ranks, elsewhere threads, are processes here:
each call of `ranks.threads(size, work)` runs `work` over a subgroup of the first `size` ranks. The algorithms
that they name are replaced by the library's own choice. Ranks compare how each test went over a group of
Unisono's own engine, which sees a rank that is lost.

Rank 0 prints a line of JSON: tests and checks that passed, were refused or were left out, and why.
"""

import functools
import importlib
import inspect
import itertools
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import unisono as un
import unisono.engine.group.external  # before the catalogue is replaced
import unisono.plans

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / room) for room in ("support", "conformance")]
MODULES = (
    "test_collectives",
    "test_arguments",
    "test_coalesced",
    "test_messages",
    "test_objects",
    "test_groups",
)
CHECKS = ("all_reduce", "reduce", "reduce_scatter", "scans", "moves", "uneven", "in_flight")
QUICK = ("test_arguments", "test_coalesced", "test_messages", "test_groups")

NUMPYS = ("nccl", "test_arguments")  # about arrays in CPU memory, which it refuses
LEFT_OUT = {
    "test_a_backend_is_text": "makes no group of this backend",
    "test_object_of_more_than_two_gigabytes": "takes 7 GiB",
    "test_split_that_fails_for_some_leaves_all_with_the_same_count": "makes the native engine fail",
    "test_message_that_does_not_fit_shows_both_sides": "the library does not show both sides",
    "test_wrong_size_or_dtype_is_a_mismatch_on_both_ranks": "the library tells one rank only",
    "test_a_flood_of_messages_that_nobody_asks_for_does_not_hold_up_a_timeout": "has no end",
    "test_sizes_that_only_add_up_are_a_mismatch": "the library does not compare what ranks call",
    "test_tags_are_taken_in_any_order_beyond_the_limit_of_unexpected_messages": "has no such limit",
    "test_a_sender_waits_while_nobody_takes_what_it_has_sent": "the library has no such limit",
    "test_exchange_in_place": "the library does not order a send and a receive of one memory",
    "test_memory_of_a_receive_is_its_own_until_the_caller_knows_its_end": "the library does not look",
}

LEFT_OUT_OVER_NCCL = {
    "test_nothing_and_everything_at_once": "7,000 buffers, one by one on virtual GPUs",
    "test_wrong_arguments_are_refused_before_anything_runs": "is about arrays in CPU memory",
    "test_wrong_batch_posts_nothing": "is about arrays in CPU memory",
    "test_scalar_sizes_shapes_and_other_buffers": "is about arrays in CPU memory",
}


class NoRanksError(Exception):
    """The job has fewer ranks than the test wants."""


class Tally:
    """How tests and single checks went on this rank."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {"tests": Counter(), "checks": Counter()}
        self.refused: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.failed: list[str] = []

    def check(self, function: Callable[..., Any]) -> Callable[..., None]:
        """A check of cases.py that counts how it went, and goes on where it was refused."""

        @functools.wraps(function)
        def counted(*args: Any, **options: Any) -> None:
            try:
                function(*args, **options)
            except un.NotSupported as error:
                self.refuse("checks", error)
            else:
                self.counts["checks"]["passed"] += 1

        return counted

    def refuse(self, what: str, error: un.NotSupported) -> None:
        self.counts[what]["refused"] += 1
        self.refused[str(error)] += 1


class Ranks:
    """Stands for tests/support/ranks.py."""

    def __init__(self, world: un.Group, control: un.Group, wrap: Callable[[un.Group], Any]) -> None:
        self.world, self.control, self.wrap = world, control, wrap
        self.refusals: list[un.NotSupported] = []

    def threads(self, size: int, work: Callable[[Any], Any], **options: Any) -> list[Any]:
        if size > self.world.size:
            raise NoRanksError(f"needs {size} ranks")
        group = self.world.subgroup(range(size))
        told = ""
        if group is not None:
            try:
                with group:
                    work(self.wrap(group))
            except un.NotSupported as error:
                self.refusals.append(error)
            except BaseException:
                told = traceback.format_exc(limit=-4)
                print(
                    told, file=sys.stderr, flush=True
                )  # now: the other ranks may wait for this one for ever
        failures = [text for text in self.control.all_gather_object(told) if text]
        assert not failures, f"on {len(failures)} of {size} ranks:\n{failures[0]}"
        return [None] * size


def tests_of(module: Any, only: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every test of a module with each of its cases."""
    for name, test in vars(module).items():
        if not name.startswith("test_") or only not in name:
            continue
        combos = getattr(test, "cases", [{}])
        inner = getattr(test, "inner", test)
        for mark in getattr(test, "pytestmark", []):
            if mark.name == "parametrize":
                combos = [one | other for one, other in itertools.product(combos, expanded(*mark.args))]
        wanted = inspect.signature(inner).parameters
        for combo in combos:
            if combo.get("spread", "one host") == "one host":
                fixtures = {"monkeypatch": pytest.MonkeyPatch()} if "monkeypatch" in wanted else {}
                yield name, functools.partial(inner, **combo, **fixtures)


def expanded(names: Any, values: Any) -> list[dict[str, Any]]:
    keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
    return [dict(zip(keys, (value,) if len(keys) == 1 else value, strict=True)) for value in values]


def main(backend: str, part: str = "", only: str = "") -> int:
    if "BACKENDS_SHOW" in os.environ:
        import faulthandler

        faulthandler.dump_traceback_later(45)
    if backend == "nccl":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    options = {} if backend == "mpi" else {"timeout": 120}
    world = un.init_process_group(backend, **options)
    control = un.init_process_group(
        init_method=meeting(world), timeout=280, rank=world.rank, world_size=world.size
    )
    wrap: Callable[[un.Group], Any] = lambda group: group  # noqa: E731
    if backend == "nccl":
        import on_device

        wrap = on_device.OnDevice
    chosen = {collective: dict.fromkeys([None]) for collective in unisono.plans.ALGORITHMS}
    tally, runner = Tally(), Ranks(world, control, wrap)
    with mock.patch.object(unisono.plans, "ALGORITHMS", chosen):
        cases = importlib.import_module("cases")
        for name in CHECKS:
            setattr(cases, name, tally.check(getattr(cases, name)))
        cases.in_flight = functools.partial(cases.in_flight, algorithm=None)
        names = QUICK if part == "quick" else MODULES
        modules = [importlib.import_module(name) for name in names if (backend, name) != NUMPYS]
    left_out = {**LEFT_OUT, **(LEFT_OUT_OVER_NCCL if backend == "nccl" else {})}
    for module in modules:
        module.ranks = runner
        for name, test in tests_of(module, only):
            run(name, test, tally, runner, left_out)
    report(backend, tally, control)
    return 1 if tally.failed else 0


def meeting(world: un.Group) -> str:
    """A file for the control group, which all ranks can reach."""
    name = f"{os.environ.get('TMPDIR', '/tmp')}/unisono-backends-{os.getpid()}-{time.time_ns()}"
    return "file://" + str(world.broadcast_object(name if world.rank == 0 else None))


def run(name: str, test: Callable[[], None], tally: Tally, runner: Ranks, left_out: dict[str, str]) -> None:
    runner.refusals.clear()
    if "BACKENDS_SHOW" in os.environ and runner.world.rank == 0:
        print(name, file=sys.stderr, flush=True)
    if name in left_out:
        tally.left_out[left_out[name]] += 1
        return
    try:
        test()
    except NoRanksError as error:
        tally.left_out[str(error)] += 1
    except AssertionError as error:
        tally.failed.append(f"{name}: {error}")
    else:
        refused = [
            one
            for ones in runner.control.all_gather_object([str(e) for e in runner.refusals])
            for one in ones
        ]
        if refused:
            tally.counts["tests"]["refused"] += 1
            tally.refused[refused[0]] += 1
        else:
            tally.counts["tests"]["passed"] += 1


def report(backend: str, tally: Tally, control: un.Group) -> None:
    """Rank 0's counts are everybody's but for checks, which only the ranks of a test make."""
    assert len({tuple(one) for one in control.all_gather_object(tally.failed)}) == 1
    if control.rank == 0:
        told = {
            "backend": backend,
            "ranks": control.size,
            **{what: dict(counts) for what, counts in tally.counts.items()},
            "refused": dict(tally.refused),
            "left out": dict(tally.left_out),
            "failed": tally.failed,
        }
        print("REPORT " + json.dumps(told), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
