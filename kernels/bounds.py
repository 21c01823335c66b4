"""What a chip allows: the least time of an op by tensor cores, memory, exp unit and issue slots, and which one limits.

    tensor   FLOPs of the GEMMs that a kernel really does (scores recomputed in the backward pass, edges rounded up to
             the shape of an MMA instruction) over the dense peak of the data type
    hbm      bytes that must cross HBM at least once, over the bandwidth
    exp      special-function instructions (ex2, tanh), 16 a clock and SM
    issue    instructions between the GEMMs, 128 lanes a clock and SM (64 on the A100)

The bound is the largest of these, as if they overlapped perfectly. With nominal figures nothing on that chip can be
faster. With measured ceilings (`Ceilings`: what a plain GEMM and a plain copy reached) it is what a faultless kernel
would reach, and that is the `expected` column of tables and claims. exp and issue always use the nominal clock; under
load a chip clocks lower, so these two stay optimistic. Host arithmetic only: lengths in, a frozen `Bound` out.

Instruction counts per score (`INSTRUCTIONS`) are for Hopper: one FP32 instruction handles one score a lane; a
conversion to 16 bits takes two scores; a special-function instruction also takes an issue slot. Left out: masks,
addresses, loops, and with 8-bit operands the quantising of P and dS.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

OPS = ("jagged_attention", "gdpa", "block_attention", "linear", "norm", "rotary", "quantize")
PHASES = ("fwd", "bwd", "bwd_kernel")
SCHEMES = ("single", "atomic", "split")
LIMITERS = ("tensor", "hbm", "exp", "issue")


@dataclass(frozen=True)
class Chip:
    """Nominal figures. bf16, fp8: dense FLOP/s of the tensor cores (fp8 None: no such unit). hbm: bytes/s. clock: Hz
    at which bf16 is quoted. fp32_lanes: FP32 instructions a clock and SM. special: ex2 or tanh a clock and SM."""

    name: str
    bf16: float
    fp8: float | None
    hbm: float
    sms: int
    clock: float
    fp32_lanes: int = 128
    special: int = 16


# Dense columns of the data sheets; their headline figures, twice as large, are for 2:4 sparse operands.
CHIPS = {
    "h200": Chip("h200", 989e12, 1979e12, 4.8e12, 132, 1.83e9),
    "h100": Chip("h100", 989e12, 1979e12, 3.35e12, 132, 1.83e9),
    "a100": Chip("a100", 312e12, None, 2.039e12, 108, 1.41e9, fp32_lanes=64),
    "a100_40gb": Chip("a100_40gb", 312e12, None, 1.555e12, 108, 1.41e9, fp32_lanes=64),
    "b200": Chip("b200", 2250e12, 4500e12, 8e12, 148, 1.85e9),
}
# Names as the driver reports them. PCIe and NVL boards run at other clocks: they are not listed, so that asking for
# one fails.
DEVICE_NAMES = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "NVIDIA B200": "b200",
}
_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "bf16",
    "float16": "bf16",
    "fp8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


@dataclass(frozen=True)
class Ceilings:
    """Rates that plain library calls reached on a chip, in TFLOP/s and GB/s (read + write); None: use the nominal
    figure."""

    gemm_bf16_tflops: float | None = None
    gemm_fp8_tflops: float | None = None
    copy_gbps: float | None = None
    source: str = "nominal"

    @staticmethod
    def from_records(path: str | Path) -> Ceilings:
        """Read a records CSV: the best p50 of each metric gemm_bf16_tflops, gemm_fp8_tflops, copy_gbps with status ok
        and scope measured. ValueError when it holds none of them."""
        best: dict[str, float] = {}
        names = [field.name for field in fields(Ceilings) if field.name != "source"]
        with open(path, newline="") as file:
            for row in csv.DictReader(file):
                if row["metric"] in names and row["status"] == "ok" and row["scope"] == "measured":
                    best[row["metric"]] = max(best.get(row["metric"], 0.0), float(row["p50"]))
        if not best:
            raise ValueError(
                f"{path}: no measured row of {', '.join(names)}; allowed: records of the experiment 'ceilings'"
            )
        return Ceilings(**best, source=str(path))


NOMINAL = Ceilings()
# One H200, driver 580, torch 2.11+cu130, 2026-11-30, median of triton.testing.do_bench: torch.mm bf16 8192^3,
# torch._scaled_mm
# FP8 8192^3 with accurate accumulation (1,415 with fast), device-to-device copy. Records of the experiment `ceilings`
# replace them.
MEASURED_H200 = Ceilings(798.0, 1277.0, 4260.0, "torch.mm / _scaled_mm 8192^3 and copy on an H200, 2026-11-30")


def find_chip(chip: str | Chip) -> Chip:
    """A chip by its key ("h200") or by the driver's device name ("NVIDIA H200"); ValueError for any other name."""
    if isinstance(chip, Chip):
        return chip
    key = DEVICE_NAMES.get(chip, chip)
    if key not in CHIPS:
        raise ValueError(f"chip: {chip!r} has no entry; allowed: {', '.join([*CHIPS, *DEVICE_NAMES])}")
    return CHIPS[key]


def peak_flops(chip: str | Chip, dtype: Any = torch.bfloat16) -> float:
    """Nominal dense tensor-core FLOP/s of a chip (key or device name): the denominator of MFU. ValueError where there
    is none."""
    found = find_chip(chip)
    peak = found.fp8 if _kind(dtype) == "fp8" else found.bf16
    if peak is None:
        raise ValueError(f"chip: {found.name} has no {dtype} tensor cores; allowed: bf16, fp16")
    return peak


def _kind(dtype: Any) -> str:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: {dtype}; allowed: bfloat16, float16, float8_e4m3fn, float8_e5m2")
    return _DTYPES[dtype]


@dataclass(frozen=True)
class Instructions:
    """Per score: special-function instructions, and all issued instructions (those included)."""

    special: float
    issue: float


# fwd: from the accumulator of q k^T to the 16-bit P (its conversion: 0.5). bwd: from the accumulators of q k^T and do
# v^T to the
# 16-bit P and dS (two conversions: 1.0), the product dS = dP act' included.
INSTRUCTIONS: dict[str, dict[str, Instructions]] = {
    # max; fma (scale, minus max); ex2; add (row sum) / fma, ex2, dP - D, times P
    "softmax": {"fwd": Instructions(1, 4.5), "bwd": Instructions(1, 5.0)},
    # s^2; fma; times s; tanh; s/2; fma / the same, then 1 - t^2, a + b s^2, product, (1 + t)/2, fma, dS
    "gelu_tanh": {"fwd": Instructions(1, 6.5), "bwd": Instructions(1, 13.0)},
    # erf as the CUDA library computes it: two branches of a degree-7 polynomial by selects (14), ex2, 1 - e, sign,
    # choice; scaling
    # in, s/2, fma / the same, then s^2 log2(e)/2, ex2, (1 + erf)/2, fma, dS
    "gelu": {"fwd": Instructions(1, 21.5), "bwd": Instructions(2, 27.0)},
    # s^2; two fma; s/2; fma / the same, then three fma, dS
    "gelu_taylor6": {"fwd": Instructions(0, 5.5), "bwd": Instructions(0, 10.0)},
    # s sigmoid(s) = h + h tanh(h), h = s/2: h; tanh; fma / then sigmoid, P, sigmoid + P, fma, dS
    "silu": {"fwd": Instructions(1, 3.5), "bwd": Instructions(1, 8.0)},
    # max / max, compare, select
    "relu": {"fwd": Instructions(0, 1.5), "bwd": Instructions(0, 4.0)},
    # max, square / max, square, double, dS
    "relu2": {"fwd": Instructions(0, 2.5), "bwd": Instructions(0, 5.0)},
    "identity": {"fwd": Instructions(0, 0.5), "bwd": Instructions(0, 1.0)},
}


@dataclass(frozen=True)
class Bound:
    """The bound of one case and every component of it. Times in milliseconds, counts absolute.

    time_ms: the largest of tensor_ms, hbm_ms, exp_ms, issue_ms; limiter: its name. no_overlap_ms: max(tensor, hbm) +
    max(exp, issue), what a kernel that never overlaps GEMMs with the elementwise part would take. useful_flops: by
    the convention of flops.py for the phase. gemms, done_flops: GEMMs done and their FLOPs with rounded-up edges.
    tile_efficiency: useful pairs / pairs in whole tiles. tensor_useful_ms: tensor_ms if tile_efficiency were 1.
    """

    op: str
    phase: str
    chip: str
    ceilings: str
    time_ms: float
    limiter: str
    tensor_ms: float
    hbm_ms: float
    exp_ms: float
    issue_ms: float
    no_overlap_ms: float
    tensor_useful_ms: float
    useful_flops: int
    done_flops: int
    gemms: int
    tile_efficiency: float
    hbm_bytes: float
    exp_ops: float
    issue_slots: float

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s at the bound."""
        return self.useful_flops / self.time_ms / 1e9 if self.time_ms else 0.0


@dataclass(frozen=True)
class _Work:
    """What one case asks of the chip, before rates."""

    useful_flops: int
    done_flops: int
    gemms: int
    tile_efficiency: float
    hbm_bytes: float
    exp_ops: float
    issue_slots: float


def bound(
    op: str,
    q_lengths: Sequence[int] | torch.Tensor,
    kv_lengths: Sequence[int] | torch.Tensor | None = None,
    num_heads: int = 1,
    head_dim: int = 128,
    phase: str = "fwd",
    dtype: Any = torch.bfloat16,
    activation: str | None = None,
    chip: str | Chip = "h200",
    *,
    ceilings: Ceilings = NOMINAL,
    window: int | None = None,
    block_size: int = 64,
    shared_q: bool = False,
    rotary: bool = False,
    scheme: str = "single",
    tile: tuple[int, int] | None = None,
    out_features: int | None = None,
    tensors: int = 1,
    square: bool = False,
) -> Bound:
    """Least time of `op` over real lengths on `chip`.

    op: jagged_attention (softmax), gdpa (needs `activation`), block_attention, or, over sum(q_lengths) rows of
    num_heads * head_dim features: linear (to `out_features`, default the same), norm, rotary (on `tensors` of q, k,
    v), quantize (bf16 to MX blocks of 1 x 32, or 32 x 32 if `square`). kv_lengths None: self-attention. phase: "fwd",
    "bwd" and "bwd_kernel" (the same time, the second counts the recomputed scores as useful). dtype: bfloat16,
    float16 or an 8-bit float (operands of 8 bits with one scale byte per 32; results stay 16 bits). window: |i - j|
    <= w. shared_q: one set of queries, q_lengths all equal. rotary: block attention also reads cos and sin. scheme of
    the backward pass: "single" 5 GEMMs; "atomic" 5 and dq accumulated in HBM in float32; "split" 7 and the
    elementwise part twice. tile: (queries, keys) that partial tiles are rounded up to; None: the granularity of an
    MMA instruction, 64 along one side and 16 (8 bits: 32) along the other, whichever way wastes less.
    """
    for name, value, allowed in (("op", op, OPS), ("phase", phase, PHASES), ("scheme", scheme, SCHEMES)):
        if value not in allowed:
            raise ValueError(f"{name}: {value!r}; allowed: {', '.join(allowed)}")
    found, q = find_chip(chip), _lengths("q_lengths", q_lengths)
    kv = q if kv_lengths is None else _lengths("kv_lengths", kv_lengths)
    if len(q) != len(kv):
        raise ValueError(f"kv_lengths: {len(kv)} sequences; allowed: {len(q)}, as in q_lengths")
    width = num_heads * head_dim
    if op in ("jagged_attention", "gdpa", "block_attention"):
        activation = _activation(op, activation)
        if (window is not None or op == "block_attention") and kv_lengths is not None and not torch.equal(q, kv):
            raise ValueError(f"{op}: kv_lengths differ from q_lengths; allowed: self-attention with a window or blocks")
        if shared_q and len(set(q.tolist())) > 1:
            raise ValueError("shared_q: q_lengths differ; allowed: equal lengths")
        block = block_size if op == "block_attention" else None
        pairs = _pairs(q, kv, window, block)
        tiled = _tiled_pairs(q, kv, tile, 32 if _kind(dtype) == "fp8" else 16, window, block)
        hbm = _attention_bytes(op, q, kv, width, num_heads, phase, _kind(dtype), shared_q, scheme)
        hbm += 4.0 * head_dim * float(q.sum()) if rotary else 0.0
        work = _attention_work(pairs, tiled, num_heads, head_dim, phase, activation, scheme, hbm)
    else:
        work = _rowwise_work(op, int(q.sum()), width, head_dim, phase, _kind(dtype), out_features, tensors, square)
    return _bound_of(op, phase, found, ceilings, _kind(dtype), work)


def expected_speedup(fast: Bound | dict, slow: Bound | dict) -> float:
    """Time of `slow` / time of `fast` at their bounds; a dict holds the arguments of `bound`. The `expected` of a
    speed-up claim."""
    times = [(case if isinstance(case, Bound) else bound(**case)).time_ms for case in (fast, slow)]
    if times[0] <= 0:
        raise ValueError("fast: its bound is 0 ms (no work); allowed: a case with work")
    return times[1] / times[0]


def peak_ratio(chip: str | Chip, dtype: Any, base: Any = torch.bfloat16) -> float:
    """Nominal tensor-core rate of `dtype` over that of `base`."""
    return peak_flops(chip, dtype) / peak_flops(chip, base)


def _bound_of(op: str, phase: str, chip: Chip, ceilings: Ceilings, kind: str, work: _Work) -> Bound:
    measured = ceilings.gemm_fp8_tflops if kind == "fp8" else ceilings.gemm_bf16_tflops
    flops = peak_flops(chip, kind) if measured is None else measured * 1e12
    bandwidth = chip.hbm if ceilings.copy_gbps is None else ceilings.copy_gbps * 1e9
    times = {
        "tensor": 1e3 * work.done_flops / flops,
        "hbm": 1e3 * work.hbm_bytes / bandwidth,
        "exp": 1e3 * work.exp_ops / (chip.sms * chip.special * chip.clock),
        "issue": 1e3 * work.issue_slots / (chip.sms * chip.fp32_lanes * chip.clock),
    }
    limiter = max(LIMITERS, key=times.__getitem__)
    return Bound(
        op=op,
        phase=phase,
        chip=chip.name,
        ceilings=ceilings.source,
        time_ms=times[limiter],
        limiter=limiter,
        tensor_ms=times["tensor"],
        hbm_ms=times["hbm"],
        exp_ms=times["exp"],
        issue_ms=times["issue"],
        no_overlap_ms=max(times["tensor"], times["hbm"]) + max(times["exp"], times["issue"]),
        tensor_useful_ms=times["tensor"] * work.tile_efficiency,
        useful_flops=work.useful_flops,
        done_flops=work.done_flops,
        gemms=work.gemms,
        tile_efficiency=work.tile_efficiency,
        hbm_bytes=work.hbm_bytes,
        exp_ops=work.exp_ops,
        issue_slots=work.issue_slots,
    )


def _lengths(name: str, lengths) -> torch.Tensor:
    """Lengths [B] as int64 on the CPU; arrays of other libraries are taken as they are."""
    values = torch.as_tensor(lengths).cpu()
    whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    if values.ndim != 1 or (len(values) and (not whole or values.min() < 0)):
        raise ValueError(f"{name}: {values.dtype} of rank {values.ndim}; allowed: non-negative integers [B]")
    return values.to(torch.int64)


def _activation(op: str, activation: str | None) -> str:
    if op != "gdpa":
        if activation not in (None, "softmax"):
            raise ValueError(f"activation: {activation!r} for {op}; allowed: None, 'softmax'")
        return "softmax"
    if activation not in INSTRUCTIONS or activation == "softmax":
        allowed = ", ".join(name for name in INSTRUCTIONS if name != "softmax")
        raise ValueError(f"activation: {activation!r} for gdpa; allowed: {allowed}")
    return activation


def _pairs(q: torch.Tensor, kv: torch.Tensor, window: int | None, block: int | None) -> int:
    """Pairs of query and key that count."""
    if block is not None:
        rest = q % block
        return int(((q // block) * block * block + rest * rest).sum())
    if window is not None:
        reach = (q - 1).clamp(0, window)
        return int((q * (2 * reach + 1) - reach * (reach + 1)).sum())
    return int((q * kv).sum())


def _up(x, multiple: int):
    """x, an integer or a tensor of them, rounded up to a multiple."""
    return -(-x // multiple) * multiple


def _tiled_pairs(
    q: torch.Tensor, kv: torch.Tensor, tile: tuple[int, int] | None, fine: int, window: int | None, block: int | None
) -> int:
    """Pairs in all tiles that hold a pair that counts."""
    if tile is None:
        ways = [_tiles(q, kv, (64, fine), window, block), _tiles(q, kv, (fine, 64), window, block)]
        return int(torch.minimum(*ways).sum())
    return int(_tiles(q, kv, tile, window, block).sum())


def _tiles(q, kv, tile: tuple[int, int], window: int | None, block: int | None) -> torch.Tensor:
    """Pairs in whole tiles, per sequence."""
    rows, keys = tile
    if block is not None:
        rest = q % block
        whole = _up(block, rows) * _up(block, keys)
        return (q // block) * whole + _up(rest, rows) * _up(rest, keys)
    if window is None:
        return _up(q, rows) * _up(kv, keys)
    sizes, inverse = torch.unique(q, return_inverse=True)
    tiles = [_window_tiles(n, rows, keys, window) for n in sizes.tolist()]
    return torch.tensor(tiles, dtype=torch.int64)[inverse]


def _window_tiles(length: int, rows: int, keys: int, window: int) -> int:
    first = torch.arange(0, length, rows)
    last = (first + rows).clamp(max=length) - 1
    low, high = (first - window).clamp(min=0) // keys, (last + window).clamp(max=length - 1) // keys
    return int((high - low + 1).sum()) * rows * keys


def _attention_work(pairs, tiled, heads, head_dim, phase, activation, scheme, hbm) -> _Work:
    gemm = 2 * heads * head_dim  # FLOPs of one GEMM per pair
    useful = {"fwd": 2, "bwd": 4, "bwd_kernel": 5}[phase]
    gemms = 2 if phase == "fwd" else {"single": 5, "atomic": 5, "split": 7}[scheme]
    passes = 2 if phase != "fwd" and scheme == "split" else 1
    count = INSTRUCTIONS[activation]["fwd" if phase == "fwd" else "bwd"]
    scores = heads * tiled * passes
    return _Work(
        useful * gemm * pairs,
        gemms * gemm * tiled,
        gemms,
        pairs / tiled if tiled else 1.0,
        hbm,
        count.special * scores,
        count.issue * scores,
    )


def _attention_bytes(op, q, kv, width, heads, phase, kind, shared_q, scheme) -> float:
    """Bytes that cross HBM at least once: inputs read once (only where the other side is not empty), results written
    once.

    Softmax over a whole sequence also keeps its log-sum-exp (float32) and reads o back; a 64-token block has both at
    hand (D = rowsum(P dP)), as GDPA needs neither.
    """
    rows = float(q.sum())
    read_kv = float(kv[q > 0].sum()) * width
    read_q = float(q[kv > 0].sum()) * width
    q_once = float(q[0]) * width if shared_q and len(q) else read_q
    write_q = float(q[0]) * width if shared_q and len(q) else rows * width
    element = 2.0 if kind == "bf16" else 1 + 1 / 32
    lse = 4.0 * heads * rows if op == "jagged_attention" else 0.0
    if phase == "fwd":
        return element * (q_once + 2 * read_kv) + 2.0 * rows * width + lse
    inputs = element * (q_once + 2 * read_kv + read_q)  # q, k, v, do
    inputs += lse + (2.0 * read_q if op == "jagged_attention" else 0.0)
    accumulator = 8.0 * write_q if scheme == "atomic" else 0.0  # zeroed and read back
    return inputs + 2.0 * write_q + 4.0 * float(kv.sum()) * width + accumulator


def _rowwise_work(op, rows, width, head_dim, phase, kind, out_features, tensors, square) -> _Work:
    """linear, norm, rotary, quantize over rows x width elements."""
    elements = float(rows * width)
    if op == "linear":
        out = width if out_features is None else out_features
        flops = 2 * rows * width * out * (1 if phase == "fwd" else 2)
        tiled = flops if rows == 0 else flops // rows * _up(rows, 64)
        element = 2.0 if kind == "bf16" else 1 + 1 / 32
        reads = element * (rows * width + width * out + (0 if phase == "fwd" else rows * out))
        writes = 2.0 * (rows * out if phase == "fwd" else rows * width + width * out)
        issue = 0.5 * (rows * out if phase == "fwd" else rows * width + width * out)
        efficiency = flops / tiled if tiled else 1.0
        return _Work(flops, tiled, 1 if phase == "fwd" else 2, efficiency, reads + writes, 0.0, issue)
    if op == "norm":  # x in, y out; dy and x in, dx out; one float32 statistic a row. Unpack, square, scale, pack
        hbm = elements * (4 if phase == "fwd" else 6) + 4.0 * rows
        return _Work(0, 0, 0, 1.0, hbm, 0.0, elements * (3.0 if phase == "fwd" else 6.0))
    if op == "rotary":  # two products and sums a pair, unpack and pack; cos and sin float32 [rows, head_dim / 2] once
        return _Work(0, 0, 0, 1.0, tensors * elements * 4 + 4.0 * rows * head_dim, 0.0, tensors * elements * 3.0)
    scale = 1 / 1024 if square else 1 / 32  # quantize: unpack, |x| and max, scale, clamp, pack
    return _Work(0, 0, 0, 1.0, elements * (2 + 1 + scale), 0.0, elements * 4.5)
