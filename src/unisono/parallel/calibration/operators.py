"""Times each class of operators at some sizes while all ranks do; see `unisono.planner.operator_costs`.

Then steps of reference models tell what a training adds to its operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from unisono.engine.costs.machine import MachineCalibration
from unisono.parallel.calibration.reference_models import (
    PhaseSeconds,
    Reference,
    adamw,
    clock,
    mean_of_ranks,
    reference_models,
    timed_phases,
    tiny,
)
from unisono.parallel.costs.predictor import StepPredictor
from unisono.parallel.graph.containers import tensors_in
from unisono.parallel.plan import Plan
from unisono.parallel.sharded_parameters import TYPES
from unisono.planner.compute_calibration import ComputeCalibration
from unisono.planner.operator_costs import POINTS_OF_LOW, OperatorCosts, tables

BATCH_SECONDS, BATCHES = 2e-3, 4
LEAST_SECONDS = 1e-7
HELD_BYTES = 48 << 20
"""Of results that stay, as activations do, before they are freed together."""

ROUNDS = 7


def measure_operators() -> OperatorCosts:
    """The costs of operators on this rank; the mean of all ranks."""
    torch.manual_seed(dist.get_rank())
    dist.barrier()
    mine = tables(_cost) | tables(_low_cost, POINTS_OF_LOW)
    found = {
        name: msgspec.structs.replace(one, seconds=mean_of_ranks(one.seconds)) for name, one in mine.items()
    }
    view = torch.zeros(4, 4)
    threads, ranks = torch.get_num_threads(), dist.get_world_size()
    (view_s,) = mean_of_ranks([_timed(lambda: view.view(16))])
    costs = OperatorCosts(ranks, threads, found, 0.0, 0.0, view_s)
    return _with_scale(_with_overhead(costs))


def _cost(kind: str, *point: float) -> float:
    return _timed(call_of(kind, point))


def _low_cost(kind: str, *point: float) -> float:
    """The same of tensors of the type of 16 bits that the name ends with."""
    kind, _, low = kind.rpartition("_")
    try:
        torch.set_default_dtype(TYPES[low])
        return _cost(kind, *point)
    finally:
        torch.set_default_dtype(torch.float32)


def _timed(call: Callable[[], Any]) -> float:
    """The least mean of some batches of calls, whose results stay until the batch ends."""
    began = clock()
    held = [call()]
    once = clock() - began
    nbytes = sum(tensor.nbytes for tensor in tensors_in(held[0])) or 1
    count = max(1, min(200, int(BATCH_SECONDS / max(once, 1e-6)), HELD_BYTES // nbytes))
    best = once if once > 0.3 else float("inf")
    for _ in range(BATCHES if once <= 0.3 else 1):
        held.clear()
        began = clock()
        held = [call() for _ in range(count)]
        best = min(best, (clock() - began) / count)
    return max(best, LEAST_SECONDS)


def _predicted(reference: Reference, costs: OperatorCosts) -> PhaseSeconds:
    calibration = ComputeCalibration("", str(torch.__version__), "", costs.threads, (costs,))
    predictor = StepPredictor(
        reference.model, reference.batch, loss=reference.loss, compute=calibration,
        optimizer=adamw, machine=MachineCalibration(),
    )  # fmt: skip
    seconds = predictor.forecast(Plan()).seconds
    return PhaseSeconds(seconds["forward"], seconds["backward"], seconds["update"])


def _with_overhead(costs: OperatorCosts) -> OperatorCosts:
    """What autograd and modules add to an operator: what a tiny model takes beside its operators."""
    reference = tiny()
    measured, alone = timed_phases(reference, ROUNDS), _predicted(reference, costs)
    more = _predicted(reference, msgspec.structs.replace(costs, forward_s=1e-6, backward_s=1e-6))

    def overhead(phase: int) -> float:
        operators = (more[phase] - alone[phase]) / 1e-6
        return max(0.0, (measured[phase] - alone[phase]) / operators)

    return msgspec.structs.replace(costs, forward_s=overhead(0), backward_s=overhead(1))


def _with_scale(costs: OperatorCosts) -> OperatorCosts:
    """What a step of larger models takes beside the sum: the geometric mean of the ratios."""
    scale = dict.fromkeys(PhaseSeconds._fields, 1.0)
    references = reference_models()
    for reference in references:
        measured, predicted = timed_phases(reference, ROUNDS), _predicted(reference, costs)
        for phase, took, said in zip(scale, measured, predicted, strict=True):
            scale[phase] *= (took / said) ** (1 / len(references))
    return msgspec.structs.replace(costs, scale=scale)


# ---- calls of each class at a size, whose tensors have the default type of PyTorch ----


aten: Any = torch.ops.aten
MOST_SETS, SET_BYTES = 6, 24 << 20
"""A call takes turns through sets of inputs of so many bytes in all, which no core's own cache holds."""

ROW = 256  # elements of a row of norms and softmax
CHANNELS = 64


def call_of(kind: str, point: tuple[float, ...]) -> Callable[[], Any]:
    """A call that takes the next set of inputs each time, and returns the result."""
    make = CASES[kind]
    first, run = make(*point)
    nbytes = sum(t.numel() * t.element_size() for t in first if isinstance(t, Tensor))
    sets = [first] + [make(*point)[0] for _ in range(min(MOST_SETS, SET_BYTES // max(1, nbytes)) - 1)]
    turn = 0

    def call() -> Any:
        nonlocal turn
        turn = (turn + 1) % len(sets)
        return run(*sets[turn])

    return call


_Case = tuple[tuple[Any, ...], Callable[..., Any]]


def _product(rows: float, inner: float, columns: float) -> _Case:
    left, right = torch.randn(int(rows), int(inner)), torch.randn(int(columns), int(inner))
    return (left, right.t()), torch.mm


def _batched(side: float, flops: float) -> _Case:
    size = int(side)
    count = max(2, round(flops / (2 * size**3)))
    return (torch.randn(count, size, size), torch.randn(count, size, size)), torch.bmm


def _images(width: float, flops: float) -> tuple[Tensor, Tensor]:
    """Images and a 3 x 3 kernel of so many channels in and out."""
    channels = int(width)
    pixels = max(64.0, flops / (18 * channels**2))
    side = min(32, int(math.sqrt(pixels)))
    return torch.randn(max(1, round(pixels / side**2)), channels, side, side), torch.randn(
        channels, channels, 3, 3
    )


def _convolution(width: float, flops: float) -> _Case:
    return _images(width, flops), lambda x, weight: torch.conv2d(x, weight, padding=1)


def _convolution_backward(width: float, flops: float) -> _Case:
    x, weight = _images(width, flops)
    grad = torch.randn_like(x)

    def run(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
        return aten.convolution_backward(
            grad, x, weight, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )

    return (grad, x, weight), run


def _heads(tokens: float, flops: float) -> tuple[Tensor, ...]:
    """Queries, keys and values: heads of 64, in sequences of so many tokens."""
    length = int(tokens)
    heads = max(1, round(flops / (4 * 64 * length**2)))
    x = torch.randn(3, 1, heads, length, 64)
    return x[0], x[1], x[2]


def _attention(tokens: float, flops: float) -> _Case:
    return _heads(tokens, flops), lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, is_causal=True
    )


def _attention_backward(tokens: float, flops: float) -> _Case:
    q, k, v = (each.requires_grad_() for each in _heads(tokens, flops))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    grad = torch.randn_like(out)
    return (out, (q, k, v), grad), lambda out, given, grad: torch.autograd.grad(
        out, given, grad, retain_graph=True
    )


def _light(nbytes: float) -> _Case:
    size = max(1, int(nbytes / 12))
    return (torch.randn(size), torch.randn(size)), torch.add


def _strided(nbytes: float) -> _Case:
    tokens = max(2, round(nbytes / 8 / 512))
    return (torch.randn(4, tokens, 4, 32).transpose(1, 2),), lambda x: x.contiguous()


def _sums(nbytes: float) -> _Case:
    return (torch.randn(max(1, int(nbytes / 4 / ROW)), ROW),), lambda x: x.sum(0)


def _rows(elements: float) -> Tensor:
    return torch.randn(max(1, int(elements / ROW)), ROW)


def _norm_backward(elements: float) -> _Case:
    x, weight = _rows(elements), torch.ones(ROW)
    _, mean, rstd = torch.native_layer_norm(x, [ROW], weight, weight, 1e-5)

    def run(grad: Tensor, x: Tensor) -> Any:
        return aten.native_layer_norm_backward(grad, x, [ROW], mean, rstd, weight, weight, [True, True, True])

    return (torch.randn_like(x), x), run


def _maps(elements: float) -> Tensor:
    side = 16 if elements > 4 * CHANNELS * 256 else 4
    return torch.randn(max(1, int(elements / CHANNELS / side**2)), CHANNELS, side, side)


def _batch_norm(elements: float) -> _Case:
    one = torch.ones(CHANNELS)
    run = one.clone(), one.clone()
    return (_maps(elements),), lambda x: torch.native_batch_norm(x, one, one, *run, True, 0.1, 1e-5)


def _batch_norm_backward(elements: float) -> _Case:
    x, one = _maps(elements), torch.ones(CHANNELS)
    _, mean, rstd = torch.native_batch_norm(x, one, one, one.clone(), one.clone(), True, 0.1, 1e-5)

    def run(grad: Tensor, x: Tensor) -> Any:
        return aten.native_batch_norm_backward(
            grad, x, one, one, one, mean, rstd, True, 1e-5, [True, True, True]
        )

    return (torch.randn_like(x), x), run


def _pool(elements: float) -> _Case:
    return (_maps(elements),), lambda x: aten.max_pool2d_with_indices(x, [2, 2])


def _pool_backward(elements: float) -> _Case:
    x = _maps(elements)
    out, places = aten.max_pool2d_with_indices(x, [2, 2])

    def run(grad: Tensor, x: Tensor) -> Any:
        return aten.max_pool2d_with_indices_backward(grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, places)

    return (torch.randn_like(out), x), run


TABLE = 4096  # rows of an embedding


def _embedding(elements: float) -> _Case:
    ids = torch.randint(TABLE, (max(1, int(elements / ROW)),))
    return (torch.randn(TABLE, ROW), ids), aten.embedding


def _embedding_backward(elements: float) -> _Case:
    """Gradients are four fifths of the size, and a table filled with zeros in one pass of three the rest."""
    count, rows = (max(1, round(share * elements / ROW)) for share in (0.8, 0.6))
    ids = torch.randint(rows, (count,))

    def run(grad: Tensor, ids: Tensor) -> Any:
        return aten.embedding_dense_backward(grad, ids, rows, -1, False)

    return (torch.randn(count, ROW), ids), run


def _index(elements: float) -> _Case:
    x = _rows(elements)
    return (x, torch.randint(ROW, x.shape)), lambda x, places: torch.gather(x, 1, places)


def _random(elements: float) -> _Case:
    return (_rows(elements),), lambda x: torch.native_dropout(x, 0.1, True)


CASES: dict[str, Callable[..., _Case]] = {
    "product": _product,
    "batched": _batched,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "light": _light,
    "strided": _strided,
    "sums": _sums,
    "heavy": lambda elements: ((_rows(elements),), functional.gelu),
    "softmax": lambda elements: ((_rows(elements),), lambda x: torch.log_softmax(x, -1)),
    "softmax_backward": lambda elements: (
        (_rows(elements), torch.log_softmax(_rows(elements), -1)),
        lambda grad, out: aten._log_softmax_backward_data(grad, out, -1, grad.dtype),
    ),
    "norm": lambda elements: (
        (_rows(elements), torch.ones(ROW)),
        lambda x, weight: torch.native_layer_norm(x, [ROW], weight, weight, 1e-5),
    ),
    "norm_backward": _norm_backward,
    "batch_norm": _batch_norm,
    "batch_norm_backward": _batch_norm_backward,
    "pool": _pool,
    "pool_backward": _pool_backward,
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "index": _index,
    "random": _random,
}
