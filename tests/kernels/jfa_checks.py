"""Named checks of jagged attention, for any implementation and device: AssertionError when a law is broken.

The tests call them for every implementation that runs here, the mutants call them to see that they can fail.
"""

from __future__ import annotations

from unittest import mock

import torch

from kernels import Bias, jagged_attention
from kernels.jagged import lengths_to_offsets, row_ids
from kernels.testing import LENGTH_PATTERNS, Inputs, assert_within_eager, make_inputs, poisoned

PATTERNS = {pattern.name: pattern for pattern in LENGTH_PATTERNS}


def offsets(*lengths: int, dtype: torch.dtype = torch.int64, device="cpu") -> torch.Tensor:
    return lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64), dtype).to(device)


def run(inputs: Inputs, impl: str, **keywords) -> dict[str, torch.Tensor]:
    """Output and gradients of a call on fresh leaves, with NaN in every buffer that nobody wrote."""
    leaves = inputs.leaves()
    bias = keywords.get("bias")
    if bias is not None:
        keywords["bias"] = bias = Bias(bias.table.detach().clone().requires_grad_(), bias.positions)
    with poisoned():
        o = jagged_attention(*leaves.args, impl=impl, **keywords)
        o.backward(leaves.do)
    results = {"o": o.detach(), "dq": leaves.q.grad, "dk": leaves.k.grad, "dv": leaves.v.grad}
    if bias is not None:
        results["dtable"] = bias.table.grad
    return results


def against_reference(impl: str, inputs: Inputs, *, roundings: float = 4.0, draws: float = 1.0, **keywords) -> None:
    """Every result is as close to the float64 reference as the same-dtype reference is, up to rounding.

    draws: how many times the same-dtype reference's own error. Where all terms of a sum cancel, what is left are the
    roundings of the terms to the half dtype, and two right results are two draws of those: then more than 1.
    """
    wide = inputs.leaves(torch.float64)
    wide_keywords = dict(keywords)
    if keywords.get("bias") is not None:
        wide_keywords["bias"] = Bias(keywords["bias"].table.double(), keywords["bias"].positions)
    exact = run(Inputs(wide.q, wide.k, wide.v, *inputs.args[3:], wide.do), "reference", **wide_keywords)
    own = run(inputs, "reference", **keywords)
    actual = run(inputs, impl, **keywords)
    empty_pairs_are_zero(inputs, actual)
    # Size of the terms that cancel: ds = p (dO v - dO o), then a sum over rows times k or q.
    norm = {n: getattr(inputs, n).nan_to_num().double().norm(dim=-1).flatten() for n in ("q", "k", "v", "do")}
    high = {n: x.max().item() if x.numel() else 0.0 for n, x in norm.items()}
    ds = high["do"] * high["v"]
    scale = inputs.q.shape[-1] ** -0.5 if keywords.get("scale") is None else keywords["scale"]
    terms = {"o": 0.0, "dv": 0.0, "dq": scale * ds * high["k"], "dk": scale * ds * high["q"], "dtable": ds}
    if inputs.q.dtype in (
        torch.bfloat16,
        torch.float16,
    ):  # ds holds dO o, and o was rounded to the half dtype: one unit of it
        terms["dtable"] *= torch.finfo(inputs.q.dtype).eps / torch.finfo(torch.float32).eps / roundings
    for name, value in actual.items():
        plain = own[name] if draws == 1 else (exact[name] + draws * (own[name] - exact[name])).to(own[name].dtype)
        assert_within_eager(value, plain, exact[name], name=name, roundings=roundings, terms=terms[name])


def empty_pairs_are_zero(inputs: Inputs, got: dict[str, torch.Tensor]) -> None:
    """Rows of queries without keys, of keys without queries and past the ends: exact zeros in outputs and gradients."""
    kv_offsets = inputs.q_offsets if inputs.kv_offsets is None else inputs.kv_offsets
    kv_lengths = kv_offsets.diff()
    if inputs.q_offsets is None:
        assert torch.count_nonzero(got["o"][kv_lengths == 0]) == 0, "o of an empty sequence"
        q_lengths = torch.full_like(kv_lengths, inputs.q.shape[0])
    else:
        q_lengths = inputs.q_offsets.diff()
        paired = torch.cat([kv_lengths > 0, kv_lengths.new_zeros(1, dtype=torch.bool)])
        rows = ~paired[row_ids(inputs.q_offsets, inputs.q.shape[0])]
        assert all(torch.count_nonzero(got[name][rows]) == 0 for name in ("o", "dq")), "queries without keys"
    paired = torch.cat([q_lengths > 0, q_lengths.new_zeros(1, dtype=torch.bool)])
    rows = ~paired[row_ids(kv_offsets, inputs.k.shape[0])]
    assert all(torch.count_nonzero(got[name][rows]) == 0 for name in ("dk", "dv")), "keys without queries"


def _toy(q, k, v, device) -> Inputs:
    """Rows of one number each, in coordinate 0 of 16, one head; dO is 1 there."""

    def rows(numbers) -> torch.Tensor:
        x = torch.zeros(len(numbers), 1, 16, device=device)
        x[:, 0, 0] = torch.tensor(numbers, dtype=torch.float32)
        return x

    return Inputs(rows(q), rows(k), rows(v), None, None, rows([1.0] * len(q)))


def _first(results: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return results[name][:, 0, 0].cpu()


def empty_sequence_in_the_middle(impl: str, device="cpu") -> None:
    """O01: values computed by hand for lengths [2, 0, 1]."""
    inputs = _toy([1, 2, 3], [1, 2, 3], [1, 10, 100], device)
    inputs.q_offsets = offsets(2, 0, 1, device=device)
    got = run(inputs, impl, scale=1.0)
    expected = {
        "o": [7.579527, 8.927174, 100],
        "dq": [1.769507, 0.944942, 0],
        "dk": [-3.659392, 3.659392, 0],
        "dv": [0.388144, 1.611856, 1],
    }
    for name, numbers in expected.items():
        torch.testing.assert_close(_first(got, name), torch.tensor(numbers), rtol=1e-5, atol=1e-6, msg=name)


def queries_without_keys(impl: str, device="cpu") -> None:
    """O02: values by hand; the row without keys and the rows nobody asks are exact zeros."""
    inputs = _toy([1, 2, 3, 4, 5], [1, 2, 3, 4, 0.5, -0.5], [1, 2, 3, 4, 5, 6], device)
    inputs.q_offsets, inputs.kv_offsets = offsets(2, 1, 0, 2, device=device), offsets(1, 0, 3, 2, device=device)
    got = run(inputs, impl, scale=1.0)
    # Both queries of the first sequence see its one key, whose value is 1.
    expected = torch.tensor([1, 1, 0, 5.017986, 5.006693])
    torch.testing.assert_close(_first(got, "o"), expected, rtol=1e-5, atol=1e-6)
    for name, rows in (("o", [2]), ("dq", [2]), ("dk", [1, 2, 3]), ("dv", [1, 2, 3])):
        assert torch.count_nonzero(got[name][rows]) == 0, f"{name} rows {rows}: not exact zeros"
        assert bool(got[name].isfinite().all()), f"{name}: not finite"


def keys_without_queries(impl: str, device="cpu", dtype=torch.bfloat16) -> None:
    """O03: keys that nobody asks get zero gradients, and the sequence beside them is what it is alone."""
    inputs = make_inputs("jagged_attention", [0, 0, 50], [0, 1, 99], head_dim=32, dtype=dtype, device=device)
    got = run(inputs, impl)
    assert torch.count_nonzero(got["dk"][0]) == 0 and torch.count_nonzero(got["dv"][0]) == 0
    alone = Inputs(
        inputs.q, inputs.k[1:], inputs.v[1:], offsets(50, device=device), offsets(99, device=device), inputs.do
    )
    alone = run(alone, impl)
    for name in ("o", "dq"):
        assert torch.equal(got[name], alone[name]), name
    for name in ("dk", "dv"):
        assert torch.equal(got[name][1:], alone[name]), name


def everything_empty(impl: str, device="cpu") -> None:
    """O04: no rows, with three sequences or none."""
    for lengths in ((0, 0, 0), ()):
        inputs = make_inputs("jagged_attention", lengths, num_heads=4, head_dim=64, device=device)
        for name, value in run(inputs, impl).items():
            assert value.shape == (0, 4, 64), f"{name}: {tuple(value.shape)}"
    shared = make_inputs("jagged_attention", (0, 0), num_heads=4, head_dim=16, shared_q=3, device=device)
    got = run(shared, impl)
    assert got["o"].shape == (2, 3, 4, 16) and torch.count_nonzero(got["o"]) == 0
    assert torch.count_nonzero(got["dq"]) == 0


def spare_rows_are_zero(impl: str, device="cpu", dtype=torch.bfloat16) -> None:
    """O05: rows past the end are zeros in o and all gradients, whatever they held; the rest is the trimmed run."""
    inputs = make_inputs("jagged_attention", [130, 70, 101], num_heads=4, dtype=dtype, device=device, spare_rows=3)
    trimmed = Inputs(inputs.q[:301], inputs.k[:301], inputs.v[:301], inputs.q_offsets, None, inputs.do[:301])
    got, expected = run(inputs, impl), run(trimmed, impl)
    for name in got:
        assert torch.count_nonzero(got[name][301:]) == 0, f"{name}: rows past the end"
        assert torch.equal(got[name][:301], expected[name]), name


def neighbours_do_not_matter(impl: str, device="cpu", dtype=torch.float32, **keywords) -> None:
    """O10: NaN, then huge values, in the middle sequence change no bit of the others."""
    for first in (65, 1, 63, 64, 127, 128, 129):
        inputs = make_inputs("jagged_attention", [first, 7, 64], head_dim=16, dtype=dtype, device=device)
        outside = [*range(first), *range(first + 7, first + 71)]
        plain = run(inputs, impl, **keywords)
        for value in (float("nan"), 1e30):
            spoiled = inputs.leaves()
            for x in (spoiled.q, spoiled.k, spoiled.v, spoiled.do):
                x.detach()[first : first + 7] = value
            got = run(spoiled, impl, **keywords)
            for name in ("o", "dq", "dk", "dv"):
                assert torch.equal(got[name][outside], plain[name][outside]), f"length {first}, {value}: {name}"


def offsets_of_any_kind(impl: str, device="cpu") -> None:
    """O09: int32, int64 and strided int64 offsets give the same bits."""
    inputs = make_inputs("jagged_attention", [7, 0, 65, 3], device=device)
    wide = inputs.q_offsets
    strided = torch.stack([wide, wide * 0 - 1], dim=1)[:, 0]
    assert not strided.is_contiguous()
    expected = run(inputs, impl)
    for kind in (wide.int(), strided):
        inputs.q_offsets = kind
        for name, value in run(inputs, impl).items():
            assert torch.equal(value, expected[name]), f"{kind.dtype}, stride {kind.stride()}: {name}"


def views_of_a_fused_buffer(impl: str, device="cpu", dtype=torch.float32) -> None:
    """O12: q, k, v as strided views of one buffer whose first quarter is NaN; gradients land in the right slices."""
    buffer = torch.randn(130, 2048, device=device).to(dtype)
    buffer[:, :512] = float("nan")
    do = torch.randn(130, 4, 128, device=device).to(dtype)

    def call(split):
        leaf = buffer.clone().requires_grad_()
        _, v, q, k = (x.view(130, 4, 128) for x in leaf.split(512, dim=1))
        q, k, v = split(q), split(k), split(v)
        o = jagged_attention(q, k, v, offsets(100, 0, 30, device=device), impl=impl)
        o.backward(do)
        return o, leaf.grad

    got, expected = call(lambda x: x), call(lambda x: x.contiguous())
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert torch.count_nonzero(got[1][:, :512]) == 0 and bool(got[1].isfinite().all())


def last_column_counts(impl: str, device="cpu", dtype=torch.float32) -> None:
    """O14: head dimensions that are no powers of two; a score made in the last column alone."""
    for head_dim in (16, 40, 72, 80, 96, 104, 128, 192):
        inputs = make_inputs("jagged_attention", [70, 3], head_dim=head_dim, dtype=dtype, device=device)
        against_reference(impl, inputs)
        q = torch.zeros(2, 1, head_dim, device=device, dtype=dtype)
        q[0, 0, -1] = 2.0
        v = torch.zeros_like(q)
        v[0, 0, -1] = 1.0
        o = jagged_attention(q, q, v, offsets(2, device=device), scale=1.0, impl=impl)
        expected = torch.tensor([4.0, 0.0]).softmax(0)[0].item()
        assert abs(o[0, 0, -1].item() - expected) < (1e-5 if dtype == torch.float32 else 1e-2), head_dim


def own_keys_only(impl: str, device="cpu") -> None:
    """O15, O17: which keys have weight. v is one-hot by row, so o holds the weights."""
    for q_lengths, kv_lengths in (((3, 2), None), ((4, 1), (1, 6))):
        inputs = make_inputs("jagged_attention", q_lengths, kv_lengths, num_heads=1, device=device)
        keys = inputs.k.shape[0]
        inputs.v = torch.nn.functional.pad(torch.eye(keys, device=device), (0, 16 - keys)).unsqueeze(1)
        o = run(inputs, impl)["o"][:, 0]
        row_q, row_k = 0, 0
        for count_q, count_k in zip(q_lengths, kv_lengths or q_lengths, strict=True):
            own = o[row_q : row_q + count_q]
            assert bool((own[:, row_k : row_k + count_k] > 0).all()), "an own key has no weight"
            other = own.clone()
            other[:, row_k : row_k + count_k] = 0
            assert torch.count_nonzero(other) == 0, "a key of another sequence has weight"
            row_q, row_k = row_q + count_q, row_k + count_k


def window_is_symmetric(impl: str, device="cpu") -> None:
    """Query i sees keys i - w .. i + w of its own sequence, counted from the sequence's own start."""
    lengths, window = (5, 9), 2
    inputs = make_inputs("jagged_attention", lengths, num_heads=1, device=device)
    inputs.v = torch.nn.functional.pad(torch.eye(14, device=device), (0, 2)).unsqueeze(1)
    o = run(inputs, impl, window=window)["o"][:, 0, :14].cpu()
    i = torch.arange(14)
    sequence = (i >= 5).long()
    visible = (sequence[:, None] == sequence) & ((i[:, None] - i).abs() <= window)
    assert torch.equal(o > 0, visible)


def strict_products(impl: str, device="cpu") -> None:
    """O23: 1 + 2^-12 survives a float32 product, even where the process allows TF32."""
    q = torch.zeros(2, 1, 16, device=device)
    q[0, 0, 0] = 1 + 2**-12
    v = torch.zeros_like(q)
    v[0] = 1.0
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        o = jagged_attention(q, q, v, offsets(2, device=device), scale=1.0, impl=impl)
    finally:
        torch.set_float32_matmul_precision(before)
    # The score is 1.000488341; TF32 or bfloat16 would round it to 1, 9.6e-5 away in the result.
    expected = torch.sigmoid(torch.tensor((1 + 2**-12) ** 2, dtype=torch.float64)).item()
    assert abs(o[0, 0, 0].item() - expected) < 1e-6, o[0, 0, 0].item()


def company_does_not_matter(impl: str, device="cpu", dtype=torch.float32, **keywords) -> None:
    """O07: a sequence's bits are the same alone, in other orders, beside ten random companions, under other hints."""
    generator = torch.Generator().manual_seed(1)
    for length in (2, 9, 33, 100):
        own = make_inputs("jagged_attention", [length], dtype=dtype, device=device, seed=length)
        alone = run(own, impl, **keywords)
        for trial in range(4):
            lengths = torch.randint(0, 150, (10,), generator=generator).tolist()
            others = make_inputs("jagged_attention", lengths, dtype=dtype, device=device, seed=100 + trial)
            place = trial * 3
            before = sum(lengths[:place])

            def join(a: torch.Tensor, b: torch.Tensor, at: int = before) -> torch.Tensor:
                return torch.cat([a[:at], b, a[at:]])

            joined = Inputs(
                *(join(getattr(others, n), getattr(own, n)) for n in "qkv"),
                offsets(*lengths[:place], length, *lengths[place:], device=device),
                None,
                join(others.do, own.do),
            )
            hint = 4096 if trial % 2 else None
            got = run(joined, impl, max_q_len=hint, max_kv_len=hint, **keywords)
            for name in ("o", "dq", "dk", "dv"):
                assert torch.equal(got[name][before : before + length], alone[name]), f"{length}, {trial}: {name}"


def any_company_does_not_matter(impl: str) -> None:
    """O07 with short companions, and with one so long that every matrix library takes another path for its size."""
    company_does_not_matter(impl)
    own, other = (make_inputs("jagged_attention", [length], seed=length) for length in (400, 1000))
    alone = run(own, impl)
    joined = Inputs(
        *(torch.cat([getattr(own, n), getattr(other, n)]) for n in "qkv"),
        offsets(400, 1000),
        None,
        torch.cat([own.do, other.do]),
    )
    for name, value in run(joined, impl).items():
        if name in alone and value.dim():
            assert torch.equal(value[:400], alone[name]), name


def a_crowd_does_not_matter(impl: str) -> None:
    """1,025 short sequences on three threads, whose shares end at odd places: the bits of small batches."""
    inputs = make_inputs("jagged_attention", [5] * 1025, num_heads=1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        got = run(inputs, impl)
    finally:
        torch.set_num_threads(before)
    few = offsets(*[5] * 41)
    for start in range(0, 5125, 205):
        part = (x[start : start + 205] for x in (inputs.q, inputs.k, inputs.v))
        for name, value in run(Inputs(*part, few, None, inputs.do[start : start + 205]), impl).items():
            assert torch.equal(got[name][start : start + 205], value), f"rows from {start}: {name}"


def bias_has_its_gradient(impl: str, device="cpu", dtype=torch.float32) -> None:
    """Table and scores in all three forms: relative, relative across two lengths, time stamps."""
    table = torch.randn(2, 7, generator=torch.Generator().manual_seed(3)).to(device)
    inputs = make_inputs("jagged_attention", [20, 0, 1, 70], dtype=dtype, device=device)
    against_reference(impl, inputs, bias=Bias(table))
    times = torch.arange(91, device=device) ** 2
    against_reference(impl, inputs, bias=Bias(table, times), window=30)
    cross = make_inputs("jagged_attention", [20, 0, 1], [3, 5, 9], dtype=dtype, device=device)
    against_reference(impl, cross, bias=Bias(table))


def bias_by_hand(impl: str, device="cpu") -> None:
    """Two rows, zero scores, a table of three buckets: bucket = clamp(j - i + 1, 0, 2), so that 0 is the key before."""
    zeros = torch.zeros(2, 1, 16, device=device)
    v = torch.zeros_like(zeros)
    v[:, 0, 0], v[:, 0, 1] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    table = torch.tensor([[1.0, 2.0, 5.0]], device=device)
    o = jagged_attention(zeros, zeros, v, offsets(2, device=device), bias=Bias(table), impl=impl)
    expected = torch.tensor([[2.0, 5.0], [1.0, 2.0]]).softmax(1)
    torch.testing.assert_close(o[:, 0, :2].cpu(), expected)


def precision_is_strict(impl: str, device="cpu") -> None:
    """While an op multiplies float32, TF32 and bfloat16 are off; afterwards the process has its own setting back."""
    seen = []
    original = torch.bmm

    def watched(*arguments, **keywords):
        seen.append((torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision))
        return original(*arguments, **keywords)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with mock.patch.object(torch, "bmm", watched):
            run(make_inputs("jagged_attention", (5, 3), device=device), impl)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen and set(seen) == {("ieee", "ieee")}, set(seen)
