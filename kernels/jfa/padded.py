"""The padded baseline: pad every sequence to the longest, call torch's fused attention with a key mask, unpad.

It is what the source starts from, kept as an implementation of the same op so that it is charged the useful pairs
only. The back end is the one torch itself would choose for these tensors and this mask (its flash kernel on a CPU;
cuDNN or the memory-efficient kernel on a GPU; plain matrix products where no fused kernel takes the case). Unlike the
others it lets results depend, in the last bits, on the longest length in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..jagged import _pad_op, _unpad_op, host_offsets
from ..registry import Case, Implementation
from ..validation import accumulation_dtype, strict_float32

_aten = torch.ops.aten
_KEY_MULTIPLE = 16  # the GPU kernels read the mask in vectors
_LSE_MULTIPLE = 32  # the memory-efficient backward wants lse padded to this


def _longest(offsets: Tensor) -> int:
    host = host_offsets(offsets)
    return int(host.diff().max()) if host.shape[0] > 1 else 0


class _Batch:
    """Shapes of one call: pads packed tensors to [B, H, L, D] and back."""

    def __init__(self, q: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor, window: int | None):
        self.q_offsets, self.kv_offsets, self.num = q_offsets, kv_offsets, kv_offsets.shape[0] - 1
        self.q_size = q.shape[0] if q_offsets is None else _longest(q_offsets)
        self.kv_size = -(_longest(kv_offsets) // -_KEY_MULTIPLE) * _KEY_MULTIPLE
        self.empty = self.num == 0 or self.q_size == 0 or self.kv_size == 0
        column = torch.arange(self.kv_size, device=q.device)
        lengths = kv_offsets.diff()
        self.has_keys = lengths > 0
        # A sequence without keys sees its zero keys instead: their values are zeros, and so is the result.
        visible = (column < lengths[:, None]) | ~self.has_keys[:, None]
        visible = visible[:, None, None, :]
        if window is not None:
            row = torch.arange(self.q_size, device=q.device)
            spare = (
                row >= q_offsets.diff()[:, None]
            )  # rows that do not exist see everything, so that none is without keys
            near = (row[:, None] - column).abs() <= window
            visible = visible & (near | spare[:, None, :, None])
        self.mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))

    def queries(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Shared or packed queries' rows [.., H, D] -> [B, H, Lq, D]."""
        if self.q_offsets is not None:
            x = _pad_op(x, self.q_offsets, self.q_size, value)
        elif x.dim() == 3:
            x = x.expand(self.num, *x.shape)
        return x.transpose(1, 2)

    def keys(self, x: Tensor) -> Tensor:
        return _pad_op(x, self.kv_offsets, self.kv_size, 0.0).transpose(1, 2)

    def unpad_queries(self, x: Tensor, total: int) -> Tensor:
        """[B, H, Lq, ...] -> [Tq, H, ...], or [B, Lq, H, ...] for shared queries."""
        x = x.transpose(1, 2)
        return x if self.q_offsets is None else _unpad_op(x, self.q_offsets, total)


def _backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> SDPBackend:
    return SDPBackend(torch._fused_sdp_choice(q, k, v, attn_mask=mask, scale=scale))


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    dtype = accumulation_dtype(q.dtype)
    return (q.to(dtype) @ k.to(dtype).transpose(2, 3)).mul_(scale).add_(mask)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o [B, H, Lq, D] and lse [B, H, Lq]."""
    backend = _backend(q, k, v, mask, scale)
    if backend == SDPBackend.FLASH_ATTENTION and q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    mask = mask.expand(*q.shape[:3], k.shape[2])
    if backend == SDPBackend.CUDNN_ATTENTION:
        o, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, mask, True, scale=scale)
        return o, lse.reshape(q.shape[:3])
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        o, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, scale=scale)
        return o, lse[..., : q.shape[2]]
    scores = _scores(q, k, mask, scale)
    return (scores.softmax(-1).to(v.dtype) @ v), scores.logsumexp(-1)


def _attend_backward(do, q, k, v, o, lse, mask, scale) -> tuple[Tensor, Tensor, Tensor]:
    backend = _backend(q, k, v, mask, scale)
    if backend == SDPBackend.FLASH_ATTENTION and q.device.type == "cpu":
        lse = lse.contiguous()
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, False, attn_mask=mask, scale=scale
        )
    mask = mask.expand(*q.shape[:3], k.shape[2])
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # no dropout, so any seed
    if backend == SDPBackend.CUDNN_ATTENTION:
        lse = lse.contiguous().unsqueeze(-1)
        return _aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, seed, seed, mask, None, None, q.shape[2], k.shape[2], 0.0, False, scale=scale
        )
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _LSE_MULTIPLE), value=float("inf"))
        return _aten._scaled_dot_product_efficient_attention_backward(
            do, q, k, v, mask, o, lse, seed, seed, 0.0, [True, True, True, False], False, scale=scale
        )[:3]
    dtype = accumulation_dtype(q.dtype)
    weights = _scores(q, k, mask, scale).sub_(lse.to(dtype).unsqueeze(-1)).exp_()
    d_weights = do.to(dtype) @ v.to(dtype).transpose(2, 3)
    d_scores = weights * (d_weights - (do.to(dtype) * o.to(dtype)).sum(-1, keepdim=True)) * scale
    return d_scores @ k.to(dtype), d_scores.transpose(2, 3) @ q.to(dtype), weights.transpose(2, 3) @ do.to(dtype)


def forward(q, k, v, q_offsets, kv_offsets, *, scale, window, bias, max_q_len, max_kv_len, schedule):
    """(o, lse); arguments as in the op."""
    batch = _Batch(q, q_offsets, kv_offsets, window)
    shape = q.shape if q_offsets is not None else (batch.num, *q.shape)
    rows = shape[0] if q_offsets is not None else shape[0] * shape[1]
    lse = torch.full((q.shape[1], rows), float("inf"), dtype=accumulation_dtype(q.dtype), device=q.device)
    if batch.empty:
        return q.new_zeros(shape), lse
    with strict_float32():
        o, own = _attend(batch.queries(q), batch.keys(k), batch.keys(v), batch.mask, scale)
    own = own.to(lse.dtype).masked_fill(~batch.has_keys[:, None, None], float("inf"))
    if q_offsets is None:
        return o.transpose(1, 2), own.transpose(0, 1).reshape(lse.shape)
    lse[:, :rows] = _unpad_op(own.transpose(1, 2), q_offsets, rows).t()
    lse.masked_fill_(torch.arange(rows, device=q.device) >= q_offsets[-1], float("inf"))
    return batch.unpad_queries(o, rows), lse


def backward(do, q, k, v, o, lse, q_offsets, kv_offsets, *, scale, window, bias, max_q_len, max_kv_len, schedule):
    """(dq, dk, dv, None). dq of shared queries is summed in float32."""
    batch = _Batch(q, q_offsets, kv_offsets, window)
    if batch.empty:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None
    if q_offsets is None:
        own = lse.view(lse.shape[0], batch.num, -1).transpose(0, 1)
    else:
        own = _pad_op(lse.t(), q_offsets, batch.q_size, float("inf")).transpose(1, 2)
    tensors = (batch.queries(do), batch.queries(q), batch.keys(k), batch.keys(v), batch.queries(o))
    with strict_float32():
        dq, dk, dv = _attend_backward(*tensors, own, batch.mask, scale)
    dk, dv = (_unpad_op(x.transpose(1, 2), kv_offsets, k.shape[0]).to(k.dtype) for x in (dk, dv))
    dq = batch.unpad_queries(dq, q.shape[0])
    if q_offsets is None:
        dq = dq.sum(0, dtype=accumulation_dtype(q.dtype))
    return dq.to(q.dtype), dk, dv, None


def _unsupported(case: Case) -> str | None:
    return (
        "has no bias (torch's fused attention gives no gradient of a bias table)" if "bias" in case.features else None
    )


IMPLEMENTATION = Implementation("padded", forward, backward, _unsupported)
