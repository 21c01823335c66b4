"""Worked cases of gdpa: faults that others hit, with the right value, for the reference and eager."""

import itertools
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import flops, gdpa
from kernels.padded_batch import row_index, whole_vectors
from kernels.testing import make_inputs, poisoned

from .bad_offsets import BAD_OFFSETS, ROWS
from .gdpa_calls import both, offsets, run, toy

T1 = {
    "silu": (
        (18.3470, 41.04215, 899.8889),
        (22.74336, 22.14408, 300.2961),
        (3.109239, 31.96113, 300.2961),
        (2.492653, 5.689649, 8.998889),
    ),
    "gelu": (
        (20.38634, 41.95323, 900.0),
        (22.78795, 21.09530, 300.0),
        (3.253779, 30.86239, 300.0),
        (2.795844, 5.954373, 9.0),
    ),
}


@both
@pytest.mark.parametrize("activation", T1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_o01_empty_sequence_in_the_middle(impl, activation, dtype):
    o = toy((1, 2, 3), (1, 2, 3), (1, 10, 100), offsets(2, 0, 1), None, impl, dtype, activation=activation)
    for actual, expected in zip(o, T1[activation], strict=True):
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=0)


@both
def test_o02_queries_without_keys(impl):
    arguments = (1, 2, 3, 4, 5), (1, 2, 3, 4, 0.5, -0.5), (1, 2, 3, 4, 5, 6), offsets(2, 1, 0, 2), offsets(1, 0, 3, 2)
    expected = (
        (0.7310586, 1.761594, 0, 7.377536, 10.41390),
        (0.9276705, 1.090784, 0, 2.999313, 3.046706),
        (3.109239, 0, 0, 0, 49.30071, -5.160855),
        (2.492653, 0, 0, 0, 4.071949, -0.4280513),
    )
    o, dq, dk, dv = toy(*arguments, impl, activation="silu")
    for actual, want in zip((o, dq, dk, dv), expected, strict=True):
        torch.testing.assert_close(actual, torch.tensor(want, dtype=torch.float64), rtol=2e-6, atol=1e-6)
    for empty in (o[2:3], dq[2:3], dk[1:4], dv[1:4]):
        assert empty.eq(0).all()
    o = toy(*arguments, impl, activation="gelu")[0]
    want = torch.tensor((0.8413447, 1.954500, 0, 9.499497, 12.32923), dtype=torch.float64)
    torch.testing.assert_close(o, want, rtol=2e-6, atol=1e-6)


@both
def test_o03_keys_without_queries(impl):
    inputs = make_inputs("gdpa", (0, 0, 500), (0, 1, 999), head_dim=128, dtype=torch.bfloat16)
    with poisoned():
        o, dq, dk, dv = run(inputs, impl=impl, activation="silu")
    assert dk[0].eq(0).all() and dv[0].eq(0).all()
    alone = make_inputs("gdpa", (500,), (999,), head_dim=128, dtype=torch.bfloat16)
    alone.q, alone.k, alone.v, alone.do = inputs.q, inputs.k[1:], inputs.v[1:], inputs.do
    for batch, own in zip((o, dq, dk[1:], dv[1:]), run(alone, impl=impl, activation="silu"), strict=True):
        assert torch.equal(batch, own)


@both
@pytest.mark.parametrize("lengths", [(0, 0, 0), ()])
@pytest.mark.parametrize("shared", [None, 3])
def test_o04_empty_batch(impl, lengths, shared):
    inputs = make_inputs("gdpa", lengths, num_heads=4, head_dim=64, shared_q=shared)
    o, dq, dk, dv = run(inputs, impl=impl)
    assert o.shape == ((0, 4, 64) if shared is None else (len(lengths), 3, 4, 64))
    assert dk.shape == dv.shape == (0, 4, 64) and dq.shape == inputs.q.shape
    assert all(x.eq(0).all() for x in (o, dq))


@both
def test_o05_spare_rows_past_the_end(impl):
    """x -> Linear -> q, k, v -> gdpa -> Linear on 904 rows of which 901 are used: the gradients of the 901-row run."""
    generator = torch.Generator().manual_seed(5)
    ends = torch.tensor([0, 130, 400, 901])
    x = torch.randn(904, 24, generator=generator)
    into = torch.randn(96, 24, generator=generator) / 5
    out = torch.randn(8, 32, generator=generator) / 5

    def train(rows):
        w_in, w_out = into.clone().requires_grad_(), out.clone().requires_grad_()
        qkv = x[:rows] @ w_in.T
        qkv.retain_grad()
        q, k, v = qkv.view(rows, 2, 48).split(16, dim=-1)
        o = gdpa(q, k, v, ends, activation="silu", scale=0.1, impl=impl)
        keep = torch.zeros(rows, 1)
        keep[:901] = 1
        (o.flatten(1) @ w_out.T * keep).sum().backward()
        return o.detach(), qkv.grad, w_in.grad, w_out.grad

    with poisoned():
        o, d_qkv, d_in, d_out = train(904)
    assert o[901:].eq(0).all() and d_qkv[901:].eq(0).all()
    o_own, d_qkv_own, d_in_own, d_out_own = train(901)
    assert torch.equal(o[:901], o_own) and torch.equal(d_qkv[:901], d_qkv_own)
    torch.testing.assert_close(d_in, d_in_own, rtol=1e-5, atol=1e-4)  # the linear layer's own sum over other row counts
    torch.testing.assert_close(d_out, d_out_own, rtol=1e-5, atol=1e-4)
    poison = make_inputs("gdpa", (130, 270, 501), spare_rows=3)
    for result, rows in zip(run(poison, impl=impl), (901,) * 4, strict=True):
        assert result.isfinite().all() and result[rows:].eq(0).all()


def test_o06_hint_that_lies():
    inputs = make_inputs("gdpa", (5, 300, 20))
    with pytest.raises(ValueError, match=r"256.*300"):
        gdpa(*inputs.args, max_q_len=256)
    with pytest.raises(ValueError, match=r"256.*300"):
        gdpa(*inputs.args, max_kv_len=256)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_taylor6"])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_o07_batch_mates_change_no_bit(activation, cross, threads):
    """Sequence A alone, in ten random companies, at any place, with hints: the same bits forward and backward."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(7)
        own_q, own_kv = (37, 21) if cross else (37, 37)
        own = make_inputs("gdpa", (own_q,), (own_kv,) if cross else None, seed=3)
        alone = run(own, activation=activation, scale=0.7)
        for trial in range(10):
            mates_q = torch.randint(0, 200, (6,), generator=generator).tolist()
            mates_kv = torch.randint(0, 70, (6,), generator=generator).tolist() if cross else mates_q
            if trial % 2:  # companions of the same class land in the same group
                mates_q, mates_kv = [40] * 6, ([22] * 6 if cross else [40] * 6)
            place = trial % 7
            mates_q.insert(place, own_q), mates_kv.insert(place, own_kv)
            batch = make_inputs("gdpa", mates_q, mates_kv if cross else None, seed=100 + trial)
            q0, k0 = sum(mates_q[:place]), sum(mates_kv[:place])
            rows_q, rows_k = slice(q0, q0 + own_q), slice(k0, k0 + own_kv)
            batch.q[rows_q], batch.do[rows_q], batch.k[rows_k], batch.v[rows_k] = own.q, own.do, own.k, own.v
            hints = {"max_q_len": 4096, "max_kv_len": 4096} if trial % 3 == 0 else {}
            result = run(batch, activation=activation, scale=0.7, **hints)
            for got, want, rows in zip(result, alone, (rows_q, rows_q, rows_k, rows_k), strict=True):
                assert torch.equal(got[rows], want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_o07_twins_are_equal_across_thread_borders(activation):
    """Equal sequences share one group that three threads divide at places inside a sequence: still equal bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        own = make_inputs("gdpa", (30,), seed=4)
        for count in (34, 35):  # over 65,536 scores, which no third divides
            twins = make_inputs("gdpa", (30,) * count)
            twins.q, twins.k, twins.v, twins.do = (x.repeat(count, 1, 1) for x in (own.q, own.k, own.v, own.do))
            for result in run(twins, activation=activation):
                each = result.view(count, 30, 2, 16)
                assert torch.equal(each, each[:1].expand_as(each))
    finally:
        torch.set_num_threads(before)


def test_whole_vectors_gives_every_thread_whole_vectors():
    before = torch.get_num_threads()
    try:
        for threads, count, unit in itertools.product((1, 2, 3, 5, 8), (1, 7, 100, 333), (64, 192, 2048)):
            torch.set_num_threads(threads)
            batch = whole_vectors(count, unit, torch.device("cpu"))
            shares = max(1, min(threads, math.ceil(batch * unit / 32768)))
            assert batch >= count and batch * unit % (64 * shares) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", BAD_OFFSETS)
def test_o08_bad_offsets_are_named(kind):
    bad, message = BAD_OFFSETS[kind]
    x = torch.randn(ROWS, 2, 8)
    with pytest.raises(ValueError, match=f"^q_offsets: {message}"):
        gdpa(x, x, x, bad)
    with pytest.raises(ValueError, match=f"^kv_offsets: {message}"):
        gdpa(x, x, x, None, bad)


@both
def test_o09_offsets_of_any_integer_kind(impl):
    inputs = make_inputs("gdpa", (7, 0, 65, 3))
    ends = inputs.q_offsets
    strided = torch.stack([ends, ends + 99], dim=1).flatten()[::2]
    assert not strided.is_contiguous()
    want = run(inputs, impl=impl)
    for other in (ends.int(), strided, strided.int()):
        inputs.q_offsets = other
        assert all(torch.equal(a, b) for a, b in zip(run(inputs, impl=impl), want, strict=True))


@both
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("lengths", [(65, 1, 64), (63, 64, 127), (128, 129, 1)])
def test_o10_neighbours_are_never_read(impl, activation, poison, lengths):
    inputs = make_inputs("gdpa", lengths, head_dim=16)
    clean = run(inputs, impl=impl, activation=activation)
    middle = slice(lengths[0], lengths[0] + lengths[1])
    for x in (inputs.q, inputs.k, inputs.v, inputs.do):
        x[middle] = poison
    leaves = inputs.leaves()
    o = gdpa(*leaves.args, impl=impl, activation=activation)
    o.backward(leaves.do)
    for got, want in zip((o, leaves.q.grad, leaves.k.grad, leaves.v.grad), clean, strict=True):
        for rows in (slice(0, lengths[0]), slice(middle.stop, None)):
            assert torch.equal(got[rows].detach(), want[rows])


def test_o11_row_numbers_past_two_to_the_31():
    """The last of 262,145 rows of 64 heads x 128 columns starts at element 2^31: the index must not wrap."""
    x = torch.empty(1, 1, 1).expand(262_145, 64, 128)
    index = row_index(torch.tensor([262_144]), torch.tensor([1]), 8, 1, x)
    assert index.dtype == torch.int64
    assert int(index[0, 0, 0]) * 128 == 2_147_483_648
    assert index[0, :, 1:].eq(262_145 * 64).all()


@both
def test_o12_views_of_a_fused_buffer(impl):
    generator = torch.Generator().manual_seed(1)
    buffer = torch.randn(130, 2048, generator=generator) / 11
    ends = offsets(100, 0, 30)
    do = torch.randn(130, 4, 128, generator=generator)

    def call(buffer, copy):
        buffer = buffer.clone().requires_grad_()
        parts = [x.view(130, 4, 128) for x in buffer.split(512, dim=1)][1:]
        q, k, v = [x.contiguous() for x in parts] if copy else parts
        o = gdpa(q, k, v, ends, impl=impl)
        o.backward(do)
        return o.detach(), buffer.grad

    buffer[:, :512] = float("nan")
    views, copies = call(buffer, False), call(buffer, True)
    assert torch.equal(views[0], copies[0]) and torch.equal(views[1], copies[1])
    assert views[1][:, :512].eq(0).all() and views[1][:, 512:].abs().sum() > 0


@both
@pytest.mark.parametrize(
    ("q_lengths", "kv_lengths", "heads", "head_dim"),
    [((0, 1, 1, 0), (0, 4, 2, 0), 6, 16), ((0, 0, 0, 0, 1), None, 2, 72)],
)
def test_o13_one_query_at_most(impl, q_lengths, kv_lengths, heads, head_dim):
    inputs = make_inputs("gdpa", q_lengths, kv_lengths, num_heads=heads, head_dim=head_dim)
    o = run(inputs, impl=impl)[0]
    assert o.shape == (sum(q_lengths), heads, head_dim)
    row = key = 0
    for q_len, kv_len in zip(q_lengths, kv_lengths or q_lengths, strict=True):
        if q_len:
            q, k, v = inputs.q[row : row + 1], inputs.k[key : key + kv_len], inputs.v[key : key + kv_len]
            assert torch.equal(o[row : row + 1], gdpa(q, k, v, offsets(1), offsets(kv_len), impl=impl))
        row, key = row + q_len, key + kv_len


@both
@pytest.mark.parametrize("head_dim", [1, 16, 40, 72, 80, 96, 104, 128, 192])
def test_o14_any_head_dim_uses_its_last_column(impl, head_dim):
    q, v = torch.zeros(73, 2, head_dim), torch.ones(73, 2, head_dim)
    q[0, :, -1] = 1
    o = gdpa(q, q.clone(), v, offsets(70, 3), activation="silu", impl=impl)
    torch.testing.assert_close(o[0], torch.full((2, head_dim), 0.7310586), rtol=1e-6, atol=0)


@both
def test_o15_nothing_crosses_a_border(impl):
    inputs = make_inputs("gdpa", (3, 2))
    inputs.v[:3] = 1
    alone = gdpa(inputs.q[:3], inputs.k[:3], inputs.v[:3], offsets(3), impl=impl)
    inputs.v[3:] = 1000
    assert torch.equal(gdpa(*inputs.args, impl=impl)[:3], alone)


@both
def test_o17_cross_attention_uses_its_own_keys(impl):
    """v is one-hot in the key's index, scores are all 1: the output shows which keys each query saw."""
    q, k, v = torch.ones(5, 1, 7), torch.full((7, 1, 7), 1 / 7), torch.eye(7)[:, None]
    o = gdpa(q, k, v, offsets(4, 1), offsets(1, 6), activation="relu", impl=impl)
    want = torch.zeros(5, 1, 7)
    want[:4, :, 0] = 1
    want[4, :, 1:] = 1
    torch.testing.assert_close(o, want)


@both
@pytest.mark.parametrize(("length", "heads"), [(6, 4), (6, 1), (1, 4), (1, 1)])
def test_o18_batch_of_one_keeps_its_shape(impl, length, heads):
    inputs = make_inputs("gdpa", (length,), num_heads=heads, head_dim=32)
    assert all(x.shape == (length, heads, 32) for x in run(inputs, impl=impl))


@both
@pytest.mark.parametrize("score", [9, 10, 11, 13.24, -13.24, 20, 50, 1e4])
def test_o21_large_scores_stay_finite(impl, score):
    root = math.sqrt(abs(score))
    o, dq, _, _ = toy((root,), (math.copysign(root, score),), (1,), offsets(1), None, impl, activation="gelu_tanh")
    assert o.item() == pytest.approx(max(score, 0.0), rel=1e-6, abs=1e-5)
    assert dq.item() == pytest.approx(root if score > 0 else 0.0, rel=1e-5, abs=1e-5)


@both
def test_o22_the_chosen_gelu_is_the_same_in_both_passes(impl):
    def call(score, name):
        return toy((score,), (1,), (1,), offsets(1), None, impl, activation=name)

    assert call(1.0, "gelu")[0].item() == pytest.approx(0.841344746, abs=1e-6)
    assert call(1.0, "gelu_tanh")[0].item() == pytest.approx(0.841191991, abs=1e-6)
    slopes = [call(2.01865, name)[1].item() for name in ("gelu", "gelu_tanh")]
    assert abs(slopes[0] - slopes[1]) == pytest.approx(8.68e-4, abs=5e-6)


@both
def test_o23_float32_is_not_tf32(impl):
    x = 1 + 2**-12
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # what a training script may allow elsewhere
    try:
        o = toy((x,), (x,), (1,), offsets(1), None, impl, activation="silu")[0]
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert o.item() == pytest.approx(0.731511634, abs=1e-6)


@both
@pytest.mark.parametrize("lengths", [(3, 0, 5, 100)])
def test_o42_o43_o44_the_flop_counter_sees_useful_pairs(impl, lengths):
    inputs = make_inputs("gdpa", lengths, num_heads=4, head_dim=64).leaves()
    with FlopCounterMode(display=False) as forward:
        o = gdpa(*inputs.args, impl=impl)
    with FlopCounterMode(display=False) as backward:
        o.backward(inputs.do)
    assert forward.get_total_flops() == 10_274_816
    assert backward.get_total_flops() == 20_549_632
    assert flops.gdpa(lengths, None, 4, 64, phase="bwd_kernel") == 25_687_040
    cross = make_inputs("gdpa", (3, 4), (5, 0), num_heads=4, head_dim=64).leaves()
    with FlopCounterMode(display=False) as counter:
        gdpa(*cross.args, impl=impl)
    assert counter.get_total_flops() == 4 * 4 * 64 * 15
    shared = make_inputs("gdpa", (3, 4), (5, 2), num_heads=4, head_dim=64, shared_q=6).leaves()
    with FlopCounterMode(display=False) as counter:
        gdpa(*shared.args, impl=impl)
    assert counter.get_total_flops() == 4 * 4 * 64 * 6 * 7
