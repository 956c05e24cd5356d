"""torchft: two replicas train, one is killed, the other goes on, the killed one comes back and catches up.

Without arguments it is the one that starts the replicas. They get their number, and a file in which the last
step will stand.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
from client import BACKEND, net

KILLED_AT = 15
MORE = 20  # steps after the killed one is back
LIMIT_S = 180
NAMES = {"gloo": "ProcessGroupGloo", "unisono": "ProcessGroupUnisono"}


def replica(number: int, last: Path) -> None:
    import torchft
    from torch.distributed import TCPStore
    from torchft.process_group import ProcessGroupGloo

    if BACKEND == "unisono":
        from unisono.torch.torchft import ProcessGroupUnisono as Group
    else:
        Group = ProcessGroupGloo
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    store = TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.05)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=Group(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        replica_id=f"replica{number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=10),
    )
    replicated, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, plain)
    while not last.exists() or manager.current_step() < int(last.read_text()):
        step = manager.current_step()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2 * step + number))
        optimizer.zero_grad()
        (replicated(x) - 1).square().mean().backward()
        optimizer.step()
        end = {"step": manager.current_step(), "replicas": manager.num_participants()}
        print(json.dumps({**end, "sum": model[0].weight.sum().item(), "at": time.monotonic()}), flush=True)
        time.sleep(0.02)
    manager.shutdown()


def read(process: subprocess.Popen, until: int) -> list[dict]:
    """Return what it prints of its steps up to this one."""
    assert process.stdout is not None
    found: list[dict] = []
    while not found or found[-1]["step"] < until:
        line = process.stdout.readline()
        assert line, f"it ended with {process.wait()} before step {until}"
        if line.startswith("{"):
            found.append(json.loads(line))
    return found


def start(number: int, last: Path, lighthouse: str) -> subprocess.Popen:
    environ = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(number), str(last)]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def main() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1000
    )
    signal.alarm(LIMIT_S)
    last = Path(tempfile.mkdtemp()) / "last"
    stays, dies = (start(number, last, lighthouse.address()) for number in (0, 1))
    steps = read(stays, KILLED_AT)
    read(dies, KILLED_AT)
    dies.kill()
    killed = time.monotonic()
    dies.wait()
    steps += read(stays, steps[-1]["step"] + 5)
    again = start(1, last, lighthouse.address())
    back = read(again, 1)
    whole = last.with_name("written")
    whole.write_text(str(back[0]["step"] + MORE))
    whole.rename(last)
    back += read(again, back[0]["step"] + MORE)
    steps += read(stays, back[0]["step"] + MORE)
    assert stays.wait() == 0
    assert again.wait() == 0
    assert back[-1]["sum"] == steps[-1]["sum"], (back[-1], steps[-1])
    first = min(step["at"] for step in steps if step["at"] > killed)
    assert {step["replicas"] for step in steps} >= {1, 2}, "one replica, and two"
    paces = sorted(after["at"] - before["at"] for before, after in itertools.pairwise(steps))
    record = {"losses": [], "step_ms": 1e3 * paces[len(paces) // 2] - 20, "group": NAMES[BACKEND]}
    note = f"went on {1e3 * (first - killed):.0f} ms after the kill; caught up from step {back[0]['step']}"
    print("CLIENT " + json.dumps({**record, "client": note}), flush=True)


if __name__ == "__main__":
    replica(int(sys.argv[1]), Path(sys.argv[2])) if len(sys.argv) > 1 else main()
