"""The fused attention operators of a GPU: flash, memory-efficient and cuDNN's, with their gradients.

They return the logarithm of each row's sum of exponentials, which ring attention combines. Gradients take
it as given, so it may be that of more keys than the call has. Source: Dao et al. 2022, FlashAttention.
"""

from __future__ import annotations

import functools
import itertools
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unisono.torch_internals.fake import arguments_of

from .environment import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

WHOLE = (-1, -1)


class AttentionCall(NamedTuple):
    """The settings of one call, whose tensors are [batch, heads, length, numbers].

    Attributes:
        bias: added to the scores.
        window: how many keys left and right of its own a query sees; -1: all. Queries and keys are aligned at
            their `lower_right` ends, or else at their beginnings.
        seed: of the dropout.
    """

    bias: Tensor | None = None
    dropout: float = 0.0
    scale: float | None = None
    window: tuple[int, int] = WHOLE
    lower_right: bool = False
    seed: int = 0

    def fits_the_cpu(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether PyTorch's fused kernel of the CPU computes this."""
        causal, square = self.window == (-1, 0), q.shape[2] == k.shape[2]
        types = {x.dtype for x in (q, k, v)}
        plain = self.bias is None and not self.dropout and len(types) == 1 and q.dtype != torch.float64
        return (
            plain
            and self.window in (WHOLE, (-1, 0))
            and (square or not causal)
            and q.shape == (*q.shape[:3], v.shape[3])
            and q.numel() > 0
            and k.numel() > 0
        )

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return [batch, heads, queries, keys] in f32; -inf where a query does not see a key."""
        scores = _wide(q) @ _wide(k).mT * self.factor(q)
        if self.bias is not None:
            bias = self.bias
            scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
        if self.window == WHOLE:
            return scores
        n, m = scores.shape[-2:]
        shift = m - n if self.lower_right else 0
        distance = torch.arange(m, device=q.device) - torch.arange(n, device=q.device)[:, None] - shift
        left, right = self.window
        hidden = (distance > right) if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
        hidden = hidden | (distance < -left) if left >= 0 else hidden
        return scores.masked_fill(hidden, -math.inf)

    def factor(self, q: Tensor) -> float:
        """Return the factor of the scores."""
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    def kept(self, scores: Tensor) -> Tensor | float:
        """Return the dropout's factors, the same ones in each call."""
        if not self.dropout:
            return 1.0
        generator = torch.Generator(scores.device).manual_seed(self.seed)
        return (torch.rand(scores.shape, generator=generator) >= self.dropout) / (1 - self.dropout)


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithms [batch, heads, queries] in f32."""
    k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    if call.fits_the_cpu(q, k, v):
        causal = call.window != WHOLE
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=call.scale
        )
        return out, sums.contiguous()
    scores = call.scores(q, k)
    sums = scores.logsumexp(-1)
    weights = _weights(scores, sums)
    return ((weights * call.kept(scores)) @ _wide(v)).to(q.dtype), sums


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the bias."""
    heads = k.shape[1]
    k, v = (_repeated(x, q.shape[1]) for x in (k, v))
    scores = call.scores(q, k)
    weights = _weights(scores, sums)
    kept = call.kept(scores)
    of_v = (weights * kept).mT @ _wide(grad)
    of_weights = (_wide(grad) @ _wide(v).mT) * kept
    of_scores = weights * (of_weights - (_wide(grad) * _wide(out)).sum(-1, keepdim=True))
    of_q, of_k = of_scores @ _wide(k) * call.factor(q), of_scores.mT @ _wide(q) * call.factor(q)
    of_k, of_v = (_summed(x, heads) for x in (of_k, of_v))
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_scores


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    """Return the softmax; 0 for a query that sees no key."""
    return (scores - sums.masked_fill(sums == -math.inf, 0)[..., None]).exp()


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Give each head of the queries its keys, where several share them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.reshape(x.shape[0], heads, -1, *x.shape[2:]).sum(2)


# ---- the operators: `a` has the arguments by their names in PyTorch's schema ----


def _call(a: Any, *, lower_right: bool = False, seed: int | None = None) -> AttentionCall:
    """Return the settings. seed: that of the forward, in a backward."""
    bias = getattr(a, "attn_bias", None)
    left, right = getattr(a, "window_size_left", None), getattr(a, "window_size_right", None)
    window = (-1 if left is None else left, 0 if a.is_causal else -1 if right is None else right)
    drawn = int(torch.randint(2**31, (), device="cuda")) if a.dropout_p and seed is None else seed or 0
    kept = None if bias is None or not bias.numel() else bias
    return AttentionCall(kept, a.dropout_p or 0.0, a.scale, window, lower_right, drawn)


def _seed(a: Any, state: Tensor) -> int:
    return int(state.flatten()[0]) if a.dropout_p else 0


def _states(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return flash's state of random numbers, and what goes with it."""
    return torch.tensor([call.seed, 0]).to(torch.uint64), torch.tensor(0).to(torch.uint64)


def _dense(a: Any, *, lower_right: bool = False) -> tuple[AttentionCall, Tensor, Tensor]:
    call = _call(a, lower_right=lower_right)
    return call, *forward(a.query, a.key, a.value, call)


def flash(a: Any) -> tuple[Any, ...]:
    """Causal queries and keys of other lengths are aligned at their ends."""
    call, out, sums = _dense(a, lower_right=True)
    return out, sums, None, None, a.query.shape[2], a.key.shape[2], *_states(call), a.query.new_empty(0)


def efficient(a: Any) -> tuple[Tensor, ...]:
    """The logarithms have room for rows in multiples of 32."""
    call, out, sums = _dense(a)
    room = torch.nn.functional.pad(sums, (0, -sums.shape[2] % 32), value=math.inf)
    return out, room if a.compute_log_sumexp else sums[..., :0], torch.tensor(call.seed), torch.tensor(0)


def cudnn(a: Any) -> tuple[Any, ...]:
    """The logarithms have one dimension more."""
    call, out, sums = _dense(a)
    kept, states = sums[..., None], (torch.tensor(call.seed), torch.tensor(0))
    kept = kept if a.compute_log_sumexp else sums.new_empty(0)
    return out, kept, None, None, a.query.shape[2], a.key.shape[2], *states, a.query.new_empty(0)


def dense_backward(a: Any, *, lower_right: bool = False) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key and value; of the bias with `efficient`, if it is wanted."""
    call = _call(a, lower_right=lower_right, seed=_seed(a, a.philox_seed))
    sums = a.logsumexp.flatten(2)[..., : a.query.shape[2]]
    mask = getattr(a, "grad_input_mask", None)
    grad = a.grad_out if mask is None else a.grad_out_
    *made, of_bias = backward(grad, a.query, a.key, a.value, a.out, sums, call)
    if mask is None:
        return tuple(made)
    wanted = call.bias is not None and mask[3]
    return *made, of_bias.sum_to_size(a.attn_bias.shape).to(a.attn_bias.dtype) if wanted else None


def _sequences(a: Any) -> Iterator[tuple[slice, slice]]:
    """Yield the places of each sequence's queries and keys; without `cum_seq_q` those of each of a batch."""
    if a.cum_seq_q is None or not a.cum_seq_q.numel():
        yield from ((slice(i, i + 1), slice(i, i + 1)) for i in range(a.query.shape[0]))
        return
    used, of_keys = getattr(a, "seqused_k", None), a.cum_seq_k
    places = (a.cum_seq_q if of_keys is None or not of_keys.numel() else of_keys).tolist()
    for i, (first, end) in enumerate(itertools.pairwise(a.cum_seq_q.tolist())):
        last = places[i + 1] if used is None else places[i] + int(used[i])
        yield slice(first, end), slice(places[i], last)


def _as_heads(x: Tensor) -> Tensor:
    """[length, heads, numbers] or [1, length, heads, numbers] -> [1, heads, length, numbers]."""
    return (x if x.dim() == 4 else x[None]).transpose(1, 2)


def varlen(a: Any) -> tuple[Any, ...]:
    """Attend within sequences that lie one behind the other: [all lengths, heads, numbers]."""
    if a.block_table is not None or a.alibi_slopes is not None:
        raise NotImplementedError(f"a virtual GPU has no paged attention and no ALiBi: use a mask. {PAGE}")
    q, k, v = a.query, a.key, a.value
    call, packed = _call(a, lower_right=True), q.dim() == 3
    out, rows = q.new_zeros((*q.shape[:-1], v.shape[-1])), []
    for of_q, of_k in _sequences(a):
        made, sums = forward(_as_heads(q[of_q]), _as_heads(k[of_k]), _as_heads(v[of_k]), call)
        out[of_q] = made.transpose(1, 2).view_as(out[of_q])
        rows.append(sums[0] if packed else sums)
    return out, torch.cat(rows, int(packed)), *_states(call), q.new_empty(0)


def varlen_backward(a: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value."""
    call = _call(a, lower_right=True, seed=_seed(a, a.rng_state))
    made = tuple(torch.zeros_like(x) for x in (a.query, a.key, a.value))
    for of_q, of_k in _sequences(a):
        given = ((a.query, of_q), (a.key, of_k), (a.value, of_k), (a.out, of_q), (a.grad_out, of_q))
        q, k, v, out, grad = (_as_heads(x[place]) for x, place in given)
        rows = a.logsumexp[None, :, of_q] if a.query.dim() == 3 else a.logsumexp[of_q]
        grads = backward(grad, q, k, v, out, rows, call)[:3]
        for whole, place, each in zip(made, (of_q, of_k, of_k), grads, strict=True):
            whole[place] = each.transpose(1, 2).view_as(whole[place])
    return made


def varlen_into(a: Any) -> Tensor:
    """Write the output of `varlen`; return its logarithms."""
    made, sums, *_ = varlen(a)
    a.out.copy_(made)
    return sums  # type: ignore[no-any-return]


def _with_names(name: str, kernel: Callable[[Any], Any]) -> Callable[..., Any]:
    """Give a kernel its arguments by name, and its results the strides that PyTorch's rule of shapes says.

    Compiled graphs rely on those.
    """
    operation = getattr(torch.ops.aten, name)
    defaults = {each.name: each.default_value for each in arguments_of(operation.default)}

    def run(*args: Any, **kwargs: Any) -> Any:
        made = kernel(SimpleNamespace(**{**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}))
        if not isinstance(made, tuple):
            return made
        wanted = operation(*map(_shape, args), **{key: _shape(value) for key, value in kwargs.items()})
        return tuple(map(_restrided, made, wanted))

    return run


def _shape(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


def _restrided(x: Any, wanted: Any) -> Any:
    both = isinstance(x, torch.Tensor) and isinstance(wanted, torch.Tensor)
    if not both or x.shape != wanted.shape or x.stride() == wanted.stride():
        return x
    return torch.empty_strided(x.size(), wanted.stride(), dtype=x.dtype, device=x.device).copy_(x)


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": functools.partial(dense_backward, lower_right=True),
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": dense_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": dense_backward,
    "_flash_attention_forward": varlen,
    "_flash_attention_backward": varlen_backward,
    "_flash_attention_forward_no_dropout_inplace": varlen_into,
}
KERNELS = {name: _with_names(name, each) for name, each in OPERATORS.items() if hasattr(torch.ops.aten, name)}
