"""`torch.use_deterministic_algorithms` on a virtual GPU: what it refuses, in PyTorch's words, and accepts.

Every case takes a device. The CPU accepts all of them. Run by test_virtual.py.
"""

import warnings
from collections.abc import Callable

import torch
from torch.nn import functional

Case = Callable[[str], object]
SAYS = " does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True"
REFUSED: dict[str, list[Case]] = {}
ACCEPTED: list[Case] = []
pools = torch._C._nn


def refused(kernel: str) -> Callable[[Case], Case]:
    def register(case: Case) -> Case:
        REFUSED.setdefault(kernel, []).append(case)
        return case

    return register


def accepted(case: Case) -> Case:
    ACCEPTED.append(case)
    return case


def leaf(device: str, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, device=device).requires_grad_()


def backward(kernel: str, shape: tuple[int, ...], forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Add a case: the forward is accepted, and the backward is refused."""
    refused(kernel)(lambda device: forward(leaf(device, *shape)).sum().backward())


def zeros(device: str, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long, device=device)


PLANES, VOLUMES = (1, 2, 4, 4), (1, 2, 4, 4, 4)
backward("adaptive_avg_pool2d_backward_cuda", PLANES, torch.nn.AdaptiveAvgPool2d(2))
backward("adaptive_avg_pool3d_backward_cuda", VOLUMES, torch.nn.AdaptiveAvgPool3d(2))
backward("adaptive_max_pool2d_backward_cuda", PLANES, torch.nn.AdaptiveMaxPool2d(2))
backward("avg_pool3d_backward_cuda", VOLUMES, torch.nn.AvgPool3d(2))
backward("max_pool3d_with_indices_backward_cuda", VOLUMES, lambda x: pools.max_pool3d_with_indices(x, 2)[0])
backward("fractional_max_pool2d_backward_cuda", PLANES, torch.nn.FractionalMaxPool2d(2, output_size=2))
backward("fractional_max_pool3d_backward_cuda", VOLUMES, torch.nn.FractionalMaxPool3d(2, output_size=2))
backward("reflection_pad1d_backward_out_cuda", (1, 2, 4), torch.nn.ReflectionPad1d(1))
backward("reflection_pad3d_backward_out_cuda", VOLUMES, torch.nn.ReflectionPad3d(1))
backward("replication_pad1d_backward_cuda", (1, 2, 4), lambda x: pools.replication_pad1d(x, [1, 1]))
backward("replication_pad2d_backward_cuda", PLANES, lambda x: pools.replication_pad2d(x, [1] * 4))
backward("replication_pad3d_backward_cuda", VOLUMES, lambda x: pools.replication_pad3d(x, [1] * 6))
for _mode in ("bilinear", "bicubic"):
    backward(
        f"upsample_{_mode}2d_aa_backward_out_cuda",
        PLANES,
        lambda x, mode=_mode: functional.interpolate(x, size=(2, 2), mode=mode, antialias=True),
    )
# PyTorch's `interpolate` takes other operations for some modes: more in every version.
for _name, _shape in (
    ("upsample_linear1d", (1, 2, 4)),
    ("upsample_bilinear2d", PLANES),
    ("upsample_bicubic2d", PLANES),
    ("upsample_trilinear3d", VOLUMES),
):
    _upsample, _size = getattr(pools, _name), [8] * (len(_shape) - 2)
    backward(
        f"{_name}_backward_out_cuda",
        _shape,
        lambda x, upsample=_upsample, size=_size: upsample(x, size, False),
    )
for _n, _shape in ((2, PLANES), (3, VOLUMES)):
    backward(
        f"grid_sampler_{_n}d_backward_cuda",
        _shape,
        lambda x, n=_n: functional.grid_sample(x, x.detach()[:, 0, ..., None].expand(*[-1] * (n + 1), n)),
    )
backward(
    "ctc_loss_backward_gpu",
    (5, 1, 3),
    lambda x: functional.ctc_loss(x.log_softmax(2), torch.ones_like(x[:2, 0, 0]).long()[None], (5,), (2,)),
)
backward(
    "embedding_bag_backward_cuda_max",
    (4, 3),
    lambda x: functional.embedding_bag(zeros(str(x.device), 2, 2), x, mode="max"),
)


@refused("nll_loss2d_forward_out_cuda_template")
def losses_of_images(device: str) -> None:
    functional.nll_loss(leaf(device, *PLANES), zeros(device, 1, 4, 4))


@refused("median CUDA with indices output")
def median(device: str) -> None:
    torch.rand(4, 4, device=device).median(0)


@refused("median CUDA with indices output")
def nanmedian(device: str) -> None:
    torch.rand(4, 4, device=device).nanmedian(0)


@refused("_histc_cuda with floating point input")
def histc(device: str) -> None:
    torch.histc(torch.rand(4, device=device))


@refused("_bincount_cuda")
def bincount(device: str) -> None:
    torch.bincount(zeros(device, 3), weights=torch.rand(3, device=device))


@refused("put_")
def puts_and_adds(device: str) -> None:
    torch.rand(4, device=device).put_(zeros(device, 2), torch.ones(2, device=device), accumulate=True)


@refused("index_reduce_cuda")
def index_reduce(device: str) -> None:
    torch.rand(4, 4, device=device).index_reduce_(
        0, zeros(device, 2), torch.rand(2, 4, device=device), "amax"
    )


@refused("index_reduce_cuda")
def index_reduce_to_a_new_tensor(device: str) -> None:
    torch.index_reduce(
        torch.rand(4, 4, device=device), 0, zeros(device, 2), torch.rand(2, 4, device=device), "prod"
    )


@refused("scatter_reduce_cuda_kernel")
def scatter_multiplies(device: str) -> None:
    x = torch.rand(4, device=device)
    x.scatter_(0, zeros(device, 2), torch.rand(2, device=device), reduce="multiply")


@refused("scatter_reduce_cuda_prod_")
def scatter_reduces_to_a_product(device: str) -> None:
    torch.rand(4, device=device).scatter_reduce(0, zeros(device, 2), torch.rand(2, device=device), "prod")


@accepted
def matrix_products(device: str) -> None:
    x = leaf(device, 3, 3)
    (x @ x).sum().backward()
    torch.bmm(x[None], x[None])


@accepted
def scans_and_selections(device: str) -> None:
    x = torch.rand(4, 4, device=device)
    x.cumsum(0), x.kthvalue(2, 0), x.median(), x.sort(0), x.topk(2)
    torch.bincount(x.int().view(-1))


@accepted
def scatters_and_indices(device: str) -> None:
    x, i, y = torch.rand(4, device=device), zeros(device, 2), torch.rand(2, device=device)
    x.scatter_add(0, i, y), x.index_add(0, i, y), x.index_put((i,), y, accumulate=True)
    (
        x.scatter(0, i, y),
        x.scatter(0, i, y, reduce="add"),
        x.scatter_reduce(0, i, y, "sum"),
        x.scatter_reduce(0, i, y, "amax"),
    )
    x.requires_grad_().gather(0, i).sum().backward()
    x[i].sum().backward()


@accepted
def padding_and_resizing(device: str) -> None:
    functional.pad(leaf(device, *PLANES), (1, 1, 1, 1), mode="replicate").sum().backward()
    functional.pad(leaf(device, *PLANES), (1, 1, 1, 1), mode="reflect").sum().backward()
    functional.interpolate(leaf(device, *PLANES), scale_factor=2, mode="bilinear").sum().backward()
    functional.interpolate(leaf(device, *PLANES), scale_factor=2, mode="nearest").sum().backward()
    functional.nll_loss(leaf(device, *PLANES), zeros(device, 1, 4, 4), reduction="none").sum().backward()
    functional.embedding_bag(zeros(device, 2, 2), leaf(device, 4, 3), mode="sum").sum().backward()


@accepted
def layers(device: str) -> None:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    )
    out = net.to(device)(leaf(device, *PLANES))
    functional.cross_entropy(out.flatten(1), zeros(device, 1)).backward()
    head = torch.nn.MultiheadAttention(4, 2, batch_first=True).to(device)
    x = torch.nn.Embedding(8, 4).to(device)(zeros(device, 2, 3))
    head(x, x, x)[0].sum().backward()


def max_pool3d(device: str) -> None:
    torch.nn.MaxPool3d(2, return_indices=True)(leaf(device, *VOLUMES))[0].sum().backward()


# The docstring's first list: operations that become deterministic. PyTorch 2.13 added this one, with indices.
BECOME, _, _ = str(torch.use_deterministic_algorithms.__doc__).partition("operations will throw a")
if "`torch.nn.MaxPool3d`" in BECOME:
    accepted(max_pool3d)
else:
    refused("max_pool3d_with_indices_backward_cuda")(max_pool3d)


def raised(case: Case, device: str) -> str:
    """Return what it raises; "" if it runs."""
    try:
        case(device)
    except RuntimeError as error:
        return str(error)
    return ""


def refuses_what_a_gpu_refuses() -> None:
    torch.use_deterministic_algorithms(True)
    for kernel, cases in REFUSED.items():
        for case in cases:
            text = raised(case, "cuda")
            assert text.startswith(kernel + SAYS + ")"), f"{kernel}: {text or 'nothing raised'}"
            assert kernel == "put_" or not raised(case, "cpu"), kernel


def warns_once() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kernel, cases in REFUSED.items():
        for case in cases:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                assert not raised(case, "cuda"), kernel
            texts = [str(each.message) for each in seen]
            assert sum(text.startswith(kernel + SAYS) for text in texts) == 1, (kernel, texts)


def raises_nothing_without_it() -> None:
    for kernel, cases in REFUSED.items():
        for case in cases:
            assert not raised(case, "cuda"), kernel


def accepts_the_rest() -> None:
    torch.use_deterministic_algorithms(True)
    for case in ACCEPTED:
        for device in ("cuda", "cpu"):
            assert not raised(case, device), (case, device, raised(case, device))


def raises_on_the_cpu_too() -> None:
    """These kernels raise on both devices: once each, in the same words."""
    torch.use_deterministic_algorithms(True)
    for device in ("cuda", "cpu"):
        x, i = torch.rand(1, 1, 2, 2, device=device), zeros(device, 1, 1, 2, 2)
        text = raised(lambda _, x=x, i=i: functional.max_unpool2d(x, i, 2), device)
        assert text.startswith("max_unpooling2d_forward_out" + SAYS), text
        text = raised(lambda _, x=x, i=i: x.put_(i, x), device)
        assert text.startswith("put_" + SAYS), text


def fills_new_memory() -> None:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8, device="cuda").isnan().all()
    for dtype in (torch.int64, torch.int32, torch.uint8):
        new = torch.empty(8, dtype=dtype, device="cuda")
        assert (new == torch.iinfo(dtype).max).all(), new
        new = torch.empty_strided((2, 2), (1, 2), dtype=dtype, device="cuda")
        assert (new == torch.iinfo(dtype).max).all(), new


def main() -> None:
    for check in (
        raises_nothing_without_it,
        refuses_what_a_gpu_refuses,
        warns_once,
        accepts_the_rest,
        raises_on_the_cpu_too,
        fills_new_memory,
    ):
        check()
        torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    main()
