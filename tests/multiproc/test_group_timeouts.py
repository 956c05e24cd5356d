"""Groups whose timeout is longer than the kernel's waits can be; and calls after a timeout."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ranks
import unisono as un

pytestmark = [  # two ranks: every two on one host are one host
    pytest.mark.usefixtures("spread"),
    pytest.mark.parametrize("spread", ["one host", "apart"], indirect=True),
]

PROGRAM = Path(__file__).resolve().parent / "programs" / "uses_a_timeout.py"


def test_groups_are_made_and_used() -> None:
    ranks.processes(2, PROGRAM, "1e10", "math.inf", "timedelta.max", "timedelta(days=10000)", "2.2e6")


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TIMEOUT_S", "1e10")
    monkeypatch.setenv("UNISONO_PEER_TIMEOUT_S", "1e10")
    ranks.processes(2, PROGRAM, "None")


Call = Callable[[un.Group], object]
X = np.ones(3)
FIRST: dict[str, Call] = {
    "all_reduce #1 timed out after 0.3 s: rank 1 never arrived": lambda group: group.all_reduce(
        X, timeout=0.3
    ),
    "barrier #1 timed out after 0.3 s: rank 1 never arrived": lambda group: group.barrier(timeout=0.3),
    "recv timed out after 0.3 s: rank 1 did not answer": lambda group: group.recv(X, 1, timeout=0.3),
    "recv_object timed out after 0.3 s: rank 1 did not answer": lambda group: group.recv_object(
        1, timeout=0.3
    ),
}
LATER: dict[str, Call] = {
    "all_reduce": lambda group: group.all_reduce(X),
    "barrier": lambda group: group.barrier(),
    "recv": lambda group: group.recv(X, 1),
    "irecv": lambda group: group.irecv(X, 1).wait(),
    "send_object": lambda group: group.send_object(X, 1),
    "broadcast": lambda group: group.broadcast(X, 0, async_op=True).wait(),
}


@pytest.mark.parametrize("failed", FIRST)
def test_a_call_after_a_timeout_names_the_call_that_failed(failed: str) -> None:
    over = threading.Event()

    def work(group: un.Group) -> None:
        if group.rank == 1:
            over.wait(60)
            return
        try:
            with pytest.raises(un.Timeout) as first:
                FIRST[failed](group)
            assert "failed before" not in str(first.value)
            for name, call in LATER.items():
                with pytest.raises(un.Timeout) as told:
                    call(group)
                assert str(told.value).startswith(f"{name} failed: this group failed before: {failed}")
        finally:
            over.set()

    ranks.threads(2, work)


def test_a_queued_call_names_the_one_before_it() -> None:
    def work(group: un.Group) -> None:
        if group.rank == 0:
            first, second = (
                group.all_reduce(X, async_op=True, timeout=0.3),
                group.broadcast(X, 0, async_op=True),
            )
            with pytest.raises(
                un.Timeout, match=r"broadcast failed: .* before: all_reduce #1 timed out: rank 1 n"
            ):
                second.wait()
            with pytest.raises(un.Timeout, match=r"all_reduce #1 timed out.*: rank 1 never arrived"):
                first.wait()
            over.set()
        over.wait(60)

    over = threading.Event()
    ranks.threads(2, work)


def test_the_late_rank_reads_who_gave_up_and_in_which_call() -> None:
    def work(group: un.Group) -> None:
        with pytest.raises(un.Timeout) as error:
            group.all_reduce(X.copy(), timeout=0.3) if group.rank == 0 else group.recv(X.copy(), 0)
        gave_up = "recv failed: rank 0 gave up in all_reduce #1: rank 1 never arrived"
        assert str(error.value).startswith("all_reduce timed out after 0.3 s" if group.rank == 0 else gave_up)

    ranks.threads(2, work)
