"""Checks of the FP8 row kernels under Triton's interpreter: the bytes and values of the tensor operations.

python -m tests.parallel.fp8_rows_checks runs them; test_fp8_rows.py reports them.
"""

from __future__ import annotations

import torch

from gem.parallel import fp8_rows
from gem.parallel.low_gather import RECIPE
from gem.precision import join_shards, quantize_shard
from tests.kernels.triton_interpreted import main

SHAPES = ((1, 32), (5, 36), (33, 96), (3, 4100))  # less than a tile, ragged, several rows a tile, several tiles a row


def awkward(rows: int, features: int) -> torch.Tensor:
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(rows))
    x *= torch.exp2((torch.arange(rows)[:, None] % 9) * 5.0 - 20)
    x[0, 0], x[-1, -1] = 1e30, -0.0
    return x


def plainly(call):
    kernel, fp8_rows.runs_in_kernel = fp8_rows.runs_in_kernel, lambda x: False
    try:
        return call()
    finally:
        fp8_rows.runs_in_kernel = kernel


def rows_become_the_bytes_of_the_definition():
    for shape in SHAPES:
        x = awkward(*shape)
        (data, scale), (wanted, factor) = fp8_rows.quantise_rows(x), plainly(lambda x=x: fp8_rows.quantise_rows(x))
        assert torch.equal(scale, factor) and torch.equal(data.view(torch.uint8), wanted.view(torch.uint8)), shape


def zeros_and_what_is_not_finite():
    x = torch.zeros(4, 32)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    data, scale = fp8_rows.quantise_rows(x)
    assert not data[0].float().any() and not data[3].float().any() and scale[0] > 0
    assert scale[1].isnan() and scale[2].isinf()


def guarded_memory_is_left_alone():
    memory = torch.full((5 * 36 + 16,), 77, dtype=torch.uint8)
    scales = torch.full((9,), 7.0)
    fp8_rows.quantise_rows(awkward(5, 36), memory[: 5 * 36].view(fp8_rows.FLOAT8).view(5, 36), scales[:5].view(5, 1))
    assert (memory[5 * 36 :] == 77).all() and (scales[5:] == 7).all()


def messages_of_several_ranks_become_the_weight():
    for rows, features in SHAPES:
        shards = [awkward(rows, features) * (rank + 1) for rank in range(3)]
        messages = torch.cat([fp8_rows.to_message(shard) for shard in shards])
        found = fp8_rows.from_messages(messages, rows, features, torch.float32)
        wanted = plainly(lambda m=messages, r=rows, f=features: fp8_rows.from_messages(m, r, f, torch.float32))
        assert torch.equal(found, wanted), (rows, features)
        guarded = torch.full((3 * rows + 1, features), 9.0)
        fp8_rows.from_messages(messages, rows, features, torch.float32, guarded[:-1])
        assert torch.equal(guarded[:-1], wanted) and (guarded[-1] == 9).all()


def mx_rows_become_the_weight():
    for rows, features in SHAPES:
        payload = quantize_shard(awkward(rows, features), RECIPE)
        wanted = join_shards(payload, features, RECIPE).dequantize()
        assert torch.equal(fp8_rows.from_mx_rows(payload, features, torch.float32), wanted), (rows, features)


CHECKS = {
    check.__name__: check
    for check in (
        rows_become_the_bytes_of_the_definition,
        zeros_and_what_is_not_finite,
        guarded_memory_is_left_alone,
        messages_of_several_ranks_become_the_weight,
        mx_rows_become_the_weight,
    )
}

if __name__ == "__main__":
    main(CHECKS)
