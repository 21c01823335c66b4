"""The Triton GDPA kernels on the GPU they are made for (`pytest -m gpu tests/gpu/test_gdpa_gpu.py`)."""

from __future__ import annotations

import pytest
import torch

from kernels import gdpa
from kernels.gdpa import triton_gdpa
from kernels.gdpa.triton_gdpa import Options
from kernels.testing import make_inputs

from ..kernels import test_gdpa_triton as checks
from .guards import guarded

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, HALF, FULL], ids=["bf16", "fp16", "fp32"])
SLOW = pytest.mark.slow
OPTIONS = {
    "default": {},
    "grid": {"schedule": "grid", "kv_resident": False},
    "zigzag": {"schedule": "zigzag", "kv_resident": False},
    "owner": {"backward": "owner"},
    "loads": {"tma": False},  # descriptors are the default where they can be used
}
SWITCHES = pytest.mark.parametrize("switch", OPTIONS)


def roundings(dtype):
    """Units in the last place beside eager's own error. The approximate tanh errs by 2^-11 relative to a weight, an
    ulp of float16 and a quarter of one of bfloat16; float32 sums run in another order."""
    return {BF16: 2.0, HALF: 6.0, FULL: 16.0}[dtype]


@SWITCHES
@DTYPES
def test_every_length_pattern(switch, dtype):
    if dtype == FULL and switch == "loads":
        pytest.skip("float32 rows always come by loads")
    # Exact float32 products are unrolled into FMAs: half the columns are a quarter of the compilation.
    head_dim = 32 if dtype == FULL else 64
    checks.patterns(Options(**OPTIONS[switch]), DEVICE, dtype, head_dim, roundings=roundings(dtype))


# By default every class of padding (a power of two or not, below, at and above 64 and 128); the rest is slow.
HEAD_DIMS = [(d, BF16, "split") for d in (16, 40, 64, 96, 128, 192, 256)] + [(d, BF16, "owner") for d in (40, 128, 256)]
OTHER_DIMS = [
    (d, dtype, backward)
    for d in (16, 32, 40, 64, 72, 80, 96, 104, 128, 192, 256)
    for dtype in (BF16, HALF)
    for backward in ("split", "owner")
    if (d, dtype, backward) not in HEAD_DIMS
]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "backward"),
    [*HEAD_DIMS, *(pytest.param(*values, marks=SLOW) for values in OTHER_DIMS)],
    ids=str,
)
def test_every_head_dim(head_dim, dtype, backward):
    for q_lengths, kv_lengths in (((1, 200, 0, 129), None), ((70, 3), (5, 300)), ((300, 0, 70), (256, 3, 129))):
        inputs = make_inputs("gdpa", q_lengths, kv_lengths, head_dim=head_dim, dtype=dtype, device=DEVICE, spare_rows=2)
        checks.expect(checks.run(Options(backward=backward), inputs), inputs, roundings=roundings(dtype))


@pytest.mark.parametrize("activation", [*triton_gdpa.ACTIVATIONS, "shared queries"])
@pytest.mark.parametrize(
    ("dtype", "backward"), [(BF16, "split"), (BF16, "owner"), pytest.param(HALF, "split", marks=SLOW), (FULL, "split")],
    ids=str,
)  # fmt: skip
def test_every_activation_scale_and_shared_queries(dtype, backward, activation):
    head_dim, shared = 32 if dtype == FULL else 64, activation == "shared queries"
    checks.activations(
        Options(backward=backward), DEVICE, dtype, head_dim, roundings=roundings(dtype),
        kinds=() if shared else (activation,), shared=shared,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, BF16), (128, BF16), (128, HALF), pytest.param(96, BF16, marks=SLOW), pytest.param(64, HALF, marks=SLOW)],
    ids=str,
)
def test_keys_on_chip_equal_streamed_keys_bit_for_bit(head_dim, dtype):
    checks.resident(Options(kv_resident="fits"), 128, DEVICE, dtype, head_dim, roundings=roundings(dtype))


def test_a_lying_hint_gives_nan():
    checks.lying_hint(Options(kv_resident="fits"), 128, DEVICE, BF16)


@SWITCHES
@pytest.mark.parametrize("dtype", [BF16, FULL], ids=["bf16", "fp32"])
def test_neighbours_values_reach_nobody(switch, dtype):
    batches = ((65, 1, 64), (63, 64, 17), (127, 129, 1), (128, 200, 300))
    options, kinds = (
        Options(**OPTIONS[switch]),
        ("gelu_tanh",) if switch in ("grid", "zigzag", "loads") else ("gelu", "gelu_tanh"),
    )
    if dtype == FULL and switch == "loads":
        pytest.skip("float32 rows always come by loads")
    checks.neighbours(options, DEVICE, dtype, 32 if dtype == FULL else 64, batches, kinds)


@SWITCHES
def test_company_and_offsets_do_not_matter(switch):
    options = {key: value for key, value in OPTIONS[switch].items() if value != "grid"}
    checks.company(Options(**options), DEVICE, BF16, 128)


def test_views_of_one_buffer():
    checks.views(Options(), DEVICE, BF16, 128)


def test_host_schedules():
    block = triton_gdpa.default("fwd_tma", 128, BF16).block_m
    lengths = (3, 0, 700, 129, 1)
    inputs = make_inputs("gdpa", lengths, head_dim=128, dtype=BF16, device=DEVICE, spare_rows=2)
    expected = checks.run(Options(), inputs)[0]
    for order in ("grid", "valid", "zigzag"):
        schedule = checks.tile_schedule(torch.tensor(lengths), torch.tensor(lengths), block, 128, 132, order).to(DEVICE)
        assert torch.equal(checks.run(Options(), inputs, schedule=schedule)[0], expected), order


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, BF16), (128, HALF), (96, BF16)], ids=str)
def test_tiles_by_mean_length_give_the_same_bits(head_dim, dtype, activation):
    """Which is why the mean length of a batch may choose between them."""
    lengths = (300, 0, 70, 513, 1, 128, 64, 65)
    inputs = make_inputs("gdpa", lengths, head_dim=head_dim, dtype=dtype, device=DEVICE, spare_rows=2)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.q_offsets, inputs.q_offsets)
    short, long = (
        triton_gdpa.forward_with(Options(fwd=triton_gdpa.default(phase, head_dim, dtype)), *arguments,
                                 activation=activation, scale=0.3)
        for phase in ("fwd_tma_short", "fwd_tma")
    )  # fmt: skip
    assert torch.equal(short, long)


@pytest.mark.slow
@pytest.mark.parametrize("config", triton_gdpa.candidates("fwd", 128), ids=str)
def test_every_configuration_gives_the_same_forward_bits(config):
    inputs = make_inputs("gdpa", (300, 0, 70, 513), head_dim=128, dtype=BF16, device=DEVICE, spare_rows=2)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.q_offsets, inputs.q_offsets)
    settings = {"activation": "gelu_tanh", "scale": 1.0}
    expected = triton_gdpa.forward(*arguments, **settings)
    for tma in (True, False):
        assert torch.equal(triton_gdpa.forward_with(Options(fwd=config, tma=tma), *arguments, **settings), expected)


def test_far_scores_and_exact_products():
    checks.far_scores(Options(), DEVICE, FULL)
    checks.exact_products(Options(), DEVICE)


def test_random_lengths():
    generator = torch.Generator().manual_seed(0)
    for trial in range(12):
        batch = int(torch.randint(1, 9, (1,), generator=generator))
        q, kv = torch.randint(0, 400, (2, batch), generator=generator).tolist()
        inputs = make_inputs("gdpa", q, kv, head_dim=128, dtype=BF16, device=DEVICE, seed=trial, spare_rows=trial % 3)
        for backward in ("split", "owner"):
            checks.expect(checks.run(Options(backward=backward), inputs, hints=trial % 2 == 0), inputs)


@pytest.mark.slow
def test_rows_beyond_2_to_the_31_elements():
    """lengths 64 x 4096 + 1, 64 heads of 128: the last row starts at element 2^31."""
    lengths = torch.full((4097,), 64, dtype=torch.int64)
    lengths[-1] = 1
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to(DEVICE)
    x = torch.full((int(offsets[-1]), 64, 128), 0.01, dtype=BF16, device=DEVICE)
    x[-1] = 0.5
    settings = {"activation": "relu", "scale": 1.0}
    o = triton_gdpa.forward(x, x, x, offsets, offsets, **settings)
    last = x[-1:]
    one = torch.tensor([0, 1], device=DEVICE)
    assert torch.equal(o[-1:], triton_gdpa.forward(last, last, last, one, one, **settings))
    del o
    dq, dk, dv = triton_gdpa.backward(x, x, x, x, offsets, offsets, **settings)
    for actual, expected in zip(
        (dq, dk, dv), triton_gdpa.backward(last, last, last, last, one, one, **settings), strict=True
    ):
        assert torch.equal(actual[-1:], expected)


def test_stores_stay_between_guard_rows():
    """Outputs and gradients are written inside buffers whose neighbours hold a known value."""
    x = make_inputs("gdpa", (1, 65, 0, 129), head_dim=64, dtype=BF16, device=DEVICE, spare_rows=1)
    arguments, settings = (x.q, x.k, x.v, x.q_offsets, x.q_offsets), {"activation": "gelu_tanh", "scale": 1.0}
    with guarded(7) as buffers:
        for options in (Options(), Options(backward="owner")):
            triton_gdpa.forward_with(options, *arguments, **settings)
            triton_gdpa.backward_with(options, x.do, *arguments, **settings)
        triton_gdpa.forward_with(Options(schedule="grid"), *arguments, max_q_len=129, **settings)
    assert len(buffers) >= 9


@pytest.mark.parametrize("schedule", ["valid", "grid", "zigzag"])
def test_nothing_synchronises(schedule):
    """Forward and backward never wait for the device: offsets are read there only."""
    x = make_inputs("gdpa", (100, 3), head_dim=64, dtype=BF16, device=DEVICE, spare_rows=2)
    arguments = (x.q, x.k, x.v, x.q_offsets, x.q_offsets)
    settings = {"activation": "gelu_tanh", "scale": 1.0, "max_q_len": 100}

    def run():
        for backward in ("split", "owner"):
            options = Options(schedule=schedule, backward=backward)
            triton_gdpa.forward_with(options, *arguments, **settings)
            triton_gdpa.backward_with(options, x.do, *arguments, **settings)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("schedule", ["valid", "zigzag"])
def test_a_graph_reads_its_offsets_anew(schedule):
    """Lists of tiles are kept for a batch, but not in a CUDA graph: its replays find other offsets at their address."""
    x = make_inputs("gdpa", (300, 3, 0, 200), head_dim=64, dtype=BF16, device=DEVICE)
    offsets, options = x.q_offsets.clone(), Options(schedule=schedule)
    settings = {"activation": "gelu_tanh", "scale": 1.0}

    def run(at):
        o = triton_gdpa.forward_with(options, x.q, x.k, x.v, at, at, **settings)
        return o, *triton_gdpa.backward_with(options, x.do, x.q, x.k, x.v, at, at, **settings)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(offsets)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = run(offsets)
    other = torch.tensor([0, 1, 130, 400, 503], device=DEVICE, dtype=offsets.dtype)
    offsets.copy_(other)
    graph.replay()
    for value, right in zip(found, run(other), strict=True):
        assert torch.equal(value, right)


def test_opcheck():
    from kernels.gdpa.function import gdpa_op

    x = make_inputs("gdpa", (33, 0, 65), head_dim=64, dtype=BF16, device=DEVICE).leaves()
    settings = ("gelu_tanh", 1.0, None, None, None, None, [], "triton")
    arguments = (x.q, x.k, x.v, x.q_offsets, x.q_offsets, *settings)
    torch.library.opcheck(gdpa_op, arguments, atol=2e-2, rtol=2e-2)


def test_the_op_compiles_without_graph_breaks():
    inputs = make_inputs("gdpa", (70, 3, 0, 130), head_dim=64, dtype=BF16, device=DEVICE).leaves()

    def call(q, k, v):
        return gdpa(q, k, v, inputs.q_offsets, activation="gelu_tanh", impl="triton")

    o = call(inputs.q, inputs.k, inputs.v)
    compiled = torch.compile(call, fullgraph=True)(inputs.q, inputs.k, inputs.v)
    assert torch.equal(o, compiled)
    expected = torch.autograd.grad(o, (inputs.q, inputs.k, inputs.v), inputs.do)
    for x, e in zip(torch.autograd.grad(compiled, (inputs.q, inputs.k, inputs.v), inputs.do), expected, strict=True):
        assert torch.equal(x, e)
