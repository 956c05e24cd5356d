"""Process groups whose ranks change: the scenarios of PyTorch's tests for fault tolerance, and worse."""

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from effort import HANG_S, judge_time
from unisono.errors import GroupClosed, PeerLost, RendezvousError
from unisono.torch.process_group import ProcessGroupUnisono
from unisono.torch.reconfiguration import ReconfigureOptions
from unisono.torch_internals.hooks import have_hooks

SIZE = 3


def run(scenario, size: int = SIZE, connects: bool = False) -> list:
    """Run `scenario(member)` in a thread for each process; the first error is raised."""
    store, meeting = dist.HashStore(), Meeting(size)

    def member(number: int):
        with ExitStack() as ends:
            group = ProcessGroupUnisono(
                store, number, size, timedelta(seconds=HANG_S), "world", connects=connects
            )
            ends.callback(group.shutdown)
            return scenario(Member(number, group, meeting))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


class Meeting:
    """Where the processes exchange their handles: any way of the program's own."""

    def __init__(self, size: int) -> None:
        self.handles = [""] * size
        self.barrier = threading.Barrier(size, timeout=HANG_S)


class Member:
    """One process of a scenario."""

    def __init__(self, number: int, group: ProcessGroupUnisono, meeting: Meeting) -> None:
        self.number, self.group, self._meeting = number, group, meeting

    def handles(self) -> list[str]:
        """Return the handles of all processes."""
        self._meeting.barrier.wait()
        self._meeting.handles[self.number] = self.group.get_reconfigure_handle()
        self._meeting.barrier.wait()
        return list(self._meeting.handles)

    def together(self) -> None:
        """Wait for all processes."""
        self._meeting.barrier.wait()

    def become(self, uuid: int, handles, timeout_s: float = HANG_S) -> None:
        """Reconfigure, and check the new group by an all_reduce, a message and what PyTorch's C++ sees."""
        self.group.reconfigure(ReconfigureOptions(uuid, handles, timedelta(seconds=timeout_s))).wait()
        size, rank = len(handles), self.group.rank()
        assert self.group.size() == size
        x = torch.full((4,), rank + 1.0)
        self.group.allreduce([x]).wait()
        assert x.tolist() == [size * (size + 1) / 2] * 4
        if size > 1:
            out = torch.zeros(1)
            work = self.group.recv([out], (rank - 1) % size, 0)
            self.group.send([torch.tensor([float(rank)])], (rank + 1) % size, 0).wait()
            work.wait()
            assert out.item() == (rank - 1) % size


def test_a_group_without_ranks_raises():
    def scenario(member):
        for call in (member.group.allreduce, member.group.broadcast):
            with pytest.raises(RuntimeError, match="has no ranks"):
                call([torch.ones(1)])
        with pytest.raises(RuntimeError, match="has no ranks"):
            member.group.barrier()
        member.become(1, member.handles())

    run(scenario)


@pytest.mark.parametrize("left", range(SIZE))
def test_one_of_the_processes_is_left_out(left):
    def scenario(member):
        handles = member.handles()
        member.become(1, handles)
        member.together()
        if member.number != left:
            member.become(2, [each for number, each in enumerate(handles) if number != left])
            assert member.group.rank() == member.number - (member.number > left)
        member.together()
        if member.number == left:
            with pytest.raises((PeerLost, GroupClosed)):
                member.group.allreduce([torch.ones(1)]).wait()

    run(scenario)


def test_alone_and_together_again():
    def scenario(member):
        handles = member.handles()
        member.become(10 + member.number, [handles[member.number]])
        member.become(1, handles)
        member.become(20 + member.number, [handles[member.number]])

    run(scenario)


def test_processes_join_late_and_groups_merge():
    def scenario(member):
        handles = member.handles()
        if member.number == 0:
            member.become(1, handles[:1])
        else:
            member.become(2, handles[1:])
        member.become(3, handles)
        member.become(4, handles)  # the same ranks again

    run(scenario)


def test_a_set_of_handles_gets_the_same_order_everywhere():
    def scenario(member):
        member.become(1, set(member.handles()))
        return member.group.rank()

    assert sorted(run(scenario)) == [0, 1, 2]


def test_a_group_that_has_ranks_is_reconfigured_too():
    def scenario(member):
        x = torch.ones(1)
        member.group.allreduce([x]).wait()
        member.become(1, member.handles()[::-1])
        assert member.group.rank() == SIZE - 1 - member.number

    run(scenario, connects=True)


def test_an_aborted_group_is_reconfigured():
    def scenario(member):
        member.become(1, member.handles())
        member.together()
        member.group.abort()
        assert member.group.get_error().name == "SUCCESS"
        member.become(2, member.handles())

    run(scenario)


def test_hooks_stay():
    if not have_hooks():
        pytest.skip("this PyTorch has no hooks of process groups")

    def scenario(member):
        seen = []
        member.group.register_pre_hook(0, lambda args: seen.append(args.name))
        for uuid in (1, 2):
            member.become(uuid, member.handles())
            assert seen, uuid
            seen.clear()

    run(scenario)


def test_what_is_wrong_is_told_before_the_group_ends():
    def scenario(member):
        handles = member.handles()
        member.become(1, handles)
        own = handles[member.number]
        wrong = {
            "no handles": [],
            "not one of Unisono's": [*handles, "unisono://[::1]/"],
            "occurs twice": [*handles, own],
            "no valid address": [own, own.replace(own.rpartition(":")[2], f"99999/{'0' * 32}")],
            "lack this process's own": [each for each in handles if each != own],
            "already used": None,
        }
        for text, given in wrong.items():
            with pytest.raises((ValueError, RuntimeError), match=text):
                member.group.reconfigure(ReconfigureOptions(1, handles if given is None else given))
        for given in (5, None, own):
            with pytest.raises(TypeError):
                member.group.reconfigure(ReconfigureOptions(2, given))
        for uuid in (1.5, "1", None):
            with pytest.raises(TypeError):
                member.group.reconfigure(ReconfigureOptions(uuid, handles))
        with pytest.raises(ValueError, match="uuid"):
            member.group.reconfigure(ReconfigureOptions(2**64, handles))
        member.group.allreduce([torch.ones(1)]).wait()

    run(scenario)


def test_other_handles_in_another_process_are_an_error():
    def scenario(member):
        handles = member.handles()
        given = handles if member.number == 0 else [handles[0], handles[2], handles[1]]
        errors = []
        try:
            member.group.reconfigure(ReconfigureOptions(1, given, timedelta(seconds=3)))
        except (RendezvousError, RuntimeError) as error:
            errors.append(str(error))
        member.together()
        return errors

    errors = [text for found in run(scenario) for text in found]
    assert len(errors) == SIZE
    assert any("another process was given other handles" in text for text in errors), errors


def test_a_process_that_does_not_come_is_named():
    def scenario(member):
        handles = member.handles()
        if member.number != 1:
            with pytest.raises(RendezvousError, match="rank 1"):
                member.group.reconfigure(ReconfigureOptions(1, handles, timedelta(seconds=1)))
            with pytest.raises(RuntimeError, match="has failed"):
                member.group.allreduce([torch.ones(1)])
            member.become(2, [handles[0], handles[2]])
        member.together()

    run(scenario)


def test_a_first_process_that_has_ended_is_told_at_once():
    def scenario(member):
        handles = member.handles()
        if member.number == 0:
            member.group.shutdown()
        member.together()
        if member.number:
            began = time.monotonic()
            with pytest.raises(RendezvousError, match="process of the first handle is lost"):
                member.group.reconfigure(ReconfigureOptions(1, handles, timedelta(seconds=HANG_S)))
            judge_time(time.monotonic() - began, 5)
            member.become(2, handles[1:])

    run(scenario)


@pytest.mark.parametrize("first", ["reconfigures", "replaces_gloo"])
def test_processes_die_and_others_take_their_place(forks, first):
    """The process of rank 0 and of the store dies, too."""
    with tempfile.TemporaryDirectory() as folder:
        job = {first: ("programs.reconfigures", 4, [first])}
        printed = forks.run(Path(folder), job)[first]
    assert printed[0].endswith("(ended with -9)"), printed
    assert all("fine" in text for text in printed[1:]), printed


def test_the_first_rank_dies_while_the_others_follow(forks, tmp_path: Path):
    printed = forks.run(tmp_path, {"job": ("programs.follows", SIZE, [])})["job"]
    assert printed[0].endswith("(ended with -9)")
    assert [text.splitlines()[-1] for text in printed[1:]] == ["fine"] * (SIZE - 1), "\n".join(printed)
