"""Every TLX attention kernel on shapes small enough for compute-sanitizer, or many times in a row to look for hangs.

    compute-sanitizer --tool memcheck  python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize --control
    python -m tests.gpu.sanitize --launches 10000

Prints one line a kernel, or the number of launches; fails on a result that is not finite or changes from run to run.

The control is a kernel as small as can be that hands shared memory from one warp group to another in the ways of the
attention kernels. It is right by construction and its result is compared in every bit: what racecheck reports of it is
what the tool does not follow.
"""

from __future__ import annotations

import argparse
import random

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import gdpa, jagged_attention
from kernels.jagged import lengths_to_offsets

SMALL = [
    ("self", [65, 0, 130, 1], None),
    ("cross", [3, 70, 0], [200, 1, 65]),
    ("cross", [0, 0], [3, 1]),
    ("shared", 32, [5, 0, 140]),
]
MIXED = [
    *SMALL,
    ("self", [1], None),
    ("self", [700, 3, 64, 0, 129], None),
    ("self", [128] * 40, None),
    ("self", list(range(1, 300, 7)), None),
    ("cross", [5, 400, 64], [256, 256, 256]),
    ("cross", [900], [1]),
    ("cross", [1, 2, 3], [1500, 0, 600]),
    ("shared", 32, list(range(0, 900, 60))),
    ("shared", 100, [300, 0, 1]),
]


def inputs(kind: str, q_lengths, kv_lengths, heads: int = 2, dim: int = 128) -> tuple:
    """(q, k, v, q_offsets, kv_offsets) in bf16 with gradients; kv_offsets None for self-attention."""
    generator = torch.Generator("cuda").manual_seed(0)

    def offsets(lengths):
        return lengths_to_offsets(torch.tensor(lengths)).cuda()

    def make(rows):
        x = torch.randn(rows, heads, dim, device="cuda", generator=generator) * 0.5
        return x.to(torch.bfloat16).requires_grad_()

    rows = q_lengths if kind == "shared" else sum(q_lengths)
    kv_rows = rows if kv_lengths is None else sum(kv_lengths)
    q_offsets = None if kind == "shared" else offsets(q_lengths)
    kv_offsets = None if kv_lengths is None else offsets(kv_lengths)
    return make(rows), make(kv_rows), make(kv_rows), q_offsets, kv_offsets


def step(op: str, tensors: tuple) -> tuple[torch.Tensor, ...]:
    """Forward and backward of one call -> (o, dq, dk, dv)."""
    q, k, v, q_offsets, kv_offsets = tensors
    if op == "gdpa":
        o = gdpa(q, k, v, q_offsets, kv_offsets, activation="gelu_tanh", scale=0.1, impl="tlx")
    else:
        o = jagged_attention(q, k, v, q_offsets, kv_offsets, impl="v4")
    return o.detach(), *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


@triton.jit(do_not_specialize=["first"])
def control_kernel(
    desc_x, desc_w, desc_y, factors, first, ROUNDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """y = (x w + x) times one factor a row, from factors[first] on. A producer warp fills two buffers in turn, four
    warps empty them.

    Three ways of handing over: x comes by TMA, which completes a barrier, and is read by wgmma and by plain loads; the
    factors come by plain stores of a warp, whose first lane arrives after the warp has met; y leaves by TMA from a
    buffer that all four warps have written. A buffer is free again once every thread has arrived, or the TMA store has
    read it.
    """
    dtype: tl.constexpr = tlx.dtype_of(desc_x)
    x_buffers = tlx.local_alloc((ROWS, COLUMNS), dtype, 2)
    w_buffers = tlx.local_alloc((COLUMNS, COLUMNS), dtype, 1)
    factor_buffers = tlx.local_alloc((ROWS,), tl.float32, 2)
    y_buffers = tlx.local_alloc((ROWS, COLUMNS), dtype, 1)
    x_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    w_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    factors_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    empty = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(w_full[0], 0)
            for i in range(ROUNDS):
                stage, phase = get_bufidx_phase(i, 2)
                tlx.barrier_wait(x_full[stage], phase)
                x = tlx.local_load(x_buffers[stage]).to(tl.float32)
                product = tlx.async_dot(x_buffers[stage], w_buffers[0], x)
                tlx.barrier_wait(factors_full[stage], phase)
                factor = tlx.local_load(factor_buffers[stage])
                product = tlx.async_dot_wait(0, product)
                tlx.barrier_arrive(empty[stage], 1)
                tlx.async_descriptor_store_wait(0)  # the buffer's previous tile has left
                tlx.local_store(y_buffers[0], (product * factor[:, None]).to(dtype))
                tlx.fence_async_shared()
                tlx.async_descriptor_store(desc_y, y_buffers[0], [i * ROWS, 0])
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1, registers=64):
            tlx.barrier_expect_bytes(w_full[0], 2 * COLUMNS * COLUMNS)
            tlx.async_descriptor_load(desc_w, w_buffers[0], [0, 0], w_full[0])
            for i in range(ROUNDS):
                stage, phase = get_bufidx_phase(i, 2)
                tlx.barrier_wait(empty[stage], phase ^ 1)
                tlx.barrier_expect_bytes(x_full[stage], 2 * ROWS * COLUMNS)
                tlx.async_descriptor_load(desc_x, x_buffers[stage], [i * ROWS, 0], x_full[stage])
                tlx.local_store(factor_buffers[stage], tl.load(factors + first + i * ROWS + tl.arange(0, ROWS)))
                tlx.barrier_arrive(factors_full[stage], 1)


def control(device: str = "cuda", rounds: int = 6, rows: int = 64, columns: int = 64) -> None:
    """Launch the control once, with the unit matrix for w; a RuntimeError if a bit of its result is wrong."""
    x = torch.ones((rounds * rows, columns), dtype=torch.bfloat16, device=device)
    factors = torch.ones(1 + rounds * rows, device=device)  # one more: rows that are not aligned, as a sequence's
    if device != "meta":
        x.copy_(torch.randn(x.shape, device=device))
        factors.copy_(2.0 ** (torch.arange(len(factors), device=device) % 5))
    w = torch.eye(columns, dtype=x.dtype, device=device)
    y = torch.empty_like(x)
    blocks = ((x, rows), (w, columns), (y, rows))
    tiles = (TensorDescriptor(t, list(t.shape), list(t.stride()), [block, columns]) for t, block in blocks)
    control_kernel[(1,)](*tiles, factors, 1, ROUNDS=rounds, ROWS=rows, COLUMNS=columns, num_warps=4)
    if device != "meta" and not torch.equal(y, (2 * x * factors[1:, None]).to(x.dtype)):
        raise RuntimeError("the control computed something else than twice x times the factors")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=0, help="forward and backward calls, in random order")
    parser.add_argument("--control", action="store_true", help="the control kernel alone")
    args = parser.parse_args(arguments)
    if args.control:
        control()
        print("control exact", flush=True)
        return
    launches = args.launches
    shapes = MIXED if launches else SMALL
    cases = [(op, shape, inputs(*shape)) for shape in shapes for op in ("gdpa", "jagged_attention")]
    first = []
    for op, shape, tensors in cases:
        result = step(op, tensors)
        torch.cuda.synchronize()
        if not all(torch.isfinite(x).all() for x in result):
            raise SystemExit(f"{op} {shape}: not finite")
        first.append(result)
        if not launches:
            print(op, *shape, "finite", flush=True)
    order = random.Random(0)
    for launch in range(launches):
        index = order.randrange(len(cases))
        result = step(cases[index][0], cases[index][2])
        if launch % 500 == 499:
            torch.cuda.synchronize()
            if not all(torch.equal(a, b) for a, b in zip(result, first[index], strict=True)):
                raise SystemExit(f"launch {launch}, {cases[index][:2]}: other bits than the first time")
            print(launch + 1, "launches", flush=True)


if __name__ == "__main__":
    main()
