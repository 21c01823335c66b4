"""The Triton GDPA kernels without a GPU: values in the interpreter, resources by compiling for sm_90.

The functions that take a device serve the GPU tests too.
"""

from __future__ import annotations

import pytest
import torch

from kernels.gdpa import configs, eager, reference, triton_gdpa
from kernels.gdpa.triton_gdpa import Config, Options, backward_with, forward_with
from kernels.schedule import tile_schedule
from kernels.testing import LENGTH_PATTERNS, assert_within_eager, make_inputs, poisoned

from . import triton_interpreted
from .triton_offline import compiling

# Local memory a thread may use (bytes): the owner walk reads, adds and writes dq beside two register accumulators.
MAX_LOCAL = {
    "fwd": 256, "fwd_tma": 32, "fwd_tma_short": 0, "fwd_resident_1": 0, "fwd_resident_2": 256, "dq": 64, "dkdv": 832,
    "dq_tma": 64, "dkdv_tma": 832, "owner": 1152,
}  # fmt: skip
SMALL = Config(16, 16, 4, 1, 2)
SMALL_OPTIONS = {"fwd": SMALL, "resident": SMALL, "dq": SMALL, "dkdv": SMALL, "owner": SMALL}
SHORT = ("empty_in_the_middle", "all_empty", "no_sequences", "skewed", "cross_no_keys", "cross_no_queries")
SWITCHES = {
    "valid split": {"schedule": "valid", "backward": "split", "kv_resident": False},
    "grid owner": {"schedule": "grid", "backward": "owner", "kv_resident": False},
    "zigzag split": {"schedule": "zigzag", "backward": "split", "kv_resident": False},
}


def run(options, inputs, activation="gelu_tanh", scale=1.0, schedule=None, hints=True):
    """(o, dq, dk, dv) of the kernels, uninitialised memory full of NaN."""
    kv_offsets = inputs.q_offsets if inputs.kv_offsets is None else inputs.kv_offsets
    arguments = (inputs.q, inputs.k, inputs.v, inputs.q_offsets, kv_offsets)
    settings = {"activation": activation, "scale": scale, "schedule": schedule}
    if hints:
        lengths = kv_offsets.diff().tolist()
        queries = [inputs.q.shape[0]] if inputs.q_offsets is None else inputs.q_offsets.diff().tolist()
        settings |= {"max_kv_len": max(lengths, default=0), "max_q_len": max(queries, default=0)}
    with poisoned():
        return forward_with(options, *arguments, **settings), *backward_with(options, inputs.do, *arguments, **settings)


def expect(actual, inputs, activation="gelu_tanh", scale=1.0, roundings=2.0):
    """Every result as close to float64 as same-dtype eager, up to rounding."""
    kv_offsets = inputs.q_offsets if inputs.kv_offsets is None else inputs.kv_offsets
    settings = {"activation": activation, "scale": scale}

    def of(module, dtype):
        q, k, v, do = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v, inputs.do))
        arguments = (q, k, v, inputs.q_offsets, kv_offsets)
        return module.forward(*arguments, **settings), *module.backward(do, *arguments, **settings)

    plain, exact = of(eager, inputs.q.dtype), of(reference, torch.float64)
    for name, x, e, r in zip(("o", "dq", "dk", "dv"), actual, plain, exact, strict=True):
        assert_within_eager(x, e, r, name=name, roundings=roundings)


def patterns(options, device="cpu", dtype=torch.float32, head_dim=16, names=None, roundings=8.0):
    """Every length pattern, with rows past the end that hold NaN."""
    for pattern in LENGTH_PATTERNS:
        if names is None or pattern.name in names:
            inputs = make_inputs(
                "gdpa", pattern.q, pattern.kv, head_dim=head_dim, dtype=dtype, device=device, spare_rows=2
            )
            expect(run(options, inputs), inputs, roundings=roundings)


def activations(
    options, device="cpu", dtype=torch.float32, head_dim=24, roundings=8.0, kinds=triton_gdpa.ACTIVATIONS, shared=True
):  # fmt: skip
    """Every activation, a scale, and queries shared by all sequences."""
    for activation in kinds:
        inputs = make_inputs("gdpa", (3, 0, 37), (5, 2, 18), head_dim=head_dim, dtype=dtype, device=device)
        expect(run(options, inputs, activation, 0.5), inputs, activation, 0.5, roundings)
    if shared:
        inputs = make_inputs("gdpa", (3, 0, 37), shared_q=5, head_dim=head_dim, dtype=dtype, device=device)
        expect(run(options, inputs, "silu"), inputs, "silu", roundings=roundings)


def resident(options, block, device="cpu", dtype=torch.float32, head_dim=16, roundings=8.0):
    """Short keys on chip: one key tile and two, bit for bit the streaming kernel."""
    for keys in ((block, 0, 1, 3), (2 * block, 0, 1, block + 1)):
        inputs = make_inputs(
            "gdpa", (1, 3, 0, 5 * block // 2), keys, head_dim=head_dim, dtype=dtype, device=device, spare_rows=2
        )
        results = run(options, inputs)
        expect(results, inputs, roundings=roundings)
        zigzag = Options(**{**options.__dict__, "schedule": "zigzag"})
        assert torch.equal(run(zigzag, inputs)[0], results[0])
        streamed = forward_with(
            Options(**{**options.__dict__, "kv_resident": False}), inputs.q, inputs.k, inputs.v, inputs.q_offsets,
            inputs.kv_offsets, activation="gelu_tanh", scale=1.0,
        )  # fmt: skip
        assert torch.equal(results[0], streamed)


def lying_hint(options, block, device="cpu", dtype=torch.float32):
    """More keys than the hint says: NaN rows for that sequence, never plausible ones; the others are right."""
    inputs = make_inputs("gdpa", (4, 5), (2, 3 * block), dtype=dtype, device=device)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.q_offsets, inputs.kv_offsets)
    settings = {"activation": "relu", "scale": 1.0}
    o = forward_with(options, *arguments, max_kv_len=block, **settings)
    assert o[4:].isnan().all() and torch.equal(o[:4], forward_with(options, *arguments, **settings)[:4])


def host_schedule(options, block, device="cpu", dtype=torch.float32):
    """A schedule made on the host gives the same bits as the list made on the device."""
    lengths = torch.tensor([3, 0, 70, 33, 1])
    inputs = make_inputs("gdpa", lengths.tolist(), dtype=dtype, device=device, spare_rows=2)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.q_offsets, inputs.q_offsets)

    def forward(schedule=None):
        with poisoned():
            return forward_with(options, *arguments, activation="gelu_tanh", scale=1.0, schedule=schedule)

    expected = forward()
    for order in ("grid", "valid", "zigzag"):
        schedule = tile_schedule(lengths, lengths, block, block, 3, order).to(device)
        assert torch.equal(forward(schedule), expected), order


def neighbours(
    options, device="cpu", dtype=torch.float32, head_dim=16, batches=((17, 1, 16), (15, 16, 9)), kinds=("gelu",)
):
    """The middle sequence's values reach nobody: NaN or 1e30 there, the same bits elsewhere, forward and backward."""
    for lengths in batches:
        clean = make_inputs("gdpa", lengths, head_dim=head_dim, dtype=dtype, device=device)
        start, end = lengths[0], lengths[0] + lengths[1]
        for activation in kinds:
            expected = run(options, clean, activation)
            for value in (float("nan"), 1e30 if dtype != torch.float16 else 6e4):
                dirty = make_inputs("gdpa", lengths, head_dim=head_dim, dtype=dtype, device=device)
                for t in (dirty.q, dirty.k, dirty.v, dirty.do):
                    t[start:end] = value
                for x, e in zip(run(options, dirty, activation), expected, strict=True):
                    assert torch.equal(x[:start], e[:start]) and torch.equal(x[end:], e[end:])


def company(options, device="cpu", dtype=torch.float32, head_dim=16):
    """A sequence alone, among others, elsewhere in the batch, with int32 or strided offsets: the same bits."""
    lengths = (37, 0, 70, 5)
    inputs = make_inputs("gdpa", lengths, head_dim=head_dim, dtype=dtype, device=device)
    expected = run(options, inputs, hints=False)
    start, end = 37, 107
    alone = make_inputs("gdpa", (70,), head_dim=head_dim, dtype=dtype, device=device)
    for name in ("q", "k", "v", "do"):
        setattr(alone, name, getattr(inputs, name)[start:end])
    for x, e in zip(run(options, alone, hints=False), expected, strict=True):
        assert torch.equal(x, e[start:end])
    strided = torch.stack((inputs.q_offsets, inputs.q_offsets), 1)[:, 0]
    for offsets in (inputs.q_offsets.int(), strided):
        inputs.q_offsets = offsets
        for x, e in zip(run(options, inputs, hints=False), expected, strict=True):
            assert torch.equal(x, e)


def views(options, device="cpu", dtype=torch.float32, head_dim=16):
    """q, k, v as views of one buffer give the bits of contiguous copies."""
    inputs = make_inputs("gdpa", (30, 0, 41), head_dim=head_dim, dtype=dtype, device=device, fused=True)
    actual = run(options, inputs)
    inputs.q, inputs.k, inputs.v = (t.contiguous() for t in (inputs.q, inputs.k, inputs.v))
    for x, e in zip(actual, run(options, inputs), strict=True):
        assert torch.equal(x, e)


def one_hot_last_column(options, device="cpu", dtype=torch.float32):
    """A head size that is no power of two uses its last column."""
    for head_dim in (24, 40):
        inputs = make_inputs("gdpa", (20, 3), head_dim=head_dim, dtype=dtype, device=device)
        for t in (inputs.q, inputs.k):
            t.zero_()
            t[0, :, head_dim - 1] = 1
        o = run(options, inputs, "relu")[0]
        assert torch.equal(o[0], inputs.v[0]) and (o[1:20] == 0).all()


def far_scores(options, device="cpu", dtype=torch.float32):
    """Scores out to +-1e4 stay finite, and match."""
    inputs = make_inputs("gdpa", (20,), dtype=dtype, device=device)
    inputs.q *= 100
    inputs.k *= 100
    for activation in ("gelu", "gelu_tanh", "silu"):
        expect(run(options, inputs, activation), inputs, activation, roundings=16)


def exact_products(options, device="cpu"):
    """float32 is multiplied in float32, not in TF32."""
    inputs = make_inputs("gdpa", (1,), num_heads=1, device=device)
    for t in (inputs.q, inputs.k):
        t.zero_()
        t[0, 0, 0] = 1 + 2**-12
    inputs.v.fill_(1.0)
    assert abs(run(options, inputs, "silu")[0][0, 0, 0].item() - 0.731511634) < 1e-6


CHECKS = {
    **{
        f"patterns {name}": (
            lambda s=switch: patterns(
                Options(**s, **SMALL_OPTIONS),
                names=SHORT
                if s["backward"] == "split"
                else (*SHORT, "cross_one_query", "last_empty", "single_sequence"),
            )
        )
        for name, switch in SWITCHES.items()
    },
    "patterns default": lambda: patterns(
        Options(), names=("tile_edges", "cross_short_keys", "one_row_of_many", "not_causal")
    ),
    "activations": lambda: activations(Options(**SMALL_OPTIONS)),
    "activations owner": lambda: activations(Options(backward="owner", **SMALL_OPTIONS)),
    "resident": lambda: resident(Options(**SMALL_OPTIONS, kv_resident="fits"), 16),
    "resident by descriptors": lambda: resident(Options(**SMALL_OPTIONS, kv_resident="fits", tma=True), 16),
    "lying hint": lambda: lying_hint(Options(**SMALL_OPTIONS, kv_resident="fits"), 16),
    "host schedule": lambda: host_schedule(Options(**SMALL_OPTIONS), 16),
    "neighbours": lambda: neighbours(Options(**SMALL_OPTIONS)),
    "neighbours owner": lambda: neighbours(Options(backward="owner", **SMALL_OPTIONS)),
    "company": lambda: company(Options(**SMALL_OPTIONS)),
    "company owner": lambda: company(Options(backward="owner", **SMALL_OPTIONS)),
    "descriptors": lambda: patterns(Options(tma=True, **SMALL_OPTIONS), names=SHORT),
    "descriptors in a grid": lambda: patterns(Options(tma=True, schedule="grid"), names=("cross_short_keys",)),
    "descriptors, shared queries": lambda: activations(
        Options(tma=True, **SMALL_OPTIONS), head_dim=16, kinds=("silu",)
    ),
    "views": lambda: views(Options()),
    "last column": lambda: one_hot_last_column(Options()),
    "far scores": lambda: far_scores(Options()),
    "exact products": lambda: exact_products(Options()),
    "half precision": lambda: patterns(
        Options(**SMALL_OPTIONS), dtype=torch.float16, names=("skewed", "cross_no_keys")
    ),
}


@pytest.fixture(scope="module")
def interpreted():
    return triton_interpreted.results(__name__)


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(interpreted, check):
    assert interpreted[check] is None, interpreted[check]


def compiled(phase, config, head_dim=128, activation="gelu_tanh", dtype=torch.bfloat16):
    """The kernels of one configuration, compiled for sm_90."""
    rows = torch.empty(4096, 4, head_dim, dtype=dtype, device="meta")
    offsets = torch.empty(9, dtype=torch.int64, device="meta")
    resident = phase.startswith("fwd_resident")
    kv_len = config.block_n * (2 if phase == "fwd_resident_2" else 1)
    tma = resident or "_tma" in phase
    field = "resident" if resident else phase.split("_")[0]
    options = Options(
        kv_resident=resident, backward="owner" if phase == "owner" else "split", fast_tanh=True, tma=tma,
        **{field: config},
    )  # fmt: skip
    settings = {"activation": activation, "scale": 1.0, "max_kv_len": kv_len}
    with compiling() as found:
        if phase.startswith("fwd"):
            forward_with(options, rows, rows, rows, offsets, offsets, **settings)
        else:
            backward_with(options, rows, rows, rows, rows, offsets, offsets, **settings)
    name = "forward_resident_kernel" if resident else {"fwd": "forward_kernel"}.get(field, f"{field}_kernel")
    return next(kernel for kernel in found if kernel.name == name)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("phase", configs.PHASES)
def test_defaults_compile_for_hopper(phase, head_dim):
    if phase.startswith("fwd_resident") and not configs.has_resident(head_dim):
        pytest.skip("keys of 256 columns do not stay on chip")
    kernel = compiled(phase, configs.default(phase, head_dim, torch.bfloat16), head_dim)
    assert kernel.local_bytes <= MAX_LOCAL[phase], kernel
    assert kernel.shared_bytes <= 232448, kernel


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("phase", configs.PHASES)
def test_candidates_compile_for_hopper(phase, head_dim):
    for config in configs.candidates(phase, head_dim):
        kernel = compiled(phase, config, head_dim)
        limit = 256 if phase.startswith("fwd") else MAX_LOCAL[phase]  # of forward tiles that are not the defaults
        assert kernel.local_bytes <= limit and kernel.shared_bytes <= 232448, (config, kernel)


def test_the_query_tile_follows_the_mean_length():
    """Short sequences have tiles of 64 queries, up to 256 queries a sequence; a host's schedule decides for itself."""
    config = triton_gdpa._forward_config
    q = torch.empty(1025, 4, 128, dtype=torch.bfloat16)
    assert config(Options(), True, q[:1024], q, 4, None).block_m == 64
    assert config(Options(), True, q, q, 4, None).block_m == 128
    assert config(Options(), True, q[:256], None, 1, None).block_m == 64  # queries that all sequences share
    assert config(Options(), True, q[:257], None, 8, None).block_m == 128
    assert config(Options(), False, q[:1024], q, 4, None) == configs.default("fwd", 128, torch.bfloat16)
    assert config(Options(fwd=SMALL), True, q[:1024], q, 4, None) == SMALL
    for rows in (64, 128):
        schedule = tile_schedule(torch.tensor([300, 70]), torch.tensor([300, 70]), rows, 64, 4, "zigzag")
        assert config(Options(), True, q, q, 4, schedule).block_m == rows


def test_keys_stay_on_chip_where_it_pays():
    def tiles(head_dim=128, keys=128, tma=True, **options):
        return triton_gdpa._resident_tiles(Options(**options), tma, head_dim, torch.bfloat16, keys)

    assert tiles() == tiles(keys=0) == tiles(head_dim=96) == 1
    assert tiles(keys=129) == tiles(keys=None) == tiles(head_dim=64) == tiles(head_dim=256) == tiles(tma=False) == 0
    assert tiles(fwd=SMALL) == tiles(kv_resident=False) == 0
    assert tiles(keys=129, kv_resident="fits") == tiles(keys=256, kv_resident=True) == 2
    assert tiles(keys=257, kv_resident="fits") == tiles(keys=None, kv_resident="fits") == 0
    for bad in ({"keys": 257}, {"keys": None}, {"head_dim": 256}):
        with pytest.raises(ValueError, match="kv_resident: max_kv_len"):
            tiles(**bad, kv_resident=True)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="kv_resident: None"):
        Options(kv_resident=None)
    with pytest.raises(ValueError, match="schedule: 'list'"):
        Options(schedule="list")
    with pytest.raises(ValueError, match="backward: 'atomic'"):
        Options(backward="atomic")
    with pytest.raises(ValueError, match="phase: 'bwd'"):
        configs.candidates("bwd", 128)


if __name__ == "__main__":
    triton_interpreted.main(CHECKS)
