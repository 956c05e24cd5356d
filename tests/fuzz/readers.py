"""Damages files at random and reads them: networks, schedules and programs. Only a ValueError may come.

    python tests/fuzz/readers.py --cases 3000 --seed 1 [--only msccl]

What is accepted is used: a network is asked for routes and simulated on, a schedule is proved, a program
runs. Every case has two seconds of a core, so a loop without an end and a loop of squares are failures, too.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("networks", "schedules", "support")]

from test_msccl import all_pairs, ring  # noqa: E402
from test_network_readers import HWLOC, INFRAGRAPH, NCCL  # noqa: E402
from test_teccl import exchange  # noqa: E402
from test_teccl import ring as teccl_ring  # noqa: E402

import unisono as un  # noqa: E402
from unisono import networks  # noqa: E402
from unisono.errors import SimulationError  # noqa: E402
from unisono.networks.found import find  # noqa: E402
from unisono.plans import make, prove  # noqa: E402
from unisono.schedules import load, read_actions  # noqa: E402
from unisono.schedules.chakra import chakra  # noqa: E402
from unisono.schedules.goal import goal  # noqa: E402
from unisono.schedules.msccl_writer import msccl  # noqa: E402
from unisono.simulation import (  # noqa: E402
    Call,
    Compute,
    Program,
    RecvFrom,
    SendTo,
    Wait,
    loggops,
    read_program,
    simulate_program,
    write_program,
)

CASE_S = 2.0
LARGEST_RUN = 64
"""Ranks of a network on which an all_reduce is simulated."""

FABRIC = """
name = "x"
grows = "fabric.hosts"
[hosts]
ranks = 2
inside = "switch"
inner = { latency = "0.5 us", rate = "450 GB/s" }
nics = 2
cores = 4
memory = "10 GB/s"
[fabric]
kind = "rail_optimised"
units = 2
hosts = 2
spines = 2
crossing = true
cable = { latency = "1 us", rate = "400 Gbit/s", duplex = "half" }
[costs]
send = "1 us"
receive = "1 us"
reduce = "1 TB/s"
gap = "1 ns"
rendezvous = "64 KiB"
"""
NAMED = """
name = "lab"
[[host]]
name = "a"
ranks = 2
memory = { latency = "0.3 us", rate = "10 GB/s" }
[[host]]
name = "b"
costs = { send = "9 us" }
[[switch]]
name = "s"
adds = "10 GB/s"
[[cable]]
between = ["a", "s"]
latency = "5 us"
rate = "100 Gbit/s"
[[cable]]
between = ["b", "s"]
latency = "5 us"
rate = "25 Gbit/s"
back = { latency = "5 us", rate = "10 Gbit/s" }
count = 2
"""
RECIPE = 'collective = "all_reduce"\nalgorithm = "hierarchical"\nranks = 8\nhosts = "2x4"\nroot = 0\n'

HOSTILE = (
    *("", "-1", "0", "1", "2", "7", "65536", "4294967296", "-9999999999", "1e999", "nan", "inf", "1e-320"),
    *("9" * 30, "9" * 5000, "é", "\x00", "<", ">", '"', "'", "{", "}", "[", "]", "=", ",", ";", "#", "&x;"),
    *(
        "true",
        "null",
        "1_000",
        "0x10",
        "-0",
        "1.5",
        " " * 200,
        "\n",
        "[[",
        "]]",
        "a" * 3000,
        "\ufeff",
        "\\u0000",
    ),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 3.5, 1e308, -1e308, float("nan"), float("inf"), 10**30, 2**63, 2**31, 65536),
    *("", "x", "0", "a.b", "a[0:2]", "a[5]", "a[0:2:0]", [], {}, [[]], [{}], {"": {}}, ["x"] * 3, "server"),
)


def damaged_text(choice: random.Random, text: str) -> bytes:
    """Numbers, words, spans and lines that are replaced, removed, doubled or swapped."""
    for _ in range(choice.choice((1, 1, 1, 2, 4))):
        kind = choice.randrange(6)
        at = choice.randrange(len(text) + 1)
        numbers = [n for n, letter in enumerate(text) if letter.isdigit()]
        if kind < 2 and numbers:
            at = choice.choice(numbers)
            end = at + 1
            while end < len(text) and text[end].isdigit():
                end += 1
            text = text[:at] + choice.choice((choice.choice(HOSTILE), str(choice.randrange(20)))) + text[end:]
        elif kind == 2:
            text = text[:at] + choice.choice(HOSTILE) + text[at + choice.randrange(6) :]
        elif kind == 3:
            text = text[:at] + text[at + choice.randrange(200) :]
        else:
            lines = text.split("\n")
            one, other = (choice.randrange(len(lines)) for _ in range(2))
            if kind == 4:
                lines[one : one + 1] = [lines[one]] * choice.choice((0, 2, 2, 3))
            else:
                lines[one], lines[other] = lines[other], lines[one]
            text = "\n".join(lines)
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    if choice.random() < 0.2 and data:
        data[choice.randrange(len(data))] = choice.randrange(256)
    return bytes(data)


def damaged_value(choice: random.Random, value: Any) -> Any:
    """The same JSON with one part replaced, removed or doubled."""
    if isinstance(value, (dict, list)) and value and choice.random() < 0.85:
        key = choice.choice(list(value)) if isinstance(value, dict) else choice.randrange(len(value))
        copy = dict(value) if isinstance(value, dict) else list(value)
        roll = choice.random()
        if roll < 0.1:
            del copy[key]
        elif roll < 0.15 and isinstance(copy, list):
            copy.insert(key, copy[key])
        else:
            copy[key] = damaged_value(choice, copy[key])
        return copy
    if isinstance(value, str) and choice.random() < 0.5:
        return damaged_text(choice, value).decode("utf-8", "replace")
    if isinstance(value, int) and choice.random() < 0.5:
        return value + choice.choice((-1, 1, 1000))
    return choice.choice(VALUES)


# ---- what is done with a file ------------------------------------------------------------------------


def use_network(file: Path) -> None:
    network = find(str(file))
    network.route(0, network.size - 1)
    network.route(network.size - 1, 0)
    small = network.first(min(network.size, LARGEST_RUN))
    un.simulate("all_reduce", small, algorithm="ring", nbytes=1000)


def use_plan(file: Path) -> None:
    prove(load(file))


def use_actions(file: Path) -> None:
    loggops(read_actions(file))
    use_plan(file)


def use_program(file: Path) -> None:
    simulate_program(read_program(file), networks.star(4))


def texts() -> dict[str, tuple[str, list[Any], Callable[[Path], None]]]:
    """reader -> (name of the file, valid contents, what is done with it)."""
    group = Call("all_gather", "direct", 100.0, group=1, handle="x")
    call = Call("all_reduce", "ring", 1e6, handle="g")
    items = [
        [Compute(1e-3), call, Compute(1e-3), Wait("g"), SendTo(1, 10.0), group, Wait("x")],
        [Compute(1e-3), call, Compute(1e-3), Wait("g"), RecvFrom(0), group],
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_program(Program(items, groups=((), (0, 1))), Path(folder) / "p.json")
        program = (Path(folder) / "p.json").read_text()
    schedule = goal(make("all_reduce", "ring", 3), 64)
    other = "num_ranks 2\nrank 0 {\nl1: calc 100 cpu 1\nl2: send 10b to 1 tag 7 nic 1\nl2 irequires l1\n}\n"
    other += "rank 1 {\nl3: recv 10b from 0 tag 7\n}\n"
    return {
        "fabric": ("a.toml", [FABRIC, *_shipped()], use_network),
        "named": ("a.toml", [NAMED], use_network),
        "nccl": ("a.xml", [NCCL], use_network),
        "hwloc": ("a.xml", [HWLOC], use_network),
        "infragraph": ("a.json", [INFRAGRAPH], use_network),
        "msccl": ("s.xml", [ring(3), all_pairs(3), msccl(make("all_gather", "bruck", 5))], use_plan),
        "goal": ("s.goal", [schedule, other], use_actions),
        "chakra": ("s.0.et", [chakra(make("all_reduce", "doubling", 2), 64)], use_actions),
        "teccl": ("s.json", [teccl_ring(3), exchange()], use_plan),
        "recipe": ("s.toml", [RECIPE, RECIPE.replace("2x4", "3+5")], use_plan),
        "program": ("p.json", [json.loads(program), program], use_program),
    }


def _shipped() -> list[str]:
    folder = Path(networks.__file__).parent / "shipped"
    return [(folder / f"{name}.toml").read_text() for name in ("ring", "torus", "two_hosts", "dragonfly")]


def write(choice: random.Random, file: Path, content: Any) -> None:
    """A damaged copy of the content."""
    if isinstance(content, str):
        file.write_bytes(damaged_text(choice, content))
    elif isinstance(content, list) and isinstance(content[0], bytes):
        broken = choice.randrange(len(content))
        for rank, data in enumerate(content):
            if rank == broken:
                at = choice.randrange(len(data))
                data = data[:at] + bytes([choice.randrange(256)]) + data[at + choice.randrange(3) :]
            file.with_name(file.name.replace(".0.", f".{rank}.")).write_bytes(data)
    elif choice.random() < 0.8:
        for _ in range(choice.choice((1, 1, 2))):
            content = damaged_value(choice, content)
        file.write_text(json.dumps(content))
    else:
        file.write_bytes(damaged_text(choice, json.dumps(content, indent=1)))


def _too_long(*_: object) -> None:
    raise TimeoutError(f"not done in {CASE_S} s")


def main() -> int:
    """Run the cases; the exit code is 1 if another error came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000, help="of each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    signal.signal(signal.SIGPROF, _too_long)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for reader, (name, contents, use) in texts().items():
            if args.only and reader != args.only:
                continue
            accepted = refused = 0
            for case in range(args.cases):
                choice = random.Random(f"{reader} {args.seed} {case}")
                file = Path(folder) / name
                write(choice, file, choice.choice(contents))
                signal.setitimer(signal.ITIMER_PROF, CASE_S)
                try:
                    use(file)
                    accepted += 1
                except (ValueError, SimulationError) as error:
                    assert str(error), "an error without a text"
                    refused += 1
                except BaseException:  # all others are what this looks for
                    wrong += 1
                    traceback.print_exc()
                    print(
                        f"{reader}, case {case}, seed {args.seed}: {file.read_bytes()[:3000]!r}", flush=True
                    )
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
            print(f"{reader:10} {accepted:6} accepted, {refused:6} refused", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
