"""8 bits on a GPU: the quantiser's bytes, real products against emulated ones, attention against its plain form."""

from __future__ import annotations

import itertools

import pytest
import torch

import kernels
from kernels import mxfp8
from kernels.fused_norm import norm_quantize
from kernels.mxfp8 import formats, hopper, hopper_attention, hopper_function
from tests.kernels.mx_triton_checks import awkward

pytestmark = pytest.mark.gpu
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bytes differ; two NaN count as equal."""
    a, b = a.cpu(), b.cpu()
    return int(((a.view(torch.uint8) != b.view(torch.uint8)) & ~(a.float().isnan() & b.float().isnan())).sum())


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


OFFSETS = torch.tensor([0, 5, 5, 40, 104, 290])
ARRANGEMENTS = (
    {}, {"axis": 0}, {"block": (32, 32)}, {"axis": 0, "offsets": OFFSETS}, {"block": (32, 32), "offsets": OFFSETS},
    {"offsets": OFFSETS}, {"stochastic": True}, {"stochastic": True, "axis": 0, "offsets": OFFSETS},
)  # fmt: skip


@pytest.mark.parametrize("keywords", ARRANGEMENTS, ids=lambda k: "-".join(k) or "rows")
@pytest.mark.parametrize("mode", formats.SCALE_MODES)
def test_quantiser_gives_the_bytes_of_plain_torch(keywords, mode):
    broken = awkward(300, 272)
    broken[3, 5], broken[70, 9], broken[100, 200] = float("inf"), float("nan"), -float("inf")
    there = {name: value.cuda() if name == "offsets" else value for name, value in keywords.items()}
    for dtype, x in itertools.product(DTYPES, (awkward(300, 272), broken, awkward(300, 272).bfloat16())):
        options = {"dtype": dtype, "scale_mode": mode}
        got = mxfp8.quantize(x.cuda(), **options, **there, generator=torch.Generator().manual_seed(4))
        want = mxfp8.quantize(x, **options, **keywords, generator=torch.Generator().manual_seed(4))
        assert torch.equal(got.scale.cpu(), want.scale) and differing(got.data, want.data) == 0


@pytest.mark.parametrize("keywords", ({}, {"axis": 0}, {"block": (32, 32), "stochastic": True}), ids=str)
def test_rotation_in_the_quantiser(keywords):
    x = torch.randn(320, 288)
    got = mxfp8.quantize(x.cuda(), hadamard=3, generator=torch.Generator().manual_seed(4), **keywords)
    want = mxfp8.quantize(x, hadamard=3, generator=torch.Generator().manual_seed(4), **keywords)
    assert torch.equal(got.scale.cpu(), want.scale) and differing(got.data, want.data) == 0


def test_operands_of_format_hopper():
    x = awkward(300, 272)
    x[3, 5] = float("nan")
    for function in (hopper.by_row, hopper.by_column, hopper.by_tile):
        for dtype in DTYPES:
            got, want = function(x.cuda(), dtype=dtype), function(x, dtype=dtype)
            assert differing(got.data, want.data) == 0 and torch.equal(got.scale.isnan().cpu(), want.scale.isnan())
            assert torch.equal(got.scale.nan_to_num().cpu(), want.scale.nan_to_num())
            assert got.scale.stride() == want.scale.stride()
    q, k, v = (torch.randn(700, 2, 128).bfloat16() for _ in range(3))
    offsets = torch.tensor([0, 5, 5, 133, 390, 690])
    used = int(hopper_attention.padded_starts(offsets)[-1])
    for scales in hopper_attention.SCALES:
        got = hopper_attention.quantize(q.cuda(), k.cuda(), v.cuda(), offsets.cuda(), scales=scales)
        want = hopper_attention.quantize(q, k, v, offsets, scales=scales)
        keys = (slice(None), slice(used)) if want.fine else slice(used // 128)
        assert differing(got.q, want.q) == differing(got.k, want.k) == 0
        assert differing(got.v[:, :used].contiguous(), want.v[:, :used].contiguous()) == 0
        assert torch.equal(got.k_scale[keys].cpu(), want.k_scale[keys])
        assert torch.equal(got.v_scale[: used // 128].cpu(), want.v_scale[: used // 128])


@pytest.mark.parametrize("kind", ("rms", "layer"))
@pytest.mark.parametrize("shape", ((37, 512), (300, 2048), (5, 160)))
def test_norm_and_quantisation_in_one_pass(kind, shape):
    x = (torch.randn(shape) * 3 + 1).bfloat16().cuda()
    got, want = norm_quantize(x, kind=kind, impl="fused"), norm_quantize(x, kind=kind, impl="separate")
    steps = (got.data.view(torch.uint8).int() - want.data.view(torch.uint8).int()).abs()
    # Sums in another order may flip a rounding to bf16, and that one to 8 bits, and next to a power of two the scale.
    assert float((steps > 1).float().mean()) < 5e-3 and float((got.scale != want.scale).float().mean()) < 5e-3
    assert relative(hopper.values(got), hopper.values(want)) < 0.01


@on_hopper
@pytest.mark.parametrize(
    "sizes", ((256, 512, 512), (300, 512, 640), (1000, 160, 288), (48, 128, 128), (300, 256, 128), (0, 128, 256))
)
def test_real_products_are_the_emulated_ones(sizes):
    tokens, features_out, features_in = sizes
    recipe = mxfp8.Recipe(format="hopper")
    x, dy = (torch.randn(tokens, n, device="cuda").bfloat16() for n in (features_in, features_out))
    w = torch.randn(features_out, features_in, device="cuda").bfloat16()
    x.requires_grad_(), w.requires_grad_()
    y = mxfp8.linear(x, w, recipe=recipe)
    y.backward(dy)
    host = [z.detach().cpu().requires_grad_() for z in (x, w)]
    want = mxfp8.linear(*host, recipe=recipe)
    want.backward(dy.cpu())
    for got, right in ((y, want), (x.grad, host[0].grad), (w.grad, host[1].grad)):
        assert got.shape == right.shape and got.dtype == right.dtype
        assert not got.numel() or not right.any() or relative(got.cpu(), right) < 4e-3


ATTENTIONS = ("softmax", *hopper_function.ACTIVATIONS)


def operands(lengths: list[int], heads: int, activation: str, rows_behind: int = 3):
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")
    total = int(offsets[-1]) + rows_behind
    q, k, v = (torch.randn(total, heads, 128, device="cuda").bfloat16() for _ in range(3))
    if activation != "softmax":
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (q, k))
    return q, k, v, offsets, 128**-0.5 if activation == "softmax" else 1.0


def low(q, k, v, offsets, activation, scale):
    """(o, lse) of the kernel."""
    return torch.ops.gem_kernels.hopper_attention(q, k, v, offsets, offsets, activation, scale)


@on_hopper
@pytest.mark.parametrize("scales", hopper_attention.SCALES)
@pytest.mark.parametrize("activation", ATTENTIONS)
def test_attention_is_its_plain_form(activation, scales):
    pytest.importorskip("triton.language.extra.tlx")
    from kernels.mxfp8 import attention_tlx

    for lengths, heads in (([300, 1000, 128, 129, 127, 64, 1, 0, 700], 2), ([5, 0, 0, 1], 4), ([0, 0], 2)):
        q, k, v, offsets, scale = operands(lengths, heads, activation)
        found = hopper_attention.quantize(q, k, v, offsets, scales=scales)
        keywords = {"activation": activation, "scale": scale}
        o, lse = attention_tlx.forward_with(
            attention_tlx.Config(), found, offsets, offsets, dtype=q.dtype, **keywords
        )  # fmt: skip
        want, want_lse = hopper_attention.forward_plainly(found, offsets, offsets, dtype=torch.float32, **keywords)
        assert not bool(o[int(offsets[-1]) :].any())
        if want.any():
            # P may round to the other neighbour where the kernel's exponential or tanh differs in the last bits.
            assert relative(o, want) < (0.01 if activation in ("softmax", "relu") else 0.02)
        finite = want_lse.isfinite()
        assert torch.equal(lse.isfinite(), finite) and torch.allclose(lse[finite], want_lse[finite], atol=2e-3)


@on_hopper
@pytest.mark.parametrize("activation", ("softmax", "gelu_tanh"))
def test_attention_of_a_sequence_is_its_own(activation):
    pytest.importorskip("triton.language.extra.tlx")
    q, k, v, offsets, scale = operands([200, 100, 300], 2, activation)
    whole, _ = low(q, k, v, offsets, activation, scale)
    part = slice(200, 300)
    alone, _ = low(q[part], k[part], v[part], torch.tensor([0, 100], device="cuda"), activation, scale)
    assert torch.equal(whole[part], alone)
    k[260], v[250] = float("inf"), float("nan")
    broken, _ = low(q, k, v, offsets, activation, scale)
    assert torch.equal(broken[:200], whole[:200]) and torch.equal(broken[300:], whole[300:])
    assert bool(broken[part].isnan().all())


@on_hopper
def test_queries_without_keys_and_cross_attention():
    pytest.importorskip("triton.language.extra.tlx")
    q, k, v, _, scale = operands([400], 2, "softmax")
    q_offsets, kv_offsets = (torch.tensor(x, device="cuda") for x in ([0, 100, 300, 400], [0, 250, 250, 403]))
    v[10] = float("nan")
    for activation in ("softmax", "gelu_tanh"):
        o = torch.ops.gem_kernels.hopper_attention(q, k, v, q_offsets, kv_offsets, activation, scale)[0]
        assert not bool(o[100:300].any()) and not bool(o[400:].any())
        assert bool(o[300:400].isfinite().all()) and bool(o[:100].isnan().all())


@on_hopper
def test_training_step_through_the_public_call():
    pytest.importorskip("triton.language.extra.tlx")
    recipe = mxfp8.get_recipe("full").on_hopper()
    q, k, v, offsets, _ = operands([300, 40, 700], 4, "softmax", rows_behind=0)
    leaves, do = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    got = torch.autograd.grad(kernels.jagged_attention(*leaves, offsets, precision=recipe), leaves, do)
    want = torch.autograd.grad(kernels.jagged_attention(*leaves, offsets), leaves, do)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 0.08


@on_hopper
def test_a_linear_layer_never_waits_for_the_gpu():
    recipe = mxfp8.get_recipe("full").on_hopper()
    x = torch.randn(300, 256, device="cuda").bfloat16().requires_grad_()
    w = torch.randn(128, 256, device="cuda", requires_grad=True)
    dy = torch.randn(300, 128, device="cuda").bfloat16()
    mxfp8.linear(x, w, recipe=recipe).backward(dy)  # compiles, and makes what is kept
    torch.cuda.set_sync_debug_mode("error")
    try:
        mxfp8.linear(x, w, recipe=recipe).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
