"""Bounds against numbers worked out by hand, and properties that any bound must have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kernels import bounds, flops
from kernels.bounds import MEASURED_H200, Ceilings, bound, expected_speedup, peak_flops

B = 1152


def close(value: float, expected: float, relative: float = 1e-9) -> bool:
    return abs(value - expected) <= relative * abs(expected)


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H200", torch.float8_e4m3fn, 1979e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1979e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA B200", torch.float16, 2250e12),
    ],
)
def test_peaks_are_the_dense_ones(device, dtype, peak):
    assert peak_flops(device, dtype) == peak


def test_mfu_of_the_worked_case():
    assert round(3.956e12 / 10e-3 / peak_flops("NVIDIA H200"), 3) == 0.4  # 0.2 with the sparse figure


def test_unknown_chips_and_missing_units_fail_loudly():
    for name in ("NVIDIA H200 NVL", "NVIDIA H100 PCIe", "cpu", "h2000"):
        with pytest.raises(ValueError, match=f"chip: '{name}' has no entry; allowed: h200"):
            peak_flops(name)
    with pytest.raises(ValueError, match="a100 has no fp8 tensor cores"):
        peak_flops("a100", "fp8")
    with pytest.raises(ValueError, match=r"dtype: torch\.float32"):
        peak_flops("h200", torch.float32)


@pytest.mark.parametrize(("phase", "ms", "tensors"), [("fwd", 1.55, 4), ("bwd", 2.72, 7)])
def test_block_attention_of_the_source(phase, ms, tensors):
    """B = 1152, H = 4, D = 128, lengths at most 2000, mean fill 0.7: bound by memory at the copy rate of 4.26 TB/s."""
    case = bound(
        "block_attention", [1400] * B, None, 4, 128, phase, torch.bfloat16, None, "h200", ceilings=MEASURED_H200
    )
    assert case.limiter == "hbm" and close(case.time_ms, ms, 5e-3)
    assert case.hbm_bytes == tensors * B * 1400 * 4 * 128 * 2
    assert case.time_ms == case.hbm_ms == pytest.approx(case.hbm_bytes / 4260e9 * 1e3)
    nominal = bound("block_attention", [1400] * B, None, 4, 128, phase)
    assert close(nominal.time_ms, {"fwd": 1.38, "bwd": 2.41}[phase], 5e-3)


@pytest.mark.parametrize(("shared", "tflops"), [(True, 132), (False, 128)])
@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_pooled_attention_is_bound_by_the_copy_rate(op, shared, tflops):
    kv = [512, 513] * (B // 2)  # uniform on 1..1024 has this mean
    activation = "gelu_tanh" if op == "gdpa" else None
    case = bound(op, [32] * B, kv, 4, 128, "fwd", "bf16", activation, "h200", ceilings=MEASURED_H200, shared_q=shared)
    assert case.limiter == "hbm" and round(case.tflops) == tflops


def test_rotary_bytes_of_the_source():
    tokens, heads = 1_735_537, 3
    case = bound("rotary", [tokens], None, heads, 128, tensors=3)
    assert case.hbm_bytes == 2 * 3 * tokens * heads * 128 * 2 + tokens * 128 * 4  # 8.0 GB of q, k, v; cos and sin once
    fused = bound("block_attention", [tokens], None, heads, 128, "bwd", rotary=True)
    assert fused.hbm_bytes == 7 * tokens * heads * 128 * 2 + tokens * 128 * 4


def test_every_component_of_a_small_case_by_hand():
    """lengths 70 x 130, H = 2, D = 64, forward: tiles of 64 x 16 or 16 x 64, whichever is less."""
    case = bound("gdpa", [70], [130], 2, 64, "fwd", torch.bfloat16, "gelu_taylor6", "h200")
    tiled = min(128 * 144, 80 * 192)
    assert tiled == 80 * 192
    assert case.useful_flops == 4 * 2 * 64 * 70 * 130
    assert (case.gemms, case.done_flops) == (2, 4 * 2 * 64 * tiled)
    assert case.tile_efficiency == 70 * 130 / tiled
    assert case.hbm_bytes == 2 * 2 * 64 * (70 + 130 + 130 + 70)
    assert case.exp_ops == 0 and case.issue_slots == 5.5 * 2 * tiled
    assert close(case.tensor_ms, case.done_flops / 989e12 * 1e3) and close(case.hbm_ms, case.hbm_bytes / 4.8e12 * 1e3)
    assert close(case.issue_ms, case.issue_slots / (132 * 128 * 1.83e9) * 1e3)
    assert close(case.tensor_useful_ms, case.useful_flops / 989e12 * 1e3)
    assert close(case.no_overlap_ms, max(case.tensor_ms, case.hbm_ms) + case.issue_ms)
    assert case.time_ms == max(case.tensor_ms, case.hbm_ms, case.exp_ms, case.issue_ms)
    own = bound("gdpa", [70], [130], 2, 64, "fwd", torch.bfloat16, "gelu_taylor6", "h200", tile=(128, 128))
    assert own.done_flops == 4 * 2 * 64 * 128 * 256


def test_backward_counts_and_schemes():
    arguments = ("jagged_attention", [128, 256], None, 2, 64)
    pairs = 128**2 + 256**2
    forward, model, kernel = (bound(*arguments, phase) for phase in ("fwd", "bwd", "bwd_kernel"))
    assert model.useful_flops == 2 * forward.useful_flops and kernel.useful_flops == 2.5 * forward.useful_flops
    assert model.time_ms == kernel.time_ms and model.gemms == 5
    assert model.done_flops == 10 * 2 * 64 * pairs
    split, atomic = bound(*arguments, "bwd", scheme="split"), bound(*arguments, "bwd", scheme="atomic")
    assert split.gemms == 7 and split.exp_ops == 2 * model.exp_ops == 2 * 2 * pairs
    rows, element = 384, 2 * 64
    assert model.hbm_bytes == 8 * rows * element * 2 + 4 * 2 * rows  # q k v o do, dq dk dv, and one lse
    assert atomic.hbm_bytes - model.hbm_bytes == 8 * rows * element
    gdpa = bound("gdpa", [128, 256], None, 2, 64, "bwd", activation="relu")
    assert gdpa.hbm_bytes == 7 * rows * element * 2


def test_two_kernels_need_more_than_the_gemm_ceiling():
    """Full 2048 at 540 TFLOP/s counted over 5 GEMMs would need 756 done where a scheme does 7."""
    case = bound(
        "gdpa", [2048] * 576, None, 4, 128, "bwd_kernel", activation="relu", scheme="split", ceilings=MEASURED_H200
    )
    assert case.limiter == "tensor" and close(case.tflops, 798 * 5 / 7)
    assert close(540 * case.done_flops / case.useful_flops, 756)


def test_measured_order_of_activations_follows_the_no_overlap_time():
    """On an H200 a first GDPA kernel at length 2048 reached 428 (tanh), 533 (Taylor), 645 (relu) TFLOP/s."""
    cases = {
        a: bound("gdpa", [2048] * 576, None, 4, 128, activation=a, ceilings=MEASURED_H200)
        for a in ("gelu_tanh", "gelu_taylor6", "relu")
    }
    rates = [case.useful_flops / case.no_overlap_ms / 1e9 for case in cases.values()]
    assert rates == sorted(rates) and all(case.tflops == pytest.approx(798) for case in cases.values())
    assert cases["gelu_tanh"].exp_ms > cases["gelu_tanh"].issue_ms and cases["gelu_taylor6"].exp_ms == 0


@pytest.mark.parametrize("tile", [(64, 16), (128, 128), (16, 64)])
@pytest.mark.parametrize("window", [0, 1, 17, 64, 1000])
def test_window_tiles_equal_a_count_over_pairs(window, tile):
    for length in (1, 63, 64, 65, 200):
        i, j = np.arange(length)[:, None], np.arange(length)[None]
        seen = np.abs(i - j) <= window
        tiles = {(a // tile[0], b // tile[1]) for a, b in zip(*np.nonzero(seen), strict=True)}
        case = bound("jagged_attention", [length], None, 1, 64, window=window, tile=tile)
        assert case.useful_flops == 4 * 64 * int(seen.sum())
        assert case.done_flops == 4 * 64 * len(tiles) * tile[0] * tile[1]


def test_block_pairs():
    case = bound("block_attention", [70, 70], None, 1, 64)
    assert case.useful_flops == 2 * 8264 * (64 + 64) == 2_115_584
    assert case.done_flops == 4 * 64 * 2 * (64 * 64 + 16 * 64)


def test_flops_agree_with_the_package():
    q, kv = [3, 0, 5, 100], [7, 2, 0, 33]
    for phase in bounds.PHASES:
        for op, count in (("jagged_attention", flops.jagged_attention), ("gdpa", flops.gdpa)):
            activation = "silu" if op == "gdpa" else None
            ours = bound(op, q, kv, 4, 64, phase, activation=activation).useful_flops
            assert ours == count(torch.tensor(q), torch.tensor(kv), 4, 64, phase=phase)
        ours = bound("jagged_attention", q, None, 4, 64, phase, window=2).useful_flops
        assert ours == flops.jagged_attention(torch.tensor(q), torch.tensor(q), 4, 64, window=2, phase=phase)


def test_linear_norm_quantize_by_hand():
    case = bound("linear", [700, 300], None, 4, 128, out_features=2048)
    assert case.useful_flops == 2 * 1000 * 512 * 2048 and case.done_flops == 2 * 1024 * 512 * 2048
    assert case.hbm_bytes == 2 * (1000 * 512 + 512 * 2048 + 1000 * 2048)
    backward = bound("linear", [700, 300], None, 4, 128, "bwd", out_features=2048)
    assert backward.useful_flops == 2 * case.useful_flops
    assert backward.hbm_bytes == 2 * (2 * 1000 * 512 + 2 * 512 * 2048 + 1000 * 2048)
    assert bound("norm", [1000], None, 4, 128).hbm_bytes == 1000 * (512 * 4 + 4)
    assert bound("quantize", [1024], None, 4, 128).hbm_bytes == 1024 * 512 * (3 + 1 / 32)
    assert bound("quantize", [1024], None, 4, 128, square=True).hbm_bytes == 1024 * 512 * (3 + 1 / 1024)


def test_eight_bit_operands():
    half = bound("jagged_attention", [2048] * 8, None, 4, 128, chip="h200")
    low = bound("jagged_attention", [2048] * 8, None, 4, 128, dtype=torch.float8_e4m3fn, chip="h200")
    assert low.tensor_ms == pytest.approx(half.tensor_ms * 989 / 1979)
    rows = 8 * 2048
    assert low.hbm_bytes == rows * 512 * (3 * (1 + 1 / 32) + 2) + 4 * 4 * rows
    # At D = 128 the exp unit takes as long as 8-bit tensor cores: softmax attention can gain no more than this.
    assert low.exp_ms == pytest.approx(low.tensor_ms, rel=1e-3) and low.exp_ms == half.exp_ms
    assert bounds.peak_ratio("b200", "fp8") == 2 and expected_speedup(low, half) <= bounds.peak_ratio("h200", "fp8")


def test_expected_speedup_takes_bounds_or_arguments():
    fast = {"op": "jagged_attention", "q_lengths": [4096] * 4, "num_heads": 4, "window": 64}
    slow = {**fast, "window": None}
    assert expected_speedup(fast, slow) == bound(**slow).time_ms / bound(**fast).time_ms > 5
    assert expected_speedup(bound(**fast), slow) == expected_speedup(fast, slow)
    with pytest.raises(ValueError, match="fast: its bound is 0 ms"):
        expected_speedup({**fast, "q_lengths": []}, slow)


def test_empty_work_and_empty_pairs():
    for op, activation in (("jagged_attention", None), ("gdpa", "relu"), ("block_attention", None)):
        for lengths in ([], [0, 0]):
            assert bound(op, lengths, None, 4, 64, activation=activation).time_ms == 0
    case = bound("gdpa", [5, 3], [0, 2], 1, 64, activation="relu")
    assert case.hbm_bytes == 2 * 64 * (3 + 2 + 2) + 2 * 64 * 8  # queries without keys are written as zeros, not read


def test_bounds_grow_with_work_and_shrink_with_the_chip():
    lengths = torch.tensor([100, 900, 37])
    base = bound("jagged_attention", lengths, None, 4, 128)
    assert bound("jagged_attention", lengths + 64, None, 4, 128).time_ms > base.time_ms
    assert bound("jagged_attention", lengths, None, 4, 128, chip="b200").time_ms < base.time_ms
    assert bound("jagged_attention", lengths, None, 4, 128, ceilings=MEASURED_H200).time_ms > base.time_ms
    assert base.ceilings == "nominal" and dataclasses.is_dataclass(base)
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.time_ms = 0.0


def test_ceilings_come_from_records(tmp_path):
    header = "experiment,case,subject,impl,phase,metric,unit,p50,p20,p80,n,seed,status,scope,run_id,note\n"
    rows = [
        "ceilings,gemm,gemm,torch,model,gemm_bf16_tflops,TFLOP/s,790,,,9,,ok,measured,r1,",
        "ceilings,gemm,gemm,torch,model,gemm_bf16_tflops,TFLOP/s,798,,,9,,ok,measured,r2,",
        "ceilings,gemm,gemm,torch,model,gemm_bf16_tflops,TFLOP/s,2000,,,9,,ok,modelled,r3,",
        "ceilings,gemm,gemm,torch,model,gemm_fp8_tflops,TFLOP/s,,,,0,,unsupported,measured,r3,",
        "ceilings,copy,copy,torch,model,copy_gbps,GB/s,4260,,,9,,ok,measured,r1,",
    ]
    path = tmp_path / "ceilings.csv"
    path.write_text(header + "\n".join(rows) + "\n")
    assert Ceilings.from_records(path) == Ceilings(798.0, None, 4260.0, str(path))
    path.write_text(header)
    with pytest.raises(ValueError, match="no measured row"):
        Ceilings.from_records(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "conv"}, "op: 'conv'; allowed: jagged_attention"),
        ({"phase": "step"}, "phase: 'step'; allowed: fwd"),
        ({"scheme": "atomics"}, "scheme: 'atomics'"),
        ({"op": "gdpa"}, "activation: None for gdpa; allowed: gelu_tanh"),
        ({"activation": "silu"}, "activation: 'silu' for jagged_attention"),
        ({"kv_lengths": [3]}, "kv_lengths: 1 sequences; allowed: 2"),
        ({"kv_lengths": [3, 5], "window": 4}, "kv_lengths differ"),
        ({"q_lengths": [3, -1]}, "q_lengths"),
        ({"q_lengths": [3.5, 1.0]}, "q_lengths: torch.float"),
        ({"shared_q": True}, "shared_q: q_lengths differ"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        bound(**{"op": "jagged_attention", "q_lengths": [3, 4], "num_heads": 2, "head_dim": 64, **change})
