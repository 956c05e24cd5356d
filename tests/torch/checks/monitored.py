"""monitored_barrier, and barriers with a timeout. Real ranks are late here."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import inside

SHORT = timedelta(seconds=1)


def check_monitored_barrier_passes_again_and_again(rank, size):
    group = dist.group.WORLD
    for count in range(5):
        group.monitored_barrier(timedelta(seconds=300), wait_all_ranks=bool(count % 2))
        dist.all_reduce(torch.ones(1))
    dist.new_group(list(range(size))).monitored_barrier()


def check_who_did_not_come_is_named(rank, size):
    group = dist.new_group()
    dist.barrier()
    if rank == 0:
        for other in range(1, size - 1):  # they are there; rank 0 allows but a second
            inside.barrier_store(group).wait([f"monitored/1/{other}"], timedelta(seconds=300))
        with pytest.raises(RuntimeError, match=f"^Rank {size - 1} failed to pass .* in 1000 ms"):
            group.monitored_barrier(SHORT)
    elif rank < size - 1:
        text = f"Rank {rank} successfully reached monitoredBarrier, but .* rank 0: Rank {size - 1} failed"
        with pytest.raises(RuntimeError, match=text):
            group.monitored_barrier(timedelta(seconds=300))
    dist.barrier()
    dist.all_reduce(x := torch.ones(1), group=group)  # the group is as it was
    assert x.item() == size


def check_all_who_did_not_come_are_named(rank, size):
    group = dist.new_group()
    if rank == 0:
        who = "Rank 1" if size == 2 else "Ranks 1, 2"
        with pytest.raises(
            TimeoutError, match=f"^{who} failed to pass monitoredBarrier in 1000 ms.*last seen"
        ):
            group.monitored_barrier(SHORT, wait_all_ranks=True)
        with pytest.raises(RuntimeError, match="Rank 0 timed out in monitoredBarrier"):
            group.monitored_barrier(timedelta(0))


def check_a_late_rank_0_is_told_of(rank, size):
    group = dist.new_group()
    if rank:
        text = f"Rank {rank} successfully reached monitoredBarrier, but received errors .* rank 0: it did not"
        with pytest.raises(RuntimeError, match=text):
            group.monitored_barrier(SHORT)


def check_barrier_timeout(rank, size):
    group = dist.new_group()
    group.set_timeout(SHORT)
    dist.barrier()
    if rank < size - 1:
        with pytest.raises(TimeoutError, match=f"barrier timed out .*rank [0-9, ]*{size - 1} never arrived"):
            dist.barrier(group=group)
        with pytest.raises(RuntimeError):
            dist.barrier(group=group)  # an aborted group stays so
    dist.barrier()
