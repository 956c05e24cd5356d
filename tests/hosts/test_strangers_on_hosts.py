"""A stranger knocks at every port of a job on two hosts, while it makes connections and while it computes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hosts
from effort import HANG_S

pytestmark = pytest.mark.hosts

HERE = Path(__file__).resolve().parent
STRANGER = [sys.executable, str(HERE / "stranger_program.py")]
FIRST, LAST = 21000, 21003
LAYOUT = (0, 0, 1)  # the host of each rank; the stranger is host 2


@pytest.fixture
def net() -> Iterator[hosts.Network]:
    with hosts.hosts(3) as network:
        yield network


def start(net: hosts.Network, rank: int) -> subprocess.Popen[str]:
    variables = {
        "PYTHONPATH": str(HERE.parent / "support"),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(LAYOUT)),
        "MASTER_ADDR": net[0].address,
        "MASTER_PORT": "29500",
        "UNISONO_PORT_RANGE": f"{FIRST}-{LAST}",
        "UNISONO_TOKEN": "5" * 64,
        "OPENBLAS_NUM_THREADS": "1",
    }
    argv = [sys.executable, str(HERE / "group_program.py"), "mill"]
    return net[LAYOUT[rank]].start(argv, env={**os.environ, **variables}, stdin=subprocess.PIPE)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stranger_at_every_port_disturbs_nothing(net: hosts.Network, tmp_path: Path) -> None:
    recorder = net.switch.start([*STRANGER, "record", "p1", str(FIRST), str(LAST)])
    assert recorder.stdout is not None
    assert recorder.stdout.readline() == "ready\n"
    job = [start(net, rank) for rank in range(len(LAYOUT))]
    for rank in job:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "up\n", rank.communicate(timeout=HANG_S)
    handshakes = tmp_path / "handshakes"
    handshakes.write_text(recorder.communicate(timeout=HANG_S)[0])
    assert len(handshakes.read_text().split()) == 3

    before = [resident(rank.pid) for rank in job]
    ports = [(0, 29500), *((host, port) for host in (0, 1) for port in range(FIRST, LAST + 1))]
    places = ",".join(f"{net[host].address}:{port}" for host, port in ports)
    entered = json.loads(net[2].must(*STRANGER, "knock", "6", places, str(handshakes)))
    grown = [resident(rank.pid) - size for rank, size in zip(job, before, strict=True)]

    said, errors = job[0].communicate("enough\n", timeout=HANG_S)
    ends = [rank.communicate(timeout=HANG_S) for rank in job[1:]]
    assert [rank.returncode for rank in job] == [0] * len(job), (errors, ends)
    assert int(said.split()[-1]) > 15, "groups were made while the stranger knocked"
    # The address sanitizer keeps the last 256 MB that were freed, to tell a use of them.
    assert max(grown) < (400 << 20 if "UNISONO_SANITIZED" in os.environ else 10 << 20), grown
    assert entered.pop(f"{net[0].address}:29500") > 10
    assert sum(entered.values()) > 10, "no port for data was open when the stranger knocked"
