"""What each operator does with indices: a rule joins dims that are one index, and blocks what must be whole.

A rule gets the operator's call with the dims of each tensor, and returns the dims of its outputs. An operator
without a rule blocks all dims of its inputs: nothing that reaches it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .indices import Dim, Dims, block, block_all, groups_of, join, mark, one, regrouped, size_of
from .program import Graph, Node, Ref, Value, refs, writes_of

# Operators that draw random numbers
DRAWS = {
    "aten.bernoulli", "aten.bernoulli_", "aten.native_dropout", "aten.rand", "aten.randn", "aten.rand_like",
    "aten.randn_like", "aten.normal_", "aten.uniform_", "aten.exponential_", "aten.randint", "aten.randperm",
    "aten.multinomial", "aten.random_", "aten.cauchy_", "aten.log_normal_", "aten.geometric_", "aten.normal",
    "aten.rrelu_with_noise", "aten.poisson", "aten.randint_like",
}  # fmt: skip
LIKE = (
    "aten.clone", "aten.detach", "aten.alias", "aten._to_copy", "aten.copy_", "aten.copy", "aten.fill",
    "aten.bernoulli", "aten.bernoulli_", "aten.empty_like", "aten.zeros_like", "aten.ones_like",
    "aten.rand_like", "aten.randn_like", "aten.normal_", "aten.uniform_", "aten.fill_", "aten.zero_",
    "aten.native_dropout", "aten.full_like",
    "aten.contiguous", "aten.lift_fresh", "aten.lift_fresh_copy", "aten.masked_fill", "aten.masked_fill_",
    "aten.where", "aten.view_as", "aten.exponential_", "aten._conj", "aten.conj", "aten.isnan", "aten.glu_",
    "aten.threshold", "aten.hardtanh", "aten.leaky_relu", "aten.elu", "aten.softplus", "aten.prelu",
    "aten._prelu_kernel", "aten.hardswish", "aten.hardswish_", "aten.log_sigmoid_forward",
)  # fmt: skip
NEW = {  # operators that make memory of given sizes -> the place of these among their arguments
    "aten.zeros": 0, "aten.ones": 0, "aten.full": 0, "aten.empty": 0, "aten.new_zeros": 1, "aten.new_ones": 1,
    "aten.new_full": 1, "aten.new_empty": 1, "aten.rand": 0, "aten.randn": 0, "aten.empty_strided": 0,
}  # fmt: skip
SPATIAL = (
    "aten.max_pool2d_with_indices", "aten.avg_pool2d", "aten._adaptive_avg_pool2d", "aten.avg_pool1d",
    "aten.upsample_nearest2d", "aten.upsample_bilinear2d", "aten.upsample_nearest1d", "aten.max_pool1d",
    "aten.adaptive_avg_pool1d", "aten.mean_pool2d", "aten.reflection_pad2d", "aten.reflection_pad1d",
)  # fmt: skip


GROUP_NORM = "aten.native_group_norm"
LOSS = "it is a loss of whole values"
WHOLE = {  # operators of which nothing is cut -> why
    **dict.fromkeys(
        ("aten.native_batch_norm", "aten._native_batch_norm_legit", "aten._batch_norm_with_update"),
        "it writes the statistics of whole channels",
    ),
    **dict.fromkeys(("aten.index_add", "aten.index_put", "aten._index_put_impl_"), "it writes to any place"),
    **dict.fromkeys(("aten.nll_loss_forward", "aten.nll_loss2d_forward", "aten.mse_loss"), LOSS),
    **dict.fromkeys(("aten.smooth_l1_loss", "aten.huber_loss", "aten.binary_cross_entropy"), LOSS),
    **dict.fromkeys(("aten.mv", "aten.addmv", "aten.dot"), "a vector is too small to be cut"),
    **dict.fromkeys(
        ("aten.linear", "aten._convolution", "aten.mkldnn_convolution", "aten._addmm_activation"),
        "it is a form of another operator, without gradients",
    ),
    "aten._grouped_mm": "its rows are those of experts, which expert= spreads",
}  # fmt: skip


class Contraction:
    """A product of two values sums over this dim: where it is cut, the output is a partial sum."""

    def __init__(self, node: Node, dim: Dim) -> None:
        self.node, self.dim = node, dim


class Rules:
    """The dims of every value of a graph. Attributes: dims (by value), contractions.

    Args:
        vocabulary: embeddings (paths) that may be cut by rows: their outputs are summed.
        gathered: layers whose outputs are gathered, so that nothing after them is cut with them.
    """

    def __init__(self, graph: Graph, vocabulary: set[str], gathered: set[str]) -> None:
        self.graph = graph
        self.dims: dict[int, Dims] = {}
        self.contractions: list[Contraction] = []
        self.vocabulary, self.gathered = vocabulary, gathered
        self._written: dict[int, list[tuple[int, int]]] = {}  # storage -> (node, value) of writes in place

    def all(self) -> None:
        """Run the whole program."""
        ends: dict[int, list[int]] = {}
        for frame in self.graph.frames:
            if frame.path in self.gathered:
                ends.setdefault(frame.last, []).extend(frame.outputs)
        for value in self.graph.values:
            if value.node < 0:
                self.begin(value)
        for node in self.graph.nodes:
            self._whole(ends.get(node.number, ()))
            self.run(node)
        self._whole(ends.get(len(self.graph.nodes), ()))

    def _whole(self, values: Sequence[int]) -> None:
        for number in values:
            self.dims[number] = [
                one(size, "a layer before is gathered") for size in self.graph.values[number].shape
            ]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """The shape of a value."""
        return self.graph.values[ref.value].shape

    def of(self, ref: Ref) -> Dims:
        """The dims of an input of an operator."""
        return self.dims[ref.value]

    def begin(self, value: Value) -> None:
        """Give a value that no operator made its dims."""
        why = {
            "input": "it is a dimension of the model's input",
            "constant": "it is a dimension of a tensor that is neither parameter nor buffer",
        }.get(value.kind, "")
        self.dims[value.number] = [one(size, why) for size in value.shape]

    def run(self, node: Node) -> None:
        """Give the outputs of an operator their dims."""
        why = f"{node.name} needs all of it, at {node.line}"
        came = list(_refs(node))
        self._check_writes(node, came)
        rule = rule_of(node.op)
        found = None if rule is None else rule(self, node, why)
        if found is None:
            if rule is None:
                because = WHOLE.get(node.name, "it has no rule")
                why = f"{node.name} needs all of it: {because}, at {node.line}"
            block_all((dim for ref in came for dim in self.of(ref)), why)
            found = []
        outputs = node.made
        for place, number in enumerate(outputs):
            shape = self.graph.values[number].shape
            dims = found[place] if place < len(found) else None
            if dims is not None and tuple(map(size_of, dims)) != shape:
                raise AssertionError(f"the rule of {node.name} has other sizes than {shape}, at {node.line}")
            why_not = "" if rule is not None else why
            self.dims[number] = dims if dims is not None else [one(size, why_not) for size in shape]
        self._note_writes(node)

    # ---- writes in place ----

    def _check_writes(self, node: Node, came: Sequence[Ref]) -> None:
        for ref in came:
            value = self.graph.values[ref.value]
            for _, written in self._written.get(value.storage, ()):
                if value.number < written:
                    why = f"a write through another view changes it, at {node.line}"
                    block_all([*self.dims[value.number], *self.dims[written]], why)

    def _note_writes(self, node: Node) -> None:
        for given, written in writes_of(node):
            storage = self.graph.values[given].storage
            self._written.setdefault(storage, []).append((node.number, written))
            if self.graph.values[storage].kind == "buffer":  # or through a view of it
                why = f"the program writes into this buffer, at {node.line}"
                block_all([*self.dims[given], *self.dims[storage]], why)

    # ---- parts of rules ----

    def broadcast(self, refs: Sequence[Ref], shape: Sequence[int], why: str) -> Dims:
        """Dims of an output to which all inputs are broadcast, aligned at the last dim."""
        found: list[Dim | None] = [None] * len(shape)
        for ref in refs:
            dims = self.of(ref)
            for back in range(1, len(dims) + 1):
                if back > len(shape):
                    block(dims[-back], why)
                    continue
                size, dim = shape[-back], dims[-back]
                if size_of(dim) != size:
                    continue
                known = found[-back]
                found[-back] = dim if known is None else join(known, dim, why)
        return [dim if dim is not None else one(size) for dim, size in zip(found, shape, strict=True)]

    def contract(self, node: Node, first: Dim, second: Dim, why: str) -> None:
        """Sum over a dim of two inputs."""
        self.contractions.append(Contraction(node, join(first, second, why)))


def _refs(node: Node) -> list[Ref]:
    return [*refs(node.args), *refs(node.named)]


Found = "list[Dims | None] | None"
Rule = Callable[[Rules, Node, str], "list[Dims | None] | None"]


def _out(rules: Rules, node: Node, place: int = 0) -> tuple[int, ...]:
    number = node.outputs[place]
    assert number is not None
    return rules.graph.values[number].shape


def _pointwise(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    shapes = [rules.graph.values[number].shape for number in node.made]
    dims = rules.broadcast(_refs(node), shapes[0], why)
    return [dims if shape == shapes[0] else None for shape in shapes]


def _new(rules: Rules, node: Node, _why: str) -> list[Dims | None]:
    return [[one(size) for size in _out(rules, node)]]


def _positions(rules: Rules, node: Node, _why: str) -> list[Dims | None]:
    return [
        [
            one(size, f"{node.name} makes values by their positions, at {node.line}")
            for size in _out(rules, node)
        ]
    ]


def _view(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    came, goal = rules.of(node.args[0]), _out(rules, node)
    shape = rules.shape(node.args[0])
    found: Dims = []
    if math.prod(shape) == 0:
        return None  # type: ignore[return-value]
    for before, after in groups_of(shape, goal):
        found += regrouped([came[at] for at in before], [goal[at] for at in after], why)
    return [found]


def _expand(rules: Rules, node: Node, _why: str) -> list[Dims | None]:
    came, goal = rules.of(node.args[0]), _out(rules, node)
    more = len(goal) - len(came)
    found = []
    for at, size in enumerate(goal):
        dim = came[at - more] if at >= more else one(1)
        found.append(dim if size_of(dim) == size else one(size))
    return [found]


def _permute(rules: Rules, node: Node, _why: str) -> list[Dims | None]:
    came = rules.of(node.args[0])
    order = list(range(len(came)))
    if node.name == "aten.permute":
        order = [at % len(came) for at in node.args[1]]
    elif len(came) > 1:
        first, second = node.args[1:3] if node.name.startswith("aten.transpose") else (0, 1)
        order[first], order[second] = order[second], order[first]
    return [[came[at] for at in order]]


def _select(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    came = rules.of(node.args[0])
    at = node.args[1] % len(came) if len(node.args) > 1 else 0
    size = size_of(came[at])
    mark(came[at], range(1, size), size)
    block(came[at], why)
    return [came[:at] + came[at + 1 :]]


def _part(dim: Dim, first: int, stop: int, why: str) -> Dim:
    """Elements [first, stop) of a dim: all, whole segments, or what blocks it."""
    size = size_of(dim)
    if (first, stop) == (0, size):
        return dim
    at, taken, begins = 0, [], set()
    for segment in dim:
        begins.add(at)
        if first <= at and at + size_of((segment,)) <= stop:
            taken.append(segment)
        at += size_of((segment,))
    begins.add(at)
    if len(dim) > 1 and first in begins and stop in begins and taken:
        return tuple(taken)
    mark(dim, [bound for bound in (first, stop) if 0 < bound < size], size)
    block(dim, why)
    return one(stop - first, why)


def slice_of(node: Node) -> tuple[Any, ...]:
    """The arguments of aten.slice: tensor, dim, start, stop, step."""
    more: tuple[Any, ...] = (None,) * (5 - len(node.args))
    return node.args + more


def _slice(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    came = list(rules.of(node.args[0]))
    _, dim, start, stop, step = slice_of(node)
    at = (dim or 0) % len(came)
    size = size_of(came[at])
    first, last, stride = slice(start, stop, step or 1).indices(size)
    if stride != 1:
        block(came[at], why)
        came[at] = one(_out(rules, node)[at], why)
    else:
        came[at] = _part(came[at], first, max(first, last), why)
    return [came]


def _split(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    came = rules.of(node.args[0])
    at = (node.args[2] if len(node.args) > 2 else node.named.get("dim", 0)) % len(came)
    found: list[Dims | None] = []
    begin = 0
    for place in range(len(node.outputs)):
        size = _out(rules, node, place)[at]
        dims = list(came)
        dims[at] = _part(came[at], begin, begin + size, why)
        begin += size
        found.append(dims)
    return found


def _cat(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    refs = [ref for ref in node.args[0] if rules.shape(ref) != (0,)]
    dims = [rules.of(ref) for ref in refs]
    at = (node.args[1] if len(node.args) > 1 else node.named.get("dim", 0)) % len(dims[0])
    found = list(dims[0])
    for other in dims[1:]:
        for place, dim in enumerate(other):
            if place != at:
                found[place] = join(found[place], dim, why)
    found[at] = tuple(segment for each in dims for segment in each[at] if size_of((segment,)))
    return [found]


def _stack(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    dims = [rules.of(ref) for ref in node.args[0]]
    at = (node.args[1] if len(node.args) > 1 else node.named.get("dim", 0)) % (len(dims[0]) + 1)
    found = list(dims[0])
    for other in dims[1:]:
        found = [join(a, b, why) for a, b in zip(found, other, strict=True)]
    found.insert(at, one(len(dims), "it counts stacked tensors"))
    return [found]


def _product(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    """mm, bmm, and both with a term that is added."""
    first, second = (rules.of(ref) for ref in node.args[-2:])
    found = [join(a, b, why) for a, b in zip(first[:-2], second[:-2], strict=True)]
    rules.contract(node, first[-1], second[-2], why)
    found += [first[-2], second[-1]]
    if len(node.args) > 2:
        return [_added(rules, node.args[0], found, why)]
    return [found]


def _added(rules: Rules, ref: Ref, dims: Dims, why: str) -> Dims:
    term = rules.of(ref)
    for back in range(1, len(term) + 1):
        if size_of(term[-back]) == size_of(dims[-back]):
            dims[-back] = join(dims[-back], term[-back], why)
    return dims


def _convolution(rules: Rules, node: Node, why: str) -> list[Dims | None] | None:
    x, weight = rules.of(node.args[0]), rules.of(node.args[1])
    transposed, groups = node.args[6], node.args[8]
    block_all([*x[2:], *weight[2:]], why)
    came, goes = (0, 1) if transposed else (1, 0)
    if groups == 1:
        rules.contract(node, x[1], weight[came], why)
        channels = weight[goes]
    elif not transposed and groups == size_of(x[1]) == size_of(weight[0]):
        channels = join(x[1], weight[0], why)
    else:
        return None
    if node.args[2] is not None:
        join(channels, rules.of(node.args[2])[0], why)
    return [[x[0], channels, *(one(size, why) for size in _out(rules, node)[2:])]]


def _embedding(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    weight, tokens = rules.of(node.args[0]), rules.of(node.args[1])
    if rules.graph.module_of(node) not in rules.vocabulary:
        block(weight[0], why)
    return [[*tokens, weight[1]]]


def _last(count: Callable[[Node], int]) -> Rule:
    """Norms over the last dims; further tensors are their weight and bias."""

    def rule(rules: Rules, node: Node, why: str) -> list[Dims | None]:
        dims = rules.of(node.args[0])
        over = dims[len(dims) - count(node) :]
        block_all(over, why)
        for given in node.args[1:]:
            if isinstance(given, Ref):
                for a, b in zip(over, rules.of(given), strict=True):
                    join(a, b, why)
        small = [*dims[: len(dims) - len(over)], *(one(1) for _ in over)]
        return [dims, *(small for _ in node.outputs[1:])]

    return rule


def _group_norm(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    """Each group of channels by itself: a cut is between groups."""
    x, weight, bias, *_, groups, _ = node.args
    rows, channels, *spatial = rules.of(x)
    block_all(spatial, why)
    counted, within = regrouped([channels], [groups, size_of(channels) // groups], why)
    block(within, why)
    for ref in (weight, bias):
        if ref is not None:
            join(channels, rules.of(ref)[0], why)
    return [rules.of(x), *([rows, counted] for _ in node.outputs[1:])]


def _along(place: int, *, keeps: bool, default: int | None = None) -> Rule:
    """Functions along dims: softmax, sort, cumsum (which keep them), and reductions."""

    def rule(rules: Rules, node: Node, why: str) -> list[Dims | None]:
        came = rules.of(node.args[0])
        given = node.args[place] if len(node.args) > place else node.named.get("dim", default)
        if isinstance(given, Ref):  # the function of two tensors
            return _pointwise(rules, node, why)
        if given is None or isinstance(given, bool) or given == []:  # a bool: whether std is unbiased
            given = range(len(came))
        dims = [given] if isinstance(given, int) else given
        over = {at % len(came) for at in dims} if came else set()
        block_all((came[at] for at in over), why)
        outputs = [rules.graph.values[number].shape for number in node.made]
        found: Dims = []
        whole = len(outputs[0]) == len(came)
        for at, dim in enumerate(came):
            if at not in over:
                found.append(dim)
            elif whole:
                size = outputs[0][at]
                found.append(dim if keeps and size == size_of(dim) else one(size, why))
        return [found if tuple(map(size_of, found)) == shape else None for shape in outputs]

    return rule


def _gather(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    came, places = rules.of(node.args[0]), rules.of(node.args[2])
    at = node.args[1] % len(came)
    block_all((came[at], places[at]), why)
    for place, (a, b) in enumerate(zip(came, places, strict=True)):
        if place != at:
            if size_of(a) == size_of(b):
                join(a, b, why)
            else:
                block_all((a, b), why)
    return [places]


def _scatter(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    """Elements go to other places of one dim. Where the others are longer than the indices, some are left."""
    came, at = rules.of(node.args[0]), node.args[1]
    for ref in _refs(node)[1:]:
        for place, (a, b) in enumerate(zip(came, rules.of(ref), strict=False)):
            if place != at % len(came) and size_of(a) == size_of(b):
                join(a, b, why)
            else:
                block_all((a, b), why)
    return [came]


def _index_select(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    came, places = list(rules.of(node.args[0])), rules.of(node.args[2])
    at = node.args[1] % len(came)
    block_all((came[at], *places), why)
    came[at] = one(_out(rules, node)[at], why)
    return [came]


def _index(rules: Rules, node: Node, why: str) -> list[Dims | None] | None:
    came, given = rules.of(node.args[0]), list(node.args[1])
    at = [place for place, ref in enumerate(given) if ref is not None]
    if at != list(range(at[0], at[0] + len(at))):
        return None
    indices = [ref for ref in given if ref is not None]
    if any(rules.graph.values[ref.value].dtype == torch.bool for ref in indices):
        return None
    block_all((came[place] for place in at), why)
    shape = torch.broadcast_shapes(*(rules.shape(ref) for ref in indices))
    taken = rules.broadcast(indices, shape, why)
    return [[*came[: at[0]], *taken, *came[at[-1] + 1 :]]]


def _attention(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    q, k, v = (list(rules.of(ref)) for ref in node.args[:3])
    block_all((q[-1], k[-1], v[-1], k[-2], q[-2], v[-2]), why)
    for other in (k, v):
        for at in range(len(q) - 2):
            mine, theirs = size_of(q[at]), size_of(other[at])
            if mine != theirs and len(other[at]) > 1:
                block_all((q[at], other[at]), why)
            elif mine == theirs:
                join(q[at], other[at], why)
            elif theirs > 1 and mine % theirs == 0:  # grouped heads
                join(q[at], ((*other[at][0], *one(mine // theirs)[0]),), why)
    scores = [*q[:-1], k[-2]]
    for ref in _refs(node)[3:]:
        mask = rules.of(ref)
        for back in range(1, min(len(mask), len(scores)) + 1):
            if size_of(mask[-back]) == size_of(scores[-back]):
                join(scores[-back], mask[-back], why)
    return [[*q[:-1], v[-1]]]


def _edges(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    """triu, tril: the last two dims are positions."""
    came = rules.of(node.args[0])
    block_all(came[-2:], why)
    return [came]


def _moved(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    """roll and flip."""
    came = rules.of(node.args[0])
    dims = node.args[2] if node.name == "aten.roll" and len(node.args) > 2 else node.args[1]
    for at in dims if node.name == "aten.flip" or len(node.args) > 2 else range(len(came)):
        block(came[at], why)
    return [came]


def _padded(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    came, goal = rules.of(node.args[0]), _out(rules, node)
    pads = node.args[1]
    touched = {len(came) - 1 - place // 2 for place, pad in enumerate(pads) if pad}
    block_all((came[at] for at in touched), why)
    return [[one(size, why) if at in touched else came[at] for at, size in enumerate(goal)]]


def _repeat(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    came, times = rules.of(node.args[0]), node.args[1]
    came = [one(1)] * (len(times) - len(came)) + came
    found: Dims = []
    for dim, count in zip(came, times, strict=True):
        if count == 1:
            found.append(dim)
        elif len(dim) == 1:
            found.append(((*one(count, "" if size_of(dim) == 1 else why)[0], *dim[0]),))
        else:
            block(dim, why)
            found.append(one(size_of(dim) * count, why))
    return [found]


def _spatial(rules: Rules, node: Node, why: str) -> list[Dims | None]:
    came = rules.of(node.args[0])
    shapes = [rules.graph.values[number].shape for number in node.made]
    kept = len(came) - (2 if "2d" in node.name else 1)
    block_all(came[kept:], why)
    return [[*came[:kept], *(one(size, why) for size in shape[kept:])] for shape in shapes]


ALONG: dict[str, Rule] = {  # functions along dims, which need all of them
    **dict.fromkeys(("aten._softmax", "aten._log_softmax", "aten._safe_softmax"), _along(1, keeps=True)),
    **dict.fromkeys(("aten.cumsum", "aten.cumprod", "aten.logcumsumexp"), _along(1, keeps=True)),
    "aten.sort": _along(1, keeps=True, default=-1),
    "aten.topk": _along(2, keeps=False, default=-1),
    **dict.fromkeys(
        (
            "aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.any", "aten.all",
            "aten.prod", "aten.var", "aten.std", "aten.argmax", "aten.argmin", "aten.logsumexp",
            "aten.var_mean",
        ),
        _along(1, keeps=False),
    ),
    **dict.fromkeys(("aten.linalg_vector_norm", "aten.norm"), _along(2, keeps=False)),
}  # fmt: skip


def rule_of(op: Any) -> Rule | None:
    """The rule of an operator; None: nothing that reaches it is cut."""
    name = str(op.overloadpacket)
    if name.startswith("aten._scaled_dot_product"):
        return _attention
    pointwise = name in LIKE or torch.Tag.pointwise in op.tags
    return RULES.get(name, _pointwise if pointwise and name not in WHOLE else None)


RULES: dict[str, Rule] = {
    **dict.fromkeys((*NEW, "aten.scalar_tensor"), _new),
    **dict.fromkeys(("aten.arange", "aten.eye", "aten.linspace", "aten.randperm"), _positions),
    **dict.fromkeys(("aten.triu_indices", "aten.tril_indices", "aten.one_hot", "aten.randint"), _positions),
    **dict.fromkeys(("aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze"), _view),
    **dict.fromkeys(("aten._reshape_alias", "aten.unsqueeze_", "aten.squeeze_", "aten.squeeze"), _view),
    "aten._reshape_copy": _view,
    "aten.expand": _expand,
    **dict.fromkeys(("aten.permute", "aten.transpose", "aten.t", "aten.transpose_", "aten.t_"), _permute),
    "aten.select": _select,
    "aten.unbind": lambda rules, node, why: _select(rules, node, why) * len(node.outputs),
    "aten.slice": _slice,
    **dict.fromkeys(("aten.split", "aten.split_with_sizes", "aten.chunk"), _split),
    "aten.cat": _cat,
    "aten.stack": _stack,
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten.addmm", "aten.baddbmm"), _product),
    "aten.convolution": _convolution,
    "aten.embedding": _embedding,
    GROUP_NORM: _group_norm,
    "aten.native_layer_norm": _last(lambda node: len(node.args[1])),
    "aten._fused_rms_norm": _last(lambda node: len(node.args[1])),
    **ALONG,
    "aten.gather": _gather,
    **dict.fromkeys(("aten.scatter", "aten.scatter_", "aten.scatter_add", "aten.scatter_add_"), _scatter),
    "aten.index_select": _index_select,
    "aten.index": _index,
    **dict.fromkeys(("aten.triu", "aten.tril", "aten.triu_", "aten.tril_"), _edges),
    **dict.fromkeys(("aten.roll", "aten.flip"), _moved),
    "aten.constant_pad_nd": _padded,
    "aten.repeat": _repeat,
    **dict.fromkeys(SPATIAL, _spatial),
}  # fmt: skip
