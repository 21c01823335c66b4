"""Attention (jagged, in blocks) and GDPA in MX precision, emulated: the numbers that block-scaled matrix units would
produce. A recipe of format `hopper` goes to hopper_function.py instead, whose forward pass is real on Hopper.

Every GEMM multiplies MX values along its own reduction axis and adds in float32:

    forward    S = q k^T (head dim)      o  = P v    (keys)
    backward   dP = do v^T (head dim)    dv = P^T do (queries)    dq = dS k (keys)    dk = dS^T q (queries)

With (1, 32) blocks each operand is quantised once for every reduction axis it meets; with (32, 32) blocks once, for
all of them. Blocks along a token axis start with the sequence and end with it, so that no sequence sets another's
scales.

P is quantised on the fly from exp(S - row maximum), which is at most 1, so that block maxima are known from the
score maxima that softmax tracks anyway; the denominator is summed from the values before quantising, and divides
after the second GEMM. The backward pass quantises P = exp(S - lse). D = rowsum(do * o), softmax itself and all
accumulation stay in float32. Operands that the recipe leaves high are rounded to the dtype of q, which is what a
kernel in that dtype multiplies.

With `hadamard`, q, k, v and do are rotated along the head dimension (zero-padded to a multiple of 32). q k^T and do
v^T do not change, and o, dq, dk, dv come out rotated and are rotated back. P and dS are never rotated.

Vectorised over sequences of similar length: lengths are padded to 32, 64, 128, ... (on a GPU 64, 256, 1024, ...) and
sequences with the same two padded lengths go through together. How far a sequence is padded depends on its own lengths
alone, so its result does not depend on the rest of the batch; with stochastic rounding (gradients) the random numbers
do.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import jagged
from ..gdpa import activations
from ..rotary.api import Rotary, apply_rotary
from ..validation import strict_float32
from . import hopper_function
from .formats import BLOCK, Hadamard
from .quantize import rotate, round_to_mx
from .recipe import Recipe

SOFTMAX = "softmax"
GROUP_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}  # most elements of one score matrix in memory (4 MiB, 512 MiB)
# Smallest padded length and ratio of the next: a GPU has less to lose by padding than by the launches of more groups.
LADDERS = {"cpu": (32, 2), "cuda": (64, 4)}


def jagged_attention_mx(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    recipe: Recipe,
) -> Tensor:
    """Softmax attention of `jagged_attention` with the operands that `recipe.attention` names in MX precision.

    q [Tq, H, D], k, v [Tkv, H, D], offsets and the result [Tq, H, D] as in `jagged_attention` (kv_offsets None =
    self-attention; q_offsets None = queries [Lq, H, D] shared by all sequences, result [B, Lq, H, D]). scale None =
    D^-0.5. window w: |i - j| <= w, self-attention only. Differentiable once. Emulated numerics, any device; it says
    nothing about speed.
    """
    if window is not None and (window < 0 or (kv_offsets is not None and kv_offsets is not q_offsets)):
        raise ValueError(f"window: {window}; allowed: >= 0, self-attention only (kv_offsets None)")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _run(q, k, v, q_offsets, kv_offsets, SOFTMAX, scale, recipe, window=window)


def block_attention_mx(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Rotary | None = None,
    recipe: Recipe,
) -> Tensor:
    """`block_attention` with the operands that `recipe.attention` names in MX precision. Arguments as there.

    Rotated tensors are rounded to their dtype before they are quantised. Each block of block_size rows counts as a
    sequence, so that no scale spans two of them.
    """
    if block_size < 1:
        raise ValueError(f"block_size: {block_size}; allowed: >= 1")
    if rotary is not None:
        tables = rotary.cos, rotary.sin, rotary.interleaved
        q, k, v = (
            apply_rotary(x, *tables) if name in rotary.on else x for name, x in zip("qkv", (q, k, v), strict=True)
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _run(q, k, v, offsets, None, SOFTMAX, scale, recipe, block_size=block_size)


def gdpa_mx(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    kv_offsets: Tensor | None = None,
    *,
    activation: str = "gelu_tanh",
    scale: float = 1.0,
    recipe: Recipe,
) -> Tensor:
    """GDPA, act(scale q k^T) v, with the operands that `recipe.attention` names in MX precision. Arguments as in
    `gdpa`."""
    activations.get(activation)
    return _run(q, k, v, q_offsets, kv_offsets, activation, scale, recipe)


def _run(q, k, v, q_offsets, kv_offsets, activation, scale, recipe, window=None, block_size=None) -> Tensor:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe: {type(recipe).__name__}; allowed: mxfp8.Recipe")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[1:] != q.shape[1:]:
            raise ValueError(
                f"{name}: shape {tuple(x.shape)}; allowed: [rows, H, D] with q's H, D = {tuple(q.shape[1:])}"
            )
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k, v: {k.shape[0]} and {v.shape[0]} rows; allowed: as many of each")
    kv_offsets = q_offsets if kv_offsets is None else kv_offsets
    if kv_offsets is None:
        raise ValueError("kv_offsets: missing; allowed: offsets of k and v when q_offsets is None")
    shared = q_offsets is None
    if shared:  # every sequence gets its own copy of the queries; autograd sums the copies' gradients
        batch, length = kv_offsets.shape[0] - 1, q.shape[0]
        q_offsets = torch.arange(batch + 1, dtype=kv_offsets.dtype, device=kv_offsets.device) * length
        if kv_offsets.is_cuda and not torch.compiler.is_compiling() and jagged.has_values(kv_offsets):
            jagged.remember(q_offsets, torch.arange(batch + 1, dtype=kv_offsets.dtype) * length)
        q = q.expand(batch, *q.shape).flatten(0, 1)
    jagged.check_offsets(q_offsets, "q_offsets", q.shape[0])
    jagged.check_offsets(kv_offsets, "kv_offsets", k.shape[0], batch=q_offsets.shape[0] - 1)
    if recipe.format == "hopper":
        for name, value in (("window", window), ("block_size", block_size)):
            if value is not None:
                raise ValueError(f"{name}: {value}; allowed in format hopper: None (no 8-bit kernel has it)")
        o = hopper_function.attention(q, k, v, q_offsets, kv_offsets, activation=activation, scale=scale, recipe=recipe)
    else:
        o, _ = torch.ops.gem_kernels.mx_attention(
            q, k, v, q_offsets, kv_offsets, float(scale), window, block_size, activation, recipe.encode()
        )
    return o.unflatten(0, (batch, length)) if shared else o


class _Rows(NamedTuple):
    """One side of a group: the packed row of each padded place [n, L] (0 where there is none), whether there is one
    [n, L], and the flat places with and without."""

    packed: Tensor
    valid: Tensor
    full: Tensor
    empty: Tensor


class _Group(NamedTuple):
    """Sequences of one padded size: rows of their queries and of their keys."""

    queries: _Rows
    keys: _Rows

    def pairs(self, window: int | None) -> Tensor:
        """bool [n, 1, Lq, Lk]: the pairs that exist and lie in the window."""
        valid = self.queries.valid[:, :, None] & self.keys.valid[:, None, :]
        if window is not None:
            i = torch.arange(valid.shape[1], device=valid.device)[:, None]
            j = torch.arange(valid.shape[2], device=valid.device)[None, :]
            valid = valid & ((i - j).abs() <= window)
        return valid[:, None]


def _padded(lengths: Tensor, first: int, growth: int) -> Tensor:
    """first, first * growth, first * growth^2, ...: the least that holds each length > 0. growth: a power of two."""
    steps = torch.log2((lengths.double() / first).clamp(min=1.0)) / (growth.bit_length() - 1)
    return first * growth ** torch.ceil(steps).long()


def _block_offsets(offsets: Tensor, block_size: int) -> Tensor:
    """Offsets in which every block of block_size rows, counted from its sequence's start, is a sequence."""
    starts = offsets.long()
    counts = (starts.diff() + block_size - 1) // block_size
    within = torch.arange(int(counts.sum()), device=offsets.device)
    within = within - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.cat([starts[:-1].repeat_interleave(counts) + within * block_size, starts[-1:]])


def _groups(q_offsets: Tensor, kv_offsets: Tensor, heads: int, block_size: int | None) -> tuple[_Group, ...]:
    """All sequences (or blocks) with a query and a key, in groups of equal padded lengths and bounded memory.

    Made from the offsets' values on the host, and kept: layers of one model and their backward passes ask for the same.
    """
    host = (jagged.host_offsets(offsets).long() for offsets in (q_offsets, kv_offsets))
    content = tuple(tuple(offsets.tolist()) for offsets in host)
    return _groups_of(*content, heads, block_size, q_offsets.device)


@lru_cache(maxsize=16)
def _groups_of(q_offsets: tuple, kv_offsets: tuple, heads: int, block_size: int | None, device) -> tuple[_Group, ...]:
    q_starts, k_starts = (torch.tensor(offsets, device="cpu") for offsets in (q_offsets, kv_offsets))
    if block_size is not None:
        q_starts = k_starts = _block_offsets(q_starts, block_size)
    budget = GROUP_ELEMENTS.get(device.type, GROUP_ELEMENTS["cuda"])
    ladder = LADDERS.get(device.type, LADDERS["cuda"])
    q_lengths, k_lengths = q_starts.diff(), k_starts.diff()
    used = ((q_lengths > 0) & (k_lengths > 0)).nonzero().flatten()
    sizes = torch.stack([_padded(q_lengths[used], *ladder), _padded(k_lengths[used], *ladder)], 1)
    groups = []
    for q_size, k_size in sizes.unique(dim=0).tolist():
        members = used[(sizes == torch.tensor([q_size, k_size])).all(1)]
        for chunk in members.split(max(1, budget // (heads * q_size * k_size))):
            queries = _rows(q_starts[chunk], q_lengths[chunk], q_size, device)
            groups.append(_Group(queries, _rows(k_starts[chunk], k_lengths[chunk], k_size, device)))
    return tuple(groups)


def _rows(starts: Tensor, lengths: Tensor, size: int, device) -> _Rows:
    """Rows of sequences (starts and lengths on the host) padded to `size`, on `device`, which nothing waits for."""
    events, places = int(lengths.sum()), len(lengths) * size
    starts, lengths = torch.stack([starts, lengths]).to(device, non_blocking=True)
    place = torch.arange(size, device=device)
    valid = place < lengths[:, None]
    packed = (starts[:, None] + place).masked_fill(~valid, 0)
    full = _places(torch.zeros_like(lengths), lengths, size, events)
    return _Rows(packed, valid, full, _places(lengths, size - lengths, size, places - events))


def _places(first: Tensor, counts: Tensor, size: int, total: int) -> Tensor:
    """Flat places of a table with rows of `size`: in row i the counts[i] ones from first[i] on; total: their number."""
    owner = torch.repeat_interleave(counts, output_size=total)
    within = torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[owner]
    return owner * size + first[owner] + within


def _zero_outside(x: Tensor, pairs: Tensor) -> Tensor:
    """float32 x, in place, 0 where `pairs` says no, whatever x holds there. On bits: a CPU's masked_fill is slow."""
    x.view(torch.int32).bitwise_and_(-pairs.to(torch.int32))
    return x


class _Operands:
    """Quantises what a group's GEMMs need: `along(x, name, dim)` gives MX values for a GEMM that sums over `dim`."""

    def __init__(self, recipe: Recipe, dtype: torch.dtype, head_dim: int):
        self.recipe, self.dtype, self.head_dim = recipe, dtype, head_dim
        self.rotation = None if recipe.hadamard is None else Hadamard(recipe.hadamard)
        self.cache: dict[str, Tensor] = {}

    def gather(self, x: Tensor, rows: _Rows) -> Tensor:
        """Packed x [T, H, D] -> float32 [n, H, L, D or more], zeros in the padding, rotated if the recipe says so."""
        padded = x.index_select(0, rows.packed.flatten()).float().index_fill_(0, rows.empty, 0.0)
        padded = padded.unflatten(0, rows.packed.shape).transpose(1, 2)
        if self.rotation is None:
            return padded
        return rotate(F.pad(padded, (0, -self.head_dim % BLOCK)), self.rotation)

    def scatter(self, out: Tensor, values: Tensor, rows: _Rows) -> None:
        """Write values [n, H, L, D or more] to their packed rows of out [T, H, D]."""
        if self.rotation is not None:
            values = rotate(values, self.rotation, back=True)[..., : self.head_dim]
        places = rows.packed.flatten()[rows.full]
        out.index_copy_(0, places, values.transpose(1, 2).flatten(0, 1).index_select(0, rows.full).to(out.dtype))

    def along(self, x: Tensor, name: str, dim: int) -> Tensor:
        """Values of x [n, H, rows, columns] as the GEMM over axis `dim` (-1 or -2) sees operand `name`, float32."""
        if name not in self.recipe.attention:
            return x.to(self.dtype).float()
        if self.recipe.attention_block == (1, 32):
            return self._round(x, name, (dim,))
        if name not in self.cache:  # a square block serves both orientations
            self.cache[name] = self._round(x, name, (-2, -1))
        return self.cache[name]

    def _round(self, x: Tensor, name: str, dims: tuple[int, ...]) -> Tensor:
        return round_to_mx(
            x,
            dims,
            dtype=self.recipe.dtype(name),
            scale_mode=self.recipe.scale_mode,
            stochastic=self.recipe.rounds_stochastically(name),
        )


@strict_float32()
def _forward(q, k, v, q_offsets, kv_offsets, scale, window, block_size, activation, recipe) -> tuple[Tensor, Tensor]:
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full((q.shape[1], q.shape[0]), float("inf"), dtype=torch.float32, device=q.device)
    for group in _groups(q_offsets, kv_offsets, q.shape[1], block_size):
        use = _Operands(recipe, q.dtype, q.shape[2])
        queries = use.gather(q, group.queries)
        keys = use.gather(k, group.keys)
        values = use.gather(v, group.keys)
        scores = (use.along(queries, "q", -1) @ use.along(keys, "k", -1).mT).mul_(scale)
        pairs = group.pairs(window)
        if activation == SOFTMAX:
            top = scores.masked_fill(~pairs, float("-inf")).amax(-1, keepdim=True)
            p = _zero_outside(scores.sub_(top).exp_(), pairs)
            total = p.sum(-1, keepdim=True)
            row_lse = (top + total.log()).squeeze(-1)
            places = group.queries.packed.flatten()[group.queries.full]
            lse[:, places] = row_lse.transpose(1, 2).flatten(0, 1).index_select(0, group.queries.full).T
        else:
            p, total = activations.masked_value(activation, scores, pairs), 1.0
        use.scatter(o, use.along(p, "p", -1) @ use.along(values, "v", -2) / total, group.queries)
    return o, lse


@strict_float32()
def _backward(do, q, k, v, o, lse, q_offsets, kv_offsets, scale, window, block_size, activation, recipe):
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for group in _groups(q_offsets, kv_offsets, q.shape[1], block_size):
        use = _Operands(recipe, q.dtype, q.shape[2])
        queries = use.gather(q, group.queries)
        keys = use.gather(k, group.keys)
        values = use.gather(v, group.keys)
        grads = use.gather(do, group.queries)
        pairs = group.pairs(window)
        scores = (use.along(queries, "q", -1) @ use.along(keys, "k", -1).mT).mul_(scale)
        dp = use.along(grads, "do", -1) @ use.along(values, "v", -1).mT
        if activation == SOFTMAX:
            row_lse = lse[:, group.queries.packed].transpose(0, 1).unsqueeze(-1)
            p = _zero_outside(scores.sub_(row_lse).exp_(), pairs)
            delta = (grads * use.gather(o, group.queries)).sum(-1, keepdim=True)
            ds = dp.sub_(delta).mul_(p)
        else:
            p = activations.masked_value(activation, scores, pairs)
            ds = activations.masked_pullback(activation, dp, scores, pairs)
        d_values = use.along(p, "p", -2).mT @ use.along(grads, "do", -2)
        d_queries = scale * (use.along(ds, "ds", -1) @ use.along(keys, "k", -2))
        d_keys = scale * (use.along(ds, "ds", -2).mT @ use.along(queries, "q", -2))
        use.scatter(dq, d_queries, group.queries)
        use.scatter(dk, d_keys, group.keys)
        use.scatter(dv, d_values, group.keys)
    return dq, dk, dv


@torch.library.custom_op("gem_kernels::mx_attention", mutates_args=())
def _mx_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    scale: float,
    window: int | None,
    block_size: int | None,
    activation: str,
    recipe: str,
) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, q_offsets, kv_offsets, scale, window, block_size, activation, Recipe.decode(recipe))


@_mx_attention.register_fake
def _(q, k, v, q_offsets, kv_offsets, scale, window, block_size, activation, recipe):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@torch.library.custom_op(
    "gem_kernels::mx_attention_backward", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def _mx_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    scale: float,
    window: int | None,
    block_size: int | None,
    activation: str,
    recipe: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(
        do, q, k, v, o, lse, q_offsets, kv_offsets, scale, window, block_size, activation, Recipe.decode(recipe)
    )


@_mx_attention_backward.register_fake
def _(do, q, k, v, o, lse, q_offsets, kv_offsets, scale, window, block_size, activation, recipe):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, q_offsets, kv_offsets, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, q_offsets, kv_offsets)


def _autograd_backward(ctx, do, _):
    grads = torch.ops.gem_kernels.mx_attention_backward(do, *ctx.saved_tensors, *ctx.options)
    return *grads, *[None] * 7


_mx_attention.register_autograd(_autograd_backward, setup_context=_setup_context)


def _useful_pairs(q_offsets: Tensor, kv_offsets: Tensor, window: int | None, block_size: int | None) -> int:
    if block_size is not None:
        q_offsets = kv_offsets = _block_offsets(q_offsets, block_size)
    q_lengths, k_lengths = q_offsets.long().diff(), kv_offsets.long().diff()
    if window is None:
        return int((q_lengths * k_lengths).sum())
    reach = (q_lengths - 1).clamp(min=0, max=window)
    return int((q_lengths * (2 * reach + 1) - reach * (reach + 1)).sum())


@register_flop_formula(torch.ops.gem_kernels.mx_attention, get_raw=True)
def _forward_flops(q, k, v, q_offsets, kv_offsets, scale, window, block_size, *args, out_val=None, **kwargs) -> int:
    return 4 * q.shape[1] * q.shape[2] * _useful_pairs(q_offsets, kv_offsets, window, block_size)


@register_flop_formula(torch.ops.gem_kernels.mx_attention_backward, get_raw=True)
def _backward_flops(
    do, q, k, v, o, lse, q_offsets, kv_offsets, scale, window, block_size, *args, out_val=None, **kwargs
) -> int:
    return 8 * q.shape[1] * q.shape[2] * _useful_pairs(q_offsets, kv_offsets, window, block_size)
