"""Triton kernels of jagged attention on the GPU they are made for (`pytest -m gpu tests/gpu/test_jfa_gpu.py`)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kernels import Bias, jagged_attention
from kernels.jfa import configs, triton_schemes, v2_tuned, v3_subtraction
from kernels.testing import Inputs, make_inputs, poisoned, relative_error

from ..kernels import jfa_checks as laws
from ..kernels import jfa_triton_checks as checks
from .guards import guarded

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
TRITON = ("v1", "v2", "v3")
DTYPES = pytest.mark.parametrize("dtype", [BF16, HALF, FULL], ids=["bf16", "fp16", "fp32"])
IMPLS = pytest.mark.parametrize("impl", TRITON)
EXACT = pytest.mark.parametrize("impl", ["v2", "v3"])  # v1 sums dQ by atomics
OP = "jagged_attention"
SLOW = pytest.mark.slow
# float16 takes the paths of bfloat16: where many variants compile, it is slow.
FEW = pytest.mark.parametrize("dtype", [BF16, pytest.param(HALF, marks=SLOW), FULL], ids=["bf16", "fp16", "fp32"])


def float32_dim(dtype, head_dim):
    """Exact float32 products are unrolled into FMAs: seconds of compilation at head_dim 32, minutes at 128."""
    return 32 if dtype == FULL else head_dim


@IMPLS
@DTYPES
def test_every_length_pattern(impl, dtype):
    checks.patterns(impl, DEVICE, dtype, head_dim=float32_dim(dtype, 64))


# By default every class of padding (a power of two or not, below, at and above 64 and 128); the rest is slow.
HEAD_DIMS = [(d, BF16) for d in (8, 40, 64, 96, 128, 192, 256)]
OTHER_DIMS = [(d, HALF) for d in (8, 16, 32, 40, 64, 72, 80, 96, 104, 128, 192, 256)]
OTHER_DIMS += [(d, BF16) for d in (16, 32, 72, 80, 104)]


@EXACT
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*HEAD_DIMS, *(pytest.param(*values, marks=SLOW) for values in OTHER_DIMS)], ids=str
)
def test_every_head_dim(impl, head_dim, dtype):
    for q_lengths, kv_lengths in (((1, 200, 0, 129), None), ((70, 3), (5, 300))):
        inputs = make_inputs(OP, q_lengths, kv_lengths, head_dim=head_dim, dtype=dtype, device=DEVICE, spare_rows=2)
        laws.against_reference(impl, inputs)


@pytest.mark.parametrize("head_dim", [32, pytest.param(128, marks=SLOW), pytest.param(256, marks=SLOW)])
def test_float32_head_dims(head_dim):
    laws.against_reference("v2", make_inputs(OP, (100, 3), head_dim=head_dim, device=DEVICE), roundings=16.0)


@IMPLS
def test_naive_head_dims(impl):
    for head_dim in (96, 256):
        laws.against_reference(impl, make_inputs(OP, (130, 3), head_dim=head_dim, dtype=BF16, device=DEVICE))


@IMPLS
def test_values_by_hand(impl):
    laws.empty_sequence_in_the_middle(impl, DEVICE)
    laws.queries_without_keys(impl, DEVICE)


@EXACT
def test_laws_of_jagged_batches(impl):
    laws.keys_without_queries(impl, DEVICE)
    laws.everything_empty(impl, DEVICE)
    laws.spare_rows_are_zero(impl, DEVICE)
    laws.offsets_of_any_kind(impl, DEVICE)
    laws.own_keys_only(impl, DEVICE)
    laws.strict_products(impl, DEVICE)


@EXACT
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FULL, marks=SLOW)], ids=["bf16", "fp32"])
def test_views_of_a_fused_buffer(impl, dtype):
    laws.views_of_a_fused_buffer(impl, DEVICE, dtype)


@EXACT
@DTYPES
def test_neighbours_do_not_matter(impl, dtype):
    checks.neighbours(impl, DEVICE, dtype, firsts=(1, 63, 64, 65, 127, 128, 129), head_dim=float32_dim(dtype, 64))


def test_neighbours_do_not_matter_in_a_window():
    checks.neighbours("v2", DEVICE, BF16, firsts=(65, 129), head_dim=64, window=20)


@EXACT
@pytest.mark.parametrize("head_dim", [64, 128])
def test_stores_stay_between_guard_rows(impl, head_dim):
    """Outputs and gradients are written inside buffers whose neighbours hold a known value."""
    module = v2_tuned if impl == "v2" else v3_subtraction
    inputs = make_inputs(OP, (1, 65, 0, 129), head_dim=head_dim, dtype=BF16, device=DEVICE)
    settings, offsets = {"scale": 0.1, "window": None, "bias": None}, inputs.q_offsets
    with guarded(7) as buffers:
        o, lse = module.forward(inputs.q, inputs.k, inputs.v, offsets, offsets, **settings)
        module.backward(inputs.do, inputs.q, inputs.k, inputs.v, o, lse, offsets, offsets, **settings)
    assert len(buffers) >= 5


@EXACT
@pytest.mark.parametrize("dtype", [BF16, FULL], ids=["bf16", "fp32"])
def test_company_does_not_matter(impl, dtype):
    laws.company_does_not_matter(impl, DEVICE, dtype)


@EXACT
def test_order_of_sequences_does_not_matter(impl):
    lengths = torch.randint(0, 400, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    inputs = make_inputs(OP, lengths, num_heads=4, head_dim=128, dtype=BF16, device=DEVICE)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(6)).tolist()
    starts = [sum(lengths[:i]) for i in range(40)]
    rows = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in order]).to(DEVICE)
    moved = Inputs(
        *(getattr(inputs, n)[rows] for n in "qkv"), laws.offsets(*(lengths[i] for i in order), device=DEVICE), None,
        inputs.do[rows],
    )  # fmt: skip
    plain, permuted = laws.run(inputs, impl), laws.run(moved, impl)
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(plain[name][rows], permuted[name]), name


@EXACT
def test_random_lengths(impl):
    generator = torch.Generator().manual_seed(2)
    for seed in range(4):
        lengths = (torch.rand(30, generator=generator) ** 3 * 600).long().tolist()
        keys = (torch.rand(30, generator=generator) ** 3 * 600).long().tolist()
        for kv_lengths in (None, keys):
            inputs = make_inputs(
                OP, lengths, kv_lengths, head_dim=128, dtype=BF16, device=DEVICE, seed=seed, spare_rows=5
            )
            laws.against_reference(impl, inputs)


@EXACT
@FEW
def test_shared_queries(impl, dtype):
    checks.shared_queries(impl, DEVICE, dtype)
    head_dim = float32_dim(dtype, 128)
    inputs = make_inputs(OP, (300, 1, 64), shared_q=32, head_dim=head_dim, dtype=dtype, device=DEVICE)
    laws.against_reference(impl, inputs)


@FEW
def test_windows(dtype):
    checks.windows("v2", DEVICE, dtype)
    laws.window_is_symmetric("v2", DEVICE)
    for window in (64, 200, 256):
        inputs = make_inputs(OP, (1000, 3, 129), head_dim=float32_dim(dtype, 128), dtype=dtype, device=DEVICE)
        laws.against_reference("v2", inputs, window=window, roundings=8.0)


@FEW
def test_bias(dtype):
    laws.bias_has_its_gradient("v2", DEVICE, dtype)
    checks.bias_by_scheme(DEVICE, dtype)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(BF16, 128), (FULL, 32), pytest.param(BF16, 64, marks=SLOW), pytest.param(HALF, 64, marks=SLOW)],
    ids=str,
)
@pytest.mark.parametrize("scheme", triton_schemes.SCHEMES)
def test_backward_schemes(scheme, dtype, head_dim):
    checks.scheme(scheme, DEVICE, dtype, head_dim)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(HALF, marks=SLOW)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "loads"])
def test_loads_and_descriptors(dtype, tma):
    """Both ways of reading rows are right for tensors that allow either; descriptors also add up dQ."""
    checks.descriptors(DEVICE, dtype, 64, tma=tma)


@pytest.mark.parametrize("scheme", [s for s in triton_schemes.SCHEMES if s != "atomic"])
def test_schemes_repeat_bit_for_bit(scheme):
    inputs = make_inputs(OP, (300, 1, 700, 0, 65) * 20, num_heads=4, head_dim=128, dtype=BF16, device=DEVICE)
    arguments, settings = checks._scheme_arguments(inputs)
    first, second = (v2_tuned.backward(*arguments, **settings, scheme=scheme) for _ in range(2))
    for name, a, b in zip(("dq", "dk", "dv"), first, second, strict=False):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("tma", [False, True])
@DTYPES
def test_subtraction_inside_its_domain(dtype, tma):
    if tma and dtype == FULL:
        pytest.skip("float32 rows are read by loads")
    checks.subtraction_domain(DEVICE, dtype, tma)


def test_maskings_agree_on_whole_tiles():
    checks.maskings(DEVICE, BF16, block=configs.select("fwd_tma", 16, BF16).block_n)


CANDIDATES = [
    (impl, phase, config)
    for impl, phases in (
        ("v2", ("fwd", "fwd_tma", "fwd_window", "dq", "dq_tma", "dkdv", "dkdv_tma")),
        ("v3", ("fwd_tma",)),
    )
    for phase in phases
    for config in configs.candidates(phase, 128)
]


@pytest.mark.slow
@pytest.mark.parametrize(("impl", "phase", "config"), CANDIDATES, ids=str)
def test_every_candidate_config_agrees(impl, phase, config):
    module = v2_tuned if impl == "v2" else v3_subtraction
    x = make_inputs(OP, (1, 200, 0, 129), head_dim=128, dtype=BF16, device=DEVICE)
    settings = {"scale": 0.1, "window": 40 if phase == "fwd_window" else None, "bias": None}
    offsets, forward = x.q_offsets, module.forward
    if impl == "v2":
        settings["tma"] = not phase.removesuffix("_tma") == phase or phase == "fwd_window"

    def run():
        o, lse = forward(x.q, x.k, x.v, offsets, offsets, **settings)
        if phase.startswith("fwd"):
            return (o,)
        return module.backward(x.do, x.q, x.k, x.v, o, lse, offsets, offsets, **settings)[:3]

    wanted = run()
    with configs.forced(**{phase: config}):
        for value, right in zip(run(), wanted, strict=True):
            assert relative_error(value, right) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("add", triton_schemes.ADDS)
@pytest.mark.parametrize("config", configs.candidates("atomic_tma", 128), ids=str)
def test_every_atomic_config_agrees(config, add):
    arguments, settings = checks._scheme_arguments(
        make_inputs(OP, (1, 200, 0, 129), head_dim=128, dtype=BF16, device=DEVICE)
    )
    wanted = v2_tuned.backward(*arguments, **settings, scheme="split")
    with configs.forced(atomic_tma=config):
        found = v2_tuned.backward(*arguments, **settings, scheme="atomic", add=add)
    for name, value, right in zip(("dq", "dk", "dv"), found, wanted, strict=False):
        assert relative_error(value, right) < 1e-2, name


@pytest.mark.slow
@EXACT
def test_rows_past_two_to_the_31(impl):
    """O11: 262,145 rows of 64 x 128: the last one starts at element 2^31."""
    lengths = torch.full((4097,), 64, dtype=torch.int64)
    lengths[-1] = 1
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(DEVICE)
    rows = int(lengths.sum())
    q = torch.randn(rows, 64, 128, dtype=BF16, device=DEVICE)
    assert q.stride(0) * (rows - 1) == 2**31

    def run(x, at):
        leaf = x.detach().clone().requires_grad_()
        o = jagged_attention(leaf, leaf, leaf, at, impl=impl)
        o.backward(torch.ones_like(o))
        return o.detach(), leaf.grad

    o, grad = run(q, offsets)
    for start, stop in ((rows - 1, rows), (0, 64), (rows - 65, rows - 1)):
        alone = run(q[start:stop], laws.offsets(stop - start, device=DEVICE))
        assert torch.equal(o[start:stop], alone[0]) and torch.equal(grad[start:stop], alone[1]), (start, stop)


_FIRST_CALL = """
import torch
from kernels.jfa import configs, v2_tuned
from kernels.testing import make_inputs
assert len(configs.candidates("dkdv_tma", 64)) > 1
for lengths in ((130, 5), (300,)):
    x = make_inputs("jagged_attention", lengths, head_dim=64, dtype=torch.bfloat16, device="cuda")
    s = {"scale": 0.1, "window": None, "bias": None}
    o, lse = v2_tuned.forward(x.q, x.k, x.v, x.q_offsets, x.q_offsets, **s)
    def run(scheme):
        return v2_tuned.backward(x.do, x.q, x.k, x.v, o, lse, x.q_offsets, x.q_offsets, **s, scheme=scheme)[:3]
    first, second, other = run("atomic"), run("atomic"), run("split")
    for a, b, c in zip(first, second, other):
        assert (a.float() - b.float()).norm() <= 2e-3 * b.float().norm()
        assert (a.float() - c.float()).norm() <= 1e-2 * c.float().norm()
print("same")
"""


def test_first_call_equals_second():
    """O25: in a fresh process, for every new shape, the accumulated gradient is right the first time."""
    run = subprocess.run([sys.executable, "-c", _FIRST_CALL], capture_output=True, text=True, timeout=250)
    assert run.stdout.strip() == "same", run.stderr[-1500:]


@pytest.mark.parametrize("impl", ["v2", "v3"])
def test_opcheck(impl):
    from kernels.jfa.function import jagged_attention_op

    inputs = make_inputs(OP, (33, 0, 65), head_dim=64, dtype=BF16, device=DEVICE)
    q, k, v = (x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    settings = (None, None, 0.125, None, None, None, None, None, [], impl)
    torch.library.opcheck(
        jagged_attention_op, (q, k, v, inputs.q_offsets, inputs.q_offsets, *settings), atol=2e-2, rtol=2e-2
    )  # fmt: skip


@pytest.mark.parametrize("impl", ["v2", "v3"])
def test_compiles_without_graph_breaks(impl):
    inputs = make_inputs(OP, (33, 0, 65), head_dim=64, dtype=BF16, device=DEVICE)

    def loss(q, k, v, offsets):
        return (jagged_attention(q, k, v, offsets, impl=impl) * inputs.do).sum()

    def gradients(function):
        leaves = inputs.leaves()
        function(leaves.q, leaves.k, leaves.v, leaves.q_offsets).backward()
        return leaves.q.grad, leaves.k.grad, leaves.v.grad

    torch._dynamo.reset()
    for a, b in zip(gradients(torch.compile(loss, fullgraph=True)), gradients(loss), strict=True):
        assert relative_error(a, b) < 1e-2


@EXACT
def test_nothing_synchronises(impl):
    """Forward and backward never wait for the device: offsets are read there only."""
    inputs = make_inputs(OP, (100, 3), head_dim=64, dtype=BF16, device=DEVICE)
    module = v2_tuned if impl == "v2" else v3_subtraction
    settings = {"scale": 0.1, "window": None, "bias": None}

    def run():
        offsets = inputs.q_offsets
        o, lse = module.forward(inputs.q, inputs.k, inputs.v, offsets, offsets, **settings)
        return module.backward(inputs.do, inputs.q, inputs.k, inputs.v, o, lse, offsets, offsets, **settings)

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bias_and_window_together_with_spare_rows():
    table = torch.randn(2, 9, device=DEVICE)
    inputs = make_inputs(OP, (100, 0, 37), head_dim=64, dtype=BF16, device=DEVICE, spare_rows=3)
    with poisoned():
        laws.against_reference("v2", inputs, bias=Bias(table), window=30, roundings=8.0)
