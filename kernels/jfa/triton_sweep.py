"""Time the candidate configs of the Triton kernels on a GPU.

`python -m kernels.jfa.triton_sweep --output sweep.csv`.

Compiles in parallel first (each worker runs the kernel once on a toy batch, which fills Triton's cache), then, one
config after the other, compares its result with that of the present choice and times it. A config whose result
differs has no time. Prints TFLOP/s a config and shape (useful pairs; GEMMs that the phase really does) and the best
config of a phase by geometric mean.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple

import torch
import triton

from ..jagged import lengths_to_offsets, sample_lengths
from . import configs, triton_schemes, v2_tuned, v3_subtraction

# name: (batch, law, longest, fill, query rows shared by all (PMA), constant key length (cross))
SHAPES = {
    "full256": (1152, "full", 256, 1.0, None, None),
    "uniform256": (1152, "uniform", 256, 0.5, None, None),
    "uniform512": (1152, "uniform", 512, 0.5, None, None),
    "full1024": (1152, "full", 1024, 1.0, None, None),
    "uniform1024": (1152, "uniform", 1024, 0.5, None, None),
    "longtail1024": (1152, "longtail", 1024, 1.0, None, None),
    "full2048": (576, "full", 2048, 1.0, None, None),
    "cross256_1024": (1152, "uniform", 1024, 0.5, None, 256),
    "pma32_1024": (1152, "uniform", 1024, 0.5, 32, None),
    "toy": (3, "uniform", 200, 0.5, None, None),
}
GEMMS = {"fwd": 2, "dq": 3, "dkdv": 4, "atomic": 5, "atomic_reduce": 5, "fused": 7, "owner": 5}
# A phase here is one of `configs`, or a second kernel that shares the configurations of one: v3's forward pass, and dQ
# added by atomics where the copy engine could. fwd_few needs queries that the sequences share: shape pma32_1024.
SHARED = {"fwd_v3": "fwd_tma", "atomic_reduce": "atomic_tma"}
PHASES = (*configs.PHASES, *SHARED)
WINDOW = 128


def make(shape: str, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[list, int]:
    """([do, q, k, v, o, lse, q_offsets, kv_offsets], useful pairs) of a named shape on the GPU."""
    batch, law, longest, fill, shared, keys = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    lengths = sample_lengths(law, batch, longest, fill, generator)
    kv_lengths = lengths if keys is None else torch.full_like(lengths, keys)

    def rows(n):
        return torch.randn(int(n), heads, head_dim, device="cuda", dtype=dtype)

    kv_offsets = lengths_to_offsets(kv_lengths).cuda()
    if shared:
        pairs = shared * int(kv_lengths.sum())
        q, q_offsets = rows(shared), None
        do = torch.randn(batch, shared, heads, head_dim, device="cuda", dtype=dtype)
    else:
        pairs = int((lengths.long() * kv_lengths.long()).sum())
        q, q_offsets = rows(lengths.sum()), lengths_to_offsets(lengths).cuda()
        do = torch.randn_like(q)
    k, v = rows(kv_lengths.sum()), rows(kv_lengths.sum())
    o, lse = v2_tuned.forward(q, k, v, q_offsets, kv_offsets, scale=head_dim**-0.5, window=None, bias=None)
    return [do, q, k, v, o, lse, q_offsets, kv_offsets], pairs


def gemms(phase: str) -> int:
    """Products of a pair of tiles that the phase's kernel really does."""
    return 2 if phase.startswith("fwd") else GEMMS[phase.removesuffix("_tma")]


def runner(phase: str, arguments: list, scale: float):
    """A function of no arguments that runs the phase and returns its main result."""
    _, q, k, v, *_, q_offsets, kv_offsets = arguments
    tma = phase not in ("fwd", "dq", "dkdv", "atomic", "fused", "owner")
    settings = {"scale": scale, "window": WINDOW if phase == "fwd_window" else None, "bias": None, "tma": tma}
    if phase == "fwd_v3":
        return lambda: v3_subtraction.masked_forward(q, k, v, q_offsets, kv_offsets, scale=scale, tma=True)[0]
    if phase.startswith("fwd"):
        return lambda: v2_tuned.forward(q, k, v, q_offsets, kv_offsets, **settings)[0]
    if phase.startswith("atomic"):
        add = "reduce" if phase == "atomic_reduce" else "atomics"
        return lambda: triton_schemes.backward(*arguments, **settings, scheme="atomic", add=add)[0]
    if phase in ("fused", "owner"):
        scheme = {"fused": "recompute"}.get(phase, phase)
        return lambda: triton_schemes.backward(*arguments, **settings, scheme=scheme)[0]
    call = triton_schemes._Call(*arguments, scale, None, None, tma)
    call.make_delta()
    if phase.startswith("dq"):
        return lambda: (call.query_side(), call.dq)[1]
    return lambda: (call.key_side(0, call.dq), call.dk)[1]


def _compile(job: tuple) -> str | None:
    """Worker: compile one (phase, config) by running it on the toy shape; returns the error or None."""
    phase, config, head_dim, heads, dtype = job
    try:
        arguments, _ = make("toy", heads, head_dim, dtype)
        with configs.forced(**{SHARED.get(phase, phase): config}):
            runner(phase, arguments, head_dim**-0.5)()
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def _timed(run, phase: str, config: configs.Config, expected: torch.Tensor, flops: int) -> dict:
    """Columns of one configuration: time and rate, or a note that says why it has none."""
    try:
        with configs.forced(**{phase: config}):
            difference = ((run().float() - expected).norm() / expected.norm()).item()
            if not difference < 1e-2:
                return {"note": f"wrong: differs by {difference:.1e}"}
            median, low, high = milliseconds(run)
    except Exception as error:  # such as more shared memory than the device has: the next one may fit
        return {"note": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    return {"ms": median, "p20": low, "p80": high, "tflops": flops / median / 1e9}


def milliseconds(function) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    return tuple(triton.testing.do_bench(function, warmup=8, rep=40, quantiles=[0.5, 0.2, 0.8]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--shapes", nargs="+", default=[s for s in SHAPES if s != "toy"], choices=list(SHAPES))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--workers", type=int, default=12, help="compilers at once; 0: nothing is compiled beforehand")
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache and end")
    parser.add_argument("--schemes", nargs="*", default=list(triton_schemes.SCHEMES), help="backward schemes to time")
    parser.add_argument("--output", default="")
    options = parser.parse_args(arguments)
    dtype, scale = torch.bfloat16, options.head_dim**-0.5

    jobs = [
        (phase, config, options.head_dim, options.heads, dtype)
        for phase in options.phases
        for config in configs.candidates(SHARED.get(phase, phase), options.head_dim)
    ]
    errors = [None] * len(jobs)
    if options.workers:
        with ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            errors = list(pool.map(_compile, jobs))
    if options.compile_only:
        return
    table = []
    for shape in options.shapes:
        data, pairs = make(shape, options.heads, options.head_dim, dtype)
        for phase in options.phases:
            run = runner(phase, data, scale)
            expected = run().float()
            for (job_phase, config, *_), error in zip(jobs, errors, strict=True):
                if job_phase != phase:
                    continue
                row = {
                    "phase": phase,
                    "config": astuple(config),
                    "shape": shape,
                    "ms": "",
                    "tflops": "",
                    "note": error or "",
                }
                if error is None:
                    flops = 2 * gemms(phase) * options.heads * options.head_dim * pairs
                    row |= _timed(run, SHARED.get(phase, phase), config, expected, flops)
                print(*row.values(), flush=True)
                table.append(row)
            del expected
        for scheme in options.schemes:

            def run(scheme=scheme, data=data):
                return triton_schemes.backward(*data, scale=scale, window=None, bias=None, scheme=scheme)

            median, low, high = milliseconds(run)
            flops = 10 * options.heads * options.head_dim * pairs
            table.append({"phase": f"bwd {scheme}", "config": "", "shape": shape, "ms": median, "p20": low, "p80": high,
                          "tflops": flops / median / 1e9, "note": "whole backward, 5 GEMMs counted"})  # fmt: skip
        del data
        torch.cuda.empty_cache()
    if options.output:
        with open(options.output, "w", newline="") as file:
            writer = csv.DictWriter(file, ["phase", "config", "shape", "ms", "p20", "p80", "tflops", "note"])
            writer.writeheader()
            writer.writerows(table)
    report(table, options.shapes)


def report(table: list[dict], shapes: list[str]) -> None:
    """Print TFLOP/s by config (rows, best first) and shape (columns)."""
    print(f"{'phase':15}{'config':27}" + "".join(f"{s[:12]:>13}" for s in shapes) + f"{'geomean':>9}")
    for phase in dict.fromkeys(row["phase"] for row in table):
        lines = []
        for config in dict.fromkeys(row["config"] for row in table if row["phase"] == phase):
            mine = {row["shape"]: row for row in table if row["phase"] == phase and row["config"] == config}
            rates = [mine[s]["tflops"] for s in shapes]
            known = [r for r in rates if r != ""]
            mean = math.exp(sum(map(math.log, known)) / len(known)) if len(known) == len(rates) else 0.0
            cells = "".join(f"{r:13.0f}" if r != "" else f"{'-':>13}" for r in rates)
            note = next((row["note"] for row in mine.values() if row["note"] and row["tflops"] == ""), "")
            lines.append((mean, f"{phase:15}{config!s:27}{cells}{mean:9.1f} {note}"))
        print("\n".join(line for _, line in sorted(lines, reverse=True)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
