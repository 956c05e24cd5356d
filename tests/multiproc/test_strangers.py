"""A scanner knocks at every port of a running job; many jobs share a machine."""

import contextlib
import json
import os
import random
import socket
from pathlib import Path

from effort import HANG_S
from launching import Launcher, read_lines
from python_runs import ran
from unisono.engine.store import wire

HERE = Path(__file__).resolve().parent
JOB = HERE / "programs" / "reduces_until_told.py"


def listening(pids: list[int]) -> dict[int, int]:
    """Port -> process, for every TCP port these processes listen on."""
    inodes = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found = {}
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                port = inodes.get(os.readlink(f"/proc/{pid}/fd/{name}"))
                if port is not None:
                    found[port] = pid
    return found


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def knock(port: int, stack: contextlib.ExitStack) -> None:
    """Random bytes, half-open handshakes, huge lengths, a web browser, and silence, again and again."""
    chance = random.Random(port)
    hello = wire.ClientHello(wire.MAGIC, wire.VERSION, "", "x", nonce=bytes(32))
    greeting = b"".join(wire.frame(hello))
    proof = b"".join(wire.frame(wire.TokenProof(bytes(32))))
    for number in range(300):
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANG_S))
        said = [chance.randbytes(chance.randrange(1, 9000)), greeting, greeting + proof, b"\xff" * 8,
                b"GET / HTTP/1.1\r\n\r\n", b""][number % 6]  # fmt: skip
        with contextlib.suppress(ConnectionError):
            sock.sendall(said)


def test_a_scanner_does_not_disturb_a_running_job(launcher: Launcher, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    job = launcher.start(JOB, "-n", "2", args=(str(stop),))
    assert sorted(read_lines(job, 2)) == ["[rank 0] up", "[rank 1] up"]
    ports = listening(launcher.alive())
    assert ports, "the store listens somewhere"
    before = {pid: resident(pid) for pid in ports.values()}
    with contextlib.ExitStack() as stack:
        for port in ports:
            knock(port, stack)
        grown = {pid: resident(pid) - before[pid] for pid in ports.values()}
    stop.touch()
    out, errors = job.communicate(timeout=HANG_S)
    assert job.returncode == 0, (out, errors)
    assert max(grown.values()) < 10 << 20, grown


def test_jobs_at_once_do_not_disturb_one_another() -> None:
    done = ran(HERE / "crowd_program.py", "4", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["failed"] == 0
