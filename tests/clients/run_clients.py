"""What `make test-clients` runs: frameworks over Gloo, over "unisono" by name, and over `--replace gloo`.

    python tests/clients/run_clients.py                     every client, each way three times, in turns
    python tests/clients/run_clients.py deepspeed --rounds 1

Each is a program of two ranks in `programs/`. Its losses over Unisono have to equal those over Gloo. Prints
the table of docs/pytorch.md: the medians of the steps' times are of this run, and worth something on a quiet
machine only. Ends with 1 where a client fails or its losses differ.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PROGRAMS = Path(__file__).resolve().parent / "programs"
WAYS = ("gloo", "named", "replaced")
LIMIT_S = 240


@dataclass(frozen=True)
class Client:
    """A framework, and one program of it. `alone`: the program starts its ranks itself."""

    name: str
    distribution: str
    program: str
    part: tuple[str, ...] = ()
    ways: tuple[str, ...] = WAYS
    alone: bool = False
    tolerance: float = 0.0


CLIENTS = (
    Client("Accelerate", "accelerate", "accelerate_client.py"),
    Client("Transformers Trainer", "transformers", "transformers_client.py"),
    Client("Lightning", "lightning", "lightning_client.py"),
    *(Client(f"DeepSpeed ZeRO {n}", "deepspeed", "deepspeed_client.py", (str(n),)) for n in range(4)),
    Client("DeepSpeed MoE", "deepspeed", "deepspeed_client.py", ("moe",)),
    Client("DeepSpeed pipeline", "deepspeed", "deepspeed_client.py", ("pipeline",)),
    Client("Ray Train", "ray", "ray_train_client.py", alone=True),
    Client("torchmetrics", "torchmetrics", "torchmetrics_client.py"),
    Client("torchft", "torchft-nightly", "torchft_client.py", ways=("gloo", "named"), alone=True),
)


@dataclass
class Seen:
    """What a client did in one way, run after run."""

    failure: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)

    @property
    def step_ms(self) -> float:
        """The median of the runs' medians."""
        return statistics.median(each["step_ms"] for each in self.records)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="run clients whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--keep-going", action="store_true", help="a client that is not installed is left out"
    )
    arguments = parser.parse_args()
    wanted = [
        client
        for client in CLIENTS
        if not arguments.names or any(name.lower() in client.name.lower() for name in arguments.names)
    ]
    missing = [client.name for client in wanted if not installed(client)]
    if missing:
        print(f"not installed, so not run: {', '.join(missing)}")
    if any(client.distribution == "accelerate" for client in wanted) and "Accelerate" not in missing:
        print(uneven())
    results = {client: run(client, arguments.rounds) for client in wanted if client.name not in missing}
    print("\n" + table(results))
    failures = [
        f"{client.name}, {way}: {seen.failure}"
        for client, ways in results.items()
        for way, seen in ways.items()
        if seen.failure
    ]
    print("\n".join(failures) or f"{len(results)} clients: the losses over Unisono equal those over Gloo")
    return int(bool(failures) or (bool(missing) and not arguments.keep_going))


def installed(client: Client) -> bool:
    try:
        importlib.metadata.version(client.distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run(client: Client, rounds: int) -> dict[str, Seen]:
    """Run a client in all its ways, in turns, and compare the losses."""
    seen = {way: Seen() for way in client.ways}
    for _ in range(rounds):
        for way in client.ways:
            if seen[way].failure:
                continue
            print(f"{client.name}, {way} ...", flush=True)
            record, failure = run_once(client, way)
            seen[way].failure = failure or wrong(client, way, record, seen["gloo"].records)
            seen[way].records += [record] if record else []
            print(f"  {seen[way].failure or describe(record)}", flush=True)
    return seen


def uneven() -> str:
    """What Unisono says of Accelerate's ranks that call different things."""
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", str(PROGRAMS / "accelerate_uneven.py")]
    environ = {**os.environ, "CLIENT_BACKEND": "unisono"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = done.stderr[done.stderr.find("unisono.errors.Mismatch") :]
    assert "random.py" in said, done.stderr  # the other rank may have gone on from accelerator.py by then
    return said


def describe(record: dict[str, Any]) -> str:
    return f"{record['group']}, {record['step_ms']:.1f} ms a step. {record['client']}"


def run_once(client: Client, way: str) -> tuple[dict[str, Any], str]:
    """Run it once: its record, and why it failed."""
    launcher = ["-m", "unisono", "run", "-n", "2", *(["--replace", "gloo"] if way == "replaced" else [])]
    environ = {
        **os.environ,
        "CLIENT_BACKEND": "unisono" if way == "named" else "gloo",
        "RAY_worker_niceness": "0",
    }
    if client.alone:
        launcher = []
        environ |= {"UNISONO_REPLACE": "gloo"} if way == "replaced" else {}
    command = [sys.executable, *launcher, str(PROGRAMS / client.program), *client.part]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        return {}, f"no end after {LIMIT_S} s: {(error.stdout or b'')[-2000:]!r}"
    found = [line.partition("CLIENT ")[2] for line in done.stdout.splitlines() if "CLIENT {" in line]
    aborted_at_exit = way == "gloo" and found  # seen once, with DeepSpeed: a thread of Gloo's
    if not found or (done.returncode and not aborted_at_exit):
        return {}, f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}"
    return json.loads(found[-1]), ""


def wrong(client: Client, way: str, record: dict[str, Any], on_gloo: list[dict[str, Any]]) -> str:
    """Why the record is not what it has to be; "" where it is."""
    if not record:
        return "no record"
    if ("Unisono" in record["group"]) != (way != "gloo"):
        return f"its group is a {record['group']}"
    if way == "gloo" or not on_gloo:
        return ""
    ours, theirs = np.array(record["losses"]), np.array(on_gloo[0]["losses"])
    if ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=client.tolerance, atol=client.tolerance):
        return ""
    return f"its losses differ from those over Gloo: {ours} and {theirs}"


def table(results: dict[Client, dict[str, Seen]]) -> str:
    """Return the table of docs/pytorch.md."""
    head = "| client | version | over Gloo | named `unisono` | `--replace gloo` "
    lines = [head + "| step over Gloo | named | replaced |", "|---" * 8 + "|"]
    for client, ways in results.items():
        cells = [client.name, importlib.metadata.version(client.distribution)]
        cells += ["-" if way not in ways else "fails" if ways[way].failure else "works" for way in WAYS]
        cells += [f"{ways[way].step_ms:.1f} ms" if way in ways and ways[way].records else "" for way in WAYS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
