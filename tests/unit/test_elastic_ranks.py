"""What the launcher of an elastic job concludes from the notices of its ranks."""

from typing import Any

from unisono.commands.launch.elastic import ElasticRanks
from unisono.commands.launch.failures import RankProcess
from unisono.commands.launch.job import Job
from unisono.engine.diagnosis.report import MembershipNotice


class Host:
    """The processes of one launcher, of two each."""

    def __init__(self, job: Any) -> None:
        self.ranks: dict[int, RankProcess] = {}
        self.elastic = ElasticRanks(job, self.ranks, lambda line: None)

    def start(self, *pids: int) -> None:
        for place, pid in enumerate(pids):
            self.ranks[pid] = RankProcess(place, place, pid, stderr=None)  # type: ignore[arg-type]

    def form(self, generation: int, size: int, *pids: int) -> None:
        """All ranks of this host tell of their new group."""
        for pid in pids:
            notice = MembershipNotice(pid=pid, new_rank=0, generation=generation, size=size, here=pids)
            self.elastic.take(notice)

    def end(self, *pids: int) -> None:
        for order, pid in enumerate(pids):
            self.ranks[pid].end = order, 1, False
            self.elastic.on_end(self.ranks[pid], failed=True)


def job() -> Any:
    return Job(("x",), 4, (), (), elastic=(1, 4), respawn=100)


def test_a_host_whose_ranks_are_evicted_again_and_again_replaces_them() -> None:
    host = Host(job())
    host.start(1, 2)
    host.form(0, 4, 1, 2)
    for number in range(1, 4):
        old, new = (10 * (number - 1) + 1, 10 * (number - 1) + 2), (10 * number + 1, 10 * number + 2)
        host.end(*old)  # the side with rank 0 went on without them: no notice of this host says so
        assert not host.elastic.over
        assert host.elastic.replacing
        assert all(not host.ranks[pid].survived for pid in old)
        host.start(*new)
        host.form(2 * number, 4, *new)
        assert all(host.ranks[pid].survived for pid in old)  # the job went on


def test_the_first_notice_of_a_group_does_not_end_the_job() -> None:
    host = Host(Job(("x",), 3, (), (), elastic=(2, 3)))
    host.start(1, 2, 3)
    host.elastic.take(MembershipNotice(pid=1, new_rank=0, generation=0, size=3, here=(1, 2, 3)))
    assert not host.elastic.over
    host.form(0, 3, 2, 3)
    host.end(3)
    assert not host.elastic.over
    host.end(2)
    assert host.elastic.over


def test_a_job_whose_ranks_have_all_failed_is_over() -> None:
    host = Host(job())
    host.start(1, 2)
    host.form(0, 2, 1, 2)
    host.end(1)
    assert not host.elastic.over
    host.end(2)
    host.elastic.give_up()
    assert host.elastic.over
