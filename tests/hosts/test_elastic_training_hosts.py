"""Elastic training over two hosts: one dies, also that of rank 0 and the store, and another one joins."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import hosts
import suite
from elastic_jobs import JOB, Job, check_stretch, check_truth
from node_launchers import NodeLauncher, elastic_flags
from parallel.elastic_training import logs

pytestmark = [pytest.mark.hosts, pytest.mark.torch, pytest.mark.sweep, pytest.mark.timeout(400)]

ON_HOSTS = 1e-6
"""Losses around 1.5. On several hosts sums of f32 have an order of their own."""


class Training:
    """A job on both hosts, two ranks on each."""

    def __init__(self, net: hosts.Network, folder: Path, steps: int, plan: dict[str, Any]) -> None:
        self._token, self.folder = folder / "token", folder / "job"
        self.folder.mkdir()
        self._program = [str(JOB), str(self.folder), "4", str(steps)]
        paths = [str(suite.HERE), str(suite.HERE.parent / "support"), os.environ.get("PYTHONPATH", "")]
        self._environ = {"PLAN": json.dumps(plan), "PYTHONPATH": os.pathsep.join(paths)}
        where = elastic_flags(net, 4)
        self.nodes = [self.start(net[0], *where, "--node-rank", "0")]
        hosts.wait_until(self._token.exists)
        self.nodes.append(self.start(net[1], *where, "--node-rank", "1"))

    def start(self, host: hosts.Node, *flags: str) -> NodeLauncher:
        return NodeLauncher(host, self._token, self._program, *flags, **self._environ)

    def await_step(self, step: int) -> None:
        def reached() -> bool:
            return any(line.get("step", 0) >= step for log in logs(self.folder) for line in log)

        hosts.wait_until(lambda: reached() or any(n.process.poll() is not None for n in self.nodes))
        assert reached(), self.output

    @property
    def output(self) -> str:
        return "".join(node.output for node in self.nodes)

    def ended(self, *nodes: NodeLauncher) -> Job:
        """What the job has written, when these nodes have ended normally."""
        assert [node.end(200) for node in nodes] == [0] * len(nodes), self.output
        return Job(self.folder, self.output)


def check_first(forks: suite.Forks, job: Job, zero: int) -> None:
    """The steps on both hosts."""
    begun = {"state": 1, "steps": 1, "size": 4}
    check_stretch(forks, job, begun, job.changes()[0]["steps"], ON_HOSTS, {"zero": zero, "data": 4})


@pytest.mark.parametrize(("number", "zero"), [(1, 0), (0, 0), (1, 2), (0, 3)])
def test_a_host_dies(net: hosts.Network, forks: suite.Forks, tmp_path: Path, number: int, zero: int) -> None:
    training = Training(net, tmp_path, 24, {"zero": zero})
    training.await_step(4)
    net[number].kill()
    job = training.ended(training.nodes[1 - number])
    training.nodes[number].end()
    assert (job.changes()[0]["before"], job.changes()[-1]["size"]) == (4, 2), job.output
    if zero:
        assert "from the copy on rank" in job.changes()[0]["change"]
    job.check_samples(undone=zero > 0)
    check_first(forks, job, zero)
    check_truth(forks, job, zero=zero, data=4)  # on one host, so bit for bit


@pytest.mark.parametrize("zero", [0, 3])
def test_a_host_is_cut_off(net: hosts.Network, forks: suite.Forks, tmp_path: Path, zero: int) -> None:
    training = Training(net, tmp_path, 24, {"zero": zero})
    training.await_step(4)
    net[1].cut()
    job = training.ended(training.nodes[0])
    net[1].mend()
    assert training.nodes[1].end() != 0
    assert "Evicted" in training.nodes[1].output
    assert (job.changes()[0]["before"], job.changes()[-1]["size"]) == (4, 2), job.output
    job.check_samples(undone=zero > 0)
    check_first(forks, job, zero)
    check_truth(forks, job, zero=zero, data=4)


@pytest.mark.parametrize("zero", [0, 1])
def test_the_host_of_the_store_dies_and_another_one_joins(
    net: hosts.Network, forks: suite.Forks, tmp_path: Path, zero: int
) -> None:
    training = Training(net, tmp_path, 0, {"zero": zero})
    training.await_step(4)
    net[0].kill()
    stays = training.nodes[1]
    address = stays.await_line(rf"--join (?:[^ ]*,)?({net[1].address}:\d+)")
    comes = training.start(net[0], "--join", address)
    training.nodes[0].end()
    job = training.ended(comes, stays)
    sizes = [one["size"] for one in job.changes()]
    assert (sizes[0] < 4, sizes[-1]) == (True, 4), comes.output + job.output
    job.check_samples(undone=zero > 0)
    check_truth(forks, job, tolerance=ON_HOSTS, zero=zero, data=4)
