"""Time every tile configuration of the Triton GDPA, block attention, rotary and norm kernels on a few shapes.

    python -m tests.gpu.sweep_triton [gdpa.fwd gdpa.fwd_short gdpa.resident gdpa.dq gdpa.dkdv gdpa.owner gdpa.order pffn
    block rotary norm] [--compile PROCESSES]

--compile fills Triton's cache in that many processes and times nothing.

Prints one line a configuration and shape: median milliseconds and TFLOP/s of useful pairs or TB/s moved. Meant for
choosing defaults; recorded numbers come from gem.bench.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from functools import partial

import torch
from triton.testing import do_bench

from kernels import gdpa as public_gdpa
from kernels.block_attention import triton_block
from kernels.fused_norm import triton_norm, triton_pffn
from kernels.gdpa import triton_gdpa
from kernels.gdpa.api import REGISTRY as GDPA
from kernels.gdpa.triton_gdpa import Options
from kernels.rotary import Rotary, triton_rotary

HEADS, HEAD_DIM = 4, 128
JOBS: list[str] | None = None  # a list while only compiling: of the jobs met, this process does every WORKERS[1]-th
WORKERS = (0, 1)
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
    if JOBS is not None:
        JOBS.append(label)
        if len(JOBS) % WORKERS[1] == WORKERS[0]:
            try:
                run()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{label}: {type(error).__name__}: {str(error)[:160]}", flush=True)
        return 0.0
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
    kind = "resident" if phase.startswith("fwd_resident") else phase.split("_")[0]
    tma = kind == "resident" or phase != kind
    for shape in shapes:
        arguments, do, flops, hints = _gdpa_inputs(shape)
        settings = dict(activation=activation, scale=1.0, **hints)
        for config in triton_gdpa.candidates(phase, HEAD_DIM):
            options = Options(**{kind: config}, kv_resident=kind == "resident", tma=tma)
            label = f"gdpa {phase} {shape} {activation} {config}"
            if phase.startswith("fwd"):
                run = partial(triton_gdpa.forward_with, options, *arguments, **settings)
                _time(label, run, flops, "TFLOP/s")
            elif phase == "owner":
                options = Options(owner=config, backward="owner")
                run = partial(triton_gdpa.backward_with, options, do, *arguments, **settings)
                _time(label, run, 2.5 * flops, "TFLOP/s")
            else:
                run = partial(triton_gdpa.backward_with, options, do, *arguments, **settings, only=kind)
                done = 3 if kind == "dq" else 4
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


def pffn():
    """The feed-forward tail: each of its kernels by rows a program and warps, then whole against compiled norms."""
    arguments, do, _, hints = _gdpa_inputs("cross 128, uniform 1024")
    s, k, v, *offsets = arguments
    size, norm = s.numel() * 2, {"offsets": offsets[0], "eps": 1e-5}
    outs = [torch.empty_like(s) for _ in range(2)]
    inverse = torch.empty(s.shape[0], device="cuda")
    extra = [torch.randn_like(s) for _ in range(2)]  # tensors read twice would come from the cache
    for kernel, tensors, passes in (
        (triton_pffn.enter_kernel, (s, outs[0], inverse), 2),
        (triton_pffn.leave_kernel, (do, s, outs[0]), 3),
        (triton_pffn.leave_backward_kernel, (do, s, extra[0], outs[0]), 4),
        (triton_pffn.enter_backward_kernel, (do, s, *extra, outs[0], inverse), 5),
    ):
        for tile, warps in ((4, 4), (8, 4), (4, 2), (2, 1), (4, 1), (1, 1), (2, 2), (8, 2)):
            run = partial(triton_pffn._launch, kernel, *tensors, tile=tile, num_warps=warps, **norm)
            _time(f"pffn {kernel.__name__} {tile} rows {warps} warps", run, passes * size, "TB/s")
    settings = {"activation": "gelu_tanh", "scale": 1.0, **hints}
    names = [name for name in ("triton", "tlx") if not isinstance(GDPA.load(name), str)]
    for name in names:
        gdpa = GDPA.load(name)
        run = partial(gdpa.forward, s, k, v, *offsets, **settings)
        _time(f"pffn: gdpa {name} fwd alone", run, 2 * size, "TB/s")
        run = partial(triton_pffn.forward, s, k, v, *offsets, gdpa=gdpa, eps=1e-5, **settings)
        _time(f"pffn fwd gdpa={name} (7 passes)", run, 7 * size, "TB/s")
        _, o, q, inverse = run()
        run = partial(gdpa.backward, do, q, k, v, *offsets, **settings)
        _time(f"pffn: gdpa {name} bwd alone", run, 5 * size, "TB/s")
        own = {"inverse": inverse, "gdpa": gdpa, "eps": 1e-5}
        run = partial(triton_pffn.backward, do, q, k, v, o, *offsets, **own, **settings)
        _time(f"pffn bwd gdpa={name} (14 passes)", run, 14 * size, "TB/s")
    if JOBS is None:  # torch.compile has a cache of its own
        width, leaves = HEADS * HEAD_DIM, [x.clone().requires_grad_() for x in (s, k, v)]

        @torch.compile(dynamic=False)
        def compiled(s, k, v):
            q = torch.nn.functional.layer_norm(s.flatten(1), (width,)).view_as(s)
            u = public_gdpa(q, k, v, *offsets, activation="gelu_tanh", scale=1.0, **hints) + q
            return torch.nn.functional.rms_norm(u.flatten(1), (width,), eps=1e-5).view_as(s) + s

        y = compiled(*leaves)
        _time("compiled norms around gdpa fwd", lambda: compiled(*leaves), 7 * size, "TB/s")
        run = partial(torch.autograd.grad, y, leaves, do, retain_graph=True)
        _time("compiled norms around gdpa bwd", run, 14 * size, "TB/s")


SHORT = ["cross 256, uniform 1024", "cross 128, uniform 1024", "full 256"]
SWEEPS = {
    "gdpa.fwd": lambda: gdpa("fwd", ["full 1024", "uniform 512"]),
    "gdpa.fwd_short": lambda: gdpa("fwd", [*SHORT, "uniform 256"]),
    "gdpa.fwd_tma": lambda: gdpa("fwd_tma", ["full 1024", "uniform 512", *SHORT, "uniform 256"]),
    "gdpa.bwd_tma": lambda: [gdpa(phase, ["uniform 1024", SHORT[0]]) for phase in ("dq_tma", "dkdv_tma", "dq", "dkdv")],
    "gdpa.resident": lambda: (gdpa("fwd_resident_2", [SHORT[0]]), gdpa("fwd_resident_1", [SHORT[1]])),
    "pffn": pffn,
    "gdpa.dq": lambda: gdpa("dq", ["full 1024"]),
    "gdpa.dkdv": lambda: gdpa("dkdv", ["full 1024"]),
    "gdpa.owner": lambda: gdpa("owner", ["full 1024", "cross 128, uniform 1024"]),
    "gdpa.order": lambda: order(["uniform 512", "full 1024", "cross 256, uniform 1024"]),
    "block": block,
    "rotary": lambda: rows("rotary"),
    "norm": lambda: rows("norm"),
}


def _compile(index: int, count: int, names: list[str]) -> None:
    global JOBS, WORKERS
    JOBS, WORKERS = [], (index, count)
    for name in names:
        SWEEPS[name]()


def main(arguments: list[str]) -> None:
    count = int(arguments.pop()) if arguments[-2:-1] == ["--compile"] else 0
    names = [name for name in arguments if name != "--compile"] or list(SWEEPS)
    if count:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=_compile, args=(i, count, names)) for i in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return
    for name in names:
        start = time.time()
        SWEEPS[name]()
        print(f"{name}: {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
