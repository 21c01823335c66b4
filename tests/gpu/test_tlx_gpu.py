"""TLX attention and GDPA on a Hopper GPU against the reference in float64, forward and every gradient.

Needs fbtriton in place of stock Triton (envs/gpu-tlx.txt). 1,000 random batches:
    pytest -m "gpu and slow" tests/gpu/test_tlx_gpu.py
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels
from kernels.jagged import lengths_to_offsets

pytestmark = pytest.mark.gpu
tlx = pytest.importorskip("triton.language.extra.tlx", reason="needs fbtriton (envs/gpu-tlx.txt)")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from kernels import tlx_backward  # noqa: E402  these need fbtriton
from kernels.gdpa import tlx as gdpa_tlx  # noqa: E402
from kernels.jfa import v4_tlx  # noqa: E402

ACTIVATIONS = ("gelu_tanh", "gelu_taylor6", "silu", "relu")
SELF = [[65, 0, 1, 64, 300, 127], [1], [0, 0, 5], [1000, 5, 0, 700], [128, 128], [129, 63, 257]]
CROSS = [
    ([5, 2], [0, 0]),
    ([0, 0], [3, 70]),
    ([4, 1, 0, 65], [1, 6, 70, 256]),
    ([3, 200, 0, 129], [1, 0, 70, 300]),
    ([512], [64]),
    ([0, 7], [9, 0]),
]


def inputs(q_lengths, kv_lengths, heads, dim, dtype=torch.bfloat16, spare=0, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    q_offsets = None if isinstance(q_lengths, int) else lengths_to_offsets(torch.tensor(q_lengths)).cuda()
    kv_offsets = q_offsets if kv_lengths is None else lengths_to_offsets(torch.tensor(kv_lengths)).cuda()
    rows = q_lengths if isinstance(q_lengths, int) else sum(q_lengths) + spare
    kv_rows = rows if kv_lengths is None else sum(kv_lengths) + spare

    def make(n, scale):
        return (torch.randn(n, heads, dim, device="cuda", generator=g) * scale).to(dtype).requires_grad_()

    return make(rows, 0.5), make(kv_rows, 0.5), make(kv_rows, 1.0), q_offsets, kv_offsets


def call(op, q, k, v, qo, ko, impl, **kwargs):
    f = kernels.jagged_attention if op == "jfa" else kernels.gdpa
    return f(q, k, v, qo, None if ko is qo else ko, impl=impl, **kwargs)


def compare(op, q, k, v, qo, ko, impl, **kwargs):
    """Error of (o, dq, dk, dv) against float64 eager stays within twice that of same-dtype eager plus one rounding."""
    grad = None
    results = {}
    for name, dtype, how in (("exact", torch.float64, "eager"), ("eager", None, "eager"), ("ours", None, impl)):
        a = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (q, k, v)]
        o = call(op, *a, qo, ko, how, **kwargs)
        if grad is None:
            grad = torch.randn(o.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        results[name] = [o.detach(), *torch.autograd.grad(o, a, grad.to(o.dtype))]
    names = ("o", "dq", "dk", "dv")
    for ours, eager, exact, name in zip(results["ours"], results["eager"], results["exact"], names, strict=True):
        assert ours.shape == exact.shape and torch.isfinite(ours).all(), name
        if not exact.numel():
            continue
        size = exact.norm().clamp_min(1e-30)
        error = ((ours.double() - exact).norm() / size).item()
        budget = 2.0 * ((eager.double() - exact).norm() / size).item() + 2.0**-8
        if exact.abs().max() == 0:
            assert ours.abs().max() <= 1e-4, name  # one key a query: dq and dk cancel to rounding
        else:
            assert error <= budget, f"{name}: {error:.2e} > {budget:.2e}"
    return results["ours"]


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gdpa_self_cross_and_shared_queries(activation, dim):
    for lengths in SELF:
        compare("gdpa", *inputs(lengths, None, 4, dim, spare=3), "tlx", activation=activation, scale=0.1)
    for q_lengths, kv_lengths in CROSS:
        compare("gdpa", *inputs(q_lengths, kv_lengths, 4, dim), "tlx", activation=activation, scale=0.1)
    compare("gdpa", *inputs(32, [5, 0, 300, 64], 4, dim), "tlx", activation=activation, scale=0.1)


@pytest.mark.parametrize("dim", [64, 128])
def test_softmax_self_cross_and_shared_queries(dim):
    for lengths in SELF:
        compare("jfa", *inputs(lengths, None, 4, dim, spare=3), "v4")
    for q_lengths, kv_lengths in CROSS:
        compare("jfa", *inputs(q_lengths, kv_lengths, 4, dim), "v4")
    compare("jfa", *inputs(32, [5, 0, 300, 64], 4, dim), "v4")


@pytest.mark.parametrize("window", [0, 1, 64, 100])
def test_window(window):
    for lengths in ([65, 0, 1, 500], [300, 129]):
        compare("jfa", *inputs(lengths, None, 4, 128), "v4", window=window)


@pytest.mark.parametrize("score", [-12.0, -30.0, -80.0])
def test_softmax_of_very_negative_scores(score):
    """Zero-filled keys have score 0: they must not drown real keys whose scores all lie far below."""
    for length in (1, 65, 129):
        q, k, v, qo, ko = inputs([length], None, 4, 128)
        with torch.no_grad():
            q.zero_()[..., 0] = 1.0
            k.zero_()[..., 0] = score
        compare("jfa", q, k, v, qo, ko, "v4", scale=1.0)


def test_window_of_very_negative_scores():
    """A row whose window begins in the second key block has no key in the first: its maximum must not stay at 0."""
    q, k, v, qo, ko = inputs([400], None, 4, 128)
    with torch.no_grad():
        q.zero_()[..., 0] = 1.0
        k.zero_()[..., 0] = -120.0
    compare("jfa", q, k, v, qo, ko, "v4", scale=1.0, window=20)


@pytest.mark.parametrize("op,impl", [("jfa", "v4"), ("gdpa", "tlx")])
def test_neighbours_do_not_matter(op, impl):
    """NaN in the middle sequence changes no bit of the others; a permuted batch gives permuted results."""
    q, k, v, qo, _ = inputs([65, 70, 64, 200], None, 4, 128)
    grad = torch.randn_like(q)
    kwargs = {} if op == "jfa" else {"activation": "gelu_tanh", "scale": 0.1}

    def run(a, offsets, g):
        a = [x.detach().clone().requires_grad_() for x in a]
        o = call(op, *a, offsets, offsets, impl, **kwargs)
        return [o.detach(), *torch.autograd.grad(o, a, g)]

    clean = run((q, k, v), qo, grad)
    dirty = [x.detach().clone() for x in (q, k, v, grad)]
    for x in dirty:
        x[65:135] = float("nan")
    for a, b in zip(clean, run(dirty[:3], qo, dirty[3]), strict=True):
        assert torch.equal(a[:65], b[:65]) and torch.equal(a[135:], b[135:])
    order = torch.cat(
        [torch.arange(199, 399), torch.arange(65, 135), torch.arange(0, 65), torch.arange(135, 199)]
    ).cuda()
    offsets = lengths_to_offsets(torch.tensor([200, 70, 65, 64])).cuda()
    permuted = run([x[order] for x in (q, k, v)], offsets, grad[order])
    for a, b in zip(clean, permuted, strict=True):
        assert torch.equal(a[order], b)


@pytest.mark.parametrize("op,impl", [("jfa", "v4"), ("gdpa", "tlx")])
def test_views_of_a_fused_buffer(op, impl):
    buffer = torch.randn(130, 3 * 512, device="cuda", dtype=torch.bfloat16)
    q, k, v = (buffer[:, 512 * i : 512 * (i + 1)].view(130, 4, 128) for i in range(3))
    offsets = lengths_to_offsets(torch.tensor([100, 0, 30])).cuda()
    kwargs = {} if op == "jfa" else {"activation": "gelu_tanh", "scale": 0.1}
    a = call(op, q, k, v, offsets, offsets, impl, **kwargs)
    b = call(op, q.contiguous(), k.contiguous(), v.contiguous(), offsets, offsets, impl, **kwargs)
    assert torch.equal(a, b)


@pytest.mark.parametrize("lengths", [[65, 0, 1, 700], [64, 128, 129, 1], [1500, 3]])
def test_keys_a_block_and_late_waits_change_no_bit(lengths):
    """What a call may choose by its sequences' average length must not show in its result."""
    q, k, v, qo, ko = (x.detach() for x in inputs(lengths, None, 4, 128))
    tiles = [gdpa_tlx.Config(2, 64, 3, 2), gdpa_tlx.Config(2, 128, 2, 2)]
    a, b = (gdpa_tlx.forward_with(c, q, k, v, qo, ko, activation="gelu_tanh", scale=0.1) for c in tiles)
    assert torch.equal(a, b)
    waits = [v4_tlx.Config(2, 128, 2, 2), v4_tlx.Config(2, 128, 2, 2, late_wait=True)]
    a, b = (v4_tlx.forward_with(c, q, k, v, qo, ko, scale=0.1) for c in waits)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("config", ["chunks", "plain"])
def test_ways_of_dq(config, monkeypatch):
    """The order in which parts of dQ pass through shared memory, and where their scale goes, changes no result."""
    chosen = {"chunks": {"chunks": True}, "plain": {"fold_scale": False}}[config]
    monkeypatch.setattr(tlx_backward, "default_config", lambda dense: tlx_backward.Config(**chosen))
    for lengths in (*SELF, [2500, 1000, 3], [64] * 40 + [1030]):
        compare("jfa", *inputs(lengths, None, 4, 128, spare=3), "v4")
        compare("gdpa", *inputs(lengths, None, 4, 128, spare=3), "tlx", activation="gelu_tanh", scale=0.1)
    compare("jfa", *inputs([40, 3, 700], [2000, 20000, 900], 4, 128), "v4")


@pytest.mark.parametrize("lengths", [[0], [500, 3, 0, 1000, 129], [700] * 50, list(range(0, 900, 7))])
@pytest.mark.parametrize("queries", [1, 32, 64])
def test_few_shared_queries(lengths, queries):
    """One query tile whose dQ stays on chip, more sequences than multiprocessors included; the same bits every time."""
    first = compare("jfa", *inputs(queries, lengths, 4, 128), "v4")
    again = compare("jfa", *inputs(queries, lengths, 4, 128), "v4")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    compare("gdpa", *inputs(queries, lengths, 4, 128), "tlx", activation="silu", scale=0.1)


@pytest.mark.parametrize(
    ("op", "impl", "lengths", "other", "heads", "dim"),
    [
        ("jfa", "v4", [1, 0], [0, 0], 2, 128),
        ("jfa", "v4", [3, 4, 4, 2, 3], None, 1, 128),
        ("jfa", "v4", [0], None, 7, 128),
        ("jfa", "v4", [0, 0], [3, 1], 2, 128),
        ("gdpa", "tlx", [0, 0, 0], [4, 1, 0], 8, 64),
        ("gdpa", "tlx", [3], [0], 6, 64),
        ("gdpa", "tlx", [0, 0], [3, 1], 2, 128),
        ("gdpa", "tlx", [1, 0], [0, 0], 2, 128),
    ],
)
def test_suspects(op, impl, lengths, other, heads, dim):
    """Single rows, and sides without any row: what may have broken a run of the thousand batches (jfa/TUNING.md)."""
    keywords = {} if op == "jfa" else {"activation": "gelu_tanh", "scale": 0.05}
    compare(op, *inputs(lengths, other, heads, dim), impl, **keywords)
    torch.cuda.synchronize()


@pytest.mark.slow
def test_ten_thousand_launches_do_not_hang():
    """In a process of its own, so that a kernel that waits for ever is a failure and not the end of the run."""
    command = [sys.executable, "-m", "tests.gpu.sanitize", "--launches", "10000"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    assert done.stdout.splitlines()[-1] == "10000 launches"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_batches(part):
    """The same thousand whoever runs them: every tenth, so that ten processes can share the work."""
    g = torch.Generator().manual_seed(7)
    for case in range(1000):
        batch = int(torch.randint(1, 9, (1,), generator=g))
        high = int(torch.tensor([4, 70, 300, 1200, 3000])[torch.randint(0, 5, (1,), generator=g)])
        lengths = torch.randint(0, high + 1, (batch,), generator=g).tolist()
        other = torch.randint(0, high + 1, (batch,), generator=g).tolist() if case % 3 == 1 else None
        heads, dim = int(torch.randint(1, 9, (1,), generator=g)), (64, 128)[case % 2]
        if case % 10 != part:
            continue
        tensors = inputs(lengths, other, heads, dim, seed=case)
        try:
            if case % 2:
                compare("jfa", *tensors, "v4")
            else:
                compare("gdpa", *tensors, "tlx", activation=ACTIVATIONS[case // 2 % 4], scale=0.05)
        except Exception as error:
            error.add_note(f"case {case}: lengths {lengths}, {other}, {heads} heads of {dim}")
            raise
