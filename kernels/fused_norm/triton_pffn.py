"""The feed-forward tail around any GDPA kernel: a norm before it, and one kernel for both additions and the norm after.

Forward: q = layer(s); o = gdpa(q, k, v); s' = rms(o + q) + s. The second kernel reads o and s and forms q again from
s, so that neither q nor o + q is read back from memory: 7 passes over [T, H D] in all. Backward: one kernel makes the
gradient that enters GDPA and q, which GDPA's own backward needs; a last one adds what leaves GDPA and goes through the
first norm: 15 passes.

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
def enter_kernel(S, Q, end, rows, eps, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """q = layer(s)."""
    first, exist, real = _rows_of(end, rows, ROWS)
    q, _ = _layer(_read(S, first, real, COLUMNS, ROWS, BLOCK), eps, COLUMNS, BLOCK)
    _write(Q, first, exist, q, COLUMNS, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def leave_kernel(O, S, Y, end, rows, eps, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """y = rms(o + layer(s)) + s."""
    first, exist, real = _rows_of(end, rows, ROWS)
    s = _read(S, first, real, COLUMNS, ROWS, BLOCK)
    q, _ = _layer(s, eps, COLUMNS, BLOCK)
    y, _ = _rms(_read(O, first, real, COLUMNS, ROWS, BLOCK) + q, eps, COLUMNS)
    _write(Y, first, exist, y + s, COLUMNS, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def leave_backward_kernel(
    DY, O, S, DU, Q, end, rows, eps, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """du, the gradient of u = o + q in y = rms(u) + s, and q = layer(s) again."""
    first, exist, real = _rows_of(end, rows, ROWS)
    q, _ = _layer(_read(S, first, real, COLUMNS, ROWS, BLOCK), eps, COLUMNS, BLOCK)
    n, inverse = _rms(_read(O, first, real, COLUMNS, ROWS, BLOCK) + q, eps, COLUMNS)
    dy = _read(DY, first, real, COLUMNS, ROWS, BLOCK)
    along = (tl.sum(dy * n, 1) / COLUMNS)[:, None]
    _write(DU, first, exist, (dy - n * along) * inverse, COLUMNS, ROWS, BLOCK)
    _write(Q, first, exist, q, COLUMNS, ROWS, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def enter_backward_kernel(
    DQ, DU, S, DY, DS, end, rows, eps, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """ds = (dq + du) through the first norm, + dy."""
    first, exist, real = _rows_of(end, rows, ROWS)
    n, inverse = _layer(_read(S, first, real, COLUMNS, ROWS, BLOCK), eps, COLUMNS, BLOCK)
    g = _read(DQ, first, real, COLUMNS, ROWS, BLOCK) + _read(DU, first, real, COLUMNS, ROWS, BLOCK)
    along = (tl.sum(g * n, 1) / COLUMNS)[:, None]
    mean = (tl.sum(g, 1) / COLUMNS)[:, None]
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
    """(s', o) with o = gdpa(layer(s), k, v), all in the inputs' dtype."""
    s, norm = s.contiguous(), {"offsets": q_offsets, "eps": eps}
    q, out = torch.empty_like(s), torch.empty_like(s)
    _launch(enter_kernel, s, q, **norm)
    o = gdpa.forward(q, k, v, q_offsets, kv_offsets, **settings).contiguous()
    _launch(leave_kernel, o, s, out, **norm)
    return out, o


def backward(dout, s, k, v, o, q_offsets, kv_offsets, *, gdpa, eps, **settings):
    """(ds, dk, dv) in the inputs' dtype."""
    dout, s, o, norm = dout.contiguous(), s.contiguous(), o.contiguous(), {"offsets": q_offsets, "eps": eps}
    du, q, ds = torch.empty_like(s), torch.empty_like(s), torch.empty_like(s)
    _launch(leave_backward_kernel, dout, o, s, du, q, **norm)
    dq, dk, dv = gdpa.backward(du, q, k, v, q_offsets, kv_offsets, **settings)
    _launch(enter_backward_kernel, dq.contiguous(), du, s, dout, ds, **norm)
    return ds, dk, dv
