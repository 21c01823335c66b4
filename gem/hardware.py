"""The device: its name, its memory in use, and the peak FLOP rate that MFU is divided by.

Peaks are DENSE figures of the data sheet for the precision named; sparse figures are twice as high and never used. A
CPU has no useful nominal figure: its peak is the matrix-product rate measured here, and it is named as that.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from dataclasses import dataclass
from functools import lru_cache

import torch

from kernels import bounds

# Boards that kernels.bounds does not list, since their clocks differ: device name -> precision -> dense FLOP/s.
OTHER_BOARDS: dict[str, dict[str, float]] = {
    "NVIDIA H100 PCIe": {"bfloat16": 756e12, "float16": 756e12, "fp8": 1513e12},
    "NVIDIA H100 NVL": {"bfloat16": 835e12, "float16": 835e12, "fp8": 1671e12},
    "NVIDIA A100 80GB PCIe": {"bfloat16": 312e12, "float16": 312e12},
}
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Peak:
    """FLOP/s that MFU is divided by, and what it is."""

    name: str
    flops: float


def dense_peak(device_name: str, precision: str) -> Peak:
    """Dense data-sheet peak of a GPU by the driver's name. precision: "bfloat16", "float16", "fp8". ValueError else."""
    if precision not in PRECISIONS:
        raise ValueError(f"peak: unknown precision {precision!r}; allowed: {', '.join(PRECISIONS)}")
    if device_name in OTHER_BOARDS:
        board = OTHER_BOARDS[device_name]
        if precision not in board:
            raise ValueError(f"peak: {device_name} has no {precision}; allowed: {', '.join(board)}")
        flops = board[precision]
    elif device_name in bounds.DEVICE_NAMES:
        flops = bounds.peak_flops(device_name, PRECISIONS[precision])
    else:
        known = ", ".join([*bounds.DEVICE_NAMES, *OTHER_BOARDS])
        raise ValueError(f"peak: unknown device {device_name!r}; known: {known}")
    return Peak(f"{device_name} {precision} dense, data sheet", flops)


@lru_cache
def measured_gemm_peak(size: int = 768, repeats: int = 7) -> Peak:
    """Best float32 matrix-product rate of this CPU with the threads torch uses now. Takes a fraction of a second."""
    generator = torch.Generator().manual_seed(0)  # a measurement must not move the training's random state
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    a @ b
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    threads = torch.get_num_threads()
    return Peak(f"measured float32 GEMM {size}^3, {threads} CPU thread{'s' if threads > 1 else ''}", 2 * size**3 / best)


def peak(device: torch.device) -> Peak:
    """The peak of MFU: bf16 dense on a GPU, whatever precision runs; the measured GEMM rate on a CPU."""
    if device.type == "cuda":
        return dense_peak(torch.cuda.get_device_name(device), "bfloat16")
    return measured_gemm_peak()


def device_name(device: torch.device) -> str:
    """Name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as handle:
            for line in handle:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def open_device(name: str) -> torch.device:
    """torch.device of a tier; ValueError if it asks for a GPU that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: no NVIDIA GPU is visible to torch here; use --tier smoke on a CPU")
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory in use since the reset: tensors of a GPU; on a CPU the whole process since it started, which never
    falls."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
