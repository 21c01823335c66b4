"""Peaks are dense data-sheet figures, and the CPU's is measured."""

from __future__ import annotations

import pytest
import torch

from gem import hardware, metrics


@pytest.mark.parametrize(
    ("name", "precision", "flops"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H200", "fp8", 1979e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
    ],
)
def test_dense_peaks(name, precision, flops):
    assert hardware.dense_peak(name, precision).flops == flops
    assert "dense" in hardware.dense_peak(name, precision).name


def test_mfu_uses_the_dense_bf16_peak():
    peak = hardware.dense_peak("NVIDIA H200", "bfloat16").flops
    assert metrics.mfu(3.956e12, 0.010, peak) == pytest.approx(0.400, abs=5e-4)


def test_unknown_devices_and_precisions():
    with pytest.raises(ValueError, match="unknown device 'Abacus'; known: NVIDIA H200"):
        hardware.dense_peak("Abacus", "bfloat16")
    with pytest.raises(ValueError, match=r"a100 has no .*fp8|a100 has no .*float8"):
        hardware.dense_peak("NVIDIA A100-SXM4-80GB", "fp8")
    with pytest.raises(ValueError, match="A100 80GB PCIe has no fp8; allowed: bfloat16, float16"):
        hardware.dense_peak("NVIDIA A100 80GB PCIe", "fp8")
    with pytest.raises(ValueError, match="unknown precision 'int4'"):
        hardware.dense_peak("NVIDIA H200", "int4")


def test_cpu_peak_is_a_measured_rate_with_its_name():
    peak = hardware.peak(torch.device("cpu"))
    assert 1e8 < peak.flops < 1e14
    assert "measured float32 GEMM" in peak.name and "CPU thread" in peak.name
    assert hardware.peak_memory_gib(torch.device("cpu")) > 0.01
    assert hardware.device_name(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_there_is_one_line():
    with pytest.raises(ValueError, match="device cuda: no NVIDIA GPU"):
        hardware.open_device("cuda")
