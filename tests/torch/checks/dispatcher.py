"""What PyTorch's dispatcher does around collectives (2.14 and later): hooks, modes, operators in profiles.

Also what its groups offer and ours do not.
"""

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from unisono.errors import GroupError
from unisono.torch.unsupported import UNSUPPORTED

HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")


def needs(method):
    if not hasattr(dist.ProcessGroup, method):
        pytest.skip(f"this PyTorch has no ProcessGroup.{method}")


def everything(group, rank, size):
    """Call every collective of a group of two or three ranks; the operations that a hook should see."""
    x, parts = torch.ones(4), [torch.zeros(4) for _ in range(size)]
    here = group.rank() == 0
    dist.all_reduce(x, group=group)
    assert x[0] == size
    dist.all_reduce(x, group=group, async_op=True).wait()
    assert x[0] == size * size
    dist.broadcast(x, group_src=0, group=group)
    dist.reduce(x, group_dst=0, group=group)
    dist.all_gather(parts, torch.ones(4), group=group)
    dist.gather(torch.ones(4), parts if here else None, group_dst=0, group=group)
    dist.scatter(x, parts if here else None, group_src=0, group=group)
    dist.reduce_scatter(x, parts, group=group)
    dist.all_to_all(parts, [torch.full((4,), float(rank))] * size, group=group)
    assert [part[0].item() for part in parts] == list(range(size))
    dist.all_to_all_single(torch.zeros(size), torch.ones(size), group=group)
    dist.barrier(group=group)
    if here:
        dist.send(x, group_dst=1, group=group)
    elif group.rank() == 1:
        dist.recv(x, group_src=0, group=group)
    names = "ALLREDUCE ALLREDUCE BROADCAST REDUCE ALLGATHER GATHER SCATTER REDUCE_SCATTER ALLTOALL"
    transfer = {0: ["SEND"], 1: ["RECV"]}.get(group.rank(), [])
    return [*names.split(), "ALLTOALL", "BARRIER", *transfer]


def check_hooks_are_called_around_every_call(rank, size):
    needs("register_pre_hook")
    group = dist.new_group()
    before, after = [], []
    group.register_pre_hook(7, lambda args: before.append((args.name.name.removesuffix("_BASE"), args.op_id)))
    group.register_post_hook(8, lambda args: after.append((args.name.name.removesuffix("_BASE"), args.op_id)))
    expected = everything(group, rank, size)
    assert [name for name, _ in before] == expected
    assert after == before
    assert [number for _, number in before] == list(range(len(expected)))
    group.unregister_pre_hook(7)
    group.unregister_post_hook(8)
    everything(group, rank, size)
    assert len(before) == len(after) == len(expected)


def check_a_hook_sees_the_tensors_and_can_stop_a_call(rank, size):
    needs("register_pre_hook")
    group = dist.new_group()
    seen = []

    def hook(args):
        seen.append([x.tolist() for x in args.input_tensors])
        if args.input_tensors and args.input_tensors[0].numel() == 2:
            raise RuntimeError("not two")

    group.register_pre_hook(0, hook)
    dist.all_reduce(torch.full((1,), float(rank)), group=group)
    assert seen == [[[float(rank)]]]
    with pytest.raises(RuntimeError, match="not two"):
        dist.all_reduce(torch.ones(2), group=group)
    x = torch.ones(3)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.result()[0] is x
    assert x[0] == size


def check_hooks_of_one_group_leave_the_others_alone(rank, size):
    needs("register_pre_hook")
    hooked, plain = dist.new_group(), dist.new_group()
    seen = []
    hooked.register_pre_hook(0, seen.append)
    dist.all_reduce(torch.ones(1), group=plain)
    dist.all_reduce(torch.ones(1))
    assert not seen
    assert type(plain) is not type(hooked)
    assert isinstance(hooked, type(plain))


def check_ddp_and_objects_pass_the_hooks(rank, size):
    needs("register_pre_hook")
    group = dist.new_group()
    seen = []
    group.register_pre_hook(0, lambda args: seen.append(args.name.name))
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    net(torch.ones(1, 3) * rank).sum().backward()
    assert torch.allclose(net.module.weight.grad, torch.full((2, 3), (size - 1) / 2))
    assert seen[-1] == "ALLREDUCE"
    got = [None] * size
    dist.all_gather_object(got, {"rank": rank}, group=group)
    assert got == [{"rank": each} for each in range(size)]


def check_nan_check(rank, size):
    needs("register_pre_hook")
    group = dist.new_group()
    check = c10d.NanCheckHook.attach(group)
    dist.all_reduce(torch.ones(3), group=group)
    with pytest.raises(RuntimeError, match="NaN"):
        dist.all_reduce(torch.tensor([1.0, float("nan")]), group=group)
    with pytest.raises(RuntimeError, match="NaN"):
        dist.all_gather([torch.zeros(1)] * size, torch.tensor([float("nan")]), group=group)
    check.remove()
    x = torch.tensor([float("nan")])
    dist.all_reduce(x, group=group)
    assert x.isnan().all()


def check_abort_hooks_run_once_when_a_call_fails(rank, size):
    needs("register_pre_hook")
    group = dist.new_group()
    ran = []
    group.register_abort_hook(2, lambda: ran.append("second"))
    group.register_abort_hook(1, lambda: ran.append("first"))
    group.register_abort_hook(3, lambda: ran.append("never"))
    group.unregister_abort_hook(3)
    with pytest.raises(GroupError):
        dist.all_reduce(torch.ones(1 + rank), group=group)
    assert ran == ["first", "second"]
    assert group.get_error() == c10d.ErrorType.COMM_ERROR
    group.abort()
    assert ran == ["first", "second"]


def check_an_error_of_a_healthy_group_is_success(rank, size):
    assert dist.group.WORLD.get_error() == c10d.ErrorType.SUCCESS


def check_hooks_of_an_older_pytorch_are_refused_in_words(rank, size):
    if HAS_HOOKS:
        return
    with pytest.raises(NotImplementedError, match=r"have no hooks.*2\.14"):
        dist.group.WORLD.register_pre_hook(0, print)


def check_what_is_missing_says_so(rank, size):
    group = dist.group.WORLD
    for name in UNSUPPORTED:
        with pytest.raises(NotImplementedError, match=f"no {name}: "):
            getattr(group, name)()
    with pytest.raises(NotImplementedError, match="no mem_allocator"):
        _ = group.mem_allocator
    if hasattr(dist, "_supports_window"):
        assert not dist._supports_window()
        with pytest.raises(NotImplementedError, match="one-sided"):
            dist._new_window(torch.ones(1))


def check_gather_single(rank, size):
    needs("gather_single")
    for group in (dist.group.WORLD, hooked()):
        for shape in ((size * 3,), (size, 3)):
            out = torch.zeros(shape) if rank == 0 else None
            dist.gather_single(torch.full((3,), float(rank)), out, group=group)
            assert rank or out.view(size, 3)[:, 0].tolist() == list(range(size))
        work = dist.gather_single(torch.full((3,), 2.0), out, group=group, async_op=True)
        work.wait()
        assert rank or out.sum() == 6 * size


def check_gather_single_into_a_wrong_output(rank, size):
    needs("gather_single")
    group = dist.group.WORLD
    if rank == 0:
        for wrong in (torch.zeros(size * 3 + 1), torch.zeros(3, size).t()[:, :3]):
            with pytest.raises(ValueError, match="gather_single"):
                group.gather_single(wrong, torch.ones(3))


def hooked():
    group = dist.new_group()
    if HAS_HOOKS:  # the next check is theirs
        group.register_pre_hook(0, lambda args: None)
    return group


def check_get_backend_impl(rank, size):
    if hasattr(dist, "get_backend_impl"):
        assert dist.get_backend_impl(device=torch.device("cpu")) is dist.group.WORLD
    dist.group.WORLD.set_timeout(dist.group.WORLD.options._timeout)


def check_a_work_knows_its_number(rank, size):
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    first, second = (work._get_sequence_number() for work in works)
    assert second == first + 1
    dist.all_reduce(torch.ones(1))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    assert work._get_sequence_number() == second + 2


class Operators(TorchDispatchMode):
    """Notes the operators of c10d that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "c10d":
            self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


def check_a_mode_sees_the_calls_that_it_sees_of_gloo(rank, size):
    needs("register_pre_hook")
    seen = []
    for backend in ("gloo", None):
        group = dist.new_group(backend=backend)
        with Operators() as operators:
            everything(group, rank, size)
        seen.append(operators.seen)
        everything(group, rank, size)
        assert operators.seen == seen[-1]
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 12
    with Operators() as operators:  # with an argument that PyTorch's method does not have
        group.allgather([[torch.zeros(1) for _ in range(size)]], [torch.ones(1)], None, None).wait()
    assert operators.seen == ["c10d.allgather_.default"]


def check_a_profile_has_the_operators_that_it_has_of_gloo(rank, size):
    needs("register_pre_hook")
    seen = []
    for backend in ("gloo", None):
        group = dist.new_group(backend=backend)
        with torch.autograd.profiler.profile() as profile:
            everything(group, rank, size)
        seen.append([event.name for event in profile.function_events if event.name.startswith("c10d::")])
    assert seen[0] == seen[1]


def check_modes_count_what_training_communicates(rank, size):
    needs("register_pre_hook")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with CommDebugMode() as counted:
        model(torch.ones(1, 2)).sum().backward()
    assert counted.get_comm_counts() == {torch.ops.c10d.allreduce_: 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def check_a_trace_without_its_collectives_is_refused_as_over_gloo(rank, size):
    needs("register_pre_hook")

    def summed(x):
        dist.all_reduce(x)
        return x * 2

    summed(torch.ones(2))
    with pytest.raises(RuntimeError, match="Tried to trace .*ProcessGroup"):
        torch.jit.trace(summed, torch.ones(2), check_trace=False)


def check_a_fake_tensor_communicates_nothing(rank, size):
    needs("register_pre_hook")
    before = dist.group.WORLD._get_sequence_number_for_group()
    with FakeTensorMode():
        x = torch.ones(3)
        dist.all_reduce(x)
        dist.all_gather([torch.ones(3) for _ in range(size)], x, async_op=True).wait()
    assert dist.group.WORLD._get_sequence_number_for_group() == before
    assert x.shape == (3,)
