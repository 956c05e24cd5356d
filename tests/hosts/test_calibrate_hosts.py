"""`unisono calibrate --hosts`: the rate of shaped links is found, and the file is a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hosts
from effort import HANG_S, cases
from python_runs import ran
from unisono.networks import find

pytestmark = pytest.mark.hosts

TOKEN = "ab" * 32


@pytest.mark.parametrize(("count", "ranks", "rate"), cases([(3, 2, 400)], long=[(2, 1, 100)]))
def test_the_rate_of_shaped_links_is_found(count: int, ranks: int, rate: int, tmp_path: Path) -> None:
    file = tmp_path / "measured.toml"
    with hosts.hosts(count) as net:
        net.shape(f"{rate}mbit")
        jobs = [
            host.start(
                [
                    *(
                        sys.executable,
                        "-m",
                        "unisono",
                        "run",
                        "--nnodes",
                        str(count),
                        "--node-rank",
                        str(number),
                    ),
                    *("--master-addr", net[0].address, "-n", str(ranks)),
                    *("-m", "unisono", "calibrate", "--hosts", "-o", str(file)),
                ],
                env={**os.environ, "UNISONO_TOKEN": TOKEN},
                stdin=subprocess.DEVNULL,
            )
            for number, host in enumerate(net)
        ]
        for job in jobs:
            out, err = job.communicate(timeout=HANG_S)
            assert job.returncode == 0, out + err
    network = find(str(file))
    assert network.size == count * ranks
    route = [network.links[link] for link in network.route(0, network.size - 1)]
    assert len(route) == 2  # up to the switch, and down
    assert rate * 1e6 / 8 * 0.7 < route[0].bytes_per_s < rate * 1e6 / 8 * 1.3
    assert route[0].duplex == "full"
    assert find(str(file), 64).size >= 64  # it grows
    if count > 2:
        shared = [line for line in file.read_text().splitlines() if "of the rate of one, together" in line]
        assert len(shared) == 2
        assert all(0.6 < float(line.split(": ")[1].split()[0]) < 1.4 for line in shared)


def test_one_rank_is_refused(tmp_path: Path) -> None:
    done = ran("-m", "unisono", "run", "-n", "1", "-m", "unisono", "calibrate", "--hosts", cwd=tmp_path)
    assert done.returncode == 2
    assert "--hosts needs a job of at least two ranks" in done.stdout + done.stderr
