"""What a rank does with virtual GPUs, and what it must see. Run by test_virtual.py.

`gpu_cases.py CASE [ARGUMENT]`: a case is a function.
"""

import itertools
import os
import sys

import torch
import torch.distributed as dist

from unisono import virtual
from unisono.torch import registration
from unisono.torch_internals.hooks import have_hooks

MIB = 1 << 20


def each_rank_has_a_gpu() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    x = torch.ones(3).cuda()
    dist.all_reduce(x)
    assert x.device.index == rank, x
    assert x.tolist() == [4.0] * 3, x
    assert torch.cuda.device_count() == dist.get_world_size() == 4
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        assert "No backend type associated with device type cpu" in str(error)
        print("refused")
    dist.destroy_process_group()


def split_with_hooks() -> None:
    """A group whose calls pass PyTorch's dispatcher, as with a flight recorder: its parts work, too."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    if have_hooks():
        dist.group.WORLD.register_abort_hook(1, lambda: None)
    for group in (dist.group.WORLD, dist.split_group(split_ranks=[[0, 1], [2, 3]])):
        out = torch.zeros(group.size(), device="cuda")
        dist.all_gather_into_tensor(out, torch.full((1,), float(rank), device="cuda"), group)
        first = rank // group.size() * group.size()
        assert out.tolist() == [float(i) for i in range(first, first + group.size())], out
    dist.destroy_process_group()


def both_devices(backend: str) -> None:
    dist.init_process_group(backend)
    for device in ("cpu", f"cuda:{dist.get_rank()}"):
        x = torch.ones(3, device=device)
        dist.all_reduce(x)
        assert x.tolist() == [2.0] * 3, x


def over_gloo() -> None:
    """Every call of a group named "gloo". PyTorch's own Gloo takes them in a build with CUDA only."""
    registration.replace_gloo()  # as in a CPU build, where some of these calls end by SIGSEGV
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    assert dist.get_backend() == "gloo"
    for group in (dist.group.WORLD, dist.new_group([0, 1], backend="gloo")):
        for device, dtype in itertools.product(("cpu", "cuda"), (torch.float32, torch.int16, torch.float16)):
            mine = torch.full((2,), rank + 1, device=device, dtype=dtype)
            x, row = mine.clone(), torch.zeros(4, device=device, dtype=dtype)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [3, 3]
            dist.reduce_scatter(x[:1], list(mine.split(1)), group=group)
            assert x.tolist() == [3, 3]
            dist.all_gather(list(row.split(2)), mine, group=group)
            assert row.tolist() == [1, 1, 2, 2]
            dist.all_to_all_single(x, mine, group=group)
            assert x.tolist() == [1, 2]
            dist.broadcast(x.copy_(mine), 1, group=group)
            assert x.tolist() == [2, 2]
            dist.all_reduce(row.view(2, 2)[:, 1], dist.ReduceOp.MAX, group=group)  # NCCL refuses it
            dist.reduce(x.copy_(mine), 0, group=group)
            dist.scatter(x, list(row.split(2)) if rank == 0 else None, group=group)
            assert x.tolist() == [[1, 1], [2, 2]][rank]
            dist.send(mine, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)
        dist.barrier(group)
    assert isinstance(dist.new_group([0, 1], backend="cpu:gloo"), dist.ProcessGroup)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).cuda())
    model(torch.full((1, 2), rank + 1.0).cuda()).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
    dist.destroy_process_group()


def lists_as_one() -> None:
    """NCCL takes a list of equal tensors that are not one per rank as one tensor."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    whole, mine = torch.arange(8.0).cuda(), torch.tensor([2.0 * rank, 2.0 * rank + 1]).cuda()
    for given in ([whole], [*whole.view(2, 4)], [*whole.view(8, 1)], [*whole.view(4, 2).t()]):
        scattered = torch.zeros(2).cuda()
        dist.reduce_scatter(scattered, given)
        flat = torch.cat([x.reshape(-1) for x in given])
        assert scattered.equal(4 * flat.view(4, 2)[rank]), (given, scattered)
    later = dist.reduce_scatter(scattered, [whole], op=dist.ReduceOp.AVG, async_op=True)
    later.wait()
    assert scattered.equal(mine), scattered
    for count in (1, 2, 8):
        got = [torch.zeros(8 // count).cuda() for _ in range(count)]
        work = dist.all_gather(got, mine, async_op=True)
        work.wait()
        assert torch.cat(got).equal(whole), got
    strided = torch.zeros(4, 2).cuda().t()
    dist.all_gather([strided], mine)
    assert strided.equal(whole.view(2, 4)), strided
    try:
        dist.reduce_scatter(scattered, [whole[:6].clone()])
    except ValueError as error:
        print("refused", error)
    dist.destroy_process_group()


def books() -> None:
    cuda = torch.cuda
    x = torch.ones(10, device="cuda")  # a block of 512 bytes of a segment of 2 MiB
    assert (cuda.memory_allocated(), cuda.memory_reserved()) == (512, 2 * MIB)
    y = torch.ones(1 << 20, device="cuda")  # 4 MiB of a segment of 20 MiB
    assert (cuda.memory_allocated(), cuda.memory_reserved()) == (512 + 4 * MIB, 22 * MIB)
    z = torch.ones(3 << 20, device="cuda")  # 12 MiB: fits into what is left of it
    assert cuda.memory_reserved() == 22 * MIB
    del y, z
    assert (cuda.memory_allocated(), cuda.max_memory_allocated()) == (512, 512 + 16 * MIB)
    stats = cuda.memory_stats()
    assert stats["allocation.all.allocated"] == 3
    assert stats["segment.large_pool.current"] == 1
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    assert (cuda.memory_reserved(), cuda.max_memory_allocated()) == (2 * MIB, 512)
    free, total = cuda.mem_get_info()
    assert (total, total - free) == (256 * MIB, 2 * MIB)
    assert "PyTorch CUDA memory summary" in cuda.memory_summary()
    assert x.sum() == 10  # it was there until here


def histogram() -> None:
    """`histc` counts integers, too, as routers of experts do; floats as on the CPU."""
    torch.manual_seed(1)
    chosen = torch.randint(0, 6, (40,))
    expected = torch.bincount(chosen, minlength=6)
    for dtype in (torch.int32, torch.int64, torch.uint8):
        got = torch.histc(chosen.cuda().to(dtype), bins=6, min=0, max=5)
        assert got.is_cuda, got
        assert got.dtype == dtype, got
        assert got.cpu().long().equal(expected), (got, expected)
    values = torch.randn(500)
    for limits in ((0, 0), (-1, 2), (5, 6), (values[0].item(),) * 2):
        assert torch.histc(values.cuda(), 7, *limits).cpu().equal(torch.histc(values, 7, *limits)), limits
    assert torch.histc(torch.ones(3).cuda(), 4).cpu().equal(torch.histc(torch.ones(3), 4))


def swapped() -> None:
    """A model whose parameters are swapped to the host trains as one that is not; copies have a stream."""
    import torch.distributed as dist
    from torch import nn

    import unisono.parallel as up
    from unisono.parallel import spill

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:unisono,cuda:nccl")
    found, write, streams = [], spill.Host.write, []

    def noted(store: spill.Host, key: spill.Key, tensor: torch.Tensor) -> None:
        streams.append(torch.cuda.current_stream())
        write(store, key, tensor)

    spill.Host.write = noted
    for swap, stream in ((None, None), ("memory", None), ("memory", torch.cuda.Stream())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).cuda()
        run = up.parallelize(
            model,
            up.Plan(data=2, swap=swap),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
            loss=nn.functional.mse_loss,
        )
        batch = torch.ones(8, 16).cuda(), torch.ones(8, 4).cuda()
        with torch.cuda.stream(stream):
            streams.clear()
            found.append([run.step(batch) for _ in range(4)])
            assert len({*streams} - {torch.cuda.current_stream()}) == (swap is not None), streams
    for others in found[1:]:
        assert max(abs(one - other) for one, other in zip(found[0], others, strict=True)) < 1e-5, found
    dist.destroy_process_group()


def ctc() -> None:
    """Loss and gradient of `ctc_loss` are the CPU's, wherever the lengths are."""
    torch.manual_seed(1)
    scores, targets = torch.randn(9, 3, 5), torch.randint(1, 5, (3, 4))
    lengths = (torch.tensor([9, 8, 7]), torch.tensor([4, 3, 2]))
    loss = torch.nn.functional.ctc_loss
    for reduction in ("mean", "sum", "none"):
        for flat in (False, True):
            labels = (
                torch.cat([row[:n] for row, n in zip(targets, lengths[1], strict=True)]) if flat else targets
            )
            for place in (torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.int, torch.Tensor.tolist):
                cpu, gpu = scores.clone().requires_grad_(), scores.cuda().requires_grad_()
                expected = loss(cpu.log_softmax(2), labels, *lengths, reduction=reduction, zero_infinity=True)
                expected.sum().backward()
                there = [place(each) for each in lengths]
                got = loss(gpu.log_softmax(2), labels.cuda(), *there, reduction=reduction, zero_infinity=True)
                got.sum().backward()
                assert got.is_cuda, got
                assert got.cpu().equal(expected), (got, expected)
                assert gpu.grad.cpu().equal(cpu.grad), (gpu.grad, cpu.grad)


def stream_waits() -> None:
    x, s = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(s)
    assert x.sum().item() == 4


def flags() -> None:
    assert torch.cuda.mem_get_info(0)[1] == 1 << 30
    settings = virtual.enabled()
    assert settings.check_streams
    assert not settings.poison
    assert torch.empty(1000, device="cuda").isnan().sum() < 1000
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.get_device_properties(0).pci_bus_id == 4  # the machine's number 3


def hidden() -> None:
    print("sees", torch.cuda.device_count(), torch.cuda.is_available())


def half_precision() -> None:
    """Products in f16 are those in f32, rounded once; also in place, into a tensor, and with gradients."""
    torch.manual_seed(0)
    a, b, c = (torch.randn(24, 24, device="cuda").half() for _ in range(3))
    image, weight = (
        torch.randn(2, 3, 8, 8, device="cuda").half(),
        torch.randn(4, 3, 3, 3, device="cuda").half(),
    )
    batches = [x.view(2, 12, 24) for x in (a, b)]
    calls = {
        "mm": (torch.mm, a, b),
        "addmm": (torch.addmm, c, a, b),
        "linear": (torch.nn.functional.linear, a, b, c[0]),
        "bmm": (torch.bmm, batches[0], batches[1].mT),
        "mv": (torch.mv, a, b[0]),
        "convolution": (torch.nn.functional.conv2d, image, weight),
    }
    for name, (call, *given) in calls.items():
        leaves = [x.detach().requires_grad_() for x in given]
        wide = [x.detach().float().requires_grad_() for x in given]
        got, expected = call(*leaves), call(*wide)
        assert got.dtype == torch.float16, name
        assert got.equal(expected.half()), (name, (got - expected).abs().max())
        got.sum().backward()
        expected.sum().backward()
        assert all(x.grad.equal(w.grad.half()) for x, w in zip(leaves, wide, strict=True)), name
    into = torch.empty(0, device="cuda", dtype=torch.float16)
    assert torch.mm(a, b, out=into) is into
    assert into.equal(a @ b)
    in_place = c.clone()
    assert in_place.addmm_(a, b) is in_place
    assert in_place.equal(torch.addmm(c, a, b))
    try:
        a @ b.float()
    except RuntimeError as error:
        assert "same dtype" in str(error), error
        print("refused")


def poison_says_so() -> None:
    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        (torch.zeros(2, device="cuda") / 0).tolist()
        assert not seen, seen
        torch.empty(3, device="cuda").mean().item()
        torch.empty(3, device="cuda", dtype=torch.float16).tolist()
    assert ["read before it was written" in str(each.message) for each in seen] == [True], seen


def refused_by_the_host() -> None:
    """Memory that the host does not give is out of memory, and counts nothing afterwards."""
    import resource

    x = torch.ones(1 << 20, device="cuda")
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    before = torch.cuda.memory_allocated()
    for ask in (lambda: torch.empty(40 << 30, device="cuda", dtype=torch.uint8), lambda: x.repeat(10_000)):
        try:
            ask()
        except torch.OutOfMemoryError as error:
            assert "out of memory" in str(error), error
            print("refused")
        assert torch.cuda.memory_allocated() == before, torch.cuda.memory_stats()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < 1 << 30


def sees_late(visible: str, expected: str) -> None:
    """CUDA_VISIBLE_DEVICES counts until the first use of CUDA, by number or UUID; later it does not."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    assert torch.cuda.device_count() == 1
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    found = [torch.cuda.get_device_properties(i).pci_bus_id - 1 for i in range(torch.cuda.device_count())]
    assert str(found) == expected, found
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    assert str(torch.cuda.device_count()) == str(len(found))


def old_code() -> None:
    """TorchScript's fuser compiles nothing for a GPU; a history of memory is taken; Triton has a driver."""
    torch._C._jit_override_can_fuse_on_gpu(True)  # as Megatron
    script = torch.jit.trace(lambda x: x * x + torch.tanh(x), torch.ones(4, device="cuda"))
    for _ in range(4):
        x = torch.ones(4, device="cuda", requires_grad=True)
        script(x).sum().backward()
        assert torch.allclose(x.grad, 3 - torch.tanh(x).square())
    torch.cuda.memory._record_memory_history()
    torch.cuda.memory._dump_snapshot("/dev/null")


def profiled() -> None:
    """The profiler has events of the GPU; each use of the driver is an error of ours."""
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(64, 64, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        x @ x
    assert any(event.device_time_total > 0 for event in seen.key_averages()), seen.key_averages()
    for old in (torch.autograd.profiler.profile(use_device="cuda"), torch.autograd.profiler.emit_nvtx()):
        with old:
            x @ x
    from torch.utils import cpp_extension

    uses = (
        lambda: x.untyped_storage()._share_cuda_(),  # a tensor in a queue of processes
        lambda: torch.cuda._compile_kernel("", "kernel"),
        lambda: cpp_extension.load_inline("kernels", "", cuda_sources="__global__ void f() {}"),
        torch.cuda.list_gpu_processes,
    )
    for use in uses:
        try:
            use()
        except RuntimeError as error:
            assert "not on a virtual GPU" in str(error), error
            print("refused")


def starts_its_ranks(port: str) -> None:
    """Without a launcher's variables it starts the other rank; both share the devices' memory."""
    import subprocess

    rank, child = int(os.environ.get("LOCAL_RANK", 0)), None
    if "LOCAL_RANK" not in os.environ:
        assert "WORLD_SIZE" not in os.environ, os.environ
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        child = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=torch.cuda.device_count())
    x = torch.ones(1 << 22, device="cuda")
    dist.all_reduce(x)
    assert x[0].item() == 2
    free, total = torch.cuda.mem_get_info(1 - rank)
    assert total - free >= 16 << 20, (free, total)
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert [int(each) >= 16 for each in used] == [True, True], used
    dist.barrier()
    dist.destroy_process_group()
    print("rank", rank, "ends", flush=True)
    assert child is None or child.wait() == 0


def forks_after_use() -> None:
    torch.ones(1, device="cuda")
    if os.fork() == 0:
        try:
            torch.ones(1, device="cuda")
        except RuntimeError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
