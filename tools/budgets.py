"""Limits the lines of a package, and those of a file without a reason. Prints each folder's lines.

`lizard` limits functions.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

FILE_LINES = 400

# Files above 400 lines, with the reason why each is one concept. Cutting one in two would be worse.
WHOLE: dict[str, str] = {
    "csrc/python/calls.cpp": "the way of every call: the methods of Group, what they remember, how they run",
    "csrc/windows/window.cpp": "the calls of a rank: how it moves, updates, locks, signals and waits",
    "csrc/protocol/control.cpp": "one thread and its connections: what it reads, sends, and finds out",
    "csrc/engine/engine.cpp": "one rank of one group: it numbers, runs, queues and ends its operations",
    "csrc/engine/executor.cpp": "one interpreter of plans, see docs/adr/0001-one-interpreter.md",
    "csrc/simulator/simulation.cpp": "one run: what ranks do, the messages between them, one event loop",
    "src/unisono/commands/launch/supervisor.py": "one event loop: what wakes it, and what it then does",
    "tests/chaos/faults.py": "one run of cases: drawn, struck, checked by the oracle, counted",
    "src/unisono/engine/environment/env.py": "the table of the environment's variables, and what reads it",
    "src/unisono/engine/diagnosis/fault_text.py": "the text of each kind of fault",
    "src/unisono/engine/group/native_planning.py": "a call on its way to the engine, and its error",
    "src/unisono/engine/group/native.py": "a group of the engine: its changes, its duplicates, its messages",
    "src/unisono/engine/group/group.py": "Group: every operation of the user; mostly signatures",
    "src/unisono/parallel/context/attention.py": "attention over ranks: two ways to run one call of it",
    "src/unisono/parallel/context/program.py": "one program on positions: its proof, its steps, its run",
    "src/unisono/parallel/context/rules.py": "the rule of each operator, and their table",
    "src/unisono/parallel/costs/step_time.py": "a step on paper: its schedule, clocks and cores of its ranks",
    "src/unisono/parallel/elastic/transactions.py": "a call, a loss in it, the agreement",
    "src/unisono/parallel/pipeline/schedule.py": "schedules: the order of actions, its proof, its times",
    "src/unisono/parallel/pipeline/runtime.py": "one rank's step: its actions and their messages",
    "src/unisono/parallel/batches.py": "what ranks get of a loader's batches, and their data compared",
    "src/unisono/parallel/checkpoint.py": "a checkpoint: what is in it, its folder, what another plan reads",
    "src/unisono/parallel/loss_weights.py": "what counts in a loss: of micro-batches, ranks, several calls",
    "src/unisono/parallel/model_buffers.py": "buffers over the data ranks, and BatchNorm, which moves some",
    "src/unisono/parallel/programs.py": "the programs of one model: what is proved of them, and recorded",
    "src/unisono/parallel/program_state.py": "the key of a program: settings, and what methods read",
    "src/unisono/parallel/plan.py": "Plan: every setting, and which of them go together",
    "src/unisono/parallel/graph/capture.py": "one run of a recorder: what hooks, modes and the stack tell it",
    "src/unisono/parallel/graph/stage_program.py": "the stages of a program: where they begin, what they run",
    "src/unisono/parallel/graph/rules.py": "the rule of each operator, and their table",
    "src/unisono/parallel/planning/dry_run.py": "one step without values: what is built, what runs, its peak",
    "src/unisono/parallel/planning/machine.py": "the ranks of a job: as they are given, as they are measured",
    "src/unisono/parallel/planning/memory_account.py": "memory on shapes: storages, kernels, allocator, peak",
    "src/unisono/parallel/run.py": "Run: every call of the user; mostly signatures and docstrings",
    "src/unisono/parallel/sharded_parameters.py": "the data axis under ZeRO: its units, messages, scalars",
    "src/unisono/parallel/swap.py": "who swaps what: whole parameters, parts of them, a model of one process",
    "src/unisono/torch_internals/fsdp.py": "FSDP2 from inside: one table of names, and what uses them",
    "src/unisono/torch/process_group.py": "the process group as PyTorch asks it: identity, beginning, end",
    "src/unisono/torch/collectives.py": "every collective as PyTorch calls it; each translates one call",
    "tests/torch/loop_features/features.py": "the rows of one table: a function for each",
    "tests/torch/model_fuzz/operators.py": "the operators of random programs, and their tables",
    "src/unisono/planner/hardware.py": "accelerators and hosts as data: what they have, and their files",
    "src/unisono/planner/planner.py": "un.plan: what is asked, how it is found, what is answered",
    "src/unisono/planner/search.py": "one search: the tree of plans, its bounds, neighbours",
    "src/unisono/planner/training_plan.py": "a job and its plans: every field, and what speaks against one",
    "src/unisono/plans/proof.py": "the proof of a plan: one symbolic run, and what must hold at its end",
    "src/unisono/commands/launch/failures.py": "the failures of a job: read, ordered, reported once",
    "src/unisono/commands/launch/job.py": "a job: its command line, its ranks' environment",
    "src/unisono/engine/store/tcp_server.py": "the store's server: one selector loop and its peers",
}

# Most lines of packages, in hundreds. A ceiling goes down with its package. Who raises one says why in the
# message of the commit.
CEILINGS: dict[tuple[str, ...], int] = {
    ("src/unisono/parallel",): 35_400,
    ("src/unisono/planner",): 5_200,
    ("src/unisono/mpi", "src/unisono/mpi4py"): 11_200,
    ("src", "csrc"): 134_200,
    ("tests",): 89_000,
}

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("src", "csrc", "tests", "tools", "benchmarks", "examples")
SOURCES = (".py", ".cpp", ".hpp", ".h", ".c", ".cc")


def main() -> int:
    """Print lines per room, then what is wrong."""
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in SOURCES]
    lines = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    rooms: Counter[Path] = Counter()
    for path, count in lines.items():
        rooms[path.parent] += count
    for room, count in sorted(rooms.items()):
        print(f"{count:7}  {room}")
    print(f"{sum(rooms.values()):7}  in all")
    long = {str(path) for path, count in lines.items() if count > FILE_LINES}
    complaints = [
        f"{path} has more than {FILE_LINES} lines and no reason" for path in sorted(long - WHOLE.keys())
    ]
    complaints += [f"the reason for {path} is not needed any more" for path in sorted(WHOLE.keys() - long)]
    for packages, most in CEILINGS.items():
        count = sum(lines[path] for path in lines for package in packages if path.is_relative_to(package))
        if count > most:
            complaints.append(f"{' and '.join(packages)}: {count} lines, at most {most}")
    for complaint in complaints:
        print(f"over budget: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
