"""What plain library calls reach on this device, measured in the same run as the kernels that are compared with it."""

from __future__ import annotations

import torch

from gem import record
from gem.bench.timing import Timing, measure
from kernels.bounds import Ceilings

SIZE = 8192  # a matrix product large enough that launch and tails do not count
COPY_BYTES = {"cuda": 2 * 2**30, "cpu": 2**26}


def gemm_tflops(timing: Timing, size: int = SIZE) -> tuple[float, float, float]:
    """Rate of a size^3 matrix product in TFLOP/s: median, slow and fast quantile."""
    return tuple(value / 1e12 for value in timing.rate(2 * size**3))


def measure_ceilings(tier: str, device: torch.device, bench: dict, name: str) -> Ceilings:
    """Measure and record (experiment "ceilings"): bf16 and FP8 matrix products on a GPU, and a copy on any device."""
    found: dict[str, float] = {}
    options = {"device": device.type, "warmup_ms": bench["warmup_ms"], "repeat_ms": 2 * bench["repeat_ms"]}
    config = {"bench": bench, "size": SIZE}
    with record.Run(tier, "ceilings", name=name, config=config, sources=("gem/bench/ceilings.py",)) as run:

        def add(metric: str, impl: str, rate: tuple, n: int, note: str) -> None:
            values = {"p50": rate[0], "p20": rate[1], "p80": rate[2], "n": n}
            run.add(case="ceiling", subject="ceiling", impl=impl, phase="fwd", metric=metric, note=note, **values)
            found[metric] = rate[0]

        if device.type == "cuda":
            a, b = (torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
            timing = measure(lambda: torch.mm(a, b), **options)
            add("gemm_bf16_tflops", "torch_mm", gemm_tflops(timing), timing.n, f"{SIZE}^3")
            if torch.cuda.get_device_capability(device) >= (8, 9):
                a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
                one = torch.ones((), device=device)
                timing = measure(
                    lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), **options
                )
                add(
                    "gemm_fp8_tflops", "torch_scaled_mm", gemm_tflops(timing), timing.n, f"{SIZE}^3, exact accumulation"
                )
        source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).fill_(1)
        target = torch.empty_like(source)
        timing = measure(lambda: target.copy_(source), **options)
        rate = tuple(value / 1e9 for value in timing.rate(2 * source.numel()))
        add("copy_gbps", "torch_copy", rate, timing.n, f"{source.numel() >> 20} MiB, read + write")
    return Ceilings(**found, source="measured in the same run")
