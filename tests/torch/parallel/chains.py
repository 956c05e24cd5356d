"""Random chains of operators with random legal strategies, even and uneven: values and gradients."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

import unisono.parallel as up
from parallel import strategies
from parallel.group_of_a_job import process_group
from unisono.parallel.layouts.operators import RULES, rule_of

CHAINS = 60
SIZES = (1, 2, 4, 6, 8)
WIDTHS = (24, 46)  # 6 and 8 parts divide one of them


def steps(seed: int) -> tuple[Tensor, list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """A matrix, and operators to apply one after the other: (function, further arguments, named
    arguments).
    """
    dice, noise = random.Random(seed), torch.Generator().manual_seed(seed)

    def value(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=noise) / math.sqrt(shape[-1])).requires_grad_()

    x = value(24, dice.choice(WIDTHS))
    shape, chain = tuple(x.shape), []
    for _ in range(dice.randint(3, 6)):
        width, other = shape[-1], dice.choice(WIDTHS)
        kind = dice.randrange(11)
        function, args, named = [
            (torch.matmul, (value(width, other),), {}),
            (functional.linear, (value(other, width), value(other)), {}),
            (functional.gelu, (), {}),
            (torch.tanh, (), {}),
            (torch.add, (value(width),), {}),
            (torch.mul, (value(shape[0], 1),), {}),
            (torch.softmax, (-1,), {}),
            (functional.layer_norm, (value(width), value(width)), {}),
            (torch.transpose, (0, 1), {}),
            (torch.reshape, ((shape[0], 2, width // 2),), {}),
            (torch.mean, (-1,), {"keepdim": True}),
        ][kind]
        chain.append((function, args, named))
        if kind == 9:
            chain.append((torch.reshape, ((shape[0], width),), {}))
        if kind == 10:
            chain.append((torch.add, (value(shape[0], width),), {}))
        shape = tuple(apply(x, chain, plain).shape)
    if dice.random() < 0.5:
        targets = torch.randint(shape[1], (shape[0],), generator=noise)
        chain.append((functional.cross_entropy, (targets,), {}))
    return x, chain


def plain(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    if function is functional.layer_norm:
        return functional.layer_norm(args[0], args[0].shape[-1:], *args[1:], **named)
    return function(*args, **named)


def apply(x: Tensor, chain: list[Any], run: Callable[..., Tensor]) -> Tensor:
    for function, args, named in chain:
        x = run(function, (x, *args), named)
    return x


def strategy(dice: random.Random, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Random parts for every index that may be cut, as many in all as divide the ranks."""
    shapes = [tuple(arg.shape) for arg in args if isinstance(arg, Tensor)]
    signature = rule_of(function)(*shapes, *(arg for arg in args if not isinstance(arg, Tensor)), **named)
    left, parts = dist.get_world_size(), {}
    places = [
        (i, size)
        for dims, shape in zip(signature.inputs, shapes, strict=True)
        for i, size in zip(dims, shape, strict=True)
    ]
    for index in dice.sample(
        sorted({index for index, _ in places if index}), len({i for i, _ in places if i})
    ):
        length = math.gcd(*(size for i, size in places if i == index), signature.leads.get(index, 0))
        uneven = 0 if index in signature.leads else length // 2  # of more parts, some may be empty
        legal = [
            cut for cut in range(1, left + 1) if left % cut == 0 and (length % cut == 0 or cut <= uneven)
        ]
        parts[index] = 1 if index in signature.whole else dice.choice(legal)
        left //= parts[index]
    return tuple(tuple(parts[i] if i else 1 for i in dims) for dims in signature.inputs)


def leaves(x: Tensor, chain: list[Any]) -> list[Tensor]:
    return [
        x,
        *(arg for _, args, _ in chain for arg in args if isinstance(arg, Tensor) and arg.requires_grad),
    ]


def check_chain(seed: int) -> None:
    """Values and gradients are those of one process."""
    dice = random.Random(1000 + seed)
    x, chain = steps(seed)
    wanted = apply(x, chain, plain)
    weight = torch.linspace(-1, 1, wanted.numel()).view_as(wanted)
    grads = torch.autograd.grad((wanted * weight).sum(), leaves(x, chain))

    def run(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        return up.shard(function, strategy(dice, function, args, named))(*args, **named)

    got = up.whole(apply(x, chain, run))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    ours = torch.autograd.grad((got * weight).sum(), leaves(x, chain))
    for mine, one in zip(ours, grads, strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-3, atol=1e-4)


def check_matmuls() -> None:
    """One all_gather of the activation lies between the two, and nothing else; the profiler sees the same."""
    ranks = dist.get_world_size()
    x, w, v = torch.randn(8, 16), torch.randn(16, 32), torch.randn(32, 8)
    first, second = up.shard(torch.matmul, ((ranks, 1), (1, 1))), up.shard(torch.matmul, ((1, 1), (1, ranks)))
    second(first(x, w), v)  # the first call of each compares its plain inputs
    with up.record() as moves, torch.autograd.profiler.profile(record_shapes=True) as seen:
        second(first(x, w), v)
    assert [entry.move.kind for entry in moves] == ["all_gather"], str(moves)
    assert moves[0].nbytes == 8 * 32 * 4 * (ranks - 1) / ranks
    calls = [e for e in seen.function_events if e.name.startswith("unisono:")]
    assert [(e.name, e.input_shapes) for e in calls] == [("unisono:all_gather", [[8 // ranks, 32]])]


def check_moves() -> None:
    """What moves between strategies is one collective of so many bytes, also where several mesh axes cut."""
    ranks = dist.get_world_size()
    x, w = torch.randn(24, 48, requires_grad=True), torch.randn(48, 24)
    rows, columns, whole = ((ranks, 1),), ((1, ranks),), ((1, 1),)
    part, share = 24 * 48 * 4 / ranks, (ranks - 1) / ranks
    for first, second, kinds, nbytes in (
        (rows, columns, ["all_to_all"], share * part),
        (rows, whole, ["all_gather"], (ranks - 1) * part),
        (whole, rows, [], 0),
        (columns, columns, [], 0),
    ):
        y = up.shard(torch.neg, first)(x)
        then = up.shard(torch.neg, second)
        with up.record() as moves:
            z = then(y)
        assert [entry.move.kind for entry in moves] == kinds, str(moves)
        assert sum(entry.nbytes for entry in moves) == nbytes
        assert {entry.where for entry in moves} <= {"neg, input 0"}
        assert torch.equal(up.whole(z), x)
    total = up.shard(torch.matmul, ((1, ranks), (ranks, 1)))(x, w)
    for goal, kind in ((rows, "reduce_scatter"), (whole, "all_reduce")):
        with up.record() as moves:
            z = up.whole(up.shard(torch.neg, goal)(total))
        assert next(entry.move.kind for entry in moves) == kind, str(moves)
        torch.testing.assert_close(z, -(x @ w), rtol=1e-4, atol=1e-4)
    with up.record() as moves:
        up.shard(torch.softmax, columns)(x, 1).to_local().sum().backward()
    found = [(entry.where, entry.move.kind) for entry in moves]
    assert found[:2] == [("softmax", "all_reduce")] * 2, str(moves)
    assert ("softmax, backward", "all_reduce") in found
    assert found[-1] == ("softmax, input 0, backward", "all_gather")


def check_every_operator() -> None:
    """Every function of the table under random strategies, and the modules: values and gradients."""
    noise, x = torch.Generator().manual_seed(0), (24, 46)
    batch, tokens = (24, 46, 24), torch.randint(46, (24, 2), generator=noise)
    some = torch.where(torch.arange(24) % 5 < 2 + torch.arange(24) // 12, -100, tokens[:, 0])
    calls: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
        torch.matmul: [((x, (46, 24)), {}), ((batch, (24, 12)), {}), (((24, 1, 4, 8), (46, 8, 4)), {})],
        torch.mm: [((x, (46, 24)), {})],
        torch.bmm: [((batch, (24, 24, 12)), {})],
        functional.linear: [((batch, (46, 24), (46,)), {}), ((x, (24, 46)), {})],
        functional.embedding: [((tokens, (46, 24)), {})],
        functional.layer_norm: [((batch,), {}), ((x, (46,)), {}), ((x, (46,), (46,)), {"eps": 0.1})],
        functional.scaled_dot_product_attention: [
            (((24, 2, 24, 8),) * 3, {}), (((24, 2, 24, 8),) * 3, {"is_causal": True}),
        ],
        torch.sum: [((x,), {}), ((batch, 1), {}), ((batch, (0, -1)), {"keepdim": True})],
        torch.mean: [((x, 0), {}), ((batch,), {}), ((batch, -1), {"keepdim": True})],
        torch.transpose: [((batch, 0, -1), {})],
        torch.permute: [((batch, (2, 0, 1)), {})],
        torch.reshape: [((batch, (-1, 24)), {}), ((x, (4, 6, 46)), {})],
        torch.softmax: [((batch, 1), {}), ((x, -1), {})],
        functional.softmax: [((x, 0), {})],
        functional.cross_entropy: [
            ((x, tokens[:, 0]), {}),
            ((x, tokens[:, 0]), {"reduction": "sum"}),
            ((x, some), {}),  # ranks with rows that do not count, and more of them on the last one
            ((x, tokens[:, 0]), {"ignore_index": int(tokens[0, 0])}),
        ],
        functional.gelu: [((x,), {"approximate": "tanh"})],
        functional.conv1d: [(((24, 6, 9), (46, 6, 3)), {"padding": 1})],
        functional.conv2d: [
            (((24, 8, 9, 7), (46, 8, 3, 2), (46,)), {"stride": (2, 1)}),
            (((24, 8, 9, 7), (24, 4, 3, 3)), {"groups": 2, "dilation": 2}),
        ],
        functional.conv3d: [(((24, 8, 3, 5, 4), (6, 8, 2, 2, 2), (6,)), {})],
        torch.add: [((x, (24, 1)), {"alpha": 2})],
        **{key: [((batch, (46, 24)), {})] for key in (torch.sub, torch.mul, torch.div, torch.maximum)},
        torch.minimum: [((x, x), {})],
    }  # fmt: skip
    dice = random.Random(dist.get_world_size())

    def value(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=noise, dtype=torch.float64).requires_grad_()

    for function in RULES:
        for shapes, named in calls.get(function, [((x,), {})]):
            args = [value(one) if is_shape(function, one, at) else one for at, one in enumerate(shapes)]
            compare_with_plain(function, tuple(args), named, dice)
    ranks = dist.get_world_size()
    for module, cuts in (
        (nn.Linear(46, 24), ((1, ranks), (1, ranks), (1,))),
        (nn.Embedding(46, 24), ((1, 1), (ranks, 1))),
        (nn.LayerNorm(46), ((1, ranks), (ranks,), (ranks,))),
    ):
        given = tokens if isinstance(module, nn.Embedding) else torch.rand(x, generator=noise)
        module.load_state_dict(
            {key: torch.rand(v.shape, generator=noise) for key, v in module.state_dict().items()}
        )
        torch.testing.assert_close(up.whole(up.shard(module, cuts)(given)), module(given))


def is_shape(function: Any, value: Any, place: int) -> bool:
    """Whether an argument in the table above stands for a tensor of that shape."""
    takes_dims = function in (torch.sum, torch.mean, torch.permute, torch.reshape)
    return isinstance(value, tuple) and not (takes_dims and place)


def compare_with_plain(
    function: Any, args: tuple[Any, ...], named: dict[str, Any], dice: random.Random
) -> None:
    """Values and gradients of a sharded call are those of the plain one, under random strategies."""
    wanted = plain(function, args, named)
    weight = torch.linspace(-1, 1, wanted.numel()).view_as(wanted)
    learned = [one for one in args if isinstance(one, Tensor) and one.requires_grad]
    grads = torch.autograd.grad((wanted * weight).sum(), learned)
    for _ in range(1 + 2 // dist.get_world_size()):
        cuts = strategy(dice, function, args, named)
        got = up.whole(up.shard(function, cuts)(*args, **named))
        ours = torch.autograd.grad((got * weight).sum(), learned)
        for mine, one in zip((got, *ours), (wanted, *grads), strict=True):
            assert torch.allclose(mine, one), (function.__name__, cuts)


def check_what_dtensor_left() -> None:
    """What DTensor's own operators make of a result: means, maxima, uneven parts."""
    x = torch.arange(96.0).view(24, 4).requires_grad_()
    y = up.shard(torch.mul, ((dist.get_world_size(), 1),) * 2)(x, x)
    for name in ("mean", "amax", "sum"):
        torch.testing.assert_close(up.whole(getattr(y, name)()), getattr(x * x, name)())
    (grad,) = torch.autograd.grad(up.whole(y.mean()), x)
    torch.testing.assert_close(grad, 2 * x / x.numel())
    for rows in (1, 5, 25):
        whole = torch.arange(3.0 * rows).view(rows, 3)
        uneven = distribute_tensor(whole, y.device_mesh, [Shard(0)] * y.device_mesh.ndim, src_data_rank=None)
        assert torch.equal(up.whole(uneven), whole)
        assert torch.equal(up.whole(up.shard(torch.neg, ((1, 1),))(uneven)), -whole)


def check_refusals() -> None:
    """What would be wrong in silence."""
    x = torch.ones(24, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"shard\(add\): give tensors by position, not other="):
        up.shard(torch.add, ((1, 1),))(x, other=x)
    y = up.whole(up.shard(torch.exp, ((dist.get_world_size(), 1),))(x)).sum()
    with pytest.raises(RuntimeError, match="differentiated again"):
        torch.autograd.grad(y, x, create_graph=True)
    ranks = dist.get_world_size()
    if ranks > 2:
        with pytest.raises(ValueError, match=rf"neg: dimension 0 of input 0 is 2: of {ranks} parts some"):
            up.shard(torch.neg, ((ranks, 1),))(x[:2])
        with pytest.raises(ValueError, match=rf"Linear.weight: dimension 0 of input 0 is 2: of {ranks}"):
            up.shard(nn.Linear(3, 2), ((1, 1), (ranks, 1), (1,)))
    for function in (functional.linear, functional.cross_entropy):
        with pytest.raises(ValueError, match=rf"{function.__name__}: .* must have the dimensions"):
            up.shard(function, ((1, 1), (1, 1, 1)))(x, torch.ones(4, 4, 4))
    with pytest.raises(TypeError, match="label_smoothing"):
        up.shard(functional.cross_entropy, ((1, 1), (1,)))(x, torch.zeros(24).long(), label_smoothing=0.5)


def main(rank: int, size: int, folder: Path) -> None:
    with process_group(rank, size, folder):
        for seed in range(SIZES.index(size), CHAINS, len(SIZES)):
            check_chain(seed)
        check_every_operator()
        check_what_dtensor_left()
        check_refusals()
        if size > 1:
            check_moves()
        if size in (2, 4, 8):
            check_matmuls()
        if size == 8:
            strategies.check_the_program_of_the_text(folder)
