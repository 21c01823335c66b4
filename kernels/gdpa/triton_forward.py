"""GDPA forward in Triton: a query tile against a loop over keys, and short keys kept on chip under a loop over queries.

Rows past a sequence's end are read as zeros, by the copy engine where it can describe the tensors, else by loads. A key
filled with zeros has score 0, weight act(0) = 0 and a value of zeros, so no mask is needed; stores are predicated.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import load_rows, sequence_range, store_rows, store_tile, tile_rows
from .triton_activations import activation


@triton.jit
def query_range(q_offsets, stride_qo, sequence, num_sequences, q_rows, SHARED_Q: tl.constexpr):
    """(first row in q, first row in o and dO, length). Shared queries: q is [Lq, H, D], o is [B * Lq, H, D]."""
    if SHARED_Q:
        length = (sequence * 0 + q_rows).to(tl.int32)
        return (sequence * 0).to(tl.int64), sequence.to(tl.int64) * q_rows, length
    else:
        start, length = sequence_range(q_offsets, stride_qo, sequence, num_sequences, q_rows)
        return start, start, length


@triton.jit
def key_range(kv_offsets, stride_ko, sequence, num_sequences):
    """(first row, length) of a sequence's keys; none for the rows past the last sequence."""
    start, length = sequence_range(kv_offsets, stride_ko, sequence, num_sequences, 0)
    return start, tl.where(sequence < num_sequences, length, 0)


@triton.jit
def _forward_tile(
    Q, K, V, O, q_offsets, kv_offsets, sequence, tile, head,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, s_qo, s_ko, num_sequences, q_rows, scale,
    KIND: tl.constexpr, FAST: tl.constexpr, SCALED: tl.constexpr, SHARED_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    q_start, o_start, q_len = query_range(q_offsets, s_qo, sequence, num_sequences, q_rows, SHARED_Q)
    k_start, k_len = key_range(kv_offsets, s_ko, sequence, num_sequences)
    head = head.to(tl.int64)
    first = tile * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    if first < q_len:
        q = load_rows(Q + q_start * sq_t + head * sq_h, first, offs_m, offs_d, sq_t, q_len, HEAD_DIM, BLOCK_D, True)
        if not TMA:
            K += k_start * sk_t + head * sk_h
            V += k_start * sv_t + head * sv_h
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        for n in tl.range(0, k_len, BLOCK_N, num_stages=STAGES):
            k = tile_rows(K, k_start, n, head, offs_n, offs_d, sk_t, k_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, True)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if SCALED:
                s = s * scale
            p = activation(s, KIND, FAST).to(O.dtype.element_ty)
            v = tile_rows(V, k_start, n, head, offs_n, offs_d, sv_t, k_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, True)
            acc = tl.dot(p, v, acc, input_precision=PRECISION)
        store_rows(O + o_start * so_t + head * so_h, first, offs_m, offs_d, so_t, q_len, acc, HEAD_DIM)


@triton.jit
def _zero_rest(
    O, q_offsets, s_qo, so_t, so_h, num_sequences, q_rows, head, begin, step,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Zeros in tiles begin, begin + step, .. of the rows past the last sequence."""
    start, length = sequence_range(q_offsets, s_qo, num_sequences, num_sequences, q_rows)
    zero = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    for tile in tl.range(begin, (length + BLOCK_M - 1) // BLOCK_M, step):
        rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        o = O + start * so_t + tl.cast(head, tl.int64) * so_h
        store_rows(o, tile * BLOCK_M, rows, columns, so_t, length, zero, HEAD_DIM)


SIZES = ["num_sequences", "q_rows", "per_sequence"]  # change with every batch: not worth a kernel of their own


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, O, q_offsets, kv_offsets, tiles, count, program_offsets,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, s_qo, s_ko, num_sequences, q_rows, num_heads, scale, per_sequence,
    KIND: tl.constexpr, FAST: tl.constexpr, SCALED: tl.constexpr, SHARED_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """ORDER: "grid" one program a (sequence, one of per_sequence tiles, head), there or not; "list" one a (listed tile,
    head); "programs" persistent over program_offsets; "zigzag" persistent over a list sorted by work, dealt forwards
    and backwards in turn. Lists name the rows past the last sequence; "grid" and "programs" clear them here."""
    if ORDER == "grid":
        slot = tl.program_id(0) // num_heads
        if slot // per_sequence < num_sequences:
            _forward_tile(
                Q, K, V, O, q_offsets, kv_offsets, slot // per_sequence, slot % per_sequence,
                tl.program_id(0) % num_heads,
                sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, s_qo, s_ko, num_sequences, q_rows, scale,
                KIND, FAST, SCALED, SHARED_Q, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, PRECISION, TMA,
            )  # fmt: skip
        else:
            _zero_rest(
                O, q_offsets, s_qo, so_t, so_h, num_sequences, q_rows, tl.program_id(0) % num_heads,
                slot % per_sequence, per_sequence, HEAD_DIM, BLOCK_D, BLOCK_M,
            )  # fmt: skip
    elif ORDER == "list":
        slot = tl.program_id(0) // num_heads
        if slot < tl.load(count):
            _forward_tile(
                Q, K, V, O, q_offsets, kv_offsets, tl.load(tiles + slot * 2), tl.load(tiles + slot * 2 + 1),
                tl.program_id(0) % num_heads,
                sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, s_qo, s_ko, num_sequences, q_rows, scale,
                KIND, FAST, SCALED, SHARED_Q, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, PRECISION, TMA,
            )  # fmt: skip
    else:
        program = tl.program_id(0)
        programs = tl.num_programs(0)
        if ORDER == "programs":
            begin = tl.load(program_offsets + program) * num_heads
            end = tl.load(program_offsets + program + 1) * num_heads
        else:
            begin = program * 0
            end = (tl.load(count) * num_heads + programs - 1) // programs
        for item in tl.range(begin, end, num_stages=1):
            if ORDER == "programs":
                unit = item
            else:
                unit = item * programs + tl.where(item % 2 == 0, program, programs - 1 - program)
            slot = unit // num_heads
            if (ORDER == "programs") | (slot < tl.load(count)):
                _forward_tile(
                    Q, K, V, O, q_offsets, kv_offsets, tl.load(tiles + slot * 2), tl.load(tiles + slot * 2 + 1),
                    unit % num_heads,
                    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, s_qo, s_ko, num_sequences, q_rows, scale,
                    KIND, FAST, SCALED, SHARED_Q, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, PRECISION, TMA,
                )  # fmt: skip
        if ORDER == "programs" and not SHARED_Q:
            for head in tl.range(0, num_heads):
                _zero_rest(
                    O, q_offsets, s_qo, so_t, so_h, num_sequences, q_rows, head, program, programs,
                    HEAD_DIM, BLOCK_D, BLOCK_M,
                )  # fmt: skip


@triton.jit
def _resident_chunk(
    Q, K, V, O, OUT, q_offsets, kv_offsets, tiles, count, slot, head,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, s_qo, s_ko, num_sequences, q_rows, scale,
    KIND: tl.constexpr, FAST: tl.constexpr, SCALED: tl.constexpr, SHARED_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, KV_TILES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    head = head.to(tl.int64)
    if slot < tl.load(count):
        sequence = tl.load(tiles + slot * 2)
        chunk = tl.load(tiles + slot * 2 + 1) * CHUNK
        q_start, o_start, q_len = query_range(q_offsets, s_qo, sequence, num_sequences, q_rows, SHARED_Q)
        k_start, k_len = key_range(kv_offsets, s_ko, sequence, num_sequences)
        poison = tl.where(k_len > KV_TILES * BLOCK_N, float("nan"), 0.0)
        offs_m = tl.arange(0, BLOCK_M)
        offs_n = tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        if not TMA:
            Q += q_start * sq_t + head * sq_h
        k_base = K + k_start * sk_t + head * sk_h
        v_base = V + k_start * sv_t + head * sv_h
        o_base = O + o_start * so_t + head * so_h
        zero = chunk * 0
        k0 = load_rows(k_base, zero, offs_n, offs_d, sk_t, k_len, HEAD_DIM, BLOCK_D, True)
        v0 = load_rows(v_base, zero, offs_n, offs_d, sv_t, k_len, HEAD_DIM, BLOCK_D, True)
        if KV_TILES == 2:
            k1 = load_rows(k_base, zero + BLOCK_N, offs_n, offs_d, sk_t, k_len, HEAD_DIM, BLOCK_D, True)
            v1 = load_rows(v_base, zero + BLOCK_N, offs_n, offs_d, sv_t, k_len, HEAD_DIM, BLOCK_D, True)
        rows = tl.minimum(q_len - chunk, CHUNK)
        # Without keys the output is zero whatever the queries hold, as in the streaming kernel.
        known = tl.where(k_len > 0, q_len, 0)
        for m in tl.range(0, rows, BLOCK_M, num_stages=STAGES):
            first = chunk + m
            q = tile_rows(Q, q_start, first, head, offs_m, offs_d, sq_t, known, HEAD_DIM, BLOCK_M, BLOCK_D, TMA, True)
            s = tl.dot(q, tl.trans(k0), input_precision=PRECISION)
            if SCALED:
                s = s * scale
            p = activation(s, KIND, FAST).to(V.dtype.element_ty)
            acc = tl.dot(p, v0, input_precision=PRECISION)
            if KV_TILES == 2:
                s = tl.dot(q, tl.trans(k1), input_precision=PRECISION)
                if SCALED:
                    s = s * scale
                p = activation(s, KIND, FAST).to(V.dtype.element_ty)
                acc = tl.dot(p, v1, acc, input_precision=PRECISION)
            acc += poison
            store_tile(
                OUT, o_base, o_start, first, head, offs_m, offs_d, so_t, q_len, acc, HEAD_DIM, BLOCK_M, BLOCK_D, TMA
            )


@triton.jit(do_not_specialize=SIZES[:2])
def forward_resident_kernel(
    Q, K, V, O, OUT, q_offsets, kv_offsets, tiles, count,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, s_qo, s_ko, num_sequences, q_rows, num_heads, scale,
    KIND: tl.constexpr, FAST: tl.constexpr, SCALED: tl.constexpr, SHARED_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, KV_TILES: tl.constexpr, CHUNK: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """All keys of a sequence (<= KV_TILES * BLOCK_N) stay on chip; the software pipeline runs over query tiles.

    `tiles` lists chunks of CHUNK query rows; ORDER "list" or "zigzag", as in `forward_kernel`. TMA: Q and OUT are
    descriptors; OUT is O otherwise. A sequence with more keys than fit (a wrong hint) yields NaN, never a plausible
    row.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if ORDER == "list":
        _resident_chunk(
            Q, K, V, O, OUT, q_offsets, kv_offsets, tiles, count, program // num_heads, program % num_heads,
            sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, s_qo, s_ko, num_sequences, q_rows, scale,
            KIND, FAST, SCALED, SHARED_Q, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, PRECISION, TMA, KV_TILES,
            CHUNK,
        )  # fmt: skip
    else:
        for item in tl.range(0, (tl.load(count) * num_heads + programs - 1) // programs, num_stages=1):
            unit = item * programs + tl.where(item % 2 == 0, program, programs - 1 - program)
            _resident_chunk(
                Q, K, V, O, OUT, q_offsets, kv_offsets, tiles, count, unit // num_heads, unit % num_heads,
                sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, s_qo, s_ko, num_sequences, q_rows, scale,
                KIND, FAST, SCALED, SHARED_Q, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, PRECISION, TMA, KV_TILES,
            CHUNK,
            )  # fmt: skip
