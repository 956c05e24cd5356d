"""Operations that PyTorch has for CUDA only, composed of others: SyncBatchNorm's, fused cells, dropout.

Formulas: Ioffe and Szegedy 2015 (batch norm), Hochreiter and Schmidhuber 1997 (LSTM), Cho et al. 2014 (GRU).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from unisono.torch_internals import inductor

from . import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


def _others(x: Tensor) -> list[int]:
    """Return all dimensions except the channels."""
    return [d for d in range(x.dim()) if d != 1]


def _shaped(vector: Tensor, x: Tensor) -> Tensor:
    """Reshape a value per channel to dimension 1 of x."""
    return vector.view([-1 if d == 1 else 1 for d in range(x.dim())])


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / standard deviation per channel."""
    variance, mean = torch.var_mean(_wide(x), _others(x), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Combine the statistics of several ranks, one row each; update the running ones."""
    n = counts.to(mean.dtype).view(-1, 1)
    total = n.sum()
    together = (mean * n).sum(0) / total
    variance = ((invstd.pow(-2) - eps + (mean - together).square()) * n).sum(0) / total
    if running_mean is not None:
        running_mean.lerp_(together.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    return together, (variance + eps).rsqrt()


def batch_norm_gather_stats(x: Tensor, mean: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Combine the statistics of ranks with equally many elements: the last argument."""
    counts = torch.full((mean.shape[0],), rest[-1], device=mean.device)
    return batch_norm_gather_stats_with_counts(x, mean, *rest[:-1], counts)  # type: ignore[call-arg]


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Normalize."""
    result = (_wide(x) - _shaped(mean, x)) * _shaped(invstd, x)
    if weight is not None:
        result = result * _shaped(weight, x)
    if bias is not None:
        result = result + _shaped(bias, x)
    return result.to(x.dtype)


def batch_norm_elemt_out(*args: Any, out: Tensor) -> Tensor:
    """Normalize into `out`."""
    return out.copy_(batch_norm_elemt(*args))


def batch_norm_backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    of_input: bool,
    of_weight: bool,
    of_bias: bool,
) -> tuple[Tensor | None, ...]:
    """Return this rank's sums, and the gradients of weight and bias."""
    sum_dy = _wide(grad).sum(_others(x))
    sum_dy_xmu = (_wide(grad) * (_wide(x) - _shaped(mean, x))).sum(_others(x))
    dtype = x.dtype if weight is None else weight.dtype
    return (
        sum_dy if of_input else None,
        sum_dy_xmu if of_input else None,
        (sum_dy_xmu * invstd).to(dtype) if of_weight else None,
        sum_dy.to(dtype) if of_bias else None,
    )


def batch_norm_backward_elemt(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    """Return the gradient of the input."""
    total = count.sum().to(mean.dtype)
    along = _shaped(sum_dy_xmu / total * invstd.square(), x)
    result = _wide(grad) - _shaped(sum_dy / total, x) - (_wide(x) - _shaped(mean, x)) * along
    scale = invstd if weight is None else invstd * weight
    return (result * _shaped(scale, x)).to(x.dtype)


def _plus(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def lstm_cell(
    inputs: Tensor, hidden: Tensor, cx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hy, cy, and the activated gates for the backward pass."""
    gates = _plus(inputs, input_bias) + _plus(hidden, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of the gates, of cx and of a bias."""
    i, f, g, o = workspace.chunk(4, 1)
    hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    th = cy.tanh()
    c = hy * o * (1 - th * th)
    if grad_cy is not None:
        c = c + grad_cy
    gates = [c * g * i * (1 - i), c * cx * f * (1 - f), c * i * (1 - g * g), hy * th * o * (1 - o)]
    grad = torch.cat(gates, 1)
    return grad, c * f, grad.sum(0) if has_bias else None


def gru_cell(
    inputs: Tensor, hidden: Tensor, hx: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return hy, and the workspace for the backward pass."""
    ir, iz, inew = _plus(inputs, input_bias).chunk(3, 1)
    hr, hz, hn = _plus(hidden, hidden_bias).chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (inew + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of both gates, of hx and of both biases."""
    r, z, n, hx, hn = workspace.chunk(5, 1)
    new = grad * (1 - z) * (1 - n * n)
    reset = new * hn * r * (1 - r)
    update = grad * (hx - n) * z * (1 - z)
    of_input = torch.cat([reset, update, new], 1)
    of_hidden = torch.cat([reset, update, new * r], 1)
    biases = (of_input.sum(0), of_hidden.sum(0)) if has_bias else (None, None)
    return of_input, of_hidden, grad * z, *biases


def fused_dropout(x: Tensor, p: float, generator: Any = None) -> tuple[Tensor, Tensor]:
    """Keep each element with probability p."""
    mask = torch.empty_like(x, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return x * mask / p, mask


def masked_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the gradient of dropout."""
    return x * mask * scale


def mm_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply in a wider type."""
    return a.to(out_dtype) @ b.to(out_dtype)


def addmm_dtype(
    c: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Multiply and add in a wider type."""
    return c.to(out_dtype) * beta + mm_dtype(a, b, out_dtype) * alpha


def on_host(call: Callable[[list[Any]], Any], inputs: Sequence[Any], gpu: Callable[[int], int]) -> list[Any]:
    """Call a function with tensors of the CPU over the same memory; return its results on their devices.

    Beside the results it takes no memory of a GPU.

    Args:
        gpu: from the number of a result to its GPU; -1: the CPU.
    """
    given = [x for x in inputs if isinstance(x, torch.Tensor)]
    hosts = torch.ops.unisono_virtual.hosts(given)
    each = iter(hosts)
    made = list(call([next(each) if isinstance(x, torch.Tensor) else x for x in inputs]))
    places = [i for i, x in enumerate(made) if isinstance(x, torch.Tensor)]
    results = [made[i] for i in places]
    found = torch.ops.unisono_virtual.devices(given, hosts, results, list(map(gpu, places)))
    for i, x in zip(places, found, strict=True):
        made[i] = x
    return made


def _on_host(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Run a kernel on the CPU, as CUDA's take no memory within themselves."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def call(words: list[Any]) -> Any:
            results = kernel(*words[: len(args)], **dict(zip(kwargs, words[len(args) :], strict=True)))
            return results if isinstance(results, tuple) else (results,)

        device = args[0].device
        made = on_host(
            call, (*args, *kwargs.values()), lambda i: device.index if device.type == "cuda" else -1
        )
        return tuple(made) if len(made) > 1 else made[0]

    return run


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the input and the weight. Source: Zhang and Sennrich 2019."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    normal = _wide(x) * rstd
    scaled = _wide(grad) if weight is None else _wide(grad) * weight
    of_x = (scaled - normal * (scaled * normal).mean(dims, keepdim=True)) * rstd
    of_weight = None
    if weight is not None and mask[1]:
        of_weight = _wide(grad) * normal
        if outer := list(range(x.dim() - len(shape))):  # a sum over no dimensions would be one over all
            of_weight = of_weight.sum(outer)
        of_weight = of_weight.to(weight.dtype)
    return of_x.to(x.dtype) if mask[0] else None, of_weight


def histc(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """Count the elements in each bin, of integers too, which the CPU refuses."""
    if x.is_floating_point():
        torch.ops.unisono_virtual.alert("_histc_cuda with floating point input")
    values = x.flatten().double()
    least, most = (torch.full((), float(each), device=x.device, dtype=values.dtype) for each in (low, high))
    if low == high and x.numel():
        least, most = values.min(), values.max()
    one = least == most
    least, most = torch.where(one, least - 1, least), torch.where(one, most + 1, most)
    place = ((values - least) * bins / (most - least)).floor().long().clamp(0, bins - 1)
    inside = ((values >= least) & (values <= most)).to(values.dtype)
    return torch.zeros(bins, dtype=values.dtype, device=x.device).scatter_add(0, place, inside).to(x.dtype)


def no_library(*args: Any) -> bool:
    """Return False: there is neither cuDNN nor MIOpen, so `ctc_loss` takes PyTorch's own kernel."""
    return False


SAME_NAME = (
    batch_norm_stats, batch_norm_gather_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt,
    batch_norm_backward_reduce, batch_norm_backward_elemt, histc,
)  # fmt: skip
KERNELS: dict[str, Callable[..., Any]] = {
    **{kernel.__name__: kernel for kernel in SAME_NAME},
    "batch_norm_elemt.out": batch_norm_elemt_out,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
    "_fused_dropout": fused_dropout,
    "_masked_scale": masked_scale,
    "mm.dtype": mm_dtype,
    "bmm.dtype": mm_dtype,
    "addmm.dtype": addmm_dtype,
    "baddbmm.dtype": addmm_dtype,
    "_fused_rms_norm_backward": _on_host(rms_norm_backward),
    **{
        f"_use_{name}_ctc_loss{type_}": no_library
        for name in ("cudnn", "miopen")
        for type_ in ("", ".Tensor")
    },
}


def register() -> Any:
    """Register them all, for the lifetime of the returned object.

    Those that the CPU lacks also for the CPU, which runs compiled graphs.
    """
    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    fused = {name: _on_host(kernel) for name, kernel in attention.KERNELS.items()}
    with warnings.catch_warnings():  # a CPU build says that each replaces a kernel: that of the CPU
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in {**KERNELS, **fused}.items():
            base, _, overload = name.partition(".")
            found = getattr(torch.ops.aten, base, None)
            if found is None:  # in another version of PyTorch
                continue
            library.impl(name, kernel, "CUDA")
            if inductor.without_cpu_kernel([getattr(found, overload or "default")]):
                library.impl(name, kernel, "CPU")
    return library
