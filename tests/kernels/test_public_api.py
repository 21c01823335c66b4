"""The public API as other projects are promised it: every name, keyword and default, and each call as it is printed."""

from __future__ import annotations

import inspect

import pytest
import torch

from kernels import Bias, Rotary, block_attention, bounds, explain, flops, gdpa, jagged_attention, mxfp8
from kernels.jagged import lengths_to_offsets
from kernels.mxfp8 import Recipe

REQUIRED = inspect.Parameter.empty
ATTENTION = {
    "precision": None, "schedule": None, "max_q_len": None, "max_kv_len": None, "impl": "auto",
}  # fmt: skip
QKV = {"q": REQUIRED, "k": REQUIRED, "v": REQUIRED}
# function -> (positional parameters, keyword-only ones), each with its default
PROMISED = {
    jagged_attention: (
        {**QKV, "q_offsets": REQUIRED, "kv_offsets": None},
        {"scale": None, "window": None, "bias": None, **ATTENTION},
    ),
    gdpa: (
        {**QKV, "q_offsets": REQUIRED, "kv_offsets": None},
        {"activation": "gelu_tanh", "scale": 1.0, **ATTENTION},
    ),
    block_attention: (
        {**QKV, "offsets": REQUIRED},
        {"block_size": 64, "scale": None, "rotary": None, "impl": "auto"},
    ),
    Rotary: ({"cos": REQUIRED, "sin": REQUIRED, "interleaved": True, "on": ("q", "k", "v")}, {}),
    Bias: ({"table": REQUIRED, "positions": "relative"}, {}),
    mxfp8.quantize: (
        {"x": REQUIRED},
        {
            "axis": -1, "block": (1, 32), "offsets": None, "dtype": torch.float8_e4m3fn, "scale_mode": "rceil",
            "hadamard": None, "stochastic": False, "generator": None,
        },
    ),
    mxfp8.linear: ({"x": REQUIRED, "weight": REQUIRED, "bias": None}, {"recipe": REQUIRED}),
    flops.jagged_attention: (
        {"q_lengths": REQUIRED, "kv_lengths": REQUIRED, "num_heads": REQUIRED, "head_dim": REQUIRED},
        {"window": None, "phase": "fwd"},
    ),
    flops.gdpa: (
        {"q_lengths": REQUIRED, "kv_lengths": REQUIRED, "num_heads": REQUIRED, "head_dim": REQUIRED},
        {"phase": "fwd"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", PROMISED, ids=lambda function: function.__name__)
def test_names_keywords_and_defaults(function):
    positional, keywords = PROMISED[function]
    parameters = inspect.signature(function).parameters
    kinds = {name: p.kind is inspect.Parameter.KEYWORD_ONLY for name, p in parameters.items()}
    assert {name: p.default for name, p in parameters.items() if not kinds[name]} == positional
    assert [name for name in parameters if not kinds[name]] == list(positional)
    assert {name: p.default for name, p in parameters.items() if kinds[name]} == keywords


def test_bound_takes_its_arguments_in_the_promised_order():
    names = list(inspect.signature(bounds.bound).parameters)[:9]
    assert names == [
        "op", "q_lengths", "kv_lengths", "num_heads", "head_dim", "phase", "dtype", "activation", "chip",
    ]  # fmt: skip


LENGTHS = (5, 0, 33)
ROWS = sum(LENGTHS)
OFFSETS = lengths_to_offsets(torch.tensor(LENGTHS))
KV_LENGTHS = (2, 3, 4)
KV_OFFSETS = lengths_to_offsets(torch.tensor(KV_LENGTHS))


def values(rows=ROWS, heads=2, head_dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, head_dim, generator=generator)


q, k, v = (values(seed=seed) for seed in range(3))
keys, items = values(9, seed=3), values(9, seed=4)


def test_attention_calls():
    o = jagged_attention(
        q, k, v, OFFSETS, None, scale=None, window=None, bias=None, precision=None, schedule=None, max_q_len=None,
        max_kv_len=None, impl="auto",
    )  # fmt: skip
    assert torch.equal(o, jagged_attention(q, k, v, OFFSETS)) and o.shape == q.shape
    torch.testing.assert_close(o, jagged_attention(q, k, v, OFFSETS, scale=32**-0.5))
    assert jagged_attention(q, keys, items, OFFSETS, KV_OFFSETS).shape == q.shape
    assert jagged_attention(q, k, v, OFFSETS, window=2).shape == q.shape
    assert jagged_attention(q[:7], k, v, None, OFFSETS).shape == (3, 7, 2, 32)
    o = gdpa(
        q, keys, items, OFFSETS, KV_OFFSETS, activation="gelu_tanh", scale=1.0, precision=None, schedule=None,
        max_q_len=None, max_kv_len=None, impl="auto",
    )  # fmt: skip
    assert torch.equal(o, gdpa(q, keys, items, OFFSETS, KV_OFFSETS)) and o.shape == q.shape
    assert gdpa(q[:7], keys, items, None, KV_OFFSETS).shape == (3, 7, 2, 32)
    o = block_attention(q, k, v, OFFSETS, block_size=64, scale=None, rotary=None, impl="auto")
    assert torch.equal(o, block_attention(q, k, v, OFFSETS))


def test_rotary_and_bias_objects():
    angles = values(ROWS, 1, 16)[:, 0]
    whole = Rotary(angles.cos(), angles.sin(), interleaved=True, on=("q", "k", "v"))
    assert whole.cos.shape == (ROWS, 16) and whole.cos.dtype == torch.float32
    turned = block_attention(q, k, v, OFFSETS, rotary=whole)
    halves = block_attention(q, k, v, OFFSETS, rotary=Rotary(angles.cos(), angles.sin(), interleaved=False))
    keys_only = block_attention(q, k, v, OFFSETS, rotary=Rotary(angles.cos(), angles.sin(), on=("k",)))
    different = (turned, halves, keys_only, block_attention(q, k, v, OFFSETS))
    assert all(not torch.allclose(a, b) for i, a in enumerate(different) for b in different[:i])
    table = torch.randn(2, 8, requires_grad=True)
    relative = jagged_attention(q, k, v, OFFSETS, bias=Bias(table, positions="relative"))
    stamps = torch.arange(ROWS) ** 2
    timed = jagged_attention(q, k, v, OFFSETS, bias=Bias(table, positions=stamps))
    assert not torch.allclose(relative, timed)
    for o in (relative, timed):
        (gradient,) = torch.autograd.grad(o.square().sum(), table)
        assert gradient.shape == (2, 8) and gradient.abs().sum() > 0


@pytest.mark.parametrize("call", [jagged_attention, gdpa])
def test_precision_takes_a_recipe(call):
    low, high = call(q, k, v, OFFSETS, precision=Recipe()), call(q, k, v, OFFSETS)
    assert low.shape == high.shape and not torch.equal(low, high)
    torch.testing.assert_close(low, high, rtol=0, atol=0.2 * float(high.abs().max()))


def test_quantised_tensors_and_linear():
    x = torch.randn(ROWS, 64)
    x8 = mxfp8.quantize(
        x, axis=-1, block=(1, 32), offsets=None, dtype=torch.float8_e4m3fn, scale_mode="rceil", hadamard=None,
        stochastic=False, generator=None,
    )  # fmt: skip
    assert x8.data.dtype == torch.float8_e4m3fn and x8.data.shape == x.shape
    assert x8.scale.dtype == torch.uint8 and x8.scale.shape == (ROWS, 2)
    torch.testing.assert_close(x8.dequantize(), x, rtol=0.07, atol=0.01)
    ends = mxfp8.quantize(x, axis=0, offsets=OFFSETS)
    assert ends.scale.shape == (1 + 0 + 2, 64)  # blocks end with sequences
    weight, bias = torch.randn(16, 64), torch.randn(16)
    y = mxfp8.linear(x, weight, bias, recipe=mxfp8.Recipe())
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias), rtol=0, atol=2.0)
    with pytest.raises((AttributeError, TypeError)):
        mxfp8.Recipe().scale_mode = "floor"  # frozen


def test_flops_count_useful_pairs():
    n = flops.jagged_attention(LENGTHS, None, 4, 64, window=None, phase="fwd")
    assert n == 4 * 4 * 64 * (25 + 33 * 33)
    for phase, factor in (("bwd", 2), ("bwd_kernel", 2.5)):
        assert flops.jagged_attention(LENGTHS, LENGTHS, 4, 64, phase=phase) == factor * n
    assert flops.gdpa(LENGTHS, KV_LENGTHS, 4, 64, phase="fwd") == 4 * 4 * 64 * (10 + 132)
    assert flops.block_attention((70, 70), 4, 64, phase="fwd") == 4 * 4 * 64 * 8264


def test_bound_as_printed():
    b = bounds.bound("gdpa", LENGTHS, KV_LENGTHS, 4, 128, "fwd", torch.bfloat16, "gelu_tanh", "h200")
    assert b.time_ms > 0 and b.limiter in ("tensor", "hbm", "exp", "issue")


def test_explain_says_which_and_why():
    text = explain(gdpa, q, k, v, OFFSETS)
    assert "gdpa: eager <- chosen" in text and "gdpa: triton needs a CUDA device" in text
    assert "jagged_attention: eager <- chosen" in explain(jagged_attention, q, k, v, OFFSETS, window=2)
    assert "block_attention: eager <- chosen" in explain(block_attention, q, k, v, OFFSETS)
