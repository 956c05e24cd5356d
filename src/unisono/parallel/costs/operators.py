"""An operator of PyTorch: its class and its size, which `unisono.planner.operator_costs` prices; its seconds.

On one rank, and of the host that starts those of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import harmonic_mean
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from unisono.parallel.graph.containers import tensors_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from unisono.planner.operator_costs import OperatorCosts


class OperatorPoint(NamedTuple):
    """A class of operators and a size; `kind` "" moves nothing, as a view does. `low`: a type of 16 bits."""

    kind: str
    point: tuple[float, ...] = ()
    low: str = ""


class TracedOperator(NamedTuple):
    """One operator."""

    size: OperatorPoint
    phase: str  # forward, backward or update
    call: int  # number of the module call that has begun last in forward; -1: none had
    unit: str  # the path of its unit; "": of none
    followed: bool  # autograd runs it, or has made a function for it


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
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")  # how their names begin
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
    if name.startswith(ATTENTION):
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
MATRIX_KINDS = {"product", "batched", "convolution", "attention"}
"""Classes whose sizes tell FLOPs, and whose results `recompute="selective"` keeps."""


def does_matrices(name: str) -> bool:
    """Whether an operator is of these classes. Example: "addmm", not "addmm_backward" or "softmax"."""
    return (
        name in {*PRODUCTS, *CONVOLUTIONS, "mkldnn_linear", "_scaled_mm"} or name.startswith(ATTENTION)
    ) and "backward" not in name


def flops_by_price(op: Any, args: tuple[Any, ...], output: Any) -> int | None:
    """FLOPs of a product, a convolution, or attention, causal or not; None: of another operator.

    Example: aten.mm of [2, 3] and [3, 4]: 48.
    """
    space, _, name = str(op.overloadpacket).rpartition(".")
    if space != "aten":
        return None
    given = [arg for arg in args if isinstance(arg, Tensor)]
    if name.startswith(ATTENTION):
        q, k, v = given[:3]
        return 2 * q.numel() * k.shape[-2] + 2 * math.prod(q.shape[:-1]) * math.prod(v.shape[-2:])
    formula = PRODUCTS.get(name) or CONVOLUTIONS.get(name)
    if formula is None:
        return None
    kind, point, _ = formula(given, args, next(tensors_in(output), None))
    return int(2 * math.prod(point) if kind == "product" else point[-1])


PRICED = {*PRODUCTS, *CONVOLUTIONS, *ONE_SIZE, *SUMS, *HEAVY, *COPIES}
"""Every operator with a price of its own."""


# ---- seconds ----


class HostStarts:
    """What the host of a GPU does in a step, counted in starts: the time in which it starts a small operator.

    Source: eight models too small for the device to count, under six plans of one rank each, on the host of
    an H100, in a process that had run no profiler: benchmarks/results/2026-11-26-hardware-files-again.md.
    Where the model's Python does more, they are too few.
    """

    OPERATORS: ClassVar[dict[str, float]] = {
        "convolution": 1.5, "convolution_backward": 2.4, "batch_norm": 1.6, "batch_norm_backward": 1.6,
        "norm": 1.5, "norm_backward": 3.0, "attention": 2.0, "attention_backward": 2.0, "pool": 1.5,
    }  # fmt: skip
    """Of a class: libraries choose among kernels, and an operator may have several."""

    IN_STEP = 1.5
    """Of an operator within a step, whose code is not in the host's caches, with the Python of its module."""

    STEP, BEFORE, MICRO_BATCH = 200, 150, 160
    """Of a step after its last backward; and of a micro-batch before its first operator, and with its
    backward: threads that meet, the loss, its copy."""

    AGAIN, SAVED = 120, 5.5
    """Of a unit that is computed again, and of each of its operators whose inputs recomputation drops."""

    UNIT_CALLED, MOVED, PARAMETER_MOVED = 60, 45, 4
    """Of a unit of FSDP2 in a micro-batch; to gather or reduce it once; of each of its parameters there."""

    ADDED, LOW_ADDED = 1, 5
    """Of a parameter's gradient that is added to that of another micro-batch: in f32, and from 16 bits."""

    @classmethod
    def of_operator(cls, kind: str) -> float:
        """Starts of one operator within a step. Example: "light" -> 1.5, "batch_norm" -> 2.4."""
        return cls.IN_STEP * cls.OPERATORS.get(kind, 1.0)


LEAST_SHARE = 0.25
"""Of a price that a trial of the model leaves."""


class OperatorPrices:
    """Prices of one rank.

    Args:
        costs: of a rank with as many threads as these were measured with.
        factor: of this rank's seconds beside those.
        more: seconds of each operator beside them, by phase.
    """

    def __init__(
        self, costs: OperatorCosts, factor: float = 1.0, more: Mapping[str, float] | None = None
    ) -> None:
        self._costs, self._factor, self._more = costs, factor, more or {}
        self._known: dict[tuple[OperatorPoint, str, bool, float], float] = {}

    @property
    def queued(self) -> bool:
        """Whether the host only starts operators, which a device runs in their order."""
        return self._costs.launch_s is not None

    def host(self, operator: TracedOperator) -> float:
        """Seconds of the host for an operator that a device runs."""
        costs = self._costs
        if costs.launch_s is None:
            return 0.0
        if not operator.size.kind:
            return HostStarts.of_operator("") * costs.view_s
        return HostStarts.of_operator(operator.size.kind) * (costs.launch_s + self._followed(operator))

    def launch(self, operators: float) -> float:
        """Seconds of the host for so many operators that autograd does not follow; 0 where it computes."""
        return (self._costs.launch_s or 0.0) * operators

    def seconds(self, operator: TracedOperator, share: float = 1.0) -> float:
        """One operator; `share`: of its elements, where another rank has the rest."""
        key = operator.size, operator.phase, operator.followed, share
        found = self._known.get(key)
        if found is None:
            alone = self._priced(operator, share)
            more = self._more.get(operator.phase, 0.0)
            found = self._known[key] = max(alone + more, LEAST_SHARE * alone)
        return found

    def light(self, nbytes: float) -> float:
        """An operator that moves so many bytes."""
        return self._costs.at("light", max(1.0, nbytes)) * self._factor

    def _priced(self, operator: TracedOperator, share: float) -> float:
        costs = self._costs
        kind, point, low = operator.size
        if not kind:
            return 0.0 if self.queued else costs.view_s
        cut = 0 if len(point) == 1 or kind == "product" else 1  # elements, bytes, rows, or FLOPs
        sizes = (size * share if axis == cut else size for axis, size in enumerate(point))
        found = costs.at(kind, *sizes, low=low)
        found *= costs.scale.get(operator.phase, 1.0) * self._factor
        return found if self.queued else found + self._followed(operator)

    def _followed(self, operator: TracedOperator) -> float:
        if not operator.followed:
            return 0.0
        return self._costs.forward_s if operator.phase == "forward" else self._costs.backward_s
