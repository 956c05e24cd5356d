"""The events of PyTorch's profilers: names, shapes, and that they last until the call is complete."""

import pytest
import torch
import torch.distributed as dist


def recorded(work) -> list:
    """Run `work` under the profiler; return Unisono's events."""
    with torch.autograd.profiler.profile(record_shapes=True) as seen:
        work()
    return [event for event in seen.function_events if event.name.startswith("unisono:")]


def check_an_event_has_its_shapes_and_ends_in_another_thread(rank, size):
    x, out = torch.ones(3, 4), torch.empty(size, 3, 4)
    for work, name in (
        (lambda: dist.all_reduce(x), "all_reduce"),
        (lambda: dist.all_reduce(x, async_op=True).wait(), "all_reduce"),
        (lambda: dist.all_gather_into_tensor(out, x), "all_gather"),
        (lambda: dist.broadcast(x.t(), 0), "broadcast"),
    ):
        (event,) = recorded(work)
        assert event.name == f"unisono:{name}"
        assert event.is_async
        assert event.input_shapes in ([[3, 4]], [[4, 3]])


def check_results_are_there_when_a_profiled_call_is(rank, size):
    columns = torch.full((4, 3), float(rank)).t()  # not contiguous: copied back afterwards
    recorded(lambda: dist.all_reduce(columns))
    assert torch.equal(columns, torch.full((3, 4), float(sum(range(size)))))


def check_coalesced_calls_are_one_event(rank, size):
    tensors = [torch.ones(2), torch.ones(3)]
    (event,) = recorded(lambda: dist.all_reduce_coalesced(tensors))
    assert event.input_shapes == [[2], [3]]
    assert all(x[0] == size for x in tensors)


def check_messages_are_events(rank, size):
    x, y = torch.ones(5), torch.zeros(5)

    def ring():
        sending = dist.isend(x, (rank + 1) % size)
        dist.recv(y, (rank - 1) % size)
        sending.wait()

    assert sorted(event.name for event in recorded(ring)) == ["unisono:recv", "unisono:send"]
    assert torch.equal(x, y)


def check_a_refused_call_leaves_the_profiler_well(rank, size):
    def wrong():
        with pytest.raises(TypeError, match="layout"):
            dist.broadcast(torch.ones(2).to_sparse(), 0)
        dist.barrier()

    assert [event.name for event in recorded(wrong)] == ["unisono:barrier"]


def check_a_name_can_be_given(rank, size):
    with torch.autograd.profiler.profile() as seen, dist.record_comm("the weights"):
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    assert {"the weights", "unisono:all_reduce"} <= {event.name for event in seen.function_events}
    assert len(recorded(lambda: dist.all_reduce(torch.ones(2)))) == 1
