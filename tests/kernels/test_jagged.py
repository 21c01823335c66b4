"""Offsets and their checks, length laws, and the operations between packed and padded form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import jagged

lengths_lists = st.lists(st.integers(0, 9), min_size=0, max_size=6)


def offsets_of(*lengths: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return jagged.lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64), dtype)


@given(lengths=lengths_lists, spare=st.integers(0, 3), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_rows_know_their_sequence_and_position(lengths, spare, dtype):
    offsets = offsets_of(*lengths, dtype=dtype)
    total = sum(lengths) + spare
    ids = [b for b, n in enumerate(lengths) for _ in range(n)] + [len(lengths)] * spare
    own = [i for n in lengths for i in range(n)] + list(range(spare))
    assert jagged.row_ids(offsets, total).tolist() == ids
    assert jagged.positions(offsets, total).tolist() == own
    assert jagged.offsets_to_lengths(offsets).tolist() == lengths
    assert jagged.longest_length(offsets) == max(lengths, default=0)
    rows = jagged.zero_tail_(torch.ones(total, 2, 2), offsets)
    assert rows.sum().item() == 4 * sum(lengths)


class TestChecks:
    @pytest.mark.parametrize(
        "values, total, keywords, message",
        [
            ([0, 12, 8, 16], 16, {}, r"offsets\[2\] = 8 is below offsets\[1\] = 12; allowed: non-decreasing"),
            ([1, 4, 16], 16, {}, r"offsets\[0\] = 1; allowed: 0"),
            ([0, 4, 17], 16, {}, r"offsets\[2\] = 17; allowed: at most 16, the number of rows"),
            ([0, 17, 18], 16, {}, r"offsets\[1\] = 17; allowed: at most 16"),
            ([0, 4, 12], 16, {"strict": True}, r"offsets\[2\] = 12; allowed: 16, the number of rows"),
            ([0, 4, 12], 16, {"batch": 3}, "2 sequences; allowed: 3"),
            ([3], 16, {}, r"offsets\[0\] = 3; allowed: 0"),
        ],
    )
    def test_the_first_bad_index_is_named(self, values, total, keywords, message):
        with pytest.raises(ValueError, match=r"^x_offsets: " + message):
            jagged.check_offsets(torch.tensor(values), "x_offsets", total, **keywords)

    def test_a_hint_that_lies(self):
        with pytest.raises(ValueError, match=r"^max_q_len: 7, but o holds a sequence of 8 rows; allowed: >= 8"):
            jagged.check_offsets(offsets_of(3, 8), "o", 11, max_len=7, max_len_name="max_q_len")
        jagged.check_offsets(offsets_of(3, 8), "o", 11, max_len=8)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_good_offsets_pass(self, dtype):
        for lengths in ((), (0,), (0, 0), (3, 0, 5)):
            jagged.check_offsets(offsets_of(*lengths, dtype=dtype), "o", 8)
        jagged.check_offsets(torch.stack([offsets_of(3, 5)] * 2, 1)[:, 0], "o", 8, strict=True)

    def test_host_offsets_are_checked_on_every_call_even_when_switched_off(self, monkeypatch):
        monkeypatch.setenv("KERNELS_CHECK", "0")
        offsets = offsets_of(3, 5)
        jagged.check_offsets(offsets, "o", 8)
        offsets.numpy()[1] = 9  # unseen by torch's version counter
        with pytest.raises(ValueError, match=r"offsets\[2\] = 8 is below"):
            jagged.check_offsets(offsets, "o", 8)

    @pytest.fixture
    def copies(self, monkeypatch):
        """Treat host tensors as a GPU's, and count how often their values are fetched."""
        fetched = []
        original = torch.Tensor.cpu
        monkeypatch.setattr(jagged, "_on_host", lambda offsets: False)
        monkeypatch.setattr(torch.Tensor, "cpu", lambda self: fetched.append(self) or original(self).clone())
        return fetched

    def test_device_offsets_are_fetched_once_per_tensor_object(self, copies):
        offsets = offsets_of(3, 5)
        for _ in range(3):
            jagged.check_offsets(offsets, "o", 8, max_len=5)
        assert jagged.longest_length(offsets) == 5 and jagged.host_offsets(offsets).tolist() == [0, 3, 8]
        assert len(copies) == 1
        jagged.check_offsets(offsets.clone(), "o", 8)
        assert len(copies) == 2

    def test_known_device_offsets_still_answer_for_other_totals_and_hints(self, copies):
        offsets = offsets_of(3, 5)
        jagged.check_offsets(offsets, "o", 8)
        with pytest.raises(ValueError, match="at most 7"):
            jagged.check_offsets(offsets, "o", 7)
        with pytest.raises(ValueError, match="max_len: 4"):
            jagged.check_offsets(offsets, "o", 8, max_len=4)
        assert len(copies) == 1

    def test_device_offsets_are_checked_again_after_a_change(self, copies):
        offsets = offsets_of(3, 5)
        jagged.check_offsets(offsets, "o", 8)
        offsets[1] = 9
        with pytest.raises(ValueError, match=r"offsets\[2\] = 8 is below"):
            jagged.check_offsets(offsets, "o", 8)

    def test_the_switch_saves_the_look_at_the_device(self, copies, monkeypatch):
        monkeypatch.setenv("KERNELS_CHECK", "0")
        offsets = torch.tensor([0, 9, 8])
        jagged.check_offsets(offsets, "o", 8)
        assert copies == [] and jagged.longest_length(offsets) is None
        monkeypatch.setenv("KERNELS_CHECK", "1")
        with pytest.raises(ValueError, match=r"offsets\[2\] = 8 is below"):
            jagged.check_offsets(offsets, "o", 8)

    def test_a_fetched_but_unchecked_tensor_is_checked(self, copies):
        offsets = torch.tensor([0, 9, 8])
        jagged.host_offsets(offsets)
        with pytest.raises(ValueError, match=r"offsets\[2\] = 8 is below"):
            jagged.check_offsets(offsets, "o", 8)

    def test_tensors_without_values_pass(self):
        with FakeTensorMode():
            jagged.check_offsets(torch.empty(3, dtype=torch.int64), "o", 8)
        jagged.check_offsets(torch.empty(3, dtype=torch.int64, device="meta"), "o", 8)


class TestLengths:
    @pytest.mark.parametrize(
        "law, fill, low, high, mean",
        [
            ("full", None, 200, 200, 200),
            ("uniform", 1.0, 200, 200, 200),
            ("uniform", 0.5, 1, 200, 100.5),
            ("uniform", 0.7, 80, 200, 140),
            ("uniform", 0.3, 1, 120, 60.5),
        ],
    )
    def test_laws(self, law, fill, low, high, mean):
        drawn = jagged.sample_lengths(law, 20_000, 200, fill, torch.Generator().manual_seed(0))
        assert drawn.min().item() == low and drawn.max().item() == high
        assert abs(drawn.double().mean().item() - mean) < 1.5

    def test_long_tail(self):
        drawn = jagged.sample_lengths("longtail", 20_000, 1000, None, torch.Generator().manual_seed(0))
        assert drawn.min() >= 1 and drawn.max() == 1000
        assert abs(drawn.double().median().item() - 200) < 6
        again = jagged.sample_lengths("lognormal", 20_000, 1000, None, torch.Generator().manual_seed(0))
        assert torch.equal(drawn, again)

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (("zipf", 4, 8), "law: 'zipf'; allowed: full, uniform"),
            (("full", 4, 0), "max_len >= 1"),
            (("full", -1, 8), "batch >= 0"),
            (("uniform", 4, 8), "fill: missing"),
            (("uniform", 4, 8, 0.0), r"fill: 0.0; allowed: \(0, 1\]"),
            (("uniform", 4, 8, 1.1), r"fill: 1.1; allowed: \(0, 1\]"),
        ],
    )
    def test_bad_laws(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            jagged.sample_lengths(*arguments)


def test_truncation_drops_the_last_rows_and_their_gradient(poison):
    """O40: lengths [3, 0, 5] padded to 4 and back: 8 is lost, its gradient exactly zero."""
    values = torch.arange(1.0, 9.0).requires_grad_()
    offsets = offsets_of(3, 0, 5)
    padded = jagged.pad(values, offsets, 4)
    assert padded.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [4, 5, 6, 7]]
    packed = jagged.unpad(padded, offsets, 8)
    assert packed.tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    packed.sum().backward()
    assert values.grad.tolist() == [1] * 7 + [0]


def test_a_padded_batch_past_two_to_the_31_elements():
    """O40: B = 150,000, L = 300, D = 48. The shape is right, and the row index does not wrap."""
    with FakeTensorMode():
        padded = jagged._pad_op(torch.empty(1000, 48), torch.empty(150_001, dtype=torch.int32), 300, 0.0)
        assert padded.shape == (150_000, 300, 48) and padded.numel() == 2_160_000_000
    # The last row of the last sequence, as unpad computes it: int32 offsets, an index past 2^31 / 48 rows.
    offsets = torch.zeros(150_001, dtype=torch.int32)
    offsets[-1] = 1
    row = jagged.row_ids(offsets, 1) * 300 + jagged.positions(offsets, 1)
    assert row.dtype == torch.int64 and row.item() * 48 == 149_999 * 300 * 48 > 2**31 - 1


@given(lengths=lengths_lists, max_len=st.integers(0, 9), spare=st.integers(0, 2), width=st.integers(1, 2))
def test_pad_and_unpad(lengths, max_len, spare, width):
    total = sum(lengths) + spare
    values = torch.arange(1.0, total * width + 1).view(total, width)
    offsets = offsets_of(*lengths)
    padded = jagged.pad(values, offsets, max_len, value=-1.0)
    packed = jagged.unpad(padded, offsets, total)
    assert padded.shape == (len(lengths), max_len, width) and packed.shape == values.shape
    start = 0
    for b, n in enumerate(lengths):
        kept = min(n, max_len)
        assert torch.equal(padded[b, :kept], values[start : start + kept])
        assert bool((padded[b, kept:] == -1).all())
        assert torch.equal(packed[start : start + kept], values[start : start + kept])
        assert torch.count_nonzero(packed[start + kept : start + n]) == 0
        start += n
    assert torch.count_nonzero(packed[start:]) == 0


@given(data=st.data(), a_lengths=lengths_lists, spare=st.integers(0, 2))
def test_concatenate(data, a_lengths, spare):
    b_lengths = data.draw(st.lists(st.integers(0, 9), min_size=len(a_lengths), max_size=len(a_lengths)))
    a, b = torch.randn(sum(a_lengths) + spare, 2), torch.randn(sum(b_lengths) + spare, 2)
    joined, offsets = jagged.concatenate(a, offsets_of(*a_lengths), b, offsets_of(*b_lengths, dtype=torch.int32))
    parts_a, parts_b = (x[: sum(n)].split(n) if n else () for x, n in ((a, a_lengths), (b, b_lengths)))
    expected = [part for pair in zip(parts_a, parts_b, strict=True) for part in pair]
    expected.append(torch.zeros(2 * spare, 2))
    assert torch.equal(joined, torch.cat(expected))
    assert offsets.diff().tolist() == [m + n for m, n in zip(a_lengths, b_lengths, strict=True)]


def test_nan_past_the_end_goes_nowhere(poison):
    values = torch.randn(10, 2)
    values[8:] = float("nan")
    offsets = offsets_of(3, 0, 5)
    assert bool(jagged.pad(values, offsets, 6).isfinite().all())
    joined, _ = jagged.concatenate(values, offsets, values, offsets)
    assert bool(joined.isfinite().all())
    padded = torch.randn(3, 6, 2)
    padded[0, 3:] = padded[1] = padded[2, 5:] = float("nan")
    assert bool(jagged.unpad(padded, offsets, 10).isfinite().all())


def test_gradients_by_finite_differences():
    offsets, other = offsets_of(3, 0, 5), offsets_of(1, 2, 1)
    a, b = (
        torch.randn(9, 2, dtype=torch.float64).requires_grad_(),
        torch.randn(6, 2, dtype=torch.float64).requires_grad_(),
    )
    padded = torch.randn(3, 4, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: jagged.pad(x, offsets, 4), (a,))
    assert torch.autograd.gradcheck(lambda x: jagged.unpad(x, offsets, 9), (padded,))
    assert torch.autograd.gradcheck(lambda x, y: jagged.concatenate(x, offsets, y, other)[0], (a, b))
    assert torch.autograd.gradgradcheck(lambda x: jagged.pad(x, offsets, 4), (a,))
    assert torch.autograd.gradgradcheck(lambda x, y: jagged.concatenate(x, offsets, y, other)[0], (a, b))


def test_torch_library_accepts_the_ops():
    offsets, other = offsets_of(3, 0, 5), offsets_of(1, 2, 1)
    a, b = torch.randn(9, 2, requires_grad=True), torch.randn(6, 2, requires_grad=True)
    torch.library.opcheck(jagged._pad_op, (a, offsets, 4, 0.0))
    torch.library.opcheck(jagged._unpad_op, (torch.randn(3, 4, 2, requires_grad=True), offsets, 9))
    torch.library.opcheck(jagged._concatenate_op, (a, offsets, b, other))
    torch.library.opcheck(jagged._split_op, (torch.randn(15, 2, requires_grad=True), offsets, other, 9))


def test_bad_arguments_are_named():
    offsets = offsets_of(3, 5)
    with pytest.raises(ValueError, match="max_len: -1; allowed: an integer >= 0"):
        jagged.pad(torch.randn(8), offsets, -1)
    with pytest.raises(ValueError, match="offsets: 2 sequences; allowed: 3"):
        jagged.unpad(torch.randn(3, 4), offsets, 8)
    with pytest.raises(ValueError, match=r"b: rows \(3,\) of torch.float32 on cpu; allowed: \(2,\)"):
        jagged.concatenate(torch.randn(8, 2), offsets, torch.randn(8, 3), offsets)
    with pytest.raises(ValueError, match=r"dtype: torch\.int16; allowed"):
        jagged.lengths_to_offsets(torch.tensor([1]), torch.int16)
    with pytest.raises(ValueError, match="num_buckets: 0; allowed: >= 1"):
        jagged.time_buckets(torch.tensor([1]), 0)


def test_time_buckets_are_exact_at_powers_of_two():
    for exponent in range(1, 50):
        edge = 2**exponent
        gaps = torch.tensor([edge - 2, edge - 1, -(edge - 1), edge])
        assert jagged.time_buckets(gaps, 64).tolist() == [exponent - 1 if edge > 2 else 0, exponent, exponent, exponent]
    assert jagged.time_buckets(torch.tensor([0, 1, 7, 8, 10**12]), 5).tolist() == [0, 1, 3, 3, 4]
    assert jagged.time_buckets(torch.tensor([0.5, 1.0, 2.9, 3.0]), 9).tolist() == [0, 1, 1, 2]
