"""Time every tile configuration of the Triton GDPA, block attention, rotary and norm kernels on a few shapes.

    python -m tests.gpu.sweep_triton [gdpa.fwd gdpa.fwd_resident gdpa.dq gdpa.dkdv gdpa.owner gdpa.order block rotary
    norm]

Prints one line a configuration and shape: median milliseconds and TFLOP/s of useful pairs or TB/s moved. Meant for
choosing defaults; recorded numbers come from gem.bench.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch
from triton.testing import do_bench

from kernels.block_attention import triton_block
from kernels.fused_norm import triton_norm
from kernels.gdpa import triton_gdpa
from kernels.gdpa.triton_gdpa import Options
from kernels.rotary import Rotary, triton_rotary

HEADS, HEAD_DIM = 4, 128
GDPA_SHAPES = {  # name: (batch, q law, q max, kv fixed or None)
    "full 256": (1152, "full", 256, None),
    "uniform 256": (1152, "uniform", 256, None),
    "full 1024": (1152, "full", 1024, None),
    "uniform 512": (1152, "uniform", 512, None),
    "uniform 1024": (1152, "uniform", 1024, None),
    "full 2048": (576, "full", 2048, None),
    "cross 256, uniform 1024": (1152, "uniform", 1024, 256),
    "cross 128, uniform 1024": (1152, "uniform", 1024, 128),
}


def _offsets(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cuda()


def _lengths(law, batch, longest):
    generator = torch.Generator().manual_seed(2025)
    if law == "full":
        return torch.full((batch,), longest)
    return torch.randint(1, longest + 1, (batch,), generator=generator)


def _gdpa_inputs(name):
    batch, law, longest, keys = GDPA_SHAPES[name]
    q_lengths = _lengths(law, batch, longest)
    kv_lengths = q_lengths if keys is None else torch.full((batch,), keys)
    q, do = (torch.randn(int(q_lengths.sum()), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "qd")
    k, v = (torch.randn(int(kv_lengths.sum()), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    flops = 4 * HEADS * HEAD_DIM * int((q_lengths * kv_lengths).sum())
    hints = {"max_q_len": int(q_lengths.max()), "max_kv_len": int(kv_lengths.max())}
    return (q, k, v, _offsets(q_lengths), _offsets(kv_lengths)), do, flops, hints


def _time(label, run, amount, unit):
    try:
        start = time.time()
        run()
        torch.cuda.synchronize()
        compile_s = time.time() - start
        ms = do_bench(run, warmup=15, rep=60, return_mode="median")
        print(f"{label}: {ms:.3f} ms {amount / ms / 1e9:.2f} {unit} (first call {compile_s:.1f} s)", flush=True)
        return ms
    except Exception as error:
        print(f"{label}: {type(error).__name__}: {str(error)[:160]}", flush=True)
        return float("inf")


def gdpa(phase, shapes, activation="gelu_tanh"):
    """One phase of GDPA, every candidate. The backward kernels are timed alone, the other one being the default."""
    for shape in shapes:
        arguments, do, flops, hints = _gdpa_inputs(shape)
        settings = dict(activation=activation, scale=1.0, **hints)
        for config in triton_gdpa.candidates(phase, HEAD_DIM):
            label = f"gdpa {phase} {shape} {activation} {config}"
            if phase == "fwd":
                options = Options(fwd=config, kv_resident=False)
                _time(label, partial(triton_gdpa.forward_with, options, *arguments, **settings), flops, "TFLOP/s")
            elif phase == "fwd_resident":
                options = Options(resident=config, kv_resident=True)
                _time(label, partial(triton_gdpa.forward_with, options, *arguments, **settings), flops, "TFLOP/s")
            elif phase == "owner":
                options = Options(owner=config, backward="owner")
                run = partial(triton_gdpa.backward_with, options, do, *arguments, **settings)
                _time(label, run, 2.5 * flops, "TFLOP/s")
            else:
                options = Options(**{phase: config}, backward="split")
                only = {"only": phase}
                run = partial(triton_gdpa.backward_with, options, do, *arguments, **settings, **only)
                done = 3 if phase == "dq" else 4
                _time(label + f" ({done} GEMMs done)", run, done / 2 * flops, "TFLOP/s")


def order(shapes):
    """The switches of the forward pass at the default configuration, and every activation."""
    for shape in shapes:
        arguments, do, flops, hints = _gdpa_inputs(shape)
        for schedule in triton_gdpa.ORDERS:
            options = Options(schedule=schedule, kv_resident=False)
            run = partial(triton_gdpa.forward_with, options, *arguments, activation="gelu_tanh", scale=1.0, **hints)
            _time(f"gdpa order {schedule} {shape}", run, flops, "TFLOP/s")
        for activation in triton_gdpa.ACTIVATIONS:
            run = partial(triton_gdpa.forward, *arguments, activation=activation, scale=1.0, **hints)
            _time(f"gdpa fwd default {shape} {activation}", run, flops, "TFLOP/s")
            run = partial(triton_gdpa.backward, do, *arguments, activation=activation, scale=1.0, **hints)
            _time(f"gdpa bwd default {shape} {activation}", run, 2.5 * flops, "TFLOP/s")


def block():
    generator = torch.Generator().manual_seed(2025)
    lengths = torch.randint(800, 2001, (1152,), generator=generator)
    offsets, rows = _offsets(lengths), int(lengths.sum())
    q, k, v, do = (torch.randn(rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    angles = torch.rand(rows, HEAD_DIM // 2, device="cuda")
    size = q.numel() * 2
    copy = torch.empty_like(q)
    _time("copy", lambda: copy.copy_(q), 2 * size, "TB/s")
    for name, interleaved in (("plain", None), ("interleaved", True), ("half", False)):
        rotary = None if interleaved is None else Rotary(angles.cos(), angles.sin(), interleaved)
        settings = {"block_size": 64, "scale": HEAD_DIM**-0.5, "rotary": rotary}
        for config in triton_block.candidates("fwd", HEAD_DIM, rotary is not None):
            run = partial(triton_block.forward_with, config, q, k, v, offsets, **settings)
            _time(f"block fwd {name} {config}", run, 4 * size, "TB/s")
        for config in triton_block.candidates("bwd", HEAD_DIM, rotary is not None):
            run = partial(triton_block.backward_with, config, do, q, k, v, offsets, **settings)
            _time(f"block bwd {name} {config}", run, 7 * size, "TB/s")


def rows(what):
    x, dy = (torch.randn(1_000_000, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "xy")
    angles = torch.rand(x.shape[0], HEAD_DIM // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    size, tables = x.numel() * 2, 8 * angles.numel()
    copy = torch.empty_like(x)
    _time("copy", lambda: copy.copy_(x), 2 * size, "TB/s")
    for config in triton_rotary.candidates():
        if what == "rotary":
            for interleaved in (True, False):
                run = partial(triton_rotary.rotate_with, config, x, cos, sin, interleaved=interleaved, out=copy)
                _time(f"rotary interleaved={interleaved} {config}", run, 2 * size + tables, "TB/s")
        else:
            for kind, turned in (("rms", False), ("layer", True)):
                t = (cos, sin) if turned else (None, None)
                moved = tables * turned
                run = partial(triton_norm.norm_forward, x, *t, kind=kind, config=config)
                _time(f"norm fwd {kind} rotary={turned} {config}", run, (2 * size + moved), "TB/s")
                run = partial(triton_norm.norm_backward, dy, x, *t, kind=kind, config=config)
                _time(f"norm bwd {kind} rotary={turned} {config}", run, (3 * size + moved), "TB/s")


SWEEPS = {
    "gdpa.fwd": lambda: gdpa("fwd", ["full 1024", "uniform 512"]),
    "gdpa.fwd_resident": lambda: gdpa("fwd_resident", ["cross 256, uniform 1024", "cross 128, uniform 1024"]),
    "gdpa.dq": lambda: gdpa("dq", ["full 1024"]),
    "gdpa.dkdv": lambda: gdpa("dkdv", ["full 1024"]),
    "gdpa.owner": lambda: gdpa("owner", ["full 1024", "cross 128, uniform 1024"]),
    "gdpa.order": lambda: order(["uniform 512", "full 1024", "cross 256, uniform 1024"]),
    "block": block,
    "rotary": lambda: rows("rotary"),
    "norm": lambda: rows("norm"),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or SWEEPS:
        start = time.time()
        SWEEPS[name]()
        print(f"{name}: {time.time() - start:.0f} s", flush=True)
