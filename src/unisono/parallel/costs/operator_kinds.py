"""The class of an operator of PyTorch and its size, as `unisono.planner.operator_costs` prices them."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import harmonic_mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.parallel.graph.containers import tensors_in

__all__ = ["PRICED", "OperatorPoint", "point_of"]


class OperatorPoint(NamedTuple):
    """A class of operators and a size; `kind` "" moves nothing, as a view does. `low`: a type of 16 bits."""

    kind: str
    point: tuple[float, ...] = ()
    low: str = ""


LOW = {torch.bfloat16: "bf16", torch.float16: "fp16"}

HEAVY = {
    "exp", "log", "tanh", "tanh_backward", "sigmoid", "sigmoid_backward", "gelu", "gelu_backward", "silu",
    "silu_backward", "erf", "pow", "sqrt", "rsqrt", "sin", "cos", "log1p", "expm1", "softplus",
    "softplus_backward", "elu", "elu_backward", "mish", "mish_backward", "hardswish", "hardswish_backward",
    "logaddexp", "log_sigmoid_forward", "log_sigmoid_backward", "atan2", "reciprocal",
}  # fmt: skip
ONE_SIZE = {  # operator -> (class, which tensor says how many elements: an argument, or -1: the result)
    **dict.fromkeys(("_softmax", "_log_softmax"), ("softmax", -1)),
    "logsumexp": ("softmax", 0),
    "_softmax_backward_data": ("softmax_backward", 0),
    "_log_softmax_backward_data": ("softmax_backward", 0),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm", "native_group_norm"), ("norm", 0)),
    **dict.fromkeys(
        ("native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward"),
        ("norm_backward", 0),
    ),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), ("batch_norm", 0)
    ),
    **dict.fromkeys(("native_batch_norm_backward", "batch_norm_backward"), ("batch_norm_backward", 0)),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), ("pool", 0)),
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"),
        ("pool_backward", -1),
    ),
    **dict.fromkeys(("embedding", "index_select"), ("embedding", -1)),
    **dict.fromkeys(("index", "gather"), ("index", -1)),
    **dict.fromkeys(
        ("scatter", "scatter_add", "index_add", "index_put", "_index_put_impl_", "sort", "topk"), ("index", 0)
    ),
    "cumsum": ("heavy", -1),
    **dict.fromkeys(("native_dropout", "bernoulli_", "normal_", "uniform_"), ("random", 0)),
    **dict.fromkeys(("bernoulli", "rand", "rand_like", "randn", "randn_like"), ("random", -1)),
}
SUMS = {
    "sum", "mean", "amax", "amin", "max", "min", "norm", "linalg_vector_norm", "var", "var_mean", "std",
    "argmax", "argmin", "any", "all", "prod",
}  # fmt: skip
COPIES = {"clone", "copy_", "_to_copy", "contiguous", "_reshape_copy"}
NOTHING = {
    "detach", "detach_", "alias", "lift_fresh", "empty", "empty_like", "new_empty", "empty_strided",
    "new_empty_strided", "set_", "is_same_size", "sym_size", "nll_loss_forward", "nll_loss_backward",
    "_local_scalar_dense", "resize_", "arange", "scalar_tensor", "_unsafe_view", "_reshape_alias",
}  # fmt: skip


def point_of(op: Any, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> OperatorPoint:
    """The class and size of one call.

    Example: aten.mm of [8, 16] and [16, 4] in f32: ("product", (8, 16, 4)).
    """
    found = _point_of(op, args, named, output)
    floating = (each for each in tensors_in((args, output)) if each.is_floating_point())
    first = next(floating, None)
    return found._replace(low="" if first is None else LOW.get(first.dtype, "")) if found.kind else found


def _point_of(op: Any, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> OperatorPoint:
    name = str(op.overloadpacket).rpartition(".")[2]
    given = [arg for arg in args if isinstance(arg, Tensor)]
    result = next(tensors_in(output), None)
    if name in PRODUCTS or name in CONVOLUTIONS:
        return (PRODUCTS.get(name) or CONVOLUTIONS[name])(given, args, result)
    if name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
        return _attention(given, args, named, backward=name.endswith("backward"))
    if name in NOTHING or _is_view(op):
        return OperatorPoint("")
    if name == "embedding_dense_backward":
        filled = int(args[2]) * given[0].shape[-1]  # with zeros, in one pass of three
        return OperatorPoint("embedding_backward", (float(max(1, given[0].numel() + filled // 3)),))
    for form in (name, name.removesuffix("_")):
        if form in ONE_SIZE:
            kind, place = ONE_SIZE[form]
            sized = result if place < 0 else given[place] if place < len(given) else result
            return OperatorPoint(kind, (float(max(1, 0 if sized is None else sized.numel())),))
    moved = [*given, *tensors_in([arg for arg in args if isinstance(arg, (list, tuple))]), *tensors_in(named)]
    made = list(tensors_in(output)) or _written(op, args)
    nbytes = float(sum(_read(each, made[0]) for each in moved) + sum(map(_nbytes, made))) if made else 1.0
    if name == "_safe_softmax":  # three more operators look for rows without any weight
        return OperatorPoint("light", (3 * nbytes,))
    if name in SUMS:
        return OperatorPoint("sums", (nbytes,))
    if name.removesuffix("_") in HEAVY:
        return OperatorPoint("heavy", (float(max(1, made[0].numel() if made else 1)),))
    if name in COPIES and any(tensor.dim() > 1 and not tensor.is_contiguous() for tensor in given):
        return OperatorPoint("strided", (nbytes,))
    return OperatorPoint("light", (nbytes,))


LINE_BYTES = 64
"""Of memory that is read at once for one element."""

CACHE_BYTES = 32 << 20
"""Of the last cache of a device: what is read again after less than this comes from there."""


def _read(tensor: Tensor, made: Tensor) -> int:
    """What an operator reads of a tensor for a result.

    An element that is next in memory comes from a cache, unless the order of the result has too many others
    before it. Then each element takes a line: a transposed bias that is added to all scores.
    """
    strides, sizes = tensor.stride(), made.shape[made.dim() - tensor.dim() :]
    order = made.stride()[made.dim() - tensor.dim() :]
    fits = len(sizes) == len(strides) and all(a in (1, b) for a, b in zip(tensor.shape, sizes, strict=True))
    unit = [place for place, size in enumerate(tensor.shape) if fits and size > 1 and strides[place] == 1]
    if not unit:
        return _nbytes(tensor)
    later = (each for each, stride in enumerate(strides) if stride and order[each] < order[unit[-1]])
    between = math.prod(sizes[each] for each in later)
    return LINE_BYTES * made.numel() if between * LINE_BYTES > CACHE_BYTES else _nbytes(tensor)


def _nbytes(tensor: Tensor) -> int:
    """The bytes of a tensor: what is expanded counts once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()


def _written(op: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """What an operator that returns nothing writes, as those of lists do."""
    places = zip(op._schema.arguments, args, strict=False)
    written = [value for place, value in places if place.alias_info is not None and place.alias_info.is_write]
    return list(tensors_in(written))


def _is_view(op: Any) -> bool:
    """Whether the result shares the memory of an argument, and nothing is written."""
    returns, arguments = op._schema.returns, op._schema.arguments
    writes = any(each.alias_info is not None and each.alias_info.is_write for each in arguments)
    return bool(returns) and returns[0].alias_info is not None and not writes


def _product(tensors: list[Tensor], _args: Any, _result: Any) -> OperatorPoint:
    left, right = tensors[-2:]
    rows = 1 if left.dim() == 1 else left.shape[-2]
    columns = 1 if right.dim() == 1 else right.shape[-1]
    sizes = (float(max(1, rows)), float(max(1, left.shape[-1])), float(max(1, columns)))
    return OperatorPoint("product", sizes)


def _batched(tensors: list[Tensor], args: Any, result: Any) -> OperatorPoint:
    left, right = tensors[-2:]
    if left.shape[0] == 1:
        return _product(tensors, args, result)
    sides = [max(1, side) for side in (*left.shape[1:], right.shape[2])]
    return OperatorPoint("batched", (harmonic_mean(sides), 2.0 * max(1, left.shape[0]) * math.prod(sides)))


def _linear(tensors: list[Tensor], _args: Any, _result: Any) -> OperatorPoint:
    x, weight = tensors[:2]
    sizes = (float(max(1, x.numel() // max(1, x.shape[-1]))), float(x.shape[-1]), float(weight.shape[0]))
    return OperatorPoint("product", sizes)


def _convolution(tensors: list[Tensor], _args: Any, result: Any) -> OperatorPoint:
    return _of_convolution("convolution", tensors[1], result)


def _convolution_backward(tensors: list[Tensor], args: Any, _result: Any) -> OperatorPoint:
    """Of a class whose calls make two gradients, of the input and of the weight."""
    kind, (width, flops), _ = _of_convolution("convolution_backward", tensors[2], tensors[0])
    made = sum(map(bool, args[-1][:2])) if isinstance(args[-1], (list, tuple)) else 2
    return OperatorPoint(kind, (width, max(1.0, flops * made / 2)))


def _of_convolution(kind: str, weight: Tensor, output: Tensor) -> OperatorPoint:
    flops = 2.0 * output.numel() * math.prod(weight.shape[1:])
    groups = max(1, output.shape[1] // weight.shape[0]) if output.dim() > 1 else 1
    width = math.sqrt(max(1, weight.shape[1]) * max(1, weight.shape[0] // groups))
    if weight.shape[1] == 1:  # of one channel each
        width = 1.0
    return OperatorPoint(kind, (width, max(1.0, flops)))


def _attention(tensors: list[Tensor], args: Any, named: dict[str, Any], *, backward: bool) -> OperatorPoint:
    first = 1 if backward else 0  # backward begins with the gradient
    q, k = tensors[first], tensors[first + 1]
    causal = named.get("is_causal", any(arg is True for arg in args))
    flops = (4.0 if causal else 8.0) * q.numel() * k.shape[-2]  # the class is that of causal ones
    kind = "attention_backward" if backward else "attention"
    return OperatorPoint(kind, (float(max(1, k.shape[-2])), max(1.0, flops)))


_Formula = Callable[[list[Tensor], Any, Any], OperatorPoint]
PRODUCTS: dict[str, _Formula] = {
    **dict.fromkeys(("mm", "addmm", "mv", "addmv", "dot"), _product),
    **dict.fromkeys(("bmm", "baddbmm"), _batched),
    **dict.fromkeys(("linear", "_addmm_activation"), _linear),
    # of the rows of each expert: [rows, inner] and [experts, inner, columns], or of gradients
    "_grouped_mm": lambda tensors, args, result: _product(tensors[:2], args, result),
}
CONVOLUTIONS: dict[str, _Formula] = {
    **dict.fromkeys(("convolution", "_convolution", "mkldnn_convolution"), _convolution),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), _convolution_backward),
}
PRICED = {*PRODUCTS, *CONVOLUTIONS, *ONE_SIZE, *SUMS, *HEAVY, *COPIES}
"""Every operator with a price of its own."""
