"""Every TLX attention kernel on shapes small enough for compute-sanitizer, or many times in a row to look for hangs.

    compute-sanitizer --tool memcheck  python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitize
    python -m tests.gpu.sanitize --launches 10000

Prints one line a kernel, or the number of launches; fails on a result that is not finite or changes from run to run.
"""

from __future__ import annotations

import argparse
import random

import torch

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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=0, help="forward and backward calls, in random order")
    launches = parser.parse_args(arguments).launches
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
