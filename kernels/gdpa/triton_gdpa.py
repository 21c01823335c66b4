"""GDPA on the GPU in stock Triton: the tuned baseline and its switches, each of which can be measured alone.

The source's remedies for real traffic appear as `Options`: a list of valid query tiles instead of a grid over the
longest sequence, zigzag dealing of those tiles to persistent programs, and short keys kept on chip while the loop
runs over queries. None of them changes a result: every score, weight and sum is formed in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..kept import kept
from ..registry import Case, Implementation
from ..triton_common import describable, descriptors, precision_of, tile_list
from . import configs
from .configs import SHORT_ROWS, Config, default, has_resident, padded, resident_pays
from .triton_activations import ACTIVATIONS
from .triton_backward import dkdv_kernel, dq_kernel, owner_kernel
from .triton_forward import forward_kernel, forward_resident_kernel

ORDERS = ("grid", "valid", "zigzag")
BACKWARDS = ("split", "owner")


@dataclass(frozen=True)
class Options:
    """Switches of the kernels. None: chosen by shape.

    schedule: "grid" launches over the longest sequence (needs the hint max_q_len; the baseline, never a default),
    "valid" over the tiles that exist, "zigzag" deals those, sorted by work, to persistent programs.
    kv_resident: keys stay on chip, the loop runs over queries (needs the hint max_kv_len <= 2 block_n). "fits":
    wherever the hint allows. "pays": where it is faster on an H200, with one key tile and by descriptors (TUNING.md).
    backward: "split" (two kernels, 7 GEMMs, parallel over tiles) or "owner" (one program a (sequence, head), 5 GEMMs).
    tma: what a loop passes over comes by descriptors (True) or by loads (False); None: by descriptors where possible.
    fast_tanh: the hardware's approximate tanh; default with 16-bit inputs on a GPU.
    fwd, resident, dq, dkdv, owner: tile configurations. programs: persistent programs, default as many as fit at once.
    """

    schedule: str = "valid"
    kv_resident: bool | str = "pays"
    backward: str | None = None
    tma: bool | None = None
    fast_tanh: bool | None = None
    fwd: Config | None = None
    resident: Config | None = None
    dq: Config | None = None
    dkdv: Config | None = None
    owner: Config | None = None
    programs: int | None = None

    def __post_init__(self):
        if self.schedule not in ORDERS:
            raise ValueError(f"schedule: {self.schedule!r}; allowed: {', '.join(ORDERS)}")
        if self.kv_resident not in (True, False, "fits", "pays"):
            raise ValueError(f"kv_resident: {self.kv_resident!r}; allowed: True, False, 'fits', 'pays'")
        if self.backward not in (None, *BACKWARDS):
            raise ValueError(f"backward: {self.backward!r}; allowed: None, {', '.join(BACKWARDS)}")


@triton.jit(do_not_specialize=["num_sequences", "bound"])
def _tile_work_kernel(tiles, count, kv_offsets, stride, work, num_sequences, bound, SIZE: tl.constexpr):
    slot = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    there = slot < tl.load(count)
    sequence = tl.load(tiles + slot * 2, mask=there, other=0)
    real = there & (sequence < num_sequences)
    place = kv_offsets + sequence.to(tl.int64) * stride
    keys = tl.load(place + stride, mask=real, other=0) - tl.load(place, mask=real, other=0)
    tl.store(work + slot, tl.where(there, keys.to(tl.int32), -1), mask=slot < bound)


def _sorted_tiles(q_offsets, kv_offsets, q_rows, block):
    tiles, count, bound = _query_tiles(q_offsets, kv_offsets, q_rows, block)
    work = torch.empty(bound, dtype=torch.int32, device=tiles.device)
    grid = (triton.cdiv(bound, 256),)
    _tile_work_kernel[grid](
        tiles, count, kv_offsets, kv_offsets.stride(0), work, kv_offsets.numel() - 1, bound, SIZE=256
    )
    return tiles[:bound][torch.argsort(work, descending=True, stable=True)], count, bound


def _shared_tiles(_, kv_offsets, q_rows, block):
    each = triton.cdiv(q_rows, block)
    bound = (kv_offsets.numel() - 1) * each
    slot = torch.arange(bound, dtype=torch.int32, device=kv_offsets.device)
    count = torch.full((1,), bound, dtype=torch.int32, device=kv_offsets.device)
    return torch.stack((slot // each, slot % each), 1), count, bound


def _query_tiles(q_offsets, kv_offsets, q_rows, block, by_work=False):
    """(tiles, count, bound) of the queries, built once a batch. Shared queries: every sequence has all of them.

    by_work: the most keys first; slots past the count stay last.
    """
    if by_work:
        return kept(_sorted_tiles, q_offsets, kv_offsets, q_rows, block)
    if q_offsets is None:
        return kept(_shared_tiles, None, kv_offsets, q_rows, block)
    return tile_list(q_offsets, q_rows, block)


def _strides(*tensors):
    return [s for t in tensors for s in t.stride()[-3:-1]]


def _constants(q, activation, scale, options, config):
    fast = q.is_cuda and q.dtype != torch.float32 if options.fast_tanh is None else options.fast_tanh
    return {
        "KIND": activation,
        "FAST": fast,
        "SCALED": scale != 1.0,
        "HEAD_DIM": q.shape[-1],
        "BLOCK_D": padded(q.shape[-1]),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "STAGES": config.num_stages,
        "PRECISION": precision_of(q.dtype),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _by_descriptor(wanted, *tensors):
    return all(describable(x) for x in tensors) if wanted is None else wanted


def _programs(options, q, config, rows):
    """Persistent programs: as many as fit at once, each with `rows` rows in shared memory, its accumulators and a tile
    of scores in registers, and 64 registers a thread beside them."""
    shared = 232448 // (rows * padded(q.shape[-1]) * q.element_size())
    threads = 32 * config.num_warps
    registers = min(255, config.block_m * (padded(q.shape[-1]) + config.block_n) // threads + 64)
    return options.programs or max(1, min(shared, 65536 // (registers * threads))) * _multiprocessors(q.device)


def _forward_config(options, tma, q, q_offsets, num_sequences, schedule):
    """The tile of the streaming kernel. A host's schedule was made for one of them: the one with its query tile."""
    if options.fwd is not None or not tma:
        return options.fwd or default("fwd", q.shape[-1], q.dtype)
    short, long = (default(phase, q.shape[-1], q.dtype) for phase in ("fwd_tma_short", "fwd_tma"))
    if schedule is not None:
        return short if schedule.block_m == short.block_m else long
    return short if q.shape[0] <= SHORT_ROWS * (1 if q_offsets is None else num_sequences) else long


def _resident_config(options, kv_tiles, head_dim, dtype):
    return options.resident or default(f"fwd_resident_{kv_tiles}", head_dim, dtype)


def _resident_tiles(options, tma, head_dim, dtype, max_kv_len):
    """Key tiles to keep on chip, or 0 for the streaming kernel. Asked for and impossible: an error."""
    block = _resident_config(options, 2, head_dim, dtype).block_n if has_resident(head_dim) else 0
    fits = max_kv_len is not None and max_kv_len <= 2 * block
    wanted = fits and block > 0 if options.kv_resident == "fits" else options.kv_resident
    if wanted == "pays":
        wanted = fits and tma and options.fwd is None and resident_pays(head_dim, max_kv_len)
    if wanted and not (fits and block):
        raise ValueError(
            f"kv_resident: max_kv_len {max_kv_len}, head_dim {head_dim}; allowed: a hint max_kv_len <= {2 * block} and "
            "head_dim <= 128"
        )
    return triton.cdiv(max(max_kv_len, 1), block) if wanted else 0


def forward_with(
    options, q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None
):
    """GDPA forward with explicit `Options`; arguments and result as `forward`."""
    shared = q_offsets is None
    num_sequences, num_heads, head_dim = kv_offsets.numel() - 1, q.shape[1], q.shape[2]
    o = torch.empty((num_sequences, *q.shape) if shared else q.shape, dtype=q.dtype, device=q.device)
    if o.numel() == 0:
        return o
    rows = o.view(-1, num_heads, head_dim)
    offsets = kv_offsets if shared else q_offsets
    pointers = (offsets, kv_offsets)
    sizes = (*_strides(q, k, v, o), offsets.stride(0), kv_offsets.stride(0), num_sequences, q.shape[0], num_heads)
    tma = _by_descriptor(options.tma, q, rows)
    kv_tiles = _resident_tiles(options, tma, head_dim, q.dtype, max_kv_len) if schedule is None else 0
    if kv_tiles:
        resident = _resident_config(options, kv_tiles, head_dim, q.dtype)
        constants = _constants(q, activation, scale, options, resident)
        chunk = resident.chunk * resident.block_m
        zigzag = options.schedule == "zigzag"
        tiles, count, bound = _query_tiles(q_offsets, kv_offsets, q.shape[0], chunk, zigzag)
        order, grid = "list", (bound * num_heads,)
        if zigzag:
            order = "zigzag"
            held = 2 * kv_tiles * resident.block_n + resident.num_stages * resident.block_m
            grid = (_programs(options, q, resident, held),)
        _, queries, out = descriptors(tma, resident.block_m, q, rows)
        forward_resident_kernel[grid](
            queries, k, v, o, out, *pointers, tiles, count, *sizes, scale, SHARED_Q=shared, TMA=tma, KV_TILES=kv_tiles,
            CHUNK=chunk, ORDER=order, **constants,
        )  # fmt: skip
        return o

    tma = _by_descriptor(options.tma, k, v)
    config = _forward_config(options, tma, q, q_offsets, num_sequences, schedule)
    constants = _constants(q, activation, scale, options, config) | {"TMA": tma}
    _, keys, values = descriptors(tma, config.block_n, k, v)
    program_offsets = count = offsets
    per_sequence = 1
    if schedule is not None:
        if schedule.block_m != config.block_m:
            raise ValueError(
                f"schedule: block_m {schedule.block_m}; allowed: {config.block_m}, the kernel's query tile"
            )
        tiles = schedule.tiles.to(q.device, non_blocking=True)
        program_offsets = schedule.program_offsets.to(q.device, non_blocking=True)
        order, grid = "programs", (program_offsets.numel() - 1,)
    elif options.schedule == "grid":
        longest = q.shape[0] if shared else max_q_len
        if longest is None:
            raise ValueError("schedule 'grid': max_q_len None; allowed: the longest query sequence")
        tiles, order = offsets, "grid"
        per_sequence = triton.cdiv(max(longest, 1), config.block_m)
        # The heads of a tile are neighbours, as in the list, so that what differs is the tiles that are not there. One
        # more sequence's programs clear the rows past the last one.
        grid = (per_sequence * num_heads * (num_sequences + (not shared)),)
    else:
        zigzag = options.schedule == "zigzag"
        tiles, count, bound = _query_tiles(q_offsets, kv_offsets, q.shape[0], config.block_m, zigzag)
        order, grid = "list", (bound * num_heads,)
        if zigzag:
            held = config.block_m + 2 * config.num_stages * config.block_n
            order, grid = "zigzag", (_programs(options, q, config, held),)
    forward_kernel[grid](
        q, keys, values, o, *pointers, tiles, count, program_offsets, *sizes, scale, per_sequence, SHARED_Q=shared,
        ORDER=order, **constants,
    )  # fmt: skip
    return o


def backward_with(
    options, do, q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None,
    only=None,
):  # fmt: skip
    """GDPA backward with explicit `Options`; arguments and result as `backward`.

    only: "dq" or "dkdv" runs that kernel of the split scheme alone, for timing; the other gradients are left unset.
    """
    shared = q_offsets is None
    num_sequences, num_heads, head_dim = kv_offsets.numel() - 1, q.shape[1], q.shape[2]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    rows = num_sequences * q.shape[0] if shared else q.shape[0]
    # Gradients of shared queries stay float32 until they are summed over the sequences.
    dq = torch.empty((rows, *q.shape[1:]), dtype=torch.float32 if shared else q.dtype, device=q.device)
    do = do.reshape(rows, *q.shape[1:])
    if do.stride(-1) != 1:
        do = do.contiguous()
    offsets = kv_offsets if shared else q_offsets
    steps = (offsets.stride(0), kv_offsets.stride(0), num_sequences, q.shape[0])
    scheme = options.backward or "split"
    tma = _by_descriptor(options.tma, do, q, k, v)  # one answer for both kernels of the split
    if scheme == "owner":
        config = options.owner or default("owner", head_dim, q.dtype)
        single = max_kv_len is not None and max_kv_len <= config.block_n
        running = dq if single or shared else torch.empty(dq.shape, dtype=torch.float32, device=q.device)
        lengths = (kv_offsets if shared else q_offsets).diff()
        order = torch.argsort(lengths, descending=True, stable=True).int() if num_sequences else offsets
        if num_heads and (rows or k.shape[0]):
            owner_kernel[((num_sequences + 2) * num_heads,)](
                do, q, k, v, dq, running, dk, dv, offsets, kv_offsets, order,
                *_strides(do, q, k, v, dq, running, dk, dv), *steps, k.shape[0], num_heads, scale,
                SHARED_Q=shared, SINGLE=single, **_constants(q, activation, scale, options, config),
            )  # fmt: skip
    else:
        if dq.numel() and only != "dkdv":
            config = options.dq or default("dq_tma" if tma else "dq", head_dim, q.dtype)
            tiles, count, bound = _query_tiles(q_offsets, kv_offsets, q.shape[0], config.block_m)
            _, keys, values = descriptors(tma, config.block_n, k, v)
            dq_kernel[(bound * num_heads,)](
                do, q, keys, values, dq, offsets, kv_offsets, tiles, count, *_strides(do, q, k, v, dq), *steps,
                num_heads, scale, SHARED_Q=shared, TMA=tma, **_constants(q, activation, scale, options, config),
            )  # fmt: skip
        if dk.numel() and only != "dq":
            config = options.dkdv or default("dkdv_tma" if tma else "dkdv", head_dim, q.dtype)
            tiles, count, bound = tile_list(kv_offsets, k.shape[0], config.block_n)
            _, queries, gradients = descriptors(tma, config.block_m, q, do)
            dkdv_kernel[(bound * num_heads,)](
                gradients, queries, k, v, dk, dv, offsets, kv_offsets, tiles, count,
                *_strides(do, q, k, v, dk, dv), *steps, k.shape[0], num_heads, scale,
                SHARED_Q=shared, TMA=tma, **_constants(q, activation, scale, options, config),
            )  # fmt: skip
    if shared:
        dq = dq.view(num_sequences, *q.shape).sum(0).to(q.dtype)
    return dq, dk, dv


def forward(q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None):
    """o = act(scale q kT) v for every sequence: one kernel for self-attention, cross-attention and pooling by queries.

    q [Tq, H, D], k, v [Tkv, H, D] in bfloat16, float16 or float32, last dimension contiguous; q_offsets None: q [Lq,
    H, D] is shared and o is [B, Lq, H, D]. `schedule` (kernels.schedule.Schedule, block_m of the configuration) sets
    which persistent program works on which tile. max_kv_len <= 128 at head_dim 72 to 128 keeps keys on chip.
    """
    return forward_with(
        Options(), q, k, v, q_offsets, kv_offsets, activation=activation, scale=scale, max_q_len=max_q_len,
        max_kv_len=max_kv_len, schedule=schedule,
    )  # fmt: skip


def backward(do, q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None):
    """(dq, dk, dv) in the inputs' types, accumulated in float32; dq of shared queries is summed over the sequences.

    `schedule` lists query tiles of the forward pass and is not used here.
    """
    return backward_with(
        Options(), do, q, k, v, q_offsets, kv_offsets, activation=activation, scale=scale, max_q_len=max_q_len,
        max_kv_len=max_kv_len, schedule=schedule,
    )  # fmt: skip


def unsupported(case: Case) -> str | None:
    """Why this implementation cannot run `case`, or None."""
    if case.device_type != "cuda" and isinstance(forward_kernel, triton.JITFunction):
        return f"needs a CUDA device, not {case.device_type}"
    if case.device_type == "cuda" and case.capability < (8, 0):
        return f"needs compute capability 8.0, not {case.capability[0]}.{case.capability[1]}"
    if case.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {case.dtype}; allowed: bfloat16, float16, float32"
    if case.device_type != "cuda" and case.dtype == torch.bfloat16:
        return "bfloat16 products are wrong in Triton's interpreter"
    if case.head_dim > 256:
        return f"head_dim {case.head_dim}; allowed: up to 256"
    if case.activation is not None and case.activation not in ACTIVATIONS:
        return f"activation {case.activation!r}; allowed: {', '.join(ACTIVATIONS)}"
    return None


IMPLEMENTATION = Implementation("triton", forward, backward, unsupported)
candidates = configs.candidates
