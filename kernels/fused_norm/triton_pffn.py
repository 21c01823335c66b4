"""The feed-forward tail around any GDPA kernel: a norm before it, and one kernel for both additions and the norm after.

Forward: q = layer(s); o = gdpa(q, k, v); s' = rms(o + q) + s. The second kernel reads o and s and forms q again from
s, so that neither q nor o + q is read back from memory: 7 passes over [T, H D] in all. Backward: one kernel makes the
gradient that enters GDPA, a last one adds what leaves GDPA and goes through the first norm: 14 passes with the split
GDPA. For it the forward pass keeps q, which GDPA's backward needs anyway, and 1 / sigma of the first norm, a number a
row; s is not needed again.

Rows are whole tokens, all H * D columns. Everything is stored in the inputs' dtype and computed in float32. Rows past
the end are not read; zeros are written there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_common import load_rows, store_rows

MAX_COLUMNS = 8192


@triton.jit
def _rows_of(end, rows, ROWS: tl.constexpr):
    """(first row, rows that exist, rows that belong to a sequence) of this program."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    exist = tl.minimum(rows - first, ROWS).to(tl.int32)
    real = tl.minimum(tl.maximum(tl.load(end).to(tl.int64) - first, 0), exist.to(tl.int64)).to(tl.int32)
    return first, exist, real


@triton.jit
def _read(base, first, count, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [ROWS, BLOCK] of a contiguous [rows, COLUMNS]; zeros from row `count` on."""
    place = base + first * COLUMNS
    rows = load_rows(place, count * 0, tl.arange(0, ROWS), tl.arange(0, BLOCK), COLUMNS, count, COLUMNS, BLOCK, True)
    return rows.to(tl.float32)


@triton.jit
def _write(base, first, count, x, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    place = base + first * COLUMNS
    store_rows(place, count * 0, tl.arange(0, ROWS), tl.arange(0, BLOCK), COLUMNS, count, x, COLUMNS)


@triton.jit
def _layer(x, eps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """LayerNorm of the rows and 1 / sigma."""
    x = x - (tl.sum(x, 1) / COLUMNS)[:, None]
    if BLOCK != COLUMNS:
        x = tl.where((tl.arange(0, BLOCK) < COLUMNS)[None, :], x, 0.0)
    inverse = (1.0 / tl.sqrt(tl.sum(x * x, 1) / COLUMNS + eps))[:, None]
    return x * inverse, inverse


@triton.jit
def _rms(x, eps, COLUMNS: tl.constexpr):
    inverse = (1.0 / tl.sqrt(tl.sum(x * x, 1) / COLUMNS + eps))[:, None]
    return x * inverse, inverse


@triton.jit(do_not_specialize=["rows"])
def enter_kernel(S, Q, INVERSE, end, rows, eps, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """q = layer(s), and 1 / sigma of its rows, float32 [rows]."""
    first, exist, real = _rows_of(end, rows, ROWS)
    q, inverse = _layer(_read(S, first, real, COLUMNS, ROWS, BLOCK), eps, COLUMNS, BLOCK)
    _write(Q, first, exist, q, COLUMNS, ROWS, BLOCK)
    row = tl.arange(0, ROWS)
    tl.store(INVERSE + first + row, tl.reshape(inverse, [ROWS]), mask=row < exist)


@triton.jit(do_not_specialize=["rows"])
def leave_kernel(O, S, Y, end, rows, eps, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y = rms(o + layer(s)) + s."""
    first, exist, real = _rows_of(end, rows, ROWS)
    s = _read(S, first, real, COLUMNS, ROWS, BLOCK)
    q, _ = _layer(s, eps, COLUMNS, BLOCK)
    y, _ = _rms(_read(O, first, real, COLUMNS, ROWS, BLOCK) + q, eps, COLUMNS)
    _write(Y, first, exist, y + s, COLUMNS, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def leave_backward_kernel(DY, O, Q, DU, end, rows, eps, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """du, the gradient of u = o + q in y = rms(u) + s."""
    first, exist, real = _rows_of(end, rows, ROWS)
    u = _read(O, first, real, COLUMNS, ROWS, BLOCK) + _read(Q, first, real, COLUMNS, ROWS, BLOCK)
    n, inverse = _rms(u, eps, COLUMNS)
    dy = _read(DY, first, real, COLUMNS, ROWS, BLOCK)
    along = (tl.sum(dy * n, 1) / COLUMNS)[:, None]
    _write(DU, first, exist, (dy - n * along) * inverse, COLUMNS, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def enter_backward_kernel(
    DQ, DU, Q, DY, DS, INVERSE, end, rows, eps, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """ds = (dq + du) through the first norm, + dy."""
    first, exist, real = _rows_of(end, rows, ROWS)
    n = _read(Q, first, real, COLUMNS, ROWS, BLOCK)
    g = _read(DQ, first, real, COLUMNS, ROWS, BLOCK) + _read(DU, first, real, COLUMNS, ROWS, BLOCK)
    along = (tl.sum(g * n, 1) / COLUMNS)[:, None]
    mean = (tl.sum(g, 1) / COLUMNS)[:, None]
    row = tl.arange(0, ROWS)
    inverse = tl.load(INVERSE + first + row, mask=row < real, other=0.0)[:, None]
    ds = (g - mean - n * along) * inverse + _read(DY, first, real, COLUMNS, ROWS, BLOCK)
    _write(DS, first, exist, ds, COLUMNS, ROWS, BLOCK)


def _launch(kernel, *tensors, offsets, eps, tile=None, num_warps=None):
    """Run a kernel over the tokens of contiguous [T, H, D] tensors; the last of `offsets` ends the sequences.

    tile, num_warps: rows and warps of a program. By default a warp has 1,024 elements, 32 a thread, and up to there a
    program is one warp, whose sums need no shared memory: the fastest of a sweep on an H200 (TUNING.md).
    """
    rows, columns = tensors[0].shape[0], tensors[0].shape[1] * tensors[0].shape[2]
    if columns > MAX_COLUMNS:
        raise ValueError(f"pffn: impl 'triton' over {columns} columns (heads x head_dim); allowed: <= {MAX_COLUMNS}")
    if not rows:
        return
    block = triton.next_power_of_2(columns)
    tile = tile or max(1, 1024 // block)
    kernel[(triton.cdiv(rows, tile),)](
        *tensors, offsets[-1:], rows, eps, COLUMNS=columns, ROWS=tile, BLOCK=block,
        num_warps=num_warps or max(1, block // 1024),
    )  # fmt: skip


def forward(s, k, v, q_offsets, kv_offsets, *, gdpa, eps, **settings):
    """(s', o, q, inverse) with q = layer(s), o = gdpa(q, k, v), all in the inputs' dtype; inverse float32 [T]."""
    s, norm = s.contiguous(), {"offsets": q_offsets, "eps": eps}
    q, out = torch.empty_like(s), torch.empty_like(s)
    inverse = torch.empty(s.shape[0], dtype=torch.float32, device=s.device)
    _launch(enter_kernel, s, q, inverse, **norm)
    o = gdpa.forward(q, k, v, q_offsets, kv_offsets, **settings).contiguous()
    _launch(leave_kernel, o, s, out, **norm)
    return out, o, q, inverse


def backward(dout, q, k, v, o, q_offsets, kv_offsets, *, inverse, gdpa, eps, **settings):
    """(ds, dk, dv) in the inputs' dtype; o, q and inverse as `forward` returned them."""
    dout, norm = dout.contiguous(), {"offsets": q_offsets, "eps": eps}
    du, ds = torch.empty_like(q), torch.empty_like(q)
    _launch(leave_backward_kernel, dout, o, q, du, **norm)
    dq, dk, dv = gdpa.backward(du, q, k, v, q_offsets, kv_offsets, **settings)
    _launch(enter_backward_kernel, dq.contiguous(), du, q, dout, ds, inverse, **norm)
    return ds, dk, dv
